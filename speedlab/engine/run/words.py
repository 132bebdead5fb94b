"""Control words: what a person may ask of a run, as a table of words and what each does, on all ranks alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from speedlab.config import ConfigError
from speedlab.engine.checkpoint import CheckpointError
from speedlab.engine.run.reporting import Reporter
from speedlab.engine.run.training import Training
from speedlab.telemetry.folder import Command
from speedlab.telemetry.records import RunState
from speedlab.telemetry.shape import changed_config, shape_of


class Answer(NamedTuple):
    """What a word has done: the event that says so."""

    kind: str
    text: str = ""
    details: dict[str, Any] = {}  # noqa: RUF012  # of a tuple; read only


def carry_out_pending(training: Training, reporter: Reporter) -> None:
    """Every control word that waits, in order; rank 0 reads the mailbox, all act on what it read. Collective."""
    commands = None
    if training.world.rank == 0:
        waiting = training.folder.pending(reporter.last_command)
        commands = [[command.number, command.word, command.arguments] for command in waiting]
    for number, word, arguments in training.control.share(commands):
        if training.state in (RunState.STOPPED, RunState.FINISHED) and word not in ("save", "stop"):
            reporter.answer(number, "warning", f"{word}: the run is {training.state.value}", error=True)
            continue
        _carry_out(training, reporter, Command(number=number, word=word, arguments=arguments))


def _carry_out(training: Training, reporter: Reporter, command: Command) -> None:
    start = time.perf_counter()
    try:
        answer = WORDS[command.word](training, **command.arguments)
    except (CheckpointError, ConfigError, ValueError, TypeError) as error:
        reporter.answer(command.number, "warning", f"{command.word}: {error}", error=True)
        return
    reporter.answer(command.number, answer.kind, answer.text, **answer.details, seconds=time.perf_counter() - start)


def _pause(training: Training) -> Answer:
    training.state = RunState.PAUSED
    return Answer("paused", f"after step {training.engine.global_step}")


def _resume(training: Training, step: int | None = None) -> Answer:
    text = ""
    if step is not None:
        path, _ = training.engine.load_checkpoint(training.folder.path / "checkpoints", f"step-{step:06d}")
        text = f"from {path.name}"
    training.state, training.budget = RunState.RUNNING, None
    return Answer("resumed", text)


def _step(training: Training, n: int = 1) -> Answer:
    if not isinstance(n, int) or n < 1:
        raise ValueError(f"step: n is {n!r}; it is a whole number of at least 1")
    training.state, training.budget = RunState.RUNNING, n
    return Answer("resumed", f"for {n} step{'s' if n > 1 else ''}")


def _stop(training: Training) -> Answer:
    if training.state is not RunState.FINISHED:
        training.state = RunState.STOPPED
    return Answer("stopped", f"after step {training.engine.global_step}")


def _save(training: Training, tag: str | None = None) -> Answer:
    if tag is not None and (not tag or Path(tag).name != tag or tag.startswith(".")):
        raise ValueError(f"tag {tag!r} cannot name a folder; use letters, digits, '-' and '_'")
    path = training.engine.save_checkpoint(training.folder.path / "checkpoints", tag)
    return Answer("checkpoint", path.name, {"bytes": sum(file.stat().st_size for file in path.iterdir())})


def _reshape(training: Training, **changes: Any) -> Answer:
    size = training.world.size
    wanted = changed_config(training.config, size, built_in=training.built_in, **changes)
    before, named = shape_of(training.config, size), training.shape_text
    through = training.move_to(wanted)
    details = {"before": before, "after": shape_of(training.config, size), "through": through}
    return Answer("reshaped", f"{named} → {training.shape_text}", details)


WORDS: dict[str, Callable[..., Answer]] = {
    "pause": _pause,
    "resume": _resume,
    "step": _step,
    "stop": _stop,
    "save": _save,
    "reshape": _reshape,
}
