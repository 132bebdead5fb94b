"""Clusters with a real supervisor: what outlives kernels, engines and the supervisor itself. Everything is killed at a
random moment; a few moments here, many nightly."""

from __future__ import annotations

import ast
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster_helpers import is_gone, small_run, sum_over_ranks, wait_for

from speedlab.cluster import Cluster, ClusterError, RankError, Run
from speedlab.cluster.files import processes
from speedlab.cluster.files.cluster_dir import ClusterDir
from speedlab.cluster.launch.environment import device_fields, rank_environment
from speedlab.cluster.launch.placement import devices_for
from speedlab.cluster.supervisor import protocol as m
from speedlab.cluster.worker import remote
from speedlab.config import RunConfig
from speedlab.telemetry.records import RunState

NAME = "test-supervised"
SECONDS = 240
"""For what takes some on a quiet machine."""
pytestmark = pytest.mark.timeout(3 * SECONDS)
STEPS = 140
EVERY = 20
LATEST = 2 * EVERY
"""Step before which something is killed: a hundred are left, and the run does not end before what follows."""
MOMENTS = [
    pytest.param(moment, marks=[] if moment < most_by_default else pytest.mark.nightly)
    for most_by_default in [1]
    for moment in range(20)
]


@pytest.fixture(scope="module")
def ipython_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("ipython")
        patch.setenv("IPYTHONDIR", str(path))
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        yield path


@pytest.fixture(scope="module")
def started(ipython_directory: Path) -> Iterator[Cluster]:
    cluster = Cluster(2, name=NAME, device="cpu")
    yield cluster
    cluster.stop()


@pytest.fixture
def cluster(started: Cluster) -> Cluster:
    """Two idle engines, whatever the test before has left."""
    if not started.running or any(status.state == "dead" for status in started.status()):
        started.stop()
        started.start()
    started.interrupt()
    wait_for(lambda: {status.state for status in started.status()} == {"idle"})
    return started


def config(folder: Path, name: str, steps: int = STEPS, **changes: Any) -> RunConfig:
    return small_run(
        folder,
        name,
        steps,
        batch={"micro_size": 2, "global_size": 4},
        checkpoint={"every_steps": EVERY},
        telemetry={"tensorboard": False},
        **changes,
    )


def losses(run: Run) -> dict[int, float]:
    """The last loss of each step: a run that went back has computed some twice."""
    return {record.step: record.loss for record in run.records()}


@pytest.fixture(scope="module")
def undisturbed(started: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of the run that nobody disturbs."""
    run = started.train(config(tmp_path_factory.mktemp("undisturbed"), "whole"))
    assert run.wait(SECONDS) is RunState.FINISHED
    return losses(run)


def supervisor_of(cluster: Cluster) -> psutil.Process:
    (found,) = [
        process
        for process in processes.marked(cluster.token)
        if process.status() != psutil.STATUS_ZOMBIE and "speedlab.cluster.supervisor" in process.cmdline()
    ]
    return found


def at_a_random_step(run: Run, moment: int) -> int:
    """Wait until a step that is drawn."""
    step = random.Random(moment).randint(EVERY + 2, LATEST)
    run.wait_until(step, SECONDS)
    return step


# ---- interrupts have a scope -----------------------------------------------------------------------------------------


def test_a_cell_that_waits_behind_training_is_cancelled_alone(
    cluster: Cluster, tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    run = cluster.train(config(tmp_path, "trains"))
    cell = cluster.execute("waited = True")
    also = cluster.execute("waited_too = 1; waited_too")
    cell.interrupt()
    with pytest.raises(RankError, match="it was interrupted before it began"):
        cell.result(5)  # At once, not when training ends.
    assert not also.done
    assert run.wait(SECONDS) is RunState.FINISHED
    assert [event.kind for event in run.events if event.kind in ("paused", "interrupted", "failed")] == []
    assert losses(run) == undisturbed
    assert also.result(SECONDS) == ["1", "1"]
    assert cluster.execute("'waited' in globals()").result(SECONDS) == ["False", "False"]


def test_an_interrupted_run_leaves_the_cell_behind_it_and_the_other_way_round(cluster: Cluster, tmp_path: Path) -> None:
    run = cluster.train(config(tmp_path, "interrupted"))
    cell = cluster.execute("5")
    run.wait_until(5, SECONDS)
    cluster.runs.interrupt(run.folder.path, 10.0)
    assert run.wait(SECONDS) is RunState.PAUSED
    assert cell.result(SECONDS) == ["5", "5"]
    long = cluster.submit(time.sleep, SECONDS, ranks=[0])
    other = cluster.submit(abs, -3)
    long.interrupt()
    with pytest.raises(RankError, match="KeyboardInterrupt"):
        long.result(10)
    assert other.result(10) == [3, 3]


# ---- what is killed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_engine_needs_no_person(
    cluster: Cluster, tmp_path: Path, undisturbed: dict[int, float], moment: int
) -> None:
    """The engine is started again, and the run goes on from its newest checkpoint, to the same losses bit for bit."""
    run = cluster.train(config(tmp_path, "recovers", recover={"attempts": 1, "from": "newest"}))
    at_a_random_step(run, moment)
    rank = moment % 2
    os.kill(cluster.status()[rank].pid, signal.SIGKILL)
    assert run.wait(SECONDS) is RunState.FINISHED
    assert losses(run) == undisturbed
    assert [event.kind for event in run.events].count("recovering") == 1
    (error,) = run.errors
    assert error.by_rank[rank].kind == "EngineDied"


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_supervisor_killed_while_it_brings_a_run_back_is_followed_by_one_that_does(
    cluster: Cluster, tmp_path: Path, undisturbed: dict[int, float], moment: int
) -> None:
    run = cluster.train(config(tmp_path, "taken-up", recover={"attempts": 1, "from": "newest"}))
    at_a_random_step(run, moment)
    rank, supervisor = moment % 2, supervisor_of(cluster)
    os.kill(cluster.status()[rank].pid, signal.SIGKILL)
    time.sleep(random.Random(moment).uniform(0.0, 3.0))  # Not to wait for anything: the moment of the kill varies.
    supervisor.kill()
    assert run.wait(SECONDS) is RunState.FINISHED
    assert losses(run) == undisturbed
    (error,) = run.errors
    assert error.by_rank[rank].kind == "EngineDied"


@pytest.mark.parametrize("moment", MOMENTS)
def test_resume_after_a_restart_is_always_heard(
    cluster: Cluster, tmp_path: Path, undisturbed: dict[int, float], moment: int
) -> None:
    run = cluster.train(config(tmp_path, "resumes"))
    at_a_random_step(run, moment)
    rank = moment % 2
    os.kill(cluster.status()[rank].pid, signal.SIGKILL)
    with pytest.raises(RankError, match="EngineDied"):
        run.wait(SECONDS)
    cluster.restart(rank)
    assert run.resume().wait(SECONDS).kind == "resumed"
    assert run.wait(SECONDS) is RunState.FINISHED
    assert losses(run) == undisturbed


KERNEL = """
import os, sys, speedlab
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_supervisor import config
cluster = speedlab.Cluster.attach({name!r})
run = cluster.train(config(Path({folder!r}), "orphan", recover=1))
run.wait_until({step}, {seconds})
print(cluster.status()[1].pid, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kernel_killed_while_a_rank_fails_loses_nothing(
    cluster: Cluster, tmp_path: Path, undisturbed: dict[int, float], moment: int
) -> None:
    step = random.Random(moment).randint(EVERY + 2, LATEST)
    code = KERNEL.format(tests=str(Path(__file__).parent), name=NAME, folder=str(tmp_path), step=step, seconds=SECONDS)
    kernel = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=SECONDS, check=False
    )
    assert kernel.returncode == -signal.SIGKILL
    os.kill(int(kernel.stdout), signal.SIGKILL)  # Nobody is there to see it.
    run = Run(tmp_path / "runs" / "orphan", cluster)
    wait_for(lambda: run.state is RunState.FINISHED, SECONDS)
    assert losses(run) == undisturbed
    assert [error.by_rank[1].kind for error in run.errors] == ["EngineDied"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_supervisor_is_followed_by_another(
    cluster: Cluster, tmp_path: Path, undisturbed: dict[int, float], moment: int
) -> None:
    draw = random.Random(moment)
    cell = cluster.submit(time.sleep, draw.uniform(0.1, 1.0))
    following = cluster.submit(abs, -moment)
    time.sleep(draw.uniform(0.0, 0.3))  # Not to wait for anything: the moment of the kill is what varies.
    supervisor_of(cluster).kill()
    assert cell.result(SECONDS) == [None, None]
    assert following.result(SECONDS) == [moment, moment]

    run = cluster.train(config(tmp_path, "supervised"))
    at_a_random_step(run, moment)
    old = supervisor_of(cluster)
    old.kill()
    assert run.wait(SECONDS) is RunState.FINISHED
    assert losses(run) == undisturbed
    assert run.errors == []
    assert supervisor_of(cluster).pid != old.pid


def test_without_a_supervisor_ranks_end_their_step_and_wait(cluster: Cluster, tmp_path: Path) -> None:
    run = cluster.train(config(tmp_path, "waits", steps=100 * STEPS))
    run.wait_until(20, SECONDS)
    supervisor_of(cluster).kill()
    alone = Run(run.folder)  # A handle without the cluster starts none.
    wait_for(lambda: alone.state is RunState.PAUSED, SECONDS)
    assert "the next client starts another one" in alone.folder.read_status().text
    stood = int(alone.step)
    alone.feed.close()
    run.wait_until(stood + 5, SECONDS)
    run.stop().wait(SECONDS)
    assert [record.step for record in run.records()] == list(range(1, run.step + 1))  # None is lost, none made twice.
    kinds = [event.kind for event in run.events if event.step == stood and event.kind != "checkpoint"]
    assert kinds[:2] == ["paused", "resumed"]


def test_a_supervisor_holds_no_library_of_arrays(cluster: Cluster) -> None:
    """It would be a fifth of its memory."""
    cluster.submit(abs, -1).result(SECONDS)
    assert not [each.path for each in supervisor_of(cluster).memory_maps() if "numpy" in each.path]


def engine_pids(cluster: Cluster) -> set[int]:
    return {process.pid for process in processes.engines(cluster.token)}


@pytest.mark.parametrize(
    ("change", "size"),
    [
        (lambda cluster: cluster.restart(1), 2),
        pytest.param(lambda cluster: cluster.resize(3), 3, marks=[pytest.mark.nightly]),
    ],
    ids=["restart", "resize"],
)
def test_a_supervisor_killed_while_it_starts_an_engine_leaves_none_behind(
    cluster: Cluster, change: Callable[[Cluster], None], size: int
) -> None:
    known = engine_pids(cluster)
    with ThreadPoolExecutor(1) as meanwhile:
        changing = meanwhile.submit(change, cluster)
        (new,) = wait_for(lambda: engine_pids(cluster) - known)
        supervisor_of(cluster).kill()
        changing.result(SECONDS)  # It was asked for again.
    assert is_gone(new)
    assert engine_pids(cluster) == {status.pid for status in cluster.status()}
    started = cluster.execute("import sys; 'torch._dynamo' in sys.modules", ranks=[size - 1])
    assert started.result(SECONDS) == ["False"], "a third of what its start would compute"
    assert cluster.submit(sum_over_ranks, 1.0).result(SECONDS) == [float(size)] * size
    cluster.resize(2)


def test_engines_that_were_half_resized_are_what_the_cluster_says(cluster: Cluster) -> None:
    """As a supervisor leaves them that dies when it has bound them, and has not written down that they are three."""
    fields = device_fields(devices_for(3, cluster.devices))
    environments = [rank_environment(rank, fields, str(cluster.directory / "rendezvous")) for rank in range(3)]
    for rank in range(2):
        cluster.submit(remote.rebind, environments[rank], ranks=[rank]).result(SECONDS)
    assert cluster.execute("import os; os.environ['WORLD_SIZE']").result(SECONDS) == ["'3'", "'3'"]
    (cluster.directory / "changing").touch()
    supervisor_of(cluster).kill()
    assert cluster.submit(sum_over_ranks, 1.0).result(SECONDS) == [2.0, 2.0]
    assert not (cluster.directory / "changing").exists()


def test_ranks_of_which_some_have_left_their_group_meet_again(cluster: Cluster) -> None:
    """As a supervisor leaves them that dies while it interrupts them."""
    assert cluster.submit(sum_over_ranks, 1.0).result(SECONDS) == [2.0, 2.0]
    cluster.submit(remote.reset, ranks=[0]).result(SECONDS)
    (cluster.directory / "interrupting").touch()
    supervisor_of(cluster).kill()
    assert cluster.submit(sum_over_ranks, 1.0).result(SECONDS) == [2.0, 2.0]
    assert not (cluster.directory / "interrupting").exists()


def test_what_a_notebook_holds_stays_held_under_the_next_supervisor(cluster: Cluster, tmp_path: Path) -> None:
    run = cluster.train(config(tmp_path, "held", steps=3))
    assert run.wait(SECONDS) is RunState.FINISHED
    with cluster.runs.held(run.folder.path):
        supervisor_of(cluster).kill()
        word = run.resume(steps=5)
        assert not cluster.runs.standing(run.folder.path).active, "it waits"
    assert word.wait(SECONDS).kind == "resumed"
    assert run.wait(SECONDS) is RunState.FINISHED


def test_an_interrupted_submission_is_taken_back(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C before the kernel has a handle of the cell."""
    client = cluster._client
    assert client is not None
    ask = client.ask

    def interrupted(question: Any, **arguments: Any) -> Any:
        answer = ask(question, **arguments)
        if isinstance(question, m.Submit):
            monkeypatch.undo()
            raise KeyboardInterrupt
        return answer

    monkeypatch.setattr(client, "ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cluster.submit(time.sleep, 10 * SECONDS)
    wait_for(lambda: {status.state for status in cluster.status()} == {"idle"}, 5)


def test_a_suspended_supervisor_is_named_to_a_new_client(cluster: Cluster) -> None:
    supervisor = supervisor_of(cluster)
    supervisor.suspend()
    try:
        with pytest.raises(ClusterError, match=rf"process {supervisor.pid}, is suspended; let it go on"):
            Cluster.attach(NAME)
    finally:
        supervisor.resume()
    assert Cluster.attach(NAME).submit(abs, -1).result(SECONDS) == [1, 1]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_controller_is_told_and_leaves_nothing(cluster: Cluster, tmp_path: Path, moment: int) -> None:
    run = cluster.train(config(tmp_path, "cut-off", steps=100 * STEPS))
    at_a_random_step(run, moment)
    everything = processes.marked(cluster.token)
    state = ClusterDir(NAME).read()
    assert state is not None
    os.kill(state.controller_pid, signal.SIGKILL)
    with pytest.raises((RankError, ClusterError), match="controller of cluster 'test-supervised' has died"):
        run.wait(SECONDS)
    wait_for(lambda: all(is_gone(process.pid) for process in everything))
    seen = Run(run.folder)
    assert seen.state is RunState.FAILED
    assert "controller" in seen.folder.read_status().text
    seen.feed.close()


SUBMITTER = """
import sys, speedlab
cluster = speedlab.Cluster.attach({name!r})
results = [cluster.execute("order.append(" + repr({who!r} + str(number)) + ");") for number in range({count})]
for one in results:
    one.result(120)
"""


@pytest.mark.parametrize("count", [150, pytest.param(500, marks=pytest.mark.nightly)])
def test_two_notebooks_that_submit_at_once_make_one_order(cluster: Cluster, count: int) -> None:
    cluster.execute("order = []").result(SECONDS)
    notebooks = [
        subprocess.Popen([sys.executable, "-c", SUBMITTER.format(name=NAME, who=who, count=count)])
        for who in ("a", "b")
    ]
    for notebook in notebooks:
        assert notebook.wait(2 * SECONDS) == 0
    texts = cluster.execute("order = tuple(order)\norder[:]").result(SECONDS)
    assert texts[0] == texts[1]
    first = ast.literal_eval(texts[0])
    assert len(first) == 2 * count
    for who in ("a", "b"):
        assert [entry for entry in first if entry[0] == who] == [f"{who}{number}" for number in range(count)]


def test_what_ranks_print_is_kept_by_rank(cluster: Cluster) -> None:
    cluster.execute("import os\nprint('from rank', os.environ['RANK'], 'é')").result(SECONDS)
    assert cluster.output.text(1).endswith("from rank 1 é\n")
    assert "from rank 0" not in cluster.output.text(1)
    other = Cluster.attach(NAME)  # As a kernel that was restarted.
    assert other.output.text(0).endswith("from rank 0 é\n")
    heard = threading.Event()
    other.output.subscribe(lambda ranks, stream, text: heard.set())
    cluster.execute("print('heard elsewhere')").result(SECONDS)
    assert heard.wait(10)
