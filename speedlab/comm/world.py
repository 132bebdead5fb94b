"""Joining and leaving the world of ranks: under SpeedLab's engines, under torchrun, or alone.

Words that ranks leave for each other in the store in which they have met: that takes no group, and harms none.

One small exchange of all ranks, by which they find out whether they are in the same call.
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

# Its default arguments keep the world group of the moment of its import alive, whose connections would then never
# close. torch imports it in the first optimizer step; here, no world exists yet.


@dataclass(frozen=True, kw_only=True)
class World:
    """Which rank this process is, of how many, on which device."""

    rank: int
    size: int
    device: torch.device


def join(
    device: torch.device | str | None = None, *, backend: str | None = None, timeout_seconds: float | None = None
) -> World:
    """Join the world of ranks, or return it when this process already did.

    `backend`: of CPU ranks, "shared" (shared memory within a host, gloo between hosts) or "gloo"; None takes
    what SPEEDLAB_BACKEND says, else "shared". GPUs use NCCL.

    `timeout_seconds`: how long the collectives of SpeedLab's groups wait for their peers; None leaves that as it is
    (`limits.timeout_seconds`).

    1. A default process group that exists is used as it is.
    2. SPEEDLAB_RENDEZVOUS names a folder: engines meet in its file `store-<generation>`, or, where they are on several
       hosts and SPEEDLAB_STORE says where rank 0 serves a store, there (`over_hosts.py`), each generation by itself.
    3. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set (torchrun): ranks meet there.
    4. Otherwise the world is this process alone.

    Raises MeetingFailed where ranks of several hosts cannot meet, with the hosts, the port and the direction.
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
        forget_process_groups()  # Somebody else may have destroyed the world they belonged to.
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
    """The limit of today is that of all groups that SpeedLab has made. A world that the user made keeps its own, which
    counts for SpeedLab's groups where the user gave none."""
    if any(reference() is dist.group.WORLD for reference in _own_worlds):
        seconds = limit_of_a_group().total_seconds()
        limit_group(dist.group.WORLD, seconds)
        limit_store(distributed_c10d._get_default_store(), seconds)
    else:
        inherit_timeout(limit_of(dist.group.WORLD))
    limit_process_groups()


_own_worlds: list[weakref.ref[Any]] = []
"""The group of the world, if `join` has made it."""


def _look_out(rank: int, size: int) -> None:
    # A store that serves several worlds, as torchrun's does, still holds who has left an earlier one.
    store = dist.PrefixStore(f"watch-{next(_looks)}", distributed_c10d._get_default_store())
    _watches.append(PeerWatchdog(store, rank, size, _abort_communicators))


_looks = itertools.count()
"""How often this process has looked out; equally often on all ranks that share a store."""


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
    """Leave the world; the next `join` makes a new one. Does nothing when this process is in none.

    `failed`: this rank leaves in the middle of something. Peers that are blocked in a collective with it are told, and
    communicators of NCCL are aborted; to destroy them would wait for what never ends. A lost peer is such a failure.
    Exchanges under way are cut, so that connections close though an engine or an error is kept.
    """
    watch = _watches.pop() if _watches else None
    if watch is not None:
        failed = failed or watch.lost is not None
        watch.stop(failed=failed)
    leave_world()
    forget_process_groups(failed=failed)
    leave_all()
    if dist.is_initialized():
        if watch is not None and failed:
            distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()


_watches: list[PeerWatchdog] = []
"""One in a world of GPUs, else none. CPU ranks see for themselves who has left, by connections that close and by the
pages of shared memory."""


def check_peers() -> None:
    """Raise PeerLost when a peer was lost in a world of GPUs: what came from a collective since then is garbage.

    For whoever has waited for the device and is about to use what came. It looks at a field.
    """
    for watch in _watches:
        watch.check()


def _abort_communicators() -> None:
    """End what this rank's device is blocked in. The process groups stay, and refuse to work."""
    cuda = torch.device("cuda")
    for group in list(distributed_c10d._world.pg_map):
        with contextlib.suppress(RuntimeError):  # A group of the host only has no backend for it.
            group._get_backend(cuda).abort()  # type: ignore[attr-defined]  # of ProcessGroupNCCL


_joins: Counter[int] = Counter()
"""How often this process has joined, by generation of the rendezvous."""


def own_device() -> torch.device:
    """The device this rank is bound to: what SPEEDLAB_DEVICE says, else the local rank's GPU, else the CPU."""
    described = os.environ.get("SPEEDLAB_DEVICE")
    if described:
        # An engine sees only its own GPU, through CUDA_VISIBLE_DEVICES.
        return torch.device("cuda:0" if json.loads(described)["kind"] == "cuda" else "cpu")
    if torch.cuda.is_available():
        return torch.device(f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}")
    return torch.device("cpu")


def _engines_store(folder: Path, rank: int, size: int, timeout_seconds: float) -> dist.Store:
    """Where the engines of a cluster meet this time.

    Ranks that left meet in a new store: the old one holds keys of a group that is gone.

    The cluster raises the generation whenever it cannot know that all ranks left equally often (interrupts, restarts).
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
    """One word of each rank of the present world. It can be read by who has left that world meanwhile."""

    def __init__(self, name: str) -> None:
        """`name`: of its own in this world, and the same on all ranks."""
        self._rank = dist.get_rank()
        self._keys = [f"speedlab/{name}/{rank}" for rank in range(dist.get_world_size())]
        self._store = distributed_c10d._get_default_store()

    def leave(self, word: str) -> None:
        """This rank's word. Raises RuntimeError where the store is gone."""
        self._store.set(self._keys[self._rank], word)

    def read(self) -> list[str] | None:
        """Every rank's word, in rank order; None as long as one is missing. Waits for nobody. Raises RuntimeError where
        the store is gone."""
        if not self._store.check(self._keys):
            return None
        return [self._store.get(key).decode() for key in self._keys]


_CHANNEL = "calls"


def prepare_exchange(ranks: Sequence[int]) -> None:
    """Make the connections of `exchange_numbers` where there are none. Collective over these ranks: to be called where
    all of them come for sure. A rank that leaves is seen by the others on a connection, not while they make one."""
    if len(ranks) > 1:
        groups_of_world(_CHANNEL, tuple(ranks))


def exchange_numbers(own: Sequence[int], ranks: Sequence[int]) -> list[list[int]]:
    """The numbers of all `ranks`, equally many of each, in their order.

    Collective over these ranks, on connections that serve nothing else: the numbers never meet the values of
    another collective, so that a rank that is in another call leaves the others waiting, and spoils nothing. Raises
    PeerLost where a rank does not come, with the call in which each rank is.
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
