"""The dashboard without a browser: what is sent, when, and what stays in the notebook.

`Page` does with messages what extension/lab/src/dashboard/figures.ts does. The browser tier looks at the pixels.
"""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anywidget
import numpy as np
import pytest
from IPython.core.formatters import DisplayFormatter
from ipywidgets.widgets.widget import _remove_buffers
from speedlab_notebook import anywidget_assets
from speedlab_notebook.anywidget_assets import PlotlyBundle
from speedlab_notebook.dashboard import widget as module
from speedlab_notebook.dashboard.static_picture import WIDGET_MIME, StaticPicture
from speedlab_notebook.dashboard.widget import Dashboard, show

from speedlab.cluster import Run
from speedlab.cluster.known_runs import RUN_MIME, run_id
from speedlab.config import RunConfig
from speedlab.telemetry.feed import Feed
from speedlab.telemetry.figures.deltas import SERVED, Drawing
from speedlab.telemetry.history import BARS, POINTS, History
from speedlab.telemetry.records import Event, Ledger, RunState, Span, StepRecord
from speedlab.telemetry.run_folder import RunFolder, Status

MIB = 2**20
RUNNING = Status(state=RunState.RUNNING, steps=1000, rank_pids=(1, 2))


def record(step: int, rank: int = 0, **changes: Any) -> StepRecord:
    ledger = Ledger(parameters=20 * MIB, gradients=9 * MIB, activations=step * 1000, capacity_bytes=100 * MIB)
    values: dict[str, Any] = {
        "step": step,
        "rank": rank,
        "time": 1.0,
        "loss": 8 - step / 100,
        "learning_rate": 1e-3,
        "grad_norm": 1.0,
        "loss_scale": 1.0,
        "zero_stage": 2,
        "tokens": 4096,
        "flops": 1e9,
        "seconds": 0.1,
        "ledger": ledger,
        "phases": {"forward": 0.03, "backward": 0.06},
    }
    return StepRecord(**{**values, **changes})


def event(kind: str, step: int, **changes: Any) -> Event:
    return Event(**{"kind": kind, "step": step, "time": 1.0, **changes})


def eventually(check: Callable[[], Any], seconds: float = 30.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.005)
    return found


class Page:
    """The figures as a page keeps them."""

    def __init__(self, frame: dict[str, Any], buffers: list[bytes]) -> None:
        assert frame["type"] == "Keyframe"
        self.seq = frame["seq"]
        self.head = frame["head"]
        self.figures = self._unpack(frame["figures"], buffers)

    @classmethod
    def of(cls, view: Dashboard) -> Page:
        """As the widget's state has it."""
        return cls(view.keyframe["message"], list(map(base64.b64decode, view.keyframe["buffers"])))

    def take(self, message: dict[str, Any], buffers: list[bytes]) -> int:
        """Apply a tick; returns its size in bytes."""
        assert message["type"] == "Changes"
        assert message["seq"] == self.seq + 1
        self.seq = message["seq"]
        for part in message["parts"]:
            getattr(self, f"_{part['part']}")(part, buffers)
        return len(json.dumps(message)) + sum(map(len, buffers))

    def _unpack(self, value: Any, buffers: list[bytes]) -> Any:
        if isinstance(value, dict) and "f32" in value:
            return np.frombuffer(buffers[value["f32"]], np.float32)
        if isinstance(value, dict):
            return {key: self._unpack(item, buffers) for key, item in value.items()}
        return [self._unpack(item, buffers) for item in value] if isinstance(value, list) else value

    def _figure(self, part, buffers) -> None:
        self.figures[part["figure"]] = self._unpack({key: part[key] for key in ("data", "layout")}, buffers)

    def _extend(self, part, buffers) -> None:
        values, at = np.frombuffer(buffers[part["buffer"]], np.float32), 0
        for index, count in zip(part["traces"], part["points"], strict=True):
            trace = self.figures[part["figure"]]["data"][index]
            trace["x"] = np.concatenate([trace["x"], values[at : at + count]])
            trace["y"] = np.concatenate([trace["y"], values[at + count : at + 2 * count]])
            at += 2 * count
        assert at == len(values)

    def _bars(self, part, buffers) -> None:
        figure = self.figures[part["figure"]]
        rows = np.frombuffer(buffers[part["buffer"]], np.float32).reshape(len(figure["data"]), -1)
        for trace, row in zip(figure["data"], rows, strict=True):
            trace["y"] = row
        for note, text in zip(figure["layout"]["annotations"], part["notes"], strict=True):
            note["text"] = text

    def _marks(self, part, buffers) -> None:
        for name in ("loss", "throughput", "anatomy", "gradient"):
            self.figures[name]["layout"] |= {key: part[key] for key in ("shapes", "annotations")}

    def _head(self, part, buffers) -> None:
        self.head = {key: part[key] for key in ("text", "state", "mark", "note")}


def comparable(figures: dict[str, Any]) -> str:
    return json.dumps(figures, default=lambda array: [None if np.isnan(v) else float(v) for v in array])


# What is sent


@pytest.mark.parametrize("pace", [1, 7, 60])
def test_keyframe_and_ticks_make_the_same_page_as_a_later_keyframe(pace):
    history, records, events = History(), {0: [], 1: []}, [event("started", 0, details={"peak_flops": 1e12})]
    drawing = Drawing(history, name="sample", clock=itertools.count().__next__)
    page = Page(*drawing.keyframe(RUNNING))
    for step in range(1, 2 * POINTS + 100):
        for rank in records:
            records[rank].append(record(step, rank, heldout_loss=5.0 if step % 50 == 0 else None))
        if step == 123:
            events.append(event("reshaped", 123, text="zero stage 2 → 3", details={"before": 2, "zero": 3}))
        if step % pace == 0:
            history.update(records, events)
            page.take(*drawing.tick(RUNNING))
    whole = Page(*Drawing(History.of(records, events), name="sample").keyframe(RUNNING))
    done = len(records[0]) // pace * pace
    if done == len(records[0]):
        assert comparable(page.figures) == comparable(whole.figures)
        # The note counts the time since the last step.
        assert {**page.head, "note": ""} == {**whole.head, "note": ""}
    assert int(page.figures["loss"]["data"][1]["x"][-1]) <= done
    assert len(page.figures["anatomy"]["data"][0]["x"]) <= BARS
    assert max(len(trace["x"]) for trace in page.figures["loss"]["data"]) <= POINTS


def test_places_come_with_the_first_record_that_has_some_and_follow_it():
    history, records = History(), {0: [record(1)]}
    history.update(records, [])
    drawing = Drawing(history, name="sample", clock=itertools.count().__next__)
    page = Page(*drawing.keyframe(RUNNING))
    assert "places" not in page.figures
    for step, count in ((2, 2**30), (3, 2**29)):
        ledger = Ledger(parameters=2**20, capacity_bytes=2**30, disk={"gradients": count}, disk_capacity_bytes=2**31)
        records[0].append(record(step, ledger=ledger, phases={"forward": 0.1, "offload": 0.2}))
        history.update(records, [])
        page.take(*drawing.tick(RUNNING))
        gradients = next(trace for trace in page.figures["places"]["data"] if trace["name"] == "gradients")
        assert gradients["x"][1] == "disk, of 2.0 GiB"
        assert float(gradients["y"][1]) == 100 * count / 2**31
    whole = Page(*Drawing(History.of(records), name="sample").keyframe(RUNNING))
    assert {name: comparable(each) for name, each in page.figures.items()} == {
        name: comparable(each) for name, each in whole.figures.items()
    }
    assert "offload" in [trace["name"] for trace in page.figures["anatomy"]["data"]]


def test_an_exchange_comes_with_the_first_record_that_has_one_and_grows():
    history, records = History(), {0: [record(1)]}
    history.update(records, [])
    drawing = Drawing(history, name="sample", clock=itertools.count().__next__)
    page = Page(*drawing.keyframe(RUNNING))
    assert "exchange" not in page.figures
    reported = {"compressed": 1.0, "error_norm": 2.0, "sent_bytes": 32.0, "float32_bytes": 1000.0}
    for step in (2, 3, 4):
        records[0].append(record(step, exchange=reported | {"angle": 10.0 * step}))
        history.update(records, [])
        page.take(*drawing.tick(RUNNING))
        sent, angle, _ = page.figures["exchange"]["data"]
        assert len(sent["y"]) == step
        assert float(sent["y"][-1]) == pytest.approx(3.2)
        assert float(angle["y"][-1]) == 10 * step
    whole = Page(*Drawing(History.of(records), name="sample").keyframe(RUNNING))
    assert comparable(page.figures["exchange"]) == comparable(whole.figures["exchange"])


def test_a_step_costs_a_few_hundred_bytes():
    history, records = History(), {rank: [record(step, rank) for step in range(1, 40)] for rank in range(4)}
    drawing = Drawing(history, name="sample")
    history.update(records, [])
    page = Page(*drawing.keyframe(RUNNING))
    for rank in records:
        records[rank].append(record(40, rank))
    history.update(records, [])
    assert page.take(*drawing.tick(RUNNING)) < 1400


def test_bars_of_memory_come_when_a_ledger_has_changed():
    ledger = Ledger(parameters=20 * MIB, capacity_bytes=100 * MIB)
    history, records = History(), {rank: [record(1, rank, ledger=ledger)] for rank in (0, 1)}
    history.update(records, [])
    drawing = Drawing(history, name="sample", clock=itertools.count().__next__)
    page = Page(*drawing.keyframe(RUNNING))

    def sent(step: int, ledger: Ledger) -> list[str]:
        for rank in records:
            records[rank].append(record(step, rank, ledger=ledger))
        history.update(records, [])
        message, buffers = drawing.tick(RUNNING)
        page.take(message, buffers)
        return [part["figure"] for part in message["parts"] if part["part"] == "bars"]

    assert sent(2, replace(ledger)) == ["ranks"]
    less = replace(ledger, parameters=10 * MIB)
    assert sent(3, less) == ["memory", "states", "ranks"]
    assert sent(4, less) == ["ranks"]
    whole = Page(*Drawing(History.of(records), name="sample").keyframe(RUNNING))
    assert comparable(page.figures) == comparable(whole.figures)


class Counted(list):
    """Records that tell, as a feed's do, how many have come."""

    @property
    def changes(self) -> int:
        return len(self)


def test_bars_of_ranks_come_when_all_of_them_have_news_and_else_half_as_often():
    history, records, now = History(), {rank: Counted([record(1, rank)]) for rank in range(20)}, [100.0]
    history.update(records, [])
    drawing = Drawing(history, name="sample", clock=lambda: now[0])
    drawing.keyframe(RUNNING)

    def bars_come(seconds: float, *ranks: int) -> bool:
        now[0] += seconds
        for rank in ranks:
            records[rank].append(record(records[rank][-1].step + 1, rank))
        history.update(records, [])
        message = drawing.tick(RUNNING)
        return message is not None and any(part.get("figure") == "ranks" for part in message[0]["parts"])

    assert bars_come(0.1, *range(20))
    assert not bars_come(1.4, *range(20))
    assert bars_come(0.2, 0)  # The others' news are from before.
    assert not bars_come(3.9, 0)
    assert bars_come(0.1, 0, 19)
    assert bars_come(4.1, 0)


def test_nothing_new_is_not_sent():
    drawing = Drawing(History.of({0: [record(1)]}), name="sample")
    drawing.keyframe(RUNNING)
    assert drawing.tick(RUNNING) is None


def test_bars_follow_a_change_of_stage_on_a_scale_that_stays():
    history, records = History(), {0: [record(1)]}
    history.update(records, [])
    drawing = Drawing(history, name="sample", clock=itertools.count().__next__)
    page = Page(*drawing.keyframe(RUNNING))
    before = page.figures["states"]["layout"]["yaxis"]["range"]
    records[0].append(record(2, zero_stage=3, ledger=Ledger(parameters=5 * MIB, capacity_bytes=100 * MIB)))
    history.update(records, [])
    page.take(*drawing.tick(RUNNING))
    assert page.figures["states"]["data"][0]["y"].tolist() == [5]
    assert page.figures["states"]["layout"]["yaxis"]["range"] == before
    assert "ZeRO stage 3" in page.head["text"]


def test_a_return_to_a_checkpoint_redraws_the_curves():
    history, records = History(), {0: [record(step) for step in range(1, 20)]}
    history.update(records, [])
    drawing = Drawing(history, name="sample", clock=itertools.count().__next__)
    page = Page(*drawing.keyframe(RUNNING))
    records[0].append(record(10, loss=1.0))
    page.take(*drawing.tick(RUNNING, rewritten=history.update(records, [])))
    assert page.figures["loss"]["data"][0]["x"].tolist() == list(range(1, 11))
    assert float(page.figures["loss"]["data"][0]["y"][-1]) == 1


def test_a_run_that_rests_and_goes_on_is_drawn_without_a_seam():
    history, records = History(), {0: [record(step) for step in range(1, 2 * BARS)]}
    history.update(records, [])
    drawing = Drawing(history, name="sample", clock=itertools.count().__next__)
    page = Page(*drawing.keyframe(replace(RUNNING, state=RunState.PAUSED)))
    assert int(page.figures["anatomy"]["data"][0]["x"][-1]) == 2 * BARS - 1
    records[0] += [record(step) for step in range(2 * BARS, 2 * BARS + 1)]
    history.update(records, [])
    page.take(*drawing.tick(RUNNING))
    assert page.figures["anatomy"]["data"][0]["x"].tolist() == list(range(2, 2 * BARS + 1, 2))


def pipeline(step: int, rank: int) -> StepRecord:
    """A rank of two in a pipeline, that does a forward and a backward."""
    spans = [Span("F", rank, 0, 0.01 * rank, 0.01), Span("B", rank, 0, 0.04 - 0.02 * rank, 0.02)]
    return record(step, rank, began=float(step), timeline=spans)


def test_a_pipelines_timeline_comes_once_a_second_and_for_the_step_that_is_pointed_at():
    records = {rank: [pipeline(step, rank) for step in (1, 2)] for rank in (0, 1)}
    history, now = History.of(records), [100.0]
    drawing = Drawing(history, name="sample", clock=lambda: now[0])
    page = Page(*drawing.keyframe(RUNNING))

    def shown() -> str:
        return page.figures["pipeline"]["layout"]["title"]["text"]

    assert shown() == "pipeline, step 2: bubble 50 % (theory 50 %), 1 micro-batch"

    def goes_on(step: int) -> None:
        for rank in records:
            records[rank].append(pipeline(step, rank))
        history.update(records, [])
        page.take(*drawing.tick(RUNNING))

    now[0] += 0.5
    goes_on(3)
    assert shown().startswith("pipeline, step 2:")  # Too soon.
    now[0] += 0.6
    goes_on(4)
    assert shown().startswith("pipeline, step 4:")
    drawing.pipeline_step = 1
    page.take(*drawing.tick(RUNNING))
    now[0] += 2
    goes_on(5)
    assert shown().startswith("pipeline, step 1:")
    drawing.pipeline_step = None
    page.take(*drawing.tick(RUNNING))
    assert shown().startswith("pipeline, step 5:")


def test_a_figure_of_what_is_no_more_leaves_the_page_with_a_keyframe():
    on_disk = Ledger(parameters=2**20, capacity_bytes=2**30, disk={"gradients": 2**30}, disk_capacity_bytes=2**31)
    records = {rank: [replace(pipeline(1, rank), ledger=on_disk)] for rank in (0, 1)}
    history = History.of(records)
    drawing = Drawing(history, name="sample", clock=itertools.count().__next__)
    page = Page(*drawing.next(RUNNING))
    assert {"pipeline", "places"} <= set(page.figures)
    for rank in records:
        records[rank] += [record(step, rank, ledger=on_disk) for step in range(2, 12)]  # Reshaped to pp 1.
    history.update(records, [])
    page = Page(*drawing.next(RUNNING))
    assert "pipeline" not in page.figures
    assert "places" in page.figures
    for rank in records:
        records[rank].append(record(12, rank))  # Moved to the device.
    history.update(records, [])
    page = Page(*drawing.next(RUNNING))
    assert not {"pipeline", "places"} & set(page.figures)
    for rank in records:
        records[rank].append(record(13, rank))
    history.update(records, [])
    assert drawing.next(RUNNING)[0]["type"] == "Changes"


def test_silence_is_told_though_nothing_comes():
    now = [1.0]
    drawing = Drawing(History.of({0: [record(1)]}), name="sample", clock=lambda: now[0])
    page = Page(*drawing.keyframe(RUNNING))
    assert drawing.tick(RUNNING) is None
    now[0] = 31.0
    page.take(*drawing.tick(RUNNING))
    assert page.head["note"] == "no step for 30 s; they took 100 ms each"


# The widget


class Source:
    """A run folder that a test writes by hand."""

    def __init__(self, parent: Path) -> None:
        self.folder = RunFolder.create(RunConfig(name="sample", folder=parent, steps=1000))
        self.set_state(RunState.RUNNING)

    def set_state(self, state: RunState) -> None:
        self.folder.write_status(Status(state=state, steps=1000, rank_pids=(1, 2)))

    def write(self, *steps: int) -> None:
        for rank in range(2):
            with open(self.folder.path / "records" / f"rank-{rank}.jsonl", "a") as file:
                file.writelines(record(step, rank).to_json() + "\n" for step in steps)


@pytest.fixture
def source(tmp_path) -> Source:
    return Source(tmp_path)


@pytest.fixture
def shown(source, monkeypatch) -> Iterator[tuple[Dashboard, list[tuple[dict[str, Any], list[bytes]]]]]:
    """A dashboard whose messages are kept."""
    source.write(1, 2, 3)
    sent: list[tuple[dict[str, Any], list[bytes]]] = []
    monkeypatch.setattr(Dashboard, "send", lambda self, content, buffers=None: sent.append((content, buffers or [])))
    view = Dashboard(Feed(source.folder), name="sample")
    yield view, sent
    view.close()
    assert not view.running


def test_the_first_state_has_everything_before_any_message(shown):
    view, _ = shown
    page = Page.of(view)
    assert page.figures["loss"]["data"][0]["x"].tolist() == [1, 2, 3]
    assert page.head["text"].startswith("sample · step 3/1,000 · 41 k tokens/s · loss 7.98")
    assert len(view._esm.encode()) < 32_000


def test_records_reach_the_page_from_a_thread_while_the_main_one_is_busy(source, shown):
    view, sent = shown
    page = Page.of(view)
    source.write(4, 5)

    def steps() -> list[int]:
        while sent:  # The first thing sent may tell of a tick that came before the records.
            page.take(*sent.pop(0))
        return page.figures["loss"]["data"][0]["x"].tolist()

    eventually(lambda: steps() == [1, 2, 3, 4, 5])  # This thread never gives the kernel's loop a chance.


def test_keyframes_come_by_themselves_for_a_page_that_missed_a_tick(source, shown, monkeypatch):
    view, _ = shown
    monkeypatch.setattr(module, "FIRST_KEYFRAME_SECONDS", 0.0)
    view._on_message(view, {"type": "Draw", "view": "a", "watching": True}, [])
    source.write(4)
    first = view.keyframe["message"]["seq"]
    eventually(lambda: view.keyframe["message"]["seq"] > first)
    assert Page.of(view).figures["loss"]["data"][0]["x"].tolist()[-1] == 4


def test_a_view_asks_for_tensors(source, shown):
    view, sent = shown
    view._on_message(view, {"type": "Segment", "rank": 0, "category": "activations", "place": "device"}, [])
    reported = [message for message, _ in sent if message["type"] == "Tensors"]
    assert [(each["rank"], each["category"], each["rows"]) for each in reported] == [(0, "activations", [])]
    view._on_message(view, {"type": "Segment", "rank": "<b>", "category": None, "place": 1}, [])
    assert any(message["type"] == "Problem" and "is no segment" in message["text"] for message, _ in sent)


def test_each_view_smooths_by_a_share_of_its_own(source, shown):
    view, sent = shown

    def own() -> list[tuple[Any, Any]]:
        """What was drawn for view a alone."""
        reported = [each for each in list(sent) if each[0]["type"] == "OwnDrawing"]
        assert all(message["view"] == "a" for message, _ in reported)
        return [(message["drawn"], buffers) for message, buffers in reported]

    usual = Page.of(view).figures["loss"]["data"][1]["y"].tolist()
    view._on_message(view, {"type": "Draw", "view": "b", "watching": True}, [])
    sent.clear()
    view._on_message(view, {"type": "Draw", "view": "a", "watching": True, "smoothing": 0.0}, [])
    page = Page(*own()[0])
    raw, smoothed = (trace["y"].tolist() for trace in page.figures["loss"]["data"][:2])
    assert smoothed == raw
    # What the other view says changes nothing of it, nor the other way round.
    view._on_message(view, {"type": "Draw", "view": "b", "watching": True, "keyframe": True}, [])
    assert Page.of(view).figures["loss"]["data"][1]["y"].tolist() == usual != smoothed
    source.write(4)
    eventually(lambda: len(own()) > 1)
    for message, buffers in own()[1:]:
        page.take(message, buffers)
    raw, smoothed = (trace["y"].tolist() for trace in page.figures["loss"]["data"][:2])
    assert len(raw) == 4
    assert smoothed == raw
    # Hidden, nobody draws for it; in sight again, it has everything at once.
    view._on_message(view, {"type": "Draw", "view": "a", "watching": False, "smoothing": 0.0}, [])
    sent.clear()
    source.write(5)
    eventually(lambda: sent)
    view._on_message(view, {"type": "Draw", "view": "a", "watching": True, "smoothing": 0.0}, [])
    assert Page(*own()[0]).figures["loss"]["data"][1]["x"].tolist() == [1, 2, 3, 4, 5]


def test_a_step_that_is_pointed_at_in_one_view_stays_when_another_one_speaks(shown):
    view, _ = shown
    for name, step in (("a", 2), ("b", None)):
        view._on_message(view, {"type": "Draw", "view": name, "watching": True, "step": step}, [])
    assert view._drawing.pipeline_step == 2
    view._on_message(view, {"type": "Draw", "view": "a", "watching": True, "step": None}, [])
    assert view._drawing.pipeline_step is None


def test_a_view_that_left_without_a_word_is_drawn_for_no_more_while_another_one_speaks(shown):
    view, _ = shown
    for name in ("gone", "here"):
        view._on_message(view, {"type": "Draw", "view": name, "watching": True, "smoothing": 0.0, "step": 2}, [])
    view._on_message(view, {"type": "Draw", "view": "pointed", "watching": True, "step": 2}, [])
    assert view._drawing.pipeline_step == 2
    view._loop = SimpleNamespace(is_closed=lambda: False, call_soon_threadsafe=lambda call: call())
    for name in ("gone", "pointed"):
        view._spoke[name] -= module.SILENCE_SECONDS
    eventually(lambda: set(view._spoke) == {"here"})
    assert set(view._own) == view._watching == {"here"}
    assert view._drawing.pipeline_step is None


def test_a_hidden_dashboard_stops_and_comes_back_complete(source, shown):
    view, sent = shown
    view._on_message(view, {"type": "Draw", "view": "a", "watching": True}, [])
    view._on_message(view, {"type": "Draw", "view": "b", "watching": True}, [])
    view._on_message(view, {"type": "Draw", "view": "a", "watching": False}, [])
    assert view.watched
    view._on_message(view, {"type": "Draw", "view": "b", "watching": False}, [])
    sent.clear()
    source.write(4)
    frame = view.keyframe
    time.sleep(3 * module.TICK_SECONDS)  # Ticks that do not come.
    assert (view.keyframe, sent) == (frame, [])
    view._on_message(view, {"type": "Draw", "view": "a", "watching": True}, [])
    assert view.running
    eventually(lambda: sent)
    assert 4 in Page.of(view).figures["loss"]["data"][0]["x"].tolist() or sent[0][0]["type"] == "Changes"


def test_a_page_that_was_closed_without_a_word_is_noticed_only_when_the_kernel_could_have_heard_it(shown, monkeypatch):
    view, _ = shown
    monkeypatch.setattr(module, "SILENCE_SECONDS", -1.0)

    class Loop:
        free = False

        def is_closed(self) -> bool:
            return False

        def call_soon_threadsafe(self, call) -> None:
            if self.free:
                call()

    loop = view._loop = Loop()
    view._on_message(view, {"type": "Draw", "view": "a", "watching": True}, [])
    assert not view._kernel_listens()
    assert view.running
    loop.free = True
    eventually(lambda: not view.watched)


def test_plotly_is_held_once_whatever_the_number_of_dashboards(source, shown):
    view, _ = shown
    other = Dashboard(Feed(source.folder), name="sample")
    try:
        assert other.bundle is view.bundle is PlotlyBundle.shared()
        assert b"plotly.js" in gzip.decompress(base64.b64decode(view.bundle.source))
    finally:
        other.close()


def test_nothing_that_a_kernel_sends_is_binary_as_gateways_of_jupyter_pass_that_on_to_nobody(source, monkeypatch):
    source.write(1, 2)
    sent = []
    monkeypatch.setattr(
        anywidget.AnyWidget, "send", lambda self, reported, buffers=None: sent.append((reported, buffers))
    )
    view = Dashboard(Feed(source.folder), name="sample")
    try:
        for widget in (view, view.bundle):
            assert _remove_buffers(widget.get_state())[2] == []
        source.write(3)
        changes, buffers = eventually(lambda: sent and sent[-1])
    finally:
        view.close()
    assert buffers is None
    page = Page.of(view)
    page.take(changes, list(map(base64.b64decode, changes["buffers_as_text"])))
    assert page.figures["loss"]["data"][0]["x"].tolist() == [1, 2, 3]


def test_what_cannot_be_drawn_is_told_and_tried_again(source, shown, monkeypatch, caplog):
    view, sent = shown
    eventually(lambda: view.running)
    whole, odd = view._drawing.tick, [True]

    def tick(*given: Any, **named: Any) -> Any:
        if odd:
            raise KeyError("before")
        return whole(*given, **named)

    monkeypatch.setattr(view._drawing, "tick", tick)
    source.write(4)
    reported = "This view cannot read the run, and tries again: KeyError: 'before'"
    eventually(
        lambda: (
            [content for content, _ in sent if content["type"] == "Problem"] == [{"type": "Problem", "text": reported}]
        )
    )
    source.write(5)
    eventually(lambda: view._feed.last is not None and view._feed.last.step == 5)
    assert [content["text"] for content, _ in sent if content["type"] == "Problem"] == [reported]
    odd.clear()
    eventually(lambda: [content["text"] for content, _ in sent if content["type"] == "Problem"] == [reported, ""])
    eventually(lambda: sent[-1][0]["type"] in ("Changes", "Problem") and view.running)
    assert [record.message for record in caplog.records].count("a dashboard of sample cannot be drawn") == 1


def test_a_feed_that_others_poll_too_loses_nothing(source, shown):
    view, sent = shown
    for step in range(4, 30):
        source.write(step)
        view._feed.poll(files=True)
    eventually(lambda: any("step 29/" in str(message) for message, _ in list(sent)))


# Where the server draws


@pytest.fixture
def served(source, monkeypatch) -> Iterator[tuple[Dashboard, list[tuple[dict[str, Any], list[bytes]]]]]:
    """A dashboard in a kernel of a server that draws runs."""
    monkeypatch.setenv(SERVED, "1")
    source.write(1, 2, 3)
    sent: list[tuple[dict[str, Any], list[bytes]]] = []
    monkeypatch.setattr(Dashboard, "send", lambda self, content, buffers=None: sent.append((content, buffers or [])))
    view = Dashboard(Feed(source.folder), name="sample")
    yield view, sent
    view.close()


def test_a_served_kernel_reads_no_record_until_a_widget_speaks(source, served, monkeypatch):
    view, sent = served
    looked = threading.Event()
    read = type(source.folder).read_status
    monkeypatch.setattr(type(source.folder), "read_status", lambda self: looked.set() or read(self))
    monkeypatch.setattr(view._feed, "poll", lambda **_: pytest.fail("it was read"))
    source.write(4)
    assert looked.wait(30)
    assert (view.bundle, view.keyframe, sent) == (None, {}, [])
    monkeypatch.undo()
    view._on_message(view, {"type": "Draw", "view": "a", "watching": True}, [])
    assert view.bundle is PlotlyBundle.shared()
    assert Page.of(view).figures["loss"]["data"][0]["x"].tolist() == [1, 2, 3, 4]


def test_a_widget_that_is_not_built_says_how_it_is(source, monkeypatch, tmp_path):
    monkeypatch.setattr(anywidget_assets, "_BUILT", tmp_path)
    with pytest.raises(FileNotFoundError, match="run `make pages`"):
        Dashboard(Feed(source.folder), name="sample")


# What stays


class Displays:
    """What IPython was asked to display: updates by display id."""

    def __init__(self, monkeypatch, tmp_path: Path) -> None:
        self.shown: list[tuple[Any, str | None]] = []
        self.updates: list[tuple[Any, str]] = []
        monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
        monkeypatch.setattr(
            "IPython.display.display", lambda data, raw=False, display_id=None: self.shown.append((data, display_id))
        )
        monkeypatch.setattr(
            "IPython.display.update_display", lambda data, raw, display_id: self.updates.append((data, display_id))
        )


@pytest.mark.parametrize("where", ["", "1"])
def test_one_output_is_live_and_keeps_a_picture_and_a_table_of_each_rest(source, monkeypatch, tmp_path, where):
    monkeypatch.setenv(SERVED, where)
    displays = Displays(monkeypatch, tmp_path)
    source.write(1, 2, 3)
    view = show(source.folder)
    try:
        ((first, display_id),) = displays.shown
        assert first[RUN_MIME] == {"version": 1, "run": run_id(source.folder.path), "name": "sample"}
        assert first[WIDGET_MIME]["model_id"] == view.model_id
        assert first["text/plain"].endswith("● running")
        source.write(4)
        source.set_state(RunState.FINISHED)
        eventually(lambda: displays.updates)
        ((bundle, place),) = displays.updates
        assert place == display_id
        assert (bundle[RUN_MIME], bundle[WIDGET_MIME]) == (first[RUN_MIME], first[WIDGET_MIME])
        assert bundle["text/plain"].endswith("■ finished")
        assert bundle["image/svg+xml"].startswith("<svg ")
        assert (
            "<tr><th>loss</th><td>7.99</td><td>7.96</td><td>7.99</td><td>7.96</td><td>4</td></tr>"
            in (bundle["text/html"])
        )
        assert len(json.dumps(bundle)) < 60_000
    finally:
        view.close()


def test_a_run_shows_itself_where_a_page_knows_runs(source):
    handle = Run(source.folder)
    shown, _ = DisplayFormatter().format(handle)
    assert shown[RUN_MIME] == {"version": 1, "run": run_id(source.folder.path), "name": "sample"}
    assert set(shown) == {RUN_MIME, "text/plain", "text/html"}


def test_a_run_that_is_over_shows_its_picture_at_once(source, monkeypatch, tmp_path):
    displays = Displays(monkeypatch, tmp_path)
    source.write(1, 2)
    source.set_state(RunState.STOPPED)
    show(source.folder.path).close()
    assert "■ stopped" in displays.shown[0][0]["image/svg+xml"]


@pytest.mark.parametrize("where", ["", "1"])
def test_each_rest_is_pictured_anew(source, monkeypatch, tmp_path, where):
    monkeypatch.setenv(SERVED, where)
    displays = Displays(monkeypatch, tmp_path)
    source.write(1)
    view = show(source.folder)
    try:
        states = [RunState.PAUSED, RunState.STOPPED, RunState.RUNNING, RunState.FINISHED]
        for state, count in zip(states, (1, 2, 2, 3), strict=True):
            source.set_state(state)
            eventually(lambda: len(displays.updates) == count)  # noqa: B023 called at once
            eventually(lambda: view._pictured == state)  # noqa: B023 called at once
        heads = [bundle["text/plain"].split()[-1] for bundle, _ in displays.updates]
        assert heads == ["paused", "stopped", "finished"]
    finally:
        view.close()


def test_closing_leaves_no_thread(source):
    before = threading.active_count()
    view = Dashboard(Feed(source.folder), name="sample", picture=StaticPicture(Feed(source.folder)))
    assert view.running
    view.close()
    assert not view.running
    assert threading.active_count() <= before


def test_closing_waits_for_no_slow_disk_and_the_thread_lets_go_of_the_feed(source, monkeypatch):
    monkeypatch.setattr(module, "JOIN_SECONDS", 0.05)
    view = Dashboard(Feed(source.folder), name="sample", owns_feed=True)
    reading, go_on, let_go = threading.Event(), threading.Event(), threading.Event()
    monkeypatch.setattr(view._feed, "poll", lambda: reading.set() or go_on.wait(60))
    monkeypatch.setattr(view._feed, "close", let_go.set)
    assert reading.wait(30)
    view.close()
    assert view.running
    assert not let_go.is_set()
    go_on.set()
    assert let_go.wait(30)
    eventually(lambda: not view.running)


def test_an_exit_ends_dashboards_that_nobody_closed_before_it_takes_their_feeds(source):
    source.write(1)
    code = f"""
import atexit, threading, time

def look():
    time.sleep(0.5)  # Ten polls, if the thread were still there.
    print([thread.name for thread in threading.enumerate() if "dashboard" in thread.name])

atexit.register(look)  # The first of all, so it is called last.
from speedlab_notebook.dashboard.widget import Dashboard
from speedlab.telemetry.feed import Feed
view = Dashboard(Feed({str(source.folder.path)!r}), name="sample")
assert view.running
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
