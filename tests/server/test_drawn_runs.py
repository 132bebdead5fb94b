"""A run's figures as a page gets them, from a real Jupyter server."""

from __future__ import annotations

import asyncio
import json
import struct
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import speedlab_server.schema as m
import websocket
from server_helpers import JupyterServer
from speedlab_server.figure_socket import FigureRenderer, FigureSession, frame_of
from speedlab_server.run_registry import Registry
from telemetry_samples import make_event, make_folder, make_record
from test_server import add_lines, add_records, make_run, of

from speedlab.cluster.known_runs import run_id
from speedlab.telemetry.figures.deltas import Drawing
from speedlab.telemetry.history import History
from speedlab.telemetry.records import RunState
from speedlab.telemetry.run_folder import RunFolder, Status


class Page:
    """A page that looks at one run."""

    def __init__(self, server: JupyterServer, folder: RunFolder, **options: Any) -> None:
        self._socket = server.live(way=f"{of(folder)}/drawing", **options)

    def draw(self, version: int = m.VERSION, **wish: Any) -> None:
        self._socket.send(json.dumps({"type": "Draw", "version": version, **wish}))

    def receive(self) -> tuple[dict[str, Any], list[np.ndarray]]:
        """What comes next, and its buffers."""
        opcode, data = self._socket.recv_data()
        if opcode != websocket.ABNF.OPCODE_BINARY:
            return json.loads(data), []
        message, buffers = unframed(data)
        msgspec.convert(message, m.Keyframe | m.Changes)  # It is what its types say.
        return message, buffers

    def until_step(self, step: int) -> list[dict[str, Any]]:
        """What comes until the header line has this step."""
        seen: list[dict[str, Any]] = []
        while True:
            seen.append(self.receive()[0])
            heads = [seen[-1].get("head", {}), *seen[-1].get("parts", [])]
            if any(f"step {step}/" in head.get("text", "") for head in heads):
                return seen

    def receives_nothing(self, seconds: float) -> bool:
        self._socket.settimeout(seconds)
        try:
            self._socket.recv()
        except websocket.WebSocketTimeoutException:
            return True
        finally:
            self._socket.settimeout(30)
        return False

    def close(self) -> None:
        self._socket.shutdown()


def unframed(frame: bytes) -> tuple[dict[str, Any], list[np.ndarray]]:
    (length,) = struct.unpack_from("<I", frame)
    message, at, buffers = json.loads(frame[4 : 4 + length]), 4 + length, []
    for size in message["buffers"]:
        buffers.append(np.frombuffer(frame[at : at + size], np.float32))
        at += size
    assert at == len(frame)
    return message, buffers


def test_a_page_gets_everything_then_what_is_new_and_nothing_while_it_is_hidden(server: JupyterServer) -> None:
    folder = make_run(server, "drawn", 3)
    page = Page(server, folder)
    page.draw()
    frame, buffers = page.receive()
    assert (frame["type"], frame["version"], frame["seq"]) == ("Keyframe", 1, 1)
    assert frame["head"]["text"].startswith("drawn · step 3/1,000")
    smoothed = frame["figures"]["loss"]["data"][1]["x"]["f32"]
    assert buffers[smoothed].tolist() == [1, 2, 3]
    add_records(folder, range(4, 6))
    changes = page.until_step(5)
    assert [each["type"] for each in changes] == ["Changes"] * len(changes)
    assert [each["seq"] for each in changes] == list(range(2, 2 + len(changes)))
    grown = [part for each in changes for part in each["parts"] if part.get("figure") == "throughput"]
    assert sum(part["points"][0] for part in grown) == 2

    page.draw(watching=False)
    page.draw(watching=False)
    add_records(folder, range(6, 8))
    assert page.receives_nothing(0.5)
    page.draw()
    assert page.until_step(7)[0]["type"] == "Changes"
    page.draw(keyframe=True)
    assert page.receive()[0]["type"] == "Keyframe"
    # It comes to rest: everything anew, with what an unfinished bucket holds.
    folder.write_status(Status(state=RunState.FINISHED, step=7, steps=7, rank_pids=(1, 2)))
    rests = page.receive()[0]
    assert (rests["type"], rests["head"]["state"]) == ("Keyframe", "finished")
    page.close()


def test_a_page_chooses_smoothing_and_asks_for_the_tensors_in_a_segment(server: JupyterServer) -> None:
    folder = make_run(server, "drawn-smooth", 3)
    page = Page(server, folder)
    page.draw()
    page.receive()
    page.draw(smoothing=0.0)
    changes, buffers = page.receive()
    drawn = {part["figure"]: part["data"] for part in changes["parts"] if part["part"] == "figure"}
    assert set(drawn) == {"loss", "gradient"}
    raw, smoothed = (buffers[trace["y"]["f32"]].tolist() for trace in drawn["loss"][:2])
    assert raw == smoothed
    page.close()

    home = {"holders": "replicated", "where": "device", "form": "float32"}
    row = {"name": "<b>", "unit": "root", "shape": [2], "whole_shape": [2], "cut_over": [], "owners": []}
    folder.write_placement(0, [{**row, "states": {"parameter": home}, "held": {"parameter": [0, 2, 8]}}])
    status, reported = server.ask(f"{of(folder)}/tensors?rank=0&category=parameters")
    assert (status, reported["type"], reported["measured_bytes"], reported["step"]) == (200, "Tensors", 100, 3)
    assert [(each["name"], each["bytes"]) for each in reported["rows"]] == [("<b>", 8)]
    assert msgspec.convert(reported, m.Tensors).text.startswith("92 B more are padding")
    status, reported = server.ask(f"{of(folder)}/tensors?rank=0&category=everything")
    assert (status, reported["type"]) == (400, "Problem")
    assert "is no segment" in reported["text"]


def test_at_most_ten_frames_a_second(server: JupyterServer) -> None:
    folder = make_run(server, "drawn-fast", 1, ranks=1)
    page, done = Page(server, folder), threading.Event()
    page.draw()

    def write() -> None:
        for step in range(2, 400):
            add_records(folder, range(step, step + 1))
            if done.wait(0.002):
                return

    writer = threading.Thread(target=write)
    writer.start()
    try:
        page.receive()
        began = time.monotonic()
        for _ in range(6):
            page.receive()
        assert time.monotonic() - began > 0.45  # Six intervals of 0.1 s, of which the first may have begun before.
    finally:
        done.set()
        writer.join()
        page.close()


def test_what_cannot_be_drawn_is_told_and_tried_again(server: JupyterServer) -> None:
    folder = make_run(server, "drawn-damaged", 2)
    status = (folder.path / "status.json").read_text()
    config = (folder.path / "config.json").read_text()
    (folder.path / "config.json").write_text("{")
    page = Page(server, folder)
    page.draw()
    reported, _ = page.receive()
    assert reported["type"] == "Problem"
    assert "is not valid JSON" in reported["text"]
    for name, text in (("config.json", config), ("status.json", status)):
        (folder.path / "whole").write_text(text)  # A look may come at any moment: a file is whole or not there.
        (folder.path / "whole").rename(folder.path / name)
    assert page.receive()[0] == {"type": "Problem", "version": 1, "text": ""}
    assert page.receive()[0]["type"] == "Keyframe"
    page.close()
    unknown = server.live(way=f"runs/{'0' * 16}/drawing")
    unknown.send('{"type": "Draw", "version": 1}')
    assert "there is no run with the id" in json.loads(unknown.recv())["text"]
    unknown.shutdown()


def test_who_may_not_look_and_who_speaks_otherwise_is_told(server: JupyterServer) -> None:
    folder = make_run(server, "drawn-guarded", 1)
    with pytest.raises(websocket.WebSocketBadStatusException, match="403"):
        Page(server, folder, token="")
    page = Page(server, folder)
    page.draw(step="<b>")
    assert "this is no Draw" in page.receive()[0]["text"]
    page.draw(version=2)
    assert "reload the page" in page.receive()[0]["text"]
    page.close()


def test_frames_follow_the_messages_types() -> None:
    records = {rank: [make_record(step, rank) for step in (1, 2)] for rank in range(2)}
    drawing = Drawing(History.of(records), name="typed")
    status = Status(state=RunState.RUNNING, steps=9, rank_pids=(1, 2))
    for message, buffers in (drawing.keyframe(status), news(drawing, records, status)):
        reported, numbers = unframed(frame_of(message, buffers))
        assert [array.tobytes() for array in numbers] == buffers
        assert msgspec.to_builtins(msgspec.convert(reported, m.Keyframe | m.Changes)) == reported


def news(drawing: Drawing, records: dict[int, list[Any]], status: Status) -> Any:
    """Changes with a part of every kind."""
    for rank in records:
        records[rank].append(make_record(3, rank))
    drawing.history.update(records, [make_event("checkpoint", 2)])
    message = drawing.tick(status, rewritten=False)
    assert message is not None
    kinds = {part["part"] for part in message[0]["parts"]}
    assert kinds == {"extend", "bars", "marks", "head"}
    return message


def test_a_long_run_of_many_ranks_opens_and_ticks_within_its_limits(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    folder = make_folder(tmp_path / "runs", "large")
    lines = {step: make_record(step, 0).to_json() for step in range(1, 2001)}
    for rank in range(64):
        own = [line.replace('"rank":0', f'"rank":{rank}') for line in lines.values()]
        add_lines(folder.path / "records" / f"rank-{rank}.jsonl", own)
    folder.write_status(Status(state=RunState.RUNNING, step=2000, steps=9000, rank_pids=tuple(range(1, 65))))
    registry = Registry(str(tmp_path))
    registry.runs()
    easel = FigureSession(registry, run_id(folder.path))
    (first,) = easel.look(m.Draw())
    assert isinstance(first, bytes)
    assert len(first) < 80_000
    add_lines(folder.path / "records" / "rank-0.jsonl", [make_record(2001, 0).to_json()])
    monkeypatch.setattr("speedlab_server.run_reader._FRESH_SECONDS", 0.0)
    found: list[bytes | m.Problem] = []
    deadline = time.monotonic() + 30
    while not found:
        assert time.monotonic() < deadline
        found = easel.look(m.Draw())
    assert len(b"".join(each for each in found if isinstance(each, bytes))) < 2_000  # Ten a second: 20 KB/s.


def test_what_is_not_new_is_not_drawn_again_and_its_reader_is_seldom_asked_for(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    folder = make_folder(tmp_path / "runs", "still")
    add_lines(folder.path / "records" / "rank-0.jsonl", [make_record(1, 0).to_json()])
    folder.write_status(Status(state=RunState.RUNNING, step=1, steps=9))
    now, asked, drawn = [100.0], [], []
    monkeypatch.setattr("speedlab_server.figure_socket.time.monotonic", lambda: now[0])
    registry = Registry(str(tmp_path))
    registry.runs()
    reader = registry.reader(run_id(folder.path))
    monkeypatch.setattr(registry, "reader", lambda id: asked.append(now[0]) or reader)
    monkeypatch.setattr(reader, "draw", lambda draw, real=reader.draw: drawn.append(now[0]) or real(draw))
    easel = FigureSession(registry, reader.id)

    def look(seconds: float, wanted: m.Draw | None = None) -> bool:
        """Whether a look after so long gives the page something."""
        now[0] = round(now[0] + seconds, 3)
        return bool(easel.look(wanted or m.Draw()))

    assert [look(0), look(0.1), look(0.1), look(0.1)] == [True, False, False, False]
    assert drawn == [100.0, 100.3]  # How long a run is silent is told, too.
    assert look(0.1, m.Draw(smoothing=0.5))
    add_lines(folder.path / "records" / "rank-0.jsonl", [make_record(2, 0).to_json()])
    assert look(0.1, m.Draw(smoothing=0.5))
    assert drawn == [100.0, 100.3, 100.4, 100.5]
    assert asked == [100.0, 100.5]
    whole = m.Draw(smoothing=0.5, keyframe=True)
    assert [look(0.05, whole), look(0.05, whole)] == [True, True]  # Whoever asks for all of it twice gets it twice.


class Pictures:
    """An easel that has something whenever it is looked at, until there is no more; what is no picture is raised."""

    wait_seconds = 0.0

    def __init__(self, *pictures: bytes | BaseException) -> None:
        self._pictures = list(pictures)
        self.wishes: list[bool] = []
        self.threads: set[int] = set()

    def look(self, wanted: m.Draw) -> list[bytes | m.Problem]:
        self.threads.add(threading.get_ident())
        if not self._pictures:
            return []
        self.wishes.append(wanted.keyframe)
        picture = self._pictures.pop(0)
        if isinstance(picture, BaseException):
            raise picture
        return [picture]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # One look fails, as it should.
def test_a_page_that_has_not_taken_a_frame_gets_the_next_one_later_and_a_hidden_one_has_no_thread(monkeypatch) -> None:
    monkeypatch.setattr("speedlab_server.figure_socket.TICK_SECONDS", 0.01)
    easel, sent = Pictures(b"1", b"2", MemoryError(), b"3"), []

    def threads() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each.name == "speedlab-drawing"]

    async def page() -> None:
        async with asyncio.timeout(20):
            taking = asyncio.get_running_loop().create_future()

            def send(found: list[bytes | m.Problem]) -> asyncio.Future[Any]:
                sent.extend(found)
                return taking

            painter = FigureRenderer(easel, send)
            painter.ask(m.Draw(keyframe=True))
            painter.ask(m.Draw())
            while not sent:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert (sent, easel.wishes) == ([b"1"], [True])  # Ten looks later it is still under way.
            assert len(threads()) == 1
            taking.set_result(None)
            while threads():  # The second frame, and the look that fails.
                await asyncio.sleep(0.01)
            assert (sent, easel.wishes) == ([b"1", b"2"], [True, False, False])
            painter.ask(m.Draw())
            while len(sent) < 3:
                await asyncio.sleep(0.01)
            painter.ask(m.Draw(watching=False))
            while threads():
                await asyncio.sleep(0.01)
            assert sent == [b"1", b"2", b"3"]

    asyncio.run(page())
    assert len(easel.threads) <= 2
