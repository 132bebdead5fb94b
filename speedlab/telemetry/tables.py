"""Tables of a run: the tensors of a memory segment, the layout of ranks, and the placement of parameters.

1. `tensors_in`: what a rank holds of one category at one place, tensor by tensor. Reads the placement table in the run
   folder, so no engine is interrupted. A segment has the size that the ledger measured. A text explains a difference
   between that size and the sum of the tensors.
2. `layout_table`: pipeline stages with their blocks, indices along each axis, device and host of every rank.
3. `placement_of`: the placement table of a rank, with the owner and the place of each state of each parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from speedlab.display.figure_style import LABELS
from speedlab.display.formatting import Table, bytes_text
from speedlab.hardware import Device
from speedlab.layout import ALWAYS_NAMED, AXES, Layout
from speedlab.placement import HEAD, STATE_CATEGORIES, cells
from speedlab.telemetry.records import CATEGORIES, PLACES, StepRecord
from speedlab.telemetry.run_folder import RunFolder, RunFolderError

MOST_TENSORS = 500
"""Maximum number of rows that are returned; the largest tensors come first."""

_WITHOUT_TENSORS = {
    "activations": "What forward keeps for backward, at the peak of the step. It comes and goes with each micro-batch, "
    "and is measured as a whole.",
    "communication_buffers": "Buffers that collectives and transfers pass through, at the peak of the step. They "
    "belong to no parameter.",
    "other_framework": "What is reported as used beyond everything that is counted: caches, fragments, the framework "
    "itself. It belongs to no parameter.",
    "outside_framework": "What is outside the framework: what the process held before there was an engine, and what "
    "others hold on the device.",
}


class SegmentError(ValueError):
    """Unknown memory segment. The message lists the known ones."""


def tensors_in(
    folder: RunFolder, newest: Mapping[int, StepRecord], *, rank: int, category: str, place: str
) -> dict[str, Any]:
    """Return what `rank` holds of `category` at `place`, the largest tensors first.

    Args:
        folder: The run folder.
        newest: Last record of each rank, for the measured size.
        rank: The rank.
        category: One of CATEGORIES.
        place: One of PLACES.

    Returns:
        A `Tensors` of speedlab_server/schema/__init__.py as plain data; sizes in bytes.

    Raises:
        SegmentError: The rank, category or place is invalid.
    """
    if category not in CATEGORIES or place not in PLACES or rank < 0:
        raise SegmentError(
            f"rank {rank!r}, category {category[:40]!r} at {place[:40]!r} is no segment: a rank is 0 or more, a "
            f"category one of {', '.join(CATEGORIES)}, a place one of {', '.join(PLACES)}"
        )
    record = newest.get(rank)
    measured = None if record is None else record.ledger.by_place().get(place, {}).get(category, 0)
    rows, text = [], _WITHOUT_TENSORS.get(category, "")
    if not text:
        try:
            rows = sorted(_rows(folder.read_placement(rank), category, place), key=lambda row: -row["bytes"])
        except (RunFolderError, OSError, ValueError) as error:
            text = str(error)
        else:
            text = _rest_text(category, measured, sum(row["bytes"] for row in rows))
    return {
        "type": "Tensors",
        "rank": rank,
        "category": category,
        "place": place,
        "step": -1 if record is None else record.step,
        "measured_bytes": measured,
        "tensor_bytes": sum(row["bytes"] for row in rows),
        "count": len(rows),
        "rows": rows[:MOST_TENSORS],
        "text": text,
    }


def _rows(table: Sequence[Any], category: str, place: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each state of each parameter in the segment. Raise ValueError if the table is damaged."""
    for row in table:
        try:
            for state, home in row["states"].items():
                if STATE_CATEGORIES.get(state, "gradients") == category and home["where"] == place:
                    first, end, nbytes = map(int, row["held"][state])
                    if end > first:
                        yield _row(row, state, home, first, end, nbytes)
        except KeyError as error:
            if error.args == ("held",):
                raise ValueError(
                    "The run was recorded by a version of SpeedLab that did not tell how much of each tensor a rank "
                    "holds; resume it, and it does."
                ) from None
            raise ValueError(f"The placement table is damaged: a row has no {error}.") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"The placement table is damaged: {str(error)[:200]}.") from None


def _row(
    row: Mapping[str, Any], state: str, home: Mapping[str, Any], first: int, end: int, nbytes: int
) -> dict[str, Any]:
    numel = math.prod(row["shape"])
    return {
        "name": str(row["name"]),
        "unit": str(row["unit"]),
        "state": str(state),
        "shape": _shape_text(row),
        "here": "all of it" if (first, end) == (0, numel) else f"{first:,} to {end - 1:,} of {numel:,}",
        "owner": _owner_text(row, home),
        "form": f"{home['form']}, {home['holders']}",
        "bytes": nbytes,
    }


def _shape_text(row: Mapping[str, Any]) -> str:
    shape, whole = ("×".join(map(str, row[name])) or "1 number" for name in ("shape", "whole_shape"))
    cut = ", ".join(map(str, row["cut_over"]))
    return f"{shape} of {whole}, cut over {cut}" if cut else shape


def _owner_text(row: Mapping[str, Any], home: Mapping[str, Any]) -> str:
    """Return the ranks that own the data: all data-parallel ranks, or those whose shards the tensor spans."""
    if home["holders"] in ("replicated", "each its own") or not row["owners"]:
        return "every data-parallel rank"
    count, first, last = map(int, row["owners"])
    return f"rank {first}" if count == 1 else f"{count} ranks, {first} to {last}"


def _rest_text(category: str, measured: int | None, reported: int) -> str:
    """Explain a difference between the measured bytes and the tensors' bytes; '' if there is none."""
    if measured is None or measured == reported:
        return ""
    if measured > reported:
        rest = bytes_text(measured - reported)
        buffers = ", and the model's buffers" if category == "parameters" else ""
        return f"{rest} more are padding, with which flats divide among ranks{buffers}."
    return (
        f"{LABELS[category]} were measured {bytes_text(reported - measured)} smaller: "
        "not all of it is there yet, or still."
    )


_INDEXED = tuple(axis for axis in AXES if axis != "pp")  # Along pp, the stages and their blocks say more.


class LayoutTable(Table):
    """Rows of `layout_table`."""

    def head(self) -> list[str]:
        """Return the column titles. Columns without values are left out."""
        device = ["device"] if any(row["device"] for row in self) else []
        return [
            "rank",
            "pipeline stage",
            *(f"{axis} index" for axis in _INDEXED if axis in ALWAYS_NAMED or any(row[axis] for row in self)),
            *device,
            *(["host"] if self._hosts else []),
        ]

    def cells(self) -> list[tuple[str, ...]]:
        """Return the text of each row's cells."""
        shown = self.head()
        return [
            tuple(
                text
                for name, text in {
                    "rank": f"{row['rank']}",
                    "pipeline stage": _stages_text(row["stages"], row["blocks"]),
                    **{f"{axis} index": f"{row[axis]}" for axis in _INDEXED},
                    "device": row["device"],
                    "host": row["host"],
                }.items()
                if name in shown
            )
            for row in self
        ]

    @property
    def _hosts(self) -> bool:
        return any(row["host"] for row in self)


def layout_table(
    layout: Layout,
    counts: Sequence[int] = (),
    *,
    chunks: int = 1,
    devices: Sequence[Device] = (),
    hosts: Sequence[str] = (),
) -> LayoutTable:
    """Return one row per rank: rank, stages, blocks, index along each other axis, device, host.

    Args:
        layout: The layout.
        counts: Number of blocks of each pipeline stage; empty if unknown.
        chunks: Stages per pipeline rank. Stage s is on pipeline rank s mod pp.
        devices: Devices by rank.
        hosts: Host names by rank.
    """
    ends = list(accumulate(counts))
    rows = []
    for rank in range(layout.world_size):
        indices = layout.coordinates(rank)
        stages = tuple(range(indices["pp"], layout.pp * chunks, layout.pp))
        rows.append(
            {
                "rank": rank,
                "stages": stages,
                "blocks": tuple((ends[stage] - counts[stage], ends[stage] - 1) for stage in stages) if counts else (),
                **{axis: indices[axis] for axis in _INDEXED},
                "device": devices[rank].name if rank < len(devices) else "",
                "host": hosts[rank] if rank < len(hosts) else "",
            }
        )
    return LayoutTable(rows)


def _stages_text(stages: Sequence[int], blocks: Sequence[tuple[int, int]]) -> str:
    """Return a text like '0 (blocks 0–2), 2 (block 6)'."""
    if not blocks:
        return ", ".join(map(str, stages))
    spans = [f"block {a}" if a == b else f"blocks {a}–{b}" for a, b in blocks]
    return ", ".join(f"{stage} ({span})" for stage, span in zip(stages, spans, strict=True))


class PlacementTable(Table):
    """Rows of `speedlab.placement.ParamPlacement.described`.

    Args:
        rows: The rows.
        rank: The rank that holds the states.
    """

    def __init__(self, rows: list[dict[str, object]], rank: int) -> None:
        super().__init__(rows)
        self.rank = rank

    def head(self) -> tuple[str, ...]:
        """Return the column titles."""
        return HEAD

    def cells(self) -> list[tuple[str, ...]]:
        """Return the text of each row's cells."""
        return [cells(row, self.rank) for row in self]


def placement_of(folder: RunFolder, rank: int) -> PlacementTable:
    """Return the placement table that `rank` of a run wrote last.

    Args:
        folder: The run folder.
        rank: The rank.

    Raises:
        RunFolderError: This rank has written no table.
    """
    return PlacementTable(folder.read_placement(rank), rank)
