"""What can go wrong between ranks, and how it is told from what goes wrong on one of them."""

from __future__ import annotations

import re
import traceback
from typing import TypeVar

import torch
import torch.distributed as dist


class PeerLost(RuntimeError):  # noqa: N818  # what happened, not a mistake made here
    """A collective ended because another rank left, died or did not come in time. The cause is on that rank."""


class CollectiveMismatch(PeerLost):
    """The ranks of a group did not make the same call: another operation, dtype, number of elements, root, reduction,
    or another number of calls before. Every rank of the group raises it; the text names what each asked for.

    A lost peer for those who clean up after a collective that has ended: its group carries out no more calls.
    """


class MeetingFailed(RuntimeError):  # noqa: N818  # what happened, not a mistake made here
    """Ranks of several hosts could not meet: a way between two hosts is closed, or some ranks did not come."""


_MEMORY = re.compile(r"out of memory|can't allocate memory|Cannot allocate memory")
_MISUSE = re.compile(r"ncclInvalid(Usage|Argument)")
"""Errors of a backend that are this rank's own, whatever class they come as."""

_NETWORK = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|closed by peer|reset by peer|broken pipe|pair closure"
    r"|socket (unexpectedly )?closed|timed out|time ?out|unreachable|no route to host|communicator was aborted"
    r"|ncclRemoteError|remote process",
    re.IGNORECASE,
)
"""What gloo, NCCL and the stores say of a peer that closed its connections or does not answer."""

_LATE = re.compile(r"timed out|time ?out", re.IGNORECASE)


def tells_of_lost_peer(error: BaseException) -> bool:
    """Whether `error`, raised by a collective, says that another rank has left, has died or did not come.

    Anything else is this rank's own, out-of-memory above all, and must be seen as what it is.
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


def tells_of_timeout(error: BaseException) -> bool:
    """Whether an error of which `tells_of_lost_peer` says so comes of a limit of time, not of a closed connection."""
    return _LATE.search(str(error)) is not None


_Error = TypeVar("_Error", bound=BaseException)


def without_frames(error: _Error) -> _Error:
    """Return a copy of an error, to be kept and raised later. The error itself holds the frames it was raised through,
    and with them tensors and connections.

    The copy is made without the constructor of its class, whose arguments are not known.
    """
    copy = type(error).__new__(type(error), *error.args)
    vars(copy).update(vars(error))
    if notes := getattr(error, "__notes__", None):
        copy.__notes__ = list(notes)  # type: ignore[attr-defined]  # of every exception since Python 3.11
    return copy


def clear_frames(error: BaseException) -> None:
    """Clear the frames that an error has left by now, and those of its causes. Their local variables would keep the
    connections of an exchange open for as long as anyone holds the error: peers would wait for this rank in vain."""
    each: BaseException | None = error
    while each is not None:
        traceback.clear_frames(each.__traceback__)
        each = each.__cause__


def reason_of(error: BaseException) -> str:
    """The reason in a backend's words, at most 120 characters: gloo puts the place in its own source before it, and
    guesses behind it."""
    lines = re.sub(r"^\[[^\]]*\]\s*", "", str(error).strip()).split(". ")[0].splitlines()
    return lines[0][:120] if lines else type(error).__name__
