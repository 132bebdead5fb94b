"""What went wrong, as a status of HTTP and a text that says what to do."""

from __future__ import annotations

from speedlab.cluster.errors import ClusterError
from speedlab.cluster.known_runs import RunError
from speedlab.cluster.supervisor.client import SupervisorGoneError
from speedlab.config import ConfigError
from speedlab.display.documentation import NoGuideError
from speedlab.layout import LayoutError
from speedlab.telemetry.checkpoint_index import CheckpointError
from speedlab.telemetry.run_folder import RunFolderError


class UnknownError(LookupError):
    """An id that nothing has."""


class GoneError(LookupError):
    """Something that was there."""


class QuestionError(ValueError):
    """A question that cannot be answered as it is."""


class OtherVersionError(ValueError):
    """A page that speaks another version of the messages."""


_STATUS: tuple[tuple[type[Exception] | tuple[type[Exception], ...], int], ...] = (
    ((UnknownError, NoGuideError), 404),
    (GoneError, 410),
    (QuestionError, 400),
    (OtherVersionError, 409),
    (SupervisorGoneError, 503),
    (TimeoutError, 504),
    (RunFolderError, 422),
    ((ClusterError, RunError, CheckpointError, ConfigError, LayoutError, ValueError, TypeError), 409),
)
"""The first that fits. What is left of ValueError and TypeError comes from what was asked of a run: it was refused."""


def told(error: BaseException) -> tuple[int, str] | None:
    """(status, text) of what is known to go wrong; None for what nobody has foreseen."""
    denied = next((each for each in (error, error.__cause__) if isinstance(each, PermissionError)), None)
    if denied is not None:
        where = denied.filename or "a file of it"
        return 403, f"{where} may not be read by the user that runs this Jupyter server; give it the right to"
    for kinds, status in _STATUS:
        if isinstance(error, kinds):
            return status, str(error)
    if isinstance(error, OSError):
        where, why = error.filename or "a file", error.strerror or error
        return 422, f"{where} cannot be read: {why}; look at it, and try again"
    return None


def reading_text(error: BaseException, what: str = "this run") -> str:
    """Why a run, or `what`, cannot be read, for a page that looks at it."""
    known = told(error)
    return known[1] if known else f"{what} cannot be read ({type(error).__name__}); the server's log tells more"


def version_text(theirs: object, ours: int) -> str:
    """For a page that speaks another version."""
    return (
        f"this page speaks version {theirs!r} of SpeedLab's messages and the server version {ours}: reload the page; "
        "if that does not help, install the same version of SpeedLab for both and start the server again"
    )
