"""How a configuration is refused: the key, the rule with its values, and what would work."""

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
"""Names that people bring along from elsewhere, and ours for them."""


class ConfigError(ValueError):
    """A configuration that cannot run. Each line of the message: the key, the rule with its values, what to change.

    `problems` holds the same lines as (key path, text), where they are known one by one. `in_terminal` is what to print
    for somebody at a terminal, where what to change is an option rather than an argument.
    """

    def __init__(self, message: str = "", *, problems: Sequence[tuple[str, str]] = (), in_terminal: str = "") -> None:
        super().__init__(message or "\n".join(f"{path}: {text}" if path else text for path, text in problems))
        self.problems = tuple(problems)
        self.in_terminal = in_terminal or str(self)

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the message says all, and the frames would be ours."""
        return [f"{type(self).__name__}: {with_more(self)}"]


def nearest_keys(key: str, own: Collection[str], inner: Mapping[str, Sequence[str]]) -> Sequence[str]:
    """Which of `own`, or of the keys inside the parts, is meant by a key that nobody knows; `inner` maps the latter to
    their paths. Empty when none is near."""
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
    """A value in a message: at most three elements of it are read, and those of other classes than Python's are not."""
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
    """What to say of a key that is not one of `own`; `inner` maps the keys inside the parts to their paths."""
    near = nearest_keys(key, own, inner)
    if len(near) == 1:
        return f"unknown key {key!r}; the nearest known key is {near[0]!r}"
    if near:
        return f"unknown key {key!r}; the nearest known keys are {', '.join(map(repr, near))}"
    return f"unknown key {key!r}; known keys: {', '.join(own)}"


def explain(error: ValidationError) -> ConfigError:
    """The same as one line for each thing that is wrong: the key's path, the rule, what came."""
    problems: dict[tuple[str, str], None] = {}
    for item in error.errors(include_url=False):
        # A field that takes one of several types reports each of them, with the type at the end of its path.
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
"""What a refusal begins with -> the section of the guide that deals with it."""


def with_more(error: Exception, message: str = "") -> str:
    """`message`, or the error's own, for a person to read, and below it the section that helps, where the message names
    none: the one for what a refusal begins with, or the one that quotes the message."""
    message = message or str(error)
    if "speedlab guide " in message:
        return message
    begins = re.match(r"[a-z_]+", message) if isinstance(error, ValueError) else None
    section = (_SECTIONS.get(begins[0]) if begins else None) or section_about(message)
    return f"{message}\n{more_in(section)}" if section else message


def more_in(section: str) -> str:
    """Where a message's reader finds more: the section of `speedlab guide trouble` whose heading has this word."""
    return f"more: speedlab guide {TROUBLE} {section}"
