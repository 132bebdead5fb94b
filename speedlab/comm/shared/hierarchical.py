"""Collectives of a group over several hosts: shared memory inside a host, gloo between hosts.

The first rank of each host is its leader. Only leaders send to other hosts, so no value crosses the network more often
than necessary, for any number of ranks per host. L ranks per host, H hosts, N elements in all:

| collective     | 1. inside each host            | 2. between leaders, elements each sends           | 3. inside    |
|----------------|--------------------------------|---------------------------------------------------|--------------|
| all_reduce     | all-reduce                     | reduce a block each, spread them: 2 N (H - 1) / H | broadcast    |
| reduce_scatter | all-reduce of all slices       | reduce the slices of the own host: N (H - 1) / H  | broadcast    |
| all_gather     | all-gather                     | spread the own host's: N (H - 1) / H              | broadcast    |
| broadcast      | broadcast on the source's host | broadcast                                         | broadcast    |
| barrier        | barrier                        | barrier                                           | barrier      |

First, the ranks of each host compare the call in shared memory, then leaders compare it (`meet`): 24 bytes to each
other host, as a separate message. If a leader finds a mismatch, the ranks of its host see it when they wait for the
leader.

Sums are taken in rank order inside a host, then in the order of hosts. So all ranks get the same bits, and an
all-reduce equals a reduce-scatter. 16-bit floats are rounded after each of the two sums.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cuda_ops.reduce import reduce
from speedlab.comm.errors import CollectiveMismatch, PeerLost, reason_of, reports_lost_peer
from speedlab.comm.shared.call_descriptions import Call, source_line
from speedlab.comm.shared.group_fault import named
from speedlab.comm.shared.staged_collectives import PAIRWISE, StagedCollectives
from speedlab.comm.timeouts import wait_for

_MISMATCH = (0, 0, 0)
"""Words of a leader whose host has found a mismatch inside."""

_TEXT_BYTES = 1200
"""Bytes of the text about its call that a leader sends to other hosts after a mismatch."""


class Hierarchy:
    """The collectives of one group. All ranks call them in the same order, each after `announce` and `meet`.

    Args:
        hosts: Ranks of each host (indices in the group), leader first.
        index: Index of this rank in the group.
        names: Names of the ranks in errors.
        inside: Collectives of this rank's host.
        between: On leaders, a gloo group of the leaders in the order of `hosts`; None on other ranks.
        host_names: Names of the hosts in errors.
    """

    def __init__(
        self,
        hosts: Sequence[Sequence[int]],
        index: int,
        names: Sequence[int],
        inside: StagedCollectives,
        between: Any,
        host_names: Sequence[str],
    ) -> None:
        self.hosts = self._hosts = [list(ranks) for ranks in hosts]
        self._names = list(names)
        self._host = host_of(index, hosts)
        self._place = self._hosts[self._host].index(index)
        self._inside, self._between = inside, between
        self._host_names = list(host_names)
        self._size = sum(map(len, self._hosts))

    @property
    def _leads(self) -> bool:
        return self._place == 0

    def limit(self, seconds: float) -> None:
        """Set the timeout for peers on other hosts.

        Args:
            seconds: Timeout of later collectives.
        """
        if self._between is not None:
            self._between._set_default_timeout(timedelta(seconds=seconds))

    def leave(self) -> None:
        """Close the connections to other hosts, so that waiting leaders fail at once."""
        self._between = None

    # ---- the same call on all ranks ----------------------------------------------------------------------------------

    def announce(self, call: Call) -> None:
        """Set the call of the next collective.

        Args:
            call: Description of the call.

        Raises:
            PeerLost: The earlier error of this group, if there was one.
        """
        self._inside.announce(call)

    def meet(self) -> None:
        """Compare the call with those of all ranks.

        Raises:
            CollectiveMismatch: If calls differ. Other ranks of this host raise it at their next wait for the leader.
        """
        try:
            self._inside.agree()
        except CollectiveMismatch as error:
            if self._leads:
                self._compare(_MISMATCH, str(error))
            raise
        if self._leads:
            problem = self._compare(self._inside.words)
            if problem:
                raise self._inside.mismatch(problem)

    def mismatch(self, reason: str) -> PeerLost:
        """Return the error of the call.

        Args:
            reason: Found by all ranks.
        """
        return self._inside.mismatch(reason)

    def agree(self) -> None:
        """Let this host's ranks wait until their leader has compared the call with other hosts."""
        self._inside.barrier()

    def _compare(self, words: tuple[int, int, int], problem: str = "") -> str:
        """Return the mismatch if another leader has other `words`, otherwise ''. `problem`: a mismatch inside this
        host.
        """
        own = torch.tensor(words)
        others = [torch.empty_like(own) for _ in self._hosts]
        others[self._host] = own
        self._exchange([own] * len(others), others)
        if all(torch.equal(other, own) for other in others) and not problem:
            return ""
        said = problem or f"{self._inside.asked()}, at {source_line()}"
        texts = [torch.zeros(_TEXT_BYTES, dtype=torch.uint8) for _ in self._hosts]
        encoded = said.encode()[:_TEXT_BYTES]
        texts[self._host][: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        self._exchange([texts[self._host]] * len(texts), texts)
        sentences = [bytes(text.numpy()).rstrip(b"\0").decode(errors="replace") for text in texts]
        lines = "".join(
            f"\n  host {name}, rank {self._names[ranks[0]]}: {sentence}"
            for name, ranks, sentence in zip(self._host_names, self._hosts, sentences, strict=True)
        )
        return f"{named(self._names).capitalize()} called different collectives on their hosts.{lines}"

    # ---- collectives -------------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait until every rank arrives."""
        self._inside.barrier()
        if self._leads:
            with self._naming_lost_hosts():
                self._gloo().barrier().wait()
        self._inside.barrier()

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Reduce a tensor over the ranks, in place.

        Args:
            tensor: Contiguous.
            op: Kind of the reduction.
        """
        flat = tensor.view(-1)
        if flat.numel() == 0:
            self.agree()
            return
        if op == dist.ReduceOp.AVG:
            wide = flat.to(_wide(flat.dtype))
            self.all_reduce(wide)
            flat.copy_(_divided(wide, self._size))
            return
        # 1, 2 and 3 of the table.
        self._inside.all_reduce(flat, op)
        if self._leads:
            blocks = flat.tensor_split(len(self._hosts))
            self._reduce(blocks, op)
            self._spread(blocks)
        self._inside.broadcast(flat, 0)

    def reduce_scatter(
        self, out: Tensor, slices: Sequence[Tensor], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> None:
        """Reduce slice number `index` of every rank into `out`.

        Args:
            out: Contiguous.
            slices: One contiguous tensor per rank, each of the size of `out`.
            op: Kind of the reduction.
        """
        if out.numel() == 0:
            self.agree()
            return
        whole = torch.cat([slices[k].view(-1) for ranks in self._hosts for k in ranks])
        average = op == dist.ReduceOp.AVG
        if average:
            whole, op = whole.to(_wide(whole.dtype)), dist.ReduceOp.SUM
        self._inside.all_reduce(whole, op)
        blocks = whole.split([len(ranks) * out.numel() for ranks in self._hosts])
        if self._leads:
            self._reduce(blocks, op)
        own = blocks[self._host]
        self._inside.broadcast(own, 0)
        summed = own.view(-1, out.numel())[self._place]
        out.view(-1).copy_(_divided(summed, self._size) if average else summed)

    def all_gather(self, outs: Sequence[Tensor], part: Tensor) -> None:
        """Gather every rank's `part`: outs[k] comes from rank k.

        Args:
            outs: One contiguous tensor per rank.
            part: Contiguous, same size; may be this rank's tensor in `outs`.
        """
        if part.numel() == 0:
            self.agree()
            return
        blocks = [part.new_empty((len(ranks), part.numel())) for ranks in self._hosts]
        self._inside.all_gather(blocks[self._host].unbind(), part.view(-1))
        if self._leads:
            self._spread([block.view(-1) for block in blocks])
        for host, ranks in enumerate(self._hosts):
            if host != self._host:
                self._inside.broadcast(blocks[host], 0)
            for k, row in zip(ranks, blocks[host], strict=True):
                outs[k].view(-1).copy_(row)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Copy a tensor from one rank to all, in place.

        Args:
            tensor: Contiguous.
            source: Index of the sender in the group.
        """
        if tensor.numel() == 0:
            self.agree()
            return
        host = host_of(source, self._hosts)
        if host == self._host:
            self._inside.broadcast(tensor, self._hosts[host].index(source))
        if self._leads:
            options = dist.BroadcastOptions()
            options.rootRank = host
            with self._naming_lost_hosts():
                self._gloo().broadcast([_bytes(tensor.view(-1))], options).wait()
        if host != self._host:
            self._inside.broadcast(tensor, 0)

    # ---- between leaders ---------------------------------------------------------------------------------------------

    def _reduce(self, blocks: Sequence[Tensor], op: dist.ReduceOp.RedOpType) -> None:
        """Reduce this host's block, blocks[host] (n,), over the leaders, in place."""
        own = blocks[self._host]
        terms = [own if host == self._host else torch.empty_like(own) for host in range(len(blocks))]
        self._exchange(blocks, terms)
        if op == dist.ReduceOp.SUM:
            reduce(terms, own)
        else:
            own.copy_(functools.reduce(PAIRWISE[op], terms))

    def _spread(self, blocks: Sequence[Tensor]) -> None:
        """Copy each host's block, blocks[h] (n_h,), from its leader."""
        self._exchange([blocks[self._host]] * len(blocks), blocks)

    def _exchange(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """Send sent[h] to the leader of host h, and receive received[h]. Both sides skip empty tensors."""
        gloo, works = self._gloo(), []
        with self._naming_lost_hosts():
            for host in range(len(self._hosts)):
                if host != self._host and received[host].numel():
                    works.append(gloo.recv([_bytes(received[host])], host, 0))
                if host != self._host and sent[host].numel():
                    works.append(gloo.send([_bytes(sent[host])], host, 0))
            for work in works:
                wait_for(work)

    def _gloo(self) -> Any:
        if self._between is None:
            raise PeerLost(f"rank {self._names[self._hosts[self._host][0]]} has left this group")
        return self._between

    @contextlib.contextmanager
    def _naming_lost_hosts(self) -> Iterator[None]:
        """Name the waiting leaders in errors of gloo, which may already be raised when a transfer starts."""
        try:
            yield
        except RuntimeError as error:
            if not reports_lost_peer(error):
                raise
            leaders = [self._names[ranks[0]] for ranks in self._hosts]
            others = [f"rank {leaders[h]} of {self._host_names[h]}" for h in range(len(leaders)) if h != self._host]
            raise PeerLost(
                f"rank {leaders[self._host]} waited for {', '.join(others)} in a collective, on "
                f"{self._host_names[self._host]}: {reason_of(error)}"
            ) from error


def host_of(index: int, hosts: Sequence[Sequence[int]]) -> int:
    """Return the number of a rank's host.

    Args:
        index: Index of the rank in the group.
        hosts: Ranks of each host.
    """
    return next(host for host, ranks in enumerate(hosts) if index in ranks)


def _bytes(flat: Tensor) -> Tensor:
    """Return the tensor as bytes: gloo supports fewer dtypes than torch, and copies need no dtype."""
    return flat.detach().view(torch.uint8)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a mean is computed, so that its sum neither overflows nor wraps."""
    if not dtype.is_floating_point:
        return torch.int64
    return torch.float32 if dtype.itemsize == 2 else dtype


def _divided(total: Tensor, count: int) -> Tensor:
    return total / count if total.is_floating_point() else total.div(count, rounding_mode="floor")
