"""Faults at random moments of a run over hosts, and what has become of it afterwards."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from host_helpers import SECONDS, await_true, config

import speedlab.cluster.processes as processes
from speedlab.bench.lab import Lab, LabHost
from speedlab.cluster import Cluster, Run
from speedlab.cluster.host_specs import parse_hosts
from speedlab.telemetry.folder import UNSUPERVISED
from speedlab.telemetry.records import RunState

STEPS, FIRST_SAVE = 300, 20
# Each stage on its host: without one of them there is no layout, and the run waits until it is back.
CHANGES = {
    "steps": STEPS,
    "parallel": {"pp": 2},
    "recover": {"attempts": 6},
    "checkpoint": {"every_steps": FIRST_SAVE},
    "schedule": {"kind": "constant"},
}
MOMENTS = [pytest.param(0), *(pytest.param(k, marks=pytest.mark.nightly) for k in range(1, 21))]


@pytest.fixture(scope="module")
def cluster(settings: Path) -> Iterator[Cluster]:
    made = Cluster(hosts=parse_hosts(["host-a:1", "host-b:1"], config=str(settings)), name="faults", device="cpu")
    yield made
    made.stop()


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    run = cluster.train(config(tmp_path_factory.mktemp("undisturbed"), "undisturbed", **CHANGES))
    assert run.wait(SECONDS) is RunState.FINISHED
    return [record.loss for record in run.records()]


def kill_agent(host: LabHost, run: Run) -> None:
    """The run does not notice; the supervisor starts another one."""
    (agent,) = [each for each in host.processes() if "speedlab.cluster.agent" in each.cmdline()]
    agent.kill()


def blink(host: LabHost, run: Run) -> None:
    """A link that is down for a moment: what was sent is sent again."""
    host.cut()
    time.sleep(1.0)
    host.mend()


def cut_off(host: LabHost, run: Run) -> None:
    """Long enough to be named; the run is brought back once the host is."""
    host.cut()
    await_true(lambda: bool(run.errors), "the loss of the host is told", SECONDS)
    host.mend()
    assert f"{host.name} does not answer: it is down or cut off" in str(run.errors[0])


FAULTS = [cut_off, kill_agent, blink]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_fault_at_a_random_moment(
    cluster: Cluster, lab: Lab, tmp_path: Path, undisturbed: list[float], moment: int
) -> None:
    drawn = random.Random(moment)
    fault, host, step = (
        FAULTS[moment % len(FAULTS)],
        drawn.choice(lab.hosts),
        drawn.randrange(FIRST_SAVE + 1, STEPS // 2),
    )
    run = cluster.train(config(tmp_path, f"moment-{moment}", **CHANGES))
    try:
        run.wait_until(step, SECONDS)
        time.sleep(drawn.uniform(0, 0.1))
        fault(host, run)
        assert run.wait(SECONDS) is RunState.FINISHED, f"{fault.__name__} on {host.name} at step {step}"
    finally:
        host.mend()
    assert [record.loss for record in run.records()] == undisturbed
    assert len(run.errors) == (fault is cut_off)
    await_true(lambda: [s.state for s in cluster.status()] == ["idle"] * 2, "all engines are there", SECONDS)


@pytest.mark.timeout(240)
def test_a_run_over_hosts_waits_for_its_supervisor(cluster: Cluster, tmp_path: Path, undisturbed: list[float]) -> None:
    run = cluster.train(config(tmp_path, "orphan", **{**CHANGES, "steps": 10**6}))
    run.wait_until(10, SECONDS)
    (supervisor,) = [each for each in processes.marked(cluster.token) if is_supervisor(each)]
    supervisor.kill()
    await_true(lambda: run.folder.read_status().text == UNSUPERVISED, "the run has paused by itself", SECONDS)
    assert run.folder.read_status().state is RunState.PAUSED
    at = run.folder.read_status().step
    again = Cluster.attach("faults")
    assert again.token == cluster.token
    run.wait_until(at + 10, SECONDS)
    run.stop().wait(SECONDS)
    # The schedule does not know where the run ends.
    assert [record.loss for record in run.records()][:STEPS] == undisturbed[: run.step]


def is_supervisor(process: psutil.Process) -> bool:
    return "speedlab.cluster.supervisor" in process.cmdline()
