"""Errors between ranks, and how they differ from errors of one rank."""

from __future__ import annotations

import re
import traceback
from typing import TypeVar

import torch
import torch.distributed as dist


class PeerLost(RuntimeError):  # noqa: N818  # what happened, not a mistake made here
    """A collective ended because another rank left, died or did not arrive in time. The cause is on that rank."""


class CollectiveMismatch(PeerLost):
    """The ranks of a group made different calls.

    The operation, dtype, number of elements, root, reduction, or the number of earlier calls differs. Every rank of the
    group raises this error; its text names the call of each rank. It is a PeerLost for cleanup code, because the group
    makes no more calls.
    """


class MeetingFailed(RuntimeError):  # noqa: N818  # what happened, not a mistake made here
    """Ranks of several hosts could not connect: a path between two hosts is blocked, or some ranks did not arrive."""


_MEMORY = re.compile(r"out of memory|can't allocate memory|Cannot allocate memory")
_MISUSE = re.compile(r"ncclInvalid(Usage|Argument)")
"""Errors of a backend that this rank caused, whatever their class."""

_NETWORK = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|closed by peer|reset by peer|broken pipe|pair closure"
    r"|socket (unexpectedly )?closed|timed out|time ?out|unreachable|no route to host|communicator was aborted"
    r"|ncclRemoteError|remote process",
    re.IGNORECASE,
)
"""Messages of gloo, NCCL and the stores about a peer that closed its connections or does not answer."""

_LATE = re.compile(r"timed out|time ?out", re.IGNORECASE)


def reports_lost_peer(error: BaseException) -> bool:
    """Return whether a collective's error means that another rank left, died or did not arrive.

    Other errors, such as out-of-memory, belong to this rank and must stay visible.

    Args:
        error: Error raised by a collective.
    """
    text = str(error)
    if isinstance(error, PeerLost):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return False
    if _MEMORY.search(text) or _MISUSE.search(text):
        return False
    lost = dist.DistNetworkError | dist.DistBackendError | dist.DistStoreError
    return isinstance(error, lost) or _NETWORK.search(text) is not None


def reports_timeout(error: BaseException) -> bool:
    """Return whether an error of a lost peer comes from a timeout and not from a closed connection.

    Args:
        error: Error for which `tells_of_lost_peer` is true.
    """
    return _LATE.search(str(error)) is not None


_Error = TypeVar("_Error", bound=BaseException)


def without_frames(error: _Error) -> _Error:
    """Return a copy of an error that can be kept and raised later.

    The original holds the frames it was raised through, and with them tensors and connections. The copy bypasses the
    constructor, whose arguments are unknown.

    Args:
        error: Error to copy.
    """
    copy = type(error).__new__(type(error), *error.args)
    vars(copy).update(vars(error))
    if notes := getattr(error, "__notes__", None):
        copy.__notes__ = list(notes)  # type: ignore[attr-defined]  # of every exception since Python 3.11
    return copy


def clear_frames(error: BaseException) -> None:
    """Clear the finished frames of an error and of its causes.

    Their local variables would keep connections open as long as the error is kept, and peers would wait in vain.

    Args:
        error: Error whose traceback is cleared.
    """
    each: BaseException | None = error
    while each is not None:
        traceback.clear_frames(each.__traceback__)
        each = each.__cause__


def reason_of(error: BaseException) -> str:
    """Return the reason from a backend's message, at most 120 characters.

    gloo puts its source location before the reason, and guesses after it.

    Args:
        error: Error of a backend.
    """
    lines = re.sub(r"^\[[^\]]*\]\s*", "", str(error).strip()).split(". ")[0].splitlines()
    return lines[0][:120] if lines else type(error).__name__
