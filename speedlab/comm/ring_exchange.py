"""One step of a ring exchange: send a tensor to one rank while another tensor arrives from the other side."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from speedlab.comm.transfers import Transfer


class Rotation:
    """A ring step in flight."""

    def __init__(self, received: Tensor, transfer: Transfer, open_ones: dict[Rotation, int]) -> None:
        """Hold the transfer.

        `open_ones`: ring steps without `wait`, each with the number of others that it must outlive.
        """
        self._received, self._transfer, self._open = received, transfer, open_ones

    def wait(self) -> Tensor:
        """Wait and return the received tensor."""
        self._transfer.wait()
        del self._open[self]
        for other in list(self._open):
            self._open[other] -= 1
            if self._open[other] < 0:
                del self._open[other]
        return self._received


def begin(out: Tensor, to: int, received: Tensor, source: int, tag: int, group: Any) -> list[Any]:
    """Start a message to one rank and one from another; empty tensors are skipped.

    Args:
        out: Tensor to send.
        to: Index of the receiver in the group.
        received: Tensor to fill.
        source: Index of the sender in the group.
        tag: Tag of both messages; ignored on GPUs.
        group: Process group.

    Returns:
        Works to wait for.
    """
    if out.device.type == "cpu":
        works = [group.recv([received], source, tag)] if received.numel() else []
        return [*works, group.send([out], to, tag)] if out.numel() else works
    # Start both in one batch; otherwise a ring of ranks would deadlock.
    both = (dist.isend, out, to), (dist.irecv, received, source)
    operations = [dist.P2POp(op, each, group=group, group_peer=peer) for op, each, peer in both if each.numel()]
    return dist.batch_isend_irecv(operations) if operations else []
