"""The panel's widgets around the form: pictures, buttons, lines of text. No logic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from speedlab_notebook.panel_actions import WORDS
from speedlab_notebook.panel_fields import Form
from speedlab_notebook.panel_start import HOSTS_EXAMPLE

_STYLE = Path(__file__).with_name("panel.css")
_MOST_ENGINES = 64


class View:
    """The widgets, and what is written in them. All text is escaped here; only the states come as HTML."""

    def __init__(
        self, engines: int, on_change: Callable[[str], object], handlers: Mapping[str, Callable[[], object]]
    ) -> None:
        self.engines = widgets.BoundedIntText(
            value=engines,
            min=1,
            max=_MOST_ENGINES,
            description="engines",
            layout={"width": "318px", "margin": "0"},
            style={"description_width": "122px"},
        ).add_class("speedlab-engines")
        self.hosts = (
            widgets.Text(
                description="hosts",
                placeholder=HOSTS_EXAMPLE,
                tooltip=f"Where Train starts engines: {HOSTS_EXAMPLE}",
                continuous_update=False,
                layout={"width": "auto", "margin": "0"},
                style={"description_width": "122px"},
            )
            .add_class("speedlab-hosts")
            .add_class("speedlab-wide")
        )
        self.engines_note = widgets.HTML()
        self.form = Form(on_change, extra={"Parallelism": (self.engines, self.engines_note, self.hosts)})
        self.states = _html("states")
        self.summary = _html("summary")
        self.status = _html("status")
        self.changes = _html("changes")
        self.message = _html("message")
        self.step_count = widgets.BoundedIntText(
            value=1, min=1, max=10**6, tooltip="Steps that the Step button computes", layout={"width": "64px"}
        ).add_class("speedlab-step-count")
        self.buttons = {
            "train": _button("train", "Start a run with this configuration; nothing runs before", "primary"),
            **{word: _button(word, WORDS[word][1]) for word in ("pause", "resume", "step", "save", "stop")},
            "apply": _button("apply", "Apply what is marked live to the run, between two steps", "primary"),
            "undo": _button("undo", "Show the configuration of the run again"),
        }
        for word, handler in handlers.items():
            self.buttons[word].on_click(lambda _, handler=handler: handler())
        self.changes_row = widgets.Box([self.changes, self.buttons["apply"], self.buttons["undo"]])
        self.changes_row.add_class("speedlab-row")

    def arranged(self) -> list[widgets.Widget]:
        """Everything from top to bottom."""
        buttons = self.buttons
        body = widgets.Box([self.form.tabs, self.states]).add_class("speedlab-body")
        words = [buttons[word] for word in ("train", "pause", "resume", "step")]
        row = widgets.Box([*words, self.step_count, buttons["save"], buttons["stop"], self.status])
        row.add_class("speedlab-row")
        style = widgets.HTML(f"<style>{_STYLE.read_text(encoding='utf-8')}</style>", layout={"display": "none"})
        return [style, body, self.summary, row, self.changes_row, self.message]

    def show_line(self, where: widgets.HTML, text: str, *, kind: str = "line", strong: str = "") -> None:
        """A line of text, a part of it strong; a screen reader hears it when it changes."""
        shown = escape(text)
        if strong:
            shown = shown.replace(escape(strong), f"<b>{escape(strong)}</b>", 1)
        where.value = f'<div role="status" class="speedlab-{kind}">{shown}</div>'

    def show_message(self, text: str, *, error: bool) -> None:
        """What happened, in the area below the buttons; '' empties it."""
        kind, role = (" speedlab-error", "alert") if error else ("", "status")
        self.message.value = f'<div role="{role}" class="speedlab-told{kind}">{escape(text)}</div>' if text else ""

    def show_changes(self, text: str) -> None:
        """The row that tells differences to the run; '' takes it away."""
        self.show_line(self.changes, text)
        self.changes_row.layout.display = "" if text else "none"


def _html(name: str) -> Any:
    return widgets.HTML().add_class(f"speedlab-{name}")


def _button(word: str, tooltip: str, style: str = "") -> Any:
    button = widgets.Button(description=word.capitalize(), tooltip=tooltip, button_style=style)
    return button.add_class(f"speedlab-{word}")
