"""The panel's controls, generated from the fields of RunConfig: each with its label, and a note beside it."""

from __future__ import annotations

import os
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from html import escape
from typing import Any, Literal

import ipywidgets as widgets
import traitlets

from speedlab.config import MODEL_PRESETS, RunConfig
from speedlab.config.part import Part
from speedlab.display.text import bytes_text

SECTIONS: dict[str, tuple[str, ...]] = {
    "Model & data": ("model", "data"),
    "Parallelism": ("parallel", "outer", "batch"),
    "ZeRO & memory": ("zero", "offload", "activation"),
    "Precision": ("precision",),
    "Optimizer": ("optimizer", "schedule", "clip_norm"),
    "Run": ("name", "folder", "steps", "seed", "compile", "eval", "checkpoint", "recover", "telemetry"),
}
"""Tab -> the parts and fields of RunConfig it shows. Every field of RunConfig is in exactly one."""

_LABELS = {
    "zero.stage": "stage",
    "zero.bucket_bytes": "bucket",
    "zero.quantized_weights": "int8 weights",
    "zero.secondary_partition": "partition again",
    "zero.quantized_gradients": "int4 gradients",
    "batch.global_size": "global batch",
    "batch.micro_size": "micro-batch",
    "parallel.sequence": "sequence parallel",
    "parallel.cp_heads": "cp share heads",
    "parallel.cp_pad": "cp pads",
    "outer.every_steps": "meet every",
    "outer.lr": "outer lr",
    "outer.momentum": "outer momentum",
    "outer.compression": "outer gradient",
    "outer.topk_share": "largest share",
    "outer.delay_steps": "meet late by",
    "outer.mixing": "own share",
    "optimizer.name": "optimizer",
    "data.heldout_share": "held-out share",
    "data.max_bytes": "text read",
    "activation.checkpointing": "checkpointing",
    "activation.partition_inputs": "partition inputs",
    "offload.optimizer": "offload optimizer",
    "offload.parameters": "offload parameters",
    "offload.activations": "offload inputs",
    "offload.delayed_update": "delay updates",
    "offload.folder": "disk folder",
    "telemetry.trace_every_steps": "trace every",
    "eval.every_steps": "evaluate every",
    "checkpoint.every_steps": "save every",
    "recover.attempts": "bring back",
    "recover.from": "back from",
}
_PLACEHOLDERS = {
    "parallel.cut": "balanced",
    "parallel.cp_heads": "as many as can",
    "offload.delayed_update": "never",
    "zero.secondary_partition": "one partition",
    "offload.folder": "the run's own",
    "name": "run-1, run-2, …",
    "clip_norm": "never clips",
}
_BATCH = ("batch.global_size", "batch.micro_size", "batch.accumulation")
_AXES = frozenset({"parallel.islands", "parallel.tp", "parallel.pp", "parallel.cp"})
"""Chosen among what the number of engines divides by."""
_MOST_LETTERS = 16
"""Options with more letters than this, together, do not fit beside their note."""
_MOST_IN_A_NUMBER_BOX = 2**53 - 1
"""A page's numbers are exact up to here."""


class Choice(widgets.HBox):
    """One of a few values, as buttons of which single ones can be greyed. `value` is the one chosen."""

    value = traitlets.Any()

    def __init__(self, label: str, options: Mapping[Any, str], value: Any, *, tooltip: str, layout: Any) -> None:
        self._label, self._tooltip = label, tooltip
        self._name = widgets.Label(
            label, layout={"width": "122px", "justify_content": "flex-end", "margin": "0 8px 0 0"}
        )
        self._buttons = self._made(options, value)
        self.letters = sum(map(len, options.values()))
        super().__init__([self._name, *self._buttons.values()], layout=layout)
        self.add_class("speedlab-choice")
        self.value = value

    def offer(self, options: Sequence[Any]) -> None:
        """Show other options; what is chosen stays one of them."""
        shown = list(options) if self.value in options else sorted([*options, self.value])
        if shown != self.options:
            self._buttons = self._made({option: str(option) for option in shown}, self.value)
            self.children = [self._name, *self._buttons.values()]

    def _made(self, options: Mapping[Any, str], value: Any) -> dict[Any, widgets.ToggleButton]:
        buttons = {}
        for option, text in options.items():
            tooltip = f"{self._label} {text}: {self._tooltip}"
            button = widgets.ToggleButton(
                value=option == value, description=text, tooltip=tooltip, layout={"width": "auto"}
            )
            button.observe(lambda change, option=option: self._pressed(option, change["new"]), "value")
            buttons[option] = button
        return buttons

    @property
    def options(self) -> list[Any]:
        return list(self._buttons)

    def grey(self, reasons: Mapping[Any, str]) -> None:
        """Grey the options in `reasons`, the reason as tooltip; offer the others."""
        for option, button in self._buttons.items():
            reason = reasons.get(option)
            button.disabled = reason is not None
            button.tooltip = f"{button.description}: {reason or self._tooltip}"

    def _pressed(self, option: Any, on: bool) -> None:
        if on:
            self.value = option
        elif self.value == option:
            self._buttons[option].value = True  # One is always chosen.

    @traitlets.observe("value")
    def _show(self, change: Any) -> None:
        self.offer(self.options)
        for option, button in self._buttons.items():
            button.value = option == change["new"]


class Field:
    """One field of the configuration on the page: a control, and a note that explains it or says what is wrong."""

    def __init__(self, path: str, info: Any, *, layout: Any, style: Any) -> None:
        self.path = path
        self.label = _LABELS.get(path, path.rpartition(".")[2].replace("_", " "))
        self.description: str = info.description or ""
        self._info = info
        self._style = style
        self.control = self._make_control(layout)
        self.control.add_class(f"speedlab-{path.replace('.', '-').replace('_', '-')}")
        self.note = widgets.HTML()
        if isinstance(self.control, Choice) and self.control.letters > _MOST_LETTERS:
            self.control.add_class("speedlab-wide")
            self.note.add_class("speedlab-below")
        self.show()

    # Its value

    def get(self) -> Any:
        """The value as RunConfig takes it; text is left to RunConfig to read."""
        value = self.control.value
        if not isinstance(self.control, widgets.Text | widgets.Combobox):
            return value
        text = value.strip()
        if self.path == "data.source":
            sources = tuple(part.strip() for part in text.split(os.pathsep) if part.strip())
            return sources[0] if len(sources) == 1 else sources
        if not text and _is_optional(self._info.annotation):
            return None
        return tuple(part for part in re.split(r"[,\s]+", text) if part) if _is_tuple(self._info.annotation) else text

    def set(self, value: Any) -> None:
        """Show `value`, a value of RunConfig's."""
        if isinstance(self.control, widgets.Text | widgets.Combobox):
            self.control.value = self._text_of(value)
        else:
            self.control.value = value

    # What stands beside it

    def show(
        self, *, reason: str = "", problem: str = "", more: str = "", greyed: Mapping[Any, str] | None = None
    ) -> None:
        """Say what is wrong, or why the control is greyed (which it is with a `reason`), or what the field means and
        `more`. `greyed`: options that cannot be taken, each with its reason."""
        if problem:
            text, kind = problem, "problem"
        elif reason:
            text, kind = reason, "reason"
        else:
            text, kind = " · ".join(filter(None, (self.description, more or self._in_other_units()))), "help"
        self.note.value = f'<span class="speedlab-{kind}">{escape(text)}</span>'
        if isinstance(self.control, Choice):
            self.control.grey(dict.fromkeys(self.control.options, reason) if reason else greyed or {})
        else:
            self.control.disabled = bool(reason)

    def _in_other_units(self) -> str:
        value = self.control.value
        return bytes_text(value) if self.path.endswith("_bytes") and isinstance(value, int) else ""

    def _text_of(self, value: Any) -> str:
        """As `get` reads it."""
        if value is None:
            return ""
        if isinstance(value, tuple):
            return (os.pathsep if self.path == "data.source" else ", ").join(map(str, value))
        return str(value)

    # Making the control

    def _make_control(self, layout: Any) -> Any:
        kind, default = self._info.annotation, self._info.default
        common = {
            "description": self.label,
            "tooltip": self.description,
            "layout": layout,
            "style": self._style,
        }
        if self.path in _AXES:
            return Choice(self.label, {default: str(default)}, default, tooltip=self.description, layout=layout)
        if typing.get_origin(kind) is Literal:
            options = {option: str(option) for option in typing.get_args(kind)}
            return Choice(self.label, options, default, tooltip=self.description, layout=layout)
        if kind is bool:
            return widgets.Checkbox(value=default, **common)
        if self.path == "model.preset":
            return widgets.Dropdown(options=list(MODEL_PRESETS), value=default, **common)
        if self.path in ("data.source", "data.tokenizer"):
            known = ["stdlib"] if self.path == "data.source" else ["bpe", "bytes"]
            return widgets.Combobox(value=default, options=known, continuous_update=False, **common)
        if kind is float:
            return widgets.FloatText(value=default, **common)
        upper = [limit for bound in self._info.metadata if (limit := getattr(bound, "lt", None)) is not None]
        if kind is int and all(limit <= _MOST_IN_A_NUMBER_BOX for limit in upper):
            lower = next((ge for bound in self._info.metadata if (ge := getattr(bound, "ge", None)) is not None), 0)
            return widgets.BoundedIntText(value=default, min=lower, max=_MOST_IN_A_NUMBER_BOX, **common)
        placeholder = _PLACEHOLDERS.get(self.path, "follows" if _is_optional(kind) else "")
        return widgets.Text(value=self._text_of(default), placeholder=placeholder, continuous_update=False, **common)


class Form:
    """All fields, in tabs. `on_change(path)` is called when a person, or `set`, has changed one."""

    def __init__(self, on_change: Callable[[str], object], *, extra: Mapping[str, Sequence[widgets.Widget]]) -> None:
        self._on_change = on_change
        self._quiet = False
        layout = widgets.Layout(width="318px", margin="0")
        style = {"description_width": "122px"}
        self.fields: dict[str, Field] = {}
        self.attention: Any = widgets.HTML().add_class("speedlab-seen")
        """What queries see, below the fields of `model.attention`; empty for dense attention."""
        pages = []
        for title, names in SECTIONS.items():
            rows: list[widgets.Widget] = list(extra.get(title, ()))
            for name in names:
                rows += self._rows(RunConfig, name, name, layout, style)
            page = widgets.GridBox(rows, layout={"grid_template_columns": "318px minmax(140px, 1fr)"})
            page.layout.grid_gap = "3px 12px"  # pyright: ignore[reportAttributeAccessIssue]  # a trait
            page.add_class("speedlab-page")
            pages.append(page)
        self.tabs = widgets.Tab(pages, titles=list(SECTIONS))
        self.tabs.add_class("speedlab-tabs")
        for field in self.fields.values():
            field.control.observe(lambda _, path=field.path: self._changed(path), "value")

    def values(self) -> dict[str, Any]:
        """What the controls say, as keywords of RunConfig."""
        values: dict[str, Any] = {}
        for path, field in self.fields.items():
            *parts, name = path.split(".")
            inside = values
            for part in parts:
                inside = inside.setdefault(part, {})
            inside[name] = field.get()
        return values

    def load(self, config: RunConfig) -> None:
        """Show `config`; on_change is not called."""
        self.put({path: value_at(config, path) for path in self.fields})

    def put(self, values: Mapping[str, Any]) -> None:
        """Show these values, by path; on_change is not called."""
        self._quiet = True
        try:
            for path, value in values.items():
                self.fields[path].set(value)
        finally:
            self._quiet = False

    def mark(self, paths: Collection[str]) -> None:
        """Put a mark on the tabs that hold one of these fields, so that a problem is found from any tab."""
        parts = {path.partition(".")[0] for path in paths}
        self.tabs.titles = [f"{title} ▲" if parts & set(names) else title for title, names in SECTIONS.items()]

    def _rows(self, owner: type[Part], name: str, path: str, layout: Any, style: Any) -> list[widgets.Widget]:
        """Those of the field `name` of `owner`; of a part, a heading and its fields, which may be parts, too."""
        info, part = owner.model_fields[name], owner.part_of(name)
        if part is None:
            return self._row(path, info, layout, style)
        heading = widgets.HTML(f"<h4>{escape(info.description or name)}</h4>").add_class("speedlab-title")
        rows: list[widgets.Widget] = [heading]
        for inner in part.model_fields:
            rows += self._rows(part, inner, f"{path}.{inner}", layout, style)
        return [*rows, self.attention] if path == "model.attention" else rows

    def _row(self, path: str, info: Any, layout: Any, style: Any) -> list[widgets.Widget]:
        field = self.fields[path] = Field(path, info, layout=layout, style=style)
        return [field.control, field.note]

    def _changed(self, path: str) -> None:
        if self._quiet:
            return
        if path == "model.preset":
            self._fill_from_preset()
        if path in _BATCH and all(self.fields[other].get() is not None for other in _BATCH):
            # Any two are given and the third follows: the newest one counts, and what it decides makes way.
            self.put({"batch.micro_size" if path == "batch.accumulation" else "batch.accumulation": None})
        self._on_change(path)

    def _fill_from_preset(self) -> None:
        """The shape that belongs to the preset, as RunConfig would take it."""
        config = RunConfig(model={"preset": self.fields["model.preset"].get()}, data={"sequence_length": 1})
        self.put({path: value_at(config, path) for path in self.fields if path.startswith("model.")})


def value_at(config: RunConfig, path: str) -> Any:
    """The value of a field by its path: 'zero.stage'."""
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def place_problem(path: str, text: str, fields: Mapping[str, Field], last: str) -> str:
    """The path of the field beside which a line of a ConfigError belongs; '' where there is none.

    A rule over several fields names them; it belongs to the one changed last, else to the first that it names.
    """
    if path in fields:
        return path
    words = set(re.findall(r"[\w.]+", text))
    named = [known for known in fields if known in words]
    if path:
        inside = {known: known.rpartition(".")[2] for known in fields if known.startswith(f"{path}.")}
        named += [known for known, name in inside.items() if words & {name, name.partition("_")[0]}]
    return last if last in named else next(iter(named), "")


def layout_field(text: str, last: str) -> str:
    """The path of the field beside which a LayoutError belongs: of the layout's, the one changed last, else the one
    that it begins with."""
    if last.startswith("parallel."):
        return last
    named = re.match(r"parallel[:.] ?(islands|tp|pp|cp|cp_heads|cp_pad|cut|schedule)\b", text)
    return f"parallel.{named[1]}" if named else "parallel.dp"


def _is_optional(kind: Any) -> bool:
    return typing.get_origin(kind) in (types.UnionType, typing.Union) and type(None) in typing.get_args(kind)


def _is_tuple(kind: Any) -> bool:
    return any(typing.get_origin(part) is tuple for part in (kind, *typing.get_args(kind)))
