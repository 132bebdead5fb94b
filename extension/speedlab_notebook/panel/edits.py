"""What a person does with a panel's fields as a whole: look for one, take changes back, take a preset, export."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from speedlab.config import RunConfig
from speedlab.hardware import Device
from speedlab_notebook.panel.changes import PendingChange, effect_text
from speedlab_notebook.panel.controls import class_of
from speedlab_notebook.panel.history import UndoHistory
from speedlab_notebook.panel.prediction import PanelPrediction, link_of
from speedlab_notebook.panel.presets import PanelPreset, presets
from speedlab_notebook.panel.toolbar import ExportTab, PresetTab, Search
from speedlab_notebook.panel.view import EXPORT, PRESETS, PanelView

if TYPE_CHECKING:
    from speedlab.cluster import Cluster


class Edited(Protocol):
    """The panel whose fields are edited."""

    cluster: Cluster | None
    config: RunConfig | None
    prediction: PanelPrediction | None
    problems: list[tuple[str, str]]
    changes: list[PendingChange]
    devices: Sequence[Device]
    effect_text: str

    def refresh(self) -> None: ...
    def show_run_config(self) -> None: ...
    def tell(self, text: str) -> None: ...
    def tell_error(self, error: Exception) -> None: ...


class Edits:
    """The row above the tabs, the tabs behind the fields, and what was changed so far."""

    def __init__(self, panel: Edited, view: PanelView) -> None:
        self._panel = panel
        self._view = view
        self._form = view.form
        self._history = UndoHistory(self._form.shown)
        self._presets: PresetTab | None = None
        self._export: ExportTab | None = None
        self.search = Search(view.looks, self._form.fields, self.go_to)
        undo = (view.buttons[word] for word in ("undo", "redo", "undo all"))
        self.tools = view.looks.box([self.search.box, *undo, self.search.results], "speedlab-row", "speedlab-tools")
        view.on_click(
            {"undo": self.undo, "redo": self.redo, "undo all": lambda: self.undo(None), "reset": self._take_run}
        )
        view.keys.on_msg(self._on_key)
        view.show_effect("", "Move a control: what it changes in memory, speed and placement is told here.")
        self._form.tabs.observe(lambda _: self.show(), "selected_index")

    # Fields

    def go_to(self, path: str) -> None:
        """Open the tab of a field and put the keyboard's focus there."""
        self._form.go_to(path)
        self._view.keys.send({"do": "focus", "name": class_of(path)})

    def changed(self, path: str) -> None:
        """A person has moved the control of this field."""
        field, before = self._form.fields[path], self._history.shown[path]
        self._done(f"{field.label} {_shown(before)} → {_shown(field.value)}")

    def follow(self) -> None:
        """The controls show something by themselves, which is nothing to take back."""
        self._history.follow(self._form.shown)

    def _take_run(self) -> None:
        """Show the configuration of the run again, as a change that can be taken back."""
        shown = self._form.shown
        self._panel.show_run_config()
        self._history.follow(shown)
        self._done("as the run")

    def _take_preset(self, preset: PanelPreset) -> None:
        if preset.config is not None:
            self._form.load(preset.config)
            self._done(preset.name)

    def _done(self, words: str) -> None:
        """Take in what the controls show now, and tell what the change came to."""
        before = self._panel.prediction
        if self._history.note(words, self._form.shown) is not None:
            self._refresh(words, before)

    def _refresh(self, words: str, before: PanelPrediction | None) -> None:
        panel = self._panel
        panel.refresh()
        after = panel.prediction
        if panel.config is None or panel.problems or before is None or after is None:
            panel.effect_text = "it cannot run like that; Undo takes the change back"
        else:
            panel.effect_text = effect_text(before, after)
        self._view.show_effect(words, panel.effect_text)

    # Undo

    def undo(self, steps: int | None = 1) -> None:
        """Take back so many changes of a person's; None: all."""
        if (last := self._history.last) is not None:
            before = self._panel.prediction
            self._form.restore(self._history.undo(steps))
            self._refresh(f"taken back: {last.words}" if steps == 1 else "changes taken back", before)

    def redo(self, steps: int = 1) -> None:
        """Do again what was taken back."""
        if (following := self._history.next) is not None:
            before = self._panel.prediction
            self._form.restore(self._history.redo(steps))
            self._refresh(f"done again: {following.words}" if steps == 1 else "changes done again", before)

    def _on_key(self, _: Any, message: Any, __: Any) -> None:
        match message.get("do"):
            case "undo":
                self.undo()
            case "redo":
                self.redo()
            case "choose":
                self.search.choose(0)
            case "copied":
                self._panel.tell("copied")

    # What follows

    @property
    def offered(self) -> dict[str, bool]:
        """Which of the buttons are offered."""
        last, following = self._history.last, self._history.next
        return {
            "undo": last is not None,
            "redo": following is not None,
            "undo all": last is not None,
            "reset": bool(self._panel.changes),
        }

    def show(self) -> None:
        """Show what follows from the controls, where it is to be seen."""
        last, following = self._history.last, self._history.next
        buttons = self._view.buttons
        buttons["undo"].tooltip = f"Take back: {last.words}" if last else "Nothing to take back"
        buttons["redo"].tooltip = f"Do again: {following.words}" if following else "Nothing was taken back"
        if self._form.open_tab == PRESETS:
            self._show_presets()
        elif self._form.open_tab == EXPORT:
            self.export_tab.show(self._panel.config if not self._panel.problems else None)

    def _show_presets(self) -> None:
        panel = self._panel
        if self._presets is None:
            self._presets = PresetTab(self._view.looks, self._view.presets, self._take_preset)
        elif panel.config is None or panel.problems:
            return  # What it shows is of the last that was a configuration.
        now = panel.config if panel.config is not None and not panel.problems else RunConfig()
        self._presets.show(presets(now, panel.devices, link_of(panel.cluster)))

    @property
    def export_tab(self) -> ExportTab:
        """The tab with the text; made when it opens, or is asked for."""
        if self._export is None:
            self._export = ExportTab(self._view.looks, self._view.export, self._panel.tell, self._panel.tell_error)
        return self._export


def _shown(value: Any) -> str:
    if value == "" or value is None:
        return "–"
    return str(value).lower() if isinstance(value, bool) else str(value)
