"""Track the keys of a DeepSpeed file during conversion: flat paths, current names, each key used once."""

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
"""Maximum number of characters of a value in a message."""

_NEAR = 0.75
"""Similarity above which an unknown name counts as a typing error."""

_LEAST_BEGINNING = 5
"""Minimum length of a unique prefix that counts as an abbreviated name."""

_DTYPES = {"float32": ("fp32", "float"), "bfloat16": ("bf16",), "float16": ("fp16", "half")}
"""Our dtype -> DeepSpeed's other names for it."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One key of the file: its path as written, its value, and what was done with it."""

    path: str
    value: Any
    text: str
    feature: str = ""
    """For a refused key, the name for `ignore` to read the file without it; empty if nothing helps."""

    @property
    def shown(self) -> str:
        """The value as short JSON."""
        text = json.dumps(self.value, ensure_ascii=False, default=str)
        return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


class RemainingKeys:
    """The unused keys of a file, the report on the used ones, and the resulting settings.

    1. Rules get values with `take`.
    2. Rules report with `honour`, `agree`, `ignore`, `refuse` or `lack`.
    3. `finish` reports on keys that no rule used.
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

    # ---- the file's keys ----

    def _flatten(self, data: Mapping[str, Any], before: str, written_before: str) -> None:
        for key, value in data.items():
            # Rules see current names only; `_written` keeps the spelling of the file for messages.
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
        """Replace "auto" by the Trainer's value. Without arguments of a Trainer, "auto" stays."""
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
        """Return whether the file has the key and no rule has used it."""
        return path in self._left

    def is_auto(self, path: str) -> bool:
        """Return whether the key is "auto" and was not filled."""
        return self._left.get(path) == "auto"

    def has_said(self, *paths: str) -> bool:
        """Return whether the file has a value for one of these keys, used or not."""
        return any(self._values.get(path) is not None for path in paths)

    def has_section(self, section: str) -> bool:
        """Return whether the file has the section, or a key in it, used or not."""
        return any(path == section or path.startswith(f"{section}.") for path in self._values)

    def refused_under(self, section: str) -> bool:
        """Return whether the section, or a key in it, is unused or was refused."""
        return self.has(section) or any(entry.path.startswith(section) for entry in self.refused)

    def under(self, section: str) -> list[str]:
        """Return the paths of unused keys in a section."""
        return [path for path in self._left if path.startswith(f"{section}.")]

    def known_under(self, section: str) -> list[str]:
        """Return the paths of unused keys in a section that exist in DeepSpeed."""
        return [path for path in self.under(section) if path.removeprefix(f"{section}.") in _NAMES[section]]

    def take(self, path: str, kind: Callable[[Any], Any], field: str = "") -> Any:
        """Use a key and return its value.

        Args:
            path: path of the key.
            kind: parses the value; its docstring names the expected value in errors.
            field: our field; for "auto", its default is reported.

        Returns:
            The value; None if the key is missing, is an unfilled "auto", or is invalid (which is refused).
        """
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
        """Warn if the missing key's default differs from the Trainer's argument.

        Args:
            path: path of the key, which the file does not have.
            default: DeepSpeed's default.
        """
        if said := left_unused(path, default, self._given):
            self.warnings.append(said)

    def speaks_of(self, *names: str) -> bool:
        """Return whether one of these arguments of the Trainer was given."""
        return any(name in self._given for name in names)

    def default(self, field: str) -> Any:
        """Return SpeedLab's default of a field."""
        value: Any = self._defaults
        for name in field.split("."):
            value = getattr(value, name)
        return value

    # ---- reports of the rules ----

    def set(self, field: str, value: Any) -> None:
        """Set a field of the configuration, without a report.

        Args:
            field: dotted path of our field.
            value: its value.
        """
        *parts, name = field.split(".")
        inside = self.settings
        for part in parts:
            inside = inside.setdefault(part, {})
        inside[name] = value

    def honour(self, path: str, field: str, value: Any, note: str = "") -> None:
        """Report that a key sets a field of the configuration, and set the field.

        Args:
            path: path of the key.
            field: dotted path of our field.
            value: its value.
            note: addition to the report.
        """
        self.set(field, value)
        self._fields[field] = path
        self._add(self.honoured, path, f"{field} {value!r}{self._filled.get(path, '')}{note and f'; {note}'}")

    def agree(self, path: str, text: str) -> None:
        """Report that a key asks for what happens anyway.

        Args:
            path: path of the key.
            text: the report.
        """
        self._left.pop(path, None)
        self._add(self.honoured, path, text)

    def ignore(self, path: str, reason: str, *, warn: bool = False) -> None:
        """Report that a key has no effect.

        Args:
            path: path of the key.
            reason: why.
            warn: whether to warn, too.
        """
        self._left.pop(path, None)
        self._add(self.ignored, path, reason)
        if warn:
            self.warnings.append(f"{self._written.get(path, path)}: {reason}")

    def refuse(self, path: str, reason: str, feature: str = "") -> None:
        """Refuse a key.

        Args:
            path: path of the key.
            reason: why, and what to do.
            feature: name for `ignore` to read the file without it.
        """
        self._left.pop(path, None)
        self._add(self.refused, path, reason, feature)

    def lack(self, path: str, feature: str, reason: str) -> bool:
        """Refuse a key for a missing feature, or ignore it if the caller asked for that.

        Args:
            path: path of the key.
            feature: name of the feature.
            reason: why.

        Returns:
            Whether the key is ignored.
        """
        if feature in self.without:
            self.ignore(path, f"you asked to go on without {feature!r}; {reason}", warn=True)
            return True
        self.refuse(path, f'{reason}; to go on without it, ignore "{feature}"', feature)
        return False

    def _add(self, entries: list[Entry], path: str, text: str, feature: str = "") -> None:
        written = self._written.get(path, path)
        entries.append(Entry(path=written, value=self._values.get(path), text=text, feature=feature))

    def origin_of(self, field: str, text: str) -> str:
        """Return the key, as written in the file, for an error about a field.

        Args:
            field: dotted path of our field.
            text: text of the error.
        """
        path = self._fields.get(field)
        if path is None:
            batch_keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
            path = next((key for key in batch_keys if text.startswith("batch:") and key in self._values), field)
        return self._written.get(path, path) or "layout"

    # ---- unused keys ----

    def finish(self) -> None:
        """Report on all keys that no rule has used."""
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
        """Return the name that an unknown key was meant to be; None if there is none.

        Args:
            path: path of the unknown key.
            names: names in its section. A match is nearly equal or has the key as a unique prefix, and is not in the
                file.
        """
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
    """Return path of a section ("" for the first level) -> names of all its keys."""
    names: dict[str, dict[str, None]] = {}
    for path in (*HONOURED, *IGNORED, *FEATURES, *SECTIONS, *LEGACY):
        parts = path.split(".")
        for depth, name in enumerate(parts):
            names.setdefault(".".join(parts[:depth]), {})[name] = None
    return {section: tuple(found) for section, found in names.items()}


_NAMES = _names()


# ---- value readers ----
# `RemainingKeys.take` quotes their docstrings in errors: "expected a whole number".


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
