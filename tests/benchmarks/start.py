"""`python -m tests.benchmarks start`: seconds from `Cluster(n)` until its engines are ready.

Beside it stands what no start can be below: as many processes at once that import what an engine imports, with the same
threads. What is left between both is the controller, its heartbeat and the engines' registration. Stopping the cluster
is not counted.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from speedlab.calibrate.interleave import Times, row, take_turns
from speedlab.calibrate.table import BenchRow, report
from speedlab.cluster import Cluster
from speedlab.config.command_line import read_options

_IMPORTS = "import torch, speedlab.engine"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Start clusters of several sizes on CPU cores, in turn; each is stopped before the next one starts."""

    engines: tuple[int, ...] = (1, 2, 4)
    """Numbers of engines."""
    rounds: int = 5
    """Interleaved rounds, after one that is not counted; medians are taken over them."""
    json: Path | None = None
    """Also write one JSON record for each row to this file."""


def main(argv: list[str] | None = None) -> None:
    options = read_options(Options, argv, "python -m tests.benchmarks start")
    names = [name for engines in options.engines for name in (_start_of(engines), _imports_of(engines))]
    work = {_start_of(engines): (_start, engines) for engines in options.engines}
    work |= {_imports_of(engines): (_import, engines) for engines in options.engines}

    def act(name: str) -> float:
        call, engines = work[name]
        return call(engines)

    print(f"{', '.join(map(str, options.engines))} engines, {options.rounds} rounds ...", file=sys.stderr, flush=True)
    take_turns(names, 1, act)  # For warming up: files are read from the disk once.
    report(_rows(options.engines, take_turns(names, options.rounds, act)), options.json)


def _start(engines: int) -> float:
    cluster = Cluster(engines, name=f"bench-start-{os.getpid()}", device="cpu", start=False)
    begun = time.perf_counter()
    try:
        cluster.start()
        return time.perf_counter() - begun
    finally:
        cluster.stop()


def _import(processes: int) -> float:
    threads = str(max(1, len(os.sched_getaffinity(0)) // processes))
    limits = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), threads)
    begun = time.perf_counter()
    command = [sys.executable, "-c", _IMPORTS]
    started = [subprocess.Popen(command, env={**os.environ, **limits}) for _ in range(processes)]
    ended = [process.wait() for process in started]
    if any(ended):
        raise RuntimeError(f"{_IMPORTS!r} ended with {max(ended)}")
    return time.perf_counter() - begun


def _rows(sizes: tuple[int, ...], times: Times) -> list[BenchRow]:
    return [
        row(
            f"start of {engines} engines",
            times,
            own=_start_of(engines),
            floor=_imports_of(engines),
            unit="s",
            value=lambda seconds: seconds,
        )
        for engines in sizes
    ]


def _start_of(engines: int) -> str:
    return f"start {engines}"


def _imports_of(engines: int) -> str:
    return f"imports {engines}"
