"""The base of every part of a configuration: frozen, and strict about what it is given."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from speedlab.config.errors import explain, unknown_key


class Part(BaseModel):
    """Frozen; a changed part is a new object. Raises ConfigError, for unknown keys with the nearest known name."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, hide_input_in_errors=True, allow_inf_nan=False
    )

    def __init__(self, /, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise explain(error) from None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_no_field(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        problems = []
        for key, value in data.items():
            if key not in cls.model_fields:
                problems.append(unknown_key(str(key), list(cls.model_fields), cls._inner_keys()))
            elif isinstance(value, bool) and cls.model_fields[key].annotation is not bool:
                # Python counts True as 1, and so does pydantic; in a configuration it is a slip.
                problems.append(f"{key} is {str(value).lower()}, but it is not a yes-or-no field")
        if problems:
            raise ValueError("\n".join(problems))
        # A part inside is made from keywords, which are text; YAML and Python allow any key.
        return {
            key: {str(inner): item for inner, item in value.items()} if isinstance(value, Mapping) else value
            for key, value in data.items()
        }

    @classmethod
    def part_of(cls, name: str) -> type[Part] | None:
        """The class of the field `name` if it is a part itself."""
        kind = cls.model_fields[name].annotation
        return kind if inspect.isclass(kind) and issubclass(kind, Part) else None

    @classmethod
    def _inner_keys(cls) -> dict[str, list[str]]:
        paths: dict[str, list[str]] = {}
        for name in cls.model_fields:
            if part := cls.part_of(name):
                for inner in part.model_fields:
                    paths.setdefault(inner, []).append(f"{name}.{inner}")
        return paths
