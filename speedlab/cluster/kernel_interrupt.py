"""Whose a KeyboardInterrupt is: a person's, or that with which Jupyter begins to restart or shut down a kernel."""

from __future__ import annotations

import time

_REQUEST_SECONDS = 1.0
"""Jupyter interrupts a kernel and at once asks it to end; where all cores train, this takes a while to arrive."""
_LOOK_SECONDS = 0.01


def is_the_users() -> bool:
    """Whether a KeyboardInterrupt that has just come is a person's, who wants the ranks to stop.

    In a kernel this waits a moment: the end of a kernel stops no run, and only the request that follows tells it from a
    person's interrupt.
    """
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    if getattr(shell, "kernel", None) is None:
        return True
    deadline = time.monotonic() + _REQUEST_SECONDS
    try:
        while time.monotonic() < deadline:
            if getattr(shell, "exit_now", False):
                return False
            time.sleep(_LOOK_SECONDS)
    except KeyboardInterrupt:
        return True  # Somebody means it.
    return True
