"""Finding the tensors in whatever a module takes or returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists, mappings and dataclasses (Hugging Face outputs are mappings)."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from tensors_of(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            yield from tensors_of(getattr(value, part.name, None))


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with `change` applied to its tensors, in containers of the same types; other things are left as they
    are."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, change) for item in value)
    if type(value) is dict:
        return {key: map_tensors(item, change) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        changed = {part.name: map_tensors(getattr(value, part.name), change) for part in fields(value) if part.init}
        return replace(value, **changed)
    return value
