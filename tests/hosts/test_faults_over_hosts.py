"""Faults at random moments of a run over hosts, and what has become of it afterwards."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from host_helpers import await_true, config

import speedlab.cluster.files.processes as processes
from speedlab.cluster import Cluster, Run
from speedlab.cluster.launch.host_specs import parse_hosts
from speedlab.telemetry.records import RunState
from speedlab.telemetry.run_folder import UNSUPERVISED
from tests.benchmarks.lab import Lab, LabHost

SECONDS = 240
"""For what takes ten on a quiet machine."""
NAMED_SECONDS = 2.0
"""A link that is down for less makes no host count as lost."""
STEPS, FIRST_SAVE = 120, 20
# Each stage on its host: without one of them there is no layout, and the run waits until it is back.
CHANGES = {
    "steps": STEPS,
    "parallel": {"pp": 2},
    "recover": {"attempts": 6},
    "checkpoint": {"every_steps": FIRST_SAVE},
    "schedule": {"kind": "constant"},
}
MOMENTS = [pytest.param(0), *(pytest.param(k, marks=pytest.mark.nightly) for k in range(1, 60))]
"""Twenty of each fault."""


@pytest.fixture(scope="module")
def started(settings: Path) -> Iterator[Cluster]:
    made = Cluster(hosts=parse_hosts(["host-a:1", "host-b:1"], config=str(settings)), name="faults", device="cpu")
    yield made
    made.stop()


@pytest.fixture
def cluster(started: Cluster) -> Cluster:
    """Idle engines; new ones where the test before has failed."""
    if not started.running:
        started.start()
    await_true(lambda: [s.state for s in started.status()] == ["idle"] * 2, "all engines are there", SECONDS)
    return started


@contextlib.contextmanager
def nothing_left_after(cluster: Cluster, lab: Lab) -> Iterator[None]:
    """A moment that fails takes none of the others with it."""
    try:
        yield
    except BaseException:
        for host in lab.hosts:
            host.mend()
        cluster.stop()
        raise


@pytest.fixture(scope="module")
def undisturbed(started: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    run = started.train(config(tmp_path_factory.mktemp("undisturbed"), "undisturbed", **CHANGES))
    assert run.wait(SECONDS) is RunState.FINISHED
    return [record.loss for record in run.records()]


def kill_agent(host: LabHost, run: Run) -> set[int]:
    """The run does not notice; the supervisor starts another one."""
    await_true(lambda: len(agents_on(host)) == 1, "the agent that was killed before has a follower", SECONDS)
    agents_on(host)[0].kill()
    return {0}


def blink(host: LabHost, run: Run) -> set[int]:
    """A link that is down for a moment: what was sent is sent again."""
    began = time.monotonic()
    host.cut()
    time.sleep(1.0)
    host.mend()
    return {0} if time.monotonic() - began < NAMED_SECONDS else {0, 1}  # On a busy machine a moment may last.


def cut_off(host: LabHost, run: Run) -> set[int]:
    """Long enough to be named; the run is brought back once the host is."""
    host.cut()
    await_true(lambda: bool(run.errors), "the loss of the host is told", SECONDS)
    host.mend()
    assert f"{host.name} does not answer: it is down or cut off" in str(run.errors[0])
    return {1}


def agents_on(host: LabHost) -> list[psutil.Process]:
    return [each for each in host.processes() if has_argument(each, "speedlab.cluster.agents.process")]


def has_argument(process: psutil.Process, word: str) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return word in process.cmdline()
    return False


FAULTS: list[Callable[[LabHost, Run], set[int]]] = [cut_off, kill_agent, blink]
"""Each returns how often the run may have failed for it."""


@pytest.mark.timeout(3 * SECONDS)
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
    with nothing_left_after(cluster, lab):
        run = cluster.train(config(tmp_path, f"moment-{moment}", **CHANGES))
        run.wait_until(step, SECONDS)
        time.sleep(drawn.uniform(0, 0.1))  # Not to wait for anything: the moment of the fault varies.
        failures = fault(host, run)
        assert run.wait(SECONDS) is RunState.FINISHED, f"{fault.__name__} on {host.name} at step {step}"
        assert [record.loss for record in run.records()] == undisturbed
        assert len(run.errors) in failures
        await_true(lambda: [s.state for s in cluster.status()] == ["idle"] * 2, "all engines are there", SECONDS)


@pytest.mark.timeout(3 * SECONDS)
def test_a_run_over_hosts_waits_for_its_supervisor(
    cluster: Cluster, lab: Lab, tmp_path: Path, undisturbed: list[float]
) -> None:
    with nothing_left_after(cluster, lab):
        run = cluster.train(config(tmp_path, "orphan", **{**CHANGES, "steps": 10**6}))
        run.wait_until(10, SECONDS)
        (supervisor,) = [
            each for each in processes.marked(cluster.token) if has_argument(each, processes.SUPERVISOR_MODULE)
        ]
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
