"""Parts of the cluster that need no engine: devices, environments, names, files, processes."""

from __future__ import annotations

import importlib
import json
import os
import platform
import secrets
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import speedlab
from speedlab import hardware
from speedlab.cluster import errors, oom_report
from speedlab.cluster.cluster import Cluster
from speedlab.cluster.debug import rank_debugger
from speedlab.cluster.errors import ClusterError
from speedlab.cluster.files import file_locks, processes
from speedlab.cluster.files.cluster_dir import ClusterDir, ClusterState, EngineEntry, running_clusters
from speedlab.cluster.launch import rendezvous
from speedlab.cluster.launch.environment import device_fields, rank_environment
from speedlab.cluster.launch.ipyparallel_launchers import DeviceEngineSetLauncher
from speedlab.cluster.launch.placement import choose_devices
from speedlab.cluster.supervisor.process_control import LocalProcesses
from speedlab.cluster.worker import remote
from speedlab.cluster.worker.serialization import pack, unpack
from speedlab.hardware import Device

TOKEN = secrets.token_hex(8)
"""Of nobody else, also where these tests run twice at once."""
PIPES: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}


@pytest.fixture(autouse=True)
def own_ipython_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))


def gpu(number: int) -> Device:
    return Device(
        kind="cuda",
        name="GPU",
        uuid=f"GPU-{number}",
        cores=(0,),
        threads=3,
        capacity_bytes=8,
        free_bytes=7,
        fast_dtype="x",
    )


def test_one_engine_per_gpu_else_four_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "cuda_devices", lambda: [gpu(1), gpu(0)])
    assert [device.uuid for device in choose_devices(None, "auto")] == ["GPU-1", "GPU-0"]
    assert [device.uuid for device in choose_devices(1, "cuda")] == ["GPU-1"]
    assert [device.kind for device in choose_devices(3, "cpu")] == ["cpu"] * 3
    with pytest.raises(ClusterError, match=r"3 engines .* only 2 GPUs .* device='cpu'"):
        choose_devices(3, "auto")
    monkeypatch.setattr(hardware, "cuda_devices", list)
    assert len(choose_devices(None, "auto")) == 4
    with pytest.raises(ClusterError, match="no GPU can be seen"):
        choose_devices(1, "cuda")


def test_impossible_clusters_are_refused_before_anything_starts() -> None:
    with pytest.raises(ClusterError, match="0 engines"):
        Cluster(0, name="none", device="cpu")
    with pytest.raises(ClusterError, match="100000000 engines were asked for; one machine starts at most 1024"):
        Cluster(10**8, name="none", device="cpu")
    with pytest.raises(ClusterError, match="device is 'tpu'"):
        Cluster(1, name="none", device="tpu")
    with pytest.raises(ClusterError, match=r"'\.\./x' cannot name a cluster"):
        Cluster(1, name="../x")
    assert running_clusters() == []
    with pytest.raises(ClusterError, match="no cluster runs"):
        Cluster.attach()
    with pytest.raises(ClusterError, match=r"'a' is not running; cluster\.start"):
        Cluster(name="a", start=False).submit(print)
    Cluster(name="a", start=False).stop()  # Nothing runs, and that is what is asked for.


def test_environment_of_a_rank() -> None:
    environment = rank_environment(1, device_fields([gpu(0), gpu(1)]), "/meet")
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert (environment["RANK"], environment["WORLD_SIZE"], environment["LOCAL_RANK"]) == ("1", "2", "1")
    assert {environment[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")} == {"3"}
    assert json.loads(environment["SPEEDLAB_DEVICE"])["uuid"] == "GPU-1"
    cpu = rank_environment(0, device_fields(hardware.cpu_devices(1)), "/meet")
    assert cpu["CUDA_VISIBLE_DEVICES"] == ""


def test_ipyparallel_knows_the_launcher_by_name(tmp_path: Path) -> None:
    import ipyparallel

    cluster = ipyparallel.Cluster(engines="speedlab", profile_dir=str(tmp_path), load_profile=False, parent=None)
    assert cluster.engine_launcher_class is DeviceEngineSetLauncher


def box_state(controller_pid: int) -> ClusterState:
    return ClusterState(
        name="box",
        token="t",
        controller_pid=controller_pid,
        started=1.5,
        devices=(gpu(0),),
        engines=(EngineEntry(rank=0, pid=1, engine_id=4),),
        backend="gloo",
    )


def test_state_is_private_and_comes_back_equal() -> None:
    home = ClusterDir("box")
    home.create("token")
    state = box_state(os.getpid())
    home.write(state)
    assert home.read() == state
    assert not state.running  # This process is alive, but it does not carry the token.
    assert stat.S_IMODE((home.path / "cluster.json").stat().st_mode) == 0o600
    assert {stat.S_IMODE(p.stat().st_mode) for p in (home.path, home.rendezvous, home.log)} == {0o700}
    assert home.generation == 0
    home.next_generation()
    assert (home.rendezvous / "generation").read_text() == "1\n"
    for damaged in ("{}", "[" * 50_000, state.to_json().replace('"token"', "null"), json.dumps({"devices": 5})):
        (home.path / "cluster.json").write_text(damaged)
        with pytest.raises(ClusterError, match="damaged"):
            home.read()
    home.remove()
    assert home.read() is None


def test_generations_only_grow_whoever_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    home = ClusterDir("box")
    home.create("token")

    def count_on() -> None:
        for _ in range(10):
            home.next_generation()

    def hear_of_one() -> None:  # As an engine does, of one that may be past by then.
        for back in range(10):
            rendezvous.set_generation(home.rendezvous, max(0, home.generation - back))

    with ThreadPoolExecutor(5) as threads:
        for done in [threads.submit(work) for work in (count_on, count_on, hear_of_one, count_on, hear_of_one)]:
            done.result(20)
    assert home.generation == 30
    monkeypatch.setattr(rendezvous, "_LOCK_SECONDS", 0.05)
    held = file_locks.hold(home.rendezvous / "generation.lock", 0.0)
    with pytest.raises(TimeoutError, match=r"generation.lock: another process has held it for 0.05 s"):
        home.next_generation()
    os.close(held)
    home.next_generation()
    assert home.generation == 31


def test_a_home_that_two_hosts_share_keeps_the_clusters_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    def on(host: str) -> ClusterDir:
        monkeypatch.setattr(platform, "node", lambda: host)
        return ClusterDir("box")

    one = on("one")
    one.create("token")
    one.write(box_state(1))
    two = on("two")
    assert two.read() is None
    two.create("token")
    two.write(replace(box_state(2), host="two"))
    assert (two.read(), two.generation) == (replace(box_state(2), host="two"), 0)
    assert on("one").read() == replace(box_state(1), host="one")
    on("one").remove()
    assert on("one").read() is None
    assert on("two").read() is not None  # As before, whatever has become of the other.
    on("one").create("token")
    on("two").remove()
    assert on("one").generation == 0


def test_a_damaged_cluster_is_named_and_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("box", "broken"):
        ClusterDir(name).create("token")
    state = box_state(os.getpid())
    written = json.loads(state.to_json()) | {"unknown": 1}
    written["engines"][0]["unknown"] = written["devices"][0]["unknown"] = 1
    (ClusterDir("box").path / "cluster.json").write_text(json.dumps(written))
    (ClusterDir("broken").path / "cluster.json").write_text('{"name": "broken"')
    monkeypatch.setattr(ClusterState, "running", True)
    with pytest.warns(UserWarning, match=r"broken/cluster\.json is damaged"):
        assert running_clusters() == [state]


def test_processes_are_known_by_their_token() -> None:
    code = "import subprocess, sys; subprocess.Popen(['sleep', '60'], start_new_session=True); print('up'); input()"
    environment = {**os.environ, processes.TOKEN: TOKEN}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = processes.marked(TOKEN)
        assert {p.pid for p in found} > {process.pid}
        assert processes.is_alive(process.pid, TOKEN)
        assert not processes.is_alive(process.pid, "other")
        assert processes.end(found, patience_seconds=0.2) == []
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in found)


def test_processes_that_have_the_numbers_of_a_cluster_after_a_restart_of_everything_are_not_its(tmp_path: Path) -> None:
    with subprocess.Popen(["cat"], **PIPES) as other:
        home = ClusterDir("box")
        home.create(TOKEN)
        engine = EngineEntry(rank=0, pid=other.pid, engine_id=0)
        home.write(replace(box_state(other.pid), engines=(engine,)))
        home.supervisor_socket.touch()
        assert running_clusters() == []
        with pytest.raises(ClusterError, match="cluster 'box' does not run"):
            Cluster.attach("box")
        hands = LocalProcesses(home, None, TOKEN, None)  # type: ignore[arg-type]  # it is asked nothing
        assert hands.interrupt({engine: "a message"}) == []
        assert [look.alive for look in hands.look([engine])] == [False]
        assert hands.end([engine], lambda gone: None) == []
        Cluster(name="box", start=False).stop()
        assert not home.path.exists()
        assert other.stdin is not None
        other.stdin.close()
        assert other.wait(10) == 0, "it has ended by itself"


class LoadingProcess:
    """One that has no environment yet when it is looked at first; a thread of the kernel never has one."""

    def __init__(self, pid: int, parent: int, environments: list[dict[str, str]]) -> None:
        self.pid, self._parent, self._environments = pid, parent, environments
        self.looks = 0

    def environ(self) -> dict[str, str]:
        self.looks += 1
        return self._environments[min(self.looks, len(self._environments)) - 1]

    def create_time(self) -> float:
        return time.time()

    def ppid(self) -> int:
        return self._parent


def test_a_process_whose_program_is_being_loaded_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    loading, thread = LoadingProcess(10, 1, [{}, {}, {processes.TOKEN: TOKEN}]), LoadingProcess(11, 2, [{}])
    monkeypatch.setattr(psutil, "process_iter", lambda: iter([loading, thread]))
    monkeypatch.setattr(processes, "descendants", lambda process: [])
    assert processes.marked(TOKEN) == [loading]
    assert (loading.looks, thread.looks) == (3, 1)


@pytest.mark.parametrize("word", ["stop", "start"])
def test_what_a_start_has_left_that_nobody_survived_is_ended(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Supervisor and kernel were killed before it was written down what runs."""
    ClusterDir("default").create(TOKEN)
    with subprocess.Popen(["cat"], env={**os.environ, processes.TOKEN: TOKEN}, **PIPES) as process:
        # Popen returns when the new program is being loaded; a moment later the process has its environment.
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"up\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"up\n"
        assert processes.is_alive(process.pid, TOKEN)
        cluster = Cluster(start=False)
        monkeypatch.setattr(cluster, "_start", lambda: None)
        getattr(cluster, word)()
        assert process.wait(5) < 0


class StubbornError(Exception):
    def __str__(self) -> str:
        raise ValueError("no")


@pytest.fixture
def own_interrupts() -> Iterator[None]:
    """`remote.call` leaves SIGINT ignored, which is right in an engine only."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    return remote.call(pack((function, arguments, {}), {}))


@pytest.mark.usefixtures("own_interrupts")
def test_what_a_rank_raised_becomes_plain_text() -> None:
    def fail(how: BaseException) -> None:
        raise how

    error = RuntimeError("shapes differ")
    error.speedlab_step, error.speedlab_module = 3, "blocks.0"  # type: ignore[attr-defined]  # as the engine does
    failure = call(fail, error)[remote.FAILED]
    assert (failure["kind"], failure["message"]) == ("RuntimeError", "shapes differ")
    assert (failure["step"], failure["module"]) == (3, "blocks.0")
    assert "in fail" in failure["traceback"]
    assert "remote.py" not in failure["traceback"]
    assert "cannot be shown: ValueError" in call(fail, StubbornError())[remote.FAILED]["message"]
    assert call(fail, SystemExit(3))[remote.FAILED]["kind"] == "SystemExit"
    assert unpack(call(max, 1, 2)) == 2


@pytest.mark.usefixtures("own_interrupts")
def test_an_interrupt_waits_until_a_library_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of numba, imported by a task that was interrupted, made every later import of it fail in that engine."""

    def use(name: str) -> bool:
        whole = importlib.import_module(name).whole
        os.kill(os.getpid(), signal.SIGINT)  # As the cluster does again, to what a first signal did not end.
        return whole

    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("speedlab_test_library", "speedlab_test_module_of_a_user"):
        (tmp_path / f"{name}.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nwhole = True\n")
    assert call(use, "speedlab_test_module_of_a_user")[remote.FAILED]["kind"] == "KeyboardInterrupt"
    assert "speedlab_test_module_of_a_user" not in sys.modules  # A module that trains as it is imported can be stopped.
    monkeypatch.setattr(remote, "_LIBRARIES", (str(tmp_path),))
    assert call(use, "speedlab_test_library")[remote.FAILED]["kind"] == "KeyboardInterrupt"
    assert sys.modules.pop("speedlab_test_library").whole


def test_a_cluster_that_ends_while_a_handle_connects_is_told_without_its_logs() -> None:
    """`speedlab stop` while a training in another terminal ends its engines: their logs explain nothing."""
    home = ClusterDir("box")
    home.create("token")
    (home.log / "ipcontroller.log").write_text("a line of a log\n" * 30)
    cluster = Cluster(name="box", start=False)
    cluster._take(box_state(2**22 + 1))
    with pytest.raises(ClusterError) as reported:
        cluster._connect()
    assert str(reported.value) == "cluster 'box' ended just now; speedlab.Cluster(name='box') starts it again"


def test_what_goes_is_this_hosts_folder_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the name stands for another folder once that is gone: one of an older version, which says no host."""
    ClusterDir("box").create("token")
    (ClusterDir("box").path / "host").unlink()
    older = ClusterDir("box").path
    monkeypatch.setattr(platform, "node", lambda: "two")
    own = older.with_name("box@two")
    own.mkdir()
    ClusterDir("box").remove()
    assert older.is_dir()
    assert not own.exists()


def test_files_that_are_known_by_their_names_are_there() -> None:
    """Interrupts, the debugger and errors recognise frames by the end of a file's name."""
    packages = Path(speedlab.__file__).parents[1]
    own = {str(path.relative_to(packages)) for path in packages.glob("speedlab/**/*.py")}
    signs = {sign for signs, _ in oom_report._CATEGORY_OF for sign in signs if sign.endswith(".py")}
    ends = {*remote._WHOLE, *rank_debugger._ABOVE, *errors._TRANSPORT, *signs}
    missing = {end for end in ends if not any(path.endswith(end) for path in own)}
    assert missing == {os.path.join("distributed", "distributed_c10d.py"), "IPython/core/interactiveshell.py"}
