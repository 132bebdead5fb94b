"""Where a command runs: its options, and a cluster for its time, one that runs or a new one that ends with it."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from speedlab.cluster import Cluster
from speedlab.cluster.home import running_clusters


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Where the run runs."""

    engines: int | None = None
    """Number of engines; when left out one per GPU, else 4 on CPU cores; a run that goes on takes as many as before."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """On what engines are started."""
    cluster: str = "default"
    """Cluster to run on; it is started, and ended afterwards, when none of that name runs."""
    keep_engines: bool = False
    """Leave engines that were started here running."""


@contextlib.contextmanager
def cluster_for(name: str, engines: int | None, device: str, *, keep: bool) -> Iterator[Cluster]:
    """Yields the cluster. Engines that were started here are ended at the end, whatever happens, unless `keep`."""
    found = any(state.name == name for state in running_clusters())
    begin = time.monotonic()
    if not found:
        print("starting engines ...", file=sys.stderr, flush=True)
    cluster = Cluster(engines, name=name, device=device)
    try:  # From here on: who reads that it has started may press Ctrl-C at once.
        if found:
            print(f"using the running {cluster!r}", file=sys.stderr)
        else:
            print(f"started {cluster!r} in {time.monotonic() - begin:.1f} s", file=sys.stderr)
        yield cluster
    finally:
        if not found and not keep:
            with deaf_to_interrupts():
                print("stopping engines ...", file=sys.stderr, flush=True)
                cluster.stop()


@contextlib.contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """A Ctrl-C in here would leave processes behind."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class StopRequests:
    """Counts Ctrl-C and SIGTERM instead of raising: one asks to stop after the step, a second to stop at once."""

    def __init__(self) -> None:
        self.count = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequests:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._count)
        return self

    def _count(self, number: int, frame: Any) -> None:
        self.count += 1

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
