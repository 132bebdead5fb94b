"""Measure this machine for the planner: `speedlab calibrate`.

1. For each number of engines, start that many rank processes, which measure concurrently and share the memory bandwidth
   like the engines of a run.
2. Measure blocks of the built-in GPT, heads with loss, the update, collectives, and whole steps.
3. Fit constants to the times (`planner.calibration.fit`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from speedlab.calibrate import workers
from speedlab.calibrate.cases import (
    DTYPES,
    CaseSizes,
    block_model,
    head_cases,
    head_model,
    larger_configs,
    setup_of,
    sizes_on,
    small_configs,
)
from speedlab.calibrate.rank_processes import RankSet
from speedlab.config import RunConfig
from speedlab.planner.calibration import Calibration
from speedlab.planner.calibration.fit import BlockTime, CollectiveTime, Samples, SetupTime, fit_all
from speedlab.planner.calibration.store import this_machine
from speedlab.planner.setup import Setup


def measure(engines: Sequence[int], *, rounds: int = 4, say: Callable[[str], object] = print) -> Calibration:
    """Return the calibration of this machine.

    On CPUs, if more engines than cores are asked for, one engine for each core is measured, too: kernels are measured
    without sharing a core, and scaled for engines that take turns.

    Args:
        engines: numbers of engines to measure with.
        rounds: rounds of each measurement.
        say: called with progress messages.
    """
    from speedlab.hardware import available_cores, cuda_devices, memory_bytes

    gpus = cuda_devices()
    sizes = sizes_on("cuda" if gpus else "cpu")
    cores = len(available_cores())
    memory = sum(gpu.capacity_bytes for gpu in gpus) if gpus else memory_bytes()[0]
    # Also measure one engine for each core, whose kernels the larger numbers reuse.
    shared = {cores} if not gpus and max(engines) > cores else set[int]()
    threads = {number: 1 if gpus else max(1, cores // number) for number in sorted({*engines, *shared})}
    samples: list[Samples] = []
    with _started(threads, say) as (sets, process):
        for number, ranks in sets.items():
            # More engines than cores: scale the kernels measured with one engine for each core.
            taking_turns = not gpus and number > cores
            known = {sample.dtype: sample for sample in samples if sample.engines == cores} if taking_turns else {}
            for dtype in DTYPES:
                say(f"{_engines(number)}, {dtype}: collectives and whole steps" + ("" if known else "; kernels"))
                own = ranks.call(workers.measure_engines, dtype, rounds)
                if known:
                    kernels = known[dtype].shared(number / cores)
                else:
                    kernels = _as_samples(sizes, dtype, ranks.call(workers.measure_kernels, dtype, rounds))
                samples.append(_with_engines(sizes, kernels, number, threads[number], own))
        alone = sets.get(1)
        rates = [alone.call(workers.plain_rates, dtype, rounds) for dtype in DTYPES] if alone else []
    found = Calibration(
        machine=this_machine(),
        device=gpus[0].name if gpus else "cpu",
        cores=0 if gpus else cores,
        memory_bytes=memory,
        created=time.time(),
        rates={name: value for each in rates for name, value in each.items()},
        process_bytes=process,
        constants=(),
    )
    return replace(found, constants=tuple(fit_all(samples, found)))


@contextmanager
def _started(threads: Mapping[int, int], say: Callable[[str], object]) -> Iterator[tuple[dict[int, RankSet], int]]:
    """Yield rank processes for each number of engines, and the bytes of one process.

    The processes load at the same time, and sleep until their turn.
    """
    say(f"starting the processes of {', '.join(map(str, threads))} engines")
    with ExitStack() as stack:
        sets = {number: stack.enter_context(RankSet(number)) for number in threads}
        with ThreadPoolExecutor(len(sets)) as pool:
            held = pool.map(lambda number: sets[number].call(workers.begin, threads[number]), sets)
            process = max(held)
        yield sets, process


def _engines(number: int) -> str:
    return f"{number} engine{'s' if number > 1 else ''}"


def _as_samples(sizes: CaseSizes, dtype: Any, measured: dict[str, Any]) -> Samples:
    """Convert the measurements of kernels."""
    blocks = [
        BlockTime(setup=setup_of(block_model(case), case[3], case[4], dtype), forward=forward, backward=backward)
        for case, (forward, backward) in zip(sizes.blocks, measured["blocks"], strict=True)
    ]
    heads = [
        SetupTime(setup=setup_of(head_model(case), case[2], case[3], dtype), seconds=seconds)
        for case, seconds in zip(head_cases(sizes), measured["heads"], strict=True)
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
        larger_steps=(),
    )


def _with_engines(sizes: CaseSizes, kernels: Samples, engines: int, threads: int, measured: dict[str, Any]) -> Samples:
    """Return `kernels` with the measurements of concurrent engines."""
    dtype: Any = kernels.dtype

    def of(configs: list[RunConfig], seconds: list[float]) -> list[SetupTime]:
        setups = [Setup.of_config(config, engines, dtype=dtype) for config in configs]
        return [SetupTime(setup=setup, seconds=each) for setup, each in zip(setups, seconds, strict=True)]

    collectives = [CollectiveTime(name=name, nbytes=size, seconds=s) for name, size, s in measured["collectives"]]
    return replace(
        kernels,
        engines=engines,
        threads=threads,
        collectives=collectives,
        steps=of(small_configs(dtype, engines), measured["steps"]),
        larger_steps=of(larger_configs(sizes, dtype), measured["larger steps"]),
    )
