"""Runs side by side as a page gets them, from a real Jupyter server."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import speedlab_server.schema as m
import websocket
from server_helpers import JupyterServer
from speedlab_server.figure_socket import ComparedEasel
from speedlab_server.run_registry import Registry
from test_drawn_runs import unframed
from test_server import add_records, make_run

from speedlab.cluster.known_runs import run_id
from speedlab.telemetry.figures.deltas import ComparedDrawing
from speedlab.telemetry.records import RunState
from speedlab.telemetry.run_folder import RunFolder, Status


class Page:
    """A page that compares."""

    def __init__(self, server: JupyterServer, ids: list[str]) -> None:
        self._socket = server.live(way=f"comparisons/{','.join(ids)}/drawing")

    def draw(self, **wish: Any) -> None:
        self._socket.send(json.dumps({"type": "Draw", "version": m.VERSION, **wish}))

    def receive(self) -> dict[str, Any]:
        opcode, data = self._socket.recv_data()
        if opcode != websocket.ABNF.OPCODE_BINARY:
            return json.loads(data)
        message, _ = unframed(data)
        msgspec.convert(message, m.Comparison | m.Changes)  # It is what its types say.
        return message

    def until(self, found: Any) -> list[dict[str, Any]]:
        """What comes until something in it has been found."""
        seen = [self.receive()]
        while not found(seen[-1]):
            seen.append(self.receive())
        return seen

    def close(self) -> None:
        self._socket.shutdown()


def reported(message: dict[str, Any]) -> dict[str, Any]:
    """What stands beside the figures, where the message has it."""
    parts = [part for part in message.get("parts", []) if part["part"] == "compared"]
    return message.get("compared") or (parts[-1] if parts else {"runs": [], "facts": [{"values": []}]})


def test_runs_are_compared_live_and_one_that_cannot_be_read_says_so_in_its_place(server: JupyterServer) -> None:
    names = ("compared-a", "compared-b")
    a, b = (make_run(server, name, 3) for name in names)
    page = Page(server, [run_id(a.path), run_id(b.path), "0" * 16])
    page.draw()
    first = page.receive()
    assert (first["type"], first["seq"]) == ("Comparison", 1)
    runs = reported(first)["runs"]
    assert [run["name"] for run in runs] == [*names, "0" * 16]
    assert [bool(run["problem"]) for run in runs] == [False, False, True]
    assert "there is no run with the id" in runs[2]["problem"]
    add_records(a, range(4, 6))
    changes = page.until(lambda message: reported(message)["facts"][0]["values"][:1] == ["5 of 1,000"])
    grown = [part for each in changes for part in each["parts"] if part["part"] == "extend"]
    assert {trace for part in grown for trace in part["traces"]} == {0}
    # It goes, and what was read of it stays.
    b.path.rename(b.path.with_name("elsewhere"))
    gone = page.until(lambda message: any("is gone" in run["problem"] for run in reported(message)["runs"]))[-1]
    assert reported(gone)["facts"][0]["values"] == ["5 of 1,000", "3 of 1,000", ""]
    b.path.with_name("elsewhere").rename(b.path)
    page.until(lambda message: [bool(run["problem"]) for run in reported(message)["runs"]] == [False, False, True])
    page.draw(keyframe=True)
    assert page.until(lambda message: message["type"] == "Comparison")
    page.close()


def test_too_many_runs_are_refused_and_none_is_read(server: JupyterServer) -> None:
    page = Page(server, [f"{number:016x}" for number in range(9)])
    page.draw()
    assert page.receive() == {
        "type": "Problem",
        "version": m.VERSION,
        "text": "9 runs; at most 8 are compared: choose fewer",
    }
    page.close()


def test_runs_that_rest_are_looked_at_less_often(tmp_path, monkeypatch, server: JupyterServer) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    folders: list[RunFolder] = [make_run(server, f"compared-rest-{number}", 2) for number in range(2)]
    registry = Registry(str(server.root))
    easel = ComparedEasel(registry, [run_id(folder.path) for folder in folders])
    easel.look(m.Draw())
    assert easel.wait_seconds == 0.25
    for folder in folders:
        folder.write_status(Status(state=RunState.PAUSED, step=2, steps=1000))
    monkeypatch.setattr("speedlab_server.run_reader._FRESH_SECONDS", 0.0)
    assert len(easel.look(m.Draw())) == 1
    assert easel.wait_seconds == 0.5

    # What nobody foresaw is told, and everything is drawn anew.
    broken = ["loss of a run that nobody foresaw"]

    def fails(self: ComparedDrawing, looks: object) -> None:
        raise ValueError(broken.pop())

    with monkeypatch.context() as at_once:
        at_once.setattr(ComparedDrawing, "next", fails)
        (problem,) = easel.look(m.Draw())
    assert isinstance(problem, m.Problem)
    assert "nobody foresaw" in problem.text
    assert len(easel.look(m.Draw())) == 1
