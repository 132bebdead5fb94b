"""What a rank will hold, as the panel shows it: stacked bars of the stages side by side, and the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape

from speedlab.config import ConfigError, RunConfig
from speedlab.hardware import Device
from speedlab.planner import ModelStates, explain_stage, model_states, parameter_count
from speedlab.telemetry.figure_style import COLOURS, LABELS
from speedlab.telemetry.text import byte_unit, bytes_text, count_text

STAGES = (0, 1, 2, 3)
CATEGORIES = ("parameters", "gradients", "master_weights", "optimizer_moments")
"""Model states in the order in which they are stacked, bottom to top."""

_WIDTH, _HEIGHT = 360, 208
_LEFT, _TOP, _FLOOR = 58, 16, 178
_BAR = 46
_CAPACITY_IN_SIGHT = 2.5
"""The capacity line is drawn when it is at most so many times the highest bar; else the bars would be too flat."""


def compute_dtype(dtype: str, devices: Sequence[Device]) -> str:
    """The dtype that `precision.dtype` stands for: 'auto' is bfloat16 where every device does it fast."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if all(device.fast_dtype == "bfloat16" for device in devices) else "float32"


def predict(config: RunConfig, devices: Sequence[Device]) -> list[ModelStates]:
    """Model states on each rank at stages 0 to 3, by formula; one rank on each of `devices`."""
    count, dp = parameter_count(config.model), len(devices)
    dtype = compute_dtype(config.precision.dtype, devices)
    states = [model_states(count, dp=dp, stage=stage, dtype=dtype, optimizer=config.optimizer) for stage in STAGES]
    if _accumulates(config, dp) and dtype != "float32":
        # The engine sums the gradients of several micro-batches in float32, and so twice as many bytes.
        states = [replace(state, gradients=2 * state.gradients) for state in states]
    return states


def _accumulates(config: RunConfig, dp: int) -> bool:
    try:
        return config.batch.resolve(dp).accumulation > 1
    except ConfigError:  # Told beside the batch; the picture shows the usual case until it is set right.
        return False


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
    config: RunConfig, states: Sequence[ModelStates], devices: Sequence[Device], *, running: int | None = None
) -> str:
    """The picture, the numbers and a sentence, for the stage of `config`; `running` is the stage of a live run."""
    stage = config.zero.stage
    dtype = compute_dtype(config.precision.dtype, devices)
    count = f"{count_text(parameter_count(config.model))} parameters, {dtype}"
    same = "; with dp 1 there is nobody to share with" if states[0].dp == 1 else f", dp {states[0].dp}"
    return (
        f'<div class="speedlab-heading">what a rank will hold</div>'
        f'<div class="speedlab-help">by formula, without activations · {escape(count)}</div>'
        f"{_picture(states, stage, min(device.capacity_bytes for device in devices), running)}"
        f"{_table(states, stage)}"
        f'<div class="speedlab-sentence">stage {stage}: {escape(explain_stage(stage) + same)}</div>'
    )


def _picture(states: Sequence[ModelStates], stage: int, capacity: int, running: int | None) -> str:
    highest = max(state.total for state in states)
    shows_capacity = capacity <= _CAPACITY_IN_SIGHT * highest
    top = max(highest, capacity) * 1.04 if shows_capacity else highest * 1.04
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
    for index, state in enumerate(states):
        parts.append(_bar(state, index, y, chosen=state.stage == stage, now=state.stage == running))
    if shows_capacity:
        height = y(capacity)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{height:.1f}" y2="{height:.1f}" class="speedlab-capacity"/>'
            f'<text x="{_WIDTH}" y="{height - 4:.1f}" text-anchor="end">capacity {bytes_text(capacity)}</text>'
        )
    else:
        parts.append(f'<text x="{_WIDTH}" y="10" text-anchor="end">capacity {bytes_text(capacity)}, far above</text>')
    chosen = states[stage]
    label = f"model states on each rank: stage {stage} {bytes_text(chosen.total)}"
    return (
        f'<svg class="speedlab-bars" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg>"
    )


def _ticks(top: float) -> list[float]:
    """Two to five round numbers from 0 up to `top`."""
    power = 10 ** math.floor(math.log10(top))
    step = next(factor * power for factor in (0.2, 0.5, 1, 2, 5) if top / (factor * power) < 5)
    return [number * step for number in range(int(top / step) + 1)]


def _bar(state: ModelStates, index: int, y: Callable[[float], float], *, chosen: bool, now: bool) -> str:
    step = (_WIDTH - _LEFT) / len(STAGES)
    left = _LEFT + step * index + (step - _BAR) / 2
    below, rects = 0, []
    for category in CATEGORIES:
        count = getattr(state, category)
        if not count:
            continue
        high, low = y(below + count), y(below)
        rects.append(
            f'<rect x="{left:.1f}" y="{high:.1f}" width="{_BAR}" height="{low - high:.1f}" fill="{COLOURS[category]}">'
            f"<title>stage {state.stage}: {LABELS[category]} {bytes_text(count)}</title></rect>"
        )
        below += count
    middle, high = left + _BAR / 2, y(below)
    is_now = f'<text x="{middle:.1f}" y="{_FLOOR + 28}" text-anchor="middle">now</text>' if now else ""
    return (
        f'<g class="speedlab-bar{" speedlab-chosen" if chosen else ""}" data-stage="{state.stage}">{"".join(rects)}'
        f'<rect class="speedlab-outline" x="{left:.1f}" y="{high:.1f}" width="{_BAR}" height="{_FLOOR - high:.1f}"/>'
        f'<text x="{middle:.1f}" y="{_FLOOR + 15}" text-anchor="middle">stage {state.stage}</text>{is_now}'
        f'<text x="{middle:.1f}" y="{high - 4:.1f}" text-anchor="middle">{bytes_text(state.total)}</text></g>'
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
