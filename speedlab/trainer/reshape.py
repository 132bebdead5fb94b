"""Move a running run to another layout between two steps, on the same engine processes.

1. Every rank writes its states as a checkpoint without hashes: in memory if it fits, otherwise in the run folder.
2. The old engine is destroyed. A new engine with the new layout is built and loads the checkpoint.
3. If that fails on any rank, all ranks reconnect and build the old layout from the same checkpoint. The run continues.

`fit_check` tests before whether the new layout fits in memory.
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
"""Linux's file system in memory."""

_PREFIX = "speedlab-state-"
"""Prefix of the folders for states in transit."""

_ROOM = 1.2
"""Free bytes that are required in memory for each byte of the checkpoint."""

_TAG = "state"

Build = Callable[[RunConfig], Engine]


class Undone(CommandRefused):  # what happened, not what is wrong
    """A change of layout failed and was rolled back. `engine` is a new engine with the old layout."""

    def __init__(self, engine: Engine, message: str) -> None:
        super().__init__(message)
        self.engine = engine


def rebuild(
    engine: Engine, config: RunConfig, *, states: int, build: Build, control: Group, folder: Path
) -> tuple[Engine, str]:
    """Replace `engine` by an engine for `config` with the same state. Collective over `control`.

    The caller checks before whether the new layout fits in memory.

    Args:
        engine: Present engine, which is destroyed.
        config: Configuration of the new engine.
        states: Bytes of model states that all ranks together will hold.
        build: Builds an engine from a configuration, collectively.
        control: Group of all ranks.
        folder: Run folder, for a state that does not fit in memory.

    Returns:
        The new engine, and how the state was transferred: "memory" or "run folder".

    Raises:
        Undone: If the new engine could not be built; it holds an engine with the old layout.
    """
    before = engine.config
    through = _through(engine, states, control)
    # `together` ends with a barrier, so all ranks have read the folder before it is removed.
    # 1: write the state.
    with _folder_of_all(_IN_MEMORY if through == "memory" else folder, control) as place:
        # No hashes: the same processes read this checkpoint back at once.
        engine.save_checkpoint(place, _TAG, verify=False)
        # 2: free the old engine before the new one allocates.
        engine.destroy(keep_parameters=False)
        try:
            made = together(ControlGroup(control), lambda: _build_from(place, config, build))
        except RanksDiverged as parted:
            # 3: roll back.
            made = together(ControlGroup(control), lambda: _build_from(place, before, build))
            raise Undone(made, f"{parted}; the run goes on under {made.layout} as before") from None
    release_freed_memory(made.world.device)
    return made, through


def _build_from(place: Path, config: RunConfig, build: Build) -> Engine:
    engine = build(config)
    engine.load_checkpoint(place, _TAG, verify=False)
    return engine


def _through(engine: Engine, states: int, control: Group) -> str:
    """Return where the state goes: "memory" or "run folder".

    Memory requires that all ranks are on one host with enough room: for the checkpoint next to the present engine, then
    next to the `states` of the new one.
    """
    kept = agreed(control, lambda: sum(state.nbytes for state in _kept(engine)))
    needed = sum(control.collect(kept))
    # On CPUs, additional states of the new engine use the same memory.
    if engine.world.device.type == "cpu":
        needed += max(0, states - sum(control.collect(agreed(control, lambda: engine.ledger().model_states))))
    hosts = control.collect(os.uname().nodename)
    roomy = agreed(control, lambda: _has_room(needed)) and len(set(hosts)) == 1
    return "memory" if all(control.collect(roomy)) else "run folder"


@contextmanager
def _folder_of_all(parent: Path, control: Group) -> Iterator[Path]:
    """Create one new folder with a random name for all ranks, and remove it at the end. Collective.

    Rank 0 keeps the folder locked. A folder without a lock was left by a killed process and is removed, because a
    folder in memory would stay until the host restarts.
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
    """Lock a folder of this user and yield whether that was possible.

    The lock fails if another process holds it, the folder belongs to another user or is gone, or the file system has no
    locks.
    """
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
    """Return whether that many bytes fit in free memory and in its file system."""
    in_files = _IN_MEMORY.is_dir() and shutil.disk_usage(_IN_MEMORY).free > _ROOM * needed
    return in_files and memory_bytes()[1] > _ROOM * needed


def _kept(engine: Engine) -> list[Tensor]:
    """Return every state in this rank's checkpoint; a replicated state counts in full."""
    optimizer = engine.partitioned_optimizer
    moments = [state for flat in optimizer.flats for state in optimizer.states_of(flat).values()]
    kept = [state for gradient in optimizer.gradients for state in gradient.kept.values()]
    return [*(flat.master for flat in engine.flats), *moments, *kept]
