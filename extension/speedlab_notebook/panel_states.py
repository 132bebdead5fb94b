"""What a rank will hold, as the panel shows it: stacked bars of the stages side by side, and the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from speedlab.config import BatchConfig, ConfigError, ParallelConfig, RunConfig
from speedlab.hardware import Device
from speedlab.layout import Layout, LayoutError
from speedlab.planner import ModelStates, explain_stage, parameter_count, parameters_by_rank, rank_states
from speedlab.telemetry.figure_style import COLOURS, LABELS
from speedlab.telemetry.text import byte_unit, bytes_text, count_text

STAGES = (0, 1, 2, 3)
CATEGORIES = ("parameters", "gradients", "master_weights", "optimizer_moments")
"""Model states in the order in which they are stacked, bottom to top."""

_WIDTH, _HEIGHT = 360, 208
_LEFT, _TOP, _FLOOR = 58, 16, 178
_BAR = 46
_MOST_BARS = 8
_CAPACITY_IN_SIGHT = 2.5
"""The capacity line is drawn when it is at most so many times the highest bar; else the bars would be too flat."""


def compute_dtype(dtype: str, devices: Sequence[Device]) -> str:
    """The dtype that `precision.dtype` stands for: 'auto' is bfloat16 where every device does it fast."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if all(device.fast_dtype == "bfloat16" for device in devices) else "float32"


def predict(config: RunConfig, devices: Sequence[Device]) -> list[list[ModelStates]]:
    """Model states at stages 0 to 3, of each rank, by formula; one rank on each of `devices`."""
    dtype = compute_dtype(config.precision.dtype, devices)
    try:
        layout = config.layout(len(devices))
        config.batch.resolve(layout.dp)
    except (ConfigError, LayoutError):  # Told beside its field; the picture shows dp alone until it is set right.
        layout, config = (
            Layout(dp=len(devices)),
            config.replace(parallel=ParallelConfig().model_dump(), batch=BatchConfig().model_dump()),
        )
    parameters = parameters_by_rank(config, layout)
    return [rank_states(config, layout, parameters, stage=stage, dtype=dtype) for stage in STAGES]


def heaviest(by_rank: Sequence[ModelStates]) -> ModelStates:
    """Of the rank that holds most: what fits there fits everywhere."""
    return max(by_rank, key=lambda state: state.total)


def smallest(devices: Sequence[Device]) -> Device:
    """The device with the least free memory: what fits there fits everywhere."""
    return min(devices, key=lambda device: device.free_bytes)


def fit_problem(states: Sequence[ModelStates], stage: int, devices: Sequence[Device]) -> str:
    """Why the model states at `stage` cannot be held, and what would help; '' when they can."""
    capacity = min(device.capacity_bytes for device in devices)
    need = states[stage].total
    if need <= capacity:
        return ""
    fitting = [other.stage for other in states if other.total <= capacity]
    way = f"stage {fitting[0]} fits" if fitting else "no stage fits; take more engines or a smaller model"
    return f"stage {stage} needs {bytes_text(need)} on each rank, and a device has {bytes_text(capacity)}; {way}"


def fit_text(states: Sequence[ModelStates], stage: int, devices: Sequence[Device]) -> str:
    """'fits, 5.2 GiB free of 6.0 GiB', or why it does not."""
    if problem := fit_problem(states, stage, devices):
        return f"does not fit: {problem}"
    device = smallest(devices)
    left = device.free_bytes - states[stage].total
    if left < 0:
        return (
            f"tight: stage {stage} needs {bytes_text(states[stage].total)}, and {bytes_text(device.free_bytes)} of "
            f"{bytes_text(device.capacity_bytes)} is free now"
        )
    return f"fits, {bytes_text(left)} free of {bytes_text(device.capacity_bytes)}"


def states_html(
    config: RunConfig, predicted: Sequence[Sequence[ModelStates]], devices: Sequence[Device], *, running: int | None
) -> str:
    """The pictures, the numbers and a sentence, for the stage of `config`; `running` is the stage of a live run."""
    stage = config.zero.stage
    states = [heaviest(by_rank) for by_rank in predicted]
    dtype = compute_dtype(config.precision.dtype, devices)
    count = f"{count_text(parameter_count(config.model))} parameters, {dtype}"
    same = "; with dp 1 there is nobody to share with" if states[0].dp == 1 else f", dp {states[0].dp}"
    if config.parallel.pp > 1 and stage >= 2 and states[0].dp > 1:
        same += "; a pipeline reduces gradients once a step, and until then a rank also holds its own sums whole"
    differ = len({state.total for state in predicted[stage]}) > 1
    which = ", the rank that holds most" if differ else ""
    capacity = min(device.capacity_bytes for device in devices)
    return (
        f'<div class="speedlab-heading">what a rank will hold</div>'
        f'<div class="speedlab-help">by formula, without activations · {escape(count)}{which}</div>'
        f"{_picture(_stage_bars(states, stage, running), capacity)}"
        f"{_by_rank(predicted[stage], capacity) if differ else ''}"
        f"{_table(states, stage)}"
        f'<div class="speedlab-sentence">stage {stage}: {escape(explain_stage(stage) + same)}</div>'
    )


@dataclass(frozen=True, kw_only=True)
class _Bar:
    """A bar of a picture; `kind` is its CSS class."""

    state: ModelStates
    label: str
    kind: str
    below: str = ""
    chosen: bool = False


def _stage_bars(states: Sequence[ModelStates], stage: int, running: int | None) -> list[_Bar]:
    return [
        _Bar(
            state=state,
            label=f"stage {state.stage}",
            kind="speedlab-bar",
            below="now" if state.stage == running else "",
            chosen=state.stage == stage,
        )
        for state in states
    ]


def _by_rank(states: Sequence[ModelStates], capacity: int) -> str:
    """The chosen stage for each rank; of neighbours that hold the same, the first."""
    groups = [list(ranks) for _, ranks in groupby(range(len(states)), key=lambda rank: states[rank])]
    if len(groups) > _MOST_BARS:
        groups = [groups[0], groups[len(groups) // 2], groups[-1]]
    bars = [
        _Bar(state=states[ranks[0]], label=_ranks_text(ranks), kind="speedlab-bar speedlab-rank") for ranks in groups
    ]
    heading = f'<div class="speedlab-help">at stage {states[0].stage}, by rank</div>'
    return heading + _picture(bars, capacity)


def _ranks_text(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{ranks[0]}–{ranks[-1]}"


def _picture(bars: Sequence[_Bar], capacity: int) -> str:
    highest = max(bar.state.total for bar in bars)
    shows_capacity = capacity <= _CAPACITY_IN_SIGHT * highest
    # Where the capacity is only told, its line of text stands above the highest bar's.
    top = max(highest, capacity) * 1.04 if shows_capacity else highest * 1.14
    unit, unit_bytes = byte_unit(top)

    def y(count: float) -> float:
        return _FLOOR - (_FLOOR - _TOP) * count / top

    parts = []
    for tick in _ticks(top / unit_bytes):
        height, label = y(tick * unit_bytes), f"{tick:g} {unit}" if tick else "0"
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{height:.1f}" y2="{height:.1f}" class="speedlab-grid"/>'
            f'<text x="{_LEFT - 5}" y="{height + 4:.1f}" text-anchor="end">{label}</text>'
        )
    step = (_WIDTH - _LEFT) / len(bars)
    parts += [_drawn(bar, _LEFT + step * (index + 0.5), min(_BAR, 0.8 * step), y) for index, bar in enumerate(bars)]
    if shows_capacity:
        height = y(capacity)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{height:.1f}" y2="{height:.1f}" class="speedlab-capacity"/>'
            f'<text x="{_WIDTH}" y="{height - 4:.1f}" text-anchor="end">capacity {bytes_text(capacity)}</text>'
        )
    else:
        parts.append(f'<text x="{_WIDTH}" y="10" text-anchor="end">capacity {bytes_text(capacity)}, far above</text>')
    held = ", ".join(f"{bar.label} {bytes_text(bar.state.total)}" for bar in bars)
    return (
        f'<svg class="speedlab-bars" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(f"model states on each rank: {held}")}">{"".join(parts)}</svg>'
    )


def _ticks(top: float) -> list[float]:
    """Two to five round numbers from 0 up to `top`."""
    power = 10 ** math.floor(math.log10(top))
    step = next(factor * power for factor in (0.2, 0.5, 1, 2, 5) if top / (factor * power) < 5)
    return [number * step for number in range(int(top / step) + 1)]


def _drawn(bar: _Bar, middle: float, width: float, y: Callable[[float], float]) -> str:
    state, left, below, rects = bar.state, middle - width / 2, 0, []
    for category in CATEGORIES:
        count = getattr(state, category)
        if not count:
            continue
        high, low = y(below + count), y(below)
        rects.append(
            f'<rect x="{left:.1f}" y="{high:.1f}" width="{width:g}" height="{low - high:.1f}" '
            f'fill="{COLOURS[category]}"><title>{bar.label}: {LABELS[category]} {bytes_text(count)}</title></rect>'
        )
        below += count
    high = y(below)
    words = [(_FLOOR + 15, bar.label), (_FLOOR + 28, bar.below), (high - 4, bytes_text(state.total))]
    return (
        f'<g class="{bar.kind}{" speedlab-chosen" if bar.chosen else ""}" data-stage="{state.stage}">{"".join(rects)}'
        f'<rect class="speedlab-outline" x="{left:.1f}" y="{high:.1f}" width="{width:g}" '
        f'height="{_FLOOR - high:.1f}"/>'
        + "".join(
            f'<text x="{middle:.1f}" y="{place:.1f}" text-anchor="middle">{escape(text)}</text>'
            for place, text in words
            if text
        )
        + "</g>"
    )


def _table(states: Sequence[ModelStates], stage: int) -> str:
    unit, unit_bytes = byte_unit(max(state.total for state in states))

    def cells(name: str) -> str:
        return "".join(
            f'<td class="{"speedlab-chosen" if state.stage == stage else ""}" data-stage="{state.stage}" '
            f'data-category="{name}">{_number(getattr(state, name) / unit_bytes)}</td>'
            for state in states
        )

    head = "".join(f"<th{' class=speedlab-chosen' if s.stage == stage else ''}>{s.stage}</th>" for s in states)
    rows = "".join(
        f'<tr><th><i style="background:{COLOURS[name]}"></i>{LABELS[name]}</th>{cells(name)}</tr>'
        for name in reversed(CATEGORIES)
    )
    return (
        f'<table class="speedlab-numbers"><thead><tr><th>{unit} on each rank, at stage</th>{head}</tr></thead>'
        f'<tbody>{rows}<tr class="speedlab-total"><th>total</th>{cells("total")}</tr></tbody></table>'
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
