"""What `python -m tests.benchmarks hosts` times, each a function that returns seconds: starts, steps, and the ways
back."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from speedlab.calibrate.interleave import Times
from speedlab.calibrate.rank_processes import changed_environment
from speedlab.cluster import Cluster
from speedlab.cluster.launch.host_specs import SshHosts, parse_hosts
from speedlab.config import RunConfig
from speedlab.network import LinkRate
from tests.benchmarks.host_loss import HostLoss, lose_a_host
from tests.benchmarks.lab import Lab
from tests.benchmarks.network_cases import Case
from tests.benchmarks.network_ranks import Hosts

_RUN_SECONDS = 120.0
_STEPS_BEFORE = 12
"""Of a run before something happens to it; it has a checkpoint by then."""
_POLL_SECONDS = 0.005

_WITHOUT_TORCH = """
import speedlab.cluster.worker.remote as remote
remote.preload = lambda: None
"""
"""What Python runs first in engines that are to register without torch."""


def ssh_hosts(lab: Lab, settings: Path, each: int) -> SshHosts:
    return parse_hosts([f"{host.name}:{each}" for host in lab.hosts], config=str(settings))


def time_start(name: str, **given: Any) -> float:
    """Seconds from `Cluster(**given)` until its engines are ready; stopping it is not counted."""
    begun = time.perf_counter()
    cluster = Cluster(name=f"bench-hosts-{name}-{os.getpid()}", device="cpu", progress=lambda words: None, **given)
    seconds = time.perf_counter() - begun
    cluster.stop()
    return seconds


def time_registering(lab: Lab, settings: Path, engines: int) -> float:
    """Seconds until so many engines, which do not import torch, have registered over SSH."""
    with tempfile.TemporaryDirectory(prefix="speedlab-bench-") as folder:
        (Path(folder) / "sitecustomize.py").write_text(_WITHOUT_TORCH)
        path = os.pathsep.join([folder, os.environ["PYTHONPATH"]])
        with changed_environment({"PYTHONPATH": path}):
            return time_start("register", hosts=ssh_hosts(lab, settings, engines // len(lab.hosts)))


def time_steps(
    arrangements: dict[str, tuple[int, int]], links: dict[str, LinkRate | None], rounds: int, steps: int
) -> Iterator[tuple[str, str, Times]]:
    """(arrangement, link, seconds of a step of plain ZeRO-1, one for each round), of hosts x ranks of each."""
    case = Case(name="plain ZeRO-1", settings={"zero": {"stage": 1}, "batch": {"micro_size": 2}})
    for name, (count, each) in arrangements.items():
        with Hosts(count, each) as hosts:
            hosts.enter(case.name, case.config(steps=1000))
            for text, link in links.items():
                hosts.shape(link)
                times, _ = hosts.take_turns({case.name: 1}, rounds, steps)
                yield name, text, times


@contextmanager
def _small_run(name: str, **more: Any) -> Iterator[RunConfig]:
    """The configuration of a run of a small model that would go on for long, in a folder that is there meanwhile."""
    with tempfile.TemporaryDirectory(prefix="speedlab-bench-") as folder:
        text = Path(folder) / "text.txt"
        text.write_text("the quick brown fox jumps over the lazy dog\n" * 500)
        yield RunConfig(
            name=name,
            folder=Path(folder) / "runs",
            steps=1_000_000,
            model={"layers": 2, "hidden": 32, "heads": 2, "ffn_hidden": 64, "context": 32},
            data={"source": str(text), "tokenizer": "bytes", "sequence_length": 32, "heldout_share": 0.2},
            precision="float32",
            batch={"global_size": 4, "micro_size": 1},
            eval={"every_steps": 0},
            checkpoint={"every_steps": 5},
            telemetry={"tensorboard": False},
            **more,
        )


def time_recovery(rounds: int) -> list[float]:
    """Seconds from the death of one of two engines until the run has made a step again, by itself."""
    cluster = Cluster(2, name=f"bench-hosts-recovery-{os.getpid()}", device="cpu")
    try:
        return [_recovered(cluster, number) for number in range(rounds)]
    finally:
        cluster.stop()


def _recovered(cluster: Cluster, number: int) -> float:
    with _small_run(f"recovers-{number}", recover={"attempts": 1}) as config:
        run = cluster.train(config)
        run.wait_until(_STEPS_BEFORE, _RUN_SECONDS)
        killed = time.time()
        os.kill(cluster.status()[1].pid, signal.SIGKILL)

        def goes_on() -> bool:
            said = [event.time for event in run.events if event.kind == "resumed" and event.time > killed]
            return bool(said) and run.records()[-1].time > said[-1]

        try:
            _await(goes_on, "the run going on")
            return run.records()[-1].time - killed
        finally:
            cluster.interrupt()
            run.feed.close()


def time_losses(lab: Lab, settings: Path, rounds: int) -> list[HostLoss]:
    """What a run over the laboratory's hosts goes through when one of them is cut off, and is back."""
    given = ssh_hosts(lab, settings, 1)
    cluster = Cluster(hosts=given, name=f"bench-hosts-cut-{os.getpid()}", device="cpu", progress=lambda words: None)
    found = []
    try:
        for number in range(rounds):
            with _small_run(f"cut-{number}", zero=1, recover={"attempts": 2}) as config:
                loss, run = lose_a_host(cluster, lab.hosts[-1], config, after_step=_STEPS_BEFORE)
                found.append(loss)
                cluster.interrupt()
                run.feed.close()
        return found
    finally:
        cluster.stop()


def _await(check: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _RUN_SECONDS
    while not check():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} was not seen within {_RUN_SECONDS:g} s")
        time.sleep(_POLL_SECONDS)
