"""The panel's prediction: memory of each rank at every ZeRO stage, and speed; as texts, bars and a table in HTML."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from speedlab.cluster.errors import ClusterError
from speedlab.config import BatchConfig, ConfigError, ParallelConfig, RunConfig
from speedlab.display.figure_style import LABELS, swatch
from speedlab.display.formatting import byte_unit, bytes_text, count_text
from speedlab.display.svg import Bar, bars_svg
from speedlab.hardware import Device
from speedlab.layout import LayoutError
from speedlab.planner import explain_stage
from speedlab.planner.figures import places_svg
from speedlab.planner.hardware.links import Link, pretended
from speedlab.planner.hardware.local import hardware_here
from speedlab.planner.memory.rank_memory import RankMemory
from speedlab.planner.plan import Plan, plan_setup
from speedlab.planner.search import Dtype
from speedlab.planner.setup import Setup
from speedlab.planner.time.offload import LIMITING_SHARE
from speedlab.telemetry.records import CATEGORIES

if TYPE_CHECKING:
    from speedlab.cluster import Cluster

STAGES = (0, 1, 2, 3)

_MOST_BARS = 8


def compute_dtype(dtype: Dtype | Literal["auto"], devices: Sequence[Device]) -> Dtype:
    """Return the compute dtype that `precision.dtype` stands for.

    Args:
        dtype: 'auto' means bfloat16 if every device is fast in bfloat16, else float32.
        devices: One device for each rank.
    """
    if dtype != "auto":
        return dtype
    return "bfloat16" if all(device.fast_dtype == "bfloat16" for device in devices) else "float32"


@dataclass(frozen=True, kw_only=True)
class PanelPrediction:
    """The predicted memory and speed of a configuration on the panel's devices."""

    plan: Plan
    """The plan of the configuration at its own stage."""
    by_stage: list[list[RankMemory]]
    """Memory at stages 0 to 3, of each rank."""

    @property
    def stage(self) -> int:
        """The ZeRO stage of the configuration."""
        return self.plan.setup.zero_stage

    @property
    def heaviest(self) -> list[RankMemory]:
        """Memory at stages 0 to 3 of the rank that holds most. If this rank fits, all ranks fit."""
        return [max(by_rank, key=lambda rank: rank.total) for by_rank in self.by_stage]


def predict(config: RunConfig, devices: Sequence[Device], link: Link | None = None) -> PanelPrediction:
    """Predict memory at every stage, and the speed, with one rank on each device.

    Args:
        config: The configuration; if its layout or batch is invalid, plain data parallelism is predicted.
        devices: One device for each rank.
        link: The simulated link between the devices; None takes this machine's.
    """
    dtype = compute_dtype(config.precision.dtype, devices)
    hardware = hardware_here(devices, dtype, config.offload.folder or config.folder)
    hardware = hardware if link is None else hardware.over(link)
    try:
        setup = Setup.of_config(config, len(devices), dtype=dtype)
    except (ConfigError, LayoutError):  # The field's note shows the error. Predict pure dp until it is fixed.
        alone = config.replace(parallel=ParallelConfig().model_dump(), batch=BatchConfig().model_dump())
        setup = Setup.of_config(alone, len(devices), dtype=dtype)
    by_stage = []
    for stage in STAGES:
        by_stage.append(hardware.by_rank(_at_stage(setup, stage)))
    return PanelPrediction(plan=plan_setup(setup, hardware), by_stage=by_stage)


def link_of(cluster: Cluster | None) -> Link | None:
    """Return the simulated link of the cluster.

    Args:
        cluster: The cluster; None if no engines run.

    Returns:
        The link; None if the cluster simulates none or does not run.
    """
    with suppress(ClusterError):
        if cluster is not None and (rate := cluster.link) is not None:
            return pretended(str(rate), bits_per_second=rate.bits_per_second, latency_seconds=rate.latency_seconds)
    return None


def _at_stage(setup: Setup, stage: int) -> Setup:
    """Return the setup at another stage. Below stage 3 parameters stay on the device."""
    if stage == 3:
        return replace(setup, zero_stage=stage)
    return replace(setup, zero_stage=stage, offload=setup.offload.model_copy(update={"parameters": "none"}))


def smallest(devices: Sequence[Device]) -> Device:
    """Return the device with the least free memory. If a model fits there, it fits on every device.

    Args:
        devices: One device for each rank.
    """
    return min(devices, key=lambda device: device.free_bytes)


def fit_problem(prediction: PanelPrediction, devices: Sequence[Device]) -> str:
    """Return why the configuration does not fit.

    Compare with the capacity of the smallest device, and with host memory and disk for offloaded states.

    Args:
        prediction: The prediction of the configuration.
        devices: One device for each rank.

    Returns:
        The problem with its byte counts; '' if the configuration fits.
    """
    capacity = min(device.capacity_bytes for device in devices)
    need = prediction.heaviest[prediction.stage].total
    # Compare with capacity. `fit_text` says 'tight' if less memory is free now.
    if need <= capacity:
        full = [str(place) for place in prediction.plan.places if not place.fits and place.name != "device"]
        return "; ".join(full)
    return f"stage {prediction.stage} needs {bytes_text(need)} on a rank, and a device has {bytes_text(capacity)}"


def advice_text(plan: Plan) -> str:
    """Return the cheapest changes that make the plan fit. The search may take seconds, so call it in a thread.

    Args:
        plan: A plan that does not fit.
    """
    changes = plan.cheapest_changes()
    if not changes:
        return "no change of one or two controls makes it fit; take more engines or a smaller model"
    return f"cheapest changes that fit: {'; or '.join(map(str, changes))}"


def fit_text(prediction: PanelPrediction, devices: Sequence[Device]) -> str:
    """Return whether the configuration fits.

    Args:
        prediction: The prediction of the configuration.
        devices: One device for each rank.

    Returns:
        For example 'fits, 5.2 GiB free of 6.0 GiB', 'tight: …' or 'does not fit: …'.
    """
    if problem := fit_problem(prediction, devices):
        return f"does not fit: {problem}"
    device, need = smallest(devices), prediction.heaviest[prediction.stage].total
    left = device.free_bytes - need
    if left < 0:
        return (
            f"tight: stage {prediction.stage} needs {bytes_text(need)}, and {bytes_text(device.free_bytes)} of "
            f"{bytes_text(device.capacity_bytes)} is free now"
        )
    return f"fits, {bytes_text(left)} free of {bytes_text(device.capacity_bytes)}"


def speed_text(prediction: PanelPrediction) -> str:
    """Return the predicted speed: 'about 41.2 k tokens/s (not yet calibrated)'.

    Args:
        prediction: The prediction of the configuration.
    """
    note = prediction.plan.hardware.note
    return f"about {count_text(prediction.plan.time.tokens_per_second)} tokens/s{f' {note}' if note else ''}"


def limit_text(prediction: PanelPrediction) -> str:
    """Return what limits the speed: 'speed: limited by the update (31% of the step)'.

    Args:
        prediction: The prediction of the configuration.
    """
    return f"speed: limited by {prediction.plan.time.limit}"


def disk_text(plan: Plan) -> str:
    """Return the speed of the disk that holds offloaded states.

    Args:
        plan: A plan with states on disk.

    Returns:
        For example 'disk: reads 1.9 GB/s, writes 1.2 GB/s (measured), not limiting'.
    """
    host, waited = plan.machines.host, plan.time.parts["offload"] / plan.time.step_seconds
    reads, writes = host.disk_read_bytes_per_second / 1e9, host.disk_write_bytes_per_second / 1e9
    known = "measured" if host.disk_measured else "assumed, not measured"
    limits = f"{waited:.0%} of a step waits for it" if waited >= LIMITING_SHARE else "not limiting"
    return f"disk: reads {reads:.1f} GB/s, writes {writes:.1f} GB/s ({known}), {limits}"


def states_html(prediction: PanelPrediction, devices: Sequence[Device], *, running: int | None) -> str:
    """Return the predicted memory as HTML: bars, a table and sentences.

    Args:
        prediction: The prediction of the configuration.
        devices: One device for each rank.
        running: The ZeRO stage of the active run; None without one.
    """
    stage, setup, heaviest = prediction.stage, prediction.plan.setup, prediction.heaviest
    layout = setup.layout
    count = f"{count_text(prediction.plan.parameters)} parameters, {setup.dtype}"
    together = f", dp {layout.dp}" if layout.cp == 1 else f"; the ranks of cp {layout.cp} count with those of dp"
    same = "; with dp 1 there is no other rank to share with" if layout.replicas == 1 else together
    if layout.pp > 1 and stage >= 2 and layout.replicas > 1:
        same += "; a pipeline reduces gradients once a step, and until then a rank also holds its own sums whole"
    by_rank = prediction.by_stage[stage]
    differ = len({rank.total for rank in by_rank}) > 1
    which = ", the rank that holds most" if differ else ""
    capacity = min(device.capacity_bytes for device in devices)
    return (
        f'<div class="speedlab-heading">what a rank will hold</div>'
        f'<div class="speedlab-help">predicted, at the peak of a step · {escape(count)}{which}</div>'
        f"{bars_svg(_stage_bars(heaviest, stage, running), capacity, what='memory on each rank')}"
        f"{_by_rank(stage, by_rank, capacity) if differ else ''}"
        f"{places_svg(by_rank, prediction.plan.places)}"
        f"{_table(heaviest, stage)}"
        f'<div class="speedlab-sentence">stage {stage}: {escape(explain_stage(stage) + same)}</div>'
        f'<div class="speedlab-sentence">{escape(limit_text(prediction))}</div>'
    )


def _stage_bars(states: Sequence[RankMemory], stage: int, running: int | None) -> list[Bar]:
    return [
        Bar(
            label=f"stage {number}",
            categories=state.by_category(),
            below="now" if number == running else "",
            chosen=number == stage,
            data=str(number),
        )
        for number, state in enumerate(states)
    ]


def _by_rank(stage: int, by_rank: Sequence[RankMemory], capacity: int) -> str:
    """Return bars of the chosen stage by rank; neighbours with equal memory share a bar."""
    groups = [list(ranks) for _, ranks in groupby(range(len(by_rank)), key=lambda rank: by_rank[rank].total)]
    if len(groups) > _MOST_BARS:
        groups = [groups[0], groups[len(groups) // 2], groups[-1]]
    bars = [
        Bar(
            label=_ranks_text(ranks),
            categories=by_rank[ranks[0]].by_category(),
            kind="speedlab-bar speedlab-rank",
            data=str(stage),
        )
        for ranks in groups
    ]
    heading = f'<div class="speedlab-help">at stage {stage}, by rank</div>'
    return heading + bars_svg(bars, capacity, what="memory by rank")


def _ranks_text(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{ranks[0]}–{ranks[-1]}"


def _table(states: Sequence[RankMemory], stage: int) -> str:
    unit, unit_bytes = byte_unit(max(state.total for state in states))

    def cells(name: str) -> str:
        return "".join(
            f'<td class="{"speedlab-chosen" if number == stage else ""}" data-stage="{number}" '
            f'data-category="{name}">{_number(getattr(state, name) / unit_bytes)}</td>'
            for number, state in enumerate(states)
        )

    head = "".join(f"<th{' class=speedlab-chosen' if number == stage else ''}>{number}</th>" for number in STAGES)
    shown = [name for name in CATEGORIES if any(getattr(state, name) for state in states)]
    rows = "".join(
        f'<tr><th><i style="background:{swatch(name)}"></i>{LABELS[name]}</th>{cells(name)}</tr>'
        for name in reversed(shown)
    )
    return (
        f'<table class="speedlab-numbers"><thead><tr><th>{unit} on each rank, at stage</th>{head}</tr></thead>'
        f'<tbody>{rows}<tr class="speedlab-total"><th>total</th>{cells("total")}</tr></tbody></table>'
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
