"""Table of a run's ZeRO stages and layouts: measured bytes next to the formula, and the speed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from speedlab.config import RunConfig
from speedlab.display.formatting import Table, bytes_text, count_text, seconds_text
from speedlab.hardware import Device, cpu_fast_dtype
from speedlab.layout import Layout
from speedlab.planner import parameters_by_rank, rank_states
from speedlab.telemetry.current_config import layout_in, present_config, shape_after
from speedlab.telemetry.feed import Feed
from speedlab.telemetry.records import Event, Ledger, StepRecord

_STATES = ("parameters", "gradients", "optimizer")


class StageTable(Table):
    """Rows of `stage_table`, printed as a table: bytes per rank, measured next to the formula."""

    def head(self) -> list[str]:
        """Return the headings of the columns."""
        layout = ["layout"] if self._has_layouts else []
        away = [f"on {place}" for place in self._places]
        return ["stage", *layout, *(f"{name} (formula)" for name in _STATES), *away, "speed", "change took"]

    def cells(self) -> list[tuple[str, ...]]:
        """Return the texts of the cells, row by row."""
        return [
            (
                f"{row['stage']}",
                *([row["layout"]] if self._has_layouts else []),
                *(f"{bytes_text(row[name])} ({bytes_text(row[f'formula_{name}'])})" for name in _STATES),
                *(bytes_text(row[f"{place}_bytes"]) for place in self._places),
                f"{count_text(row['tokens_per_second'])} tokens/s",
                "–" if row["change_seconds"] is None else seconds_text(row["change_seconds"]),
            )
            for row in self
        ]

    @property
    def _places(self) -> list[str]:
        return [place for place in ("host", "disk") if any(row[f"{place}_bytes"] for row in self)]

    @property
    def _has_layouts(self) -> bool:
        layouts = {row["layout"]: row["dp"] for row in self}
        return len(layouts) > 1 or any(layout != str(Layout(dp=dp)) for layout, dp in layouts.items())


_NOTES = {
    "host": "on host: states that lie in the host's memory, and the buffers through which states on disk pass",
    "disk": "on disk: states in files, each part of which is in memory only while it is used",
}


def stage_table(feed: Feed, *, devices: Sequence[Device] = (), notes: Iterable[str] = ()) -> StageTable:
    """Return one row per ZeRO stage and layout, in the order of first use.

    Columns of a row:

    - `parameters`, `gradients`, `optimizer`: bytes of one rank, the largest over the ranks, at the last step of that
      stage and layout. `optimizer` is moments and master weights together, in every place.
    - `host_bytes`, `disk_bytes`: the part of all these that is stored there.
    - `formula_…`: the bytes that ZeRO's formula gives.
    - `tokens_per_second`: median over warm steps, the later half of the steps. Earlier steps also pay for the start of
      a run (memory, imports, notebook views) or for a change.
    - `change_seconds`: time of the change to this stage and layout; None for the first.

    Args:
        feed: Records of the run.
        devices: Devices by rank; used if the run did not report its dtype.
        notes: Lines to print below the rows.
    """
    changes = [event for event in feed.events if event.kind == "reshaped"]
    shapes = _shapes(feed, changes)
    steps = [event.step for event in changes]
    found: dict[tuple[int, Layout], tuple[int, dict[int, list[StepRecord]]]] = {}
    for rank, records in feed.records.items():
        for record in records:
            number = bisect_left(steps, record.step)  # Number of changes before this step.
            _, ranks = found.setdefault((record.zero_stage, shapes[number][0]), (number, {}))
            ranks.setdefault(rank, []).append(record)
    table = StageTable(
        {
            **_measured(stage, ranks),
            "layout": str(layout),
            "dp": layout.dp,
            **_formula(feed, stage, layout, shapes[number][1], devices),
            "change_seconds": _change_seconds(changes, stage, layout, shapes),
        }
        for (stage, layout), (number, ranks) in found.items()
    )
    table.notes = (*(_NOTES[place] for place in table._places), *notes)
    return table


_Shape = tuple[Layout, RunConfig]


def _shapes(feed: Feed, changes: Sequence[Event]) -> list[_Shape]:
    """Return layout and configuration before the first change, and after each change."""
    config = feed.folder.config
    said = next((event.details for event in feed.events if event.kind == "started"), {})
    layout = layout_in(said) or Layout(dp=max(1, len(feed.records)))
    found = [(layout, config)]
    for number, event in enumerate(changes, 1):
        after = shape_after(event)
        layout = (layout_in(after) if {"pp", "tp"} <= after.keys() else None) or layout
        found.append((layout, present_config(config, changes[:number], layout.world_size)))
    return found


def _measured(stage: int, ranks: dict[int, list[StepRecord]]) -> dict[str, Any]:
    ledgers = [records[-1].ledger for records in ranks.values()]
    records = next(iter(ranks.values()))
    warm = records[len(records) // 2 :]
    return {
        "stage": stage,
        "steps": len(records),
        "parameters": max(ledger.anywhere("parameters") for ledger in ledgers),
        "gradients": max(ledger.anywhere("gradients") for ledger in ledgers),
        "optimizer": max(
            ledger.anywhere("optimizer_moments") + ledger.anywhere("master_weights") for ledger in ledgers
        ),
        **{f"{place}_bytes": max(_held(ledger, place) for ledger in ledgers) for place in ("host", "disk")},
        "tokens_per_second": median(record.tokens_per_second for record in warm),
    }


def _held(ledger: Ledger, place: str) -> int:
    return sum(ledger.by_place().get(place, {}).values())


def _formula(feed: Feed, stage: int, layout: Layout, config: RunConfig, devices: Sequence[Device]) -> dict[str, int]:
    """Return the bytes of the fullest rank by the formula. Size and dtype are those that the ranks reported, else the
    configured.
    """
    said = next((event.details for event in feed.events if event.kind == "started"), {})
    whole = said.get("parameters")
    dtype = said.get("dtype") or config.precision.dtype
    if dtype == "auto":
        dtype = devices[0].fast_dtype if devices else cpu_fast_dtype()
    held = parameters_by_rank(config, layout, whole=whole if isinstance(whole, int) else None)
    states = rank_states(config, layout, [max(held)], stage=stage, dtype=str(dtype))[0]
    return {
        "formula_parameters": states.parameters,
        "formula_gradients": states.gradients,
        "formula_optimizer": states.optimizer_moments + states.master_weights,
    }


def _change_seconds(changes: Sequence[Event], stage: int, layout: Layout, shapes: Sequence[_Shape]) -> float | None:
    for number, event in reversed(list(enumerate(changes, 1))):
        if shapes[number][0] == layout and shapes[number][1].zero.stage == stage:
            seconds = event.details.get("seconds")
            return float(seconds) if isinstance(seconds, int | float) else None
    return None
