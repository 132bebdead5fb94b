"""The timeout of collectives: where it comes from, and how it is suspended."""

from __future__ import annotations

import datetime
import math
import os
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

TIMEOUT_SECONDS = 1800.0
"""Default timeout of collectives; torch's default for gloo."""
PATIENT_SECONDS = 30 * 86400.0
"""Timeout while a user may be at a breakpoint."""

TIMEOUT_VARIABLE = "SPEEDLAB_TIMEOUT_SECONDS"
"""Environment variable of an engine: the timeout that its cluster was given."""

_patient = 0
_of_join: float | None = None
_of_world: float | None = None


def count_patient(change: int) -> None:
    """Suspend timeouts (+1), or end one suspension (-1), for `limit_seconds` and `wait_for`.

    Args:
        change: +1 or -1.
    """
    global _patient  # noqa: PLW0603  # a process has one set of groups
    _patient += change


def limit_seconds(seconds: float) -> float:
    """Return `seconds`, or PATIENT_SECONDS while timeouts are suspended.

    Args:
        seconds: Usual timeout.
    """
    return PATIENT_SECONDS if _patient else seconds


class Timeout:
    """A timeout for the groups of this process, valid as long as an engine holds this object."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        _held.append(weakref.ref(self))


_held: list[weakref.ref[Timeout]] = []
"""Timeouts of engines, oldest first."""


def give_timeout(seconds: float | None) -> None:
    """Set the timeout that `join` was given; None for none.

    Args:
        seconds: Timeout.
    """
    global _of_join  # noqa: PLW0603  # as above
    _of_join = seconds


def inherit_timeout(seconds: float | None) -> None:
    """Set the timeout of a world that the user made; None without such a world.

    Args:
        seconds: Timeout, used if the user gave SpeedLab none.
    """
    global _of_world  # noqa: PLW0603  # as above
    _of_world = seconds


def timeout_seconds() -> float:
    """Return the timeout of every group that SpeedLab makes. The first available source counts:

    1. `initialize` or the configuration; with several engines, the newest one with a timeout.
    2. The argument of `join`.
    3. The environment (`Cluster`).
    4. The timeout of the world, if the user made the world.
    5. TIMEOUT_SECONDS.
    """
    _held[:] = [reference for reference in _held if reference() is not None]
    newest = _held[-1]() if _held else None
    return (newest.seconds if newest else None) or _of_join or environment_seconds() or _of_world or TIMEOUT_SECONDS


def environment_seconds() -> float | None:
    """Return the timeout from the environment, or None.

    Raises:
        ValueError: If the variable is not a positive number.
    """
    text = os.environ.get(TIMEOUT_VARIABLE)
    if not text:
        return None
    return checked_seconds(text, TIMEOUT_VARIABLE)


def checked_seconds(value: Any, name: str) -> float:
    """Return `value` as a positive number of seconds.

    Args:
        value: Number or text.
        name: Name of the value in the error.

    Raises:
        ValueError: If `value` is not a number above 0 and at most PATIENT_SECONDS.
    """
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 < seconds <= PATIENT_SECONDS:
        raise ValueError(f"{name}: {value!r}, expected a number of seconds above 0, at most {PATIENT_SECONDS:.0f}")
    return seconds


def limit_of_a_group() -> datetime.timedelta:
    """Return the timeout of a group that is made now."""
    return datetime.timedelta(seconds=limit_seconds(timeout_seconds()))


def wait_for(work: Any, tensor: Tensor | None = None) -> None:
    """Wait for a message. gloo gives each message its group's timeout at the start, so a suspension passes its own.

    Args:
        work: Work of a process group.
        tensor: Tensor of the message; None for a CPU tensor. Waiting for NCCL only orders streams and does not block.
    """
    if _patient and (tensor is None or tensor.device.type == "cpu"):
        work.wait(datetime.timedelta(seconds=PATIENT_SECONDS))
    else:
        work.wait()
