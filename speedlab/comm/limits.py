"""How long collectives wait for peers that are there and do not come."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

TIMEOUT_SECONDS = 300.0
"""How long a collective waits for its peers before it fails."""
GROUP_TIMEOUT_SECONDS = 1800.0
"""The same on a group of some of them, once nobody thinks any more: torch's own, of gloo."""
PATIENT_SECONDS = 30 * 86400.0
"""The same while a person may think."""

_patient = 0


def count_patient(change: int) -> None:
    """+1: from now on `limit_seconds` and `wait_for` know that a person may think; -1: once that is over."""
    global _patient  # noqa: PLW0603  # a process has one set of groups
    _patient += change


def limit_seconds(seconds: float) -> float:
    """`seconds`, where no person is waited for."""
    return PATIENT_SECONDS if _patient else seconds


def limit_of_a_group() -> datetime.timedelta | None:
    """Of a group of some ranks that is made now; None: torch's own."""
    return datetime.timedelta(seconds=PATIENT_SECONDS) if _patient else None


def wait_for(work: Any, tensor: Tensor | None = None) -> None:
    """Wait for a message of `tensor`, by default one between CPU ranks: gloo gives each the limit that its group had
    when it was made. To wait for one of NCCL is to put it into the device's order, and takes no time."""
    if _patient and (tensor is None or tensor.device.type == "cpu"):
        work.wait(datetime.timedelta(seconds=PATIENT_SECONDS))
    else:
        work.wait()
