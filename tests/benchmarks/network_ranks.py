"""The ranks of `python -m tests.benchmarks network`: engines that stand ready in hosts whose links are shaped, and take
turns."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from speedlab.calibrate.interleave import Times, take_turns
from speedlab.config import RunConfig
from speedlab.network import LinkRate
from tests.benchmarks.lab import Lab
from tests.benchmarks.lab.ranks import HostRanks, rank_results
from tests.benchmarks.network_cases import ENTERING

_SECONDS = 1800.0
"""For what ranks are told to do once; a step of 10 s at 100 Mbit/s is none that hangs."""


class Hosts:
    """`count` hosts with `each` ranks, and engines in them by name. A context manager; its end leaves nothing."""

    def __init__(self, count: int, each: int) -> None:
        self.world_size, self._count, self._each = count * each, count, each
        self._stack = ExitStack()

    def __enter__(self) -> Hosts:
        with ExitStack() as stack:
            self._lab = stack.enter_context(Lab(self._count))
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="speedlab-network-"))
            self._ranks = HostRanks(self._lab, self._each, Path(folder))
            self._call(_join)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function returns on rank 0."""
        return rank_results(self._ranks.run(function, *arguments, timeout=_SECONDS))[0]

    def shape(self, link: LinkRate | None) -> None:
        """Let every host's link carry so much in each direction; None: as much as this machine can."""
        for host in self._lab.hosts:
            host.shape(None if link is None else link.bits_per_second)

    def enter(self, name: str, config: RunConfig) -> None:
        """Build an engine, which makes its first steps, over links that carry all they can."""
        self.shape(None)
        self._call(_enter, name, config)

    def leave(self, name: str) -> None:
        """Take an engine apart."""
        self._call(_leave, name)

    def take(self, name: str, steps: int) -> tuple[float, float]:
        """(seconds, bytes that each host has sent) of a step, over so many."""
        before = self._sent()
        seconds = self._call(_take, name, steps)
        return seconds / steps, (self._sent() - before) / steps

    def take_turns(self, periods: dict[str, int], rounds: int, steps: int) -> tuple[Times, dict[str, float]]:
        """Seconds of a step by name, one for each round, and bytes of a step that each host sends. In a round an engine
        makes at least `steps`, and whole periods."""
        sent: dict[str, list[float]] = {name: [] for name in periods}

        def act(name: str) -> float:
            period = periods[name]
            seconds, nbytes = self.take(name, -(-steps // period) * period)
            sent[name].append(nbytes)
            return seconds

        times = take_turns(list(periods), rounds, act)
        return times, {name: sum(each) / len(each) for name, each in sent.items()}

    def _sent(self) -> float:
        return _mean([host.bytes_carried()[1] for host in self._lab.hosts])


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values)


# ---- in a rank process -----------------------------------------------------------------------------------------------

_ready: dict[str, tuple[Callable[[], object], ExitStack]] = {}
"""By name: a step, and what takes the engine apart."""


def _join() -> None:
    import torch

    from speedlab.comm import join

    torch.set_num_threads(1)
    join()


def _enter(name: str, config: RunConfig) -> None:
    from speedlab.calibrate.workers import training

    stack = ExitStack()
    step = stack.enter_context(training(config))
    for _ in range(ENTERING):
        step()
    _ready[name] = step, stack


def _leave(name: str) -> None:
    _, stack = _ready.pop(name)
    stack.close()


def _take(name: str, steps: int) -> float:
    import torch.distributed as dist

    step, _ = _ready[name]
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    dist.barrier()
    return time.perf_counter() - begun
