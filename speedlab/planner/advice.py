"""Advise whether to send less on these links: compressed momenta, ZeRO++, DiLoCo islands. No torch."""

from __future__ import annotations

from dataclasses import replace

from speedlab.config import OptimizerConfig
from speedlab.planner.hardware.local import Hardware
from speedlab.planner.setup import Setup
from speedlab.planner.time.step_time import StepTime

_WORTH = 1.25
"""Minimum speed-up by islands. Below it, plain data parallelism is better, because islands train differently."""

_WARM_UP = 0.2
"""Assumed share of a run that is warm-up, if unknown."""

_LEAST_GAIN = 1.05
"""Minimum speed-up that justifies rounding values."""


def exchange_advice(setup: Setup, hardware: Hardware, time: StepTime) -> str:
    """Compare a step that sends less with the same step without compression.

    Args:
        setup: the training.
        hardware: machines, and how their time is predicted.
        time: the predicted time of this set-up.

    Returns:
        One sentence; empty for a set-up that sends everything in full.
    """
    if setup.layout.islands > 1:
        return _islands_advice(setup, hardware, time)
    if setup.zero.switches:
        return _quantized(setup, hardware, time)
    if not setup.optimizer.sums_itself:
        return ""
    name, plain = setup.optimizer.name, setup.optimizer.plain
    if setup.layout.replicas == 1:
        return f"one data-parallel rank exchanges nothing: {name} freezes its variance for nothing; take {plain}"
    usual = hardware.time(replace(setup, optimizer=OptimizerConfig(name=plain))).step_seconds
    gain = usual / time.step_seconds
    if gain < _LEAST_GAIN:
        return (
            f"on these links {plain}'s steps take {1e3 * usual:,.1f} ms, compressed ones "
            f"{1e3 * time.step_seconds:,.1f} ms: compression costs more than it saves; take {plain}"
        )
    run = 1 / (_WARM_UP + (1 - _WARM_UP) / gain)
    return (
        f"compressed steps are {_times(gain)} times as fast as {plain}'s here, a run with a warm-up of {_WARM_UP:.0%} "
        f"{_times(run)} times"
    )


def _islands_advice(setup: Setup, hardware: Hardware, time: StepTime) -> str:
    layout, every = setup.layout, setup.outer.every_steps
    merged = replace(layout, islands=1, dp=layout.dp * layout.islands)
    usual = hardware.time(replace(setup, layout=merged)).step_seconds
    gain = usual / time.step_seconds
    if gain < _WORTH:
        return (
            f"on these links plain data parallelism takes {1e3 * usual:,.1f} ms a step, islands that meet every "
            f"{every} steps {1e3 * time.step_seconds:,.1f} ms: one gradient for all trains better; take islands 1"
        )
    made = _times(gain)
    return f"islands that meet every {every} steps make {made} steps in the time of one with plain data parallelism"


def _quantized(setup: Setup, hardware: Hardware, time: StepTime) -> str:
    if setup.layout.replicas == 1:
        return "one data-parallel rank sends nothing, so that nothing is quantised; leave ZeRO++'s switches off"
    plain = replace(setup, quantized_weights=False, quantized_gradients=False, secondary_partition=None)
    usual, own = hardware.time(plain).step_seconds, time.step_seconds
    if usual < _LEAST_GAIN * own:
        return (
            f"on these links plain ZeRO is as fast ({1e3 * usual:,.1f} ms, with {setup.zero.switches} {1e3 * own:,.1f} "
            "ms), and nothing is rounded; leave ZeRO++'s switches off"
        )
    return f"steps are {_times(usual / own)} times as fast as plain ZeRO's here, with {setup.zero.switches}"


def _times(gain: float) -> str:
    return f"{gain:,.{0 if gain >= 10 else 1}f}"
