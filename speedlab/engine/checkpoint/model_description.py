"""The description of a model in a checkpoint, for exports without the model.

It has the configuration, the transformers class, and the PEFT adapters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any

from torch import nn

from speedlab.config import ModelConfig

PEFT_PREFIX = "base_model.model."
"""Prefix of a model's parameter names inside a PeftModel."""


def describe_model(module: nn.Module) -> dict[str, Any]:
    """Return the manifest's description of the model.

    Args:
        module: The model or its first pipeline stage.

    Returns:
        `model` (built-in GPT), or `huggingface` and `peft`; empty for other models.
    """
    config: Any = getattr(module, "config", None)
    if isinstance(config, ModelConfig):
        return {"model": json.loads(config.model_dump_json())}
    if not hasattr(config, "model_type") or not hasattr(config, "to_json_string"):
        return {}
    adapters: Any = getattr(module, "peft_config", None)
    base = module.get_base_model() if adapters and hasattr(module, "get_base_model") else module  # pyright: ignore[reportCallIssue]  # PEFT's
    described = json.loads(config.to_json_string(use_diff=False))
    kind = _class_in_transformers(base)
    found: dict[str, Any] = {"huggingface": {**described, **({"architectures": [kind]} if kind else {})}}
    if isinstance(adapters, Mapping) and adapters:
        active: Any = getattr(module, "active_adapters", None)
        names: Any = active() if callable(active) else active
        found["peft"] = {
            "adapters": {name: plain(adapter.to_dict()) for name, adapter in adapters.items()},
            "active": list(names or adapters),
        }
    return found


def _class_in_transformers(module: nn.Module) -> str | None:
    """Return the class that loads the model: its own, or its transformers base class."""
    for kind in type(module).__mro__:
        if kind.__module__.startswith("transformers."):
            return kind.__name__
    return None


def plain(value: Any) -> Any:
    """Return a configuration as JSON values.

    Args:
        value: Any value of a configuration.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, set | frozenset):
        return sorted(plain(each) for each in value)
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
