"""What a rank raised, as plain fields: its own frames without those of the transport around them."""

from __future__ import annotations

import bdb
import os
import traceback
from typing import Any

_TRANSPORT = (
    "speedlab/cluster/remote.py",
    "speedlab/cluster/cells.py",
    "speedlab/cluster/live_cells.py",
    "IPython/core/interactiveshell.py",
)


def describe(error: BaseException) -> dict[str, Any]:
    """The fields of a RemoteFailure for an exception of this rank."""
    return {
        "kind": type(error).__name__,
        "message": _message(error),
        "traceback": _own_frames(error),
        "step": getattr(error, "speedlab_step", None),
        "module": getattr(error, "speedlab_module", None),
    }


def _message(error: BaseException) -> str:
    if isinstance(error, bdb.BdbQuit) and not error.args:
        return "the debugger was left at its prompt, which ends the cell on this rank"
    try:
        return str(error)
    except Exception as broken:  # A user's exception class may fail to print itself; the rest is worth showing.
        return f"(its message cannot be shown: {type(broken).__name__})"


def _own_frames(error: BaseException) -> str:
    """The formatted traceback without the frames of the transport and of the shell around a cell."""
    trace = traceback.TracebackException.from_exception(error)
    kept = [frame for frame in trace.stack if not _is_transport(frame.filename)]
    trace.stack = traceback.StackSummary.from_list(kept)
    return "".join(trace.format())


def _is_transport(filename: str) -> bool:
    return filename.replace(os.sep, "/").endswith(_TRANSPORT)
