"""A field's control and note as widgets. Layouts and styles are shared: each would be a model of its own.

A radio group of which single options can be greyed: what ipywidgets' own cannot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets as widgets
import traitlets

from speedlab_notebook.panel.fields import ControlKind, Field


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


LABEL_WIDTH = "122px"
CONTROL_WIDTH = "318px"
_MOST_LETTERS = 16
"""Options with more letters than this, together, do not fit beside their note."""


class StyleCache:
    """Layouts and styles of one panel's widgets, each made once."""

    def __init__(self) -> None:
        self.control = widgets.Layout(width=CONTROL_WIDTH, margin="0")
        self.wide = widgets.Layout(width="auto", margin="0")
        self.plain = widgets.Layout()
        self._styles: dict[type, Any] = {}
        self._made: list[widgets.Widget] = []

    def make(self, kind: Any, *, layout: widgets.Layout | None = None, **more: Any) -> Any:
        """A widget of this kind, with the style that all of its kind share."""
        shared = self._styles.get(kind)
        widget = kind(layout=layout or self.plain, **more, **({"style": shared} if shared is not None else {}))
        if shared is None and hasattr(widget, "style"):
            self._styles[kind] = widget.style
            if "description_width" in widget.style.keys:
                widget.style.description_width = LABEL_WIDTH
        return self.keep(widget)

    def keep(self, widget: Any) -> Any:
        """`widget`, which is to be closed with the others, and is heard while a cell runs."""
        self._made.append(widget)
        _hear_where_it_is_sent(widget)
        return widget

    def box(self, children: Sequence[Any], *names: str) -> Any:
        return with_classes(self.make(widgets.Box, children=tuple(children)), *names)

    def html(self, *names: str, value: str = "") -> Any:
        return with_classes(self.make(widgets.HTML, value=value), *names)

    def button(self, text: str, tooltip: str, *names: str, style: str = "") -> Any:
        made = self.make(widgets.Button, description=text, tooltip=tooltip, button_style=style)
        return with_classes(made, *names)

    def close(self) -> None:
        """Close all that was made, on the page or not, with its layout and style."""
        for widget in self._made:
            for name in ("layout", "style"):
                if (part := getattr(widget, name, None)) is not None:
                    part.close()
            widget.close()
        for layout in (self.control, self.wide, self.plain):
            layout.close()
        self._made.clear()


class ShownField:
    """A field on the page."""

    def __init__(self, field: Field, looks: StyleCache) -> None:
        self._field = field
        self.control = _make_control(field, looks)
        names = [class_of(field.path)]
        self.note = looks.html("speedlab-note")
        if isinstance(self.control, Choice) and sum(map(len, self.control.options)) > _MOST_LETTERS:
            names.append("speedlab-wide")
            self.note.add_class("speedlab-below")
        with_classes(self.control, *names)
        self.control.observe(lambda change: field.put(change["new"]), "value")

    def show(self) -> None:
        """Show the field as it is now."""
        field, control = self._field, self.control
        if isinstance(control, Choice):
            if field.value in control.offered:
                control.value = field.value
                control.offer(field.options, field.greyed)
            else:
                control.offer(field.options, field.greyed)
                control.value = field.value
        else:
            control.value = field.value
            control.disabled = bool(field.reason)
            if field.kind is ControlKind.TEXT:
                control.placeholder = field.placeholder
        self.note.value = note_html(field)


def _hear_where_it_is_sent(widget: Any) -> None:
    """Let what a person does reach the thread that the page sends it to: JupyterLab's subshell for widgets, which
    listens while a cell runs. ipykernel would take it to the thread that spoke last on this comm, mostly the cells'
    own, where it waits for the end of `run.wait_until()`. A kernel without subshells never asks."""
    if widget.comm is not None:
        widget.comm._reply_subshell_for = lambda _, sent_to: sent_to


def class_of(path: str) -> str:
    """The CSS class of a field's control."""
    return f"speedlab-{path.replace('.', '-').replace('_', '-')}"


def note_html(field: Field) -> str:
    """What stands beside a control: how it differs from the run, then what is wrong, why it is greyed, or what it
    means."""
    kind = "problem" if field.problem else "reason" if field.reason else "help"
    mark = f'<span class="speedlab-mark">{escape(field.mark)}</span> ' if field.mark else ""
    return f'{mark}<span class="speedlab-{kind}">{escape(field.text)}</span>'


def with_classes(widget: Any, *names: str) -> Any:
    """`widget`, with these CSS classes."""
    for name in names:
        widget.add_class(name)
    return widget


def set_class(widget: Any, name: str, *, on: bool) -> None:
    """Give a widget a CSS class, or take it; nothing is sent where it is so already."""
    if on != (name in widget._dom_classes):
        (widget.add_class if on else widget.remove_class)(name)


def _make_control(field: Field, looks: StyleCache) -> Any:
    if field.kind is ControlKind.CHOICE:
        choice = Choice(field.label, field.options, field.value, meaning=field.description, layout=looks.control)
        return looks.keep(choice)
    common = {
        "value": field.value,
        "description": field.label,
        "tooltip": field.description,
        "layout": looks.control,
    }
    match field.kind:
        case ControlKind.SWITCH:
            return looks.make(widgets.Checkbox, **common)
        case ControlKind.LIST:
            return looks.make(widgets.Dropdown, options=field.options, **common)
        case ControlKind.KNOWN:
            return looks.make(widgets.Combobox, options=field.options, continuous_update=False, **common)
        case ControlKind.NUMBER:
            return looks.make(widgets.FloatText, **common)
        case ControlKind.WHOLE:
            least, most = field.bounds
            return looks.make(widgets.BoundedIntText, min=least, max=most, **common)
    return looks.make(widgets.Text, placeholder=field.placeholder, continuous_update=False, **common)
