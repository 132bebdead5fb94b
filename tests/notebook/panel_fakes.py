"""What the tests of the panel share: a cluster and runs without processes, and a person's clicks."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster_helpers import wait_for
from speedlab_notebook.panel.panel import Panel

from speedlab.cluster import RankError
from speedlab.config import RunConfig
from speedlab.hardware import Device
from speedlab.network import LinkRate
from speedlab.planner.calibration import store
from speedlab.telemetry.feed import Feed
from speedlab.telemetry.records import Event, RunState, StepRecord
from speedlab.telemetry.run_folder import RunFolder
from speedlab.telemetry.writer import RecordWriter

DEVICE = Device(
    kind="cpu",
    name="cpu <0>",
    uuid="",
    cores=(0,),
    threads=1,
    capacity_bytes=4 * 2**30,
    free_bytes=3 * 2**30,
    fast_dtype="float32",
)


class Fakes:
    """A cluster of four ranks without processes, whose runs do what the test says."""

    def __init__(self, folder: Path, devices: list[Device] | None = None) -> None:
        self.name, self.running, self.devices = "fake", True, devices or [DEVICE] * 4
        self.link: LinkRate | None = None
        self.folder = folder
        self.trained: list[RunConfig] = []
        self.measured: list[tuple[Any, ...]] = []
        self.refusal: Exception | None = None
        self.may_train = threading.Event()
        self.may_train.set()

    def start(self) -> None:
        self.running = True

    def submit(self, function: Callable[..., Any], /, *args: Any, ranks: list[int]) -> FakeAnswer:
        """Only the disk is asked for: 2 GB/s to read, 1 to write."""
        self.measured.append((*args, *ranks))
        return FakeAnswer()

    def train(self, config: RunConfig) -> FakeRun:
        assert self.may_train.wait(10)
        if self.refusal is not None:
            raise self.refusal
        self.trained.append(config)
        return FakeRun(RunFolder.create(config.replace(folder=self.folder)), self)


class FakeAnswer:
    def result(self, timeout: float) -> list[tuple[float, float]]:
        return [(2e9, 1e9)]


class FakePending:
    """The answer to a word: what the test puts into `answer`."""

    def __init__(self, word: str, arguments: dict[str, Any]) -> None:
        self.word, self.arguments = word, arguments
        self.answer: Event | Exception | None = None

    def wait(self, timeout: float) -> Event:
        assert timeout == 0  # A handler or the thread never waits.
        if self.answer is None:
            raise TimeoutError
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class FakeRun:
    def __init__(self, folder: RunFolder, cluster: Fakes | None) -> None:
        self.folder, self.cluster = folder, cluster
        self.feed = Feed(folder)
        self.errors: list[RankError] = []
        self.posted: list[FakePending] = []
        self.refusal: Exception | None = None
        self.trouble: Exception | None = None
        self._writer = RecordWriter(folder, 0, stream_hz=10)
        self.now(RunState.RUNNING)

    has_engines = True
    name = property(lambda self: self.folder.name)
    config = property(lambda self: self.folder.config)

    @property
    def state(self) -> RunState:
        if self.trouble is not None:
            raise self.trouble
        self.feed.poll()
        return self.feed.status.state

    @property
    def step(self) -> int:
        return self.feed.last.step if self.feed.last is not None else 0

    def advance(self, n: int) -> FakePending:
        return self.post("step", n=n)

    def post(self, word: str, **arguments: Any) -> FakePending:
        if self.refusal is not None:
            raise self.refusal
        self.posted.append(FakePending(word, arguments))
        return self.posted[-1]

    def pause(self) -> FakePending:
        return self.post("pause")

    def resume(self) -> FakePending:
        return self.post("resume")

    def save(self) -> FakePending:
        return self.post("save")

    def prove(self) -> FakePending:
        return self.post("prove")

    def stop(self) -> FakePending:
        return self.post("stop")

    def reshape(self, **changes: Any) -> FakePending:
        return self.post("reshape", **changes)

    # What the test does to it

    def now(self, state: RunState, text: str = "") -> None:
        self.folder.write_status(replace(self.folder.read_status(), state=state, text=text))

    def record(self, step: int, stage: int) -> None:
        self._writer.write(
            StepRecord(
                step=step,
                rank=0,
                time=float(step),
                loss=5.25,
                learning_rate=1e-3,
                grad_norm=1.0,
                loss_scale=1.0,
                zero_stage=stage,
                tokens=4100,
                flops=1.0,
                seconds=0.1,
            )
        )

    def event(self, event: Event) -> None:
        self._writer.event(event)

    def close(self) -> None:
        self._writer.close()
        self.feed.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Fakes:
    return Fakes(tmp_path / "runs")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Panel]]:
    """Makes panels on a machine that nobody calibrated, and closes them and their runs at the end."""
    monkeypatch.setattr(store, "path", lambda folder=None: tmp_path / "calibration.json")
    panels: list[Panel] = []

    def make(*arguments: Any, **more: Any) -> Panel:
        panels.append(Panel(*arguments, **more))
        return panels[-1]

    yield make
    for panel in panels:
        panel.close()
        assert not panel.following
        if panel.run is not None:
            panel.run.close()  # pyright: ignore[reportAttributeAccessIssue]  # a FakeRun


@pytest.fixture
def panel(cluster: Fakes, opened: Callable[..., Panel]) -> Panel:
    return opened(cluster)


def put(panel: Panel, path: str, value: Any) -> None:
    panel.fields[path].control.value = value


def note(panel: Panel, path: str) -> str:
    return re.sub("<[^>]*>", "", panel.fields[path].note.value)


def html(panel: Panel, name: str) -> str:
    return getattr(panel._view, name).value


def offered(panel: Panel) -> set[str]:
    """Words for the run that are offered, and `reset`; what takes changes of controls back is apart."""
    edits = ("undo", "redo", "undo all")
    return {word for word, button in panel.buttons.items() if not button.disabled and word not in edits}


def train(panel: Panel) -> Any:
    panel.buttons["train"].click()
    return wait_for(lambda: panel.run if panel.following and "run" in panel.status_text else None)
