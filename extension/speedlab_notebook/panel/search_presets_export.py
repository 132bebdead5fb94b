"""The panel's tools: search over the fields, presets, and export of the configuration as text.

Export formats are JSON, YAML, Python and DeepSpeed's JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from pprint import pformat
from typing import Any

import ipywidgets as widgets

from speedlab.config import RunConfig, annotated_yaml
from speedlab_notebook.panel.controls import Choice, StyleCache, set_class
from speedlab_notebook.panel.fields import SECTIONS, Field
from speedlab_notebook.panel.presets import PanelPreset
from speedlab_notebook.panel.search import MOST_FOUND, deepspeed_names, find

_WIDTH = 96


def python_text(config: RunConfig) -> str:
    """Return Python code that builds a configuration.

    The code gives only values that differ from the defaults; for the model, values that differ from its preset.

    Args:
        config: The configuration.
    """
    named: dict[str, Any] = config.model_dump(mode="json", exclude_defaults=True)
    if "model" in named:
        own = config.model.changes()
        named["model"] = {"preset": config.model.preset, **{key: named["model"].get(key, own[key]) for key in own}}
    lines = [f"    {name}={pformat(value, width=_WIDTH, sort_dicts=False)}," for name, value in named.items()]
    inside = "\n".join(["", *lines, ""]) if lines else ""
    package = RunConfig.__module__.partition(".")[0]
    return f"from {package} import RunConfig\n\nconfig = RunConfig({inside})\n"


def _deepspeed_text(config: RunConfig) -> str:
    return json.dumps(config.to_deepspeed(), indent=2) + "\n"


FORMATS: dict[str, tuple[str, Callable[[RunConfig], str]]] = {
    "JSON": (".json", lambda config: config.to_json() + "\n"),
    "YAML": (".yaml", annotated_yaml),
    "Python": (".py", python_text),
    "DeepSpeed JSON": ("-deepspeed.json", _deepspeed_text),
}
"""Format -> the end of the file's name, and a function that returns the text."""


class Search:
    """A search box, and below it a button for each field that was found."""

    def __init__(self, looks: StyleCache, fields: Mapping[str, Field], go_to: Callable[[str], object]) -> None:
        """Make the box, and no result yet.

        Args:
            looks: Makes the widgets.
            fields: The form's fields by path.
            go_to: Called with the path of the chosen field.
        """
        self._looks = looks
        self._fields = fields
        self._go_to = go_to
        self._found: list[Field] = []
        self.box = looks.make(
            widgets.Text,
            layout=looks.control,
            description="Find a field",
            placeholder="name, word, or DeepSpeed's name",
        ).add_class("speedlab-search")
        self.results = looks.box((), "speedlab-results", "speedlab-hidden")
        self.box.observe(lambda change: self._show(change["new"]), "value")

    @property
    def found(self) -> list[str]:
        """Paths of the fields that were found, best first."""
        return [field.path for field in self._found]

    def _show(self, text: str) -> None:
        self._found = find(text, self._fields)
        if self._found and not self.results.children:
            self.results.children = tuple(self._button(number) for number in range(MOST_FOUND))
        for number, button in enumerate(self.results.children):
            field = self._found[number] if number < len(self._found) else None
            set_class(button, "speedlab-hidden", on=field is None)
            if field is not None:
                button.description, button.tooltip = _found_text(field), field.description
        set_class(self.results, "speedlab-hidden", on=not self._found)

    def _button(self, number: int) -> Any:
        button = self._looks.button("", "", "speedlab-found")
        button.on_click(lambda _: self.choose(number))
        return button

    def choose(self, number: int) -> None:
        """Go to a result and clear the box; do nothing if there are fewer results.

        Args:
            number: Index of the result, from 0.
        """
        if number < len(self._found):
            path = self._found[number].path
            self.box.value = ""
            self._go_to(path)


def _found_text(field: Field) -> str:
    part = field.path.partition(".")[0]
    tab = next(title for title, names in SECTIONS.items() if part in names)
    theirs = deepspeed_names().get(field.path)
    return f"{tab} › {field.label} · {field.path}" + (f" · DeepSpeed: {theirs}" if theirs else "")


class PresetTab:
    """The tab with a button for each preset, and the predicted memory and speed of the preset on these devices."""

    def __init__(self, looks: StyleCache, page: Any, take: Callable[[PanelPreset], object]) -> None:
        """Make an empty tab.

        Args:
            looks: Makes the widgets.
            page: The box of the tab.
            take: Called with the chosen preset.
        """
        self._looks = looks
        self._take = take
        self.presets: list[PanelPreset] = []
        self._rows: list[tuple[Any, Any]] = []
        self._page = page

    def show(self, presets: Sequence[PanelPreset]) -> None:
        """Show a row for each preset; a preset without a configuration is disabled.

        Args:
            presets: The presets, in order.
        """
        self.presets = list(presets)
        while len(self._rows) < len(presets):
            self._rows.append(self._row(len(self._rows)))
        for (button, note), preset in zip(self._rows, presets, strict=False):
            button.description, button.tooltip = preset.name, preset.about
            button.disabled = preset.config is None
            kind = "reason" if preset.config is None else "figures"
            about, result = escape(preset.about), escape(preset.result)
            note.value = f'<span class="speedlab-{kind}">{result}</span> <span class="speedlab-help">{about}</span>'
        self._page.children = tuple(part for row in self._rows[: len(presets)] for part in row)

    def _row(self, number: int) -> tuple[Any, Any]:
        button = self._looks.button("", "", "speedlab-preset")
        button.on_click(lambda _: self._take(self.presets[number]))
        return button, self._looks.html("speedlab-note")


class ExportTab:
    """The tab with the configuration as text, to copy or to write to a file."""

    def __init__(
        self, looks: StyleCache, page: Any, tell: Callable[[str], object], tell_error: Callable[[Exception], object]
    ) -> None:
        """Make the tab's widgets.

        Args:
            looks: Makes the widgets.
            page: The box of the tab.
            tell: Shows a message.
            tell_error: Shows an error.
        """
        self._tell, self._tell_error = tell, tell_error
        self._config: RunConfig | None = None
        self.format = looks.keep(
            Choice("write as", list(FORMATS), "YAML", meaning="How the configuration is written", layout=looks.wide)
        )
        self.file = looks.make(widgets.Text, layout=looks.control, description="file", continuous_update=False)
        self.text = looks.make(
            widgets.Textarea, layout=looks.wide, rows=24, placeholder="The configuration as text"
        ).add_class("speedlab-text")
        self.copy = looks.button("Copy", "Copy the text", "speedlab-copy")
        self.write = looks.button("Write file", "Write the text next to the notebook", "speedlab-write")
        self.note = looks.html("speedlab-note")
        self.format.observe(lambda _: self.show(self._config), "value")
        self.write.on_click(lambda _: self._write())
        row = looks.box([self.file, self.write, self.copy, self.note], "speedlab-row")
        page.children = (self.format, row, self.text)

    def show(self, config: RunConfig | None) -> None:
        """Show a configuration as text.

        Args:
            config: The configuration; None if the controls give none, and then both buttons are disabled.
        """
        self._config = config
        ending, text_of = FORMATS[self.format.value]
        self.text.value = "" if config is None else text_of(config)
        self.text.rows = max(6, self.text.value.count("\n") + 1)
        self.write.disabled = self.copy.disabled = config is None
        self.file.value = f"{(config.name if config is not None else None) or 'config'}{ending}"
        why = "what the controls say cannot run: see below" if config is None else ""
        self.note.value = f'<span class="speedlab-reason">{escape(why)}</span>'

    def _write(self) -> None:
        path = Path(self.file.value.strip())
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(self.text.value)
        except FileExistsError:
            self._tell_error(FileExistsError(f"{path} is there already, and stays as it is; give another name"))
        except OSError as error:
            self._tell_error(OSError(f"{path} cannot be written: {error.strerror}"))
        else:
            self._tell(f"written: {path}")
