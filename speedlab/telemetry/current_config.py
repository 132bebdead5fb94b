"""The shape of a run: ZeRO stage, layout, schedule, micro-batches and offload, which may change while the run is
active.

`config.json` holds the shape at the start; an event records each later change. `present_config` combines both. The
panel compares its fields with that configuration, and a new change starts from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from speedlab.config import Batch, ConfigError, RunConfig
from speedlab.config.errors import unknown_key
from speedlab.layout import AXES, Layout
from speedlab.telemetry.records import Event

CHANGES = (
    "zero",
    "tp",
    "pp",
    "cp",
    "islands",
    "dp",
    "schedule",
    "chunks",
    "micro_batches",
    "sequence",
    "cp_heads",
    "cp_pad",
    "cut",
    "offload",
)
"""Settings that can change while a run is active."""

_PLACES = ("optimizer", "parameters")
"""The keys of `offload` that can change while a run is active."""
_PIPELINE = frozenset({"pp", "schedule", "chunks"})
"""Settings that make an explicit partition of the blocks (`cut`) invalid."""


def present_config(config: RunConfig, events: Sequence[Event], engines: int) -> RunConfig:
    """Return `config` with the shape that the newest change in `events` has left.

    Args:
        config: The configuration in the run folder.
        events: Events of the run, oldest first.
        engines: Number of engines the run uses now.
    """
    reported = next((shape_after(event) for event in reversed(events) if event.kind == "reshaped"), None)
    if reported is None:
        return config
    try:
        return changed_config(config, engines, built_in=False, **reported)
    except ValueError:  # From another version or another number of engines: fall back to the configuration.
        return config


def shape_after(event: Event) -> dict[str, Any]:
    """Return the shape after a change, with the keys of CHANGES.

    Args:
        event: An event of kind 'reshaped'.
    """
    after = event.details.get("after")
    reported = after if isinstance(after, dict) else event.details  # Old events have only the stage, without "after".
    return {name: reported[name] for name in CHANGES if name in reported}


def layout_in(reported: Mapping[str, Any]) -> Layout | None:
    """Return the layout that an event describes; None if the event has none or an invalid one.

    Args:
        told: Details of an event, or its `before` or `after`.
    """
    axes = {axis: reported.get(axis, 1) for axis in AXES}
    sound = "dp" in reported and all(isinstance(size, int) and size > 0 for size in axes.values())
    return Layout(**axes) if sound else None


def change_mark(event: Event) -> str:
    """Return a short label of a change of shape for plots: '2→3', 'pp 2 × dp 1 × tp 2'; '' for other changes.

    Args:
        event: An event of kind 'reshaped'.
    """
    before, after = event.details.get("before"), shape_after(event)
    stage = before.get("zero") if isinstance(before, dict) else before
    words = []
    if isinstance(stage, int) and "zero" in after and stage != after["zero"]:
        words.append(f"{stage}→{after['zero']}")
    layout = layout_in(after)
    if isinstance(before, dict) and layout is not None and layout != layout_in(before):
        words.append(str(layout))
    return ", ".join(words)


def changed_config(
    config: RunConfig, engines: int, *, before: int | None = None, built_in: bool = True, **changes: Any
) -> RunConfig:
    """Return `config` with `changes` applied, for `engines` engines.

    Everything that `changes` does not name keeps its value, also the global batch and the other keys of `offload`.
    `dp` follows from the number of engines and `cut` from the pipeline, unless `changes` names them.

    Args:
        config: The present configuration.
        engines: Number of engines after the change.
        before: Number of engines that `config` uses now, if it differs from `engines`.
        built_in: Passed to `RunConfig.layout`.
        **changes: New values, with the keys of CHANGES.

    Raises:
        ConfigError: A change is unknown, or the configuration is not possible.
        LayoutError: The engines cannot form this layout.
    """
    if unknown := [name for name in changes if name not in CHANGES]:
        raise ConfigError(unknown_key(unknown[0], CHANGES, {}))
    offload = changes.get("offload") or {}
    if not isinstance(offload, Mapping) or not offload.keys() <= set(_PLACES):
        raise ConfigError(
            f"offload {offload!r}: while a run is on, it takes a dict of {' and '.join(_PLACES)}, each none, host or "
            "disk; the rest is said when it starts"
        )
    before = before or engines
    batch = config.batch.resolve(config.layout(before, built_in=built_in).data_size)
    parallel: dict[str, Any] = {
        name: changes[name] for name in CHANGES if name in changes and name not in ("zero", "micro_batches", "offload")
    }
    if changes.keys() & {"tp", "pp", "cp", "islands"} or before != engines:
        parallel.setdefault("dp", None)
    if changes.keys() & _PIPELINE:
        parallel.setdefault("cut", None)
    wanted = config.replace(
        zero={"stage": changes.get("zero", config.zero.stage)},
        parallel=parallel,
        offload=offload,
    )
    if not parallel and "micro_batches" not in changes:
        return wanted
    # Compute the layout first: the split of the global batch depends on its data size.
    sizes: dict[str, Any] = {"global_size": batch.global_size, "micro_size": None, "accumulation": None}
    shares = wanted.replace(batch=sizes).layout(engines, built_in=built_in).data_size
    sizes["accumulation"] = changes.get("micro_batches") or _fewest(batch, shares)
    wanted = wanted.replace(batch=sizes)
    wanted.batch.resolve(shares)
    wanted.layout(engines, built_in=built_in)  # Check again: some schedules restrict the number of micro-batches.
    return wanted


def _fewest(batch: Batch, shares: int) -> int | None:
    """Return the smallest number of micro-batches that divides each share and does not enlarge a micro-batch.

    Micro-batches do not grow, so activations need no more memory. None if the global batch does not divide by
    `shares`.
    """
    for count in range(1, batch.global_size // shares + 1):
        parts = count * shares
        if batch.global_size % parts == 0 and batch.global_size <= parts * batch.micro_size:
            return count
    return None


def differences(running: RunConfig, wanted: RunConfig, engines: int) -> dict[str, Any]:
    """Return the changes that lead from `running` to `wanted`, as `changed_config` takes them.

    Args:
        running: The present configuration.
        wanted: The configuration to reach.
        engines: Number of engines of both.
    """
    before, after = shape_of(running, engines), shape_of(wanted, engines)
    return {name: after[name] for name in CHANGES if before[name] != after[name]}


def shape_of(config: RunConfig, engines: int) -> dict[str, Any]:
    """Return the shape of `config`, with the keys of CHANGES.

    Args:
        config: A configuration.
        engines: Number of engines.
    """
    layout, parallel = config.layout(engines, built_in=False), config.parallel
    batch = config.batch.resolve(layout.data_size)
    return {
        "zero": config.zero.stage,
        "tp": layout.tp,
        "pp": layout.pp,
        "cp": layout.cp,
        "islands": layout.islands,
        "dp": layout.dp,
        "schedule": parallel.schedule,
        "chunks": parallel.chunks,
        "micro_batches": batch.accumulation,
        "sequence": parallel.sequence,
        "cp_heads": parallel.cp_heads,
        "cp_pad": parallel.cp_pad,
        "cut": parallel.cut,
        "offload": {state: getattr(config.offload, state) for state in _PLACES},
    }
