"""The form of the panel: every field of RunConfig, in tabs whose widgets are made when the tab opens.

Neighbouring fields that have no effect now are folded into one line.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any

import ipywidgets as widgets

from speedlab.config import RunConfig
from speedlab.config.base import ConfigSection
from speedlab_notebook.panel.controls import ShownField, StyleCache
from speedlab_notebook.panel.fields import SECTIONS, Field, value_at

_FEWEST_FOLDED = 3
"""Number of neighbouring idle fields with one common reason that are folded into one line."""
_FEWEST_SEPARATE = 6
"""The same if the reasons differ. The number is higher because folding hides each field's own reason."""
_MOST_NAMED = 4


@dataclass(frozen=True)
class Section:
    """Fields under a heading."""

    heading: str
    fields: list[Field]
    below: str = ""
    """Name of the widget under the fields; '' for none."""


class _Fold:
    """A button that replaces folded fields and shows them when it is clicked."""

    def __init__(self, page: FormPage, looks: StyleCache) -> None:
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


class FormPage:
    """One tab of the form. `box` exists at once; `arrange` fills it when the tab is open."""

    def __init__(
        self, looks: StyleCache, sections: Sequence[Section], extra: Sequence[Any], below: Mapping[str, Any]
    ) -> None:
        """Make an empty tab.

        Args:
            looks: Makes the widgets.
            sections: The fields of the tab.
            extra: Widgets at the top of the tab.
            below: Widgets by the name that `Section.below` gives.
        """
        self._looks = looks
        self._sections = sections
        self._extra = extra
        self._below = below
        self._headings: dict[str, Any] = {}
        self._folds: dict[str, _Fold] = {}
        self._unfolded: set[str] = set()
        """Paths of fields that the user has unfolded."""
        self.box = looks.box((), "speedlab-page")

    def __contains__(self, field: Field) -> bool:
        return any(field in section.fields for section in self._sections)

    def unfold(self, *fields: Field) -> None:
        """Show these fields for good, even if they are idle.

        Args:
            fields: The fields to show.
        """
        self._unfolded |= {field.path for field in fields}
        self.arrange()

    def unfold_around(self, field: Field) -> None:
        """Show the whole section of a field.

        Args:
            field: A field of this tab, found by search.
        """
        self.unfold(*next(section.fields for section in self._sections if field in section.fields))

    def arrange(self) -> None:
        """Build the rows of the tab. Nothing is sent to the page if the rows are unchanged."""
        rows = (*self._extra, *(row for section in self._sections for row in self._rows(section)))
        if rows != self.box.children:
            self.box.children = rows

    def _rows(self, section: Section) -> Iterator[Any]:
        if section.heading:
            yield self._heading(section.heading)
        for idle, group in groupby(section.fields, key=lambda one: one.is_idle and one.path not in self._unfolded):
            fields = list(group)
            if idle and len(fields) >= (_FEWEST_FOLDED if _one_reason(fields) else _FEWEST_SEPARATE):
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


_BATCH = ("batch.global_size", "batch.micro_size", "batch.accumulation")


class Form:
    """The fields by path, and their tabs."""

    def __init__(
        self,
        looks: StyleCache,
        on_change: Callable[[str], object],
        *,
        extra: Mapping[str, Sequence[Any]],
        more: Mapping[str, Any],
    ) -> None:
        """Make the fields and empty tabs.

        Args:
            looks: Makes the widgets.
            on_change: Called with the path after the user changed a field; not called by `load`, `put` and `restore`.
            extra: Title of a tab of fields -> widgets at its top.
            more: Title -> content of tabs that follow the tabs of fields.
        """
        self._on_change = on_change
        self._looks = looks
        self._quiet = False
        self.fields: dict[str, Field] = {}
        self.attention: Any = looks.html("speedlab-seen")
        """The picture of what queries see, under the fields of `model.attention`; empty for dense attention."""
        self._more = list(more)
        self.pages: list[FormPage] = []
        for title, names in SECTIONS.items():
            sections = [section for name in names for section in self._sections(RunConfig, name, name)]
            self.pages.append(FormPage(looks, sections, extra.get(title, ()), {"attention": self.attention}))
        boxes = [*(page.box for page in self.pages), *more.values()]
        self.tabs: Any = looks.make(widgets.Tab, children=boxes, titles=[*SECTIONS, *more], selected_index=0)
        self.tabs.add_class("speedlab-tabs")
        self.tabs.observe(lambda _: self.arrange(), "selected_index")

    @property
    def open_tab(self) -> str:
        """The title of the open tab."""
        return [*SECTIONS, *self._more][self.tabs.selected_index or 0]

    def go_to(self, path: str) -> None:
        """Open the tab of a field and unfold the field's section.

        Args:
            path: Path of the field.
        """
        field = self.fields[path]
        number = next(i for i, page in enumerate(self.pages) if field in page)
        self.pages[number].unfold_around(field)
        self.tabs.selected_index = number

    def arrange(self) -> None:
        """Build the rows of the open tab."""
        number = self.tabs.selected_index
        if number is not None and number < len(self.pages):
            self.pages[number].arrange()

    # Values

    def values(self) -> dict[str, Any]:
        """Return the values of all controls as keyword arguments of RunConfig."""
        values: dict[str, Any] = {}
        for path, field in self.fields.items():
            *parts, name = path.split(".")
            inside = values
            for part in parts:
                inside = inside.setdefault(part, {})
            inside[name] = field.get()
        return values

    @property
    def shown(self) -> dict[str, Any]:
        """What every control shows, by path."""
        return {path: field.value for path, field in self.fields.items()}

    def load(self, config: RunConfig) -> None:
        """Show a configuration; `on_change` is not called.

        Args:
            config: The configuration.
        """
        self.put({path: value_at(config, path) for path in self.fields})

    def put(self, values: Mapping[str, Any]) -> None:
        """Show values of RunConfig; `on_change` is not called.

        Args:
            values: Path of a field -> its value.
        """
        self._quietly({path: lambda field, value=value: field.set(value) for path, value in values.items()})

    def restore(self, shown: Mapping[str, Any]) -> None:
        """Show an earlier state of the controls; `on_change` is not called.

        Args:
            shown: An earlier value of `shown`.
        """
        self._quietly({path: lambda field, value=value: field.put(value) for path, value in shown.items()})

    def mark(self, problems: Collection[str], differing: Collection[str]) -> None:
        """Mark the tabs that hold problems (▲) or differences to the run (•), because a field may be in a closed tab.

        Args:
            problems: Paths of fields with a problem.
            differing: Paths of fields that differ from the run.
        """

        def title(name: str, inside: Sequence[str]) -> str:
            if any(path.partition(".")[0] in inside for path in problems):
                return f"{name} ▲"
            return f"{name} •" if any(path.partition(".")[0] in inside for path in differing) else name

        self.tabs.titles = [*(title(name, inside) for name, inside in SECTIONS.items()), *self._more]

    def _quietly(self, changes: Mapping[str, Callable[[Field], None]]) -> None:
        self._quiet = True
        try:
            for path, change in changes.items():
                change(self.fields[path])
        finally:
            self._quiet = False

    # Making

    def _sections(self, owner: type[ConfigSection], name: str, path: str) -> list[Section]:
        """Return the sections of a field; of a nested section of RunConfig, its heading and its fields, recursively."""
        info, part = owner.model_fields[name], owner.part_of(name)
        if part is None:
            field = self.fields[path] = Field(path, info, self._changed, lambda one: ShownField(one, self._looks))
            return [Section("", [field])]
        inner = [section for one in part.model_fields for section in self._sections(part, one, f"{path}.{one}")]
        own = [field for section in inner if not section.heading for field in section.fields]
        below = "attention" if path == "model.attention" else ""
        parts = [section for section in inner if section.heading]
        return [Section(info.description or name, own, below), *parts]

    def _changed(self, path: str) -> None:
        if self._quiet:
            return
        if path == "model.preset":
            self._fill_from_preset()
        if path in _BATCH and all(self.fields[other].get() is not None for other in _BATCH):
            # Two of the three decide the third: keep the newest value and clear the one that follows from it.
            self.put({"batch.micro_size" if path == "batch.accumulation" else "batch.accumulation": None})
        self._on_change(path)

    def _fill_from_preset(self) -> None:
        """Fill the model's fields with the shape of the preset."""
        config = RunConfig(model={"preset": self.fields["model.preset"].get()}, data={"sequence_length": 1})
        self.put({path: value_at(config, path) for path in self.fields if path.startswith("model.")})
