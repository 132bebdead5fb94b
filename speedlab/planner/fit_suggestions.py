"""Suggest the cheapest changes that make a training fit. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from speedlab.config.sections import Away
from speedlab.planner.hardware.devices import Machines
from speedlab.planner.layer_shapes import kv_heads
from speedlab.planner.memory.predict import predict_memory
from speedlab.planner.search import Candidate, Memory, fast_dtype, fitting
from speedlab.planner.search_space import worth_cutting
from speedlab.planner.setup import Setup, can_be_cut, state_problems
from speedlab.planner.time.efficiency import Efficiency, efficiency_of
from speedlab.planner.time.step_time import StepTime, predict_time


@dataclass(frozen=True, kw_only=True)
class FitChange:
    """A change that makes a training fit."""

    words: str
    candidate: Candidate
    price: float
    """Relative increase of the step time at the same global batch: 0.3 is 30 % longer; negative is faster."""

    options: str
    """Options of `speedlab plan` for this change: '--zero 3 --micro 2 --global 16'."""

    @property
    def setup(self) -> Setup:
        """The set-up with the change."""
        return self.candidate.setup

    def __str__(self) -> str:
        pace = f"{self.price:.0%} slower" if self.price >= 0 else f"{-self.price:.0%} faster"
        return f"{self.words}: {pace}, {self.candidate.free_bytes / 2**30:.1f} GiB left"


def cheapest_change(
    setup: Setup,
    machines: Machines,
    *,
    efficiency: Efficiency | None = None,
    memory: Memory = predict_memory,
    count: int = 3,
) -> list[FitChange]:
    """Return up to `count` changes that make `setup` fit, cheapest first.

    Single changes are tried first; pairs of changes only if too few single ones fit.

    Args:
        setup: the training that does not fit.
        machines: the hosts and their devices.
        efficiency: shares of the peak rates; None: those of the device.
        memory: how memory is predicted.
        count: maximum number of changes.
    """
    efficiency = efficiency or efficiency_of(machines.device)
    before = predict_time(setup, machines, efficiency)
    singles = list(_changes(setup, machines))
    found = _fitting(singles, before, machines, efficiency, memory)
    if len(found) < count:
        known = {change.setup for change in found}
        # Pairs are many and each needs a memory prediction, so they come second.
        pairs = {twice for once in singles for twice in _changes(once, machines)} - known
        found += _fitting(pairs, before, machines, efficiency, memory)
    return found[:count]


def _fitting(
    changed: Iterable[Setup], before: StepTime, machines: Machines, efficiency: Efficiency, memory: Memory
) -> list[FitChange]:
    """Return the changes that fit, cheapest first; at the same price, the one with more free memory first."""
    found = []
    for setup in changed:
        if state_problems(setup) or not can_be_cut(setup, on_host=machines.device.on_host):
            continue
        time = predict_time(setup, machines, efficiency)
        candidate = fitting(setup, machines, memory, time)
        if candidate is not None:
            price = time.step_seconds / before.step_seconds - 1
            words, options = differences(before.setup, setup), options_of(before.setup, setup)
            found.append(FitChange(words=words, candidate=candidate, price=price, options=options))
    return sorted(found, key=lambda change: (change.price, -change.candidate.free_bytes, change.words))


@dataclass(frozen=True, kw_only=True)
class _Setting:
    """A setting that a change may alter: its name, its option of `speedlab plan`, and how to read its value."""

    name: str
    option: str
    value: Callable[[Setup], Any]


_SETTINGS = (
    _Setting(name="ZeRO stage", option="--zero", value=lambda setup: setup.zero_stage),
    _Setting(name="micro-batch", option="--micro", value=lambda setup: setup.micro_size),
    _Setting(name="checkpointing", option="--checkpointing", value=lambda setup: setup.checkpointing),
    _Setting(name="partition inputs", option="--partition-inputs", value=lambda setup: setup.partition_inputs),
    _Setting(name="attention", option="--attention", value=lambda setup: setup.attention),
    _Setting(name="offload.optimizer", option="--offload.optimizer", value=lambda setup: setup.offload.optimizer),
    _Setting(name="offload.parameters", option="--offload.parameters", value=lambda setup: setup.offload.parameters),
    _Setting(name="tp", option="--tp", value=lambda setup: setup.layout.tp),
    _Setting(name="cp", option="--cp", value=lambda setup: setup.layout.cp),
    _Setting(name="pp", option="--pp", value=lambda setup: setup.layout.pp),
    _Setting(name="dtype", option="--dtype", value=lambda setup: setup.dtype),
    _Setting(name="sequence parallel", option="--sequence-parallel", value=lambda setup: setup.sequence_parallel),
    _Setting(name="loss in chunks", option="--chunked-loss", value=lambda setup: setup.shape.chunked_loss),
)


def differences(before: Setup, after: Setup) -> str:
    """Return a change as text: 'ZeRO stage 1 → 3; micro-batch 4 → 2'.

    A switch is only ever turned on, so it appears as its name.

    Args:
        before: the set-up without the change.
        after: the set-up with the change.
    """
    changed = [(each.name, each.value(before), each.value(after)) for each in _SETTINGS]
    return "; ".join(name if new is True else f"{name} {old} → {new}" for name, old, new in changed if old != new)


def options_of(before: Setup, after: Setup) -> str:
    """Return a change as options of `speedlab plan`.

    If micro-batch or layout change, the options include the global batch, so that it stays, and dp.

    Args:
        before: the set-up without the change.
        after: the set-up with the change.
    """
    changed = {each.option: each.value(after) for each in _SETTINGS if each.value(after) != each.value(before)}
    if after.layout != before.layout:
        changed["--dp"] = after.layout.dp
    if (after.layout, after.micro_size) != (before.layout, before.micro_size):
        changed |= {"--micro": after.micro_size, "--global": after.global_size}
    return " ".join(option if value is True else f"{option} {value}" for option, value in changed.items())


def _changes(setup: Setup, machines: Machines) -> Iterator[Setup]:
    """Yield every single change that reduces memory; the global batch stays."""
    shape, layout = setup.shape, setup.layout
    if layout.dp > 1:
        for stage in range(setup.zero_stage + 1, 4):
            yield replace(setup, zero_stage=stage)
    if setup.micro_size > 1 and setup.micro_size % 2 == 0:
        yield replace(setup, micro_size=setup.micro_size // 2, accumulation=setup.accumulation * 2)
    if setup.micro_size > 2:
        yield replace(setup, micro_size=1, accumulation=setup.accumulation * setup.micro_size)
    if setup.checkpointing == "none":
        yield replace(setup, checkpointing="selective")
    if setup.checkpointing != "block":
        yield replace(setup, checkpointing="block")
    if setup.checkpointing != "none" and layout.tp > 1 and not (setup.partition_inputs or setup.sequence_parallel):
        yield replace(setup, partition_inputs=True)
    if setup.attention == "plain":
        yield replace(setup, attention="fused")
    if layout.tp > 1 and not setup.sequence_parallel:
        yield replace(setup, sequence_parallel=True)
    if not shape.chunked_loss:
        yield replace(setup, shape=replace(shape, chunked_loss=True))
    yield from _farther(setup, machines)
    yield from _wider(setup, machines)
    if setup.dtype == "float32" and fast_dtype(machines) != "float32":
        yield replace(setup, dtype=fast_dtype(machines))


def _farther(setup: Setup, machines: Machines) -> Iterator[Setup]:
    """Yield set-ups with more offload. On CPU cores host and device share one memory, so only disk helps."""
    order: tuple[Away, ...] = ("none", "host", "disk")
    offload = setup.offload
    for place in order[1:]:
        if place == "host" and machines.device.on_host:
            continue
        if order.index(place) > order.index(offload.optimizer):
            yield replace(setup, offload=offload.model_copy(update={"optimizer": place}))
        may_go = setup.zero_stage == 3 and offload.optimizer != "none"
        if may_go and order.index(place) > order.index(offload.parameters):
            yield replace(setup, offload=offload.model_copy(update={"parameters": place}))


def _wider(setup: Setup, machines: Machines) -> Iterator[Setup]:
    """Yield set-ups with twice the tensor, context or pipeline ranks, from data-parallel ranks or idle devices."""
    shape, layout = setup.shape, setup.layout
    if layout.dp % 2 == 0:
        dp, accumulation = layout.dp // 2, setup.accumulation * 2
    elif 2 * layout.world_size <= machines.world_size:
        dp, accumulation = layout.dp, setup.accumulation
    else:
        return
    moved = replace(setup, accumulation=accumulation)
    cut = math.gcd(kv_heads(shape), shape.ffn_hidden)
    if cut % (2 * layout.tp) == 0 and machines.per_host % (2 * layout.tp) == 0:
        yield replace(moved, layout=replace(layout, dp=dp, tp=2 * layout.tp))
    longer = replace(moved, layout=replace(layout, dp=dp, cp=2 * layout.cp), cp_heads=None)
    if worth_cutting(longer):
        yield longer
    if shape.depth >= 2 * layout.pp * setup.stages_per_rank:
        yield replace(moved, layout=replace(layout, dp=dp, pp=2 * layout.pp), cut=None)
