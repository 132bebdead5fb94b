"""Build errors about a configuration: the key, the rule with its values, and what would work."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from speedlab.display.documentation import TROUBLE, section_about

FOREIGN_KEYS = {
    "learning_rate": "optimizer.lr",
    "batch_size": "batch.global_size",
    "train_batch_size": "batch.global_size",
    "train_micro_batch_size_per_gpu": "batch.micro_size",
    "gradient_accumulation_steps": "batch.accumulation",
    "gradient_clipping": "clip_norm",
    "zero_optimization": "zero",
    "bf16": "precision.dtype",
    "fp16": "precision.dtype",
    "scheduler": "schedule",
    "max_steps": "steps",
}
"""Names from other tools -> our names."""


class ConfigError(ValueError):
    """A configuration that cannot run.

    Each line of the message has the key, the rule with its values, and what to change.

    Args:
        message: the whole message; may be empty if `problems` are given.
        problems: (key path, text) of each line, if they are known separately.
        in_terminal: the message for a terminal, where options replace Python arguments.
    """

    def __init__(self, message: str = "", *, problems: Sequence[tuple[str, str]] = (), in_terminal: str = "") -> None:
        super().__init__(message or "\n".join(f"{path}: {text}" if path else text for path, text in problems))
        self.problems = tuple(problems)
        self.in_terminal = in_terminal or str(self)

    def _render_traceback_(self) -> list[str]:
        """Return only the message for IPython: the frames would be SpeedLab's own."""
        return [f"{type(self).__name__}: {with_more(self)}"]


def nearest_keys(key: str, own: Collection[str], inner: Mapping[str, Sequence[str]]) -> Sequence[str]:
    """Return the known keys nearest to an unknown one; empty if none is near.

    Args:
        key: the unknown key.
        own: keys of this section.
        inner: key inside a section -> its paths.
    """
    ours = FOREIGN_KEYS.get(key, "")
    if ours in own or ours.partition(".")[0] in own:
        return [ours]
    if (leaf := ours.rpartition(".")[2]) in own:
        return [leaf]
    if key in inner:
        return inner[key]
    if close := difflib.get_close_matches(key, own, n=1, cutoff=0.6):
        return close
    if close := difflib.get_close_matches(key, inner, n=1, cutoff=0.75):
        return inner[close[0]]
    return difflib.get_close_matches(key, own, n=1, cutoff=0.4)


_SHOWN_ELEMENTS = 3
_SHOWN_LETTERS = 200


def briefly(value: object) -> str:
    """Return a value for a message.

    At most three elements are read, and only of Python's own collections: another iterable may have no end.

    Args:
        value: any object.
    """
    if isinstance(value, str | bytes):
        return repr(value if len(value) <= _SHOWN_LETTERS else value[:_SHOWN_LETTERS])
    if value is None or isinstance(value, int | float | type):
        return repr(value)
    kind = type(value)
    if kind in (list, tuple, set, frozenset, dict):
        whole: Any = value
        shown = [briefly(each) for each in itertools.islice(whole, _SHOWN_ELEMENTS)]
        rest = "" if len(whole) <= _SHOWN_ELEMENTS else ", …"
        return f"a {kind.__name__} of {len(whole)} ({', '.join(shown)}{rest})" if whole else f"an empty {kind.__name__}"
    return f"a {kind.__name__}"


def unknown_key(key: str, own: Collection[str], inner: Mapping[str, Sequence[str]]) -> str:
    """Return the message about an unknown key, with the nearest known ones.

    Args:
        key: the unknown key.
        own: keys of this section.
        inner: key inside a section -> its paths.
    """
    near = nearest_keys(key, own, inner)
    if len(near) == 1:
        return f"unknown key {key!r}; the nearest known key is {near[0]!r}"
    if near:
        return f"unknown key {key!r}; the nearest known keys are {', '.join(map(repr, near))}"
    return f"unknown key {key!r}; known keys: {', '.join(own)}"


def explain(error: ValidationError) -> ConfigError:
    """Turn pydantic's error into one with a line for each problem: the key's path, the rule, the value.

    Args:
        error: the error of pydantic.

    Returns:
        A ConfigError, for the caller to raise.
    """
    # A dict keeps the order and drops duplicates of union fields.
    problems: dict[tuple[str, str], None] = {}
    for item in error.errors(include_url=False):
        # For a union field, pydantic reports an error for each type, with the type at the end of the path.
        where = ".".join(str(part) for part in item["loc"] if str(part).isidentifier() and part not in ("str", "int"))
        value, cause = item.get("input"), item.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError) and cause.problems:
            for inner, text in cause.problems:
                problems[".".join(filter(None, (where, inner))), text] = None
            continue
        simple = isinstance(value, str | int | float | bool | None) and item["type"] != "value_error"
        for message in item["msg"].removeprefix("Value error, ").splitlines():
            problems[where, f"{message}{f' (got {value!r})' if simple else ''}"] = None
    return ConfigError(problems=list(problems))


_SECTIONS = {
    "batch": "batch",
    "train_batch": "batch",
    "parallel": "layout",
    **dict.fromkeys(("pp", "dp", "cp", "cp_heads", "tp", "islands"), "layout"),
    "offload": "offload",
    "model": "model",
    "loss": "model",
    "data": "data",
}
"""First word of an error -> section of the guide about it."""


def with_more(error: Exception, message: str = "") -> str:
    """Return a message for the user, with the section of the guide that helps.

    The section is the one for the first word of the error, or the one that quotes the message.

    Args:
        error: the error.
        message: its text; empty: that of the error.
    """
    message = message or str(error)
    if "speedlab guide " in message:
        return message
    begins = re.match(r"[a-z_]+", message) if isinstance(error, ValueError) else None
    section = (_SECTIONS.get(begins[0]) if begins else None) or section_about(message)
    return f"{message}\n{more_in(section)}" if section else message


def more_in(section: str) -> str:
    """Return the command that shows a section of the guide `trouble`.

    Args:
        section: a word of the section's heading.
    """
    return f"more: speedlab guide {TROUBLE} {section}"
