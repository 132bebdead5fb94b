"""What the panel has for each field of RunConfig: what its control shows, and what is said beside it. No widgets.

What a panel's controls say: a configuration and its batch, or what is wrong and beside which control it is told.
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
"""Chosen among what the number of engines divides by."""
_KNOWN = {"data.source": ("stdlib",), "data.tokenizer": ("bpe", "bytes")}
"""Text, of which some values have names."""
_MOST_IN_A_NUMBER_BOX = 2**53 - 1
"""A page's numbers are exact up to here."""


class ControlKind(Enum):
    """What a control is."""

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
    """One field of the configuration: what its control shows, and what stands beside it. No widget until somebody asks
    for `control` or `note`, which is when its tab opens."""

    def __init__(
        self, path: str, info: Any, on_change: Callable[[str], object], make_shown: Callable[[Field], Shows]
    ) -> None:
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
        """What its control shows."""
        self.reason = self.problem = self.more = self.mark = ""
        """Why it is greyed; what is wrong; what is said of its value; how it differs from the run."""
        self.greyed: Mapping[Any, str] = {}
        """Options that cannot be taken, each with its reason."""

    # Its value

    def get(self) -> Any:
        """The value as RunConfig takes it; text is left to RunConfig to read."""
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
        """Show `value`, a value of RunConfig's."""
        self.put(self._shown_as(value))

    def put(self, shown: Any) -> None:
        """Show `shown`, a value of the control's. `on_change` is called when that is another one."""
        if shown == self.value and type(shown) is type(self.value):
            return
        self.value = shown
        if self.kind is ControlKind.CHOICE and shown not in self.options:
            self.options = sorted([*self.options, shown])
        if self._shown is not None:
            self._shown.show()
        self._on_change(self.path)

    def offer(self, options: Sequence[Any]) -> None:
        """Offer other options; what is chosen stays one of them."""
        self.options = list(options) if self.value in options else sorted([*options, self.value])

    # What stands beside it

    def show(
        self,
        *,
        reason: str = "",
        problem: str = "",
        more: str = "",
        mark: str = "",
        greyed: Mapping[Any, str] | None = None,
    ) -> None:
        """Say what is wrong, or why the control is greyed (which it is with a `reason`), or what the field means and
        `more`. `mark`: how it differs from the run. `greyed`: options that cannot be taken, each with its reason."""
        self.reason, self.problem, self.more, self.mark = reason, problem, more, mark
        self.greyed = dict.fromkeys(self.options, reason) if reason else greyed or {}
        if self._shown is not None:
            self._shown.show()

    @property
    def text(self) -> str:
        """The note without its marks."""
        return self.problem or self.reason or " · ".join(filter(None, (self.description, self.more or self._units())))

    @property
    def is_idle(self) -> bool:
        """Whether it does nothing now, and nothing is to be said of it but that."""
        return bool(self.reason) and not self.problem and not self.mark

    @property
    def bounds(self) -> tuple[int, int]:
        """Least and most that a box for whole numbers takes."""
        lower = next((ge for bound in self._info.metadata if (ge := getattr(bound, "ge", None)) is not None), 0)
        return lower, _MOST_IN_A_NUMBER_BOX

    # On the page

    @property
    def control(self) -> Any:
        """The widget. `field.control.value = 3` is a person's click."""
        return self._on_page.control

    @property
    def note(self) -> Any:
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
        """A value of RunConfig's as the control shows it, and `get` reads it."""
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
    """The value of a field by its path: 'zero.stage'."""
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
    """What follows from the controls alone."""

    config: RunConfig | None
    """None while they say no configuration."""
    batch: Batch | None
    """How the batch divides; None while it does not."""
    problems: list[tuple[str, str]]
    """(path of the field or '', what is wrong)"""

    @classmethod
    def of(cls, values: Mapping[str, Any], fields: Mapping[str, Field], engines: int, last: str) -> FormValues:
        """Of what the controls say, as keywords of RunConfig, for so many engines. `last`: the field changed last."""
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
