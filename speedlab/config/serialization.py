"""Read and write configurations as JSON and YAML, and as YAML with the description of every field."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speedlab.config.base import ConfigSection
from speedlab.config.errors import ConfigError
from speedlab.config.model import ModelConfig

_COMMENT_COLUMN = 32


def is_yaml(path: Path) -> bool:
    """Return whether a path has a suffix of YAML."""
    return path.suffix in (".yaml", ".yml")


def read(path: Path) -> Mapping[Any, Any]:
    """Return the keys and values in a JSON or YAML file.

    Raises:
        ConfigError: the file cannot be read, or contains something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not text: byte {error.start} is not UTF-8; expected JSON or YAML") from None
    data = _parse(path, text)
    if not isinstance(data, Mapping):
        held = "nothing" if data is None else f"a {type(data).__name__}"
        raise ConfigError(f"{path}: holds {held}; expected keys and values, as `speedlab config` prints them")
    return data


def _parse(path: Path, text: str) -> Any:
    if is_yaml(path):
        import yaml

        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{path}: not valid YAML: {error}") from None
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        hint = "" if path.suffix == ".json" else "; a YAML file ends in .yaml or .yml"
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(f"{path}: not valid JSON at {where}: {error.msg}{hint}") from None


def yaml_text(data: Any) -> str:
    """Return plain data as YAML, keys in their order."""
    import yaml

    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


def annotated_yaml(part: ConfigSection) -> str:
    """Return a section as YAML with each field's description as a comment.

    Reading the text gives an equal section. Model fields equal to the preset's are commented out, so that another
    preset changes them.

    Args:
        part: the section, for instance a whole RunConfig.
    """
    return "\n".join(_annotated(part, indent="")) + "\n"


def _annotated(part: ConfigSection, indent: str) -> list[str]:
    lines: list[str] = []
    # A field equal to the preset's is written as a comment, so another preset changes it.
    kept = {"preset", *part.changes()} if isinstance(part, ModelConfig) else type(part).model_fields
    for name, value in part.model_dump(mode="json").items():
        description = type(part).model_fields[name].description or ""
        if inner := type(part).part_of(name):
            about = (inspect.getdoc(inner) or description).splitlines()[0]
            lines += ["", f"{indent}# {about}", f"{indent}{name}:"]
            lines += _annotated(getattr(part, name), indent + "  ")
        else:
            if not indent and lines and lines[-1].startswith(" "):
                lines.append("")
            # JSON values are valid YAML and stay on one line.
            line = f"{indent}{'' if name in kept else '# '}{name}: {json.dumps(value, ensure_ascii=False)}"
            lines.append(f"{line:<{_COMMENT_COLUMN - 1}} # {description}")
    return lines
