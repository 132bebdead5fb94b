"""Define the base class of all sections: frozen, strict, and with errors that suggest the nearest name."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Mapping, Sequence, Set
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from speedlab.config.errors import ConfigError, briefly, explain, unknown_key


def _is_plain(value: Any) -> bool:
    """Return whether a value is a finite collection of Python's or NumPy's, or a class."""
    known = isinstance(value, str | bytes | Sequence | Set | Mapping | type | BaseModel)
    return known or type(value).__module__.partition(".")[0] == "numpy"


class ConfigSection(BaseModel):
    """A frozen section of a configuration; a changed section is a new object. The docstring lists the fields.

    Raises:
        ConfigError: one line for each problem; unknown keys with the nearest known name.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, hide_input_in_errors=True, allow_inf_nan=False
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        # help() in a notebook then shows every field with its description.
        lines = [inspect.cleandoc(cls.__doc__ or ""), "", "Attributes:"]
        for name, field in cls.model_fields.items():
            part = cls.part_of(name)
            inside = f"; {part.__name__}({', '.join(part.model_fields)})" if part is not None else ""
            lines.append(f"    {name}: {field.description}{inside}")
        cls.__doc__ = "\n".join(lines)

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
        # Before pydantic's own validation, whose messages do not suggest names.
        problems = {key: text for key, value in data.items() if (text := cls._problem(key, value))}
        if problems:
            rest = {key: value for key, value in data.items() if key not in problems}
            raise ConfigError(problems=[*(("", text) for text in problems.values()), *cls._problems_of(rest)])
        # Inner sections are constructed from keywords, which must be text; YAML and Python allow any key.
        return {
            key: {str(inner): item for inner, item in value.items()} if isinstance(value, Mapping) else value
            for key, value in data.items()
        }

    @classmethod
    def _problem(cls, key: Any, value: Any) -> str:
        """Return what is wrong with a key, or with the kind of its value; empty if nothing is."""
        if key not in cls.model_fields:
            return unknown_key(str(key), list(cls.model_fields), cls._inner_keys())
        if isinstance(value, bool) and cls.model_fields[key].annotation is not bool:
            # Python and pydantic accept True as 1; in a configuration it is a mistake.
            return f"{key} is {str(value).lower()}, but it is not a yes-or-no field"
        if (part := cls.part_of(key)) is not None and not isinstance(value, Mapping | part):
            example = f"{key}={json.dumps(part._example(value if isinstance(value, str | int | float) else None))}"
            return f"{key} is {briefly(value)}, but it has fields of its own; give them, for instance {example}"
        several = hasattr(type(value), "__getitem__") or hasattr(type(value), "__iter__")
        if part is None and several and not _is_plain(value):
            # To check for a list, pydantic would iterate over a whole data set, which may have no end.
            return f"{key} is {briefly(value)}; give a value that a file can hold: text, numbers, or a list of them"
        return ""

    @classmethod
    def _problems_of(cls, data: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
        try:
            cls(**data)
        except ConfigError as error:
            return error.problems
        return ()

    @classmethod
    def _example(cls, value: Any) -> dict[str, Any]:
        """Return one field that accepts `value`, otherwise one with its default, otherwise one that accepts 1."""
        for name in cls.model_fields:
            with contextlib.suppress(ConfigError):
                if value is not None and getattr(cls(**{name: value}), name) == value:
                    return {name: value}
        for name, field in cls.model_fields.items():
            if field.default is not None:
                return {name: field.default}
        return cls._example(1)

    @classmethod
    def known_in(cls, data: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Split the data of a file that another version may have written.

        Args:
            data: keys and values of the file.

        Returns:
            (the known keys and values, a sentence for each unknown key).
        """
        known: dict[str, Any] = {}
        unknown: list[str] = []
        for key, value in data.items():
            if key not in cls.model_fields:
                unknown.append(unknown_key(key, list(cls.model_fields), cls._inner_keys()))
            elif (part := cls.part_of(key)) is not None and isinstance(value, Mapping):
                known[key], inside = part.known_in(value)
                unknown += [f"{key}: {text}" for text in inside]
            else:
                known[key] = value
        return known, unknown

    @classmethod
    def part_of(cls, name: str) -> type[ConfigSection] | None:
        """Return the class of a field that is a section itself.

        Args:
            name: name of the field.

        Returns:
            The class; None if the field is a plain value.
        """
        kind = cls.model_fields[name].annotation
        return kind if inspect.isclass(kind) and issubclass(kind, ConfigSection) else None

    @classmethod
    def _inner_keys(cls) -> dict[str, list[str]]:
        paths: dict[str, list[str]] = {}
        for name in cls.model_fields:
            if part := cls.part_of(name):
                for inner in part.model_fields:
                    paths.setdefault(inner, []).append(f"{name}.{inner}")
        return paths
