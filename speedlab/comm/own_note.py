"""A sentence about the current activity of this rank. `rank_activity` writes and publishes it; errors of collectives
read it.
"""

from __future__ import annotations

_NOT_YET = "has not called the engine yet"
LEFT = "has left the group of ranks"


class OwnNote:
    """The note of this process: a predicate with the rank as its subject, 'is in save_checkpoint after step 11'."""

    def __init__(self) -> None:
        self.text = _NOT_YET
        self.changes = 0
        """Number of changes, by which a thread detects a new note."""

    def set(self, text: str) -> None:
        """Replace the note.

        Args:
            text: A predicate with the rank as its subject.
        """
        self.text = text
        self.changes += 1

    def forget(self) -> None:
        """Reset the note for a new world."""
        self.set(_NOT_YET)

    @property
    def is_of_an_engine(self) -> bool:
        """Whether the note is about calls of an engine."""
        return self.text not in (_NOT_YET, LEFT)


own_note = OwnNote()
"""The note of this process."""
