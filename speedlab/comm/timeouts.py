"""How long collectives wait for peers that are there and do not come."""

from __future__ import annotations

import datetime
import math
import os
import weakref
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
_of_join: float | None = None
_of_world: float | None = None


def count_patient(change: int) -> None:
    """+1: from now on `limit_seconds` and `wait_for` know that a person may think; -1: once that is over."""
    global _patient  # noqa: PLW0603  # a process has one set of groups
    _patient += change


def limit_seconds(seconds: float) -> float:
    """`seconds`, where no person is waited for."""
    return PATIENT_SECONDS if _patient else seconds


class Timeout:
    """A limit for the groups of this process, for as long as an engine holds this object."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        _held.append(weakref.ref(self))


_held: list[weakref.ref[Timeout]] = []
"""The limits of engines, oldest first."""


def give_timeout(seconds: float | None) -> None:
    """What `join` was given; None: no limit."""
    global _of_join  # noqa: PLW0603  # as above
    _of_join = seconds


def inherit_timeout(seconds: float | None) -> None:
    """The limit of a world that the user made, which counts where the user gave SpeedLab none; None: no such world."""
    global _of_world  # noqa: PLW0603  # as above
    _of_world = seconds


def timeout_seconds() -> float:
    """The limit of every group that SpeedLab makes.

    1. What `initialize` or the configuration says; of several engines the newest with a limit counts.
    2. What `join` was given.
    3. What the environment says (`Cluster`).
    4. The limit of the world, if the user made the world.
    5. TIMEOUT_SECONDS.
    """
    _held[:] = [reference for reference in _held if reference() is not None]
    newest = _held[-1]() if _held else None
    return (newest.seconds if newest else None) or _of_join or environment_seconds() or _of_world or TIMEOUT_SECONDS


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
