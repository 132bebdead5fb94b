"""The shared-memory backend of torch.distributed for CPU ranks: `init_process_group("shared")`.

| the ranks of a group are …                       | the group is                                                      |
|--------------------------------------------------|-------------------------------------------------------------------|
| on one host                                      | a SharedGroup                                                     |
| on several hosts, on some of them more than one  | a SpanningGroup: shared memory within a host, gloo between hosts  |
| each on a host of its own, or cannot share memory| gloo's                                                            |

What a group does not do itself (gather, scatter, reduce; of a SpanningGroup also all-to-all and messages) goes to gloo,
which it carries along, after its ranks have compared the call in shared memory.

Every collective carries a description of the call (`calls.Call`), which all ranks compare before data moves. If a rank
calls something else, all ranks raise CollectiveMismatch (`faults`).
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
"""The name under which torch.distributed knows it."""

_groups: weakref.WeakSet[StagedGroup] = weakref.WeakSet()


class Collectives(Protocol):
    """What carries out a group's collectives, on contiguous CPU tensors: Rounds or a Hierarchy."""

    def announce(self, call: Call) -> None: ...
    def agree(self) -> None: ...
    def barrier(self) -> None: ...
    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> None: ...
    def reduce_scatter(self, out: Tensor, slices: Sequence[Tensor], op: dist.ReduceOp.RedOpType) -> None: ...
    def all_gather(self, outs: Sequence[Tensor], part: Tensor) -> None: ...
    def broadcast(self, tensor: Tensor, source: int) -> None: ...
    def mismatch(self, reason: str) -> PeerLost: ...


class StagedGroup(dist.ProcessGroup):
    """The collectives of one group, as torch calls them; asynchronous ones are carried out by a thread.

    `meeting` is that of this rank's host, which is the whole group or a part of it.
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
        return BACKEND

    def limit(self, seconds: float) -> None:
        """How long collectives from now on wait for peers of this host."""
        self.meeting.timeout_seconds = seconds

    def leave(self) -> None:
        """Take part no more: peers that wait for this rank fail at once."""
        self._worker.stop()
        self.meeting.leave()

    def abort(self) -> None:
        self.leave()

    def shutdown(self) -> None:
        self.leave()

    # ---- reductions --------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        opts = opts or dist.AllreduceOptions()
        asked = call_of(Op.ALL_REDUCE, tensors, reduction=opts.reduceOp.op)
        if not self._reduces(tensors, opts):
            return self._by_gloo(asked, lambda: self._gloo.allreduce(tensors, opts), opts, tensors)
        return self._carry_out(asked, lambda: self._all_reduce_each(tensors, opts.reduceOp.op), opts, tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
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
        with self._telling_peers(Op.REDUCE_SCATTER):
            slices = [list(_rows(whole, self.size())) for whole in inputs]
        return self.reduce_scatter(outputs, slices, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    # ---- copies ------------------------------------------------------------------------------------------------------

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
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
        # Outputs by rank, then by tensor; `allgather` has them by tensor, then by rank.
        return self.allgather([list(outs) for outs in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        with self._telling_peers(Op.ALL_GATHER):
            slices = [list(_rows(whole, self.size())) for whole in outputs]
        return self.allgather(slices, inputs, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [input], opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
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
        return self._carry_out(call(Op.BARRIER), self._collectives.barrier, opts or dist.BarrierOptions(), [])

    # torch 2.11 and 2.12 know these under their older names.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]  # other argument names
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]  # as above
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]  # as above

    # ---- gloo's ------------------------------------------------------------------------------------------------------
    # Named here, because ProcessGroup's own way to a backend may keep the GIL while it waits for a lock whose holder, a
    # thread of gloo's, waits for the GIL (seen in all_to_all_single of torch 2.13).

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        opts = opts or dist.ReduceOptions()
        asked = call_of(Op.REDUCE, tensors, reduction=opts.reduceOp.op, root=opts.rootRank)
        return self._by_gloo(asked, lambda: self._gloo.reduce(tensors, opts), opts, tensors)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        opts = opts or dist.GatherOptions()
        if self.rank() == opts.rootRank:
            with self._telling_peers(Op.GATHER):
                _check_equal("gather", outputs[0], inputs[0], self.size())
        asked = call_of(Op.GATHER, inputs, root=opts.rootRank)
        return self._by_gloo(asked, lambda: self._gloo.gather(outputs, inputs, opts), opts, outputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        opts = opts or dist.ScatterOptions()
        if self.rank() == opts.rootRank:
            with self._telling_peers(Op.SCATTER):
                _check_equal("scatter", inputs[0], outputs[0], self.size())
        asked = call_of(Op.SCATTER, outputs, root=opts.rootRank)
        return self._by_gloo(asked, lambda: self._gloo.scatter(outputs, inputs, opts), opts, outputs)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        opts = opts or dist.AllToAllOptions()
        with self._telling_peers(Op.ALL_TO_ALL):
            _check_parts(outputs, inputs, self.size())

        def start() -> Any:
            matched_parts(self._collectives, self._ranks, inputs, outputs)
            return self._gloo.alltoall(outputs, inputs, opts)

        # How much each rank sends to each other one may differ.
        return self._by_gloo(call(Op.ALL_TO_ALL, inputs[0].dtype), start, opts, outputs)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Any:
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
        return self._gloo.send(tensors, destination, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        return self._gloo.recv(tensors, source, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Any:
        return self._gloo.recv_anysource(tensors, tag)

    # ---- carrying out ------------------------------------------------------------------------------------------------

    def _carry_out(self, asked: Call, task: Callable[[], None], opts: Any, result: list[Any]) -> Any:
        """Run `task`, the collective `asked`, here when the caller waits for it anyway, else on the group's thread."""
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
        """As `_carry_out`, of a collective that `start` hands to gloo."""

        def run() -> None:
            self._collectives.agree()
            wait_for(start())

        return self._carry_out(asked, run, opts, result)

    @contextlib.contextmanager
    def _telling_peers(self, op: Op) -> Iterator[None]:
        """Around the check of the arguments of a collective. A rank that refuses them lets its peers know, which would
        wait for it otherwise. The group's thread does that, so that the caller does not wait for the peers. The group
        stays open if all ranks have made the same mistake."""
        try:
            yield
        except ValueError as error:
            with contextlib.suppress(PeerLost):  # The group is closed; the caller's own mistake is the news.
                self._carry_out(refused(op, error), self._collectives.agree, None, [])
            raise

    @staticmethod
    def _reduces(tensors: Sequence[Tensor], opts: Any) -> bool:
        return _on_cpu(tensors) and all(can_reduce(tensor.dtype, opts.reduceOp.op) for tensor in tensors)


class SharedGroup(StagedGroup):
    """A group of ranks on one host: everything through shared memory."""

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
        size = self.size()
        with self._telling_peers(Op.ALL_TO_ALL):
            outs, parts = _cut(output, output_splits, size), _cut(input, input_splits, size)
        return self.alltoall(outs, parts, opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
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
        for tensor in tensors:
            self._mailbox.send(tensor.detach().contiguous(), destination, tag)
        return Work(tensors)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        return self._receive(tensors[0], source, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Any:
        return self._receive(tensors[0], None, tag)

    def _receive(self, tensor: Tensor, source: int | None, tag: int) -> Any:
        target = tensor.detach() if tensor.is_contiguous() else torch.empty_like(tensor).contiguous()
        expected = self._mailbox.expect(target, source, tag)

        def finish() -> None:
            self._mailbox.finish(expected)
            if target.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(target)

        work = Work([tensor], finish, there=lambda: self._mailbox.is_over(expected))
        work._source_rank = lambda: expected.source  # type: ignore[method-assign]  # asked for after wait()
        return work


class SpanningGroup(StagedGroup):
    """A group of ranks on several hosts: shared memory within a host, gloo between hosts."""

    def __init__(self, index: int, size: int, meeting: SyncPage, hierarchy: Hierarchy, gloo: Any) -> None:
        super().__init__(index, size, meeting, hierarchy, gloo)
        self._hierarchy = hierarchy

    @property
    def hosts(self) -> list[list[int]]:
        """The ranks of each host (indices in the group)."""
        return self._hierarchy.hosts

    def limit(self, seconds: float) -> None:
        super().limit(seconds)
        self._hierarchy.limit(seconds)

    def leave(self) -> None:
        super().leave()
        self._hierarchy.leave()

    def _carry_out(self, asked: Call, task: Callable[[], None], opts: Any, result: list[Any]) -> Any:
        def run() -> None:
            try:
                self._hierarchy.meet()
                task()
            except PeerLost:
                self.leave()  # Ranks that wait for this one, here and on other hosts, cannot see whom it has lost.
                raise

        return super()._carry_out(asked, run, opts, result)


class _Contiguous:
    """`tensor` as contiguous memory inside the block; copied back at its end where it was not."""

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
    """Raise ValueError unless `many` are as many tensors as ranks, each as large as `one` and of its dtype: memory is
    copied by its bytes."""
    if len(many) != size:
        raise ValueError(f"{name}: a list of {len(many)} tensors, expected one for each of the {size} ranks")
    for k, tensor in enumerate(many):
        if tensor.numel() != one.numel() or tensor.dtype != one.dtype:
            raise ValueError(
                f"{name}: tensor {k} of the list is {tuple(tensor.shape)} {tensor.dtype}, the single one "
                f"{tuple(one.shape)} {one.dtype}; expected as many elements of the same dtype"
            )


def _cut(whole: Tensor, sizes: list[int], count: int) -> list[Tensor]:
    """`whole` in parts of these sizes along its first dimension, in equal ones by default. Raises ValueError if that is
    not possible."""
    rows = whole.shape[0] if whole.dim() else 0
    if sizes and sum(sizes) != rows:
        raise ValueError(f"all_to_all_single: a tensor of {rows} rows in parts of {sizes}, {sum(sizes)} in all")
    if not sizes and rows % count:
        raise ValueError(f"all_to_all_single: a tensor of {rows} rows for {count} ranks, expected equal parts")
    return list(whole.split(sizes) if sizes else whole.chunk(count))


def _check_parts(outputs: Sequence[Tensor], inputs: Sequence[Tensor], size: int) -> None:
    """Raise ValueError unless both are as many tensors as ranks, all of one dtype."""
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
    """Make the backend known to torch.distributed; a second time changes nothing."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])


def leave_all() -> None:
    """Leave every group of this process. Call before `destroy_process_group`, which tells a group nothing."""
    for group in list(_groups):
        group.leave()
    _groups.clear()


def _create(options: Any, _backend_options: Any) -> Any:
    """What torch.distributed calls for a new group; see the table above."""
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
        # All or none; and nobody closes its page before everybody has it.
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
    """The ranks of each host, the host of the lowest rank first."""
    hosts: dict[str, list[int]] = {}
    for k, identity in enumerate(identities):
        hosts.setdefault(identity, []).append(k)
    return list(hosts.values())


def _exchange(store: Any, key: str, own: Any, rank: int, size: int) -> list[Any]:
    store.set(f"{key}/{rank}", json.dumps(own))
    return [json.loads(store.get(f"{key}/{k}")) for k in range(size)]
