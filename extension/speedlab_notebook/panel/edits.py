"""Actions on all fields of a panel: search, undo and redo, presets, export."""

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
from speedlab_notebook.panel.search_presets_export import ExportTab, PresetTab, Search
from speedlab_notebook.panel.view import EXPORT, PRESETS, PanelView

if TYPE_CHECKING:
    from speedlab.cluster import Cluster


class Edited(Protocol):
    """The part of the panel that Edits uses."""

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
    """The row of tools above the tabs, the tabs for presets and export, and the undo history."""

    def __init__(self, panel: Edited, view: PanelView) -> None:
        """Make the tools and connect their buttons.

        Args:
            panel: The panel whose fields are edited.
            view: The panel's widgets.
        """
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
        view.show_effect("", "Move a control: its effect on memory, speed and placement is shown here.")
        self._form.tabs.observe(lambda _: self.show(), "selected_index")

    # Fields

    def go_to(self, path: str) -> None:
        """Open the tab of a field and focus the field's control.

        Args:
            path: Path of the field.
        """
        self._form.go_to(path)
        self._view.keys.send({"do": "focus", "name": class_of(path)})

    def changed(self, path: str) -> None:
        """Record a change that the user made, and show its effect.

        Args:
            path: Path of the changed field.
        """
        field, before = self._form.fields[path], self._history.shown[path]
        self._done(f"{field.label} {_shown(before)} → {_shown(field.value)}")

    def follow(self) -> None:
        """Take the present values as the new base. The panel set them itself, so Undo has nothing to restore."""
        self._history.follow(self._form.shown)

    def _take_run(self) -> None:
        """Load the configuration of the run as one change that Undo can take back."""
        shown = self._form.shown
        self._panel.show_run_config()
        # `show_run_config` moved the base of the history. Move it back, so that the load counts as one change.
        self._history.follow(shown)
        self._done("as the run")

    def _take_preset(self, preset: PanelPreset) -> None:
        if preset.config is not None:
            self._form.load(preset.config)
            self._done(preset.name)

    def _done(self, words: str) -> None:
        """Record what the controls show now, and show the effect of the change."""
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
        """Undo changes of the user.

        Args:
            steps: The number of changes; None undoes all.
        """
        if (last := self._history.last) is not None:
            before = self._panel.prediction
            self._form.restore(self._history.undo(steps))
            self._refresh(f"taken back: {last.words}" if steps == 1 else "changes taken back", before)

    def redo(self, steps: int = 1) -> None:
        """Redo changes that were undone.

        Args:
            steps: The number of changes.
        """
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

    # Buttons and open tab

    @property
    def offered(self) -> dict[str, bool]:
        """Name of a button -> whether it is enabled."""
        last, following = self._history.last, self._history.next
        return {
            "undo": last is not None,
            "redo": following is not None,
            "undo all": last is not None,
            "reset": bool(self._panel.changes),
        }

    def show(self) -> None:
        """Update tooltips, and the content of the presets or export tab if that tab is open."""
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
            return  # Keep the presets of the last valid configuration.
        now = panel.config if panel.config is not None and not panel.problems else RunConfig()
        self._presets.show(presets(now, panel.devices, link_of(panel.cluster)))

    @property
    def export_tab(self) -> ExportTab:
        """The export tab; made when it is first opened or read."""
        if self._export is None:
            self._export = ExportTab(self._view.looks, self._view.export, self._panel.tell, self._panel.tell_error)
        return self._export


def _shown(value: Any) -> str:
    if value == "" or value is None:
        return "–"
    return str(value).lower() if isinstance(value, bool) else str(value)
