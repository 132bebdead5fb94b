"""The panel's widgets around the form: pictures, buttons, lines of text. No logic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets as widgets

from speedlab.telemetry.proof import Proof
from speedlab_notebook.panel.controls import StyleCache, set_class, with_classes
from speedlab_notebook.panel.form import Form
from speedlab_notebook.panel.run_control import WORDS
from speedlab_notebook.panel.train import HOSTS_EXAMPLE

_HERE = Path(__file__).parent
_MOST_ENGINES = 64
PRESETS, EXPORT = "Presets", "Export"
"""Titles of the tabs that follow the tabs of fields."""


class PanelKeys(anywidget.AnyWidget):
    """The page's own script: keyboard shortcuts, the focus of a field found by search, names for screen readers."""

    _esm = _HERE / "panel.js"


class PanelView:
    """The widgets, and methods that write text into them.

    Text is escaped here. Only `states` and the findings of a proof are HTML.
    """

    def __init__(
        self,
        engines: int,
        on_change: Callable[[str], object],
        handlers: Mapping[str, Callable[[], object]],
    ) -> None:
        """Make all widgets.

        Args:
            engines: The number in the box for engines.
            on_change: Called with the path of a field after its value changed.
            handlers: Name of a button -> the action of a click.
        """
        self.looks = looks = StyleCache()
        self.keys = looks.keep(PanelKeys(layout=looks.plain))
        self._make_engines(engines)
        extra = {"Parallelism": (self.engines, self.engines_note, self.hosts)}
        self.presets, self.export = (
            looks.box((), "speedlab-page", "speedlab-presets"),
            looks.box((), "speedlab-page", "speedlab-export"),
        )
        self.form = Form(looks, on_change, extra=extra, more={PRESETS: self.presets, EXPORT: self.export})
        self.states = looks.html("speedlab-states")
        self.effect = looks.html("speedlab-effect")
        self.summary = looks.html("speedlab-summary")
        self.status = looks.html("speedlab-status")
        self.changes = looks.html("speedlab-changes")
        self.message = looks.html("speedlab-message")
        self.proof = looks.html("speedlab-proof-of-run")
        self.step_count = looks.make(
            widgets.BoundedIntText, value=1, min=1, max=10**6, tooltip="Steps that the Step button computes"
        ).add_class("speedlab-step-count")
        self.buttons = {
            "train": _button(looks, "train", "Start a run with this configuration; nothing runs before", "primary"),
            **{word: _button(looks, word, WORDS[word][1]) for word in ("pause", "resume", "step", "save", "stop")},
            "prove": looks.button("Proof", WORDS["prove"][1], "speedlab-prove"),
            "apply": _button(looks, "apply", "Apply what is marked live to the run, between two steps", "primary"),
            "reset": looks.button("As the run", "Show the configuration of the run again", "speedlab-reset"),
            "undo": _button(looks, "undo", ""),
            "redo": _button(looks, "redo", ""),
            "undo all": looks.button("Undo all", "Take back every change", "speedlab-undo-all"),
        }
        self.on_click(handlers)
        self.changes_row = looks.box([self.changes, self.buttons["apply"], self.buttons["reset"]], "speedlab-row")

    def _make_engines(self, engines: int) -> None:
        looks = self.looks
        self.engines = looks.make(
            widgets.BoundedIntText,
            layout=looks.control,
            value=engines,
            min=1,
            max=_MOST_ENGINES,
            description="engines",
        ).add_class("speedlab-engines")
        hosts = looks.make(
            widgets.Text,
            layout=looks.wide,
            description="hosts",
            placeholder=HOSTS_EXAMPLE,
            tooltip=f"Where Train starts engines: {HOSTS_EXAMPLE}",
            continuous_update=False,
        )
        self.hosts = with_classes(hosts, "speedlab-hosts", "speedlab-wide")
        self.engines_note = looks.html("speedlab-note")

    def arranged(self, tools: Any) -> list[Any]:
        """Return all widgets from top to bottom.

        Args:
            tools: The row above the tabs.
        """
        buttons, looks = self.buttons, self.looks
        body = looks.box([self.form.tabs, self.states], "speedlab-body")
        words = [buttons[word] for word in ("train", "pause", "resume", "step")]
        others = [buttons["save"], buttons["prove"], buttons["stop"]]
        row = looks.box([*words, self.step_count, *others, self.status], "speedlab-row")
        style = looks.html(
            "speedlab-hidden", value=f"<style>{(_HERE / 'panel.css').read_text(encoding='utf-8')}</style>"
        )
        # Answers are shown next to the buttons, so that they are visible even if the panel is longer than the page.
        foot = looks.box([self.effect, self.summary, row, self.changes_row, self.message], "speedlab-foot")
        return [style, self.keys, tools, body, foot, self.proof]

    def on_click(self, handlers: Mapping[str, Callable[[], object]]) -> None:
        """Set the actions of buttons.

        Args:
            handlers: Name of a button -> the action of a click.
        """
        for word, handler in handlers.items():
            self.buttons[word].on_click(lambda _, handler=handler: handler())

    def show_line(self, where: Any, text: str, *, kind: str = "line", strong: str = "") -> None:
        """Write a line of text into a widget.

        Args:
            where: The HTML widget.
            text: The line; escaped here.
            kind: Suffix of the CSS class.
            strong: The part of `text` to show in bold; '' for none.
        """
        shown = escape(text)
        if strong:
            shown = shown.replace(escape(strong), f"<b>{escape(strong)}</b>", 1)
        where.value = f'<div class="speedlab-{kind}">{shown}</div>'

    def show_effect(self, words: str, text: str) -> None:
        """Show the effect of the last change of a control.

        Args:
            words: The change, for example 'stage 2 → 3'; '' shows `text` as help.
            text: The effect.
        """
        strong, kind = (f"<b>{escape(words)}</b>: ", "line") if words else ("", "help")
        self.effect.value = f'<div class="speedlab-{kind}">{strong}{escape(text)}</div>'

    def show_message(self, text: str, *, error: bool) -> None:
        """Show a message below the buttons.

        Args:
            text: The message; '' clears the area.
            error: Whether screen readers announce the message as an alert.
        """
        kind, role = (" speedlab-error", "alert") if error else ("", "status")
        self.message.value = f'<div role="{role}" class="speedlab-told{kind}">{escape(text)}</div>' if text else ""

    def show_proof(self, proof: Proof | None) -> None:
        """Show the proof of the run, opened if a finding needs attention.

        Args:
            proof: The proof; None clears the area.
        """
        if proof is None:
            self.proof.value = ""
            return
        is_open = " open" if proof.needs_a_look or proof.form == "full" else ""
        summary = f"<summary>{proof.headline_html}</summary>"
        self.proof.value = f'<details class="speedlab-told"{is_open}>{summary}{proof.findings_html()}</details>'

    def offer(self, word: str, why_not: str | None) -> None:
        """Enable or disable a button.

        Args:
            word: Name of the button.
            why_not: The reason for the tooltip of a disabled button; None enables the button.
        """
        button = self.buttons[word]
        button.disabled = why_not is not None
        if word in WORDS:
            button.tooltip = f"{WORDS[word][1]}. Not now: {why_not}" if why_not else WORDS[word][1]

    def show_changes(self, text: str) -> None:
        """Show the row with the differences to the run.

        Args:
            text: The differences; '' hides the row.
        """
        self.show_line(self.changes, text)
        set_class(self.changes_row, "speedlab-hidden", on=not text)


def _button(looks: StyleCache, word: str, tooltip: str, style: str = "") -> Any:
    return looks.button(word.capitalize(), tooltip, f"speedlab-{word}", style=style)
