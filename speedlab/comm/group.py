"""Collectives over one axis of the layout, counted: bytes sent by name, and the time a rank really waited.

On gloo, whole-tensor exchanges between peers are 3 to 8 times faster than gloo's own reduce-scatter and all-gather
(16 MB float32, 2 and 4 ranks on one host), and a sum that this rank does itself, in rank order, gives every stage of
ZeRO the same bits. On other backends the collectives of torch.distributed are used as they are.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function

from speedlab.comm.world import Wires, wires

# torch 2.13 renamed the two; 2.11 and 2.12 have the older names only.
_gather_whole = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_sum = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass
class BufferMeter:
    """Bytes of communication buffers that are alive, and the most there were since the last `take_peak`."""

    live_bytes: int = 0
    peak_bytes: int = 0

    def add(self, nbytes: int) -> None:
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def take_peak(self) -> int:
        peak, self.peak_bytes = self.peak_bytes, self.live_bytes
        return peak


@dataclass
class Traffic:
    """Bytes this rank sent, by collective, and the seconds it waited, by phase of the step, since the last `take`."""

    phase: str = ""
    """The phase of the step that waits are counted in; set by whoever times phases."""
    buffers: BufferMeter = field(default_factory=BufferMeter)
    sent_bytes: Counter[str] = field(default_factory=Counter)
    wait_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def waited(self, wait: Callable[[], None], device: torch.device) -> None:
        """Run `wait` and count its time: by the clock on CPUs, by a pair of events on a GPU, which nothing waits
        for."""
        if device.type != "cuda":
            start = time.perf_counter()
            wait()
            self.wait_seconds[self.phase] += time.perf_counter() - start
            return
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        wait()
        after.record()
        self._events.append((self.phase, before, after))

    def take(self) -> tuple[dict[str, int], dict[str, float]]:
        """What was counted, as (bytes by collective, seconds by phase); the counters start again.

        GPU times are added once their events have passed; those that have not are left for the next call.
        """
        late = []
        for phase, before, after in self._events:
            if after.query():
                self.wait_seconds[phase] += before.elapsed_time(after) / 1e3
            else:
                late.append((phase, before, after))
        self._events = late
        taken = dict(self.sent_bytes), dict(self.wait_seconds)
        self.sent_bytes, self.wait_seconds = Counter(), defaultdict(float)
        return taken


class PeerLost(RuntimeError):  # noqa: N818  # what happened, not a mistake made here
    """A collective ended because another rank left or died. The cause is on that rank."""


class Pending:
    """A collective under way. `wait` must be called once; then its result is where it was asked for."""

    def __init__(self, finish: Callable[[], None] | None, traffic: Traffic, device: torch.device) -> None:
        self._finish, self._traffic, self._device = finish, traffic, device

    def wait(self) -> None:
        if self._finish is not None:
            self._traffic.waited(self.finish_uncounted, self._device)

    def finish_uncounted(self) -> None:
        """The same without counting the time, for a wait that is part of another one."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()


class Group:
    """The ranks of one axis, as seen by one of them.

    Collectives of one Group must be started in the same order by all its ranks. Flats that may be gathered and reduced
    in different orders on different ranks go through two Groups of the same ranks.
    """

    def __init__(
        self, ranks: Sequence[int], traffic: Traffic, device: torch.device, *, channel: str = "gather"
    ) -> None:
        """`channel`: Groups of the same ranks and channel share their wires, so that setting up again opens no new
        ones."""
        self.ranks = list(ranks)
        self.size = len(self.ranks)
        self.index = self.ranks.index(dist.get_rank())
        self.device = device
        self.traffic = traffic
        self._channel = channel
        self.reconnect()

    def reconnect(self) -> None:
        """Take the wires of the present world. Collective over the world when they are new."""
        # A group of one needs no wires, and new_group would cost a rendezvous.
        self._wires: Wires | Any = wires(self._channel, tuple(self.ranks)) if self.size > 1 else None
        self._offered: dict[int, tuple[int, list[Any]]] = {}
        """Shards that were offered and not gathered yet: address → (tag, sends)."""
        self._sends: list[Any] = []
        self._left_behind: list[list[Any]] = []
        self._peer_to_peer = (
            self.device.type == "cpu" and self.size > 1 and dist.get_backend(self._wires.group) == "gloo"
        )

    def disconnect(self) -> None:
        """Let go of the wires, so that they close when the world is left."""
        self._wires = None

    def offer(self, shards: Sequence[Tensor]) -> None:
        """Announce the `shards` that the ranks will gather in a coming pass, each once, in an order all ranks share.

        Between peers a shard is sent from its own memory, so all sends can be posted at once: then no gather waits for
        how far another rank has come. Call `settle` before the shards change. Other backends need no announcement.
        """
        if self._peer_to_peer:
            for shard in shards:
                tag = self._wires.next_tag()
                self._offered[shard.data_ptr()] = tag, self._post_sends(shard, tag)

    def settle(self) -> None:
        """Wait until the peers have taken all shards that were sent; they may change afterwards."""
        sends, self._sends = self._sends, []
        self._pending(*sends).wait()

    def withdraw(self) -> None:
        """Stop counting on the offers and sends of a pass that was broken off; their tags are never used again.

        They are kept, not cancelled: a slower rank may still need them to come to the same break.
        """
        self._left_behind += [sends for _, sends in self._offered.values()]
        self._left_behind.append(self._sends)
        self._offered, self._sends = {}, []

    def all_gather(self, full: Tensor, shard: Tensor) -> Pending:
        """Start to fill `full` (n × m,) with every rank's `shard` (m,), in rank order. `shard` may be its own slice of
        `full`."""
        slices = full.view(self.size, -1)
        own = slices[self.index]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        if self.size == 1:
            return self._done()
        self._count("all_gather", (self.size - 1) * own.nbytes)
        with record_function("speedlab::all_gather"):
            if not self._peer_to_peer:
                return self._pending(_gather_whole(full, own, group=self._wires.group, async_op=True))
            offered = self._offered.pop(shard.data_ptr(), None)
            if offered is None:
                tag = self._wires.next_tag()
                sends = self._post_sends(shard, tag)
            else:
                tag, sends = offered
                self._sends += sends
            with self._explained():
                receives = [self._wires.group.recv([slices[peer]], peer, tag) for peer in self._peers()]
        return self._pending(*receives, *(() if offered else sends))

    def reduce_scatter(self, full: Tensor, into: Tensor, *, accumulate: bool = False) -> Pending:
        """Start to sum slice `index` of every rank's `full` (n × m,) into `into` (m,); `accumulate` adds to what is
        there.

        `into` may be this rank's own slice of `full`, and may be of a wider dtype. Sums are taken in rank order.
        """
        slices = full.view(self.size, -1)
        own = slices[self.index]
        if self.size == 1:
            if accumulate:
                into.add_(own)
            elif into.data_ptr() != own.data_ptr():
                into.copy_(own)
            return self._done()
        self._count("reduce_scatter", (self.size - 1) * own.nbytes)
        with record_function("speedlab::reduce_scatter"):
            if not self._peer_to_peer:
                summed = torch.empty_like(own)
                work = _scatter_sum(summed, full, group=self._wires.group, async_op=True)
                return self._pending(work, then=lambda: into.add_(summed) if accumulate else into.copy_(summed))
            received = torch.empty((self.size - 1, own.numel()), dtype=full.dtype)
            self.traffic.buffers.add(received.nbytes)
            with self._explained():
                tag = self._wires.next_tag()
                works = [self._wires.group.recv([received[i]], peer, tag) for i, peer in enumerate(self._peers())]
                works += [self._wires.group.send([slices[peer]], peer, tag) for peer in self._peers()]

        def finish() -> None:
            self._sum_in_rank_order(own, received, into, accumulate)
            self.traffic.buffers.add(-received.nbytes)

        return self._pending(*works, then=finish)

    def all_reduce(self, full: Tensor) -> Pending:
        """Start to sum `full` (n × m,) over the ranks, in place; the same bits as a reduce-scatter and a gather."""
        if self.size == 1:
            return self._done()
        if not self._peer_to_peer:
            self._count("all_reduce", 2 * (self.size - 1) * full.nbytes // self.size)
            with record_function("speedlab::all_reduce"):
                return self._pending(dist.all_reduce(full, group=self._wires.group, async_op=True))
        own = full.view(self.size, -1)[self.index]
        scattered = self.reduce_scatter(full, own)

        def finish() -> None:
            # The inner waits are part of this one: their time must not be counted twice.
            scattered.finish_uncounted()
            self.all_gather(full, own).finish_uncounted()

        return Pending(finish, self.traffic, self.device)

    def sum_scalars(self, values: Tensor) -> Tensor:
        """The sum over ranks of a few numbers `values` (k,), in a new tensor on the same device. Waits on CPUs."""
        total = values.clone()
        if self.size > 1:
            self._count("all_reduce", 2 * total.nbytes)
            work = dist.all_reduce(total, group=self._wires.group, async_op=True)
            self._pending(work).wait()
        return total

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Copy `tensor` from the group's `source` (an index in the group) to all, in place, and wait."""
        if self.size > 1:
            if self.index == source:
                self._count("broadcast", tensor.nbytes)
            self._pending(dist.broadcast(tensor, group_src=source, group=self._wires.group, async_op=True)).wait()

    def share(self, value: Any, source: int = 0) -> Any:
        """A small JSON value of `source`, on every rank. JSON, because nothing is ever unpickled from the network."""
        payload = json.dumps(value).encode() if self.index == source else b""
        length = torch.tensor([len(payload)], dtype=torch.int64, device=self.device)
        self.broadcast(length, source)
        data = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        if self.index == source:
            data.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        self.broadcast(data, source)
        return json.loads(bytes(data.cpu().numpy()))

    def collect(self, value: Any) -> list[Any]:
        """Every rank's small JSON value, in rank order, on every rank."""
        return [self.share(value, source) for source in range(self.size)]

    def barrier(self) -> None:
        """Wait until every rank of the group is here."""
        self.sum_scalars(torch.zeros(1, device=self.device))

    def _post_sends(self, shard: Tensor, tag: int) -> list[Any]:
        with self._explained():
            return [self._wires.group.send([shard], peer, tag) for peer in self._peers()]

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            # gloo puts the place in its own source before the reason, and guesses behind it.
            reason = re.sub(r"^\[[^\]]*\]\s*", "", str(error).strip()).split(". ")[0].splitlines()
            why = f" ({reason[0][:120]})" if reason else ""
            raise PeerLost(f"rank {self.ranks[self.index]} waited for a peer that left{why}") from None

    def _peers(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.index]

    def _count(self, name: str, sent_bytes: int) -> None:
        self.traffic.sent_bytes[name] += sent_bytes

    def _sum_in_rank_order(self, own: Tensor, received: Tensor, into: Tensor, accumulate: bool) -> None:
        terms = [*received[: self.index], own, *received[self.index :]]
        # Two low-precision terms round once either way; more of them are summed in float32, which rounds once too.
        wide = len(terms) > 2 and own.dtype.itemsize < 4
        total = terms[0].float() + terms[1] if wide else terms[0] + terms[1]
        for term in terms[2:]:
            total += term
        if accumulate:
            into.add_(total)
        else:
            into.copy_(total)

    def _done(self) -> Pending:
        return Pending(None, self.traffic, self.device)

    def _pending(self, *works: Any, then: Callable[[], Any] | None = None) -> Pending:
        def finish() -> None:
            with self._explained():
                for work in works:
                    work.wait()
            if then is not None:
                then()

        return Pending(finish, self.traffic, self.device)
