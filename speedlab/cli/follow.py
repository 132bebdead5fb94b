"""A run in a terminal: its progress until it rests, what Ctrl-C does, and what is said of it afterwards."""

from __future__ import annotations

import os
import shlex
import sys

from speedlab.cli.engines import EngineOptions, StopRequests
from speedlab.cli.progress import Progress
from speedlab.cluster import RankError, Run
from speedlab.cluster.errors import name_ranks
from speedlab.cluster.known_runs import RunError, saved_step
from speedlab.cluster.words import Pending
from speedlab.config import RunConfig
from speedlab.display.formatting import bytes_text
from speedlab.telemetry.checkpoints import newest
from speedlab.telemetry.folder import RunFolderError
from speedlab.telemetry.records import RunState

_POLL_SECONDS = 0.2


def follow(run: Run, where: EngineOptions, word: Pending | None = None) -> int:
    """Show a run's progress until it rests; returns the command's exit status. `word`: what made it go on, whose
    refusal is told."""
    assert run.cluster is not None
    progress = Progress(run.feed)
    unsubscribe = run.cluster.output.subscribe(lambda ranks, stream, text: progress.say(_by_rank(ranks, text)))
    try:
        with StopRequests() as requests:
            state = _until_rest(run, progress, requests)
            if word is not None:
                word.wait()
            if state is RunState.FINISHED and saved_step(run.folder) != run.step:
                run.save().wait()  # The engines end with the command, and with them what they hold.
    except (RankError, RunError) as error:
        progress.close()
        print(f"{error}\n{_standing(run, where)}", file=sys.stderr)
        return 1
    finally:
        unsubscribe()
    progress.close()
    print(_standing(run, where), file=sys.stderr)
    return 0 if state is RunState.FINISHED else 130 if requests.count else 1


def _until_rest(run: Run, progress: Progress, requests: StopRequests) -> RunState:
    """Wait for the end of the run. A first request saves and stops after the step, a second interrupts the ranks."""
    assert run.cluster is not None
    answered, events = 0, len(run.events)
    while True:
        try:
            state = run.wait(timeout=_POLL_SECONDS)
            _show_proof(run, progress, events)
            return state
        except TimeoutError:
            events = _show_proof(run, progress, events)
            progress.update()
        if requests.count > answered == 0:
            progress.say("saving, then stopping after this step; Ctrl-C again stops at once")
            run.save()
            run.stop()
        elif requests.count > answered:
            progress.say("interrupting the ranks")
            run.cluster.interrupt()
            return run.state
        answered = requests.count


def _show_proof(run: Run, progress: Progress, seen: int) -> int:
    """Print the proof once it is there: all of it if all was asked for, else what needs a look. Returns how many events
    were looked at; `seen` were before."""
    events = run.events
    if any(event.kind == "proof" for event in events[seen:]):
        try:
            proof = run.proof()
        except (RunError, RunFolderError) as error:
            progress.say(str(error))
        else:
            progress.say(str(proof) if run.config.proof == "full" else proof.short(shlex.join(_name_of(run))))
    return len(events)


def _by_rank(ranks: list[int], text: str) -> str:
    return "\n".join(f"{name_ranks(ranks)}: {line}" for line in text.splitlines())


def _standing(run: Run, where: EngineOptions) -> str:
    """What is left of the run, where, and how it goes on."""
    run.feed.poll(files=True)
    lines = [f"{run.name}: {run.state} at step {run.step} of {run.config.steps}"]
    kept = newest(run.folder.path / "checkpoints")
    if kept is not None:
        size = sum(file.stat().st_size for file in kept.path.iterdir())
        lines.append(f"checkpoint: {kept.path} ({bytes_text(size)})")
    lines.append(f"folder:     {run.folder.path}   (speedlab report {shlex.join(_name_of(run))})")
    if (command := resume_command(run, where)) is not None:
        lines.append(f"resume:     {command}")
    return "\n".join(lines)


def resume_command(run: Run, where: EngineOptions) -> str | None:
    """The line with which the run goes on, typed in this folder, in engines like these; None without a checkpoint."""
    kept = newest(run.folder.path / "checkpoints")
    if kept is None:
        return None
    default = EngineOptions()
    words = ["speedlab", "train", "--resume", *_name_of(run)]
    if kept.step >= run.config.steps:
        words += ["--steps", str(2 * run.config.steps)]
    for name in ("device", "cluster"):
        if getattr(where, name) != getattr(default, name):
            words += [f"--{name}", getattr(where, name)]
    return shlex.join(words + (["--keep-engines"] if where.keep_engines else []))


def _name_of(run: Run) -> list[str]:
    """Its name where that says which run it is, else the path of its folder."""
    if run.folder.path.parent == RunConfig().folder.resolve():
        return [run.name]
    relative = os.path.relpath(run.folder.path)
    return [str(run.folder.path) if relative.startswith(os.pardir) else relative]
