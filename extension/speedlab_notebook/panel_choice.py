"""A radio group of which single options can be greyed: what ipywidgets' own cannot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anywidget
import traitlets


class Choice(anywidget.AnyWidget):
    """One of a few values. `value` is the one chosen; the page has the texts, and says which it is by its number."""

    _esm = Path(__file__).with_name("choice.js")

    label = traitlets.Unicode().tag(sync=True)
    meaning = traitlets.Unicode().tag(sync=True)
    """Told where the pointer rests. (`tooltip`, which each widget has, asks on the page for a description, too.)"""
    options = traitlets.List(traitlets.Unicode()).tag(sync=True)
    reasons = traitlets.List(traitlets.Unicode()).tag(sync=True)
    """Of each option, why it is greyed; '' where it is not."""
    index = traitlets.Int().tag(sync=True)
    value = traitlets.Any()

    def __init__(self, label: str, values: Sequence[Any], value: Any, *, meaning: str, layout: Any) -> None:
        self._values = list(values)
        texts = [str(option) for option in values]
        super().__init__(
            label=label,
            meaning=meaning,
            options=texts,
            reasons=[""] * len(texts),
            index=self._values.index(value),
            value=value,
            layout=layout,
        )
        self.add_class("speedlab-choice")

    @property
    def offered(self) -> dict[Any, bool]:
        """Every value, and whether it can be taken."""
        return {value: not reason for value, reason in zip(self._values, self.reasons, strict=True)}

    def offer(self, values: Sequence[Any], reasons: Mapping[Any, str]) -> None:
        """Show these values, greyed where there is a reason."""
        if list(values) != self._values:
            self._values = list(values)
            with self.hold_sync():
                self.options, self.index = [str(value) for value in values], self._values.index(self.value)
        self.reasons = [reasons.get(value, "") for value in self._values]

    @traitlets.observe("index")
    def _on_index(self, change: Any) -> None:
        self.value = self._values[change["new"]]

    @traitlets.observe("value")
    def _on_value(self, change: Any) -> None:
        self.index = self._values.index(change["new"])
