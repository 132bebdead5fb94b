"""One row for each ZeRO stage a run has been through: what was measured beside what the formula says."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from speedlab.hardware import Device, cpu_fast_dtype
from speedlab.planner.formula import model_states, parameter_count
from speedlab.telemetry.feed import Feed
from speedlab.telemetry.records import Event, StepRecord
from speedlab.telemetry.shape import shape_after
from speedlab.telemetry.text import bytes_text, count_text, seconds_text

_STATES = ("parameters", "gradients", "optimizer")


class StageTable(list[dict[str, Any]]):
    """Rows as `stage_table` gives them, which print as a table: bytes on a rank, measured beside the formula's."""

    HEAD = ("stage", *(f"{name} (formula)" for name in _STATES), "speed", "change took")

    def cells(self) -> list[tuple[str, ...]]:
        """The rows as text, in the order of HEAD."""
        return [
            (
                f"{row['stage']}",
                *(f"{bytes_text(row[name])} ({bytes_text(row[f'formula_{name}'])})" for name in _STATES),
                f"{count_text(row['tokens_per_second'])} tokens/s",
                "–" if row["change_seconds"] is None else seconds_text(row["change_seconds"]),
            )
            for row in self
        ]

    def __str__(self) -> str:
        lines = [self.HEAD, *self.cells()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def line(tag: str, cells: Sequence[str]) -> str:
            return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

        return f"<table>{line('th', self.HEAD)}{''.join(line('td', cells) for cells in self.cells())}</table>"


def stage_table(feed: Feed, *, devices: Sequence[Device] = ()) -> StageTable:
    """Rows in the order in which the stages were first used.

    Bytes are for one rank: the largest over the ranks, at the last step of that stage; `optimizer` is moments and
    master weights together; `formula_…` is what ZeRO's formula gives. `tokens_per_second` is the median over the
    stage's steps (the first one apart, which also pays for what is allocated anew). `change_seconds` is how long
    changing to this stage took; None for the first.
    """
    by_stage: dict[int, dict[int, list[StepRecord]]] = {}
    for rank, records in feed.records.items():
        for record in records:
            by_stage.setdefault(record.zero_stage, {}).setdefault(rank, []).append(record)
    return StageTable(
        {
            **_measured(stage, ranks),
            **_formula(feed, stage, devices),
            "change_seconds": _change_seconds(feed.events, stage),
        }
        for stage, ranks in by_stage.items()
    )


def _measured(stage: int, ranks: dict[int, list[StepRecord]]) -> dict[str, Any]:
    ledgers = [records[-1].ledger for records in ranks.values()]
    records = next(iter(ranks.values()))
    speeds = sorted(record.tokens_per_second for record in records[1:] or records)
    return {
        "stage": stage,
        "steps": len(records),
        "parameters": max(ledger.parameters for ledger in ledgers),
        "gradients": max(ledger.gradients for ledger in ledgers),
        "optimizer": max(ledger.optimizer_moments + ledger.master_weights for ledger in ledgers),
        "tokens_per_second": speeds[len(speeds) // 2],
    }


def _formula(feed: Feed, stage: int, devices: Sequence[Device]) -> dict[str, int]:
    """What a rank holds by the formula; size and dtype as the ranks reported them, else by configuration."""
    config = feed.folder.config
    said = next((event.details for event in feed.events if event.kind == "started"), {})
    parameters = said.get("parameters")
    dtype = said.get("dtype") or config.precision.dtype
    if dtype == "auto":
        dtype = devices[0].fast_dtype if devices else cpu_fast_dtype()
    states = model_states(
        parameters if isinstance(parameters, int) else parameter_count(config.model),
        dp=max(1, len(feed.records)),
        stage=stage,
        dtype=str(dtype),
        optimizer=config.optimizer,
    )
    return {
        "formula_parameters": states.parameters,
        "formula_gradients": states.gradients,
        "formula_optimizer": states.optimizer_moments + states.master_weights,
    }


def _change_seconds(events: Sequence[Event], stage: int) -> float | None:
    for event in reversed(events):
        if event.kind == "reshaped" and shape_after(event).get("zero") == stage:
            seconds = event.details.get("seconds")
            return float(seconds) if isinstance(seconds, int | float) else None
    return None
