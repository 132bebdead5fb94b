"""Search for fields of the panel by name, by description, and by DeepSpeed's name."""

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
"""Configurations that together use every DeepSpeed key we support.

`deepspeed_names` writes them as DeepSpeed's and reads them back, so that no second table of names can go stale.
"""


@cache
def deepspeed_names() -> dict[str, str]:
    """Return DeepSpeed's names: path of a field -> its DeepSpeed key."""
    found: dict[str, str] = {}
    for config in _WRITTEN:
        for entry in RunConfig.deepspeed_reading(config.to_deepspeed()).honoured:
            found.setdefault(entry.text.partition(" ")[0], entry.path)
    return found


def find(text: str, fields: Mapping[str, Field]) -> list[Field]:
    """Return the fields that contain every word of a text, best first, at most 6.

    Args:
        text: The words, separated by spaces, dots or underscores.
        fields: The form's fields by path.
    """
    words = re.findall(r"[^\s._]+", text.lower())
    ranked = [(rank, field) for field in fields.values() if words and (rank := _rank(words, field)) is not None]
    return [field for _, field in sorted(ranked, key=lambda each: each[0])][:MOST_FOUND]


def _rank(words: list[str], field: Field) -> tuple[int, int] | None:
    """Return (rank of the place that has all words, length of the name), best lowest; None if a word is missing."""
    name = f"{field.path} {field.label}".lower()
    theirs = deepspeed_names().get(field.path, "").lower()
    options = " ".join(map(str, field.options)).lower()
    for number, place in enumerate((field.label.lower(), name, theirs, f"{name} {theirs} {options}")):
        if all(word in place for word in words):
            return number, len(name)
    # Descriptions are long and match many words, so they rank last.
    reported = f"{name} {theirs} {options} {field.description}".lower()
    return (4, len(name)) if all(word in reported for word in words) else None
