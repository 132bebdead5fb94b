"""What can go wrong between ranks."""

from __future__ import annotations


class PeerLost(RuntimeError):  # noqa: N818  # what happened, not a mistake made here
    """A collective ended because another rank left, died or did not come in time. The cause is on that rank."""
