"""Collectives of a group whose ranks are on several hosts: shared memory within a host, gloo between hosts.

The first rank of each host is its leader. Only leaders speak to other hosts, so nothing crosses the network more often
than it must, however many ranks a host has. L ranks a host, H hosts, N elements in all:

| collective     | 1. within each host            | 2. between leaders, elements each sends           | 3. within    |
|----------------|--------------------------------|---------------------------------------------------|--------------|
| all_reduce     | all-reduce                     | reduce a block each, spread them: 2 N (H - 1) / H | broadcast    |
| reduce_scatter | all-reduce of all slices       | reduce the slices of the own host: N (H - 1) / H  | broadcast    |
| all_gather     | all-gather                     | spread the own host's: N (H - 1) / H              | broadcast    |
| broadcast      | broadcast on the source's host | broadcast                                         | broadcast    |
| barrier        | barrier                        | barrier                                           | barrier      |

Before that, the ranks of each host compare the call in shared memory, then the leaders compare it (`meet`): 24 bytes to
each other host, in their own trip. The ranks of a host whose leader finds a mismatch hear of it when they wait for it.

Sums are taken in rank order within a host, then in the order of hosts: all ranks get the same bits, and so do an
all-reduce and a reduce-scatter. 16-bit floats are rounded after each of the two.
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
from speedlab.comm.errors import CollectiveMismatch, PeerLost, reason_of, tells_of_lost_peer
from speedlab.comm.shared.call_descriptions import Call, source_line
from speedlab.comm.shared.mismatch import named
from speedlab.comm.shared.staged_collectives import PAIRWISE, StagedCollectives
from speedlab.comm.timeouts import wait_for

_MISMATCH = (0, 0, 0)
"""The words of a leader whose host has found a mismatch inside."""

_TEXT_BYTES = 1200
"""Of what a leader sends about its call to the other hosts, after a mismatch."""


class Hierarchy:
    """The collectives of one group. They must be called in the same order on all ranks, each after `announce` and
    `meet`.

    `hosts`: the ranks of each host (indices in the group), leader first; `names`: what errors call the group's ranks.
    `inside`: the collectives of this rank's host. `between`: of a leader, a gloo group of the leaders in the order of
    `hosts`; None on other ranks. `host_names`: what errors call the hosts.
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
        """How long collectives from now on wait for peers of other hosts."""
        if self._between is not None:
            self._between._set_default_timeout(timedelta(seconds=seconds))

    def leave(self) -> None:
        """Close the connections to other hosts: leaders that wait for this one fail at once."""
        self._between = None

    # ---- the same call on all ranks ----------------------------------------------------------------------------------

    def announce(self, call: Call) -> None:
        """The next collective is this call. Raises the earlier error of the group, if there was one."""
        self._inside.announce(call)

    def meet(self) -> None:
        """Compare the call with those of all ranks. Raises CollectiveMismatch, on other ranks of this host than the
        leader at their next wait for it."""
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
        """The error of the call, for a `reason` that all ranks have found."""
        return self._inside.mismatch(reason)

    def agree(self) -> None:
        """Let the other ranks of this host wait until its leader has compared the call with the other hosts."""
        self._inside.barrier()

    def _compare(self, words: tuple[int, int, int], problem: str = "") -> str:
        """What is wrong if another leader has other `words`, else ''. `problem`: the mismatch inside this host."""
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
        """Wait until every rank is here."""
        self._inside.barrier()
        if self._leads:
            with self._naming_lost_hosts():
                self._gloo().barrier().wait()
        self._inside.barrier()

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Reduce contiguous `tensor` over the ranks, in place."""
        flat = tensor.view(-1)
        if flat.numel() == 0:
            self.agree()
            return
        if op == dist.ReduceOp.AVG:
            wide = flat.to(_wide(flat.dtype))
            self.all_reduce(wide)
            flat.copy_(_divided(wide, self._size))
            return
        self._inside.all_reduce(flat, op)
        if self._leads:
            blocks = flat.tensor_split(len(self._hosts))
            self._reduce(blocks, op)
            self._spread(blocks)
        self._inside.broadcast(flat, 0)

    def reduce_scatter(
        self, out: Tensor, slices: Sequence[Tensor], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> None:
        """`out` = the reduction of what every rank has as slice number `index`. All slices contiguous and equally
        long."""
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
        """outs[k] = rank k's `part`; all contiguous and of the same size. `part` may be its own place in `outs`."""
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
        """Copy contiguous `tensor` from rank `source` (an index in the group) to all, in place."""
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
        """Reduce this host's block, blocks[host] (n,), over what all leaders have there, in place."""
        own = blocks[self._host]
        terms = [own if host == self._host else torch.empty_like(own) for host in range(len(blocks))]
        self._exchange(blocks, terms)
        if op == dist.ReduceOp.SUM:
            reduce(terms, own)
        else:
            own.copy_(functools.reduce(PAIRWISE[op], terms))

    def _spread(self, blocks: Sequence[Tensor]) -> None:
        """Fill each host's block, blocks[h] (n_h,), with what its leader has there."""
        self._exchange([blocks[self._host]] * len(blocks), blocks)

    def _exchange(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """Send sent[h] to the leader of host h, and take received[h] from it. (Both sides know what is empty.)"""
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
        """Around the start of what goes between hosts, too: gloo raises there where it knows by then that a connection
        was closed, and while it is waited for otherwise."""
        try:
            yield
        except RuntimeError as error:
            if not tells_of_lost_peer(error):
                raise
            leaders = [self._names[ranks[0]] for ranks in self._hosts]
            others = [f"rank {leaders[h]} of {self._host_names[h]}" for h in range(len(leaders)) if h != self._host]
            raise PeerLost(
                f"rank {leaders[self._host]} waited for {', '.join(others)} in a collective, on "
                f"{self._host_names[self._host]}: {reason_of(error)}"
            ) from error


def host_of(index: int, hosts: Sequence[Sequence[int]]) -> int:
    """The number of the host on which a rank is."""
    return next(host for host, ranks in enumerate(hosts) if index in ranks)


def _bytes(flat: Tensor) -> Tensor:
    """gloo knows fewer dtypes than torch; copies need none."""
    return flat.detach().view(torch.uint8)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What a mean is taken in, so that its sum neither overflows nor wraps around."""
    if not dtype.is_floating_point:
        return torch.int64
    return torch.float32 if dtype.itemsize == 2 else dtype


def _divided(total: Tensor, count: int) -> Tensor:
    return total / count if total.is_floating_point() else total.div(count, rounding_mode="floor")
