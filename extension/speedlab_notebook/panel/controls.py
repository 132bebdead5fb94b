"""Widgets of a field: its control and its note; layouts and styles shared by all widgets of a panel.

Layouts and styles are shared because each one is a separate model on the page.
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
    """A radio group whose single options can be disabled, which the radio buttons of ipywidgets cannot do.

    `value` is the chosen value. The page has the texts of the options, and sends the index of the chosen one.
    """

    _esm = Path(__file__).with_name("choice.js")

    label = traitlets.Unicode().tag(sync=True)
    meaning = traitlets.Unicode().tag(sync=True)
    """Shown on hover. (`tooltip`, which every widget has, also requires a description on the page.)"""
    options = traitlets.List(traitlets.Unicode()).tag(sync=True)
    reasons = traitlets.List(traitlets.Unicode()).tag(sync=True)
    """For each option, why it is disabled; '' if it is enabled."""
    index = traitlets.Int().tag(sync=True)
    value = traitlets.Any()

    def __init__(self, label: str, values: Sequence[Any], value: Any, *, meaning: str, layout: Any) -> None:
        """Make a radio group.

        Args:
            label: The text in front of the options.
            values: The values; their `str` is the text of each option.
            value: The chosen value, one of `values`.
            meaning: The text on hover.
            layout: The widget's layout.
        """
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
        """Show these options; the chosen value must be one of them.

        Args:
            values: The values of the options.
            reasons: Value -> why it is disabled.
        """
        if list(values) != self._values:
            self._values = list(values)
            with self.hold_sync():
                # One message: the page must not see the old index with the new options.
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
"""If the options together have more letters than this, the note moves below the control."""


class StyleCache:
    """Layouts and styles for the widgets of one panel, each made once."""

    def __init__(self) -> None:
        self.control = widgets.Layout(width=CONTROL_WIDTH, margin="0")
        self.wide = widgets.Layout(width="auto", margin="0")
        self.plain = widgets.Layout()
        self._styles: dict[type, Any] = {}
        self._made: list[widgets.Widget] = []

    def make(self, kind: Any, *, layout: widgets.Layout | None = None, **more: Any) -> Any:
        """Make a widget that shares the style of all widgets of its kind.

        Args:
            kind: The widget class.
            layout: The widget's layout; None takes the plain one.
            more: Keyword arguments of the class.
        """
        shared = self._styles.get(kind)
        widget = kind(layout=layout or self.plain, **more, **({"style": shared} if shared is not None else {}))
        if shared is None and hasattr(widget, "style"):
            self._styles[kind] = widget.style
            if "description_width" in widget.style.keys:
                widget.style.description_width = LABEL_WIDTH
        return self.keep(widget)

    def keep(self, widget: Any) -> Any:
        """Register a widget, so that `close` closes it and its events are handled while a cell runs.

        Args:
            widget: Any widget.

        Returns:
            The same widget.
        """
        self._made.append(widget)
        _hear_where_it_is_sent(widget)
        return widget

    def box(self, children: Sequence[Any], *names: str) -> Any:
        """Make a box.

        Args:
            children: The widgets in the box.
            names: CSS classes.
        """
        return with_classes(self.make(widgets.Box, children=tuple(children)), *names)

    def html(self, *names: str, value: str = "") -> Any:
        """Make an HTML widget.

        Args:
            names: CSS classes.
            value: The HTML; the caller escapes text.
        """
        return with_classes(self.make(widgets.HTML, value=value), *names)

    def button(self, text: str, tooltip: str, *names: str, style: str = "") -> Any:
        """Make a button.

        Args:
            text: The button's text.
            tooltip: The text on hover.
            names: CSS classes.
            style: The button style of ipywidgets, for example 'primary'.
        """
        made = self.make(widgets.Button, description=text, tooltip=tooltip, button_style=style)
        return with_classes(made, *names)

    def close(self) -> None:
        """Close all widgets with their layouts and styles, also widgets that were never displayed."""
        for widget in self._made:
            for name in ("layout", "style"):
                if (part := getattr(widget, name, None)) is not None:
                    part.close()
            widget.close()
        for layout in (self.control, self.wide, self.plain):
            layout.close()
        self._made.clear()


class ShownField:
    """The widgets of one field: control and note."""

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
        """Update the widgets from the field's data."""
        field, control = self._field, self.control
        if isinstance(control, Choice):
            # `value` must be an option both before and after `offer`, so the order depends on the new value.
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
    """Handle events of a widget on the thread to which the page sends them.

    JupyterLab sends widget events to a subshell of the kernel, which runs while a cell runs. ipykernel would move them
    to the thread that last used this comm, mostly the main shell's, where they wait for example for `run.wait_until()`.
    A kernel without subshells never calls this function.
    """
    if widget.comm is not None:
        widget.comm._reply_subshell_for = lambda _, sent_to: sent_to


def class_of(path: str) -> str:
    """Return the CSS class of a field's control.

    Args:
        path: Path of the field.
    """
    return f"speedlab-{path.replace('.', '-').replace('_', '-')}"


def note_html(field: Field) -> str:
    """Return the note of a field as HTML: the mark, then the problem, the reason for being disabled, or the meaning.

    Args:
        field: The field.
    """
    kind = "problem" if field.problem else "reason" if field.reason else "help"
    mark = f'<span class="speedlab-mark">{escape(field.mark)}</span> ' if field.mark else ""
    return f'{mark}<span class="speedlab-{kind}">{escape(field.text)}</span>'


def with_classes(widget: Any, *names: str) -> Any:
    """Add CSS classes to a widget and return the widget.

    Args:
        widget: Any widget.
        names: CSS classes.
    """
    for name in names:
        widget.add_class(name)
    return widget


def set_class(widget: Any, name: str, *, on: bool) -> None:
    """Add or remove a CSS class; nothing is sent to the page if the widget has the wanted state.

    Args:
        widget: Any widget.
        name: The CSS class.
        on: Whether the widget should have the class.
    """
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
