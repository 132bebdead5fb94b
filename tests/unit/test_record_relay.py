"""A run whose folder hosts do not see, without any host: what is given to them, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from telemetry_samples import make_event, make_folder, make_record

import speedlab.cluster.agents.run_files as agent_runs
import speedlab.cluster.agents.tasks as agent_tasks
from speedlab.cluster.errors import ClusterError
from speedlab.cluster.files.agent_run_dir import RUNS, folder_here, origin_of
from speedlab.cluster.launch.placement import hosts_for
from speedlab.cluster.supervisor.record_relay import RecordRelay, relay_for
from speedlab.telemetry.feed import Feed
from speedlab.telemetry.records import RunState
from speedlab.telemetry.run_folder import RunFolder
from speedlab.telemetry.writer import RecordWriter


class Hosts:
    """Agents' functions, called here with the folder of each host in turn."""

    def __init__(self, folder: Path, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
        self.host_names = names
        self.folders = {name: folder / name for name in names}
        self.silent: set[str] = set()
        self.sees: set[str] = set()
        self._monkeypatch = monkeypatch
        for own in self.folders.values():
            own.mkdir()

    def ask_hosts(self, function: Callable[..., Any], by_host: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        answers = {}
        for name, arguments in by_host.items():
            self._monkeypatch.setattr(agent_tasks, "_folder", self.folders[name])
            if function is agent_runs.sees:
                answers[name] = name in self.sees
            elif name not in self.silent:
                answers[name] = function(*arguments)
        return answers

    def run_on(self, name: str, folder: RunFolder) -> RunFolder:
        """The folder that ranks of this host write into."""
        self._monkeypatch.setenv(RUNS, str(self.folders[name] / "runs"))
        here = folder_here(str(folder.path))
        assert (here != str(folder.path), origin_of(here)) == (True, str(folder.path))
        return RunFolder(here)


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    return Hosts(tmp_path, ("a", "b"), monkeypatch)


def test_what_ranks_write_elsewhere_is_whole_here(hosts: Hosts, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "apart")
    folder.post("pause")
    wire = relay_for(folder, hosts)
    assert wire is not None
    wire.give()
    there = {name: hosts.run_on(name, folder) for name in hosts.host_names}
    assert [command.word for command in there["a"].pending(0)] == ["pause"]
    wire.give_word(folder.post("resume"))
    assert [command.word for command in there["b"].pending(1)] == ["resume"]
    writers = [RecordWriter(there[name], rank, stream_hz=1) for rank, name in enumerate("ab")]
    for rank, writer in enumerate(writers):
        writer.write(make_record(1, rank))
        there["ab"[rank]].write_placement(rank, [{"name": f"of {rank}"}])
    writers[0].event(make_event("paused", 1, command=1))
    there["a"].write_status(replace(folder.read_status(), state=RunState.PAUSED, step=1, command=1))
    assert wire.take()
    assert not wire.take()
    feed = Feed(folder)
    feed.poll()
    assert {rank: [record.step for record in records] for rank, records in feed.records.items()} == {0: [1], 1: [1]}
    assert [(event.kind, event.command) for event in feed.events] == [("paused", 1)]
    assert (feed.status.state, feed.status.command) == (RunState.PAUSED, 1)
    assert folder.read_placement(1) == [{"name": "of 1"}]

    # What this side writes in between stays, and who takes over takes nothing twice.
    with (folder.path / "events.jsonl").open("a") as file:
        file.write(make_event("recovering", 1).to_json() + "\n")
    writers[1].write(make_record(2, 1))
    with (there["b"].path / "records" / "rank-1.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "ra')  # Being written.
    writers[0].event(make_event("finished", 2))
    later = RecordRelay(folder, hosts)
    later.settle()
    feed.poll()
    assert [event.kind for event in feed.events] == ["paused", "recovering", "finished"]
    assert [record.step for record in feed.records[1]] == [1, 2]
    feed.close()
    for writer in writers:
        writer.close()
    hosts.silent = {"b"}
    with pytest.raises(ClusterError, match="b did not take the commands of run 'apart'"):
        later.give()
    for word in ("save", "reshape"):
        with pytest.raises(ClusterError, match=f"{word}: ranks of run 'apart' would exchange"):
            later.refuse(word)
    later.refuse("pause")


def test_events_come_before_the_status_that_counts_them(hosts: Hosts, tmp_path: Path, monkeypatch) -> None:
    """Also where an answer is too short for all of them: the status waits."""
    folder = make_folder(tmp_path, "long")
    wire = RecordRelay(folder, hosts)
    wire.give()
    own = hosts.run_on("a", folder)
    with RecordWriter(own, 0, stream_hz=1) as writer:
        for step in range(1, 30):
            writer.write(make_record(step))
        writer.event(make_event("finished", 29))
    own.write_status(replace(own.read_status(), state=RunState.FINISHED, step=29))
    # A record and the beginning of the next fit.
    monkeypatch.setattr(agent_runs, "MOST_BYTES", len(make_record(29).to_json()) + 40)
    while wire.take():
        if folder.read_status().state is RunState.FINISHED:
            assert [event.kind for event in folder.read_events()] == ["finished"]
    assert folder.read_status().step == 29
    assert len((folder.path / "records" / "rank-0.jsonl").read_bytes().splitlines()) == 29


def test_what_cannot_go_over_a_wire_is_refused(hosts: Hosts, tmp_path: Path) -> None:
    hosts.sees = {"a", "b"}
    assert relay_for(make_folder(tmp_path, "shared", checkpoint={"every_steps": 5}), hosts) is None
    hosts.sees = {"a"}
    with pytest.raises(
        ClusterError, match=r"^b does not see .*: records come over the wire, but checkpoint.every_steps is 5"
    ):
        relay_for(make_folder(tmp_path, "saves", checkpoint={"every_steps": 5}), hosts)
    with pytest.raises(ClusterError, match=r"data.source: /no/text is not on b, and its ranks read it there"):
        relay_for(make_folder(tmp_path, "no-text", data={"source": "/no/text"}), hosts)
    own = make_folder(tmp_path, "own")
    (own.path / "model.pickle").write_bytes(b"")
    with pytest.raises(ClusterError, match="a model of your own is read from there"):
        relay_for(own, hosts)


def test_hosts_come_and_go_whole() -> None:
    used, aside = {"a": 2, "b": 2, "c": 1}, {"d": 4}
    assert hosts_for(4, used, {}, []) == ["a", "b"]
    assert hosts_for(3, used, {}, ["b"]) == ["a", "c"]
    assert hosts_for(9, used, aside, []) == ["a", "b", "c", "d"]
    assert hosts_for(7, used, aside, ["a"]) == ["b", "c", "d"]
    with pytest.raises(ClusterError, match=r"there are a: 2, c: 1 \(b does not answer\); 2 or 3 engines can be had"):
        hosts_for(5, used, {}, ["b"])
    with pytest.raises(ClusterError, match=r"there are none .*; start another cluster"):
        hosts_for(2, {"a": 2}, {}, ["a"])
