"""What a control has changed in memory, speed and placement, in a line: before → after."""

from __future__ import annotations

from speedlab.display.figure_style import LABELS
from speedlab.display.formatting import bytes_text, count_text
from speedlab.placement import Holders, Where
from speedlab.planner.memory.offload import residency_of, state_places, state_widths
from speedlab_notebook.panel_states import Prediction

_SAME = 5e-4
"""A share of a number, below which it stayed."""
_HALF = 0.5
"""Of what was: from there on a factor says more than a share."""
_STATES = {"parameters": "parameter", "gradients": "gradient", "optimizer_moments": "optimizer_state"}


def effect_text(before: Prediction, after: Prediction) -> str:
    """'a rank holds 19.9 MiB → 13.7 MiB (-31.2%) · 41 k → 38 k tokens/s (-7.3%) · parameters: whole on every
    rank → 1/4 a rank'."""
    held = _held(before), _held(after)
    speed = before.plan.time.tokens_per_second, after.plan.time.tokens_per_second
    parts = []
    if share := _share(*held):
        parts.append(f"a rank holds {bytes_text(held[0])} → {bytes_text(held[1])} ({share})")
    if share := _share(*speed):
        parts.append(f"{count_text(speed[0])} → {count_text(speed[1])} tokens/s ({share})")
    was, now = before.plan.setup.layout, after.plan.setup.layout
    if was != now:
        parts.append(f"layout {was} → {now}")
    old, new = _placed(before), _placed(after)
    parts += [f"{LABELS[name]}: {old[name]} → {new[name]}" for name in old if old[name] != new[name]]
    return " · ".join(parts) or "memory, speed and placement stay as they are"


def _held(prediction: Prediction) -> int:
    """Bytes of the rank that holds most."""
    return prediction.heaviest[prediction.stage].total


def _share(before: float, after: float) -> str:
    """'+12%', '3.1 times as much'; '' where it stayed."""
    ratio = after / before
    if abs(ratio - 1) <= _SAME:
        return ""
    return f"{ratio - 1:+.1%}" if _HALF <= ratio < 1 / _HALF else f"{ratio:.2g} times as much"


def _placed(prediction: Prediction) -> dict[str, str]:
    """State -> what each rank has of it, and where: '1/4 on disk'."""
    setup, device = prediction.plan.setup, "cpu" if prediction.plan.machines.device.on_host else "cuda"
    residency, ranks = residency_of(setup, device), setup.layout.replicas
    widths, places = state_widths(setup, device), state_places(residency)
    found = {}
    for name, state in _STATES.items():
        part = f"1/{ranks} a rank" if residency.of(state) is Holders.PARTITIONED else "whole on every rank"
        where = "" if places[name] is Where.DEVICE else f", {places[name].value}"
        found[name] = f"{part}{where}" if widths[name] else "none"
    return found
