"""What a person is told when a checkpoint cannot be written or read."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read; the message names the file and what is wrong with it."""
