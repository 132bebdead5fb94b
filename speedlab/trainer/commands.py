"""The commands of a run (pause, resume, save, reshape, ...): a table with their arguments and actions.

1. Rank 0 reads the mailbox and shares its commands with all ranks.
2. The table names the arguments of a command and their kinds. They are checked first.
3. Every rank plans the command without collectives. If planning fails on one rank, all ranks give the same answer, and
   nothing has changed.
4. All ranks execute the command together. If that fails on one rank, all ranks reconnect.
   - If the command changes nothing, it is refused and the run continues.
   - Otherwise the ranks may differ, and the run fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from speedlab.config import ConfigError
from speedlab.config.errors import unknown_key
from speedlab.optim.lr_schedule import follow_schedule
from speedlab.telemetry.cell_outcomes import cell_path
from speedlab.telemetry.checkpoint_index import CheckpointError, find_checkpoint, go_back_to, numbered_name, step_of
from speedlab.telemetry.current_config import CHANGES, changed_config, shape_of
from speedlab.telemetry.records import RunState
from speedlab.telemetry.run_folder import RunCommand
from speedlab.trainer.collective_errors import CommandRefused, RanksDiverged, agreed, together
from speedlab.trainer.live_cells import CutOff, run_between_steps
from speedlab.trainer.reporting import Reporter
from speedlab.trainer.training_run import Training


class CommandResult(NamedTuple):
    """The event that reports a finished command."""

    kind: str
    text: str
    details: Mapping[str, Any] = {}


Action = Callable[[], CommandResult]


@dataclass(frozen=True, kw_only=True)
class Argument:
    """One argument of a command. None means that the argument is not given.

    Attributes:
        says: Description of valid values, for messages.
        fits: Returns whether a value is valid.
    """

    says: str
    fits: Callable[[Any], bool]


@dataclass(frozen=True, kw_only=True)
class CommandSpec:
    """One entry of the table of commands.

    Attributes:
        plan: Checks on one rank, without changing anything, whether the command is possible. Returns its action or
            raises ConfigError.
        arguments: Arguments by name.
        changes: Whether a failed action may leave ranks with different states.
    """

    plan: Callable[..., Action]
    arguments: Mapping[str, Argument]
    changes: bool = False


def run_pending_commands(training: Training, reporter: Reporter) -> None:
    """Execute all pending commands in order. Collective.

    A command that continues the run, but was sent before an interrupt, is refused.

    Args:
        training: The run of this rank.
        reporter: Writes the answers.

    Raises:
        CutOff: If an interrupt ended a cell.
    """
    commands = None
    if training.world.rank == 0:
        commands = [(asdict(command), _is_overtaken(training, command)) for command in reporter.waiting()]
    # Rank 0 decides which commands are overtaken, so that all ranks act alike.
    for fields, overtaken in training.control.share(commands):
        command = RunCommand(**fields)
        if overtaken:
            _refuse_overtaken(reporter, command)
        else:
            _carry_out(training, reporter, command)


def refuse_overtaken(training: Training, reporter: Reporter) -> None:
    """Refuse pending commands that would continue the run but were sent before the interrupt that ended it.

    Otherwise a later advance would execute them. Only rank 0 finds commands.

    Args:
        training: The run of this rank.
        reporter: Writes the answers.
    """
    for command in reporter.waiting():
        if not _is_overtaken(training, command):
            return
        _refuse_overtaken(reporter, command)


def _is_overtaken(training: Training, command: RunCommand) -> bool:
    return command.word in ("resume", "step") and command.time < training.interruption.came_at


def _refuse_overtaken(reporter: Reporter, command: RunCommand) -> None:
    text = f"{command.word}: the run was interrupted after this was asked for; ask again to go on"
    reporter.answer(command.number, "warning", text, error=True)


def _carry_out(training: Training, reporter: Reporter, command: RunCommand) -> None:
    start = time.perf_counter()
    try:
        answer = _act(training, command)
    except CommandRefused as refusal:
        reporter.answer(command.number, "warning", f"{command.word}: {refusal}", error=True)
        return
    except CutOff as cut:
        seconds = time.perf_counter() - start
        details = {"cell": command.arguments["cell"], "failed": cut.failed, "seconds": seconds}
        reporter.answer(command.number, "looked", "a cell that was interrupted", **details)
        raise
    reporter.answer(command.number, answer.kind, answer.text, **answer.details, seconds=time.perf_counter() - start)


def _act(training: Training, command: RunCommand) -> CommandResult:
    """Execute one command.

    Raises:
        CommandRefused: On all ranks, if nothing has changed.
        RanksDiverged: If the ranks may differ.
    """
    # 2: arguments.
    word = WORDS[command.word]
    if training.state in (RunState.STOPPED, RunState.FINISHED) and command.word not in _ALSO_AT_THE_END:
        raise CommandRefused(f"the run is {training.state.value}; {_GOES_ON[training.state]}")
    problem = _problem(word, command.arguments)
    if problem is not None:
        raise CommandRefused(problem)
    # 3: plan without collectives; a refusal changes nothing.
    action = agreed(training.control, lambda: _planned(word, training, command.arguments))
    # If the action is cut off while this is True, the run can only continue from a checkpoint.
    training.changing = word.changes
    try:
        # 4: execute together.
        answer = together(training, action)
    except CommandRefused:
        training.changing = False
        raise
    except RanksDiverged as parted:
        # The ranks may differ now, so `changing` stays True and the run fails.
        if word.changes and not parted.alike:
            raise
        training.changing = False
        raise CommandRefused(str(parted)) from parted
    training.changing = False
    return answer


_ALSO_AT_THE_END = ("save", "stop", "resume", "live", "prove")
_GOES_ON = {
    RunState.STOPPED: "run.resume() goes on with it",
    RunState.FINISHED: "run.resume(steps=…) makes it longer",
}


def _planned(word: CommandSpec, training: Training, arguments: Mapping[str, Any]) -> Action:
    try:
        return word.plan(training, **arguments)
    except ConfigError:
        raise
    except Exception as error:  # Planning changes nothing, so the run can continue after any error.
        raise ConfigError(f"{type(error).__name__}: {error}") from error


def _problem(word: CommandSpec, arguments: Mapping[str, Any]) -> str | None:
    for name, value in arguments.items():
        if name not in word.arguments:
            return unknown_key(name, tuple(word.arguments), {}) if word.arguments else f"it takes no {name!r}"
        known = word.arguments[name]
        if value is not None and not known.fits(value):
            return f"{name} is {value!r}; it is {known.says}"
    return None


# ---- the commands ----------------------------------------------------------------------------------------------------


def _pause(training: Training) -> Action:
    def pause() -> CommandResult:
        training.state = RunState.PAUSED
        return CommandResult("paused", f"after step {training.engine.global_step}")

    return pause


def _resume(training: Training, step: int | None = None, tag: str | None = None, steps: int | None = None) -> Action:
    """Continue from the current step or from a checkpoint, up to step `steps`."""
    folder = training.folder.path / "checkpoints"
    try:
        path = find_checkpoint(folder, tag, step=step) if tag is not None or step is not None else None
        at = training.engine.global_step if path is None else step_of(path)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    end = steps or training.config.steps
    if at >= end:
        raise ConfigError(f"it would go on from step {at} and ends at {end}; steps={2 * at} would make it longer")

    def resume() -> CommandResult:
        reported = []
        if path is not None:
            training.engine.load_checkpoint(path)
            reported.append(f"from {path.name}")
        if end != training.config.steps:
            training.config = training.config.replace(steps=end)
            reported.append(f"to step {end}")
        # The number of steps may have changed, and a loaded scheduler has the old one.
        follow_schedule(training.engine.scheduler, training.config)
        if training.world.rank == 0:
            if path is not None:
                go_back_to(path)
            # A restarted run must end at the same step.
            training.folder.update_config(training.folder.config.replace(steps=end))
        training.state, training.budget = RunState.RUNNING, None
        return CommandResult("resumed", " ".join(reported))

    return resume


def _step(training: Training, n: int | None = None) -> Action:
    count = n or 1

    def step() -> CommandResult:
        training.state, training.budget = RunState.RUNNING, count
        return CommandResult("resumed", f"for {count} step{'s' if count > 1 else ''}")

    return step


def _stop(training: Training) -> Action:
    def stop() -> CommandResult:
        if training.state is not RunState.FINISHED:
            training.state = RunState.STOPPED
        return CommandResult("stopped", f"after step {training.engine.global_step}")

    return stop


def save(training: Training, tag: str | None = None) -> Action:
    """Plan a checkpoint with the given name, or with a name made from the current step.

    Args:
        training: The run of this rank.
        tag: Name of the checkpoint's folder.

    Returns:
        The action that writes the checkpoint.

    Raises:
        ConfigError: If the folder exists already.
    """
    folder = training.folder.path / "checkpoints"
    target = folder / (tag or numbered_name(folder, training.engine.global_step))
    if target.exists():
        raise ConfigError(f"{target} exists already and is never overwritten; give another tag or move it away")

    def written() -> CommandResult:
        path = training.engine.save_checkpoint(target.parent, target.name)
        return CommandResult("checkpoint", path.name, {"bytes": sum(file.stat().st_size for file in path.iterdir())})

    return written


def _live(training: Training, cell: str, ranks: list[int] | None = None, asks: bool = False) -> Action:
    """Run a cell of the run folder on `ranks`, or on all ranks; see `run_between_steps`."""
    size = training.world.size
    where = range(size) if ranks is None else ranks
    if training.cells is None:
        raise ConfigError("these engines take no cells: no cluster has started them")
    # Take the code before other checks, so that the file of a refused cell is removed, too.
    code = training.cells.take(cell_path(training.folder.path, cell)) if training.world.rank == 0 else ""
    if not where:
        raise ConfigError(f"no rank was named; the run has ranks 0 to {size - 1}")
    if missing := [rank for rank in where if rank >= size]:
        raise ConfigError(f"there is no rank {missing[0]}; the run has ranks 0 to {size - 1}")

    def look() -> CommandResult:
        failed = run_between_steps(training, training.control.share(code), cell, where, asks=asks)
        return CommandResult("looked", f"a cell on {len(set(where))} of {size} ranks", {"cell": cell, "failed": failed})

    return look


def _prove(training: Training) -> Action:
    def prove() -> CommandResult:
        return CommandResult(*training.first_batch.prove())

    return prove


def _reshape(training: Training, **changes: Any) -> Action:
    size = training.world.size
    wanted = changed_config(training.config, size, built_in=training.built_in, **changes)
    before, named = shape_of(training.config, size), training.shape_text

    def reshape() -> CommandResult:
        through = training.move_to(wanted)
        details = {"before": before, "after": shape_of(training.config, size), "through": through}
        return CommandResult("reshaped", f"{named} → {training.shape_text}", details)

    return reshape


# ---- the table -------------------------------------------------------------------------------------------------------


def _whole(least: int) -> Argument:
    return Argument(
        says=f"a whole number of at least {least}",
        fits=lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least,
    )


def _names_a_folder(tag: Any) -> bool:
    return isinstance(tag, str) and bool(tag) and Path(tag).name == tag and not tag.startswith(".")


_TAG = Argument(says="the name of a folder: letters, digits, '-' and '_'", fits=_names_a_folder)
_CELL = Argument(says="the name of a cell", fits=lambda value: isinstance(value, str) and value.isalnum())
_RANKS = Argument(
    says="a list of ranks", fits=lambda value: isinstance(value, list) and all(_whole(0).fits(rank) for rank in value)
)
_SWITCH = Argument(says="true or false", fits=lambda value: isinstance(value, bool))
_CHANGE = {
    "zero": _whole(0),
    "schedule": Argument(says="the name of a schedule", fits=lambda value: isinstance(value, str)),
    "sequence": _SWITCH,
    "cp_pad": _SWITCH,
    "cut": Argument(
        says="a list of blocks for each pipeline stage",
        fits=lambda value: isinstance(value, list) and all(_whole(0).fits(count) for count in value),
    ),
    "offload": Argument(
        says="a mapping of optimizer or parameters to none, host or disk", fits=lambda value: isinstance(value, Mapping)
    ),
}

WORDS: dict[str, CommandSpec] = {
    "pause": CommandSpec(plan=_pause, arguments={}),
    "resume": CommandSpec(plan=_resume, arguments={"step": _whole(0), "tag": _TAG, "steps": _whole(1)}, changes=True),
    "step": CommandSpec(plan=_step, arguments={"n": _whole(1)}),
    "stop": CommandSpec(plan=_stop, arguments={}),
    "save": CommandSpec(plan=save, arguments={"tag": _TAG}),
    "reshape": CommandSpec(
        plan=_reshape, arguments={name: _CHANGE.get(name, _whole(1)) for name in CHANGES}, changes=True
    ),
    "prove": CommandSpec(plan=_prove, arguments={}),
    "live": CommandSpec(plan=_live, arguments={"cell": _CELL, "ranks": _RANKS, "asks": _SWITCH}),
}
"""All commands of `telemetry.run_folder.CONTROL_WORDS`."""
