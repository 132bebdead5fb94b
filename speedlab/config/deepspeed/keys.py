"""The keys of a DeepSpeed file on their way to a configuration: flat, under today's names, each used up once."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from speedlab.config.deepspeed.auto_values import AUTO, arguments, disagreement, left_unused
from speedlab.config.deepspeed.schema import (
    FEATURES,
    HONOURED,
    IGNORED,
    LEGACY,
    OTHER_NAMES,
    SECTIONS,
    Feature,
)

if TYPE_CHECKING:
    from speedlab.config.run_config import RunConfig

_SHOWN = 60
"""At most this many characters of a value are repeated."""

_NEAR = 0.75
"""Names that are more alike than this are taken for a slip."""

_LEAST_BEGINNING = 5
"""So many characters of a name are taken for it where they begin no other."""

_DTYPES = {"float32": ("fp32", "float"), "bfloat16": ("bf16",), "float16": ("fp16", "half")}
"""Of ours, the other names that DeepSpeed takes."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One key of the file: its path as it is written there, its value, and what became of it."""

    path: str
    value: Any
    text: str
    feature: str = ""
    """Of a refused key: what `ignore` has to name for the file to be read without it; "" where nothing helps."""

    @property
    def shown(self) -> str:
        """The value as JSON, short."""
        text = json.dumps(self.value, ensure_ascii=False, default=str)
        return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


class RemainingKeys:
    """What is left of the file, what became of the rest, and the settings that follow from it.

    Rules take keys with `take` and say with `honour`, `ignore`, `refuse` what became of them; `finish` does the same
    with what no rule took.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        training_args: Mapping[str, Any] | None,
        ignored_features: Collection[str],
        warnings: list[str],
        defaults: RunConfig,
        engines: int | None,
    ) -> None:
        self.settings: dict[str, Any] = {}
        self.honoured: list[Entry] = []
        self.ignored: list[Entry] = []
        self.refused: list[Entry] = []
        self.assumed: list[str] = []
        self.warnings = warnings
        self.engines = engines
        self._defaults = defaults
        self._left: dict[str, Any] = {}
        self._written: dict[str, str] = {}
        self._values: dict[str, Any] = {}
        self._fields: dict[str, str] = {}
        self._filled: dict[str, str] = {}
        self.arguments = arguments(training_args)
        """The Trainer's, its defaults in the place of those that are not given; None without any."""
        self._automatic: list[str] = []
        self._given = training_args or {}
        self._values |= {f"training_args.{name}": value for name, value in (self.arguments or {}).items()}
        self.without = frozenset(ignored_features)
        self._flatten(data, "", "")
        self._fill()

    # The file's keys

    def _flatten(self, data: Mapping[str, Any], before: str, written_before: str) -> None:
        for key, value in data.items():
            path = LEGACY.get(f"{before}{key}", f"{before}{key}")
            written = f"{written_before}{key}"
            holds_keys = path in SECTIONS or any(known.startswith(f"{path}.") for known in LEGACY)
            if isinstance(value, Mapping) and holds_keys:
                self._flatten(value, f"{path}.", f"{written}.")
                continue
            if path in ("fp16", "bf16") and isinstance(value, bool):
                path = f"{path}.enabled"
            if path in self._values:
                older = written != path
                kept, lost = (self._written[path], written) if older else (written, self._written[path])
                self.warnings.append(f"{kept} and {lost} are two names of one key; {kept} counts")
                if older:
                    continue
            self._written[path], self._values[path] = written, value
            if value is None:
                self.ignore(path, "null is the same as leaving it out")
            else:
                self._left[path] = value

    def _fill(self) -> None:
        """Put in the place of "auto" what the Trainer would; without its arguments "auto" stays."""
        for path, value in list(self._left.items()):
            if self.arguments is None:
                continue
            if value == "auto" and path in AUTO:
                filled = AUTO[path].value(self.arguments)
                if filled is not None:
                    self._left[path] = filled
                    self._filled[path] = f', "auto" from training_args ({AUTO[path].source})'
            elif said := disagreement(path, value, self._given):
                self.warnings.append(said)

    def has(self, path: str) -> bool:
        return path in self._left

    def is_auto(self, path: str) -> bool:
        """Whether the key is "auto" and nothing fills it."""
        return self._left.get(path) == "auto"

    def has_said(self, *paths: str) -> bool:
        """Whether the file has one of these keys, used up or not, with a value."""
        return any(self._values.get(path) is not None for path in paths)

    def has_section(self, section: str) -> bool:
        """Whether the file has the section, or a key of it, used up or not."""
        return any(path == section or path.startswith(f"{section}.") for path in self._values)

    def refused_under(self, section: str) -> bool:
        """Whether the section, or a key of it, was refused."""
        return self.has(section) or any(entry.path.startswith(section) for entry in self.refused)

    def under(self, section: str) -> list[str]:
        """Paths of the keys that are left inside a section."""
        return [path for path in self._left if path.startswith(f"{section}.")]

    def known_under(self, section: str) -> list[str]:
        """The same without those that DeepSpeed does not have."""
        return [path for path in self.under(section) if path.removeprefix(f"{section}.") in _NAMES[section]]

    def take(self, path: str, kind: Callable[[Any], Any], field: str = "") -> Any:
        """Use up a key: its value as `kind` reads it; None when it is not there, "auto" that stays SpeedLab's default
        of `field`, or no such value, which is refused."""
        if path not in self._left:
            return None
        value = self._left.pop(path)
        if value == "auto":
            default = f", {field} {self.default(field)!r}" if field else ""
            why = "SpeedLab's default" if self.arguments is None else "training_args do not say it; SpeedLab's default"
            self._automatic.append(self._written[path])
            self._add(self.honoured, path, f"{why}{default}")
            return None
        try:
            return kind(value)
        except (TypeError, ValueError, OverflowError):
            self.refuse(path, f"expected {kind.__doc__}, not {_short(value)}")
            return None

    def leave_out(self, path: str, default: Any) -> None:
        """The file does not have the key, which then has DeepSpeed's default."""
        if said := left_unused(path, default, self._given):
            self.warnings.append(said)

    def speaks_of(self, *names: str) -> bool:
        """Whether the Trainer's arguments were given with one of these among them."""
        return any(name in self._given for name in names)

    def default(self, field: str) -> Any:
        """SpeedLab's default of a field."""
        value: Any = self._defaults
        for name in field.split("."):
            value = getattr(value, name)
        return value

    # What became of them

    def set(self, field: str, value: Any) -> None:
        *parts, name = field.split(".")
        inside = self.settings
        for part in parts:
            inside = inside.setdefault(part, {})
        inside[name] = value

    def honour(self, path: str, field: str, value: Any, note: str = "") -> None:
        """The key says that `field` of the configuration is `value`."""
        self.set(field, value)
        self._fields[field] = path
        self._add(self.honoured, path, f"{field} {value!r}{self._filled.get(path, '')}{note and f'; {note}'}")

    def agree(self, path: str, text: str) -> None:
        """The key asks for what happens anyway."""
        self._left.pop(path, None)
        self._add(self.honoured, path, text)

    def ignore(self, path: str, reason: str, *, warn: bool = False) -> None:
        self._left.pop(path, None)
        self._add(self.ignored, path, reason)
        if warn:
            self.warnings.append(f"{self._written.get(path, path)}: {reason}")

    def refuse(self, path: str, reason: str, feature: str = "") -> None:
        self._left.pop(path, None)
        self._add(self.refused, path, reason, feature)

    def lack(self, path: str, feature: str, reason: str) -> bool:
        """Refuse the key for a feature that is missing, or ignore it when the caller said so; says whether it is
        ignored."""
        if feature in self.without:
            self.ignore(path, f"you asked to go on without {feature!r}; {reason}", warn=True)
            return True
        self.refuse(path, f'{reason}; to go on without it, ignore "{feature}"', feature)
        return False

    def _add(self, entries: list[Entry], path: str, text: str, feature: str = "") -> None:
        written = self._written.get(path, path)
        entries.append(Entry(path=written, value=self._values.get(path), text=text, feature=feature))

    def origin_of(self, field: str, text: str) -> str:
        """The key of the file that an error about `field` is about, as it is written there."""
        path = self._fields.get(field)
        if path is None:
            batch_keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
            path = next((key for key in batch_keys if text.startswith("batch:") and key in self._values), field)
        return self._written.get(path, path) or "layout"

    # What no rule took

    def finish(self) -> None:
        if self._automatic:
            who = "there are no training_args to fill" if self.arguments is None else "training_args do not fill"
            self.warnings.append(f'{who} "auto", so SpeedLab\'s defaults stand: {", ".join(self._automatic)}')
        for path in list(self._left):
            value = self._left[path]
            if path in FEATURES:
                self._finish_feature(path, value, FEATURES[path])
            elif path in IGNORED:
                self.ignore(path, IGNORED[path])
            elif path in SECTIONS:
                self.refuse(path, f"expected keys and values in {{ }}, not {_short(value)}")
            else:
                self._finish_unknown(path)

    def _finish_feature(self, path: str, value: Any, feature: Feature) -> None:
        if value == "auto" or not feature.on(value):
            self.ignore(path, "it is off")
        else:
            self.lack(path, feature.name, feature.reason)

    def _finish_unknown(self, path: str) -> None:
        section, _, leaf = path.rpartition(".")
        if leaf.startswith("_"):
            self.ignore(path, "an underscore in front makes it a remark")
            return
        if section and leaf in (*HONOURED, *SECTIONS):
            self.refuse(path, f"DeepSpeed has {leaf!r} at the first level, not inside {section!r}; move it there")
            return
        near = self.nearest(path, _NAMES.get(section, ()))
        if near is None:
            self.ignore(path, "DeepSpeed has no such key", warn=True)
        elif near in IGNORED:
            self.ignore(path, f"DeepSpeed has no such key; the nearest is {near!r}, and {IGNORED[near]}", warn=True)
        else:
            self.refuse(path, f"DeepSpeed has no such key; the nearest is {near!r}; correct it or take it out")

    def nearest(self, path: str, names: Collection[str]) -> str | None:
        """The key that `path` is a slip for: of its section's `names`, one that is nearly the same or that alone begins
        so, and that the file has not got besides."""
        if path in OTHER_NAMES:
            return None if self.has_section(OTHER_NAMES[path]) else OTHER_NAMES[path]
        section, _, leaf = path.rpartition(".")
        slip = leaf.lower().replace("-", "_")
        near = difflib.get_close_matches(slip, names, n=1, cutoff=_NEAR)
        longer = [name for name in names if name.startswith(slip) and len(slip) >= _LEAST_BEGINNING]
        if not near and len(longer) == 1:
            near = longer
        if not near:
            return None
        found = f"{section}.{near[0]}" if section else near[0]
        return None if self.has_section(LEGACY.get(found, found)) else found


def _names() -> dict[str, tuple[str, ...]]:
    """Path of a section ("" for the first level) -> the names of all keys in it."""
    names: dict[str, dict[str, None]] = {}
    for path in (*HONOURED, *IGNORED, *FEATURES, *SECTIONS, *LEGACY):
        parts = path.split(".")
        for depth, name in enumerate(parts):
            names.setdefault(".".join(parts[:depth]), {})[name] = None
    return {section: tuple(found) for section, found in names.items()}


_NAMES = _names()


# How values are read; the docstrings say what was expected.


def whole(value: Any) -> int:
    """a whole number"""
    number_ = number(value)
    if number_ != int(number_):
        raise ValueError(value)
    return int(number_)


def number(value: Any) -> float:
    """a number"""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(value)
    return float(value) if isinstance(value, str) else value


def yes(value: Any) -> bool:
    """true or false"""
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise TypeError(value)
    return value


def word(value: Any) -> str:
    """a name"""
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def dtype_name(value: Any) -> str:
    """fp32, bf16 or fp16"""
    for name, others in _DTYPES.items():
        if word(value).lower().removeprefix("torch.") in (name, *others):
            return name
    raise ValueError(value)


def pair(value: Any) -> tuple[float, float]:
    """two numbers in [ ]"""
    first, second = value
    return number(first), number(second)


def _short(value: Any) -> str:
    return Entry(path="", value=value, text="").shown
