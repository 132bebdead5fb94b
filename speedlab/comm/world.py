"""Join and leave the world of ranks: in SpeedLab's engines, under torchrun, or alone.

- `join`, `leave`: create and destroy the world.
- `StoreMailbox`: one word of each rank in the world's store, without a group.
- `exchange_numbers`: one small exchange by which ranks check that they are in the same call.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch.distributed import distributed_c10d

from cuda_ops.warm import warm_up
from speedlab.comm.group_timeouts import limit_group, limit_of, limit_store
from speedlab.comm.multi_host_rendezvous import STORE, bound_silence, meet
from speedlab.comm.peer_watchdog import PeerWatchdog
from speedlab.comm.process_groups import forget_process_groups, groups_of_world, limit_process_groups
from speedlab.comm.rank_activity import enter_world, leave_world, lost_peers
from speedlab.comm.shared import BACKEND, leave_all, register
from speedlab.comm.timeouts import checked_seconds, give_timeout, inherit_timeout, limit_of_a_group
from speedlab.network import Endpoint

# Import torch.distributed.nn.functional before a world exists. Its default arguments keep the world group at import
# time alive, whose connections would never close. torch itself imports it in the first optimizer step.


@dataclass(frozen=True, kw_only=True)
class World:
    """This process's rank, the number of ranks, and the device."""

    rank: int
    size: int
    device: torch.device


def join(
    device: torch.device | str | None = None, *, backend: str | None = None, timeout_seconds: float | None = None
) -> World:
    """Join the world of ranks, or return it if this process already joined.

    1. Use an existing default process group.
    2. SPEEDLAB_RENDEZVOUS names a folder: engines meet in its file `store-<generation>`. With SPEEDLAB_STORE they meet
       in the store of rank 0 (`multi_host_rendezvous`). Each generation meets separately.
    3. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set (torchrun): ranks meet there.
    4. Otherwise the world is this process alone.

    Args:
        device: Device of this rank; None for `own_device()`.
        backend: For CPU ranks, "shared" (shared memory in a host, gloo between hosts) or "gloo". None uses
            SPEEDLAB_BACKEND, otherwise "shared". GPUs use NCCL.
        timeout_seconds: Timeout of the collectives of SpeedLab's groups; None keeps it (see `speedlab.comm.timeouts`).

    Raises:
        MeetingFailed: If ranks of several hosts cannot connect; names hosts, port and direction.
        ValueError: If `backend` or `timeout_seconds` is invalid.
    """
    if timeout_seconds is not None:
        give_timeout(checked_seconds(timeout_seconds, "timeout_seconds"))
    device = torch.device(device) if device is not None else own_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if device.type == "cpu":
        warm_up(lambda line: print(line, flush=True))
    if dist.is_initialized():
        _limit_groups()
    else:
        inherit_timeout(None)
        timeout = limit_of_a_group()
        forget_process_groups()  # The user may have destroyed the world of the old groups.
        backend = _choose_backend(device, backend)
        folder = os.environ.get("SPEEDLAB_RENDEZVOUS")
        if folder:
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            store = _engines_store(Path(folder), rank, size, timeout.total_seconds())
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        elif {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        if STORE in os.environ:
            bound_silence()
        if device.type == "cuda" and dist.get_world_size() > 1:
            _look_out(dist.get_rank(), dist.get_world_size())
        _own_worlds[:] = [weakref.ref(dist.group.WORLD)]
    enter_world()
    return World(rank=dist.get_rank(), size=dist.get_world_size(), device=device)


def _limit_groups() -> None:
    """Set the current timeout for all groups that SpeedLab made.

    A world of the user keeps its own timeout, which SpeedLab's groups inherit if the user gave none.
    """
    if any(reference() is dist.group.WORLD for reference in _own_worlds):
        seconds = limit_of_a_group().total_seconds()
        limit_group(dist.group.WORLD, seconds)
        limit_store(distributed_c10d._get_default_store(), seconds)
    else:
        inherit_timeout(limit_of(dist.group.WORLD))
    limit_process_groups()


_own_worlds: list[weakref.ref[Any]] = []
"""The world's group, if `join` made it."""


def _look_out(rank: int, size: int) -> None:
    # Use a new prefix: a store for several worlds, such as torchrun's, still has the keys of ranks that left an earlier
    # one.
    store = dist.PrefixStore(f"watch-{next(_looks)}", distributed_c10d._get_default_store())
    _watches.append(PeerWatchdog(store, rank, size, _abort_communicators))


_looks = itertools.count()
"""Number of watchdogs of this process; equal on all ranks that share a store."""


def _choose_backend(device: torch.device, backend: str | None) -> str:
    if device.type == "cuda":
        return "cpu:gloo,cuda:nccl"
    chosen = backend or os.environ.get("SPEEDLAB_BACKEND") or BACKEND
    if chosen not in (BACKEND, "gloo"):
        raise ValueError(f"backend: {chosen!r}, expected {BACKEND!r} or 'gloo'")
    if chosen == BACKEND:
        register()
    return chosen


def leave(*, failed: bool = False) -> None:
    """Leave the world, if this process is in one. The next `join` makes a new one.

    Args:
        failed: Whether this rank leaves because of a failure. Blocked peers are notified, and NCCL communicators are
            aborted, because destroying them would wait forever. Transfers in flight are cut, so that connections close
            even if an engine or an error is kept. A lost peer counts as a failure, too.
    """
    watch = _watches.pop() if _watches else None
    if watch is not None:
        failed = failed or watch.lost is not None
        # Notify peers before their connections close.
        watch.stop(failed=failed)
    leave_world()
    forget_process_groups(failed=failed)
    leave_all()
    if dist.is_initialized():
        if watch is not None and failed:
            # destroy_process_group would wait for collectives that never end.
            distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()


_watches: list[PeerWatchdog] = []
"""One watchdog in a world of GPUs, otherwise none. CPU ranks detect lost peers by closed connections and by pages of
shared memory.
"""


def check_peers() -> None:
    """Raise PeerLost if a peer was lost in a world of GPUs; results of collectives since then are invalid.

    Call this after a device sync and before results are used. It only reads a field.
    """
    for watch in _watches:
        watch.check()


def _abort_communicators() -> None:
    """End the collectives that block this rank's device. The process groups remain, and refuse to work."""
    cuda = torch.device("cuda")
    for group in list(distributed_c10d._world.pg_map):
        with contextlib.suppress(RuntimeError):  # A CPU group has no CUDA backend.
            group._get_backend(cuda).abort()  # type: ignore[attr-defined]  # of ProcessGroupNCCL


_joins: Counter[int] = Counter()
"""How often this process has joined, by generation."""


def own_device() -> torch.device:
    """Return the device of this rank: SPEEDLAB_DEVICE, otherwise the local rank's GPU, otherwise the CPU."""
    described = os.environ.get("SPEEDLAB_DEVICE")
    if described:
        # An engine sees only its own GPU, through CUDA_VISIBLE_DEVICES.
        return torch.device("cuda:0" if json.loads(described)["kind"] == "cuda" else "cpu")
    if torch.cuda.is_available():
        return torch.device(f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}")
    return torch.device("cpu")


def _engines_store(folder: Path, rank: int, size: int, timeout_seconds: float) -> dist.Store:
    """Return the store in which a cluster's engines meet this time.

    Ranks that left meet in a new store, because the old one holds keys of a destroyed group. The cluster increases the
    generation whenever ranks may have left different numbers of times (interrupts, restarts).
    """
    generation = folder / "generation"
    number = int(generation.read_text()) if generation.exists() else 0
    joined = _joins[number]
    _joins[number] += 1
    name = f"store-{number}-{joined}"
    place = os.environ.get(STORE)
    if place:
        return meet(Endpoint.parse(place), rank, size, name, timeout_seconds)
    store = dist.FileStore(str(folder / name), size)
    store.set_timeout(datetime.timedelta(seconds=timeout_seconds))
    return store


class StoreMailbox:
    """One word of each rank of the current world. Ranks that have left that world can still read it."""

    def __init__(self, name: str) -> None:
        """Use the current world's store.

        Args:
            name: Unique in this world, and equal on all ranks.
        """
        self._rank = dist.get_rank()
        self._keys = [f"speedlab/{name}/{rank}" for rank in range(dist.get_world_size())]
        self._store = distributed_c10d._get_default_store()

    def leave(self, word: str) -> None:
        """Write this rank's word.

        Args:
            word: Any text.

        Raises:
            RuntimeError: If the store is gone.
        """
        self._store.set(self._keys[self._rank], word)

    def read(self) -> list[str] | None:
        """Return every rank's word, in rank order; None while one is missing. Does not wait.

        Raises:
            RuntimeError: If the store is gone.
        """
        if not self._store.check(self._keys):
            return None
        return [self._store.get(key).decode() for key in self._keys]


_CHANNEL = "calls"


def prepare_exchange(ranks: Sequence[int]) -> None:
    """Create the connections of `exchange_numbers` if there are none. Collective over these ranks.

    Call this at a point that all ranks certainly reach. Lost ranks are detected on a connection, but not while it is
    being created.

    Args:
        ranks: Global ranks.
    """
    if len(ranks) > 1:
        groups_of_world(_CHANNEL, tuple(ranks))


def exchange_numbers(own: Sequence[int], ranks: Sequence[int]) -> list[list[int]]:
    """Return the numbers of all `ranks`, in their order. Collective over these ranks.

    The connections serve nothing else, so the numbers never mix with another collective's values. A rank in a different
    call only lets the others wait.

    Args:
        own: Numbers of this rank; the same count on all ranks.
        ranks: Global ranks.

    Raises:
        PeerLost: If a rank does not arrive; names the call of each rank.
    """
    rows = torch.zeros(len(ranks), len(own), dtype=torch.int64)
    if len(ranks) > 1:
        rank, known = dist.get_rank(), groups_of_world(_CHANNEL, tuple(ranks))
        rows[ranks.index(rank)] = torch.tensor(own)
        with lost_peers(f"rank {rank} waited for"):
            dist.all_reduce(rows, group=known.group)
    else:
        rows[0] = torch.tensor(own)
    return rows.tolist()
