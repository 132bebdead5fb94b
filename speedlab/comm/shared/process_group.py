"""The shared-memory backend of torch.distributed for CPU ranks: `init_process_group("shared")`.

| ranks of a group                                 | class                                                             |
|--------------------------------------------------|-------------------------------------------------------------------|
| on one host                                      | SharedGroup                                                       |
| on several hosts, on some of them more than one  | SpanningGroup: shared memory inside a host, gloo between hosts    |
| one per host, or without shared memory           | gloo's                                                            |

Operations that a group does not implement (gather, scatter, reduce; in a SpanningGroup also all-to-all and messages)
use the group's own gloo group, after its ranks have compared the call in shared memory.

Every collective carries a description of its call (`call_descriptions.Call`), which all ranks compare before data are
moved. If a rank makes another call, all ranks raise CollectiveMismatch (`mismatch`).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions

from speedlab.comm.errors import PeerLost
from speedlab.comm.shared.call_descriptions import Call, Op, call, call_of, carrying_out, origin, refused
from speedlab.comm.shared.hierarchical import Hierarchy, host_of
from speedlab.comm.shared.memfd import AnonymousSegment, FileHandle, host_identity
from speedlab.comm.shared.p2p import P2PMailbox
from speedlab.comm.shared.shared_tensors import arena
from speedlab.comm.shared.staged_collectives import StagedCollectives, can_reduce, matched_parts
from speedlab.comm.shared.sync_page import SyncPage
from speedlab.comm.shared.work import Work, Worker
from speedlab.comm.timeouts import wait_for

BACKEND = "shared"
"""Name of the backend in torch.distributed."""

_groups: weakref.WeakSet[StagedGroup] = weakref.WeakSet()


class Collectives(Protocol):
    """The collectives of a group on contiguous CPU tensors: StagedCollectives or a Hierarchy."""

    def announce(self, call: Call) -> None:
        """Set the call; see `Hierarchy.announce`."""
        ...

    def agree(self) -> None:
        """Compare the call with the peers."""
        ...

    def barrier(self) -> None:
        """Wait until every rank arrives."""
        ...

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Reduce in place; see `Hierarchy.all_reduce`."""
        ...

    def reduce_scatter(self, out: Tensor, slices: Sequence[Tensor], op: dist.ReduceOp.RedOpType) -> None:
        """Reduce slices; see `Hierarchy.reduce_scatter`."""
        ...

    def all_gather(self, outs: Sequence[Tensor], part: Tensor) -> None:
        """Gather; see `Hierarchy.all_gather`."""
        ...

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Copy to all ranks; see `Hierarchy.broadcast`."""
        ...

    def mismatch(self, reason: str) -> PeerLost:
        """Return the error of the call; see `Hierarchy.mismatch`."""
        ...


class StagedGroup(dist.ProcessGroup):
    """The collectives of one group, with torch's interface. A thread executes asynchronous ones.

    Arguments and results of the collectives are those of torch.distributed.ProcessGroup. If `asyncOp` is false in
    the options and no other collective is queued, a collective runs in the caller's thread.

    Attributes:
        meeting: Pages of this rank's host, which has all ranks of the group or some of them.
    """

    def __init__(self, index: int, size: int, meeting: SyncPage, collectives: Collectives, gloo: Any) -> None:
        super().__init__(index, size)  # type: ignore[call-arg]  # a constructor the stubs do not know
        self.meeting = meeting
        self._collectives, self._ranks = collectives, meeting.ranks_of_group
        self._worker = Worker(f"shared memory, ranks {meeting.ranks}")
        self._gloo = gloo
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        _groups.add(self)

    def getBackendName(self) -> str:  # noqa: N802
        """Return the name of the backend."""
        return BACKEND

    def limit(self, seconds: float) -> None:
        """Set the timeout for peers on this host.

        Args:
            seconds: Timeout of later collectives.
        """
        self.meeting.timeout_seconds = seconds

    def leave(self) -> None:
        """Leave the group: peers that wait for this rank fail at once."""
        self._worker.stop()
        self.meeting.leave()

    def abort(self) -> None:
        """Leave the group."""
        self.leave()

    def shutdown(self) -> None:
        """Leave the group."""
        self.leave()

    # ---- reductions --------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Reduce tensors over the ranks, in place."""
        opts = opts or dist.AllreduceOptions()
        asked = call_of(Op.ALL_REDUCE, tensors, reduction=opts.reduceOp.op)
        if not self._reduces(tensors, opts):
            return self._by_gloo(asked, lambda: self._gloo.allreduce(tensors, opts), opts, tensors)
        return self._carry_out(asked, lambda: self._all_reduce_each(tensors, opts.reduceOp.op), opts, tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Reduce several tensors over the ranks, in place."""
        opts = opts or dist.AllreduceCoalescedOptions()
        asked = call_of(Op.ALL_REDUCE, tensors, reduction=opts.reduceOp.op)
        if not self._reduces(tensors, opts):
            return self._by_gloo(asked, lambda: self._gloo.allreduce_coalesced(tensors, opts), opts, tensors)
        return self._carry_out(asked, lambda: self._all_reduce_each(tensors, opts.reduceOp.op), opts, tensors)

    def _all_reduce_each(self, tensors: Sequence[Tensor], op: dist.ReduceOp.RedOpType) -> None:
        for tensor in tensors:
            with _Contiguous(tensor) as flat:
                self._collectives.all_reduce(flat, op)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        """Reduce this rank's slice of each list of tensors."""
        opts = opts or dist.ReduceScatterOptions()
        asked = call_of(Op.REDUCE_SCATTER, outputs, reduction=opts.reduceOp.op)
        if not self._reduces(outputs, opts):
            return self._by_gloo(asked, lambda: self._gloo.reduce_scatter(outputs, inputs, opts), opts, outputs)

        with self._telling_peers(Op.REDUCE_SCATTER):
            for out, parts in zip(outputs, inputs, strict=True):
                _check_equal("reduce_scatter", parts, out, self.size())

        def run() -> None:
            for out, parts in zip(outputs, inputs, strict=True):
                with _Contiguous(out) as flat:
                    self._collectives.reduce_scatter(flat, [part.contiguous() for part in parts], opts.reduceOp.op)

        return self._carry_out(asked, run, opts, outputs)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Reduce this rank's slice of several tensors."""
        with self._telling_peers(Op.REDUCE_SCATTER):
            slices = [list(_rows(whole, self.size())) for whole in inputs]
        return self.reduce_scatter(outputs, slices, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Reduce this rank's slice of one tensor."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    # ---- copies ------------------------------------------------------------------------------------------------------

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Gather each tensor into a list of tensors."""
        opts = opts or AllgatherOptions()
        asked = call_of(Op.ALL_GATHER, inputs)
        if not _on_cpu(inputs):
            return self._by_gloo(asked, lambda: self._gloo.allgather(outputs, inputs, opts), opts, outputs)

        with self._telling_peers(Op.ALL_GATHER):
            for outs, part in zip(outputs, inputs, strict=True):
                _check_equal("all_gather", outs, part, self.size())

        def run() -> None:
            for outs, part in zip(outputs, inputs, strict=True):
                targets = [out if out.is_contiguous() else torch.empty_like(out).contiguous() for out in outs]
                self._collectives.all_gather(targets, part.contiguous())
                for out, target in zip(outs, targets, strict=True):
                    if out is not target:
                        out.copy_(target)

        return self._carry_out(asked, run, opts, outputs)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        # These outputs are by rank, then by tensor; `allgather` expects them by tensor, then by rank.
        """Gather several tensors; outputs are ordered by rank."""
        return self.allgather([list(outs) for outs in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Gather several tensors into one tensor each."""
        with self._telling_peers(Op.ALL_GATHER):
            slices = [list(_rows(whole, self.size())) for whole in outputs]
        return self.allgather(slices, inputs, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Gather one tensor into one tensor."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Copy tensors from the root to all ranks."""
        opts = opts or dist.BroadcastOptions()
        asked = call_of(Op.BROADCAST, tensors, root=opts.rootRank)
        if not _on_cpu(tensors):
            return self._by_gloo(asked, lambda: self._gloo.broadcast(tensors, opts), opts, tensors)

        def run() -> None:
            for tensor in tensors:
                with _Contiguous(tensor) as flat:
                    self._collectives.broadcast(flat, opts.rootRank)

        return self._carry_out(asked, run, opts, tensors)

    def barrier(self, opts: Any = None) -> Any:
        """Wait until all ranks arrive."""
        return self._carry_out(call(Op.BARRIER), self._collectives.barrier, opts or dist.BarrierOptions(), [])

    # Older names of these methods in torch 2.11 and 2.12.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]  # other argument names
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]  # as above
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]  # as above

    # ---- gloo's ------------------------------------------------------------------------------------------------------
    # Call gloo directly. ProcessGroup's own dispatch may hold the GIL while it waits for a lock whose holder, a gloo
    # thread, waits for the GIL (seen in all_to_all_single of torch 2.13).

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Reduce tensors to the root, over gloo."""
        opts = opts or dist.ReduceOptions()
        asked = call_of(Op.REDUCE, tensors, reduction=opts.reduceOp.op, root=opts.rootRank)
        return self._by_gloo(asked, lambda: self._gloo.reduce(tensors, opts), opts, tensors)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Gather tensors on the root, over gloo."""
        opts = opts or dist.GatherOptions()
        if self.rank() == opts.rootRank:
            with self._telling_peers(Op.GATHER):
                _check_equal("gather", outputs[0], inputs[0], self.size())
        asked = call_of(Op.GATHER, inputs, root=opts.rootRank)
        return self._by_gloo(asked, lambda: self._gloo.gather(outputs, inputs, opts), opts, outputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        """Scatter tensors from the root, over gloo."""
        opts = opts or dist.ScatterOptions()
        if self.rank() == opts.rootRank:
            with self._telling_peers(Op.SCATTER):
                _check_equal("scatter", inputs[0], outputs[0], self.size())
        asked = call_of(Op.SCATTER, outputs, root=opts.rootRank)
        return self._by_gloo(asked, lambda: self._gloo.scatter(outputs, inputs, opts), opts, outputs)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Send one tensor to each rank, over gloo."""
        opts = opts or dist.AllToAllOptions()
        with self._telling_peers(Op.ALL_TO_ALL):
            _check_parts(outputs, inputs, self.size())

        def start() -> Any:
            matched_parts(self._collectives, self._ranks, inputs, outputs)
            return self._gloo.alltoall(outputs, inputs, opts)

        # The description has no size: each pair of ranks may exchange a different number of elements.
        return self._by_gloo(call(Op.ALL_TO_ALL, inputs[0].dtype), start, opts, outputs)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Any:
        """Send one part of a tensor to each rank, over gloo."""
        opts = opts or dist.AllToAllOptions()
        with self._telling_peers(Op.ALL_TO_ALL):
            outs, parts = _cut(output, output_splits, self.size()), _cut(input, input_splits, self.size())
            _check_parts(outs, parts, self.size())

        def start() -> Any:
            matched_parts(self._collectives, self._ranks, parts, outs)
            return self._gloo.alltoall_base(output, input, output_splits, input_splits, opts)

        return self._by_gloo(call(Op.ALL_TO_ALL, input.dtype), start, opts, [output])

    alltoall_base = all_to_all_single  # type: ignore[assignment]  # its name in torch 2.11 and 2.12

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> Any:
        """Send a tensor, over gloo."""
        return self._gloo.send(tensors, destination, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        """Receive a tensor, over gloo."""
        return self._gloo.recv(tensors, source, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Any:
        """Receive a tensor of any sender, over gloo."""
        return self._gloo.recv_anysource(tensors, tag)

    # ---- carrying out ------------------------------------------------------------------------------------------------

    def _carry_out(self, asked: Call, task: Callable[[], None], opts: Any, result: list[Any]) -> Any:
        """Run the collective: in this thread if the caller would wait anyway, otherwise on the group's thread."""
        if self._worker.idle and not getattr(opts, "asyncOp", True):
            with torch.no_grad():
                self._collectives.announce(asked)
                task()
            return Work(result)

        self.meeting.faults.check()
        frames = origin()

        def quietly() -> None:
            carrying_out(frames)
            with torch.no_grad():
                self._collectives.announce(asked)
                task()

        return self._worker.submit(quietly, result)

    def _by_gloo(self, asked: Call, start: Callable[[], Any], opts: Any, result: list[Any]) -> Any:
        """Run a collective that `start` passes to gloo; see `_carry_out`."""

        def run() -> None:
            self._collectives.agree()
            wait_for(start())

        return self._carry_out(asked, run, opts, result)

    @contextlib.contextmanager
    def _telling_peers(self, op: Op) -> Iterator[None]:
        """Notify the peers if the arguments of a collective are refused; otherwise they would wait for this rank.

        The group's thread does this, so that the caller does not wait. The group stays open if all ranks refuse the
        same arguments.
        """
        try:
            yield
        except ValueError as error:
            with contextlib.suppress(PeerLost):  # The group is closed; raise the caller's own mistake instead.
                self._carry_out(refused(op, error), self._collectives.agree, None, [])
            raise

    @staticmethod
    def _reduces(tensors: Sequence[Tensor], opts: Any) -> bool:
        return _on_cpu(tensors) and all(can_reduce(tensor.dtype, opts.reduceOp.op) for tensor in tensors)


class SharedGroup(StagedGroup):
    """A group of ranks on one host, with shared memory only."""

    def __init__(self, meeting: SyncPage, gloo: Any) -> None:
        self._rounds = StagedCollectives(meeting)
        super().__init__(meeting.index, meeting.size, meeting, self._rounds, gloo)
        self._mailbox = P2PMailbox(meeting)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> Any:
        """Send one part of a tensor to each rank."""
        size = self.size()
        with self._telling_peers(Op.ALL_TO_ALL):
            outs, parts = _cut(output, output_splits, size), _cut(input, input_splits, size)
        return self.alltoall(outs, parts, opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Send one tensor to each rank."""
        opts = opts or dist.AllToAllOptions()
        if not _on_cpu(inputs):
            return super().alltoall(outputs, inputs, opts)

        with self._telling_peers(Op.ALL_TO_ALL):
            _check_parts(outputs, inputs, self.size())

        def run() -> None:
            targets = [out if out.is_contiguous() else torch.empty_like(out).contiguous() for out in outputs]
            self._rounds.all_to_all(targets, [part.contiguous() for part in inputs])
            for out, target in zip(outputs, targets, strict=True):
                if out is not target:
                    out.copy_(target)

        return self._carry_out(call(Op.ALL_TO_ALL, inputs[0].dtype), run, opts, outputs)

    alltoall_base = all_to_all_single  # type: ignore[assignment]  # its name in torch 2.11 and 2.12

    # ---- messages ----------------------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> Any:
        """Copy a tensor to shared memory and notify the receiver."""
        for tensor in tensors:
            self._mailbox.send(tensor.detach().contiguous(), destination, tag)
        return Work(tensors)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        """Receive a tensor."""
        return self._receive(tensors[0], source, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Any:
        """Receive a tensor of any sender."""
        return self._receive(tensors[0], None, tag)

    def _receive(self, tensor: Tensor, source: int | None, tag: int) -> Any:
        target = tensor.detach() if tensor.is_contiguous() else torch.empty_like(tensor).contiguous()
        expected = self._mailbox.expect(target, source, tag)

        def finish() -> None:
            self._mailbox.finish(expected)
            if target.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(target)

        work = Work([tensor], finish, there=lambda: self._mailbox.is_over(expected))
        work._source_rank = lambda: expected.source  # type: ignore[method-assign]  # torch calls it after wait()
        return work


class SpanningGroup(StagedGroup):
    """A group of ranks on several hosts: shared memory inside a host, gloo between hosts."""

    def __init__(self, index: int, size: int, meeting: SyncPage, hierarchy: Hierarchy, gloo: Any) -> None:
        super().__init__(index, size, meeting, hierarchy, gloo)
        self._hierarchy = hierarchy

    @property
    def hosts(self) -> list[list[int]]:
        """Ranks of each host, as indices in the group."""
        return self._hierarchy.hosts

    def limit(self, seconds: float) -> None:
        """Set the timeout for all peers.

        Args:
            seconds: Timeout of later collectives.
        """
        super().limit(seconds)
        self._hierarchy.limit(seconds)

    def leave(self) -> None:
        """Leave the group on this host and close the connections to other hosts."""
        super().leave()
        self._hierarchy.leave()

    def _carry_out(self, asked: Call, task: Callable[[], None], opts: Any, result: list[Any]) -> Any:
        def run() -> None:
            try:
                self._hierarchy.meet()
                task()
            except PeerLost:
                self.leave()  # Leave, because ranks that wait for this one cannot see which peer it has lost.
                raise

        return super()._carry_out(asked, run, opts, result)


class _Contiguous:
    """Contiguous memory of a tensor inside this context, copied back at the end if necessary."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self._flat = self._tensor.contiguous()

    def __enter__(self) -> Tensor:
        return self._flat

    def __exit__(self, *error: Any) -> None:
        if self._flat.data_ptr() != self._tensor.data_ptr():
            self._tensor.copy_(self._flat)


def _on_cpu(tensors: Sequence[Tensor]) -> bool:
    return all(tensor.device.type == "cpu" and tensor.layout is torch.strided for tensor in tensors)


def _check_equal(name: str, many: Sequence[Tensor], one: Tensor, size: int) -> None:
    """Raise ValueError unless there is one tensor per rank, each with the size and dtype of `one`. Copies are by
    bytes.
    """
    if len(many) != size:
        raise ValueError(f"{name}: a list of {len(many)} tensors, expected one for each of the {size} ranks")
    for k, tensor in enumerate(many):
        if tensor.numel() != one.numel() or tensor.dtype != one.dtype:
            raise ValueError(
                f"{name}: tensor {k} of the list is {tuple(tensor.shape)} {tensor.dtype}, the single one "
                f"{tuple(one.shape)} {one.dtype}; expected as many elements of the same dtype"
            )


def _cut(whole: Tensor, sizes: list[int], count: int) -> list[Tensor]:
    """Split a tensor along its first dimension into parts of these sizes, or into equal ones.

    Raises ValueError if that is not possible.
    """
    rows = whole.shape[0] if whole.dim() else 0
    if sizes and sum(sizes) != rows:
        raise ValueError(f"all_to_all_single: a tensor of {rows} rows in parts of {sizes}, {sum(sizes)} in all")
    if not sizes and rows % count:
        raise ValueError(f"all_to_all_single: a tensor of {rows} rows for {count} ranks, expected equal parts")
    return list(whole.split(sizes) if sizes else whole.chunk(count))


def _check_parts(outputs: Sequence[Tensor], inputs: Sequence[Tensor], size: int) -> None:
    """Raise ValueError unless there are as many outputs and inputs as ranks, all of one dtype."""
    if not len(outputs) == len(inputs) == size:
        raise ValueError(
            f"all_to_all: {len(inputs)} tensors to send and {len(outputs)} to receive, expected one of each for "
            f"each of the {size} ranks"
        )
    dtypes = {str(tensor.dtype) for tensor in (*outputs, *inputs)}
    if len(dtypes) > 1:
        raise ValueError(f"all_to_all: tensors of {', '.join(sorted(dtypes))}, expected one dtype")


def _rows(whole: Tensor, size: int) -> Sequence[Tensor]:
    if not whole.is_contiguous() or whole.numel() % size:
        raise ValueError(
            f"a tensor of {tuple(whole.shape)} with strides {whole.stride()} is no {size} equal slices of contiguous "
            f"memory"
        )
    return whole.detach().view(size, -1).unbind()


# ---- setting up ------------------------------------------------------------------------------------------------------


def register() -> None:
    """Register the backend with torch.distributed, once."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])


def leave_all() -> None:
    """Leave every group of this process. Call this before `destroy_process_group`, which does not notify groups."""
    for group in list(_groups):
        group.leave()
    _groups.clear()


def _create(options: Any, _backend_options: Any) -> Any:
    """Create a group for torch.distributed; see the table above."""
    store, rank, size, timeout = options.store, options.group_rank, options.group_size, options.timeout
    gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    gloo._set_sequence_number_for_group()
    page, handle = AnonymousSegment.create(SyncPage.page_bytes(size))
    try:
        own = {
            "host": host_identity(),
            "name": os.environ.get("SPEEDLAB_HOST") or socket.gethostname(),
            "page": astuple(handle),
            "directory": astuple(arena().handle),
            "cores": sorted(os.sched_getaffinity(0)),
        }
        found = _exchange(store, "shared", own, rank, size)
        hosts = _by_host([peer["host"] for peer in found])
        if len(hosts) == size > 1:
            return gloo
        host = host_of(rank, hosts)
        handles = [(FileHandle(*found[k]["page"]), FileHandle(*found[k]["directory"])) for k in hosts[host]]
        names = options.global_ranks_in_group or range(size)
        try:
            place, ranks = hosts[host].index(rank), [names[k] for k in hosts[host]]
            cores = len(set().union(*(found[k]["cores"] for k in hosts[host])))
            meeting = SyncPage(
                page, handles, place, ranks, timeout.total_seconds(), cores=cores, ranks_of_group=list(names)
            )
            problem = ""
        except OSError as error:
            problem = str(error)
        # All ranks use shared memory, or none. This exchange also keeps each page open until all peers have opened it.
        if any(_exchange(store, "opened", problem, rank, size)):
            return gloo
    finally:
        handle.close()
    if len(hosts) == 1:
        group = SharedGroup(meeting, gloo)
    else:
        between = None
        if place == 0:
            between = dist.ProcessGroupGloo(dist.PrefixStore("leaders", store), host, len(hosts), timeout=timeout)
        host_names = [found[ranks[0]]["name"] for ranks in hosts]
        hierarchy = Hierarchy(hosts, rank, names, StagedCollectives(meeting), between, host_names)
        group = SpanningGroup(rank, size, meeting, hierarchy, gloo)
    weakref.finalize(group, meeting.leave).atexit = False
    return group


def _by_host(identities: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each host, the host of the lowest rank first."""
    hosts: dict[str, list[int]] = {}
    for k, identity in enumerate(identities):
        hosts.setdefault(identity, []).append(k)
    return list(hosts.values())


def _exchange(store: Any, key: str, own: Any, rank: int, size: int) -> list[Any]:
    store.set(f"{key}/{rank}", json.dumps(own))
    return [json.loads(store.get(f"{key}/{k}")) for k in range(size)]
