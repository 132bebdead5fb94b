"""A tensor that goes one way round the ranks of a group, while another comes from the other side."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from speedlab.comm.transfers import Transfer


class Rotation:
    """What comes from the rank before, while this rank's own goes to the next."""

    def __init__(self, received: Tensor, transfer: Transfer, open_ones: dict[Rotation, int]) -> None:
        """`open_ones`: those that nobody has waited for, each with how many others it is to outlive."""
        self._received, self._transfer, self._open = received, transfer, open_ones

    def wait(self) -> Tensor:
        """What came."""
        self._transfer.wait()
        del self._open[self]
        for other in list(self._open):
            self._open[other] -= 1
            if self._open[other] < 0:
                del self._open[other]
        return self._received


def begin(out: Tensor, to: int, received: Tensor, source: int, tag: int, group: Any) -> list[Any]:
    """What was started of a message to one rank of `group` and another from one; empty ones are none."""
    if out.device.type == "cpu":
        works = [group.recv([received], source, tag)] if received.numel() else []
        return [*works, group.send([out], to, tag)] if out.numel() else works
    # Both at once: one after the other, a circle of ranks would wait for itself.
    both = (dist.isend, out, to), (dist.irecv, received, source)
    operations = [dist.P2POp(op, each, group=group, group_peer=peer) for op, each, peer in both if each.numel()]
    return dist.batch_isend_irecv(operations) if operations else []
