"""A configuration in any of the ways in which people give one to a function."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speedlab.config.deepspeed import recognises
from speedlab.config.errors import ConfigError
from speedlab.config.run import RunConfig

GivenConfig = RunConfig | Mapping[str, Any] | str | Path
"""A RunConfig; a dict of its fields, or of DeepSpeed's; the path of a JSON or YAML file of either."""


def config_of(given: GivenConfig) -> RunConfig:
    """The RunConfig of what was given. Raises ConfigError."""
    if isinstance(given, RunConfig):
        return given
    if isinstance(given, str | Path):
        return RunConfig.load(given)
    if isinstance(given, Mapping):
        fields = {str(key): value for key, value in given.items()}
        return RunConfig.from_deepspeed(fields) if recognises(fields, RunConfig) else RunConfig(**fields)
    raise ConfigError(f"config: expected a RunConfig, a dict or a path, not {type(given).__name__}")
