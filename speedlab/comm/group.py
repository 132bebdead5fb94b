"""Collectives over one axis of the layout, counted: bytes sent by name, and the time a rank really waited."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function

from speedlab.comm.errors import PeerLost
from speedlab.comm.gloo_peers import GlooPeers
from speedlab.comm.shared import BACKEND, SharedGroup, SpanningGroup
from speedlab.comm.shared.in_place import InPlace
from speedlab.comm.traffic import Pending, Traffic
from speedlab.comm.transport import Transport, gather_whole, scatter_sum
from speedlab.comm.world import Wires, wires

_BUFFERS = 2
"""Buffers of one kind that a pass uses: one is filled while the other is reduced and read by peers."""


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
        self._idle: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        """Buffers that were given back, by size and dtype, the one that was first given back first."""
        self._made: Counter[tuple[int, torch.dtype]] = Counter()
        """How many buffers of each kind there are."""
        self.reconnect()

    def reconnect(self) -> None:
        """Take the wires of the present world. Collective over the world when they are new."""
        # A group of one needs no wires, and new_group would cost a rendezvous.
        self._wires: Wires | Any = wires(self._channel, tuple(self.ranks)) if self.size > 1 else None
        self._transport = self._choose_transport() if self.size > 1 else None
        self.drop_buffers()

    def _choose_transport(self) -> Transport:
        if isinstance(self._wires.group, SharedGroup):
            return InPlace(self._wires, self.size, self.index, self.device)
        if isinstance(self._wires.group, SpanningGroup):
            # Its collectives send over the network what must be sent, once; exchanges of all with all send more.
            return Transport(self._wires, self.size, self.index, self.device)
        if self.device.type == "cpu" and dist.get_backend(self._wires.group) in ("gloo", BACKEND):
            return GlooPeers(self._wires, self.size, self.index, self.device, self.traffic.buffers)
        return Transport(self._wires, self.size, self.index, self.device)

    def disconnect(self) -> None:
        """Let go of the wires, so that they close when the world is left."""
        self._wires = self._transport = None

    # ---- memory ------------------------------------------------------------------------------------------------------

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory (numel,) for a tensor that this group will send or reduce often, where that is fastest."""
        if self._transport is None:
            return torch.empty(numel, dtype=dtype, device=self.device)
        return self._transport.empty(numel, dtype)

    def borrow(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A buffer (numel,) for a reduction; waits for the peers when all of its kind are still being read."""
        key = numel, dtype
        idle = self._idle.setdefault(key, [])
        if not idle or self._made[key] < _BUFFERS:
            buffer = self.empty(numel, dtype)
            self._made[key] += 1
            self.traffic.buffers.add(buffer.nbytes)
            return buffer
        buffer = idle.pop(0)
        self.wait_until_read(buffer)
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        """End the use of a borrowed buffer; its reduction, if there was one, has ended on this rank."""
        self._idle[buffer.numel(), buffer.dtype].append(buffer)

    @property
    def idle_buffers(self) -> list[Tensor]:
        """Those that were given back: between two steps, all there are."""
        return [buffer for buffers in self._idle.values() for buffer in buffers]

    def trim_buffers(self) -> None:
        """Free what was given back beyond the buffers of each kind that a pass uses in turn."""
        for key, idle in self._idle.items():
            surplus = idle[_BUFFERS:]
            self.traffic.buffers.add(-sum(buffer.nbytes for buffer in surplus))
            self._made[key] -= len(surplus)
            del idle[_BUFFERS:]

    def drop_buffers(self) -> None:
        """Free what was given back."""
        for key, idle in self._idle.items():
            self.traffic.buffers.add(-sum(buffer.nbytes for buffer in idle))
            self._made[key] -= len(idle)
            idle.clear()

    @property
    def ordered(self) -> bool:
        """Whether every gather is a collective of its own, which all ranks have to start in one order; else a rank
        takes what its peers have offered when it needs it."""
        return self._transport is not None and self._transport.ordered

    def wait_until_read(self, reduced: Tensor) -> None:
        """Wait until the peers need nothing more of a tensor whose reduction has ended on this rank."""
        transport = self._transport
        if transport is not None:
            self._pending(lambda: transport.wait_until_read(reduced)).wait()

    def offer(self, shards: Sequence[Tensor]) -> None:
        """Announce the `shards` that the ranks will gather in a coming pass, each once, in an order all ranks share.

        Peers then take a shard when they need it, however far this rank has come. Call `wait_until_all_read` before
        the shards change.
        """
        if self._transport is not None:
            with self._explained():
                self._transport.offer(shards)

    def wait_until_all_read(self) -> None:
        """Wait until the peers need nothing more of what was offered or reduced; it may change afterwards."""
        if self._transport is not None:
            self._pending(self._transport.wait_until_all_read).wait()

    def withdraw(self) -> None:
        """Stop counting on the offers of a pass that was broken off."""
        if self._transport is not None:
            self._transport.withdraw()

    # ---- collectives -------------------------------------------------------------------------------------------------

    def all_gather(self, full: Tensor, shard: Tensor) -> Pending:
        """Start to fill `full` (n × m,) with every rank's `shard` (m,), in rank order. `shard` may be its own slice of
        `full`."""
        own = full.view(self.size, -1)[self.index]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        if self._transport is None or full.numel() == 0:
            return self._done()
        self._count("all_gather", (self.size - 1) * own.nbytes)
        with record_function("speedlab::all_gather"), self._explained():
            return self._pending(self._transport.all_gather(full, shard, own))

    def reduce_scatter(self, full: Tensor, into: Tensor, *, accumulate: bool = False) -> Pending:
        """Start to sum slice `index` of every rank's `full` (n × m,) into `into` (m,); `accumulate` adds to what is
        there.

        `into` may be this rank's own slice of `full`, and may be of a wider dtype. Sums are taken in rank order.
        `full` must not be written again before `wait_until_all_read`.
        """
        own = full.view(self.size, -1)[self.index]
        if self._transport is None or full.numel() == 0:
            if accumulate:
                into.add_(own)
            elif into.data_ptr() != own.data_ptr():
                into.copy_(own)
            return self._done()
        self._count("reduce_scatter", (self.size - 1) * own.nbytes)
        with record_function("speedlab::reduce_scatter"), self._explained():
            return self._pending(self._transport.reduce_scatter(full, into, accumulate))

    def all_reduce(self, full: Tensor) -> Pending:
        """Start to sum `full` (n × m,) over the ranks, in place; on CPUs the same bits as a reduce-scatter and a
        gather."""
        if self._transport is None or full.numel() == 0:
            return self._done()
        self._count("all_reduce", 2 * (self.size - 1) * full.nbytes // self.size)
        with record_function("speedlab::all_reduce"), self._explained():
            return self._pending(self._transport.all_reduce(full))

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks of any `tensor`, in a new one, with the same bits on all ranks. Waits on CPUs."""
        total = self._sum_dtype(tensor).clone(memory_format=torch.contiguous_format)
        if self.size > 1 and total.numel() > 0:
            self._count("all_reduce", 2 * (self.size - 1) * total.nbytes // self.size)
            self._pending(lambda: dist.all_reduce(total, group=self._wires.group)).wait()
        return total.to(tensor.dtype)

    def sum_scalars(self, values: Tensor) -> Tensor:
        """The sum over ranks of a few numbers `values` (k,), in a new tensor on the same device. Waits on CPUs."""
        return self.sum(values)

    def gather_along(self, tensor: Tensor, dim: int) -> Tensor:
        """The ranks' tensors, all of one shape, side by side along `dim`, in rank order. Waits on CPUs."""
        if self.size == 1:
            return tensor
        every = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        if tensor.numel() > 0:
            own = tensor.contiguous()
            self._count("all_gather", (self.size - 1) * own.nbytes)
            self._pending(lambda: gather_whole(every.view(-1), own.view(-1), group=self._wires.group)).wait()
        return torch.cat(every.unbind(), dim)

    def scatter_sum(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's slice, one of `size` equal ones along `dim`, of the sum of the ranks' tensors. Waits on CPUs."""
        if self.size == 1:
            return tensor
        slices = torch.stack(self._sum_dtype(tensor).chunk(self.size, dim))
        own = torch.empty_like(slices[0])
        if own.numel() > 0:
            self._count("reduce_scatter", (self.size - 1) * own.nbytes)
            self._pending(lambda: scatter_sum(own.view(-1), slices.view(-1), group=self._wires.group)).wait()
        return own.to(tensor.dtype)

    def _sum_dtype(self, tensor: Tensor) -> Tensor:
        """As float32 where a sum of several low-precision terms would be rounded after each of them."""
        rounds = self.size > 2 and not isinstance(self._wires.group, SharedGroup | SpanningGroup)
        low = tensor.dtype.is_floating_point and tensor.dtype.itemsize < 4
        return tensor.float() if rounds and low else tensor

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Copy `tensor` from the group's `source` (an index in the group) to all, in place, and wait."""
        if self.size > 1:
            if self.index == source:
                self._count("broadcast", tensor.nbytes)
            self._pending(lambda: dist.broadcast(tensor, group_src=source, group=self._wires.group)).wait()

    def send(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start to send `tensor` to `peer` (an index in the group); it must not change before `wait`.

        A message is received by the same `tag`. Where tags mean nothing (NCCL), two ranks must start what passes
        between them in the same order.
        """
        tensor = tensor.contiguous()
        self._count("send", tensor.nbytes)
        with self._explained():
            work = self._wires.group.send([tensor], peer, tag)
        # The memory lives until then.
        return self._pending(lambda: (work.wait(), tensor), over=work.is_completed)

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start to fill contiguous `tensor` with what `peer` (an index in the group) sends under `tag`."""
        with self._explained():
            work = self._wires.group.recv([tensor], peer, tag)
        return self._pending(work.wait)

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

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except PeerLost:
            raise
        except RuntimeError as error:
            if isinstance(self._transport, InPlace):
                raise  # It says PeerLost itself; anything else is no peer's fault.
            # gloo puts the place in its own source before the reason, and guesses behind it.
            reason = re.sub(r"^\[[^\]]*\]\s*", "", str(error).strip()).split(". ")[0].splitlines()
            why = f" ({reason[0][:120]})" if reason else ""
            raise PeerLost(f"rank {self.ranks[self.index]} waited for a peer that left{why}") from None

    def _count(self, name: str, sent_bytes: int) -> None:
        self.traffic.sent_bytes[name] += sent_bytes

    def _done(self) -> Pending:
        return Pending(None, self.traffic, self.device)

    def _pending(self, finish: Callable[[], Any], *, over: Callable[[], bool] = lambda: False) -> Pending:
        def explained() -> None:
            with self._explained():
                finish()

        return Pending(explained, self.traffic, self.device, over=over)
