"""Measuring this machine for the planner: `speedlab calibrate`.

For each number of engines, as many rank processes measure at once, so that they share memory's bandwidth as a run's
engines would: blocks of the built-in GPT, heads with their loss, the update, collectives, and whole steps of very small
models. `planner.calibration_fit` makes constants of it. On GPUs times are those between events.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from speedlab.bench.ranks import RankSet
from speedlab.config import ModelConfig, RunConfig
from speedlab.layout import Layout
from speedlab.planner.calibration import Calibration
from speedlab.planner.calibration_fit import BlockTime, CollectiveTime, Samples, SetupTime, fit_constants
from speedlab.planner.calibration_store import this_machine
from speedlab.planner.setup import ModelShape, Setup

_BLOCKS = (
    # kind of block, hidden, heads, tokens of a sequence, sequences
    ("rotary", 64, 4, 64, 1),
    ("rotary", 64, 4, 64, 4),
    ("rotary", 192, 3, 128, 1),
    ("rotary", 192, 6, 128, 8),
    ("rotary", 192, 6, 256, 4),
    ("rotary", 384, 6, 64, 2),
    ("rotary", 384, 6, 256, 2),
    ("rotary", 768, 12, 64, 2),
    ("learned", 64, 4, 64, 1),
    ("learned", 64, 4, 128, 4),
    ("learned", 384, 6, 128, 2),
    ("dropping", 64, 4, 64, 1),
    ("dropping", 64, 4, 128, 4),
    ("dropping", 384, 6, 128, 2),
)
"""Of what engines on processors train; each with its feed-forward layer four times as wide."""

_KINDS: dict[str, dict[str, Any]] = {
    "rotary": {},
    "learned": {"position": "learned", "norm": "layer", "bias": True},
    "dropping": {"position": "learned", "norm": "layer", "bias": True, "dropout": 0.1},
}
"""Fields of the model by kind of block (`calibration.kind_of`)."""

_HEADS = ((64, 1024, 64, 1), (64, 1024, 64, 4), (96, 4096, 64, 4), (384, 8192, 128, 2))
"""(hidden, vocabulary, tokens of a sequence, sequences)"""

_DEPTHS = (2, 6)
"""Blocks of the small models whose whole steps are measured."""

_SMALL_RUNS = (
    # ZeRO stage, micro-batches of a step, axis of the layout
    (2, 1, "dp"),
    (1, 3, "dp"),
    (2, 3, "dp"),
    (3, 2, "dp"),
    (1, 2, "tp"),
    (1, 3, "pp"),
)
"""Whole steps that set the engine's own time, in each depth; with one engine all axes are the same."""

_ROW = 3
"""Blocks that are timed in a row: their weights and activations do not all stay in the nearest cache."""

_UPDATED = 1 << 22
"""Parameters of the update that is timed: more than caches hold."""

_PRODUCT = 256
"""Width of the product of matrices that says how fast they are at best."""

_COPIED_BYTES = 1 << 19
"""Of the copy that says how fast bytes can be moved at best: as many as an activation has, so from and to caches."""

_COLLECTIVE_BYTES = (1 << 16, 1 << 20, 1 << 23)
_MESSAGE_BYTES = (1 << 14, 1 << 17, 1 << 20)
"""Of flats; of activations."""

_LARGE_BYTES = 1 << 26

_DTYPES = ("float32", "bfloat16")


def measure(engines: Sequence[int], *, rounds: int = 5, say: Callable[[str], object] = print) -> Calibration:
    """The calibration of this machine for these numbers of engines. `say` hears what is going on.

    On processors, where more engines than cores are asked for, as many engines as cores are measured too: a kernel that
    is measured alone would show nothing of the turns that engines take.
    """
    from speedlab.hardware import available_cores, cuda_devices, memory_bytes

    gpus = cuda_devices()
    cores = len(available_cores())
    memory = sum(gpu.capacity_bytes for gpu in gpus) if gpus else memory_bytes()[0]
    shared = {cores} if not gpus and max(engines) > cores else set[int]()
    samples: list[Samples] = []
    rates: dict[str, float] = {}
    process = 0
    for number in sorted({*engines, *shared}):
        sharing = 1.0 if gpus else max(1.0, number / cores)
        known = {sample.dtype: sample for sample in samples if sample.engines == cores} if sharing > 1 else {}
        threads = 1 if gpus else max(1, cores // number)
        with RankSet(number) as ranks:
            say(f"{_engines(number)}: starting")
            process = max(process, ranks.call(_begin, threads))
            for dtype in _DTYPES:
                say(f"{_engines(number)}, {dtype}: collectives and small steps" + ("" if known else "; kernels"))
                own = ranks.call(_measure_engines, dtype, rounds)
                kernels = known[dtype].shared(sharing) if known else None
                kernels = kernels or _as_samples(dtype, ranks.call(_measure_kernels, dtype, rounds))
                samples.append(_with_engines(kernels, number, threads, own))
                if number == 1:
                    rates |= ranks.call(_plain_rates, dtype, rounds)
    found = Calibration(
        machine=this_machine(),
        device=gpus[0].name if gpus else "cpu",
        cores=0 if gpus else cores,
        memory_bytes=memory,
        created=time.time(),
        rates=rates,
        process_bytes=process,
        constants=(),
    )
    return replace(found, constants=tuple(fit_constants(sample, found) for sample in samples))


def _engines(number: int) -> str:
    return f"{number} engine{'s' if number > 1 else ''}"


def _as_samples(dtype: Any, measured: dict[str, Any]) -> Samples:
    """What was measured of kernels."""
    blocks = [
        BlockTime(setup=_setup(_block_model(*case), case[3], case[4], dtype), forward=forward, backward=backward)
        for case, (forward, backward) in zip(_BLOCKS, measured["blocks"], strict=True)
    ]
    heads = [
        SetupTime(setup=_setup(_head_model(hidden, vocabulary, loss), length, micro, dtype), seconds=seconds)
        for (hidden, vocabulary, length, micro, loss), seconds in zip(_head_cases(), measured["heads"], strict=True)
    ]
    return Samples(
        engines=1,
        threads=1,
        dtype=dtype,
        blocks=blocks,
        heads=heads,
        update_seconds=measured["update"],
        byte_seconds=measured["byte"],
        flop_seconds=measured["flop"],
        collectives=(),
        steps=(),
    )


def _with_engines(kernels: Samples, engines: int, threads: int, measured: dict[str, Any]) -> Samples:
    """`kernels` with what was measured of engines together."""
    dtype: Any = kernels.dtype
    steps = [
        SetupTime(
            setup=Setup.of_config(_small_config(depth, run, dtype, engines), engines, dtype=dtype), seconds=seconds
        )
        for (depth, run), seconds in zip(_small_cases(engines), measured["steps"], strict=True)
    ]
    collectives = [CollectiveTime(name=name, nbytes=size, seconds=s) for name, size, s in measured["collectives"]]
    return replace(kernels, engines=engines, threads=threads, collectives=collectives, steps=steps)


def _small_cases(engines: int) -> list[tuple[int, tuple[int, int, str]]]:
    """(blocks, run) of the small models; each pipeline rank has as many blocks."""
    return [
        (depth * (engines if run[2] == "pp" else 1), run)
        for run in _SMALL_RUNS
        if engines > 1 or run[2] == "dp"
        for depth in _DEPTHS
    ]


def _small_config(depth: int, run: tuple[int, int, str], dtype: str, engines: int) -> RunConfig:
    stage, micro_batches, axis = run
    return RunConfig(
        model=_small_model(depth).model_dump(),
        data={"sequence_length": _SMALL_TOKENS, "vocab_size": 512},
        zero=stage,
        precision=dtype,
        parallel={} if axis == "dp" else {axis: engines},
        batch={"micro_size": 1, "accumulation": micro_batches},
    )


_SMALL_TOKENS = 32


def _block_model(kind: str, hidden: int, heads: int, length: int, micro: int) -> ModelConfig:
    sizes = {"layers": _ROW, "hidden": hidden, "heads": heads, "ffn_hidden": 4 * hidden}
    return ModelConfig(**sizes, vocab_size=1024, context=length, **_KINDS[kind])


def _head_model(hidden: int, vocabulary: int, loss: Any) -> ModelConfig:
    return ModelConfig(layers=1, hidden=hidden, heads=1, ffn_hidden=hidden, vocab_size=vocabulary, loss=loss)


def _head_cases() -> list[tuple[int, int, int, int, str]]:
    return [(*case, loss) for loss in ("chunked", "full") for case in _HEADS]


def _small_model(depth: int) -> ModelConfig:
    return ModelConfig(layers=depth, hidden=32, heads=4, ffn_hidden=128, vocab_size=512, context=_SMALL_TOKENS)


def _setup(model: ModelConfig, length: int, micro: int, dtype: Any) -> Setup:
    return Setup(
        shape=ModelShape.of_config(model, length),
        layout=Layout(pp=1, dp=1, tp=1),
        zero_stage=2,
        dtype=dtype,
        micro_size=micro,
        accumulation=1,
    )


# ---- in a rank process -----------------------------------------------------------------------------------------------


def _begin(threads: int) -> int:
    """Set this rank's threads; returns the bytes that its process holds with the engine loaded."""
    import torch

    import speedlab.engine  # noqa: F401  # part of what an engine's process holds
    from speedlab.engine.memory import PeakMemory, keep_freed_memory

    torch.set_num_threads(threads)
    keep_freed_memory()
    return PeakMemory.resident()


def _measure_kernels(dtype: str, rounds: int) -> dict[str, Any]:
    """Seconds of kernels in `dtype`, the mean over the ranks, which all measure the same at once."""
    return {
        "blocks": [_time_blocks(case, dtype, rounds) for case in _BLOCKS],
        "heads": [_time_head(case, dtype, rounds) for case in _head_cases()],
        "update": _time_update(dtype, rounds),
        "flop": _time_product(_PRODUCT, dtype, rounds) / (2 * _PRODUCT**3),
        "byte": _time_copy(_COPIED_BYTES, rounds) / (2 * _COPIED_BYTES),
    }


def _measure_engines(dtype: str, rounds: int) -> dict[str, Any]:
    """Seconds of what engines do together in `dtype`."""
    import torch.distributed as dist

    engines = dist.get_world_size()
    configs = [_small_config(depth, run, dtype, engines) for depth, run in _small_cases(engines)]
    return {
        "collectives": _time_collectives(dtype, rounds),
        "steps": [_time_steps(config, rounds) for config in configs],
    }


def _seconds(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each call, in turn, the mean over the ranks."""
    import torch
    import torch.distributed as dist

    from speedlab.bench.interleave import interleave
    from speedlab.comm.world import own_device

    dist.barrier()
    times = interleave(calls, rounds=rounds, device=own_device())
    medians = [statistics.median(times[name]) for name in calls]
    total = torch.tensor(medians, dtype=torch.float64, device=own_device())
    dist.all_reduce(total)
    return dict(zip(calls, (total / dist.get_world_size()).tolist(), strict=True))


def _time_blocks(case: tuple[str, int, int, int, int], dtype: str, rounds: int) -> tuple[float, float]:
    """Seconds of one block's forward and backward, in a row of `_ROW`."""
    import torch

    from speedlab.comm.world import own_device
    from speedlab.models import GPT

    _, hidden, _, length, micro = case
    model = GPT(_block_model(*case)).to(own_device(), getattr(torch, dtype))
    x = torch.randn(micro, length, hidden, dtype=getattr(torch, dtype), device=own_device(), requires_grad=True)
    grad = torch.randn_like(x)
    rotation = model.rotation(x)

    def forward() -> Any:
        y = x
        for block in model.blocks:
            y = block(y, rotation)
        return y

    def both() -> None:
        forward().backward(grad)

    found = _seconds({"forward": forward, "both": both}, rounds)
    return found["forward"] / _ROW, max(found["both"] - found["forward"], found["both"] / 10) / _ROW


def _time_head(case: tuple[int, int, int, int, str], dtype: str, rounds: int) -> float:
    import torch

    from speedlab.comm.world import own_device
    from speedlab.models import GPT

    hidden, vocabulary, length, micro, loss = case
    model = GPT(_head_model(hidden, vocabulary, loss)).to(own_device(), getattr(torch, dtype))
    x = torch.randn(micro, length, hidden, dtype=getattr(torch, dtype), device=own_device(), requires_grad=True)
    targets = torch.randint(0, vocabulary, (micro, length), device=own_device())

    def step() -> None:
        found = model.output(x, targets).loss
        assert found is not None
        found.backward()

    return _seconds({"step": step}, rounds)["step"]


def _time_update(dtype: str, rounds: int) -> float:
    """Seconds of a parameter: what the engine does with a partition at the end of a step."""
    import torch

    from cuda_ops.adamw import adamw
    from cuda_ops.grad_stats import grad_stats
    from speedlab.comm.world import own_device

    master, first, second = (torch.zeros(_UPDATED, device=own_device()) for _ in range(3))
    gradient = torch.full((_UPDATED,), 1e-3, dtype=getattr(torch, dtype), device=own_device())
    narrow = torch.zeros_like(gradient) if dtype != "float32" else None

    def update() -> None:
        grad_stats(gradient)
        adamw(
            master, gradient, first, second, narrow,
            lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1,
        )  # fmt: skip

    return _seconds({"update": update}, rounds)["update"] / _UPDATED


def _time_product(width: int, dtype: str, rounds: int) -> float:
    import torch

    from speedlab.comm.world import own_device

    kind = getattr(torch, dtype)
    a, b, out = (torch.zeros(width, width, dtype=kind, device=own_device()) for _ in range(3))
    return _seconds({"product": lambda: torch.mm(a, b, out=out)}, 4 * rounds)["product"]


def _time_copy(nbytes: int, rounds: int) -> float:
    import torch

    from speedlab.comm.world import own_device

    source, target = (torch.zeros(nbytes // 4, device=own_device()) for _ in range(2))
    return _seconds({"copy": lambda: target.copy_(source)}, 4 * rounds)["copy"]


def _time_collectives(dtype: str, rounds: int) -> list[tuple[str, int, float]]:
    """(name, bytes, seconds) of what engines do between them; nothing with one rank."""
    import torch
    import torch.distributed as dist

    from speedlab.comm import Group, Traffic
    from speedlab.comm.world import own_device

    size = dist.get_world_size()
    if size == 1:
        return []
    kind = getattr(torch, dtype)
    group = Group(range(size), Traffic(), own_device())
    found = []
    for nbytes in _COLLECTIVE_BYTES:
        full = group.empty(nbytes // kind.itemsize // size * size, kind).fill_(1)
        own = full.view(size, -1)[group.index]

        def gather(full: Any = full, own: Any = own) -> None:
            group.all_gather(full, own).wait()
            group.settle()

        def scatter(full: Any = full, own: Any = own) -> None:
            group.reduce_scatter(full, own).wait()
            group.settle()

        def reduce(full: Any = full) -> None:
            group.all_reduce(full.zero_()).wait()
            group.settle()

        calls = {"all_gather": gather, "reduce_scatter": scatter, "all_reduce": reduce}
        found += [(name, full.nbytes, seconds) for name, seconds in _seconds(calls, 2 * rounds).items()]
    for nbytes in _MESSAGE_BYTES:
        tensor = torch.zeros(nbytes // kind.itemsize, dtype=kind, device=own_device())
        calls = {"sum": lambda tensor=tensor: group.sum(tensor), "send": _ring_of_messages(group, tensor)}
        found += [(name, nbytes, seconds) for name, seconds in _seconds(calls, 2 * rounds).items()]
    return found


def _ring_of_messages(group: Any, tensor: Any) -> Callable[[], None]:
    """Every rank sends to the next one, and waits for what comes from the one before."""
    import itertools

    import torch

    arriving, tags = torch.empty_like(tensor), itertools.count()

    def call() -> None:
        tag = next(tags)
        sending = group.send(tensor, (group.index + 1) % group.size, tag)
        group.receive(arriving, (group.index - 1) % group.size, tag).wait()
        sending.wait()

    return call


def _time_steps(config: RunConfig, rounds: int) -> float:
    """Seconds of a whole step of `config`."""
    from speedlab.bench.steptimes import training

    with training(config) as step:
        return _seconds({"step": step}, 2 * rounds)["step"]


def _plain_rates(dtype: str, rounds: int) -> dict[str, float]:
    """What people ask for first: products of matrices, copies."""
    found = {
        f"matrix product {width} wide, {dtype} (GFLOP/s)": 2 * width**3 / _time_product(width, dtype, rounds) / 1e9
        for width in (_PRODUCT, 4 * _PRODUCT)
    }
    if dtype == "float32":
        found["copy, 64 MiB (GB/s read and written)"] = 2 * _LARGE_BYTES / _time_copy(_LARGE_BYTES, rounds) / 1e9
    return found
