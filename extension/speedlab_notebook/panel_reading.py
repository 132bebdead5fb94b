"""What a panel's controls say: a configuration and its batch, or what is wrong and beside which control it is told."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from speedlab.config import ConfigError, RunConfig
from speedlab.config.batch import Batch
from speedlab.layout import LayoutError
from speedlab_notebook.panel_fields import Field


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What follows from the controls alone."""

    config: RunConfig | None
    """None while they say no configuration."""
    batch: Batch | None
    """How the batch divides; None while it does not."""
    problems: list[tuple[str, str]]
    """(path of the field or '', what is wrong)"""

    @classmethod
    def of(cls, values: Mapping[str, Any], fields: Mapping[str, Field], engines: int, last: str) -> Reading:
        """Of what the controls say, as keywords of RunConfig, for so many engines. `last`: the field changed last."""
        found: Sequence[tuple[str, str]] = ()
        config, batch = None, None
        try:
            config = RunConfig(**values)
            batch = config.batch.resolve(config.layout(engines).data_size)
        except LayoutError as error:
            found = [(layout_field(str(error), last), str(error))]
        except ConfigError as error:
            found = error.problems or [(str(error).partition(":")[0], str(error))]
        problems = [(place_problem(path, text, fields, last), text) for path, text in found]
        return cls(config=config, batch=batch, problems=problems)


def place_problem(path: str, text: str, fields: Mapping[str, Field], last: str) -> str:
    """The path of the field beside which a line of a ConfigError belongs; '' where there is none.

    A rule over several fields names them; it belongs to the one changed last, else to the first that it names.
    """
    if path in fields:
        return path
    words = set(re.findall(r"[\w.]+", text))
    named = [known for known in fields if known in words]
    if path:
        inside = {known: known.rpartition(".")[2] for known in fields if known.startswith(f"{path}.")}
        named += [known for known, name in inside.items() if words & {name, name.partition("_")[0]}]
    return last if last in named else next(iter(named), "")


def layout_field(text: str, last: str) -> str:
    """The path of the field beside which a LayoutError belongs: of the layout's, the one changed last, else the one
    that it begins with."""
    if last.startswith("parallel."):
        return last
    named = re.match(r"parallel[:.] ?(islands|tp|pp|cp|cp_heads|cp_pad|cut|schedule)\b", text)
    return f"parallel.{named[1]}" if named else "parallel.dp"
