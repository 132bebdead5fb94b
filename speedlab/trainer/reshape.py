"""Moving a run that is on to another layout, between two steps, on the same engines.

1. Every rank writes what it owns as a checkpoint without hashes: in memory where it fits, else in the run folder.
2. The engine ends, and one of the new layout is built and reads what it owns now.
3. If that fails on any rank, all meet anew and build the old layout from the same checkpoint: the run goes on.

Whether the new layout fits the ranks is known before (`fitting`).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torch import Tensor

from speedlab.comm import Group
from speedlab.config import ConfigError, RunConfig
from speedlab.engine.engine import Engine
from speedlab.engine.memory_ledger import release_freed_memory
from speedlab.hardware import memory_bytes
from speedlab.trainer.collective_errors import CommandRefused, ControlGroup, RanksDiverged, agreed, together

_IN_MEMORY = Path("/dev/shm")
"""A file system in memory; Linux has it."""

_PREFIX = "speedlab-state-"
"""Begins the names of folders for states on their way."""

_ROOM = 1.2
"""Bytes that must be free in memory for each byte of the checkpoint there."""

_TAG = "state"

Build = Callable[[RunConfig], Engine]


class Undone(CommandRefused):  # what happened, not what is wrong
    """A change of layout that failed and was taken back; `engine` goes on as the one before did."""

    def __init__(self, engine: Engine, message: str) -> None:
        super().__init__(message)
        self.engine = engine


def rebuild(
    engine: Engine, config: RunConfig, *, states: int, build: Build, control: Group, folder: Path
) -> tuple[Engine, str]:
    """An engine for `config` in the state of `engine`, which ends; and through what its state went: "memory" or "run
    folder". Collective over `control`.

    Args:
        states: bytes of model states that all ranks together will hold.
        build: makes an engine of a configuration, collectively.
        folder: of the run, where the state goes when it has no room in memory.

    Whether the new layout fits is the caller's to know. Raises Undone when it could not be built.
    """
    before = engine.config
    through = _through(engine, states, control)
    # Whoever comes to its end with an engine knows that all have read; without one there is nothing to wait for.
    with _folder_of_all(_IN_MEMORY if through == "memory" else folder, control) as place:
        engine.save_checkpoint(place, _TAG, verify=False)
        engine.destroy(keep_parameters=False)
        try:
            made = together(ControlGroup(control), lambda: _build_from(place, config, build))
        except RanksDiverged as parted:
            made = together(ControlGroup(control), lambda: _build_from(place, before, build))
            raise Undone(made, f"{parted}; the run goes on under {made.layout} as before") from None
    release_freed_memory(made.world.device)
    return made, through


def _build_from(place: Path, config: RunConfig, build: Build) -> Engine:
    engine = build(config)
    engine.load_checkpoint(place, _TAG, verify=False)
    return engine


def _through(engine: Engine, states: int, control: Group) -> str:
    """Where the state goes: to memory when the ranks are on one host that has room for it, first beside the present
    engine, then beside the `states` of the one that reads it; else to the run folder."""
    kept = agreed(control, lambda: sum(state.nbytes for state in _kept(engine)))
    needed = sum(control.collect(kept))
    if engine.world.device.type == "cpu":
        needed += max(0, states - sum(control.collect(agreed(control, lambda: engine.ledger().model_states))))
    hosts = control.collect(os.uname().nodename)
    roomy = agreed(control, lambda: _has_room(needed)) and len(set(hosts)) == 1
    return "memory" if all(control.collect(roomy)) else "run folder"


@contextmanager
def _folder_of_all(parent: Path, control: Group) -> Iterator[Path]:
    """A new folder in `parent` of which nobody knew the name before, for all ranks; it goes at the end. Collective.

    The first rank holds a lock on it. A folder without one is what a killed process left, and goes too: in memory it
    would stay until the host is started again.
    """
    with ExitStack() as stack:

        def make() -> str:
            try:
                return str(stack.enter_context(_locked_folder(parent))) if control.index == 0 else ""
            except OSError as error:
                raise ConfigError(f"{parent} cannot hold the state on its way: {error.strerror}") from error

        yield Path(control.share(agreed(control, make)))


@contextmanager
def _locked_folder(parent: Path) -> Iterator[Path]:
    for left in parent.glob(f"{_PREFIX}*"):
        with _lock(left) as held:
            if held:
                shutil.rmtree(left, ignore_errors=True)
    place = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    with _lock(place):
        try:
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)


@contextmanager
def _lock(folder: Path) -> Iterator[bool]:
    """Holds the lock on a folder of this user's inside; whether that was possible: somebody may hold it, it may be
    another's, or gone, or on a file system without locks."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = os.fstat(descriptor).st_uid == os.getuid()
        except OSError:
            held = False
        yield held
    finally:
        os.close(descriptor)


def _has_room(needed: int) -> bool:
    """Whether so many bytes have room in memory, and in its file system."""
    in_files = _IN_MEMORY.is_dir() and shutil.disk_usage(_IN_MEMORY).free > _ROOM * needed
    return in_files and memory_bytes()[1] > _ROOM * needed


def _kept(engine: Engine) -> list[Tensor]:
    """Every state that this rank's checkpoint holds, whole where it is replicated."""
    optimizer = engine.partitioned_optimizer
    moments = [state for flat in optimizer.flats for state in optimizer.states_of(flat).values()]
    kept = [state for gradient in optimizer.gradients for state in gradient.kept.values()]
    return [*(flat.master for flat in engine.flats), *moments, *kept]
