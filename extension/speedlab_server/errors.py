"""Map exceptions to an HTTP status and a text that says what to do."""

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
    """An unknown id."""


class GoneError(LookupError):
    """Something that existed before."""


class QuestionError(ValueError):
    """A request that is not valid."""


class OtherVersionError(ValueError):
    """A page with another version of the messages."""


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
"""The first match counts. Remaining ValueErrors and TypeErrors come from a run's methods, which refused the command."""


def reported(error: BaseException) -> tuple[int, str] | None:
    """Return (status, text) of an expected error; None for an unexpected one.

    Args:
        error: The exception.
    """
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
    """Return why something cannot be read, for a page.

    Args:
        error: The exception.
        what: What cannot be read.
    """
    known = reported(error)
    return known[1] if known else f"{what} cannot be read ({type(error).__name__}); the server's log has details"


def version_text(theirs: object, ours: int) -> str:
    """Return the text for a page with another version.

    Args:
        theirs: The page's version.
        ours: The server's version.
    """
    return (
        f"this page speaks version {theirs!r} of SpeedLab's messages and the server version {ours}: reload the page; "
        "if that does not help, install the same version of SpeedLab for both and start the server again"
    )
