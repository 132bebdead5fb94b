"""Search the best ways to train a model on given machines, and the largest model that fits. No torch.

1. Enumerate every valid combination (`search_space`): layouts (tp within a host and dividing the heads, pp up to the
   blocks, dp the rest), micro-batches that divide the global batch, ZeRO stages, checkpointing and schedules. Values in
   `Fixed` do not vary.
2. Predict the time of each, which is cheap, and sort by the target.
3. From the best on, predict memory, which costs more, until enough candidates fit. Skip what cannot fit: a larger
   micro-batch than one that did not fit, and model states that alone exceed the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from speedlab.config.validation import partition_words
from speedlab.layout import Layout
from speedlab.placement import MemoryKind
from speedlab.planner.hardware.devices import Machines
from speedlab.planner.layer_shapes import check_shape
from speedlab.planner.memory.offload import offload_words, state_places, state_widths, zero_policy_of
from speedlab.planner.memory.places import PlaceBytes, places
from speedlab.planner.memory.predict import predict_memory
from speedlab.planner.memory.rank_memory import RankMemory
from speedlab.planner.search_space import FREE, Fixed, Space
from speedlab.planner.setup import ModelShape, Setup
from speedlab.planner.time.efficiency import Efficiency, efficiency_of
from speedlab.planner.time.step_time import StepTime, predict_time, rank_parameters
from speedlab.planner.warnings import caution

Target = Literal["fastest", "cheapest", "fewest devices"]
Dtype = Literal["float32", "bfloat16", "float16"]

Memory = Callable[[Setup], Sequence[RankMemory]]
"""A function that returns the memory of each distinct position of a set-up.

`predict_memory`, or the more exact one of a calibrated machine.
"""

USABLE = 0.95
"""Usable share of a device's memory: fragmentation of the allocator is not predicted."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A way to train that fits."""

    setup: Setup
    time: StepTime
    held_bytes: int
    """Bytes on the device of the heaviest rank."""
    free_bytes: int
    """Free bytes on this device."""
    places: tuple[PlaceBytes, ...] = ()
    """Device, and host and disk if they are used, as in `Plan.places`."""

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.setup.layout.world_size

    @property
    def device_seconds(self) -> float:
        """Device-seconds of one token: the cost without the price of a device."""
        return self.devices / self.time.tokens_per_second

    @property
    def reason(self) -> str:
        """The limiting part of a step, and the free memory."""
        return f"limited by {self.time.limit}; {self.free_bytes / 2**30:.1f} GiB left"

    @property
    def caution(self) -> str:
        """Parts of the prediction outside the range compared with measurements; empty if there are none."""
        return caution(self.time)

    def __str__(self) -> str:
        return f"{describe(self.setup)}: {self.time.step_seconds:.3g} s a step; {self.reason}"


def describe(setup: Setup) -> str:
    """Return a set-up in one line: layout, ZeRO stage, batch, checkpointing, schedule, offload."""
    words = [str(setup.layout), f"ZeRO-{setup.zero_stage}", f"micro-batch {setup.micro_size} × {setup.accumulation}"]
    if setup.checkpointing != "none":
        words.append(f"checkpointing {setup.checkpointing}")
    if setup.cuts_inputs:
        words.append(partition_words(tp=setup.layout.tp, sequence=False))
    if setup.sequence_parallel:
        words.append("sequence parallel")
    if setup.layout.pp > 1:
        words.append(schedule_words(setup))
    if away := offload_words(setup.offload):
        words.append(away)
    return ", ".join(words)


def schedule_words(setup: Setup) -> str:
    """Return the schedule as text, for instance '1f1b' or 'interleaved of 2'."""
    return f"{setup.schedule} of {setup.chunks}" if setup.stages_per_rank > 1 else setup.schedule


def search(
    shape: ModelShape,
    machines: Machines,
    *,
    global_size: int,
    target: Target = "fastest",
    dtype: Dtype | None = None,
    efficiency: Efficiency | None = None,
    memory: Memory = predict_memory,
    fixed: Fixed = FREE,
    count: int = 5,
) -> list[Candidate]:
    """Return up to `count` best ways to train `shape`, best first, with at most one for each layout.

    The target "fastest" searches only layouts that use every device, if there are any.

    Args:
        shape: the model.
        machines: the hosts and their devices.
        global_size: sequences of a step, over all ranks.
        target: what the best layout minimises.
        dtype: compute dtype; None: the fast one of the device.
        efficiency: shares of the peak rates; None: those of the device.
        memory: how memory is predicted.
        fixed: choices that the search must keep.
        count: maximum number of results.

    Returns:
        The candidates; empty if nothing fits.

    Raises:
        ValueError: the shape, target or batch is invalid, or the fixed choices leave no layout.
    """
    check_shape(shape)
    if target not in get_args(Target):
        raise ValueError(f"target {target!r} is not one of {', '.join(get_args(Target))}")
    if global_size < 1:
        raise ValueError(f"global_size {global_size} must be at least 1 sequence")
    efficiency = efficiency or efficiency_of(machines.device)
    dtype = dtype or fast_dtype(machines)
    space = Space(shape=shape, machines=machines, dtype=dtype, fixed=fixed)
    setups = list(space.setups(space.most_devices, global_size))
    if target != "fastest" or not setups:
        setups += [setup for size in space.fewer_devices() for setup in space.setups(size, global_size)]
    if not setups:
        raise space.empty(global_size)
    times = [
        predict_time(setup, machines, efficiency)
        for setup in setups
        if _states(setup) <= machines.device.memory_bytes * USABLE
    ]
    times.sort(key=lambda time: _order(time, target))
    return _first_that_fit(times, machines, memory, count)


def _order(time: StepTime, target: Target) -> tuple[float, float]:
    """Return the sort key of a candidate; the smallest is best."""
    devices = time.setup.layout.world_size
    if target == "fastest":
        return time.step_seconds, devices
    if target == "cheapest":
        return devices * time.step_seconds, time.step_seconds
    return devices, time.step_seconds


def _first_that_fit(times: list[StepTime], machines: Machines, memory: Memory, count: int) -> list[Candidate]:
    found: dict[Layout, Candidate] = {}
    # Set-up without its micro-batch -> the smallest micro-batch that did not fit.
    too_large: dict[Setup, float] = {}
    for time in times:
        setup = time.setup
        # Memory grows with the micro-batch, so a larger one of the same kind cannot fit either.
        kind = replace(setup, micro_size=1, accumulation=1)
        if setup.layout in found or setup.micro_size >= too_large.get(kind, math.inf):
            continue
        candidate = fitting(setup, machines, memory, time)
        if candidate is None:
            too_large[kind] = setup.micro_size
            continue
        found[setup.layout] = candidate
        if len(found) == count:
            break
    return list(found.values())


def fitting(setup: Setup, machines: Machines, memory: Memory, time: StepTime) -> Candidate | None:
    """Return a set-up as a candidate, or None if it does not fit.

    Args:
        setup: the set-up to check.
        machines: capacities of device, host and disk.
        memory: how memory is predicted.
        time: the predicted time of this set-up.
    """
    ranks = memory(setup)
    held, found = max(rank.total for rank in ranks), places(ranks, setup, machines)
    if held > machines.device.memory_bytes * USABLE or not all(place.fits for place in found):
        return None
    free = machines.device.memory_bytes - held
    return Candidate(setup=setup, time=time, held_bytes=held, free_bytes=free, places=tuple(found))


def fast_dtype(machines: Machines) -> Dtype:
    """Return the dtype that the device multiplies fastest.

    Args:
        machines: the hosts and their devices. On a tie bfloat16 wins, because float16 needs loss scaling.
    """
    order: tuple[Dtype, ...] = ("bfloat16", "float16", "float32")
    peaks = machines.device.peak_flops
    return max((dtype for dtype in order if dtype in peaks), key=lambda dtype: peaks[dtype])


def _states(setup: Setup) -> float:
    """Return bytes of the model states on the device: a lower bound of the memory of a set-up."""
    held, zero_policy = round(rank_parameters(setup)), zero_policy_of(setup)
    holders = {
        "parameters": zero_policy.parameters,
        "gradients": zero_policy.gradients,
        "master_weights": zero_policy.optimizer_states,
        "optimizer_moments": zero_policy.optimizer_states,
    }
    # "cuda" and "cpu" differ only in masters of offloaded updates, which do not count here.
    widths = state_widths(setup, "cuda")
    return sum(
        widths[state] * holders[state].share(held, setup.layout.replicas)
        for state, where in state_places(zero_policy).items()
        if where is MemoryKind.DEVICE
    )


# ---- the largest model ----


def largest_model(
    machines: Machines,
    *,
    sequence_length: int = 2048,
    vocab_size: int = 51200,
    global_size: int | None = None,
    dtype: Dtype | None = None,
    efficiency: Efficiency | None = None,
    memory: Memory = predict_memory,
    fixed: Fixed = FREE,
    chunked_loss: bool = False,
) -> Candidate | None:
    """Return the largest GPT that fits, in its fastest layout; None if not even the smallest one fits.

    Shapes follow the large published models: 128 elements a head and about hidden / 160 layers. The hidden size varies
    in steps of 256, or of a multiple that the fixed tp divides. A bisection finds the largest.

    Args:
        machines: the hosts and their devices.
        sequence_length: tokens of a sequence.
        vocab_size: tokens of the vocabulary.
        global_size: sequences of a step; None: one micro-batch for each pipeline stage.
        dtype: compute dtype; None: the fast one of the device.
        efficiency: shares of the peak rates; None: those of the device.
        memory: how memory is predicted.
        fixed: choices that the search must keep.
        chunked_loss: whether the loss is computed in chunks of tokens.

    Raises:
        ValueError: the fixed choices leave no layout.
    """
    efficiency = efficiency or efficiency_of(machines.device)
    dtype = dtype or fast_dtype(machines)

    # A step adds this many heads of 128 elements, so that tp always divides them.
    heads = math.lcm(2, fixed.tp or 1)

    def space(steps: int) -> Space:
        hidden = 128 * heads * steps
        shape = ModelShape(
            name=f"gpt, hidden {hidden}",
            layers=max(fixed.least_layers, round(hidden / 160)),
            hidden=hidden,
            heads=heads * steps,
            ffn_hidden=4 * hidden,
            vocab_size=vocab_size,
            sequence_length=sequence_length,
            chunked_loss=chunked_loss,
        )
        return Space(shape=shape, machines=machines, dtype=dtype, fixed=fixed)

    def best(steps: int) -> Candidate | None:
        times = [
            predict_time(setup, machines, efficiency)
            for setup in space(steps).smallest(global_size)
            if _states(setup) <= machines.device.memory_bytes * USABLE
        ]
        times.sort(key=lambda time: -time.tokens_per_second)
        return next(iter(_first_that_fit(times, machines, memory, 1)), None)

    if not any(space(1).smallest(global_size)):
        raise space(1).empty(global_size)
    # Double until a model does not fit, then bisect.
    found, low, high = best(1), 1, 2
    if found is None:
        return None
    while (larger := best(high)) is not None:
        found, low, high = larger, high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if (larger := best(middle)) is not None:
            found, low = larger, middle
        else:
            high = middle
    return found
