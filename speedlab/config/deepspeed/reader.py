"""Read a DeepSpeed configuration and report on every key.

`read` (for users `RunConfig.deepspeed_reading`) sorts the keys of a file:

- honoured: the key has its meaning here, as the named field, or asks for what always happens.
- ignored, with the reason: the key changes neither the computation nor what fits.
- refused, with the reason: the key changes one of the two and SpeedLab does not support it, or its value is invalid.
  `ignore={"moe"}` reads the file without a feature.

A missing key has DeepSpeed's default if it changes the training: no ZeRO, float32, no clipping, a constant learning
rate. `DeepSpeedReport.assumed` lists these. What a DeepSpeed file does not cover (model, data, number of steps without
a schedule) has SpeedLab's defaults.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speedlab.config.deepspeed.convert import RULES
from speedlab.config.deepspeed.json_parser import parse
from speedlab.config.deepspeed.keys import Entry, RemainingKeys
from speedlab.config.deepspeed.schema import FEATURES, TOP_LEVEL
from speedlab.config.deepspeed.sparse_attention import FEATURE as SPARSE
from speedlab.config.deepspeed.sparse_attention import HEADS
from speedlab.config.errors import ConfigError
from speedlab.layout import LayoutError

if TYPE_CHECKING:
    from speedlab.config.run_config import RunConfig

_FEATURES_OF_RULES = {"optimizer", "schedule", SPARSE, HEADS}
FEATURE_NAMES = tuple(sorted({feature.name for feature in FEATURES.values()} | _FEATURES_OF_RULES))
"""Valid names for `ignore`."""


@dataclass(frozen=True, kw_only=True)
class DeepSpeedReport:
    """What was done with every key of a DeepSpeed file."""

    source: str
    """The file, or "" for a dict."""
    honoured: tuple[Entry, ...]
    ignored: tuple[Entry, ...]
    refused: tuple[Entry, ...]
    assumed: tuple[str, ...]
    """Defaults of missing keys that change the training."""
    warnings: tuple[str, ...]
    """Surprising effects of the file."""
    accepted: RunConfig | None
    """The configuration; None if anything was refused."""
    filled: bool
    """Whether arguments of a Trainer were given."""

    @property
    def config(self) -> RunConfig:
        """The configuration.

        Raises:
            ConfigError: keys were refused, one line for each.
        """
        if self.accepted is None:
            before = f"{self.source}: " if self.source else ""
            lines = [f"{before}{entry.path}: {entry.text}" for entry in self.refused]
            raise ConfigError(
                "\n".join([*lines, *self._ways_out(in_terminal=False)]),
                problems=[(entry.path, entry.text) for entry in self.refused],
                in_terminal="\n".join([*lines, *self._ways_out(in_terminal=True)]),
            )
        return self.accepted

    @property
    def lacking(self) -> tuple[str, ...]:
        """Names of the unsupported features in the file, valid for `ignore`."""
        return tuple(sorted({entry.feature for entry in self.refused if entry.feature}))

    def _ways_out(self, *, in_terminal: bool) -> list[str]:
        """Return how to go on without the unsupported features, in Python or in a terminal."""
        if not self.lacking:
            return []
        if in_terminal:
            file = shlex.quote(self.source)
            config = f"speedlab config --from-deepspeed {file} --ignore {' '.join(self.lacking)} > config.yaml"
            how = f"`{config}`, then `speedlab train config.yaml`"
        else:
            names = ", ".join(f'"{name}"' for name in self.lacking)
            source = repr(self.source) if self.source else "config"
            args = ", training_args=args" if self.filled else ""
            how = f"config=speedlab.RunConfig.from_deepspeed({source}{args}, ignore={{{names}}})"
        return [f"to go on without {', '.join(self.lacking)}: {how}"]

    def lines(self, *, in_terminal: bool = False) -> list[str]:
        """Return the whole report as text, one line for each key.

        Args:
            in_terminal: suggest command-line options, rather than Python arguments.
        """
        found = [self.source] if self.source else []
        for title, entries in (("refused", self.refused), ("honoured", self.honoured), ("ignored", self.ignored)):
            if entries:
                found.append(f"{title}:")
                because = "because " if title == "ignored" else ""
                found += [f"  {entry.path} = {entry.shown}: {because}{entry.text}" for entry in entries]
            if title == "refused":
                found += self._ways_out(in_terminal=in_terminal)
        for title, texts in (("left out, so DeepSpeed's default", self.assumed), ("note", self.warnings)):
            if texts:
                found.append(f"{title}:")
                found += [f"  {text}" for text in texts]
        return found

    def __str__(self) -> str:
        return "\n".join(self.lines())


def read(
    source: str | Path | Mapping[str, Any],
    kind: type[RunConfig],
    *,
    engines: int | None = None,
    training_args: Mapping[str, Any] | None = None,
    ignore: Collection[str] = (),
) -> DeepSpeedReport:
    """Read a DeepSpeed configuration.

    Args:
        source: a path, the text itself (it starts with '{' or a comment), or a dict.
        kind: the class of the configuration; an argument because this class imports this module.
        engines: number of ranks for which the batch equation and the layout are checked.
        training_args: arguments of Hugging Face's TrainingArguments by name (`args.to_dict()`). They fill "auto" like
            the Trainer, and replace a missing optimizer, schedule, precision and batch. The model's `hidden_size` among
            them fills the bucket sizes.
        ignore: names of features to go on without.

    Raises:
        ConfigError: the text cannot be read, or `ignore` has an unknown name.
    """
    strangers = sorted(set(ignore) - set(FEATURE_NAMES))
    if strangers:
        raise ConfigError(f"ignore: {strangers[0]!r} is no feature; known: {', '.join(FEATURE_NAMES)}")
    data, name, warnings = _data(source)
    keys = RemainingKeys(data, training_args, ignore, warnings, kind(), engines)
    for rule in RULES:
        rule(keys)
    keys.finish()
    config = _config(keys, kind, engines)
    return DeepSpeedReport(
        source=name,
        honoured=tuple(keys.honoured),
        ignored=tuple(keys.ignored),
        refused=tuple(keys.refused),
        assumed=tuple(keys.assumed),
        warnings=tuple(dict.fromkeys(keys.warnings)),
        accepted=config,
        filled=training_args is not None,
    )


def recognises(source: str | Path | Mapping[Any, Any], kind: type[RunConfig]) -> bool:
    """Return whether a file or dict is DeepSpeed's rather than SpeedLab's, by its first-level keys.

    It is DeepSpeed's if a key exists only there, and no key exists only in SpeedLab. A broken JSON file counts as
    DeepSpeed's if it contains a key that exists only there.

    Args:
        source: a path, or the parsed keys.
        kind: the class of SpeedLab's configuration.
    """
    if isinstance(source, Mapping):
        fields, shared = kind.model_fields.keys(), source.get("optimizer")
        theirs = source.keys() & (TOP_LEVEL - fields) or (isinstance(shared, Mapping) and "type" in shared)
        return bool(theirs) and not source.keys() & (fields - TOP_LEVEL)
    path = Path(source)
    if path.suffix in (".yaml", ".yml"):
        return False
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return False
    try:
        return recognises(parse(text).data, kind)
    except ConfigError:
        # The text is broken JSON: look for a key that only DeepSpeed has, for a better error.
        theirs = "|".join(sorted(TOP_LEVEL - kind.model_fields.keys()))
        return re.search(rf'"(?:{theirs})"\s*:', text) is not None


def _data(source: str | Path | Mapping[str, Any]) -> tuple[dict[str, Any], str, list[str]]:
    """Return (keys and values, name of the source, warnings about the text)."""
    if isinstance(source, Mapping):
        return dict(source), "", []
    if isinstance(source, str) and source.lstrip().startswith(("{", "#", "//", "/*")):
        parsed = parse(source)
        return parsed.data, "", list(parsed.warnings)
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not text: byte {error.start} is not UTF-8; expected DeepSpeed's JSON") from None
    try:
        parsed = parse(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return parsed.data, str(path), list(parsed.warnings)


def _config(keys: RemainingKeys, kind: type[RunConfig], engines: int | None) -> RunConfig | None:
    """Return the configuration; None if a key was refused, or if the settings are invalid (added to `keys.refused`)."""
    try:
        config = kind(**keys.settings)
        if engines is not None:
            config.batch.resolve(config.layout(engines, built_in=False).data_size)
    except (ConfigError, LayoutError) as error:
        problems = getattr(error, "problems", ()) or [("", str(error))]
        keys.refused += [Entry(path=keys.origin_of(path, text), value=None, text=text) for path, text in problems]
        return None
    return None if keys.refused else config
