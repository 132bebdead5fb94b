"""One meeting of islands: the mean outer gradient of some flats, on its way, and the outer update that takes it.

Each rank exchanges what belongs to its own partition with the ranks of other islands that have the same, at every ZeRO
stage, so that nothing is sent twice. It travels in float32, or compressed with error feedback (`CompressedMeans`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from speedlab.comm import Group
from speedlab.comm.compressed_allreduce import Code, CompressedMeans, LargestElements, Signs
from speedlab.config import OuterConfig
from speedlab.layout import padded_numel
from speedlab.parallel.zero import Flat, Gradient
from speedlab.placement import Holders, Home

ANCHOR, MOMENTUM, ERROR = "anchor", "outer_momentum", "outer_error"

_FLOAT32 = 4


def kept_by_islands(outer: OuterConfig, islands: int) -> Mapping[str, Home] | None:
    """What islands keep beside each gradient, over a rank's partition; None where there is but one."""
    if islands == 1:
        return None
    kept = {ANCHOR: Home(holders=Holders.OWN_PART, form="float32")}
    if outer.momentum:
        kept[MOMENTUM] = Home(holders=Holders.OWN_PART, form="float32")
    if outer.compression != "none":
        kept[ERROR] = Home(holders=Holders.ISLANDS_PART, form="float32")
    return kept


class Meeting:
    """Outer gradients of `flats` on their way; all ranks begin and end meetings in one order."""

    def __init__(self, group: Group, flats: Sequence[tuple[Flat, Gradient]], outer: OuterConfig) -> None:
        """`flats` with their gradients. Nothing is sent before `send`."""
        self._group, self._flats, self._outer = group, flats, outer
        self._sizes = [partition_size(flat) for flat, _ in flats]
        self._together = island_buffer(group, sum(self._sizes))
        self._given = pieces_of(self._together, self._sizes)
        for own, (flat, gradient) in zip(self._given, flats, strict=True):
            torch.sub(gradient.kept[ANCHOR], flat.own_master, out=own)
        self._codes: CompressedMeans | None = None
        if outer.compression != "none":
            codes: dict[str, Code] = {"signs": Signs(), "topk": LargestElements(outer.topk_share)}
            self._codes = CompressedMeans(group, codes[outer.compression], self._sizes)
        self.sent_bytes = self._codes.sent_bytes if self._codes else sum_bytes(group, self._together.numel())
        """What this rank sends."""
        group.traffic.buffers.add(self._together.nbytes)

    @property
    def finite(self) -> bool:
        """Whether this rank's outer gradients are. Waits for the device."""
        return bool(self._together.isfinite().all())

    def send(self) -> None:
        """Begin the exchange, once `finite` is known to be so on all ranks."""
        if self._codes is None:
            self._transfer = self._group.all_reduce(self._together)
        else:
            self._codes.send(self._given, [gradient.kept[ERROR] for _, gradient in self._flats])

    def end(self, mixing: float) -> Tensor:
        """Wait for the means, move the anchors, and bring own masters there, but for a share `mixing` of what they are;
        the squared norm of what was not sent. Whatever is raised while it waits, what is kept stays as it was."""
        squares = torch.zeros((), dtype=torch.float64, device=self._group.device)
        means = self._means()
        self._group.traffic.buffers.add(-self._together.nbytes)
        for mean, missed, (flat, gradient) in zip(means, self._given, self._flats, strict=True):
            if self._codes is not None:
                # Codes of what is no parameter's are errors that no checkpoint would have.
                for tensor in (mean, missed):
                    gradient.zero_gaps(tensor, gradient.own_range[0])
                gradient.kept[ERROR].copy_(missed)
                squares += torch.linalg.vector_norm(missed).double().square()
            self._update(gradient.kept, mean)
            flat.own_master.lerp_(gradient.kept[ANCHOR], 1 - mixing)
        return squares

    def give_up(self, *, wait: bool) -> None:
        """Nobody uses what has been sent; `wait`: until all of it is here, as peers that are there still read it."""
        try:
            if wait:
                self._means()
        finally:
            self._group.traffic.buffers.add(-self._together.nbytes)

    def _means(self) -> list[Tensor]:
        if self._codes is not None:
            return self._codes.take()
        self._transfer.wait()
        self._group.wait_until_read(self._together)
        self._together.div_(self._group.size)
        return self._given

    def _update(self, kept: Mapping[str, Tensor], mean: Tensor) -> None:
        """The outer update of an anchor; `mean`, the outer gradient, is written over."""
        outer = self._outer
        if outer.momentum:
            momentum = kept[MOMENTUM].mul_(outer.momentum).add_(mean)
            mean = mean.add_(momentum, alpha=outer.momentum) if outer.nesterov else momentum
        kept[ANCHOR].add_(mean, alpha=-outer.lr)


def partition_size(flat: Flat) -> int:
    """Elements of a rank's partition."""
    return flat.end - flat.start


def island_buffer(group: Group, numel: int) -> Tensor:
    """Zeros (n × m,) for at least so many elements, where sums over the islands are fastest."""
    return group.empty(padded_numel(numel, group.size), torch.float32).zero_()


def pieces_of(together: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The beginning of a tensor as tensors of these sizes, end to end."""
    return list(together[: sum(sizes)].split(list(sizes)))


def sum_bytes(group: Group, numel: int) -> float:
    """What a rank sends in a sum of so many elements of float32 over the islands."""
    return 2 * (group.size - 1) * numel * _FLOAT32 / group.size
