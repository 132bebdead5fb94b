"""What was changed in a panel, to be taken back and done again. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Shown = Mapping[str, Any]
"""What every control shows, by path."""


@dataclass(frozen=True)
class Edit:
    """One change of a person's: what the controls showed before and behind it."""

    words: str
    """'stage 2 → 3'"""
    before: Shown
    after: Shown


class UndoHistory:
    """Changes that were made, and those that were taken back since."""

    def __init__(self, shown: Shown) -> None:
        self.shown = shown
        """What they show now."""
        self._done: list[Edit] = []
        self._undone: list[Edit] = []

    @property
    def last(self) -> Edit | None:
        """What `undo` takes back."""
        return self._done[-1] if self._done else None

    @property
    def next(self) -> Edit | None:
        """What `redo` does again."""
        return self._undone[-1] if self._undone else None

    def note(self, words: str, shown: Shown) -> Edit | None:
        """A person has made the controls show this; the change, if it is one. What was taken back before is gone."""
        if shown == self.shown:
            return None
        change = Edit(words, self.shown, shown)
        self._done.append(change)
        self._undone.clear()
        self.shown = shown
        return change

    def follow(self, shown: Shown) -> None:
        """The controls show this by themselves, as they follow a run: nothing that a person would take back."""
        self.shown = shown

    def undo(self, steps: int | None = 1) -> Shown:
        """Take back so many changes, None: all; returns what the controls are to show."""
        for _ in range(len(self._done) if steps is None else min(steps, len(self._done))):
            self._undone.append(self._done.pop())
            self.shown = self._undone[-1].before
        return self.shown

    def redo(self, steps: int = 1) -> Shown:
        """Do again what was taken back."""
        for _ in range(min(steps, len(self._undone))):
            self._done.append(self._undone.pop())
            self.shown = self._done[-1].after
        return self.shown
