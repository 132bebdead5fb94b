"""Show the progress of a run in the terminal, react to Ctrl-C, and print how the run ended.

In a terminal the progress is one line that is redrawn; elsewhere it is a line every few seconds, on stderr.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from speedlab.cli.cluster import EngineOptions, StopRequests
from speedlab.cluster import RankError, Run
from speedlab.cluster.errors import name_ranks
from speedlab.cluster.known_runs import RunError, saved_step
from speedlab.cluster.run_commands import CommandFuture
from speedlab.config import RunConfig
from speedlab.display.formatting import bytes_text, count_text, seconds_text
from speedlab.telemetry.checkpoint_index import newest
from speedlab.telemetry.feed import Feed
from speedlab.telemetry.records import RunState
from speedlab.telemetry.run_folder import RunFolderError

_REDRAW_SECONDS = 0.2
_PLAIN_SECONDS = 10.0
_BAR_WIDTH = 12
_SPEED_STEPS = 20


class ProgressBar:
    """Draws the progress of a run from its `feed`; `say` prints a line of text above the bar."""

    def __init__(self, feed: Feed, stream: TextIO | None = None) -> None:
        self._feed = feed
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._last_drawn = float("-inf")
        self._drawn = ""

    def update(self, *, force: bool = False) -> None:
        """Redraw the bar if enough time has passed.

        Args:
            force: redraw in any case.
        """
        now = time.monotonic()
        if not force and now - self._last_drawn < (_REDRAW_SECONDS if self._live else _PLAIN_SECONDS):
            return
        width = shutil.get_terminal_size().columns - 1 if self._live else None
        line = progress_line(self._feed, width)
        if line == self._drawn and not force:
            return
        self._last_drawn, self._drawn = now, line
        if self._live:
            self._stream.write(f"\r\x1b[K{line[:width]}")
        else:
            self._stream.write(f"{line}\n")
        self._stream.flush()

    def say(self, text: str) -> None:
        """Print a permanent line above the bar.

        Args:
            text: the line.
        """
        self._stream.write(f"\r\x1b[K{text}\n{self._drawn}" if self._live and self._drawn else f"{text}\n")
        self._stream.flush()

    def close(self) -> None:
        """Draw a last time and end the line."""
        self.update(force=True)
        if self._live:
            self._stream.write("\n")
            self._stream.flush()


_DROPPED = ("zero", "bar", "heldout", "speed", "loss")
"""Parts omitted in a narrow terminal, in this order. Step and remaining time always stay."""


def progress_line(feed: Feed, width: int | None = None) -> str:
    """Return 'step 120/2,000 ━━━━━━────── 41.2 k tokens/s · loss 5.91 (held-out 6.02) · zero 2 · 3 min 5 s left'.

    Args:
        feed: records of the run.
        width: maximum number of columns; parts are omitted to fit. None: no limit.
    """
    parts = _parts(feed)
    line = _joined(parts)
    # Omit one part after the other until the line fits.
    for name in _DROPPED:
        if width is None or len(line) <= width:
            break
        parts.pop(name, None)
        line = _joined(parts)
    return line


def _parts(feed: Feed) -> dict[str, str]:
    status, last = feed.status, feed.last
    step = last.step if last is not None else status.step
    filled = _BAR_WIDTH * step // max(1, status.steps)
    parts = {"step": f"step {step:,}/{status.steps:,}", "bar": "━" * filled + "─" * (_BAR_WIDTH - filled)}
    if last is None:
        return {**parts, "speed": str(status.state)}
    recent = feed.records[last.rank][-_SPEED_STEPS:]
    seconds = sum(record.seconds for record in recent)
    speed = count_text(sum(record.tokens for record in recent) / seconds if seconds else 0)
    parts |= {"speed": f"{speed} tokens/s", "loss": f"loss {last.loss:.3f}"}
    heldout = feed.records[last.rank].heldout_loss
    if heldout is not None:
        parts["heldout"] = f"(held-out {heldout:.3f})"
    left = (status.steps - step) * seconds / len(recent)
    ending = f"{seconds_text(left)} left" if left and status.state == "running" else str(status.state)
    return {**parts, "zero": f"zero {last.zero_stage}", "left": ending}


def _joined(parts: Mapping[str, str]) -> str:
    groups = (("step", "bar", "speed"), ("loss", "heldout"), ("zero",), ("left",))
    texts = (" ".join(parts[name] for name in group if name in parts) for group in groups)
    return " · ".join(text for text in texts if text)


_POLL_SECONDS = 0.2


def follow(run: Run, where: EngineOptions, word: CommandFuture | None = None) -> int:
    """Show a run's progress until it rests: finished, failed or stopped.

    Args:
        run: the run, on a cluster.
        where: the engine options, for the command that resumes the run.
        word: future of the command that resumed the run; its error is reported.

    Returns:
        The exit status of the command.
    """
    assert run.cluster is not None
    progress = ProgressBar(run.feed)
    unsubscribe = run.cluster.output.subscribe(lambda ranks, stream, text: progress.say(_by_rank(ranks, text)))
    try:
        with StopRequests() as requests:
            state = _until_rest(run, progress, requests)
            if word is not None:
                word.wait()
            if state is RunState.FINISHED and saved_step(run.folder) != run.step:
                run.save().wait()  # The engines, and their memory, end with the command.
    except (RankError, RunError) as error:
        progress.close()
        print(f"{error}\n{_standing(run, where)}", file=sys.stderr)
        return 1
    finally:
        unsubscribe()
    progress.close()
    print(_standing(run, where), file=sys.stderr)
    return 0 if state is RunState.FINISHED else 130 if requests.count else 1


def _until_rest(run: Run, progress: ProgressBar, requests: StopRequests) -> RunState:
    """Wait for the end of the run.

    The first request saves and stops after the step, the second interrupts the ranks.
    """
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


def _show_proof(run: Run, progress: ProgressBar, seen: int) -> int:
    """Print the proof when it exists: all of it if the full proof was requested, otherwise only problems.

    `seen` is the number of events before. Return the number of events so far.
    """
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
    """Return the state of the run, its checkpoint, and the command that resumes it."""
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
    """Return the command that resumes the run from the current folder; None without a checkpoint.

    Args:
        run: the run.
        where: the engine options to repeat.
    """
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
    """Return the run's name if it identifies the run, otherwise the path of its folder."""
    if run.folder.path.parent == RunConfig().folder.resolve():
        return [run.name]
    relative = os.path.relpath(run.folder.path)
    return [str(run.folder.path) if relative.startswith(os.pardir) else relative]
