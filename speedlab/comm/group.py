"""Collectives over one axis of the layout, counted: bytes sent by name, and the time a rank really waited.

Buffers that reductions use in turn: one is filled while the other is reduced and read by peers.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function

from speedlab.comm.errors import PeerLost, tells_of_lost_peer
from speedlab.comm.process_groups import HierarchicalGroups, ProcessGroups, groups_of_world, places_of
from speedlab.comm.rank_activity import lost_peers
from speedlab.comm.ring_exchange import Rotation, begin
from speedlab.comm.shared.mapped_shards import MappedShards
from speedlab.comm.simulated_link import own_link
from speedlab.comm.timeouts import wait_for
from speedlab.comm.transfers import BufferMeter, CommStats, Transfer
from speedlab.comm.transports.base import Finish, Transport, gather_whole, scatter_sum
from speedlab.comm.transports.nccl import exchange, rounds_often, scatter_sum_wide, sum_wide
from speedlab.comm.transports.select import GroupLink, choose, link_of
from speedlab.comm.world import check_peers

_BUFFERS = 2
"""Buffers of one kind that a pass uses."""


class DoubleBuffer:
    """The buffers of one group."""

    def __init__(self, meter: BufferMeter) -> None:
        """`meter` counts their bytes."""
        self._meter = meter
        self._idle: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        """Those that were given back, by size and dtype, the one that was first given back first."""
        self._made: Counter[tuple[int, torch.dtype]] = Counter()
        """How many of each kind there are."""

    def borrow(
        self,
        numel: int,
        dtype: torch.dtype,
        *,
        empty: Callable[[int, torch.dtype], Tensor],
        wait_until_read: Callable[[Tensor], None],
    ) -> Tensor:
        """A buffer (numel,), of new `empty` memory, or one that was given back, where it was waited until peers have
        read it."""
        key = numel, dtype
        idle = self._idle.setdefault(key, [])
        if not idle or self._made[key] < _BUFFERS:
            buffer = empty(numel, dtype)
            self._made[key] += 1
            self._meter.add(buffer.nbytes)
            return buffer
        buffer = idle.pop(0)
        wait_until_read(buffer)
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        self._idle[buffer.numel(), buffer.dtype].append(buffer)

    @property
    def idle(self) -> list[Tensor]:
        """Those that were given back."""
        return [buffer for buffers in self._idle.values() for buffer in buffers]

    def trim(self) -> None:
        """Free what was given back beyond what a pass uses in turn."""
        for key, idle in self._idle.items():
            self._free(key, idle[_BUFFERS:])
            del idle[_BUFFERS:]

    def drop(self) -> None:
        """Free what was given back."""
        for key, idle in self._idle.items():
            self._free(key, idle)
            idle.clear()

    def _free(self, key: tuple[int, torch.dtype], freed: list[Tensor]) -> None:
        """Count these out."""
        self._meter.add(-sum(buffer.nbytes for buffer in freed))
        self._made[key] -= len(freed)


_INSIDE, _ACROSS = "inside", "across"
"""Channels of a group's hosts and rails."""


class Group:
    """The ranks of one axis, as seen by one of them.

    Collectives of one Group must be started in the same order by all its ranks. Flats that may be gathered and reduced
    in different orders on different ranks go through two Groups of the same ranks.
    """

    def __init__(
        self, ranks: Sequence[int], traffic: CommStats, device: torch.device, *, channel: str = "gather"
    ) -> None:
        """`channel`: Groups of the same ranks and channel share their wires, so that setting up again opens no new
        ones."""
        self.ranks = list(ranks)
        self.size = len(self.ranks)
        self.index = self.ranks.index(dist.get_rank())
        self.device = device
        self.traffic = traffic
        self._channel = channel
        self._buffers = DoubleBuffer(traffic.buffers)
        self._line = own_link()
        self.reconnect()

    def reconnect(self) -> None:
        """Take the wires of the present world. Collective over the world when they are new."""
        # A group of one needs no wires, and new_group would cost a rendezvous.
        self._wires: ProcessGroups | Any = groups_of_world(self._channel, tuple(self.ranks)) if self.size > 1 else None
        self._rotations: dict[Rotation, int] = {}
        self._rails: HierarchicalGroups[Group] | None = None
        self._knows_rails = False
        self._transports: dict[str, Transport | None] = {}
        self._links: dict[str, GroupLink] = {}
        """By kind of device: a group whose device is a GPU may have flats on the host too."""
        self.transport_of(self.device)
        self.drop_buffers()

    def disconnect(self) -> None:
        """Let go of the wires, so that they close when the world is left."""
        if self._rails is not None:
            self._rails.inside.disconnect()
            self._rails.across.disconnect()
        self._wires, self._transports, self._links = None, {}, {}

    def link(self, kind: str) -> GroupLink:
        """What lies between the ranks for tensors on devices of `kind`."""
        if kind not in self._links:
            self._links[kind] = link_of(None if self._wires is None else self._wires.group, kind)
        return self._links[kind]

    @property
    def at_hand(self) -> bool:
        """Whether ranks read each other's memory: nothing is under way for a while."""
        return self._line is None and self.link(self.device.type) in (GroupLink.PROCESS, GroupLink.SHARED)

    def transport_of(self, device: torch.device) -> Transport | None:
        """What moves flats that live on `device`; None where nothing travels."""
        if device.type not in self._transports:
            link = self.link(device.type)
            made = choose(link, self._wires, self.size, self.index, device, self.traffic.buffers)
            if made is not None:
                made.sums_early = self._line is None  # Over a pretended link nothing is there before it has arrived.
                self._wires.held_by(made)
            self._transports[device.type] = made
        return self._transports[device.type]

    def rails(self) -> HierarchicalGroups[Group] | None:
        """The group as hosts by places, where it spans hosts of which each has equally many of its CPU ranks, more than
        one. Collective the first time in a world: all groups of this axis ask."""
        link = self.link(self.device.type)
        if not self._knows_rails and link in (GroupLink.HOSTS, GroupLink.GLOO, GroupLink.SHARED):
            hosts = self._wires.group.hosts if link is GroupLink.HOSTS else []
            places = places_of(hosts)
            if places is None:  # Every rank must make equally many groups, or torch names them differently.
                for channel in (_INSIDE, _ACROSS):
                    groups_of_world(channel, (self.ranks[self.index],))
            else:
                host = next(ranks for ranks in hosts if self.index in ranks)
                place = next(ranks for ranks in places if self.index in ranks)
                inside, across = (
                    Group([self.ranks[k] for k in ranks], self.traffic, self.device, channel=channel)
                    for ranks, channel in ((host, _INSIDE), (place, _ACROSS))
                )
                self._rails = HierarchicalGroups(inside, across, places)
        self._knows_rails = True
        return self._rails

    @property
    def _in_use(self) -> list[Transport]:
        return [transport for transport in self._transports.values() if transport is not None]

    # ---- memory ------------------------------------------------------------------------------------------------------

    def empty(self, numel: int, dtype: torch.dtype, *, place: int = 0) -> Tensor:
        """Memory (numel,) for a tensor that this group will send or reduce often, where that is fastest. `place`: which
        element of what is gathered of such ones it begins with."""
        transport = self.transport_of(self.device)
        if transport is None:
            return torch.empty(numel, dtype=dtype, device=self.device)
        return transport.empty(numel, dtype, place)

    def joined(self, numel: int, dtype: torch.dtype) -> MappedShards | None:
        """A tensor (numel,) for `join`, which maps what peers have instead of copying it; None where that cannot be
        done."""
        transport = self.transport_of(self.device)
        return None if transport is None or not numel else transport.joined(numel, dtype)

    def borrow(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A buffer (numel,) for a reduction; waits for the peers when all of its kind are still being read."""
        return self._buffers.borrow(numel, dtype, empty=self.empty, wait_until_read=self.wait_until_read)

    def give_back(self, buffer: Tensor) -> None:
        """End the use of a borrowed buffer; its reduction, if there was one, has ended on this rank."""
        self._buffers.give_back(buffer)

    @property
    def idle_buffers(self) -> list[Tensor]:
        """Those that were given back: between two steps, all there are."""
        return self._buffers.idle

    def trim_buffers(self) -> None:
        """Free what was given back beyond the buffers of each kind that a pass uses in turn."""
        self._buffers.trim()

    def drop_buffers(self) -> None:
        """Free what was given back."""
        self._buffers.drop()

    @property
    def ordered(self) -> bool:
        """Whether every gather is a collective of its own, which all ranks have to start in one order; else a rank
        takes what its peers have offered when it needs it."""
        return any(transport.ordered for transport in self._in_use)

    def wait_until_read(self, reduced: Tensor) -> None:
        """Wait until the peers need nothing more of a tensor whose reduction has ended on this rank."""
        transport = self.transport_of(reduced.device)
        if transport is not None:
            self._started(lambda: transport.wait_until_read(reduced)).wait()

    def offer(self, shards: Sequence[Tensor]) -> None:
        """Announce the `shards` that the ranks will gather in a coming pass, each once, in an order all ranks share.

        Peers then take a shard when they need it, however far this rank has come. Call `wait_until_all_read` before
        the shards change.
        """
        with self._explained():
            for shard in shards:
                transport = self.transport_of(shard.device)
                if transport is not None and shard.numel():  # What has no elements is not gathered either.
                    transport.offer([shard])

    def wait_until_all_read(self) -> None:
        """Wait until the peers need nothing more of what was offered or reduced; it may change afterwards."""
        for transport in self._in_use:
            self._started(transport.wait_until_all_read).wait()

    def wait_until_let_go(self, shards: Sequence[Tensor]) -> None:
        """After `wait_until_all_read`: wait until no peer has one of these in a joined tensor."""
        transport = self.transport_of(self.device)
        if transport is not None:
            self._started(lambda: transport.wait_until_let_go(shards)).wait()

    def withdraw(self) -> None:
        """Stop counting on the offers of a pass that was broken off."""
        for transport in self._in_use:
            transport.withdraw()

    # ---- collectives -------------------------------------------------------------------------------------------------

    def all_gather(self, full: Tensor, shard: Tensor) -> Transfer:
        """Start to fill `full` (n × m,) with every rank's `shard` (m,), in rank order. `shard` may be its own slice of
        `full`."""
        own = full.view(self.size, -1)[self.index]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        transport = self.transport_of(full.device)
        if transport is None or full.numel() == 0:
            return self._done()
        with record_function("speedlab::all_gather"), self._explained():
            finish = transport.all_gather(full, shard, own)
        return self._started(finish, full.device, "all_gather", (self.size - 1) * own.nbytes)

    def join(self, joined: MappedShards, shard: Tensor) -> Transfer:
        """As `all_gather` of `joined.tensor`, which must not be written. Until `joined.free()` peers wait, before they
        change their shards (`wait_until_let_go`)."""
        transport = self.transport_of(self.device)
        assert transport is not None  # It made one of this size.
        with record_function("speedlab::all_gather"), self._explained():
            finish = transport.join(joined, shard)
        return self._started(finish, self.device, "all_gather", (self.size - 1) * shard.nbytes)

    def reduce_scatter(self, full: Tensor, into: Tensor, *, accumulate: bool = False) -> Transfer:
        """Start to sum slice `index` of every rank's `full` (n × m,) into `into` (m,); `accumulate` adds to what is
        there.

        `into` may be this rank's own slice of `full`, and may be of a wider dtype. Sums are taken in rank order.
        `full` must not be written again before `wait_until_all_read`.
        """
        own = full.view(self.size, -1)[self.index]
        transport = self.transport_of(full.device)
        if transport is None or full.numel() == 0:
            if accumulate:
                into.add_(own)
            elif into.data_ptr() != own.data_ptr():
                into.copy_(own)
            return self._done()
        with record_function("speedlab::reduce_scatter"), self._explained():
            finish = transport.reduce_scatter(full, into, accumulate)
        return self._started(finish, full.device, "reduce_scatter", (self.size - 1) * own.nbytes)

    def all_reduce(self, full: Tensor) -> Transfer:
        """Start to sum `full` (n × m,) over the ranks, in place; on CPUs the same bits as a reduce-scatter and a
        gather. NCCL's sums of 16-bit floats are rounded after every term here, unlike those of all other methods."""
        transport = self.transport_of(full.device)
        if transport is None or full.numel() == 0:
            return self._done()
        finish: list[Finish] = []
        with record_function("speedlab::all_reduce"), self._explained():
            begin = lambda: finish.append(transport.all_reduce(full))  # noqa: E731  # one expression
            if full.device.type == "cpu":  # It may sum what others have begun: communication, too.
                self.traffic.waited(begin, full.device)
            else:
                begin()
        return self._started(finish[0], full.device, "all_reduce", 2 * (self.size - 1) * full.nbytes // self.size)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks of any `tensor`, in a new one, with the same bits on all ranks. Waits on CPUs."""
        total = tensor.clone(memory_format=torch.contiguous_format)
        if self.size > 1 and total.numel() > 0:
            summed = sum_wide if self._rounds_often(total) else dist.all_reduce
            nbytes = 2 * (self.size - 1) * total.nbytes // self.size
            finish = lambda: summed(total, group=self._wires.group)  # noqa: E731  # held here, it must not hold the group
            self._started(finish, total.device, "all_reduce", nbytes).wait()
        return total

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
            self._started(
                lambda: gather_whole(every.view(-1), own.view(-1), group=self._wires.group),
                own.device,
                "all_gather",
                (self.size - 1) * own.nbytes,
            ).wait()
        return every.flatten(0, 1) if dim == 0 else torch.cat(every.unbind(), dim)

    def scatter_sum(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's slice, one of `size` equal ones along `dim`, of the sum of the ranks' tensors. Waits on CPUs."""
        if self.size == 1:
            return tensor
        slices = torch.stack(tensor.chunk(self.size, dim))
        own = torch.empty_like(slices[0])
        if own.numel() > 0:
            summed = scatter_sum_wide if self._rounds_often(slices) else scatter_sum
            nbytes = (self.size - 1) * own.nbytes
            finish = lambda: summed(own.view(-1), slices.view(-1), group=self._wires.group)  # noqa: E731  # as in `sum`
            self._started(finish, own.device, "reduce_scatter", nbytes).wait()
        return own

    def _rounds_often(self, tensor: Tensor) -> bool:
        """Whether torch's own sum over the ranks would be rounded after each of several narrow terms."""
        ours = self.link(tensor.device.type) in (GroupLink.SHARED, GroupLink.HOSTS)
        return not ours and rounds_often(tensor.dtype, self.size)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Copy `tensor` from the group's `source` (an index in the group) to all, in place, and wait."""
        if self.size > 1:
            self._started(
                lambda: dist.broadcast(tensor, group_src=source, group=self._wires.group),
                tensor.device,
                "broadcast",
                tensor.nbytes if self.index == source else 0,
            ).wait()

    def send(self, tensor: Tensor, peer: int, tag: int) -> Transfer:
        """Start to send `tensor` to `peer` (an index in the group); it must not change before `wait`.

        A message is received by the same `tag`. Where tags mean nothing (NCCL), two ranks must start what passes
        between them in the same order.
        """
        tensor = tensor.contiguous()
        line, own = self._line, self._wires  # An error keeps this frame, where no variable may hold the group.
        with self._explained():
            work = own.group.send([tensor], peer, tag) if line is None else line.send(own.group, tensor, peer, tag)
        # The memory lives until then.
        finish = lambda: (wait_for(work, tensor), tensor)  # noqa: E731  # one expression
        return self._started(finish, tensor.device, "send", tensor.nbytes, over=work.is_completed, booked=True)

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Transfer:
        """Start to fill contiguous `tensor` with what `peer` (an index in the group) sends under `tag`."""
        line, own = self._line, self._wires  # As in `send`.
        with self._explained():
            work = own.group.recv([tensor], peer, tag) if line is None else line.receive(own.group, tensor, peer, tag)
        return self._started(lambda: wait_for(work, tensor), tensor.device)

    def take_tags(self, count: int) -> int:
        """The first of `count` tags in a row, the same on all ranks that take equally many."""
        return self._wires.take_tags(count)

    def rotate(self, tensor: Tensor, tag: int) -> Rotation:
        """`shift` by one place, where all ranks send equally much."""
        return self.shift(tensor, torch.empty_like(tensor, memory_format=torch.contiguous_format), 1, tag)

    def shift(self, sent: Tensor, into: Tensor, places: int, tag: int) -> Rotation:
        """Start to send `sent` to the rank `places` further round, back where negative, and to fill contiguous `into`
        with what the one as many before sends, of the same dtype; where either is empty, nothing travels. Neither must
        change before `wait`. `tag`: of `take_tags`, each used once.

        One that nobody waits for, after an exception, goes on until 2 · `size` others were waited for: gloo sends from
        this memory when the receiver asks for it, and reads nothing else while it has no place for what came.
        """
        out, received = (each.view(-1).view(torch.uint8) for each in (sent.contiguous(), into))
        to, source = (self.index + places) % self.size, (self.index - places) % self.size
        with self._explained():
            works = begin(out, to, received, source, tag, self._wires.group)
        finish = lambda: ([wait_for(work, out) for work in works], out)  # noqa: E731  # one expression
        rotation = Rotation(into, self._started(finish, sent.device, "send", sent.nbytes), self._rotations)
        self._rotations[rotation] = 2 * self.size
        return rotation

    def exchange(self, slices: Tensor) -> Tensor:
        """Slice k of `slices` (n, …) goes to rank k; slice k of what is returned comes from it. Waits on CPUs."""
        sent = slices.contiguous()
        received = torch.empty_like(sent)
        self._counted_exchange(sent, lambda: exchange(received, sent, self._wires.group)).wait()
        return received

    def start_exchange(self, sent: Tensor, received: Tensor) -> Transfer:
        """As `exchange`, of contiguous tensors, of which `sent` must not change before `wait`."""
        if self.size == 1:
            received.copy_(sent)
            return self._done()
        with self._explained():
            work = exchange(received, sent, self._wires.group, async_op=True)
        assert work is not None  # Asynchronous.
        return self._counted_exchange(sent, work.wait)

    def _counted_exchange(self, sent: Tensor, finish: Callable[[], Any]) -> Transfer:
        nbytes = (self.size - 1) * sent.nbytes // self.size
        return self._started(finish, sent.device, "all_to_all", nbytes)

    def share(self, value: Any, source: int = 0) -> Any:
        """A small JSON value of `source`, on every rank. JSON, because nothing is ever unpickled from the network."""
        payload = json.dumps(value).encode() if self.index == source else b""
        # In the host's memory: over gloo, also where flats travel over NCCL. Nothing waits for a device, and a group
        # that does nothing else opens no communicator.
        length = torch.tensor([len(payload)])
        self.broadcast(length, source)
        data = torch.empty(int(length), dtype=torch.uint8)
        if self.index == source:
            data.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        self.broadcast(data, source)
        return json.loads(bytes(data.numpy()))

    def collect(self, value: Any) -> list[Any]:
        """Every rank's small JSON value, in rank order, on every rank."""
        return [self.share(value, source) for source in range(self.size)]

    def barrier(self) -> None:
        """Wait, on the host, until every rank of the group is here. What their devices still do is not waited for."""
        self.sum_scalars(torch.zeros(1))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        with lost_peers(f"rank {self.ranks[self.index]} waited for"):
            try:
                yield
            except RuntimeError as error:
                if not isinstance(error, PeerLost) and tells_of_lost_peer(error):
                    check_peers()  # Says which rank, where that is known.
                raise

    def _done(self) -> Transfer:
        return Transfer(None, self.traffic, self.device, link=GroupLink.PROCESS.value)

    def _started(
        self,
        finish: Callable[[], Any],
        device: torch.device | None = None,
        name: str = "",
        nbytes: int = 0,
        *,
        over: Callable[[], bool] = lambda: False,
        booked: bool = False,
    ) -> Transfer:
        """A transfer between tensors on `device` (the group's own where None), whose `finish` explains its errors.
        `booked`: it waits by itself for a link that is pretended."""
        line = None if booked or not nbytes else self._line
        there = 0.0 if line is None else line.book(name, nbytes)

        def explained() -> None:
            if line is not None:
                line.wait_until(there)
            with self._explained():
                finish()

        device = device or self.device
        transfer = Transfer(
            explained,
            self.traffic,
            device,
            name=name,
            link=self.link(device.type).value if self._line is None else str(self._line),
            nbytes=nbytes,
            # The backend's own streams run beside it; `wait` orders it after them.
            stream=torch.cuda.current_stream(device) if device.type == "cuda" else None,
            over=over,
        )
        if device.type == "cpu" and self._wires is not None:
            self._wires.held_by(transfer)
        return transfer
