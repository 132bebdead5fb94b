"""What this rank does, as a sentence: `activity` writes and publishes it, errors of collectives read it."""

from __future__ import annotations

_NOT_YET = "has not called the engine yet"
LEFT = "has left the group of ranks"


class OwnNote:
    """The note of this process: a predicate with the rank as its subject, 'is in save_checkpoint after step 11'."""

    def __init__(self) -> None:
        self.text = _NOT_YET
        self.changes = 0
        """Rises with each note, so that a thread sees that one has changed."""

    def set(self, text: str) -> None:
        """Note `text` from now on."""
        self.text = text
        self.changes += 1

    def forget(self) -> None:
        """A new world begins."""
        self.set(_NOT_YET)

    @property
    def is_of_an_engine(self) -> bool:
        """Whether it is about calls of an engine."""
        return self.text not in (_NOT_YET, LEFT)


own_note = OwnNote()
"""The one of this process."""
