"""What pages get of runs, from a real Jupyter server; run folders are written by telemetry's own writer."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import websocket
from server_helpers import TOKEN, JupyterServer
from telemetry_samples import eventually, make_event, make_folder, make_record

from speedlab.cluster.known_runs import note_seen, run_id
from speedlab.telemetry.records import Ledger, RunState
from speedlab.telemetry.run_folder import RunFolder, Status


def make_run(server: JupyterServer, name: str, steps: int = 0, ranks: int = 2, **status: Any) -> RunFolder:
    """A run below the server's root, with records and one event."""
    folder = make_folder(server.root / "runs", name)
    for rank in range(ranks):
        add_records(folder, range(1, steps + 1), rank)
    add_lines(folder.path / "events.jsonl", [make_event("started", details={"parameters": 100}).to_json()])
    values = {"state": RunState.RUNNING, "step": steps, "steps": 1000, "rank_pids": tuple(range(1, ranks + 1))}
    folder.write_status(Status(**{**values, **status}))
    return folder


def add_records(folder: RunFolder, steps: range, rank: int = 0) -> None:
    path = folder.path / "records" / f"rank-{rank}.jsonl"
    add_lines(path, [make_record(step, rank, loss=8.0 - step / 100).to_json() for step in steps])


def add_lines(path: Path, lines: list[str]) -> None:
    with open(path, "a") as file:
        file.write("".join(f"{line}\n" for line in lines))


def of(folder: RunFolder) -> str:
    return f"runs/{run_id(folder.path)}"


def listed(server: JupyterServer, folder: RunFolder) -> dict[str, Any]:
    """The run as the list has it; the list is made anew once a second."""

    def find() -> dict[str, Any] | None:
        _, answer = server.ask("runs")
        return next((run for run in answer["runs"] if run["id"] == run_id(folder.path)), None)

    return eventually(find)


def hear(page: websocket.WebSocket, check: Callable[[dict[str, Any]], Any]) -> Any:
    """What `check` finds first in what comes."""
    while True:
        if found := check(json.loads(page.recv())):
            return found


def subscribe(page: websocket.WebSocket, *runs: dict[str, Any], version: int = 1, **more: Any) -> None:
    page.send(json.dumps({"type": "Subscribe", "version": version, "runs": runs, **more}))


# ---- lists and runs --------------------------------------------------------------------------------------------------


def test_a_run_in_the_list_and_alone(server: JupyterServer) -> None:
    folder = make_run(server, "listed", 40)
    run = listed(server, folder)
    assert (run["name"], run["state"], run["step"], run["steps"], run["engines"]) == ("listed", "running", 40, 1000, 2)
    assert (run["loss"], run["tokens_per_second"], run["seconds_left"]) == (7.6, 8192.0, 480.0)
    assert (run["cluster"], run["problem"]) == ("", "")
    status, one = server.ask(of(folder))
    assert (status, one["type"], one["version"], one["ranks"]) == (200, "Run", 1, [0, 1])
    assert one["run"]["step"] == 40
    assert one["config"]["name"] == "listed"
    assert [entry["rank"] for entry in one["memory"]] == [0, 1]
    assert one["memory"][1]["held"][0] == [100, 50, 0, 200, 0, 0, 0, 0]


def test_a_run_that_only_the_registry_knows_and_one_that_is_gone(server: JupyterServer, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "elsewhere")
    note_seen(server.clusters, folder.path)
    assert listed(server, folder)["state"] == "starting"
    folder.path.rename(tmp_path / "moved")
    status, answer = server.ask(of(folder))
    assert (status, answer["type"]) == (410, "Problem")
    assert "'elsewhere' is gone" in answer["text"]


def test_the_quickstart_for_the_launcher_and_a_notebook_that_does_not_come_with_it(server: JupyterServer) -> None:
    status, answer = server.ask("notebooks/01_quickstart.ipynb")
    assert (status, answer["type"], answer["content"]["nbformat"]) == (200, "Notebook", 4)
    status, answer = server.ask("notebooks/01_quickstart.ipy")
    assert (status, answer["text"]) == (
        404,
        "there is no notebook '01_quickstart.ipy'; did you mean '01_quickstart.ipynb'?",
    )
    assert server.ask("notebooks/..%2fREADME.md")[0] == 404


@pytest.mark.parametrize("id", ["0" * 16, "..%2f..%2fetc", "%3Cimg%20src=x%3E"])
def test_an_unknown_id_is_told_and_never_a_path(server: JupyterServer, id: str) -> None:
    for way in (f"runs/{id}", f"runs/{id}/records", f"clusters/{id}"):
        status, answer = server.ask(way)
        assert (status, answer["type"]) == (404, "Problem")
        assert answer["text"]


DAMAGED = {
    "no JSON": ("status.json", "{", "is not valid JSON"),
    "another version's status": ("status.json", '{"state": "dreaming"}', "'dreaming' is not a valid RunState"),
    "a configuration of no sense": ("config.json", '{"zero": {"stage": 9}}', "zero.stage"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_run_says_so_and_hides_no_other(server: JupyterServer, what: str) -> None:
    file, text, said = DAMAGED[what]
    good = make_run(server, f"beside {what}".replace(" ", "-").replace("'", ""), 3)
    bad = make_run(server, f"with {what}".replace(" ", "-").replace("'", ""), 3)
    (bad.path / file).write_text(text)
    run = listed(server, bad)
    assert run["state"] == "damaged"
    assert said in run["problem"]
    assert listed(server, good)["step"] == 3
    status, answer = server.ask(f"{of(bad)}/words", {"word": "pause"})
    assert status == 422
    assert said in answer["text"]


def test_lines_that_are_no_records_are_passed_over(server: JupyterServer) -> None:
    folder = make_run(server, "lines")
    records = [make_record(1).to_json(), '{"step": "<script>"}', "\x00", make_record(2, loss=float("nan")).to_json()]
    add_lines(folder.path / "records" / "rank-0.jsonl", records)
    add_lines(folder.path / "events.jsonl", ["[]", make_event("warning", 2, text="<b>&").to_json()])
    _, answer = server.ask(f"{of(folder)}/records")
    assert answer["columns"]["step"] == [1, 2]
    assert answer["columns"]["loss_low"] == [7.99, None]
    _, answer = server.ask(f"{of(folder)}/events")
    assert [event["text"] for event in answer["events"]] == ["", "<b>&"]
    _, answer = server.ask(f"{of(folder)}/events?after=1")
    assert (answer["keep"], answer["total"], answer["events"][0]["kind"]) == (1, 2, "warning")


# ---- records ---------------------------------------------------------------------------------------------------------


def test_records_come_in_buckets_and_only_what_is_new(server: JupyterServer) -> None:
    folder = make_run(server, "buckets", 100, ranks=1)
    way = f"{of(folder)}/records?points=25"
    _, first = server.ask(way)
    assert (first["stride"], first["keep"], first["columns"]["step"][:3]) == (4, 0, [4, 8, 12])
    assert (first["columns"]["loss_high"][0], first["columns"]["loss_low"][0]) == (7.99, 7.96)
    assert all(len(column) == 25 for column in first["columns"].values())
    add_records(folder, range(101, 110))
    again = f"{way}&after=100&generation={first['generation']}&stride=8"
    fresh = eventually(lambda: (answer := server.ask(f"{way}&points=25")[1])["stride"] == 8 and answer)
    assert (fresh["keep"], fresh["columns"]["step"][-1]) == (0, 104)
    _, more = server.ask(again)
    assert (more["keep"], more["columns"]["step"]) == (12, [104])
    folder.write_status(Status(state=RunState.PAUSED, step=109, steps=1000))
    eventually(lambda: server.ask(again)[1]["columns"]["step"] == [104, 109])


def test_steps_that_are_computed_again_replace_those_before(server: JupyterServer) -> None:
    folder = make_run(server, "back", 20, ranks=1)
    _, first = server.ask(f"{of(folder)}/records")
    path = folder.path / "records" / "rank-0.jsonl"
    add_lines(path, [make_record(11, time=9000.0, loss=1.0).to_json()])
    way = f"{of(folder)}/records?after=20&stride=1&generation={first['generation']}"
    answer = eventually(lambda: (found := server.ask(way)[1])["generation"] > first["generation"] and found)
    assert (answer["keep"], answer["columns"]["step"]) == (0, list(range(1, 12)))
    assert answer["columns"]["loss_low"][-1] == 1.0


def test_questions_that_make_no_sense(server: JupyterServer) -> None:
    folder = make_run(server, "senseless", 2)
    for way, said in (
        ("records?after=x", "'x' is no whole number"),
        ("records?rank=1e3", "'1e3' is no whole number"),
        (f"records?rank={10**18}", f"'{10**18}' is no whole number of at most 15 digits"),
        (f"events?after={'9' * 5000}", "is no whole number of at most 15 digits"),
    ):
        status, answer = server.ask(f"{of(folder)}/{way}")
        assert (status, said in answer["text"]) == (400, True)
    status, answer = server.ask(f"{of(folder)}/records?rank=7")
    assert (status, "ranks that have: 0, 1" in answer["text"]) == (404, True)
    _, answer = server.ask(f"{of(folder)}/records?points=100000000&after=-99")
    assert answer["columns"]["step"] == [1, 2]
    status, answer = server.ask("clusters", headers={"X-SpeedLab-Version": "9"})
    assert status == 409
    assert "speaks version '9' of SpeedLab's messages and the server version 1: reload the page" in answer["text"]
    assert server.ask("nothing/here")[0] == 404


# ---- control words ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "is no control word"),
        ({"word": "explode"}, "known: pause, resume, step"),
        ({"word": "pause", "arguments": {"path": "/"}}, "pause takes no 'path'; it takes nothing"),
        ({"word": "step", "arguments": {"n": True}}, "n is True, which is no int"),
        ({"word": "reshape", "arguments": {"engines": 3}}, "run.reshape(engines=…)"),
    ],
)
def test_words_that_are_none(server: JupyterServer, body: Any, said: str) -> None:
    status, answer = server.ask(f"runs/{'0' * 16}/words", body)
    assert status == 400
    assert said in answer["text"]


def test_a_word_to_a_run_without_engines_is_refused_with_the_way_on(server: JupyterServer) -> None:
    folder = make_run(server, "left", 5, state=RunState.PAUSED, cluster="gone", token="0" * 32)
    status, answer = server.ask(f"{of(folder)}/words", {"word": "pause"})
    assert status == 409
    assert "has no engines here and cannot pause" in answer["text"]
    status, answer = server.ask(f"{of(folder)}/words", {"word": "resume", "arguments": {"step": 4}})
    assert status == 409
    assert "holds no checkpoint of step 4" in answer["text"]
    assert not list((folder.path / "control").iterdir())
    status, answer = server.ask(f"{of(folder)}/output")
    assert (status, "was stopped" in answer["text"]) == (410, True)


# ---- who may ask -----------------------------------------------------------------------------------------------------


def test_without_a_token_nothing_is_told(server: JupyterServer) -> None:
    assert server.ask("runs", token="")[0] == 403
    assert server.ask("runs", token="wrong")[0] == 403
    with pytest.raises(websocket.WebSocketBadStatusException, match="403"):
        server.live(token="")


def test_a_websocket_of_another_origin_is_refused(server: JupyterServer) -> None:
    known = {"Cookie": cookie(server)}
    server.live(token="", header=known).shutdown()
    with pytest.raises(websocket.WebSocketBadStatusException, match="403"):
        server.live(token="", header=known, origin="http://elsewhere.example")


def test_a_word_with_a_cookie_needs_the_page_s_own_proof(server: JupyterServer) -> None:
    way, word = f"runs/{'0' * 16}/words", {"word": "pause"}
    known = cookie(server)
    assert server.ask("runs", token="", headers={"Cookie": known})[0] == 200
    status, answer = server.ask(way, word, token="", headers={"Cookie": known})
    assert (status, "_xsrf" in answer["text"]) == (403, True)
    proof = dict(part.split("=", 1) for part in known.split("; "))["_xsrf"]
    assert server.ask(way, word, token="", headers={"Cookie": known, "X-XSRFToken": proof})[0] == 404


def cookie(server: JupyterServer) -> str:
    """Of a browser that has seen the page that asks who one is, and has logged in."""
    found: list[str] = []
    for way in ("/base/login", f"/base/login?token={TOKEN}"):
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)) as connection:
            connection.request("GET", way)
            answer = connection.getresponse()
            answer.read()
            found += answer.headers.get_all("Set-Cookie", [])
    return "; ".join(text.partition(";")[0] for text in found)


# ---- what comes by itself --------------------------------------------------------------------------------------------


def test_a_page_hears_what_is_new_and_nothing_when_hidden(server: JupyterServer) -> None:
    folder = make_run(server, "live", 3, ranks=1)
    id = run_id(folder.path)
    page = server.live()
    subscribe(page, {"id": id, "parts": ["status", "records", "events", "memory"]})
    first = hear(page, lambda tick: tick["runs"] and tick["runs"][0])
    assert first["status"]["step"] == 3
    assert first["records"]["columns"]["step"] == [1, 2, 3]
    assert first["events"]["total"] == 1
    assert first["memory"][0]["held"][0][0] == 100
    add_lines(folder.path / "events.jsonl", [make_event("checkpoint", 4, text="step-4").to_json()])
    records, events = [], []
    add_records(folder, range(4, 6))
    while len(records) < 2 or not events:
        for news in json.loads(page.recv())["runs"]:
            records += (news["records"] or {"columns": {"step": []}})["columns"]["step"]
            events += (news["events"] or {"events": []})["events"]
    assert (records, [event["text"] for event in events]) == ([4, 5], ["step-4"])
    # Hidden: what comes next is the answer to the next wish, with all that was missed.
    subscribe(page)
    add_records(folder, range(6, 8))
    page.settimeout(0.6)
    with pytest.raises(websocket.WebSocketTimeoutException):
        page.recv()
    page.settimeout(30)
    subscribe(page, {"id": id, "parts": ["records"], "after": 5, "stride": 1, "generation": 1})
    news = hear(page, lambda tick: tick["runs"] and tick["runs"][0])
    assert (news["records"]["keep"], news["records"]["columns"]["step"]) == (5, [6, 7])
    assert (news["status"], news["events"], news["memory"]) == (None, None, None)
    page.shutdown()


def test_at_most_ten_messages_a_second(server: JupyterServer) -> None:
    folder = make_run(server, "fast", 1, ranks=1)
    page = server.live()
    subscribe(page, {"id": run_id(folder.path), "parts": ["status", "records"]})
    done = threading.Event()

    def write() -> None:
        for step in range(2, 400):
            add_records(folder, range(step, step + 1))
            if done.wait(0.002):
                return

    writer = threading.Thread(target=write)
    writer.start()
    try:
        hear(page, lambda tick: tick["runs"])
        began = time.monotonic()
        for _ in range(8):
            page.recv()
        assert time.monotonic() - began > 0.6  # Eight intervals of 0.1 s, of which the first may have begun before.
    finally:
        done.set()
        writer.join()
        page.shutdown()


def test_bad_words_on_the_websocket_are_answered_in_place(server: JupyterServer) -> None:
    folder = make_run(server, "beside-bad", 1)
    page = server.live()
    page.send("no JSON")
    assert "is no Subscribe" in json.loads(page.recv())["text"]
    subscribe(page, *[{"id": "x", "parts": []}] * 17)
    assert "a page may watch 16" in json.loads(page.recv())["text"]
    subscribe(page, {"id": "0" * 16, "parts": ["status"]}, {"id": run_id(folder.path), "parts": ["status"]})
    reported = {}
    while len(reported) < 2:
        reported |= {news["id"]: news for news in json.loads(page.recv())["runs"]}
    assert "there is no run" in reported["0" * 16]["problem"]
    assert reported[run_id(folder.path)]["status"]["name"] == "beside-bad"
    subscribe(page, version=2)
    answer = hear(page, lambda message: message["type"] == "Problem" and message)
    assert "reload the page" in answer["text"]
    assert page.recv_data()[0] == websocket.ABNF.OPCODE_CLOSE
    page.shutdown()


def test_the_lists_come_when_they_change(server: JupyterServer) -> None:
    page = server.live()
    subscribe(page, lists=True)
    hear(page, lambda tick: tick["all_runs"] is not None and tick["all_clusters"] is not None)
    folder = make_run(server, "new-in-the-list", 1)
    found = hear(page, lambda tick: [run for run in tick["all_runs"] or [] if run["id"] == run_id(folder.path)])
    assert found[0]["name"] == "new-in-the-list"

    # Lists that cannot be read are told, and that they can be again.
    hidden = server.clusters.rename(server.root / "hidden")
    server.clusters.symlink_to(server.clusters)  # Reading it is an error, also for root.
    problem = hear(page, lambda tick: tick["lists_problem"])
    assert "cannot be read" in problem
    assert server.ask("clusters")[0] == 422
    server.clusters.unlink()
    hidden.rename(server.clusters)
    hear(page, lambda tick: tick["lists_problem"] == "")
    page.shutdown()


def make_output(server: JupyterServer, name: str) -> Path:
    """Of a cluster of which nothing else is there."""
    folder = server.clusters / name / "output"
    folder.mkdir(parents=True)
    (folder.parent / "token").write_text(name)
    return folder


def test_what_ranks_print_comes_when_they_print_it_and_once(server: JupyterServer) -> None:
    folder = make_output(server, "printing")
    (folder / "rank-0.log").write_text("before\n")
    page = server.live()
    wanted = {"kind": "clusters", "id": "printing"}

    def next_output() -> dict[str, Any]:
        (news,) = hear(page, lambda tick: tick["outputs"])
        assert (news["kind"], news["id"]) == ("clusters", "printing")
        return news

    subscribe(page, outputs=[wanted])
    first = next_output()["output"]
    assert first["ranks"] == [{"rank": 0, "lines": ["before"], "skipped": False}]
    add_lines(folder / "rank-1.log", ["<b>second</b>"])
    second = next_output()["output"]
    assert second["ranks"] == [{"rank": 1, "lines": ["<b>second</b>"], "skipped": False}]

    # It wants something else, too, and says of the output how far it was when it wrote that: no line comes twice.
    subscribe(page, {"id": "0" * 16, "parts": ["status"]}, outputs=[{**wanted, "after": first["cursor"]}])
    add_lines(folder / "rank-0.log", ["third"])
    assert next_output()["output"]["ranks"] == [{"rank": 0, "lines": ["third"], "skipped": False}]
    page.shutdown()

    # Another connection goes on from where the last one was.
    page = server.live()
    subscribe(page, outputs=[{**wanted, "after": second["cursor"]}])
    assert next_output()["output"]["ranks"] == [{"rank": 0, "lines": ["third"], "skipped": False}]
    folder.parent.rename(server.root / "vanished")
    assert "there is no cluster 'printing'" in next_output()["problem"]
    (server.root / "vanished").rename(folder.parent)
    assert next_output()["problem"] == ""

    subscribe(page, outputs=[{"kind": "clusters", "id": "printing", "after": "x"}] * 9)
    assert "9 outputs at once; a page may watch 8" in hear(page, lambda said: said.get("text"))
    page.shutdown()


def test_of_very_many_ranks_all_are_told(server: JupyterServer) -> None:
    folder = make_output(server, "many-printing")
    for rank in range(100):
        (folder / f"rank-{rank}.log").write_text(f"of {rank}\n")
    page, found = server.live(), {}
    subscribe(page, outputs=[{"kind": "clusters", "id": "many-printing"}])
    while len(found) < 100:
        for news in json.loads(page.recv())["outputs"]:
            found |= {entry["rank"]: entry["lines"] for entry in news["output"]["ranks"]}
    assert found == {rank: [f"of {rank}"] for rank in range(100)}
    page.shutdown()


def test_with_what_a_cluster_can_be_started_and_who_may(server: JupyterServer) -> None:
    status, answer = server.ask("places")
    assert (status, answer["type"], answer["places"][0]["id"], answer["problem"]) == (200, "Places", "server", "")
    for way, body, refused in (
        ("clusters", {"name": "a b", "place": "server"}, (409, "cannot name a cluster")),
        ("clusters", {"name": "a", "place": "/bin/sh"}, (400, "there is no Python '/bin/sh'")),
        ("clusters", b"{", (400, "this is no start of a cluster")),
        ("clusters/none/words", {"word": "stop"}, (404, "there is no cluster 'none'")),
        ("clusters/none/words", {"word": "explode"}, (400, "known: cancel, stop, remove")),
    ):
        status, answer = server.ask(way, body)
        assert (status, refused[1] in answer["text"]) == (refused[0], True), answer
    for way in ("clusters", "clusters/none/words"):
        assert server.ask(way, {"name": "a", "place": "server"}, token="")[0] == 403


# ---- what it costs ---------------------------------------------------------------------------------------------------


def test_many_ranks_are_small_and_nothing_has_torch(server: JupyterServer) -> None:
    folder = make_run(server, "many", 64, ranks=64, step=64)
    ledger = Ledger(parameters=7, host={"optimizer_moments": 5}, host_capacity_bytes=9)
    add_lines(folder.path / "records" / "rank-63.jsonl", [make_record(65, 63, ledger=ledger).to_json()])
    memory = eventually(lambda: (found := server.ask(of(folder))[1]["memory"])[63]["step"] == 65 and found)
    assert (len(memory), memory[63]["held"][1], memory[63]["capacity"]) == (64, [0, 0, 0, 5, 0, 0, 0, 0], [0, 9, 0])
    if os.path.exists("/proc/self/maps"):
        maps = Path(f"/proc/{server.process.pid}/maps").read_text()
        assert "libtorch" not in maps
        assert "numpy" in maps  # That the question above can be answered with yes.
