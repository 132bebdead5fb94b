"""A cluster of four real engines: work, output, errors, interrupts, dead and frozen engines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import ipyparallel
import psutil
import pytest
import zmq
from cluster_helpers import (
    break_a_deadlock,
    is_gone,
    look_around,
    sleep_in,
    sum_for_ever,
    sum_over_ranks,
    wait_for,
)

from speedlab.cluster import Cluster, ClusterError, RankError
from speedlab.cluster.files import processes

SIZE = 4
NAME = "test-four"


@pytest.fixture(scope="module")
def ipython_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("ipython")
        patch.setenv("IPYTHONDIR", str(path))
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))  # Engines import the modules of functions they run.
        yield path


@pytest.fixture(scope="module")
def started(ipython_directory: Path) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTEST_CURRENT_TEST")  # With it, ipykernel leaves out what is not written through Python.
        cluster = Cluster(SIZE, name=NAME, device="cpu")
    token = _token(cluster)
    yield cluster
    everything = processes.marked(token)
    cluster.stop()
    assert [process.pid for process in everything if not is_gone(process.pid)] == []
    assert not cluster.directory.exists()


@pytest.fixture
def cluster(started: Cluster) -> Iterator[Cluster]:
    yield started
    wait_for(lambda: {status.state for status in started.status()} == {"idle"})


def _token(cluster: Cluster) -> str:
    return psutil.Process(cluster.status()[0].pid).environ()[processes.TOKEN]


def test_four_engines_are_ready_when_the_start_returns(cluster: Cluster) -> None:
    """How long that takes: `python -m tests.benchmarks start`."""

    def imported() -> bool:
        import sys

        return {"torch", "speedlab.engine"} <= sys.modules.keys()

    assert [status.state for status in cluster.status()] == ["idle"] * SIZE
    assert cluster.submit(imported).result(30) == [True] * SIZE


def test_each_rank_is_bound_to_its_device(cluster: Cluster) -> None:
    found = cluster.submit(look_around).result()
    assert [rank["rank"] for rank in found] == list(range(SIZE))
    assert all(rank["torch"] for rank in found)
    assert [rank["cores"] for rank in found] == [list(device.cores) for device in cluster.devices]
    assert [rank["threads"] for rank in found] == [device.threads for device in cluster.devices]
    assert [rank["pid"] for rank in found] == [status.pid for status in cluster.status()]
    assert {rank["gpus"] for rank in found} == {""}
    assert found[2]["environment"] == {
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "2",
        "LOCAL_WORLD_SIZE": "4",
        "OMP_NUM_THREADS": str(cluster.devices[2].threads),
        "OMP_WAIT_POLICY": "passive",
    }
    assert all(status.rss_bytes > 50 * 2**20 for status in cluster.status())


def test_starting_twice_returns_the_running_cluster(cluster: Cluster) -> None:
    pids = [status.pid for status in cluster.status()]
    again = Cluster(name=NAME)
    assert [status.pid for status in again.status()] == pids
    assert [status.pid for status in Cluster.attach(NAME).status()] == pids
    assert again.submit(os.getpid, ranks=[3]).result() == [pids[3]]
    with pytest.raises(ClusterError, match=r"runs with 4 engines, and 2 were asked for"):
        Cluster(2, name=NAME)
    with pytest.raises(ClusterError, match="runs on cpu, and cuda was asked for"):
        Cluster(name=NAME, device="cuda")
    with pytest.raises(ClusterError, match=f"'other' does not run; running: {NAME}"):
        Cluster.attach("other")


def test_files_are_private_and_ports_are_local(cluster: Cluster, ipython_directory: Path) -> None:
    assert cluster.directory.is_relative_to(ipython_directory)
    assert stat.S_IMODE(cluster.directory.stat().st_mode) == 0o700
    secrets = [*cluster.directory.glob("security/*.json"), cluster.directory / "cluster.json"]
    assert len(secrets) == 4
    assert {stat.S_IMODE(path.stat().st_mode) for path in secrets} == {0o600}
    listening = {
        connection.laddr.ip
        for process in processes.marked(_token(cluster))
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}
    reported = [json.loads(path.read_text()) for path in cluster.directory.glob("security/ipcontroller-*.json")]
    ports = {connection[name] for connection in reported for name in ("registration", "mux", "iopub")}
    assert max(ports) < 32_768, "the kernel may give these to anybody until the controller listens there"


def test_others_on_this_host_cannot_listen(cluster: Cluster) -> None:
    """Signed messages can be read by whoever subscribes; encrypted ones need the controller's key."""
    connection = json.loads((cluster.directory / "security" / f"ipcontroller-{NAME}-client.json").read_text())
    address = f"{connection['interface']}:{connection['iopub']}"
    heard = {}
    for who in ("stranger", "owner"):
        with zmq.Context() as context, context.socket(zmq.SUB) as socket:
            socket.linger = 0
            socket.subscribe(b"")
            if who == "owner":
                socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
                socket.curve_serverkey = connection["curve_serverkey"].encode()
            joined = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            socket.connect(address)
            joined.poll(10_000 if who == "owner" else 300)
            cluster.execute("print('secret')").result()
            heard[who] = bool(socket.poll(5000 if who == "owner" else 300))
            socket.disable_monitor()
            joined.close(linger=0)
    assert heard == {"stranger": False, "owner": True}


def test_ipyparallel_finds_the_cluster_too(cluster: Cluster) -> None:
    found = ipyparallel.Cluster.from_file(
        str(cluster.directory / "security" / f"cluster-{NAME}.json"), load_profile=False, parent=None
    )
    assert found.n == SIZE
    assert sorted(launcher.pid for launcher in found.engine_set.launchers.values()) == sorted(
        status.pid for status in cluster.status()
    )
    found.cluster_file = ""


def test_cells_share_a_namespace_and_show_their_last_expression(cluster: Cluster) -> None:
    seen: list[tuple[list[int], str, str]] = []
    unsubscribe = cluster.output.subscribe(lambda ranks, stream, text: seen.append((ranks, stream, text)))
    cluster.execute("import os\nrank = int(os.environ['RANK'])").result()
    assert cluster.execute("rank // 2").result() == ["0", "0", "1", "1"]
    assert cluster.execute("rank;", ranks=[1, 2]).result() == [None, None]
    # Where all cores compute, the line of a rank may come too late to be one with those of the others.
    by_rank = sorted((rank, stream, text) for ranks, stream, text in seen for rank in ranks)
    assert by_rank == [(rank, "stdout", f"{rank // 2}\n") for rank in range(4)]
    unsubscribe()
    seen.clear()
    cluster.execute("rank").result()
    assert seen == []


def test_both_streams_of_all_ranks_arrive_before_the_result(cluster: Cluster) -> None:
    seen: dict[str, list[tuple[list[int], str]]] = {"stdout": [], "stderr": []}
    unsubscribe = cluster.output.subscribe(lambda ranks, stream, text: seen[stream].append((ranks, text)))

    def speak() -> None:
        import os
        import sys

        print("same on all")
        print("rank", os.environ["RANK"], file=sys.stderr)
        os.write(1, b"from native code\n")

    cluster.submit(speak).result()
    same = [rank for ranks, text in seen["stdout"] if "same on all\n" in text for rank in ranks]
    assert sorted(same) == [0, 1, 2, 3]  # Where all cores compute, not in one piece.
    assert sorted(seen["stderr"]) == [([rank], f"rank {rank}\n") for rank in range(SIZE)]
    # What is not written through Python passes a pipe first, and may come later.
    wait_for(
        lambda: (
            {rank for ranks, text in seen["stdout"] if "from native code\n" in text for rank in ranks} == {*range(SIZE)}
        )
    )
    unsubscribe()


def test_failures_of_all_ranks_are_one_error(cluster: Cluster) -> None:
    def fail() -> None:
        error = ValueError("bad batch")
        error.speedlab_step, error.speedlab_module = 7, "blocks.1"
        raise error

    with pytest.raises(RankError) as caught:
        cluster.submit(fail).result()
    assert str(caught.value).splitlines()[:2] == [
        "RankError on ranks 0–3 (same on each), step 7, in forward of blocks.1",
        "  ValueError: bad batch",
    ]
    trace = caught.value.by_rank[0].traceback
    assert "in fail" in trace
    assert "remote.py" not in trace
    with pytest.raises(RankError, match=r"ZeroDivisionError: division by zero") as caught:
        cluster.execute("def f():\n    1/0\nf()").result()
    assert "interactiveshell" not in caught.value.by_rank[0].traceback
    assert "    1/0" in caught.value.by_rank[0].traceback
    with pytest.raises(RankError, match="SyntaxError"):
        cluster.execute("1 +").result()


def test_what_a_failed_cell_held_is_released(cluster: Cluster) -> None:
    cell = "import weakref\nclass Big: pass\nbig = Big(); ref = weakref.ref(big)\ndef f(x): raise ValueError\n"
    with pytest.raises(RankError):
        cluster.execute(cell + "f(big)").result()
    assert cluster.execute("del big; import gc; gc.collect(); ref() is None").result() == ["True"] * SIZE


def test_engines_survive_what_would_end_a_script(cluster: Cluster) -> None:
    with pytest.raises(RankError, match="SystemExit"):
        cluster.submit(exit, 3).result()
    with pytest.raises(RankError, match=r"what it returned \(a lock\) cannot be sent back: cannot pickle"):
        cluster.submit(threading.Lock).result()
    for word in ("exit()", "quit", "exit(3)"):
        with contextlib.suppress(RankError):
            cluster.execute(word).result()
    assert cluster.submit(abs, -2).result() == [2] * SIZE
    with pytest.raises(ClusterError, match=r"there is no rank 9; .* has ranks 0–3"):
        cluster.submit(abs, 1, ranks=[0, 9])


def test_results_can_be_awaited_and_waited_for(cluster: Cluster) -> None:
    async def work() -> list[int]:
        return await cluster.submit(abs, -5)

    assert asyncio.run(work()) == [5] * SIZE
    results = cluster.submit(time.sleep, 60)
    assert results.wait(0.05) is False
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1, 2, 3\] are not done after 0.05 s"):
        results.result(0.05)
    done = threading.Event()
    results.add_done_callback(lambda _: done.set())
    cluster.interrupt()
    assert done.wait(30)


def test_an_interrupt_reaches_every_rank_and_empties_the_queues(cluster: Cluster, tmp_path: Path) -> None:
    begun = [tmp_path / str(rank) for rank in range(SIZE)]
    running = cluster.submit(sleep_in, str(tmp_path))
    queued = cluster.submit(time.sleep, 60)
    wait_for(lambda: all(path.exists() for path in begun))  # Ranks for which something waits are busy, too.
    generation = int((cluster.directory / "rendezvous" / "generation").read_text())
    assert cluster.interrupt(20.0) == list(range(SIZE))  # Returns when all are idle.
    for results in (running, queued):
        with pytest.raises(RankError) as caught:
            results.result(30)
        assert {failure.kind for failure in caught.value.by_rank.values()} == {"KeyboardInterrupt"}
    assert int((cluster.directory / "rendezvous" / "generation").read_text()) == generation + 1
    assert cluster.interrupt() == list(range(SIZE))  # Nothing to interrupt: nothing happens.
    assert int((cluster.directory / "rendezvous" / "generation").read_text()) == generation + 1


def test_interrupts_at_any_moment_leave_the_engines_alive(cluster: Cluster) -> None:
    pids = [status.pid for status in cluster.status()]
    for pause in range(12):
        results = cluster.submit(sum_over_ranks, 1.0)
        time.sleep(pause * 0.002)  # Not to wait for anything: the moment of the interrupt is what varies.
        cluster.interrupt(10.0)
        assert results.wait(30)
    assert [status.pid for status in cluster.status()] == pids
    assert cluster.submit(sum_over_ranks, 1.0).result(60) == [4.0] * SIZE


def test_training_ranks_are_interrupted_and_meet_again(cluster: Cluster) -> None:
    assert cluster.submit(sum_over_ranks, 1.5).result(60) == [6.0] * SIZE
    results = cluster.submit(sum_for_ever)
    wait_for(lambda: {status.state for status in cluster.status()} == {"busy"})
    assert cluster.interrupt(20.0) == list(range(SIZE))  # Returns when all are idle.
    with pytest.raises(RankError):
        results.result(30)
    assert cluster.submit(sum_over_ranks, 2.0).result(60) == [8.0] * SIZE


def test_a_deadlock_is_broken(cluster: Cluster) -> None:
    break_a_deadlock(cluster)


def test_an_interrupt_of_the_kernel_interrupts_the_ranks(cluster: Cluster) -> None:
    results = cluster.submit(time.sleep, 60)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        results.result()
    timer.join()
    assert results.wait(30)


def test_a_failing_rank_releases_those_that_wait_for_it(cluster: Cluster) -> None:
    def fail_on_two() -> None:
        import os
        import time

        if os.environ["RANK"] == "2":
            raise ValueError("only here")
        time.sleep(60)

    with pytest.raises(RankError) as caught:
        cluster.submit(fail_on_two).result(20)
    assert str(caught.value).startswith("RankError on rank 2\n  ValueError: only here\n  and on ranks 0–1, 3")


def test_a_killed_engine_is_named_and_comes_back(cluster: Cluster) -> None:
    cluster.execute("kept = 11").result()
    before = {status.rank: status for status in cluster.status()}
    results = cluster.submit(time.sleep, 60)
    os.kill(before[1].pid, signal.SIGKILL)
    with pytest.raises(RankError) as caught:
        results.result(20)
    assert caught.value.by_rank[1].kind == "EngineDied"
    assert "cluster.restart(1)" in str(caught.value)
    wait_for(lambda: [status.state for status in cluster.status()] == ["idle", "dead", "idle", "idle"])
    with pytest.raises(ClusterError, match=r"engine of rank 1 ended .* cluster\.restart\(1\)"):
        cluster.submit(abs, 1)
    other_handle = Cluster.attach(NAME)
    cluster.restart(1)
    after = {status.rank: status for status in cluster.status()}
    assert after[1].device == before[1].device
    assert after[1].engine_id != before[1].engine_id
    assert after[0].pid == before[0].pid
    assert cluster.execute("kept", ranks=[0, 2, 3]).result() == ["11"] * 3
    assert cluster.submit(sum_over_ranks, 1.0).result(60) == [4.0] * SIZE
    assert other_handle.submit(os.getpid).result() == [status.pid for status in cluster.status()]
    for rank in (0, 2):
        os.kill(after[rank].pid, signal.SIGKILL)
    wait_for(lambda: [status.state for status in cluster.status()] == ["dead", "idle", "dead", "idle"])
    with pytest.raises((ClusterError, RankError), match=r"cluster\.restart\(0, 2\)"):
        cluster.submit(abs, 1).result(20)
    cluster.restart(0, 2)
    assert cluster.submit(sum_over_ranks, 1.0).result(60) == [4.0] * SIZE


def test_a_frozen_engine_is_seen_and_replaced(cluster: Cluster) -> None:
    cluster.submit(sum_over_ranks, 1.0).result(60)
    frozen = cluster.status()[3].pid
    os.kill(frozen, signal.SIGSTOP)
    wait_for(lambda: cluster.status()[3].state == "frozen")
    results = cluster.submit(sum_over_ranks, 1.0)
    # Taken back before it began, it would leave all four with nothing to do.
    wait_for(lambda: [status.state for status in cluster.status()] == ["busy", "busy", "busy", "frozen"])
    assert cluster.interrupt() == [0, 1, 2]
    cluster.restart(3)
    assert is_gone(frozen)
    with pytest.raises(RankError):
        results.result(30)
    assert cluster.submit(sum_over_ranks, 1.0).result(60) == [4.0] * SIZE
