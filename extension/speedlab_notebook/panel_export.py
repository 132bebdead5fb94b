"""A configuration as text that can be kept: JSON, YAML, Python, DeepSpeed's JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pprint import pformat
from typing import Any

from speedlab.config import RunConfig, annotated_yaml

_WIDTH = 96


def python_text(config: RunConfig) -> str:
    """The lines that make `config`: only what differs from the defaults is named, of the model what differs from its
    preset."""
    named: dict[str, Any] = config.model_dump(mode="json", exclude_defaults=True)
    if "model" in named:
        own = config.model.changes()
        named["model"] = {"preset": config.model.preset, **{key: named["model"].get(key, own[key]) for key in own}}
    lines = [f"    {name}={pformat(value, width=_WIDTH, sort_dicts=False)}," for name, value in named.items()]
    inside = "\n".join(["", *lines, ""]) if lines else ""
    package = RunConfig.__module__.partition(".")[0]
    return f"from {package} import RunConfig\n\nconfig = RunConfig({inside})\n"


def _deepspeed_text(config: RunConfig) -> str:
    return json.dumps(config.to_deepspeed(), indent=2) + "\n"


FORMATS: dict[str, tuple[str, Callable[[RunConfig], str]]] = {
    "JSON": (".json", lambda config: config.to_json() + "\n"),
    "YAML": (".yaml", annotated_yaml),
    "Python": (".py", python_text),
    "DeepSpeed JSON": ("-deepspeed.json", _deepspeed_text),
}
"""Format -> how its file ends, and the text."""
