"""The undo history of a panel's controls. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Shown = Mapping[str, Any]
"""What every control shows, by path."""


@dataclass(frozen=True)
class Edit:
    """One change of the user: what the controls showed before and after it."""

    words: str
    """For example 'stage 2 → 3'."""
    before: Shown
    after: Shown


class UndoHistory:
    """Changes that were made, and changes that were undone."""

    def __init__(self, shown: Shown) -> None:
        """Start an empty history.

        Args:
            shown: What the controls show now.
        """
        self.shown = shown
        """What the controls show now."""
        self._done: list[Edit] = []
        self._undone: list[Edit] = []

    @property
    def last(self) -> Edit | None:
        """The change that `undo` would undo; None if there is none."""
        return self._done[-1] if self._done else None

    @property
    def next(self) -> Edit | None:
        """The change that `redo` would redo; None if there is none."""
        return self._undone[-1] if self._undone else None

    def note(self, words: str, shown: Shown) -> Edit | None:
        """Record what the controls show after a change of the user; changes that were undone are dropped.

        Args:
            words: The change as text.
            shown: What the controls show now.

        Returns:
            The change; None if the controls show the same as before.
        """
        if shown == self.shown:
            return None
        change = Edit(words, self.shown, shown)
        self._done.append(change)
        self._undone.clear()
        self.shown = shown
        return change

    def follow(self, shown: Shown) -> None:
        """Take values that the panel set itself, for example from a run, as the new base. Undo ignores them.

        Args:
            shown: What the controls show now.
        """
        self.shown = shown

    def undo(self, steps: int | None = 1) -> Shown:
        """Undo changes.

        Args:
            steps: The number of changes; None undoes all.

        Returns:
            What the controls must show.
        """
        for _ in range(len(self._done) if steps is None else min(steps, len(self._done))):
            self._undone.append(self._done.pop())
            self.shown = self._undone[-1].before
        return self.shown

    def redo(self, steps: int = 1) -> Shown:
        """Redo changes that were undone.

        Args:
            steps: The number of changes.

        Returns:
            What the controls must show.
        """
        for _ in range(min(steps, len(self._undone))):
            self._done.append(self._undone.pop())
            self.shown = self._done[-1].after
        return self.shown
