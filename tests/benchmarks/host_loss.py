"""What the loss of a host costs a run that asked to be brought back.

A host of a laboratory is cut off while it trains. The clock runs until the cluster says which one, until the run's next
new step on the hosts that are left, and, once the link is back and `run.reshape` has asked for all engines again, until
its next step on all of them.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from speedlab.cluster import Cluster, Run
from speedlab.config import RunConfig
from tests.benchmarks.lab import LabHost

_POLL_SECONDS = 0.01
_MOST_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class HostLoss:
    """Seconds, and what was said."""

    said: str
    """Which host, which ranks, what they did last."""
    named_seconds: float
    """From the cut until it was said."""
    gone_on_seconds: float
    """From the cut until a step was computed that no rank had computed before."""
    grown_seconds: float
    """From the wish for all engines until a step was computed by all of them."""
    lost_steps: int
    """Steps that were computed a second time."""

    @property
    def lines(self) -> list[str]:
        """For people."""
        return [
            self.said,
            f"named after {self.named_seconds:.1f} s, a new step after {self.gone_on_seconds:.1f} s "
            f"({self.lost_steps} steps computed again)",
            f"all hosts again: a new step {self.grown_seconds:.1f} s after run.reshape",
        ]


def lose_a_host(cluster: Cluster, host: LabHost, config: RunConfig, *, after_step: int) -> tuple[HostLoss, Run]:
    """Train `config`, which asks for `recover`, on `cluster`; cut `host` off once `after_step` is recorded.

    Returns what it cost, and the run, which trains on all hosts again. Raises TimeoutError where something does not
    come within two minutes."""
    said: list[tuple[float, str]] = []
    heard = threading.Event()

    def hear(ranks: list[int], stream: str, text: str) -> None:
        if text.startswith(host.name):
            said.append((time.monotonic(), text.strip()))
            heard.set()

    unsubscribe = cluster.output.subscribe(hear)
    size = cluster.size
    try:
        run = cluster.train(config)
        run.wait_until(after_step, _MOST_SECONDS)
        host.cut()
        cut, reached = time.monotonic(), run.step
        if not heard.wait(_MOST_SECONDS):
            raise TimeoutError(f"nobody said within {_MOST_SECONDS:g} s that {host.name} is lost")
        reached = max(reached, run.step)
        back_at = _await_going_on(run)
        run.wait_until(reached + 1, _MOST_SECONDS)
        gone_on = time.monotonic()
    finally:
        unsubscribe()
        host.mend()
    begun = time.monotonic()
    run.reshape(engines=size)
    run.wait_until(run.step + 1, _MOST_SECONDS)
    return HostLoss(
        said=said[0][1],
        named_seconds=said[0][0] - cut,
        gone_on_seconds=gone_on - cut,
        grown_seconds=time.monotonic() - begun,
        lost_steps=max(0, reached - back_at),
    ), run


def _await_going_on(run: Run) -> int:
    """The step from which the run goes on, once it does so on another number of engines."""
    deadline = time.monotonic() + _MOST_SECONDS
    while True:
        kinds = [event.kind for event in run.events]
        if "reshaped" in kinds and "resumed" in kinds[kinds.index("reshaped") :]:
            return run.events[kinds.index("resumed", kinds.index("reshaped"))].step
        if time.monotonic() > deadline:
            raise TimeoutError(f"run {run.name!r} did not go on within {_MOST_SECONDS:g} s: {run._where()}")
        time.sleep(_POLL_SECONDS)
