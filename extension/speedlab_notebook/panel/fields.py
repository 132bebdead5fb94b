"""The panel's data for each field of RunConfig: the value of its control and the text next to it. No widgets.

`FormValues` turns the values of all controls into a configuration, or into problems with the field of each.
"""

from __future__ import annotations

import os
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, Protocol

from speedlab.config import MODEL_PRESETS, ConfigError, RunConfig
from speedlab.config.batch import Batch
from speedlab.display.formatting import bytes_text
from speedlab.layout import LayoutError

SECTIONS: dict[str, tuple[str, ...]] = {
    "Model & data": ("model", "data"),
    "Parallelism": ("parallel", "outer", "batch"),
    "ZeRO & memory": ("zero", "offload", "activation"),
    "Precision": ("precision",),
    "Optimizer": ("optimizer", "schedule", "loss_over", "clip_norm"),
    "Run": (
        "name",
        "folder",
        "steps",
        "seed",
        "compile",
        "timeout_seconds",
        "eval",
        "checkpoint",
        "recover",
        "proof",
        "telemetry",
    ),
}
"""Tab -> the sections and fields of RunConfig it shows. Every field of RunConfig is in exactly one tab."""

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
    "timeout_seconds": "wait for ranks",
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
    "loss_over": "tokens",
    "timeout_seconds": "the cluster's, else 1800",
    "model.ffn_tile": "all at once",
    "model.attention.mask": "of 'custom' only",
}
_AXES = frozenset({"parallel.islands", "parallel.tp", "parallel.pp", "parallel.cp"})
"""The options of these fields are the divisors of the number of engines."""
_KNOWN = {"data.source": ("stdlib",), "data.tokenizer": ("bpe", "bytes")}
"""Text fields for which some values have names."""
_MOST_IN_A_NUMBER_BOX = 2**53 - 1
"""JavaScript numbers are exact integers up to here."""


class ControlKind(Enum):
    """The kind of control that edits a field."""

    CHOICE = "one of a few, all to be seen"
    LIST = "one of many"
    SWITCH = "on or off"
    NUMBER = "a number"
    WHOLE = "a whole number"
    TEXT = "text, as lists and what may be empty"
    KNOWN = "text, of which some values have names"


class Shows(Protocol):
    """A field's control on the page, and its note."""

    control: Any
    note: Any

    def show(self) -> None: ...


class Field:
    """One field of the configuration: the value of its control, and the note next to the control.

    The widgets are made when `control` or `note` is first read, which happens when their tab opens.
    """

    def __init__(
        self, path: str, info: Any, on_change: Callable[[str], object], make_shown: Callable[[Field], Shows]
    ) -> None:
        """Make a field that shows the default value.

        Args:
            path: Path of the field in RunConfig, for example 'zero.stage'.
            info: Pydantic's FieldInfo of the field.
            on_change: Called with the path after each change of the value.
            make_shown: Makes the widgets of the field.
        """
        self.path = path
        self.label = _LABELS.get(path, path.rpartition(".")[2].replace("_", " "))
        self.description: str = info.description or ""
        self.kind = _kind(path, info)
        self.placeholder = _PLACEHOLDERS.get(path, "follows" if _is_optional(info.annotation) else "")
        self._info = info
        self._on_change = on_change
        self._make_shown = make_shown
        self._shown: Shows | None = None
        self.options: list[Any] = _options(path, info)
        self.value: Any = self._shown_as(info.default)
        """The value that the control shows; text for a tuple or an optional value."""
        self.reason = self.problem = self.more = self.mark = ""
        """Why the control is disabled; the problem of the value; a remark on the value; the difference to the run."""
        self.greyed: Mapping[Any, str] = {}
        """Disabled options, each with its reason."""

    # Its value

    def get(self) -> Any:
        """Return the value as RunConfig takes it. RunConfig itself parses text."""
        if self.kind not in (ControlKind.TEXT, ControlKind.KNOWN):
            return self.value
        text = self.value.strip()
        if self.path == "data.source":
            sources = tuple(part.strip() for part in text.split(os.pathsep) if part.strip())
            return sources[0] if len(sources) == 1 else sources
        if not text and _is_optional(self._info.annotation):
            return None
        return tuple(part for part in re.split(r"[,\s]+", text) if part) if _is_tuple(self._info.annotation) else text

    def set(self, value: Any) -> None:
        """Show a value of RunConfig.

        Args:
            value: The value, in the type of the RunConfig field.
        """
        self.put(self._shown_as(value))

    def put(self, shown: Any) -> None:
        """Show a value of the control, and call `on_change` if the value is new.

        Args:
            shown: The value, in the type of the control (text for a text box).
        """
        # Python has True == 1 and 1 == 1.0, but these are different values of a control.
        if shown == self.value and type(shown) is type(self.value):
            return
        self.value = shown
        if self.kind is ControlKind.CHOICE and shown not in self.options:
            self.options = sorted([*self.options, shown])
        if self._shown is not None:
            self._shown.show()
        self._on_change(self.path)

    def offer(self, options: Sequence[Any]) -> None:
        """Replace the options. The chosen value stays an option.

        Args:
            options: The new options.
        """
        self.options = list(options) if self.value in options else sorted([*options, self.value])

    # Its note

    def show(
        self,
        *,
        reason: str = "",
        problem: str = "",
        more: str = "",
        mark: str = "",
        greyed: Mapping[Any, str] | None = None,
    ) -> None:
        """Set the note: the problem, else the reason for being disabled, else the description.

        Args:
            reason: Why the control is disabled; '' enables it.
            problem: What is wrong with the value.
            more: A remark that follows the description.
            mark: How the field differs from the run.
            greyed: Disabled options, each with its reason.
        """
        self.reason, self.problem, self.more, self.mark = reason, problem, more, mark
        self.greyed = dict.fromkeys(self.options, reason) if reason else greyed or {}
        if self._shown is not None:
            self._shown.show()

    @property
    def text(self) -> str:
        """The note without its mark."""
        return self.problem or self.reason or " · ".join(filter(None, (self.description, self.more or self._units())))

    @property
    def is_idle(self) -> bool:
        """Whether the field has no effect now, and its note says only that."""
        return bool(self.reason) and not self.problem and not self.mark

    @property
    def bounds(self) -> tuple[int, int]:
        """The least and the largest value that a box for whole numbers takes."""
        lower = next((ge for bound in self._info.metadata if (ge := getattr(bound, "ge", None)) is not None), 0)
        return lower, _MOST_IN_A_NUMBER_BOX

    # On the page

    @property
    def control(self) -> Any:
        """The widget. Setting `field.control.value = 3` acts like a click of the user."""
        return self._on_page.control

    @property
    def note(self) -> Any:
        """The widget with the note."""
        return self._on_page.note

    @property
    def _on_page(self) -> Shows:
        if self._shown is None:
            self._shown = self._make_shown(self)
            self._shown.show()
        return self._shown

    def _units(self) -> str:
        return bytes_text(self.value) if self.path.endswith("_bytes") and isinstance(self.value, int) else ""

    def _shown_as(self, value: Any) -> Any:
        """Return a value of RunConfig as the control shows it; `get` is the inverse."""
        if self.kind not in (ControlKind.TEXT, ControlKind.KNOWN):
            return value
        if value is None:
            return ""
        if isinstance(value, tuple):
            return (os.pathsep if self.path == "data.source" else ", ").join(map(str, value))
        return str(value)


def _kind(path: str, info: Any) -> ControlKind:
    kind = info.annotation
    if path in _AXES or typing.get_origin(kind) is Literal:
        return ControlKind.CHOICE
    if kind is bool:
        return ControlKind.SWITCH
    if path == "model.preset":
        return ControlKind.LIST
    if path in _KNOWN:
        return ControlKind.KNOWN
    if kind is float:
        return ControlKind.NUMBER
    upper = [limit for bound in info.metadata if (limit := getattr(bound, "lt", None)) is not None]
    if kind is int and all(limit <= _MOST_IN_A_NUMBER_BOX for limit in upper):
        return ControlKind.WHOLE
    return ControlKind.TEXT


def _options(path: str, info: Any) -> list[Any]:
    if path in _AXES:
        return [info.default]
    if path == "model.preset":
        return list(MODEL_PRESETS)
    return list(_KNOWN.get(path, typing.get_args(info.annotation)))


def value_at(config: RunConfig, path: str) -> Any:
    """Return the value of a field by its path.

    Args:
        config: The configuration.
        path: For example 'zero.stage'.
    """
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _is_optional(kind: Any) -> bool:
    return typing.get_origin(kind) in (types.UnionType, typing.Union) and type(None) in typing.get_args(kind)


def _is_tuple(kind: Any) -> bool:
    return any(typing.get_origin(part) is tuple for part in (kind, *typing.get_args(kind)))


@dataclass(frozen=True, kw_only=True)
class FormValues:
    """The configuration and the batch that the values of all controls give."""

    config: RunConfig | None
    """None if the values give no valid configuration."""
    batch: Batch | None
    """How the batch divides; None if it does not divide."""
    problems: list[tuple[str, str]]
    """(path of the field or '', problem)."""

    @classmethod
    def of(cls, values: Mapping[str, Any], fields: Mapping[str, Field], engines: int, last: str) -> FormValues:
        """Build the configuration and collect its problems.

        Args:
            values: Keyword arguments of RunConfig.
            fields: The form's fields by path.
            engines: The number of engines.
            last: Path of the field that changed last; a rule over several fields is reported there.
        """
        found: Sequence[tuple[str, str]] = ()
        config, batch = None, None
        try:
            config = RunConfig(**values)
            batch = config.batch.resolve(config.layout(engines).data_size)
        except LayoutError as error:
            found = [(layout_field(str(error), last), str(error))]
        except ConfigError as error:
            found = error.problems or [(str(error).partition(":")[0], str(error))]
        problems = [(place_problem(path, text, fields, last), text) for path, text in found]
        return cls(config=config, batch=batch, problems=problems)


def place_problem(path: str, text: str, fields: Mapping[str, Field], last: str) -> str:
    """Return the path of the field next to which one line of a ConfigError is shown.

    A rule over several fields names them. It is shown at the field that changed last, else at the first named field.

    Args:
        path: The path that the error gives; may be '' or the path of a section.
        text: The line of the error.
        fields: The form's fields by path.
        last: Path of the field that changed last.

    Returns:
        A path of `fields`; '' if no field is named.
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
    """Return the path of the field next to which a LayoutError is shown.

    Args:
        text: The message of the error.
        last: Path of the field that changed last; it wins if it is a field of the layout.

    Returns:
        A path below `parallel`.
    """
    if last.startswith("parallel."):
        return last
    named = re.match(r"parallel[:.] ?(islands|tp|pp|cp|cp_heads|cp_pad|cut|schedule)\b", text)
    return f"parallel.{named[1]}" if named else "parallel.dp"
