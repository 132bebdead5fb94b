"""How long collectives wait for peers that are there and do not come."""

from __future__ import annotations

import datetime
import math
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

TIMEOUT_SECONDS = 1800.0
"""How long a collective waits for its peers before it fails, unless the user gave a limit: torch's own, of gloo."""
PATIENT_SECONDS = 30 * 86400.0
"""The same while a person may think."""

TIMEOUT_VARIABLE = "SPEEDLAB_TIMEOUT_SECONDS"
"""In the environment of an engine: the limit that its cluster was given."""

_patient = 0
_given: float | None = None
_of_world: float | None = None


def count_patient(change: int) -> None:
    """+1: from now on `limit_seconds` and `wait_for` know that a person may think; -1: once that is over."""
    global _patient  # noqa: PLW0603  # a process has one set of groups
    _patient += change


def limit_seconds(seconds: float) -> float:
    """`seconds`, where no person is waited for."""
    return PATIENT_SECONDS if _patient else seconds


def give_timeout(seconds: float | None) -> None:
    """The user's limit for the groups of this process from now on; None: the user gave no limit."""
    global _given  # noqa: PLW0603  # as above
    _given = seconds


def inherit_timeout(seconds: float | None) -> None:
    """The limit of a world that the user made, which counts where the user gave SpeedLab none; None: no such world."""
    global _of_world  # noqa: PLW0603  # as above
    _of_world = seconds


def timeout_seconds() -> float:
    """The limit of every group that SpeedLab makes.

    1. What the user gave (`initialize`, the configuration, `join`).
    2. What the environment says (`Cluster`).
    3. The limit of the world, if the user made the world.
    4. TIMEOUT_SECONDS.
    """
    if _given is not None:
        return _given
    return environment_seconds() or _of_world or TIMEOUT_SECONDS


def environment_seconds() -> float | None:
    """What the environment says. Raises ValueError for something else than a positive number."""
    text = os.environ.get(TIMEOUT_VARIABLE)
    if not text:
        return None
    return checked_seconds(text, TIMEOUT_VARIABLE)


def checked_seconds(value: Any, name: str) -> float:
    """`value` as a positive number of seconds. Raises ValueError, with `name`, for anything else."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 < seconds <= PATIENT_SECONDS:
        raise ValueError(f"{name}: {value!r}, expected a number of seconds above 0, at most {PATIENT_SECONDS:.0f}")
    return seconds


def limit_of_a_group() -> datetime.timedelta:
    """Of a group of some ranks that is made now."""
    return datetime.timedelta(seconds=limit_seconds(timeout_seconds()))


def wait_for(work: Any, tensor: Tensor | None = None) -> None:
    """Wait for a message of `tensor`, by default one between CPU ranks: gloo gives each the limit that its group had
    when it was made. To wait for one of NCCL is to put it into the device's order, and takes no time."""
    if _patient and (tensor is None or tensor.device.type == "cpu"):
        work.wait(datetime.timedelta(seconds=PATIENT_SECONDS))
    else:
        work.wait()
