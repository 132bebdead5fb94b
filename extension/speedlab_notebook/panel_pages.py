"""A tab of the panel: its fields, made when it opens. Fields in a row that do nothing now are folded to one line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any

from speedlab_notebook.panel_controls import Looks
from speedlab_notebook.panel_fields import Field

_FEWEST_FOLDED = 3
_FEWEST_APART = 6
"""So many are folded where each has a reason of its own, which says what would make it do something."""
_MOST_NAMED = 4


@dataclass(frozen=True)
class Section:
    """Fields below a heading."""

    heading: str
    fields: list[Field]
    below: str = ""
    """What stands below them, by name."""


class _Fold:
    """A line in the place of fields that do nothing now, which shows them when it is pressed."""

    def __init__(self, page: Page, looks: Looks) -> None:
        self._fields: Sequence[Field] = ()
        self.button = looks.button("", "Show these fields all the same", "speedlab-fold")
        self.note = looks.html("speedlab-note")
        self.button.on_click(lambda _: page.unfold(*self._fields))

    def show(self, fields: Sequence[Field]) -> None:
        self._fields = fields
        names = [field.label for field in fields]
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED + 1 else ""
        named = ", ".join(names[: _MOST_NAMED if more else None]) + more
        why = f": {fields[0].reason}" if _one_reason(fields) else ", each for a reason of its own"
        self.button.description = f"Show {len(fields)} idle fields"
        self.note.value = f'<span class="speedlab-reason">{escape(named + why)}</span>'


class Page:
    """One tab. `box` is there at once, and empty until `arrange`, which its form calls while it is open."""

    def __init__(
        self, looks: Looks, sections: Sequence[Section], extra: Sequence[Any], below: Mapping[str, Any]
    ) -> None:
        self._looks = looks
        self._sections = sections
        self._extra = extra
        self._below = below
        self._headings: dict[str, Any] = {}
        self._folds: dict[str, _Fold] = {}
        self._unfolded: set[str] = set()
        """Paths of fields that a person wanted to see."""
        self.box = looks.box((), "speedlab-page")

    def __contains__(self, field: Field) -> bool:
        return any(field in section.fields for section in self._sections)

    def unfold(self, *fields: Field) -> None:
        """Show these fields, whether they do something or not."""
        self._unfolded |= {field.path for field in fields}
        self.arrange()

    def unfold_around(self, field: Field) -> None:
        """Show the section of a field that was looked for."""
        self.unfold(*next(section.fields for section in self._sections if field in section.fields))

    def arrange(self) -> None:
        """Rows as they are to be now; nothing is sent where they are so already."""
        rows = (*self._extra, *(row for section in self._sections for row in self._rows(section)))
        if rows != self.box.children:
            self.box.children = rows

    def _rows(self, section: Section) -> Iterator[Any]:
        if section.heading:
            yield self._heading(section.heading)
        for idle, group in groupby(section.fields, key=lambda one: one.is_idle and one.path not in self._unfolded):
            fields = list(group)
            if idle and len(fields) >= (_FEWEST_FOLDED if _one_reason(fields) else _FEWEST_APART):
                fold = self._fold(fields[0].path)
                fold.show(fields)
                yield from (fold.button, fold.note)
            else:
                for field in fields:
                    yield from (field.control, field.note)
        if section.below:
            yield self._below[section.below]

    def _heading(self, text: str) -> Any:
        if text not in self._headings:
            self._headings[text] = self._looks.html("speedlab-title", value=f"<h4>{escape(text)}</h4>")
        return self._headings[text]

    def _fold(self, path: str) -> _Fold:
        if path not in self._folds:
            self._folds[path] = _Fold(self, self._looks)
        return self._folds[path]


def _one_reason(fields: Sequence[Field]) -> bool:
    return len({field.reason for field in fields}) == 1
