"""The keys of a DeepSpeed file on their way to a configuration: flat, under today's names, each used up once."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from speedlab.config.deepspeed_auto import AUTO, TRAINER_DEFAULTS, disagreement
from speedlab.config.deepspeed_schema import FEATURES, HONOURED, IGNORED, LEGACY, OFFLOAD, SECTIONS, Feature
from speedlab.config.errors import ConfigError

if TYPE_CHECKING:
    from speedlab.config.run import RunConfig

_SHOWN = 60
"""At most this many characters of a value are repeated."""

_NEAR = 0.85
"""Names that are more alike than this are taken for a slip."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One key of the file: its path as it is written there, its value, and what became of it."""

    path: str
    value: Any
    text: str

    @property
    def shown(self) -> str:
        """The value as JSON, short."""
        text = json.dumps(self.value, ensure_ascii=False, default=str)
        return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


class Keys:
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
    ) -> None:
        self.settings: dict[str, Any] = {}
        self.honoured: list[Entry] = []
        self.ignored: list[Entry] = []
        self.refused: list[Entry] = []
        self.assumed: list[str] = []
        self.warnings = warnings
        self._defaults = defaults
        self._left: dict[str, Any] = {}
        self._written: dict[str, str] = {}
        self._values: dict[str, Any] = {}
        self._fields: dict[str, str] = {}
        self._filled: dict[str, str] = {}
        self._args = self._checked(training_args)
        self._automatic: list[str] = []
        self._given = training_args or {}
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

    @staticmethod
    def _checked(training_args: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """All arguments that fill something, the Trainer's defaults in place of those that are not given."""
        if training_args is None:
            return None
        if not isinstance(training_args, Mapping):
            kind = type(training_args).__name__
            raise ConfigError(f"training_args: expected names and values, not {kind}; give args.to_dict()")
        args = {**TRAINER_DEFAULTS, **training_args}
        for name in TRAINER_DEFAULTS:
            if not isinstance(args[name], int | float | None):
                raise ConfigError(f"training_args.{name}: expected a number, not {args[name]!r}")
        return args

    def _fill(self) -> None:
        """Put in the place of "auto" what the Trainer would; without its arguments "auto" stays."""
        for path, value in list(self._left.items()):
            if self._args is None:
                continue
            if value == "auto" and path in AUTO:
                filled = AUTO[path].value(self._args)
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

    def refused_under(self, section: str) -> bool:
        """Whether the section, or a key of it, was refused."""
        return self.has(section) or any(entry.path.startswith(section) for entry in self.refused)

    def under(self, section: str) -> list[str]:
        """Paths of the keys that are left inside a section."""
        return [path for path in self._left if path.startswith(f"{section}.")]

    def take(self, path: str, kind: Callable[[Any], Any], field: str = "") -> Any:
        """Use up a key: its value as `kind` reads it; None when it is not there, "auto" that stays SpeedLab's default
        of `field`, or no such value, which is refused."""
        if path not in self._left:
            return None
        value = self._left.pop(path)
        if value == "auto":
            default = f", {field} {self._default(field)!r}" if field else ""
            why = "SpeedLab's default" if self._args is None else "training_args do not say it; SpeedLab's default"
            self._automatic.append(self._written[path])
            self._add(self.honoured, path, f"{why}{default}")
            return None
        try:
            return kind(value)
        except (TypeError, ValueError, OverflowError):
            self.refuse(path, f"expected {kind.__doc__}, not {_short(value)}")
            return None

    def _default(self, field: str) -> Any:
        value: Any = self._defaults
        for name in field.split("."):
            value = getattr(value, name)
        return value

    # What became of them

    def set(self, field: str, value: Any) -> None:
        part, _, name = field.partition(".")
        if name:
            self.settings.setdefault(part, {})[name] = value
        else:
            self.settings[part] = value

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

    def refuse(self, path: str, reason: str) -> None:
        self._left.pop(path, None)
        self._add(self.refused, path, reason)

    def lack(self, path: str, feature: str, reason: str) -> bool:
        """Refuse the key for a feature that is missing, or ignore it when the caller said so; says whether it is
        ignored."""
        if feature in self.without:
            self.ignore(path, f"you asked to go on without {feature!r}; {reason}", warn=True)
            return True
        self.refuse(path, f'{reason}; to go on without it, ignore "{feature}"')
        return False

    def _add(self, entries: list[Entry], path: str, text: str) -> None:
        entries.append(Entry(path=self._written.get(path, path), value=self._values.get(path), text=text))

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
            who = "there are no training_args to fill" if self._args is None else "training_args do not fill"
            self.warnings.append(f'{who} "auto", so SpeedLab\'s defaults stand: {", ".join(self._automatic)}')
        for path in list(self._left):
            value = self._left[path]
            if path in FEATURES:
                self._finish_feature(path, value, FEATURES[path])
            elif path in IGNORED:
                self.ignore(path, IGNORED[path])
            elif path in SECTIONS or path in OFFLOAD:
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
        known = (*HONOURED, *IGNORED, *FEATURES)
        if section and leaf in (*HONOURED, *SECTIONS):
            self.refuse(path, f"DeepSpeed has {leaf!r} at the first level, not inside {section!r}; move it there")
            return
        near = difflib.get_close_matches(path, known, n=1, cutoff=_NEAR)
        if near and (near[0] in HONOURED or near[0] in FEATURES):
            self.refuse(path, f"DeepSpeed has no such key; the nearest is {near[0]!r}; correct it or take it out")
            return
        hint = f"; the nearest is {near[0]!r}, and {IGNORED[near[0]]}" if near else ""
        self.ignore(path, f"DeepSpeed has no such key{hint}", warn=True)


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


def pair(value: Any) -> tuple[float, float]:
    """two numbers in [ ]"""
    first, second = value
    return number(first), number(second)


def section(value: Any) -> Mapping[str, Any]:
    """keys and values in { }"""
    if not isinstance(value, Mapping):
        raise TypeError(value)
    return value


def _short(value: Any) -> str:
    return Entry(path="", value=value, text="").shown
