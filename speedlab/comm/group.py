"""Collectives over one axis of the layout: bytes are counted by name, and waits by their real duration.

- `DoubleBuffer`: two buffers that reductions use in turn. One is filled while the other is reduced and read by peers.
- `Group`: the ranks of one axis, and their collectives.
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

from speedlab.comm.errors import PeerLost, reports_lost_peer
from speedlab.comm.process_groups import HierarchicalGroups, ProcessGroups, groups_of_world, places_of
from speedlab.comm.rank_activity import lost_peers
from speedlab.comm.shared.mapped_shards import MappedShards
from speedlab.comm.simulated_link import own_link
from speedlab.comm.timeouts import wait_for
from speedlab.comm.transfers import BufferMeter, CommStats, Rotation, Transfer, begin
from speedlab.comm.transports.base import Finish, Transport, gather_whole, scatter_sum
from speedlab.comm.transports.nccl import exchange, rounds_often, scatter_sum_wide, sum_wide
from speedlab.comm.transports.select import GroupLink, choose, link_of
from speedlab.comm.world import check_peers

_BUFFERS = 2
"""Buffers of one kind that a pass uses in turn."""


class DoubleBuffer:
    """Reusable buffers of one group, by size and dtype."""

    def __init__(self, meter: BufferMeter) -> None:
        """Start without buffers.

        Args:
            meter: Counts the bytes of the buffers.
        """
        self._meter = meter
        self._idle: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        """Returned buffers by size and dtype, oldest first."""
        self._made: Counter[tuple[int, torch.dtype]] = Counter()
        """Number of existing buffers of each kind."""

    def borrow(
        self,
        numel: int,
        dtype: torch.dtype,
        *,
        empty: Callable[[int, torch.dtype], Tensor],
        wait_until_read: Callable[[Tensor], None],
    ) -> Tensor:
        """Return a buffer (numel,): a new one, or a returned one after peers have read it.

        Args:
            numel: Number of elements.
            dtype: Type of the elements.
            empty: Allocates a new buffer.
            wait_until_read: Waits until peers have read a buffer.
        """
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
        """Return a borrowed buffer."""
        self._idle[buffer.numel(), buffer.dtype].append(buffer)

    @property
    def idle(self) -> list[Tensor]:
        """All returned buffers."""
        return [buffer for buffers in self._idle.values() for buffer in buffers]

    def trim(self) -> None:
        """Free returned buffers beyond those that a pass uses in turn."""
        for key, idle in self._idle.items():
            self._free(key, idle[_BUFFERS:])
            del idle[_BUFFERS:]

    def drop(self) -> None:
        """Free all returned buffers."""
        for key, idle in self._idle.items():
            self._free(key, idle)
            idle.clear()

    def _free(self, key: tuple[int, torch.dtype], freed: list[Tensor]) -> None:
        """Subtract freed buffers from the counters."""
        self._meter.add(-sum(buffer.nbytes for buffer in freed))
        self._made[key] -= len(freed)


_INSIDE, _ACROSS = "inside", "across"
"""Channels of the subgroups of `rails`: ranks inside a host, and one rank on each host."""


class Group:
    """The ranks of one axis, as seen by one of them.

    All ranks must start the collectives of one Group in the same order. Flat parameters that may be gathered and
    reduced in different orders on different ranks need two Groups of the same ranks.
    """

    def __init__(
        self, ranks: Sequence[int], traffic: CommStats, device: torch.device, *, channel: str = "gather"
    ) -> None:
        """Connect the ranks. Collective over the world if the connections are new.

        Args:
            ranks: Global ranks of the group.
            traffic: Counts bytes and waits.
            device: Device of the tensors.
            channel: Groups with equal ranks and channel share connections, so a rebuilt engine opens no new ones.
        """
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
        """Take the connections of the current world. Collective over the world if the connections are new."""
        # A group of one rank needs no connections, and new_group would cost a rendezvous.
        self._wires: ProcessGroups | Any = groups_of_world(self._channel, tuple(self.ranks)) if self.size > 1 else None
        self._rotations: dict[Rotation, int] = {}
        self._rails: HierarchicalGroups[Group] | None = None
        self._knows_rails = False
        self._transports: dict[str, Transport | None] = {}
        self._links: dict[str, GroupLink] = {}
        """By kind of device: a group on a GPU may also have flat parameters on the host."""
        self.transport_of(self.device)
        self.drop_buffers()

    def disconnect(self) -> None:
        """Release the connections, so that they close when the world is left."""
        if self._rails is not None:
            self._rails.inside.disconnect()
            self._rails.across.disconnect()
        self._wires, self._transports, self._links = None, {}, {}

    def link(self, kind: str) -> GroupLink:
        """Return the link between the ranks for tensors on one kind of device.

        Args:
            kind: "cpu" or "cuda".
        """
        if kind not in self._links:
            self._links[kind] = link_of(None if self._wires is None else self._wires.group, kind)
        return self._links[kind]

    @property
    def at_hand(self) -> bool:
        """Whether ranks read each other's memory, so that transfers have no latency to hide."""
        return self._line is None and self.link(self.device.type) in (GroupLink.PROCESS, GroupLink.SHARED)

    def transport_of(self, device: torch.device) -> Transport | None:
        """Return the transport for flat parameters on `device`; None for a group of one rank.

        Args:
            device: Device of the tensors.
        """
        if device.type not in self._transports:
            link = self.link(device.type)
            made = choose(link, self._wires, self.size, self.index, device, self.traffic.buffers)
            if made is not None:
                # Over a simulated link no data may be used before its arrival time.
                made.sums_early = self._line is None
                self._wires.held_by(made)
            self._transports[device.type] = made
        return self._transports[device.type]

    def rails(self) -> HierarchicalGroups[Group] | None:
        """Return the group as a grid of hosts and places; None if hosts do not have equal numbers of CPU ranks, above
        one.

        Collective at the first call in a world: all groups of this axis must call it.
        """
        link = self.link(self.device.type)
        if not self._knows_rails and link in (GroupLink.HOSTS, GroupLink.GLOO, GroupLink.SHARED):
            hosts = self._wires.group.hosts if link is GroupLink.HOSTS else []
            places = places_of(hosts)
            if places is None:  # torch numbers groups by process, so every rank must make the same number of groups.
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
        """Allocate a tensor (numel,) that this group will often send or reduce, in the memory that is fastest for it.

        Args:
            numel: Number of elements.
            dtype: Type of the elements.
            place: Index of the tensor's first element in the gathered tensor.
        """
        transport = self.transport_of(self.device)
        if transport is None:
            return torch.empty(numel, dtype=dtype, device=self.device)
        return transport.empty(numel, dtype, place)

    def joined(self, numel: int, dtype: torch.dtype) -> MappedShards | None:
        """Return a tensor (numel,) for `join`, which maps the peers' memory without a copy; None if that is impossible.

        Args:
            numel: Number of elements over all ranks.
            dtype: Type of the elements.
        """
        transport = self.transport_of(self.device)
        return None if transport is None or not numel else transport.joined(numel, dtype)

    def borrow(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a buffer (numel,) for a reduction. This waits for peers if they still read all buffers of this kind.

        Args:
            numel: Number of elements.
            dtype: Type of the elements.
        """
        return self._buffers.borrow(numel, dtype, empty=self.empty, wait_until_read=self.wait_until_read)

    def give_back(self, buffer: Tensor) -> None:
        """Return a borrowed buffer whose reduction, if any, has ended on this rank.

        Args:
            buffer: Result of `borrow`.
        """
        self._buffers.give_back(buffer)

    @property
    def idle_buffers(self) -> list[Tensor]:
        """Returned buffers: between two steps, these are all buffers."""
        return self._buffers.idle

    def trim_buffers(self) -> None:
        """Free returned buffers beyond those that a pass uses in turn."""
        self._buffers.trim()

    def drop_buffers(self) -> None:
        """Free all returned buffers."""
        self._buffers.drop()

    @property
    def ordered(self) -> bool:
        """Whether every gather is a collective that all ranks must start in one order.

        Otherwise a rank reads offered shards of its peers whenever it needs them.
        """
        return any(transport.ordered for transport in self._in_use)

    def wait_until_read(self, reduced: Tensor) -> None:
        """Wait until peers no longer need a tensor whose reduction has ended on this rank.

        Args:
            reduced: Tensor of the reduction.
        """
        transport = self.transport_of(reduced.device)
        if transport is not None:
            self._started(lambda: transport.wait_until_read(reduced)).wait()

    def offer(self, shards: Sequence[Tensor]) -> None:
        """Announce the shards that the ranks will gather in the coming pass.

        Peers then read a shard when they need it, regardless of this rank's progress. Call `wait_until_all_read` before
        the shards change.

        Args:
            shards: Each shard once, in the same order on all ranks.
        """
        with self._explained():
            for shard in shards:
                transport = self.transport_of(shard.device)
                if transport is not None and shard.numel():  # Tensors without elements are not gathered either.
                    transport.offer([shard])

    def wait_until_all_read(self) -> None:
        """Wait until peers no longer need offered or reduced tensors, so that they may change."""
        for transport in self._in_use:
            self._started(transport.wait_until_all_read).wait()

    def wait_until_let_go(self, shards: Sequence[Tensor]) -> None:
        """Wait until no peer maps these shards in a joined tensor. Call `wait_until_all_read` first.

        Args:
            shards: Shards of this rank.
        """
        transport = self.transport_of(self.device)
        if transport is not None:
            self._started(lambda: transport.wait_until_let_go(shards)).wait()

    def withdraw(self) -> None:
        """Forget the offers of a pass that was aborted."""
        for transport in self._in_use:
            transport.withdraw()

    # ---- collectives -------------------------------------------------------------------------------------------------

    def all_gather(self, full: Tensor, shard: Tensor) -> Transfer:
        """Start to gather every rank's shard in rank order.

        Args:
            full: (n × m,), filled by the gather.
            shard: This rank's (m,); may be its slice of `full`.
        """
        own = full.view(self.size, -1)[self.index]
        # Transports expect this rank's shard in its slice of `full`.
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        transport = self.transport_of(full.device)
        if transport is None or full.numel() == 0:
            return self._done()
        with record_function("speedlab::all_gather"), self._explained():
            finish = transport.all_gather(full, shard, own)
        return self._started(finish, full.device, "all_gather", (self.size - 1) * own.nbytes)

    def join(self, joined: MappedShards, shard: Tensor) -> Transfer:
        """Start to gather into `joined.tensor`, which must not be written.

        Peers that want to change their shards wait until `joined.free()` (see `wait_until_let_go`).

        Args:
            joined: Result of `joined`.
            shard: This rank's (m,).
        """
        transport = self.transport_of(self.device)
        assert transport is not None  # Only a transport makes joined tensors.
        with record_function("speedlab::all_gather"), self._explained():
            finish = transport.join(joined, shard)
        return self._started(finish, self.device, "all_gather", (self.size - 1) * shard.nbytes)

    def reduce_scatter(self, full: Tensor, into: Tensor, *, accumulate: bool = False) -> Transfer:
        """Start to sum this rank's slice of every rank's `full`, in rank order.

        `full` must not be written before `wait_until_all_read`.

        Args:
            full: (n × m,).
            into: (m,); may be this rank's slice of `full`, and may have a wider dtype.
            accumulate: Add the sum to `into`.
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
        """Start to sum `full` (n × m,) over the ranks, in place.

        On CPUs the bits equal those of a reduce-scatter and a gather. NCCL rounds sums of 16-bit floats after every
        term here, unlike in all other methods.

        Args:
            full: (n × m,).
        """
        transport = self.transport_of(full.device)
        if transport is None or full.numel() == 0:
            return self._done()
        finish: list[Finish] = []
        with record_function("speedlab::all_reduce"), self._explained():
            begin = lambda: finish.append(transport.all_reduce(full))  # noqa: E731  # one expression
            # Starting may sum earlier reductions of peers: count this as communication, too.
            if full.device.type == "cpu":
                self.traffic.waited(begin, full.device)
            else:
                begin()
        return self._started(finish[0], full.device, "all_reduce", 2 * (self.size - 1) * full.nbytes // self.size)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors in a new tensor, with the same bits on all ranks. Blocks on CPUs.

        Args:
            tensor: Any shape.
        """
        total = tensor.clone(memory_format=torch.contiguous_format)
        if self.size > 1 and total.numel() > 0:
            # Sum 16-bit floats in float32 if the backend would round after every term.
            summed = sum_wide if self._rounds_often(total) else dist.all_reduce
            nbytes = 2 * (self.size - 1) * total.nbytes // self.size
            # an error keeps this closure, which must not hold the group
            finish = lambda: summed(total, group=self._wires.group)  # noqa: E731
            self._started(finish, total.device, "all_reduce", nbytes).wait()
        return total

    def sum_scalars(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks of a few numbers in a new tensor. Blocks on CPUs.

        Args:
            values: (k,).
        """
        return self.sum(values)

    def gather_along(self, tensor: Tensor, dim: int) -> Tensor:
        """Concatenate the ranks' tensors along `dim`, in rank order. Blocks on CPUs.

        Args:
            tensor: Same shape on all ranks.
            dim: Dimension to concatenate.
        """
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
        # Along dimension 0 the gathered memory already has the right order.
        return every.flatten(0, 1) if dim == 0 else torch.cat(every.unbind(), dim)

    def scatter_sum(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's slice of the sum of the ranks' tensors. Blocks on CPUs.

        Args:
            tensor: Same shape on all ranks.
            dim: Dimension that is cut into equal slices, one per rank.
        """
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
        """Return whether torch's own sum over the ranks would round after each of several 16-bit terms."""
        ours = self.link(tensor.device.type) in (GroupLink.SHARED, GroupLink.HOSTS)
        return not ours and rounds_often(tensor.dtype, self.size)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Copy `tensor` from one rank to all, in place, and wait.

        Args:
            tensor: Any shape.
            source: Index of the sender in the group.
        """
        if self.size > 1:
            self._started(
                lambda: dist.broadcast(tensor, group_src=source, group=self._wires.group),
                tensor.device,
                "broadcast",
                tensor.nbytes if self.index == source else 0,
            ).wait()

    def send(self, tensor: Tensor, peer: int, tag: int) -> Transfer:
        """Start to send `tensor`, which must not change before `wait`.

        On NCCL, which ignores tags, two ranks must start their messages in the same order.

        Args:
            tensor: Any shape.
            peer: Index of the receiver in the group.
            tag: Tag of the matching `receive`.
        """
        tensor = tensor.contiguous()
        line, own = self._line, self._wires  # An error keeps this frame; no local variable may hold the process group.
        with self._explained():
            work = own.group.send([tensor], peer, tag) if line is None else line.send(own.group, tensor, peer, tag)
        # The closure keeps the memory until the send has ended.
        finish = lambda: (wait_for(work, tensor), tensor)  # noqa: E731  # one expression
        return self._started(finish, tensor.device, "send", tensor.nbytes, over=work.is_completed, booked=True)

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Transfer:
        """Start to receive into `tensor`.

        Args:
            tensor: Contiguous.
            peer: Index of the sender in the group.
            tag: Tag of the matching `send`.
        """
        line, own = self._line, self._wires  # As in `send`.
        with self._explained():
            work = own.group.recv([tensor], peer, tag) if line is None else line.receive(own.group, tensor, peer, tag)
        return self._started(lambda: wait_for(work, tensor), tensor.device)

    def take_tags(self, count: int) -> int:
        """Reserve consecutive tags and return the first one.

        The tags are equal on all ranks that reserve the same numbers.

        Args:
            count: Number of tags.
        """
        return self._wires.take_tags(count)

    def rotate(self, tensor: Tensor, tag: int) -> Rotation:
        """Start to send `tensor` to the next rank and to receive as much from the previous one; see `shift`.

        Args:
            tensor: Same shape on all ranks.
            tag: Tag from `take_tags`, used once.
        """
        return self.shift(tensor, torch.empty_like(tensor, memory_format=torch.contiguous_format), 1, tag)

    def shift(self, sent: Tensor, into: Tensor, places: int, tag: int) -> Rotation:
        """Start to send to one rank of the ring and to receive from the opposite one. Neither tensor may change before
        `wait`.

        A transfer without `wait`, after an exception, is kept until 2 · `size` others have ended. gloo sends from this
        memory when the receiver asks for it, and handles nothing else while received data have no target.

        Args:
            sent: Tensor to send; if empty, nothing is sent.
            into: Contiguous tensor to fill, with the same dtype; if empty, nothing is received.
            places: Distance to the receiver, negative for backwards. The sender has the same distance on the other
                side.
            tag: Tag from `take_tags`, used once.
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
        """Send slice k to rank k and return the received slices (all-to-all). Blocks on CPUs.

        Args:
            slices: (n, …).

        Returns:
            (n, …): slice k comes from rank k.
        """
        sent = slices.contiguous()
        received = torch.empty_like(sent)
        self._counted_exchange(sent, lambda: exchange(received, sent, self._wires.group)).wait()
        return received

    def start_exchange(self, sent: Tensor, received: Tensor) -> Transfer:
        """Start an `exchange`.

        Args:
            sent: Contiguous; must not change before `wait`.
            received: Contiguous, same shape.
        """
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
        """Return a small JSON value of rank `source`, on every rank. JSON, because network data are never unpickled.

        Args:
            value: Value that JSON can hold; used on `source` only.
            source: Index of the sender in the group.
        """
        payload = json.dumps(value).encode() if self.index == source else b""
        # Use host memory, so gloo, even in NCCL groups: no device sync, and a group without other collectives opens no
        # NCCL communicator.
        length = torch.tensor([len(payload)])
        self.broadcast(length, source)
        data = torch.empty(int(length), dtype=torch.uint8)
        if self.index == source:
            data.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        self.broadcast(data, source)
        return json.loads(bytes(data.numpy()))

    def collect(self, value: Any) -> list[Any]:
        """Return every rank's small JSON value, in rank order, on every rank.

        Args:
            value: Value that JSON can hold.
        """
        return [self.share(value, source) for source in range(self.size)]

    def barrier(self) -> None:
        """Wait on the host until every rank arrives. Device work is not awaited."""
        self.sum_scalars(torch.zeros(1))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        with lost_peers(f"rank {self.ranks[self.index]} waited for"):
            try:
                yield
            except RuntimeError as error:
                if not isinstance(error, PeerLost) and reports_lost_peer(error):
                    check_peers()  # Raises an error with the name of the lost rank, if known.
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
        """Return a transfer whose `finish` explains its errors.

        Args:
            finish: Waits for the result.
            device: Device of the tensors; None for the group's device.
            name: Name of the collective, for counters.
            nbytes: Bytes that this rank sends.
            over: Returns whether the transfer has ended.
            booked: The message itself waits for the simulated link.
        """
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
            # The backend uses its own streams; `wait` makes this stream wait for them.
            stream=torch.cuda.current_stream(device) if device.type == "cuda" else None,
            over=over,
        )
        if device.type == "cpu" and self._wires is not None:
            self._wires.held_by(transfer)
        return transfer
