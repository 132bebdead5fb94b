"""The best ways to train a model on given machines, the largest model that fits, and the cheapest change that makes
something fit. No torch.

1. Every layout whose axes divide: tp within a host and among the heads, pp among the blocks, dp what is left; then
   every micro-batch that divides the global batch, ZeRO stage, checkpointing and schedule that this engine has.
2. Each is timed, which is cheap, and they are put in order of the target.
3. From the best on, memory is predicted, which is dearer, until enough fit. What cannot fit is not asked: a larger
   micro-batch than one that did not, or model states that fill the device alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from speedlab.layout import Layout
from speedlab.planner.caution import caution
from speedlab.planner.devices import Machines
from speedlab.planner.efficiency import Efficiency, efficiency_of
from speedlab.planner.formula import model_states
from speedlab.planner.memory import predict_memory
from speedlab.planner.rank_memory import RankMemory
from speedlab.planner.setup import Checkpointing, ModelShape, Setup
from speedlab.planner.shapes import check_shape
from speedlab.planner.timing import StepTime, predict_time, rank_parameters

Target = Literal["fastest", "cheapest", "fewest devices"]
Dtype = Literal["float32", "bfloat16", "float16"]

Memory = Callable[[Setup], Sequence[RankMemory]]
"""What each distinct position of a set-up holds; `predict_memory`, or what a calibrated machine knows better."""

USABLE = 0.95
"""Of a device's memory; what an allocator loses to fragments is not predicted."""
_MOST_MICRO = 64
_WIDEST_TP = 16
_DEEPEST_PP = 128


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A way to train that fits."""

    setup: Setup
    time: StepTime
    held_bytes: int
    """Of the rank that holds most."""
    free_bytes: int
    """What is left of its device."""

    @property
    def devices(self) -> int:
        return self.setup.layout.world_size

    @property
    def device_seconds(self) -> float:
        """Of one token: what it costs, whatever a device costs."""
        return self.devices / self.time.tokens_per_second

    @property
    def reason(self) -> str:
        """What limits it, and what memory is left."""
        return f"limited by {self.time.limit}; {self.free_bytes / 2**30:.1f} GiB left"

    @property
    def caution(self) -> str:
        """What of it lies outside what was compared with measurements; empty when nothing does."""
        return caution(self.time)

    def __str__(self) -> str:
        return f"{describe(self.setup)}: {self.time.step_seconds:.3g} s a step; {self.reason}"


def describe(setup: Setup) -> str:
    """A set-up in a line: layout, stage, batch, what is computed again."""
    words = [str(setup.layout), f"ZeRO-{setup.zero_stage}", f"micro-batch {setup.micro_size} × {setup.accumulation}"]
    if setup.checkpointing != "none":
        words.append(f"checkpointing {setup.checkpointing}")
    if setup.sequence_parallel:
        words.append("sequence parallel")
    if setup.layout.pp > 1:
        words.append(setup.schedule + (f" of {setup.chunks}" if setup.schedule == "interleaved" else ""))
    return ", ".join(words)


def search(
    shape: ModelShape,
    machines: Machines,
    *,
    global_size: int,
    target: Target = "fastest",
    dtype: Dtype | None = None,
    efficiency: Efficiency | None = None,
    memory: Memory = predict_memory,
    count: int = 5,
) -> list[Candidate]:
    """Up to `count` best ways to train `shape` with `global_size` sequences a step, best first; of each layout the best
    only. Empty when nothing fits. The fastest is looked for among layouts that use every device, where there are some.

    `dtype`: None takes the device's fast one. Raises ValueError for a shape or target that cannot be.
    """
    check_shape(shape)
    if target not in get_args(Target):
        raise ValueError(f"target {target!r} is not one of {', '.join(get_args(Target))}")
    if global_size < 1:
        raise ValueError(f"global_size {global_size} must be at least 1 sequence")
    efficiency = efficiency or efficiency_of(machines.device)
    dtype = dtype or fast_dtype(machines)
    setups = list(_setups(shape, machines, machines.world_size, global_size, dtype))
    if target != "fastest" or not setups:
        setups += [
            setup
            for size in _world_sizes(machines)
            if size < machines.world_size
            for setup in _setups(shape, machines, size, global_size, dtype)
        ]
    times = [
        predict_time(setup, machines, efficiency)
        for setup in setups
        if _states(setup) <= machines.device.memory_bytes * USABLE
    ]
    times.sort(key=lambda time: _order(time, target))
    return _first_that_fit(times, machines, memory, count)


def _order(time: StepTime, target: Target) -> tuple[float, float]:
    """What is smallest for the best."""
    devices = time.setup.layout.world_size
    if target == "fastest":
        return time.step_seconds, devices
    if target == "cheapest":
        return devices * time.step_seconds, time.step_seconds
    return devices, time.step_seconds


def _first_that_fit(times: list[StepTime], machines: Machines, memory: Memory, count: int) -> list[Candidate]:
    found: dict[Layout, Candidate] = {}
    # What differs only in the micro-batch: the smallest that did not fit.
    too_large: dict[Setup, int] = {}
    for time in times:
        setup = time.setup
        kind = replace(setup, micro_size=1, accumulation=1)
        if setup.layout in found or setup.micro_size >= too_large.get(kind, _MOST_MICRO + 1):
            continue
        candidate = _candidate(setup, machines, memory, time)
        if candidate is None:
            too_large[kind] = setup.micro_size
            continue
        found[setup.layout] = candidate
        if len(found) == count:
            break
    return list(found.values())


def _candidate(setup: Setup, machines: Machines, memory: Memory, time: StepTime) -> Candidate | None:
    """None when it does not fit."""
    held = held_bytes(setup, memory)
    if held > machines.device.memory_bytes * USABLE:
        return None
    return Candidate(setup=setup, time=time, held_bytes=held, free_bytes=machines.device.memory_bytes - held)


def held_bytes(setup: Setup, memory: Memory = predict_memory) -> int:
    """Of the rank that holds most."""
    return max(rank.total for rank in memory(setup))


def fast_dtype(machines: Machines) -> Dtype:
    """What the device multiplies fastest; bfloat16 before float16, which needs loss scaling."""
    order: tuple[Dtype, ...] = ("bfloat16", "float16", "float32")
    peaks = machines.device.peak_flops
    return max((dtype for dtype in order if dtype in peaks), key=lambda dtype: peaks[dtype])


def _states(setup: Setup) -> float:
    """Bytes of model states alone: no set-up holds less."""
    held = round(rank_parameters(setup))
    return model_states(
        held, dp=setup.layout.dp, stage=setup.zero_stage, dtype=setup.dtype, optimizer=setup.optimizer
    ).total


# What there is to choose from


def _world_sizes(machines: Machines) -> list[int]:
    """Powers of two of devices in one host and of whole hosts, and all of them."""
    sizes = {machines.world_size}
    size = 1
    while size <= machines.per_host:
        sizes.add(size)
        size *= 2
    hosts = 1
    while hosts <= machines.hosts:
        sizes.add(hosts * machines.per_host)
        hosts *= 2
    return sorted(sizes)


def _setups(shape: ModelShape, machines: Machines, size: int, global_size: int, dtype: Dtype) -> Iterator[Setup]:
    for layout in _layouts(shape, machines, size):
        if global_size % layout.dp:
            continue
        share = global_size // layout.dp
        for micro in _powers(min(share, _MOST_MICRO)):
            if share % micro:
                continue
            for stage in _stages(layout):
                for checkpointing in ("none", "block"):
                    yield from _schedules(shape, layout, stage, dtype, micro, share // micro, checkpointing)


def _layouts(shape: ModelShape, machines: Machines, size: int) -> Iterator[Layout]:
    kv_heads = shape.kv_heads or shape.heads
    depth = shape.layers + shape.decoder_layers
    for tp in range(1, min(machines.per_host, _WIDEST_TP, size) + 1):
        if size % tp or machines.per_host % tp or shape.heads % tp or kv_heads % tp or shape.ffn_hidden % tp:
            continue
        for pp in range(1, min(depth, _DEEPEST_PP, size // tp) + 1):
            if size // tp % pp == 0:
                yield Layout(dp=size // (tp * pp), tp=tp, pp=pp)


def _stages(layout: Layout) -> tuple[int, ...]:
    if layout.dp == 1:
        return (0,)
    # In a pipeline stages 2 and 3 keep whole gradients during a step and gather once a micro-batch.
    return (0, 1) if layout.pp > 1 else (0, 1, 2, 3)


def _schedules(
    shape: ModelShape,
    layout: Layout,
    stage: int,
    dtype: Dtype,
    micro: int,
    accumulation: int,
    checkpointing: Checkpointing,
) -> Iterator[Setup]:
    setup = Setup(
        shape=shape,
        layout=layout,
        zero_stage=stage,
        dtype=dtype,
        micro_size=micro,
        accumulation=accumulation,
        checkpointing=checkpointing,
        sequence_parallel=layout.tp > 1,
    )
    yield setup
    depth = shape.layers + shape.decoder_layers
    if layout.pp > 1 and accumulation % layout.pp == 0 and depth >= 2 * layout.pp:
        yield replace(setup, schedule="interleaved", chunks=2)


def _powers(most: int) -> Iterator[int]:
    size = 1
    while size <= most:
        yield size
        size *= 2


# The largest model


def largest_model(
    machines: Machines,
    *,
    sequence_length: int = 2048,
    vocab_size: int = 51200,
    dtype: Dtype | None = None,
    efficiency: Efficiency | None = None,
    memory: Memory = predict_memory,
) -> Candidate | None:
    """The largest GPT that fits, in the layout that trains it fastest with one micro-batch a pipeline stage; None when
    not even the smallest does.

    Shapes are those of the large published models: hidden is 128 a head and about 160 a layer, in steps of 256.
    """
    efficiency = efficiency or efficiency_of(machines.device)
    dtype = dtype or fast_dtype(machines)

    def best(steps: int) -> Candidate | None:
        hidden = 256 * steps
        shape = ModelShape(
            name=f"gpt, hidden {hidden}",
            layers=max(2, round(hidden / 160)),
            hidden=hidden,
            heads=hidden // 128,
            ffn_hidden=4 * hidden,
            vocab_size=vocab_size,
            sequence_length=sequence_length,
        )
        times = [
            predict_time(setup, machines, efficiency)
            for setup in _smallest(shape, machines, dtype)
            if _states(setup) <= machines.device.memory_bytes * USABLE
        ]
        times.sort(key=lambda time: -time.tokens_per_second)
        return next(iter(_first_that_fit(times, machines, memory, 1)), None)

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


def _smallest(shape: ModelShape, machines: Machines, dtype: Dtype) -> Iterator[Setup]:
    """Each layout as it holds least: one sequence, blocks computed again, the highest stage."""
    for layout in _layouts(shape, machines, machines.world_size):
        yield from _schedules(shape, layout, max(_stages(layout)), dtype, 1, layout.pp, "block")


# The cheapest change


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change that makes a training fit."""

    words: str
    candidate: Candidate
    price: float
    """How much longer a step of the same global batch takes, relative: 0.3 is 30 % more; negative is faster."""

    @property
    def setup(self) -> Setup:
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
) -> list[Change]:
    """Up to `count` changes that make `setup` fit, cheapest first: single ones, and pairs where too few single ones
    do."""
    efficiency = efficiency or efficiency_of(machines.device)
    before = predict_time(setup, machines, efficiency)
    singles = list(_changes(setup, machines))
    found = _fitting(singles, before, machines, efficiency, memory)
    if len(found) < count:
        known = {change.setup for change in found}
        pairs = {twice for once in singles for twice in _changes(once, machines)} - known
        found += _fitting(pairs, before, machines, efficiency, memory)
    return found[:count]


def _fitting(
    changed: Iterable[Setup], before: StepTime, machines: Machines, efficiency: Efficiency, memory: Memory
) -> list[Change]:
    """Those that fit, cheapest first; of two at the same price the one that leaves more memory."""
    found = []
    for setup in changed:
        time = predict_time(setup, machines, efficiency)
        candidate = _candidate(setup, machines, memory, time)
        if candidate is not None:
            words = differences(before.setup, setup)
            found.append(Change(words=words, candidate=candidate, price=time.step_seconds / before.step_seconds - 1))
    return sorted(found, key=lambda change: (change.price, -change.candidate.free_bytes, change.words))


def differences(before: Setup, after: Setup) -> str:
    """What `_changes` has made of a set-up, in words: 'ZeRO stage 1 → 3; micro-batch 4 → 2'."""
    pairs = (
        ("ZeRO stage", before.zero_stage, after.zero_stage),
        ("micro-batch", before.micro_size, after.micro_size),
        ("checkpointing", before.checkpointing, after.checkpointing),
        ("attention", before.attention, after.attention),
        ("tp", before.layout.tp, after.layout.tp),
        ("pp", before.layout.pp, after.layout.pp),
        ("dtype", before.dtype, after.dtype),
    )
    words = [f"{name} {old} → {new}" for name, old, new in pairs if old != new]
    if after.sequence_parallel and not before.sequence_parallel:
        words.append("sequence parallel")
    if after.shape.chunked_loss and not before.shape.chunked_loss:
        words.append("loss in chunks")
    return "; ".join(words)


def _changes(setup: Setup, machines: Machines) -> Iterator[Setup]:
    """Every single change that holds less; the global batch stays."""
    shape, layout = setup.shape, setup.layout
    if layout.dp > 1:
        for stage in range(setup.zero_stage + 1, 4):
            yield replace(setup, zero_stage=stage)
    if setup.micro_size > 1 and setup.micro_size % 2 == 0:
        yield replace(setup, micro_size=setup.micro_size // 2, accumulation=setup.accumulation * 2)
    if setup.micro_size > 2:
        yield replace(setup, micro_size=1, accumulation=setup.accumulation * setup.micro_size)
    if setup.checkpointing != "block":
        yield replace(setup, checkpointing="block")
    if setup.attention == "plain":
        yield replace(setup, attention="fused")
    if layout.tp > 1 and not setup.sequence_parallel:
        yield replace(setup, sequence_parallel=True)
    if not shape.chunked_loss:
        yield replace(setup, shape=replace(shape, chunked_loss=True))
    yield from _wider(setup, machines)
    if setup.dtype == "float32" and fast_dtype(machines) != "float32":
        yield replace(setup, dtype=fast_dtype(machines))


def _wider(setup: Setup, machines: Machines) -> Iterator[Setup]:
    """Twice the tensor or pipeline ranks, from data-parallel ones where there are, else from idle devices."""
    shape, layout = setup.shape, setup.layout
    if layout.dp % 2 == 0:
        dp, accumulation = layout.dp // 2, setup.accumulation * 2
    elif 2 * layout.world_size <= machines.world_size:
        dp, accumulation = layout.dp, setup.accumulation
    else:
        return
    moved = replace(setup, accumulation=accumulation, cut=None)
    heads = shape.heads if shape.kv_heads is None else shape.kv_heads
    if heads % (2 * layout.tp) == 0 and machines.per_host % (2 * layout.tp) == 0:
        yield replace(moved, layout=Layout(dp=dp, tp=2 * layout.tp, pp=layout.pp))
    if shape.layers + shape.decoder_layers >= 2 * layout.pp * setup.chunks:
        yield replace(moved, layout=Layout(dp=dp, tp=layout.tp, pp=2 * layout.pp))
