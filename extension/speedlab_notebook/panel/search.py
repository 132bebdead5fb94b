"""Fields by their name, by what is said of them, and by what DeepSpeed calls them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from speedlab.config import RunConfig
from speedlab_notebook.panel.fields import Field

MOST_FOUND = 6

_WRITTEN = (
    RunConfig(batch={"global_size": 32, "micro_size": 8}, precision="bfloat16", optimizer="sgd"),
    RunConfig(batch={"accumulation": 1}, precision="float16", activation={"checkpointing": "block"}),
    RunConfig(zero=3, offload={"optimizer": "disk", "parameters": "disk"}, parallel={"pp": 2, "tp": 2, "cp": 2}),
    RunConfig(zero={"stage": 3, "quantized_weights": True, "quantized_gradients": True, "secondary_partition": 2}),
    RunConfig(zero=0, optimizer={"name": "onebit_lamb", "freeze_step": 20}),
    RunConfig(zero=0, optimizer={"name": "zero_one_adam", "freeze_step": 20}),
    RunConfig(model={"attention": {"kind": "block_sparse"}}),
)
"""Configurations that, written as DeepSpeed's, use each of its keys that we have: the reader says which field is which,
so that no table of names can differ from it."""


@cache
def deepspeed_names() -> dict[str, str]:
    """Path of a field -> what DeepSpeed calls it."""
    found: dict[str, str] = {}
    for config in _WRITTEN:
        for entry in RunConfig.deepspeed_reading(config.to_deepspeed()).honoured:
            found.setdefault(entry.text.partition(" ")[0], entry.path)
    return found


def find(text: str, fields: Mapping[str, Field]) -> list[Field]:
    """Fields that have all words of `text`, best first: in their name, in DeepSpeed's, in what is said of them."""
    words = re.findall(r"[^\s._]+", text.lower())
    ranked = [(rank, field) for field in fields.values() if words and (rank := _rank(words, field)) is not None]
    return [field for _, field in sorted(ranked, key=lambda each: each[0])][:MOST_FOUND]


def _rank(words: list[str], field: Field) -> tuple[int, int] | None:
    """Where the words are found, the best place first; a shorter name before a longer one. None: not all are there."""
    name = f"{field.path} {field.label}".lower()
    theirs = deepspeed_names().get(field.path, "").lower()
    options = " ".join(map(str, field.options)).lower()
    for number, place in enumerate((field.label.lower(), name, theirs, f"{name} {theirs} {options}")):
        if all(word in place for word in words):
            return number, len(name)
    told = f"{name} {theirs} {options} {field.description}".lower()
    return (4, len(name)) if all(word in told for word in words) else None
