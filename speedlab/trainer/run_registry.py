"""The runs that an engine process holds, and the functions that the cluster calls on every rank.

The cluster submits `advance` as a task. It returns when the run pauses or ends. The engine stays in this process, so
that a paused run can be inspected and continued.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from speedlab.comm import CommStats, Group, join, leave
from speedlab.config import ConfigError
from speedlab.models import generate as generate_tokens
from speedlab.telemetry.checkpoint_index import newest
from speedlab.telemetry.records import RunState
from speedlab.telemetry.run_folder import RunFolder, RunFolderError
from speedlab.trainer.cell_runner import CellRunner
from speedlab.trainer.collective_errors import CommandRefused, RanksDiverged, agreed
from speedlab.trainer.trainer import Trainer
from speedlab.trainer.training_run import OwnModel

_trainers: dict[Path, Trainer] = {}
"""Runs of this process, by folder. At most one is alive, because each run fills the device."""


@contextmanager
def _gradients_on() -> Iterator[None]:
    """Enable gradients inside this context and after it.

    An interrupt between two lines of `no_grad` would leave gradients disabled.
    """
    torch.set_grad_enabled(True)
    try:
        yield
    finally:
        torch.set_grad_enabled(True)


@_gradients_on()
def advance(
    folder: str | os.PathLike[str], own_model: OwnModel | None = None, *, cells: CellRunner | None = None
) -> str:
    """Train on this rank until the run pauses or ends. Collective; the cluster calls it on all ranks.

    Args:
        folder: Run folder.
        own_model: Makes the user's model; None for the GPT of the configuration.
        cells: Runs the user's cells between two steps.

    Returns:
        State of the run.
    """
    world = join()
    everywhere = Group(range(world.size), CommStats(), world.device, channel="control")
    run = agreed(everywhere, lambda: _known(folder))
    trainer = _trainers.get(run.path)
    # The run continues in its engines only if every rank holds a complete state.
    if all(everywhere.collect(trainer is not None and trainer.training.whole)):
        assert trainer is not None
        return str(trainer.advance())
    # A restarted engine process holds no state, so all ranks rebuild the run from the newest checkpoint.
    _refuse_lost(run, everywhere)
    trainer = _build(run, own_model, cells, everywhere)
    _trainers[run.path] = trainer
    return str(trainer.advance())


def _known(folder: str | os.PathLike[str]) -> RunFolder:
    run = RunFolder(folder)
    run.require_known()
    return run


def _refuse_lost(run: RunFolder, everywhere: Group) -> None:
    """Raise CommandRefused on all ranks if the steps of this run are lost, before another run is closed for it."""
    kept = everywhere.share(agreed(everywhere, lambda: newest(run.path / "checkpoints") is not None))

    def look() -> None:
        records = run.path / "records" / "rank-0.jsonl"
        # Records without a checkpoint: steps were trained, and their state is lost.
        if not kept and records.exists() and records.stat().st_size:
            raise ConfigError(
                f"{run.name}: its engines do not hold its state, because they were restarted, cut off in the middle "
                "of a change, or given another run, and it has no checkpoint; start it again under another name, with "
                "checkpoint.every_steps set"
            )

    agreed(everywhere, look)


def _make_room(run: RunFolder, everywhere: Group) -> None:
    """Close the runs of this process, and first save a paused run whose steps no checkpoint holds. Collective.

    The status of the new run reports the save.
    """
    steps = {str(path): each.engine.global_step for path, each in _trainers.items() if each.training.whole}
    held = everywhere.collect(steps)
    for path in held[0]:
        # Ranks may be at different steps, and an interrupted rank may have set the state FAILED.
        if all(path in theirs for theirs in held) and any(theirs[path] for theirs in held):
            trainer = _trainers[Path(path)]
            if everywhere.share(_is_paused(trainer)):
                reported = f"run {trainer.folder.name!r}, which is paused on these engines, is saved first"
                trainer.keep(lambda: _tell(run, text=reported))  # noqa: B023  # called at once
                _tell(run, text="")
    release()


def _is_paused(trainer: Trainer) -> bool:
    try:
        return trainer.folder.read_status().state is RunState.PAUSED
    except RunFolderError:
        return trainer.training.state is RunState.PAUSED


def _tell(run: RunFolder, **fields: Any) -> None:
    """Update fields of the run's status, on rank 0, if the folder is writable."""
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError, RunFolderError):
            run.write_status(replace(run.read_status(), **fields))


def held() -> dict[str, int]:
    """Return the current step of each run that this process holds, by folder."""
    return {str(path): trainer.engine.global_step for path, trainer in _trainers.items()}


def release() -> None:
    """Close all runs of this process. The next `advance` rebuilds a run from its newest checkpoint."""
    for path in list(_trainers):
        _trainers.pop(path).close()


def _build(run: RunFolder, own_model: OwnModel | None, cells: CellRunner | None, everywhere: Group) -> Trainer:
    try:
        _make_room(run, everywhere)
        return Trainer(run, own_model, cells)
    except BaseException as error:
        if not isinstance(
            error, CommandRefused | RanksDiverged
        ):  # All ranks raise these. For any other error, leave, so that no peer waits for this rank.
            leave(failed=True)
        # No step was trained; write the reason to the run folder.
        state, text = RunState.FAILED, f"{type(error).__name__}: {error}"
        if isinstance(error, KeyboardInterrupt):
            state, text = RunState.PAUSED, "interrupted before it was built; run.resume() builds it again"
        _tell(run, state=state, text=text)
        raise


def generate(
    folder: str | os.PathLike[str], prompt: str, tokens: int = 100, temperature: float = 0.8, seed: int = 0
) -> str:
    """Generate text after `prompt` with the run's model. Collective.

    Args:
        folder: Run folder.
        prompt: Text to continue.
        tokens: Number of tokens to generate.
        temperature: Sampling temperature.
        seed: Seed of the sampling.

    Returns:
        The text, equal on all ranks.

    Raises:
        CommandRefused: If a rank does not hold the run, or the model needs more arguments than tokens.
    """
    trainer = _held_by_all(folder)
    _refuse_without_logits(trainer)
    try:
        trainer.reconnect()
        return _write(trainer, prompt, tokens, temperature, seed)
    except BaseException as error:
        if not isinstance(error, CommandRefused):
            trainer.training.disconnect()
        raise


def _refuse_without_logits(trainer: Trainer) -> None:
    """Raise CommandRefused if the user's model cannot be called with tokens alone."""
    module = trainer.engine.module
    try:
        inspect.signature(module.forward).bind(None)
    except TypeError as error:
        raise CommandRefused(
            f"{trainer.folder.name}: to generate, {type(module).__name__}.forward(tokens) has to give an output with "
            f".logits, (B, T, V): {error}"
        ) from None


def _held_by_all(folder: str | os.PathLike[str]) -> Trainer:
    """Return this rank's trainer of a run. Collective.

    Raises:
        CommandRefused: If a rank does not hold the run with a complete state.
    """
    world = join()
    everywhere = Group(range(world.size), CommStats(), world.device, channel="control")
    run = agreed(everywhere, lambda: RunFolder(folder))
    trainer = _trainers.get(run.path)
    holding = everywhere.collect(trainer is not None and trainer.training.whole)
    if trainer is None or not all(holding):
        without = ", ".join(str(rank) for rank, held in enumerate(holding) if not held)
        raise CommandRefused(f"{run.name}: the engine of rank {without} does not hold the run; resume it first")
    return trainer


def _write(trainer: Trainer, prompt: str, tokens: int, temperature: float, seed: int) -> str:
    engine, tokenizer = trainer.engine, trainer.training.corpus.tokenizer
    # generate needs at least one token, so an empty prompt becomes token 0.
    ids = tokenizer.encode(prompt) or [0]
    start = torch.tensor([ids], dtype=torch.int64, device=trainer.training.world.device)
    known = tokenizer.vocab_size
    engine.eval()
    try:
        with torch.no_grad():
            out = generate_tokens(engine, start, tokens, temperature=temperature, seed=seed, vocabulary=known)
    finally:
        engine.train()
    return tokenizer.decode(np.asarray(out[0].cpu()).tolist())
