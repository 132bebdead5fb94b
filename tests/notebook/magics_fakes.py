"""What the tests of magics share: an IPython shell, and clusters, runs and engines without processes."""

from __future__ import annotations

import queue
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from speedlab_notebook import load_ipython_extension, unload_ipython_extension
from traitlets.config import Config

from speedlab.cluster import ClusterError, EngineStatus, RankError, RemoteFailure
from speedlab.cluster.debug.connection import server_path
from speedlab.cluster.errors import name_ranks
from speedlab.config import RunConfig
from speedlab.hardware import Device
from speedlab.network import LinkRate
from speedlab.telemetry.records import Ledger, RunState, StepRecord
from speedlab.telemetry.run_folder import RunFolder
from speedlab.telemetry.trace import write_trace

DEVICE = Device(
    kind="cpu",
    name="cpu <0>",
    uuid="",
    cores=(0,),
    threads=1,
    capacity_bytes=4 * 2**30,
    free_bytes=2**30,
    fast_dtype="float32",
)


class FakeResults:
    """What Cluster.execute returns; the test ends it."""

    def __init__(self, ranks: list[int], messages: FakeMessages | None = None) -> None:
        self.ranks = ranks
        self.interrupts = 0
        self._messages = messages or FakeMessages()
        self.failures: dict[int, RemoteFailure] = {}
        self.abandoned = ""
        self._callbacks: list[Callable[[Any], object]] = []

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        self._callbacks.append(callback)

    def sayings(self, timeout_seconds: float) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
        return self._messages.take(timeout_seconds)

    def interrupt(self) -> None:
        self.interrupts += 1

    def finish(self, failures: Mapping[int, RemoteFailure] | None = None) -> None:
        self.failures = dict(failures or {})
        for callback in self._callbacks:
            callback(self)

    def abandon(self, reason: str) -> None:
        self.abandoned = reason
        self.finish({rank: RemoteFailure(kind="EngineDied", message=reason) for rank in self.ranks})

    def result(self) -> list[None]:
        if self.failures:
            raise RankError(self.failures)
        return [None] * len(self.ranks)


class FakeCluster:
    """A cluster of two ranks without processes. `running` and the engines' states are the test's to set."""

    messages: FakeMessages
    known: dict[str, FakeCluster] = {}  # noqa: RUF012  # the clusters of one test; the fixture makes it anew

    def __init__(
        self,
        engines: int | None = None,
        *,
        name: str = "default",
        device: str = "auto",
        backend: str | None = None,
        link: str | None = None,
        timeout_seconds: float | None = None,
    ) -> None:
        if engines not in (None, 2):
            raise ClusterError(f"cluster {name!r} runs with 2 engines, and {engines} were asked for; stop it first")
        self.name = name
        self.token = f"token-of-{name}"
        self.running = True
        self.asked = (engines, device, backend)
        self.timeout_seconds = timeout_seconds
        self.devices = [DEVICE, DEVICE]
        self.link = LinkRate.parse(link) if link else None
        self.size = 2
        self.directory = Path.cwd()
        self.engine_states = ["idle", "idle"]
        self.executed: list[tuple[str, Any]] = []
        self.doors: list[str] = []
        """Of each cell that was executed, "" where nobody serves one."""
        self.results = FakeResults([0, 1])
        self.interrupts = 0
        self.interrupted: list[int] = [0, 1]
        self.controller_died = False
        FakeCluster.known[name] = self

    @classmethod
    def attach(cls, name: str | None = None) -> FakeCluster:
        for cluster in cls.known.values():
            if cluster.running and name in (None, cluster.name):
                return cluster
        raise ClusterError("no cluster runs; speedlab.Cluster() starts one")

    def start(self) -> None:
        assert self.running

    def status(self) -> list[EngineStatus]:
        return [
            EngineStatus(rank=rank, engine_id=rank + 5, pid=100 + rank, device=DEVICE, state=state, rss_bytes=2**28)
            for rank, state in enumerate(self.engine_states)
        ]

    def execute(self, code: str, *, ranks: list[int] | None = None, shown: bool = False, door: str = "") -> FakeResults:
        assert shown
        assert not door or server_path(self.directory, door).exists()
        self.doors.append(door)
        if ranks and max(ranks) > 1:
            raise ClusterError(f"there is no {name_ranks(ranks)}; cluster {self.name!r} has ranks 0–1")
        self.executed.append((code, ranks))
        self.results = FakeResults(ranks or [0, 1], FakeCluster.messages)
        return self.results

    def interrupt(self) -> list[int]:
        self.interrupts += 1
        return self.interrupted

    def stop(self) -> None:
        self.running = False

    def check_controller(self) -> None:
        if self.controller_died:
            raise ClusterError("the controller has died")


class FakeRun:
    def __init__(self, folder: RunFolder, cluster: FakeCluster | None) -> None:
        self.folder, self.cluster = folder, cluster

    step, _attach = 0, None
    name = property(lambda self: self.folder.name)
    config = property(lambda self: self.folder.config)
    state = property(lambda self: self.folder.read_status().state)

    def table(self) -> list[dict[str, Any]]:
        return []

    def trace(self, path: Path, step: int | None = None) -> int:
        return write_trace(self.folder, path, step)


class FakeMessages:
    """What ranks say in a cell: what the test says."""

    def __init__(self) -> None:
        self.queue: queue.Queue[tuple[int, str, Mapping[str, Any]]] = queue.Queue()

    def say(self, rank: int, text: str, stream: str = "stdout") -> None:
        self.queue.put((rank, "stream", {"name": stream, "text": text}))

    def show(self, rank: int, kind: str = "display_data", display_id: str | None = None, **data: str) -> None:
        bundle = {name.replace("_", "/"): value for name, value in data.items()}
        content = {"data": bundle, "metadata": {}, "transient": {"display_id": display_id} if display_id else {}}
        self.queue.put((rank, kind, content))

    def idle(self, *ranks: int) -> None:
        for rank in ranks:
            self.queue.put((rank, "status", {"execution_state": "idle"}))

    def take(self, timeout_seconds: float) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
        try:
            yield self.queue.get(timeout=timeout_seconds)
            while True:
                yield self.queue.get_nowait()
        except queue.Empty:
            return


def cell_is_over() -> bool:
    """Whether every `%%ranks` cell has said its last."""
    return not any(thread.name == "speedlab-ranks-cell" for thread in threading.enumerate())


@dataclass
class Notebook:
    """The shell with what is around it."""

    shell: InteractiveShell
    display: CapturingDisplayPublisher
    messages: FakeMessages
    capsys: pytest.CaptureFixture[str]
    shown: list[tuple[Any, ...]]

    def run(self, code: str) -> str:
        """Run a cell that succeeds; what it printed."""
        self.shell.run_cell(code).raise_error()
        return self.capsys.readouterr().out

    def error(self, code: str) -> BaseException:
        """Run a cell that fails; its exception."""
        result = self.shell.run_cell(code)
        error = result.error_in_exec
        assert error is not None
        return error

    def last(self, kind: str = "text/html") -> str:
        return self.display.outputs[-1]["data"][kind]


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Notebook]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setattr(FakeCluster, "known", {})
    monkeypatch.setattr("speedlab.cluster.Cluster", FakeCluster, raising=False)
    monkeypatch.setattr("speedlab.cluster.Run", FakeRun, raising=False)
    monkeypatch.setattr("speedlab.cluster.attach", attach, raising=False)
    monkeypatch.setattr(
        "speedlab.cluster.files.cluster_dir.running_clusters",
        lambda: [cluster for cluster in FakeCluster.known.values() if cluster.running],
    )
    messages = FakeMessages()
    monkeypatch.setattr(FakeCluster, "messages", messages, raising=False)
    shown: list[tuple[Any, ...]] = []
    for name, file in (("panel", "panel"), ("dashboard", "widget")):
        module: Any = types.ModuleType(f"speedlab_notebook.{name}.{file}")
        module.show = lambda *what, name=name: shown.append((name, *what))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(module.__name__, module, raising=False)
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    shell = InteractiveShell.instance(config=config)
    shell.kernel = object()  # As in a notebook: displays can be updated.
    shell.display_pub = display = CapturingDisplayPublisher()
    load_ipython_extension(shell)
    yield Notebook(shell, display, messages, capsys, shown)
    unload_ipython_extension(shell)
    InteractiveShell.clear_instance()


def attach(name: Any = None) -> FakeRun:
    """As speedlab.cluster.attach, for runs in ./runs."""
    from speedlab.cluster.known_runs import RunError, find_runs

    for path in find_runs("runs"):
        if name is None or str(name) in (path.name, str(path.resolve())):
            folder = RunFolder(path)
            cluster = FakeCluster.known.get(folder.read_status().cluster)
            return FakeRun(folder, cluster if cluster is not None and cluster.running else None)
    raise RunError(f"there is no run {name!r}")


def make_run(cluster: FakeCluster, name: str, state: RunState = RunState.RUNNING) -> RunFolder:
    folder = RunFolder.create(RunConfig(name=name, zero=3))
    status = replace(
        folder.read_status(), state=state, step=12, cluster=cluster.name, token=cluster.token, rank_pids=(100, 101)
    )
    folder.write_status(status)
    return folder


RECORD = StepRecord(
    step=1234,
    rank=1,
    time=0.0,
    loss=5.91,
    learning_rate=1e-3,
    grad_norm=1.0,
    loss_scale=1.0,
    zero_stage=2,
    tokens=41_200,
    flops=1.0,
    seconds=1.0,
    heldout_loss=6.02,
    ledger=Ledger(parameters=2**30, reported_bytes=3 * 2**29, capacity_bytes=2**34),
)
