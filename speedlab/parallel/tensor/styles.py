"""The ways in which a plan asks for a layer to be cut, by the names that Hugging Face's plans use."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class PlanError(ValueError):
    """A plan that is missing, or that cannot be carried out; the message says what would work."""


class Cut(Enum):
    """What each rank holds of a layer."""

    OUTPUT = "output"
    """Some of its outputs; of an embedding some of its columns."""
    INPUT = "input"
    """What belongs to some of its inputs; of an embedding some of its rows, the vocabulary."""
    NOTHING = "nothing"
    """All of it, and it sees the same values on all ranks."""
    NOTHING_BUT_VALUES = "nothing but values"
    """All of it, but it sees only the rank's part of the values, so gradients are partial."""


@dataclass(frozen=True, kw_only=True)
class Style:
    """One way to cut a layer. `whole_outside`: what goes in (of INPUT) or comes out (of OUTPUT) is whole on all ranks;
    otherwise the layer behind or before it works on parts. `packed`: matrices that lie in one weight."""

    cut: Cut
    whole_outside: bool = False
    packed: int = 1


_COLUMN, _ROW = Style(cut=Cut.OUTPUT), Style(cut=Cut.INPUT)
_COLUMN_GATHERED = Style(cut=Cut.OUTPUT, whole_outside=True)
_ROW_OF_WHOLE = Style(cut=Cut.INPUT, whole_outside=True)
_WHOLE = Style(cut=Cut.NOTHING)

STYLES: dict[str, Style] = {
    "colwise": _COLUMN,
    "local_colwise": _COLUMN,
    "colwise_rep": _COLUMN_GATHERED,
    "colwise_gather_output": _COLUMN_GATHERED,
    "packed_colwise": Style(cut=Cut.OUTPUT, packed=2),
    "packed_colwise_3": Style(cut=Cut.OUTPUT, packed=3),
    "rowwise": _ROW,
    "local_rowwise": _ROW,
    "rowwise_rep": _ROW_OF_WHOLE,
    "rowwise_split_input": _ROW_OF_WHOLE,
    "embedding_rowwise": _ROW,
    "embedding_colwise": _COLUMN_GATHERED,
    "replicate": _WHOLE,
    "replicated": _WHOLE,
    "replicated_with_grad_allreduce": Style(cut=Cut.NOTHING_BUT_VALUES),
}
"""Both generations of Hugging Face's names (transformers 4 and 5); packed_colwise_3 is ours, for fused queries, keys
and values."""


def style_named(name: object, pattern: str) -> Style:
    """The style that a plan asks for. Raises PlanError for those that are not built."""
    style = STYLES.get(name) if isinstance(name, str) else None
    if style is None:
        reason = (
            "sequence parallelism is built for the GPT of this package only"
            if name == "sequence_parallel"
            else "mixtures of experts and other special layers are not cut"
        )
        raise PlanError(
            f"tp_plan: {pattern!r} asks for {name!r}, which is not built ({reason}); give a plan without it as "
            f"tp_plan=, with these styles: {', '.join(STYLES)}"
        )
    return style
