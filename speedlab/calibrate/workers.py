"""Run the measurements of `speedlab calibrate` on the rank processes, and whole trainings for benchmarks.

All ranks measure the same at the same time; results are means over the ranks. On GPUs, times are those between CUDA
events, or after a synchronisation.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from speedlab.calibrate.cases import (
    ROW,
    BlockCase,
    CaseSizes,
    HeadCase,
    block_model,
    head_cases,
    head_model,
    larger_configs,
    sizes_on,
    small_configs,
)
from speedlab.config import PrecisionConfig, RunConfig


@contextmanager
def training(config: RunConfig) -> Iterator[Callable[[], object]]:
    """Yield a function that trains one step of `config` on this rank. The engine is destroyed afterwards.

    Args:
        config: model, layout and batch; the tokens are random.
    """
    import torch
    import torch.distributed as dist

    from speedlab.engine import initialize
    from speedlab.models import GPT

    engine, *_ = initialize(model=lambda: GPT(config.model), config=config)
    shape = (2, config.batch.resolve(engine.layout.data_size).micro_size, config.data.sequence_length)
    generator = torch.Generator().manual_seed(engine.mesh.data_index)
    drawn = torch.randint(0, config.model.vocab_size, shape, generator=generator)
    tokens, targets = drawn.to(engine.world.device)
    try:
        yield lambda: engine.train_batch([(tokens, targets)] * engine.accumulation)
    finally:
        engine.destroy(keep_parameters=False)
        dist.barrier()


_UPDATED = 1 << 22
"""Parameters of the timed update, more than fit into caches."""

_COLLECTIVE_BYTES = (1 << 16, 1 << 20, 1 << 23)
_MESSAGE_BYTES = (1 << 14, 1 << 17, 1 << 20)
"""Sizes of activations; those above are of flats."""

_LARGE_BYTES = 1 << 26

_TRAINING_ROUNDS = 3
"""Rounds of whole steps, fewer than of kernels because they take longer and vary less."""


def begin(threads: int) -> int:
    """Set the number of threads of this rank.

    Args:
        threads: threads of torch.

    Returns:
        Bytes of the process with the engine loaded.
    """
    import torch
    import torch._dynamo  # torch imports it with the first optimizer.

    import speedlab.engine  # noqa: F401  # part of what an engine's process holds
    from speedlab.engine.memory_ledger import PeakMemory, keep_freed_memory

    torch.set_num_threads(threads)
    keep_freed_memory()
    return PeakMemory.resident()


def _sizes() -> CaseSizes:
    from speedlab.comm.world import own_device

    return sizes_on(own_device().type)


def measure_kernels(dtype: str, rounds: int) -> dict[str, Any]:
    """Return the seconds of kernels.

    Args:
        dtype: the compute dtype.
        rounds: rounds of each measurement.
    """
    sizes = _sizes()
    # Twice, at different times: a disturbance of one must not become the lower bound.
    bounds = [_bounds(dtype, rounds)]
    steps = [_block_step(case, dtype) for case in sizes.blocks]
    steps += [_head_step(case, dtype) for case in head_cases(sizes)]
    *found, (update,) = _in_rounds([*steps, _update_step(dtype)], rounds)
    bounds.append(_bounds(dtype, rounds))
    flop, byte = (min(each) for each in zip(*bounds, strict=True))
    blocks, heads = found[: len(sizes.blocks)], found[len(sizes.blocks) :]
    return {
        "blocks": [(forward / ROW, backward / ROW) for forward, backward in blocks],
        "heads": [seconds for (seconds,) in heads],
        "update": update / _UPDATED,
        "flop": flop,
        "byte": byte,
    }


def _bounds(dtype: str, rounds: int) -> tuple[float, float]:
    """Return seconds of a FLOP in a bare matrix product, and of a byte in a bare copy."""
    sizes = _sizes()
    product = _time_product(sizes.product, dtype, rounds) / (2 * sizes.product**3)
    return product, _time_copy(sizes.copied_bytes, rounds) / (2 * sizes.copied_bytes)


def measure_engines(dtype: str, rounds: int) -> dict[str, Any]:
    """Return the seconds of collectives and whole steps.

    Args:
        dtype: the compute dtype.
        rounds: rounds of each measurement.
    """
    import torch.distributed as dist

    engines, sizes = dist.get_world_size(), _sizes()
    return {
        "collectives": _time_collectives(dtype, rounds),
        "steps": _time_trainings(small_configs(dtype, engines)),
        "larger steps": _time_trainings(larger_configs(sizes, dtype)),
    }


def _seconds(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each call, interleaved, as a mean over the ranks."""
    import torch.distributed as dist

    from speedlab.calibrate.interleave import interleave
    from speedlab.comm.world import own_device

    dist.barrier()
    times = interleave(calls, rounds=rounds, device=own_device())
    return dict(zip(calls, _over_ranks([statistics.median(times[name]) for name in calls]), strict=True))


def _over_ranks(seconds: Sequence[float]) -> list[float]:
    """Return the mean over the ranks."""
    import torch
    import torch.distributed as dist

    from speedlab.comm.world import own_device

    total = torch.tensor(seconds, dtype=torch.float64, device=own_device())
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def _in_rounds(steps: Sequence[Callable[[], tuple[float, ...]]], rounds: int) -> list[tuple[float, ...]]:
    """Return the seconds of each step function, interleaved over rounds, as a mean over the ranks.

    The speed of the machine changes within seconds, for all steps of a round alike. So each round is first scaled to
    the length of the median round.
    """
    import torch.distributed as dist

    if not steps:
        return []
    for step in steps:
        step()
    times = []
    for _ in range(rounds):
        dist.barrier()
        times.append([step() for step in steps])
    whole = [sum(sum(each) for each in turn) for turn in times]
    # Rounds in which the whole machine was slow or fast are scaled to the median.
    usual = statistics.median(whole)
    level = [usual / each for each in whole]
    found = []
    for each in zip(*times, strict=True):
        parts = zip(*each, strict=True)
        found.append(tuple(_over_ranks([statistics.median(_scaled(part, level)) for part in parts])))
    return found


def _scaled(values: Sequence[float], by: Sequence[float]) -> list[float]:
    return [value * factor for value, factor in zip(values, by, strict=True)]


def _block_step(case: BlockCase, dtype: str) -> Callable[[], tuple[float, ...]]:
    """Return a function that runs `ROW` blocks forward and backward, and returns the seconds of both."""
    import torch

    from speedlab.comm.world import own_device
    from speedlab.engine.kernels import CpuKernelOverrides
    from speedlab.models import GPT

    _, hidden, _, length, micro = case
    model = GPT(block_model(case)).to(own_device(), getattr(torch, dtype))
    x = torch.randn(micro, length, hidden, dtype=getattr(torch, dtype), device=own_device(), requires_grad=True)
    grad = torch.randn_like(x)
    rotation = model.rotation(x)
    kernels = CpuKernelOverrides([model], PrecisionConfig(), own_device(), x.dtype)

    def step() -> tuple[float, ...]:
        with kernels.under_way():
            begin = _now()
            y = x
            for block in model.blocks:
                y = block(y, rotation)
            middle = _now()
            y.backward(grad)
            return middle - begin, _now() - middle

    return step


def _now() -> float:
    """Return the time after all started kernels have finished."""
    import torch

    from speedlab.comm.world import own_device

    if own_device().type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _head_step(case: HeadCase, dtype: str) -> Callable[[], tuple[float, ...]]:
    """Return a function that runs a head with its loss, forward and backward."""
    import torch

    from speedlab.comm.world import own_device
    from speedlab.engine.kernels import CpuKernelOverrides
    from speedlab.models import GPT

    hidden, vocabulary, length, micro, _ = case
    model = GPT(head_model(case)).to(own_device(), getattr(torch, dtype))
    x = torch.randn(micro, length, hidden, dtype=getattr(torch, dtype), device=own_device(), requires_grad=True)
    targets = torch.randint(0, vocabulary, (micro, length), device=own_device())
    CpuKernelOverrides([model], PrecisionConfig(), own_device(), x.dtype)  # For the products; it has no attention.

    def step() -> tuple[float, ...]:
        begin = _now()
        found = model.output(x, targets).loss
        assert found is not None
        found.backward()
        return (_now() - begin,)

    return step


def _update_step(dtype: str) -> Callable[[], tuple[float, ...]]:
    """Return a function that runs the engine's update of `_UPDATED` parameters."""
    import torch

    from cuda_ops.adamw import adamw
    from cuda_ops.grad_stats import grad_stats
    from speedlab.comm.world import own_device

    master, first, second = (torch.zeros(_UPDATED, device=own_device()) for _ in range(3))
    gradient = torch.full((_UPDATED,), 1e-3, dtype=getattr(torch, dtype), device=own_device())
    narrow = torch.zeros_like(gradient) if dtype != "float32" else None

    def step() -> tuple[float, ...]:
        begin = _now()
        grad_stats(gradient)
        adamw(
            master, gradient, first, second, narrow,
            lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1,
        )  # fmt: skip
        return (_now() - begin,)

    return step


def _time_product(width: int, dtype: str, rounds: int) -> float:
    import torch

    from cuda_ops import onednn_matmul
    from speedlab.comm.world import own_device

    kind = getattr(torch, dtype)
    a, b, out = (torch.zeros(width, width, dtype=kind, device=own_device()) for _ in range(3))
    return _seconds({"product": lambda: onednn_matmul.mm(a, b, out)}, 4 * rounds)["product"]


def _time_copy(nbytes: int, rounds: int) -> float:
    import torch

    from speedlab.comm.world import own_device

    source, target = (torch.zeros(nbytes // 4, device=own_device()) for _ in range(2))
    return _seconds({"copy": lambda: target.copy_(source)}, 4 * rounds)["copy"]


def _time_collectives(dtype: str, rounds: int) -> list[tuple[str, int, float]]:
    """Return (name, bytes, seconds) of the collectives between engines; empty with one rank."""
    import torch
    import torch.distributed as dist

    from speedlab.comm import CommStats, Group
    from speedlab.comm.world import own_device

    size = dist.get_world_size()
    if size == 1:
        return []
    kind = getattr(torch, dtype)
    group = Group(range(size), CommStats(), own_device())
    found = []
    for nbytes in _COLLECTIVE_BYTES:
        full = group.empty(nbytes // kind.itemsize // size * size, kind).fill_(1)
        own = full.view(size, -1)[group.index]

        def gather(full: Any = full, own: Any = own) -> None:
            group.all_gather(full, own).wait()
            group.wait_until_all_read()

        def scatter(full: Any = full, own: Any = own) -> None:
            group.reduce_scatter(full, own).wait()
            group.wait_until_all_read()

        def reduce(full: Any = full) -> None:
            group.all_reduce(full.zero_()).wait()
            group.wait_until_all_read()

        calls = {"all_gather": gather, "reduce_scatter": scatter, "all_reduce": reduce}
        found += [(name, full.nbytes, seconds) for name, seconds in _seconds(calls, 2 * rounds).items()]
    for nbytes in _MESSAGE_BYTES:
        tensor = torch.zeros(nbytes // kind.itemsize, dtype=kind, device=own_device())
        calls = {"sum": lambda tensor=tensor: group.sum(tensor), "send": _ring_of_messages(group, tensor)}
        found += [(name, nbytes, seconds) for name, seconds in _seconds(calls, 2 * rounds).items()]
    return found


def _ring_of_messages(group: Any, tensor: Any) -> Callable[[], None]:
    """Return a function in which every rank sends to the next one and receives from the previous one."""
    import itertools

    import torch

    arriving, tags = torch.empty_like(tensor), itertools.count()

    def call() -> None:
        tag = next(tags)
        sending = group.send(tensor, (group.index + 1) % group.size, tag)
        group.receive(arriving, (group.index - 1) % group.size, tag).wait()
        sending.wait()

    return call


def _time_trainings(configs: Sequence[RunConfig]) -> list[float]:
    """Return the seconds of a whole step of each configuration, interleaved."""
    from contextlib import ExitStack

    def timed(step: Callable[[], object]) -> Callable[[], tuple[float, ...]]:
        def call() -> tuple[float, ...]:
            begin = _now()
            step()
            return (_now() - begin,)

        return call

    with ExitStack() as trainings:
        steps = [timed(trainings.enter_context(training(config))) for config in configs]
        return [seconds for (seconds,) in _in_rounds(steps, _TRAINING_ROUNDS)]


def plain_rates(dtype: str, rounds: int) -> dict[str, float]:
    """Return simple rates for display: matrix products and copies.

    Args:
        dtype: the compute dtype.
        rounds: rounds of each measurement.
    """
    found = {
        f"matrix product {width} wide, {dtype} (GFLOP/s)": 2 * width**3 / _time_product(width, dtype, rounds) / 1e9
        for width in (_sizes().product, 4 * _sizes().product)
    }
    if dtype == "float32":
        found["copy, 64 MiB (GB/s read and written)"] = 2 * _LARGE_BYTES / _time_copy(_LARGE_BYTES, rounds) / 1e9
    return found
