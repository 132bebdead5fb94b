"""Moving a run that is on to another layout, between two steps, on the same engines.

1. What can be known before is checked: whether the model states of the new layout fit each rank.
2. Every rank writes what it owns as a checkpoint without hashes: in memory where it fits, else in the run folder.
3. The engine ends, and one of the new layout is built and reads what it owns now.
4. If that fails on any rank, all meet anew and build the old layout from the same checkpoint: the run goes on.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from speedlab.comm import Group
from speedlab.config import RunConfig
from speedlab.engine.engine import Engine
from speedlab.engine.run.agreement import Bare, Parted, Refusal, agreed, together
from speedlab.engine.step.memory import release_freed_memory
from speedlab.hardware import memory_bytes
from speedlab.layout import Layout
from speedlab.planner.formula import ModelStates, model_states

_IN_MEMORY = Path("/dev/shm")
"""A file system in memory; Linux has it."""

_ROOM = 1.2
"""Bytes that must be free in memory for each byte of the checkpoint there."""

_TAG = "state"

Build = Callable[[RunConfig], Engine]


class Undone(Refusal):  # what happened, not what is wrong
    """A change of layout that failed and was taken back; `engine` goes on as the one before did."""

    def __init__(self, engine: Engine, message: str) -> None:
        super().__init__(message)
        self.engine = engine


def rebuild(
    engine: Engine, config: RunConfig, parameters: int, *, build: Build, control: Group, folder: Path
) -> tuple[Engine, str]:
    """An engine for `config` in the state of `engine`, which ends; and through what its state went: "memory" or "run
    folder". Collective over `control`.

    Args:
        parameters: of the whole model.
        build: makes an engine of a configuration, collectively.
        folder: of the run, where the state goes when it has no room in memory.

    Raises Refusal when the new layout does not fit, with nothing changed, and Undone when it could not be built.
    """
    refuse_what_does_not_fit(engine, config, parameters, control)
    before = engine.config
    place, through = _place(engine, control, folder)
    try:
        engine.save_checkpoint(place, _TAG, verify=False)
        engine.destroy(keep_parameters=False)
        try:
            made = together(Bare(control), lambda: _build_from(place, config, build))
        except Parted as parted:
            made = together(Bare(control), lambda: _build_from(place, before, build))
            raise Undone(made, f"{parted}; the run goes on under {made.layout} as before") from None
    finally:
        # Whoever comes here with an engine knows that all have read; without one there is nothing to wait for.
        if control.index == 0:
            shutil.rmtree(place, ignore_errors=True)
    release_freed_memory(made.world.device)
    return made, through


def refuse_what_does_not_fit(engine: Engine, config: RunConfig, parameters: int, control: Group) -> None:
    """Raises Refusal on every rank when the model states of `config` are more than some rank can hold."""
    layout = config.layout(control.size, built_in=False)
    states = _states(engine, config, layout, parameters)
    capacity = agreed(control, lambda: engine.ledger().capacity_bytes)
    smallest = min(control.collect(capacity))
    if states.total > smallest:
        raise Refusal(
            f"{layout} at ZeRO stage {config.zero.stage} needs {states.total / 2**30:.2f} GiB of model states on a "
            f"rank, and the smallest has {smallest / 2**30:.2f} GiB; raise zero, tp or pp"
        )


def _states(engine: Engine, config: RunConfig, layout: Layout, parameters: int) -> ModelStates:
    dtype = str(engine.dtype).removeprefix("torch.")
    share = -(-parameters // (layout.tp * layout.pp))
    return model_states(share, dp=layout.dp, stage=config.zero.stage, dtype=dtype, optimizer=config.optimizer)


def _build_from(place: Path, config: RunConfig, build: Build) -> Engine:
    engine = build(config)
    engine.load_checkpoint(place, _TAG, verify=False)
    return engine


def _place(engine: Engine, control: Group, folder: Path) -> tuple[Path, str]:
    """A new folder for the state: in memory when the ranks are on one host that has room for it."""
    kept = agreed(control, lambda: sum(state.nbytes for state in _kept(engine)))
    needed = sum(control.collect(kept))
    hosts = control.collect(os.uname().nodename)
    roomy = agreed(control, lambda: _has_room(needed)) and len(set(hosts)) == 1
    through = "memory" if all(control.collect(roomy)) else "run folder"
    parent = _IN_MEMORY if through == "memory" else folder
    name = control.share(f"speedlab-{os.getpid()}-{engine.global_step}")
    return parent / name, through


def _has_room(needed: int) -> bool:
    """Whether so many bytes have room in memory, and in its file system."""
    on_disk = _IN_MEMORY.is_dir() and shutil.disk_usage(_IN_MEMORY).free > _ROOM * needed
    return on_disk and memory_bytes()[1] > _ROOM * needed


def _kept(engine: Engine) -> list[Tensor]:
    """Every state that this rank's checkpoint holds, whole where it is replicated."""
    optimizer = engine.partitioned_optimizer
    moments = [state for flat in optimizer.flats for state in optimizer.states_of(flat).values()]
    return [*(flat.master for flat in engine.flats), *moments]
