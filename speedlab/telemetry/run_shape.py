"""The shape of a run: ZeRO stage, layout, schedule and micro-batches, which may change while it is on.

`config.json` says what a run began with; every change of shape is told by an event. A configuration of the present
shape is what the panel compares with, and what a change is made from.
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
"""What may be changed of a run that is on."""

_PLACES = ("optimizer", "parameters")
"""What of `offload` may be changed of a run that is on."""
_PIPELINE = frozenset({"pp", "schedule", "chunks"})
"""What a cut of the blocks depends on."""


def present_config(config: RunConfig, events: Sequence[Event], engines: int) -> RunConfig:
    """`config` with the shape that the newest change told of in `events` has left."""
    told = next((shape_after(event) for event in reversed(events) if event.kind == "reshaped"), None)
    if told is None:
        return config
    try:
        return changed_config(config, engines, built_in=False, **told)
    except ValueError:  # Of another version, or of other engines; the configuration is what is left to go by.
        return config


def shape_after(event: Event) -> dict[str, Any]:
    """What a change of shape has left, under the names of CHANGES."""
    after = event.details.get("after")
    told = after if isinstance(after, dict) else event.details  # Once there was only the stage to be told.
    return {name: told[name] for name in CHANGES if name in told}


def layout_in(told: Mapping[str, Any]) -> Layout | None:
    """The layout that an event tells of; None where it tells of none, or of none that can be."""
    axes = {axis: told.get(axis, 1) for axis in AXES}
    sound = "dp" in told and all(isinstance(size, int) and size > 0 for size in axes.values())
    return Layout(**axes) if sound else None


def change_mark(event: Event) -> str:
    """What a change of shape has changed, as short as a plot needs it: '2→3', 'pp 2 × dp 1 × tp 2'; '' for the rest."""
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
    """`config` with `changes` (of CHANGES) on `engines` engines. What is not changed stays, the global batch too, and
    what `offload` does not name; dp follows from the engines, and a cut of the blocks from the pipeline,
    unless they are given.

    `before`: the number of engines that `config` runs on now, where it is another.

    Raises ConfigError or LayoutError, with the rule, the values and what would work, when there is no such run.
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
    # The layout first, and only then how the global batch is shared out in it.
    sizes: dict[str, Any] = {"global_size": batch.global_size, "micro_size": None, "accumulation": None}
    shares = wanted.replace(batch=sizes).layout(engines, built_in=built_in).data_size
    sizes["accumulation"] = changes.get("micro_batches") or _fewest(batch, shares)
    wanted = wanted.replace(batch=sizes)
    wanted.batch.resolve(shares)
    wanted.layout(engines, built_in=built_in)  # Some schedules ask something of the number of micro-batches.
    return wanted


def _fewest(batch: Batch, shares: int) -> int | None:
    """The fewest micro-batches that each of the global batch's `shares` divides into and that are no larger than they
    are now, so that activations take no more memory; None when the global batch does not divide."""
    for count in range(1, batch.global_size // shares + 1):
        parts = count * shares
        if batch.global_size % parts == 0 and batch.global_size <= parts * batch.micro_size:
            return count
    return None


def differences(running: RunConfig, wanted: RunConfig, engines: int) -> dict[str, Any]:
    """The changes that lead from the shape of `running` to that of `wanted`, both on `engines` engines, as
    `changed_config` takes them."""
    before, after = shape_of(running, engines), shape_of(wanted, engines)
    return {name: after[name] for name in CHANGES if before[name] != after[name]}


def shape_of(config: RunConfig, engines: int) -> dict[str, Any]:
    """What may be changed of `config` on `engines` engines, under the names of CHANGES."""
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
