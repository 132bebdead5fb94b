"""Parts of the server's side that need no server."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from speedlab_server import cluster_commands, clusters, live_socket, run_reader, run_registry
from speedlab_server import schema as m
from speedlab_server.clusters import MOST_WORDS, Clusters
from speedlab_server.errors import QuestionError, UnknownError, reported
from speedlab_server.live_socket import Hub, PageConnection, WatchedOutput, WatchedRun
from speedlab_server.rank_output import MOST_BYTES, MOST_RANKS, files_of, output_of
from speedlab_server.run_registry import Registry
from speedlab_server.schema.typescript import typescript
from speedlab_server.start_cluster import (
    MOST_AT_ONCE,
    OWN,
    ClusterLauncher,
    PythonEnvironment,
    Pythons,
    candidates,
    place_of,
)
from telemetry_samples import eventually, make_folder

from speedlab.cluster.errors import ClusterError
from speedlab.cluster.files import cluster_dir
from speedlab.cluster.known_runs import note_seen, run_id, seen_runs
from speedlab.cluster.supervisor import protocol as asked
from speedlab.telemetry.records import RunState
from speedlab.telemetry.run_folder import RunFolderError, Status

ROOT = Path(__file__).parents[2]


def test_the_typescript_is_that_of_the_messages() -> None:
    written = (ROOT / "extension/lab/src/messages.ts").read_text(encoding="utf-8")
    assert written == typescript(), "run: python -m speedlab_server.schema.typescript > extension/lab/src/messages.ts"
    assert "export interface Records {" in written
    assert "columns: Record<string, (number | null)[]>;" in written


def test_importing_it_starts_no_torch() -> None:
    code = "import sys, speedlab_server.handlers; print(sorted({'torch', 'numba', 'ipyparallel'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def within_seconds(call: Callable[[], Any]) -> Any:
    """What it returns or raises; a thread that waits for ever is left behind."""
    found: list[Any] = []

    def work() -> None:
        try:
            found.append(call())
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20)
    assert found, "it waits for ever"
    return found[0]


@pytest.mark.parametrize("name", ["records/rank-0.jsonl", "records/rank-1.jsonl", "status.json", "events.jsonl"])
def test_a_pipe_in_the_place_of_a_file_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    folder = make_folder(tmp_path / "runs", "piped")
    make_folder(tmp_path / "runs", "other")
    (folder.path / name).unlink(missing_ok=True)
    os.mkfifo(folder.path / name)
    runs = Registry(str(tmp_path))
    listed = {run.name: run.problem for run in within_seconds(runs.runs)}
    assert listed["other"] == ""
    reported_in_list = name in ("records/rank-0.jsonl", "status.json")
    assert ("it is a pipe or a device, not a file" in listed["piped"]) == reported_in_list
    looked = within_seconds(lambda: runs.reader(run_id(folder.path.resolve())).look())
    if name.startswith("records"):
        assert "it is a pipe or a device, not a file" in str(looked)
        assert looked.filename == str(folder.path.resolve() / name)


def test_no_rank_output_waits_for_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank-0.log")
    looked = within_seconds(lambda: output_of(tmp_path, after="", ranks=[0]))
    assert "it is a pipe or a device, not a file" in str(looked)


def test_output_since_a_place_also_when_the_file_was_put_aside(tmp_path: Path) -> None:
    file = tmp_path / "rank-0.log"
    file.write_text("one\ntwo\nhal")
    (tmp_path / "rank-1.log").write_text("other\n")
    first = output_of(tmp_path)
    assert [(entry.rank, entry.lines, entry.skipped) for entry in first.ranks] == [
        (0, ["one", "two"], False),
        (1, ["other"], False),
    ]
    with open(file, "a") as more:
        more.write("f\nlast of it\n")
    file.rename(tmp_path / "rank-0.log.1")
    file.write_text("of the new one\n")
    second = output_of(tmp_path, after=first.cursor)
    assert [(entry.rank, entry.lines, entry.skipped) for entry in second.ranks] == [
        (0, ["half", "last of it", "of the new one"], False)
    ]
    assert output_of(tmp_path, after=second.cursor).ranks == []


def test_a_look_at_output_tells_which_ranks_have_printed_and_reads_nothing(tmp_path: Path) -> None:
    assert files_of(tmp_path / "none") == {}
    (tmp_path / "rank-12.log").write_text("abc")
    (tmp_path / "rank-12.log.1").write_text("put aside")
    (tmp_path / "rank-x.log").write_text("no rank")
    before = files_of(tmp_path)
    assert {rank: place.byte for rank, place in before.items()} == {12: 3}
    (tmp_path / "rank-12.log").rename(tmp_path / "rank-12.log.1")
    (tmp_path / "rank-12.log").write_text("xyz")
    assert files_of(tmp_path) != before  # As long as before, and another file.


def test_output_is_filtered_and_bounded(tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"rank-{rank}.log").write_text(f"Loss of <b>{rank}</b>\nnothing\n")
    found = output_of(tmp_path, ranks=[1, 2], match="loss OF")
    assert [(entry.rank, entry.lines) for entry in found.ranks] == [
        (1, ["Loss of <b>1</b>"]),
        (2, ["Loss of <b>2</b>"]),
    ]
    (tmp_path / "rank-0.log").write_text("".join(f"line {number}\n" for number in range(50_000)))
    (only,) = output_of(tmp_path, ranks=[0]).ranks
    assert only.skipped
    assert only.lines[-1] == "line 49999"
    assert 0.9 * MOST_BYTES < sum(len(line) + 1 for line in only.lines) <= MOST_BYTES
    assert output_of(tmp_path / "none").ranks == []
    for cursor in ("x", '{"0": "/etc/passwd"}'):
        with pytest.raises(QuestionError, match="no cursor"):
            output_of(tmp_path, after=cursor)


def test_what_goes_wrong_has_a_status_and_says_what_to_do() -> None:
    denied = PermissionError(errno.EACCES, "Permission denied", "/runs/a/config.json")
    wrapped = RunFolderError("cannot be read")
    wrapped.__cause__ = denied
    for error in (denied, wrapped):
        assert reported(error) == (
            403,
            "/runs/a/config.json may not be read by the user that runs this Jupyter server; give it the right to",
        )
    assert reported(OSError(errno.EIO, "Input/output error", "/runs/a")) == (
        422,
        "/runs/a cannot be read: Input/output error; look at it, and try again",
    )
    assert reported(KeyError("ours")) is None


def test_the_registry_keeps_the_newest_first_and_survives_damage(tmp_path: Path) -> None:
    for name in ("a", "b", "a"):
        note_seen(tmp_path, Path(f"/runs/{name}"))
    assert seen_runs(tmp_path) == [Path("/runs/a"), Path("/runs/b")]
    (tmp_path / ".runs-seen.json").write_text("{")
    assert seen_runs(tmp_path) == []
    note_seen(tmp_path, Path("/runs/c"))
    assert seen_runs(tmp_path) == [Path("/runs/c")]


@contextmanager
def without_rights(*closed: Path) -> Iterator[None]:
    """As a user who may not look into these; root, who may, becomes nobody."""
    is_root = os.geteuid() == 0
    for path in closed:
        path.chmod(0)
    try:
        if is_root:
            os.seteuid(65534)
        yield
    finally:
        if is_root:
            os.seteuid(0)
        for path in closed:
            path.chmod(0o700)


def test_what_may_not_be_read_says_so_and_hides_no_other_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with TemporaryDirectory() as made:  # pytest's own folders are not for nobody.
        root, elsewhere = Path(made), Path(made) / "elsewhere"
        monkeypatch.setenv("IPYTHONDIR", made)
        cluster_dir.root().mkdir(parents=True)
        folders = {name: make_folder(root / "runs", name=name) for name in ("open", "closed", "no-status")}
        folders["in-closed"] = make_folder(elsewhere, name="in-closed")
        note_seen(cluster_dir.root(), folders["in-closed"].path)
        for path in (root, *root.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        registry = Registry(made)
        assert {run.state for run in registry.runs()} == {"starting"}  # Imports all that nobody may not.
        with without_rights(folders["closed"].path, folders["no-status"].path / "status.json", elsewhere):
            other = Registry(made)
            found = {run.name: (run.state, run.problem) for run in other.runs()}
            denied = "may not be read by the user that runs this Jupyter server; give it the right to"
            assert found == {
                "open": ("starting", ""),
                "closed": ("damaged", f"{folders['closed'].path}/config.json {denied}"),
                "no-status": ("damaged", f"{folders['no-status'].path}/status.json {denied}"),
                "in-closed": ("damaged", f"{folders['in-closed'].path}/config.json {denied}"),
            }
            for name in ("closed", "in-closed"):
                with pytest.raises((PermissionError, RunFolderError)) as caught:
                    other.reader(run_id(folders[name].path))
                assert reported(caught.value) == (403, found[name][1])
        with without_rights(root / "runs"):
            runs = {run.name: run.problem for run in Registry(made).runs()}
        assert runs["runs"] == f"{root}/runs/config.json {denied}"


def test_a_status_that_cannot_be_read_stands_beside_what_the_run_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setattr(run_registry, "_LIST_SECONDS", 0.0)
    monkeypatch.setattr(run_reader, "_FRESH_SECONDS", 0.0)
    monkeypatch.setattr(live_socket, "_LISTS_SECONDS", 0.0)  # Its cluster is looked up in each look.
    folder = make_folder(tmp_path / "runs")
    folder.write_status(Status(state=RunState.PAUSED, step=3, steps=9, text="out of memory on rank 1"))
    runs = Registry(str(tmp_path))
    page = WatchedRun(m.Watch(id=run_id(folder.path), parts=["status"]))

    def looked() -> list[m.RunSummary | None]:
        news = page.news(cast(Any, SimpleNamespace(registry=runs)))
        assert news is not None
        assert news.problem is None
        return [news.status, *runs.runs()]

    said = "paused", 3, "out of memory on rank 1", ""
    assert [(run.state, run.step, run.text, run.problem) for run in looked() if run] == [said, said]
    (folder.path / "status.json").write_text("{}")
    reported_of, listed = (run for run in looked() if run)
    assert (reported_of.state, reported_of.step, reported_of.text) == said[:3]
    assert (listed.state, listed.text) == ("damaged", said[2])
    assert all("status.json: is not the status of a run" in run.problem for run in (reported_of, listed))
    runs.reader(reported_of.id).close()


@pytest.mark.parametrize(
    ("answer", "state", "text"),
    [
        (asked.Refused(call=0, kind="ClusterError", text="speaks version 2"), "starting", "speaks version 2"),
        ({"type": "Progress", "call": 1, "text": 5}, "starting", "they come from different versions of SpeedLab; stop"),
        (asked.Progress(call=0, text=""), "starting", ""),
        ({"type": "Sung", "text": 5}, "ended", "it did not come up"),
    ],
)
def test_a_supervisor_of_another_version_says_so_in_its_own_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Any, state: str, text: str
) -> None:
    monkeypatch.setattr(clusters, "_STARTING_SECONDS", 20.0)

    def speak() -> None:
        connection, _ = listening.accept()
        with connection, connection.makefile("rb") as heard:
            # Its greeting, whole, which comes in two pieces: who closes before that is one that has ended.
            (size,) = struct.unpack("!Q", heard.read(8))
            heard.read(size)
            data = msgspec.msgpack.encode(answer)
            connection.sendall(struct.pack("!Q", len(data)) + data)

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / cluster_dir.SUPERVISOR_SOCKET))
        listening.listen()
        speaker = threading.Thread(target=speak)
        speaker.start()
        reported_of = clusters.summary_of(tmp_path, None)
        speaker.join(10)
    assert reported_of.state == state
    assert text in reported_of.text
    assert bool(text) == bool(reported_of.text)  # One that begins, and waits for nothing yet, has no words.


# ---- what pages watch ------------------------------------------------------------------------------------------------


def test_ranks_that_always_print_keep_no_other_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_socket, "folder_of", lambda *_: tmp_path)
    watched, heard = WatchedOutput(m.WatchOutput(kind="clusters", id="a")), []
    for look in range(4):
        for rank in range(2 * MOST_RANKS):
            with open(tmp_path / f"rank-{rank}.log", "a") as file:
                file.write(f"look {look}\n")
        news = watched.news(cast(Any, SimpleNamespace(registry=None)))
        assert news is not None
        assert news.output is not None
        heard.append([reported.rank for reported in news.output.ranks])
    low, high = list(range(MOST_RANKS)), list(range(MOST_RANKS, 2 * MOST_RANKS))
    assert heard == [low, high, low, high]


def test_a_page_that_comes_while_the_last_one_is_cleared_away_is_heard() -> None:
    class Told:
        receives, looks = True, 0

        def begin(self, _: Any) -> list[Any]:
            self.looks += 1
            return []

        def send(self) -> None: ...

    async def come_and_go() -> None:
        clearing, cleared = asyncio.Event(), asyncio.Event()

        async def in_thread(_: Any) -> None:
            clearing.set()
            await cleared.wait()

        hub = Hub(cast(Any, SimpleNamespace(in_thread=in_thread, registry=SimpleNamespace(close_idle=None))))
        first, second = cast(Any, Told()), cast(Any, Told())
        hub.join(first)
        async with asyncio.timeout(20):
            while not first.looks:
                await asyncio.sleep(0.01)
            hub.leave(first)
            await clearing.wait()
            hub.join(second)
            cleared.set()
            while not second.looks:
                await asyncio.sleep(0.01)
        hub.leave(second)

    asyncio.run(come_and_go())


def test_no_id_of_a_page_stands_for_something_else() -> None:
    said: list[m.Tick] = []
    handler = SimpleNamespace(say=said.append)
    page = PageConnection(cast(Any, handler))
    watches = [m.Watch(id=id, parts=["status"]) for id in ("", "clusters/a")]
    page.subscribe(m.Subscribe(runs=watches, outputs=[m.WatchOutput(kind="clusters", id="a")], lists=True))

    async def one_look() -> None:
        async def in_thread(work: Callable[[], Any]) -> Any:
            return work()

        def reader(id: str) -> Any:
            raise UnknownError(f"no run {id!r}")

        services = SimpleNamespace(in_thread=in_thread, all_clusters=list)
        services.registry = SimpleNamespace(reader=reader, runs=list)
        await asyncio.gather(*page.begin(cast(Any, services)))
        page.send()

    asyncio.run(one_look())
    assert [(news.id, news.problem) for news in said[0].runs] == [
        ("", "no run ''"),
        ("clusters/a", "no run 'clusters/a'"),
    ]
    assert [news.id for news in said[0].outputs] == ["a"]
    assert (said[0].all_runs, said[0].all_clusters) == ([], [])


# ---- clusters that pages start ---------------------------------------------------------------------------------------


def spec(*argv: str, **more: object) -> dict[str, object]:
    return {"spec": {"argv": [*argv, "-m", "ipykernel_launcher", "-f", "{connection_file}"], **more}}


def test_pythons_that_can_start_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORD", "mine")
    specs = {
        "python3": spec("python", language="python", display_name="Python 3"),
        "big": spec(
            sys.executable,
            language="python",
            display_name="Big",
            env={"NUMBER": 1, "WORD": "a:${WORD}:$$"},
            metadata={},
        ),
        "r": spec("R", language="R"),
        "gone": spec("/no/such/python3", language="python"),
        "wrapped": spec("/bin/sh", language="python"),
        "far": spec(
            *("python",), language="python", metadata={"kernel_provisioner": {"provisioner_name": "yarn-provisioner"}}
        ),
    }
    found = candidates(specs)
    # A bare name is the server's own Python, which is there already.
    assert found == [
        PythonEnvironment(OWN, "the server's Python", sys.executable, {}),
        PythonEnvironment("kernel-big", "Big", sys.executable, {"NUMBER": "1", "WORD": "a:mine:$"}),
    ]
    lacks = PythonEnvironment(
        "kernel-lacks", "without SpeedLab", sys.executable, {"PYTHONPATH": "/no", "PYTHONHOME": "/no"}
    )
    none = PythonEnvironment("kernel-none", "no program", "/no/such/python", {})
    assert asyncio.run(Pythons().able([found[0], lacks, none])) == [found[0]]
    # Folders where the server happens to run are no modules of a Python that lacks them.
    for name in ("torch", "ipyparallel", "speedlab"):
        (tmp_path / name).mkdir()
    (tmp_path / "speedlab" / "cli").mkdir()
    monkeypatch.chdir(tmp_path)
    bare = PythonEnvironment("kernel-bare", "only its own modules", made_bare(tmp_path), {"PYTHONPATH": ""})
    assert asyncio.run(Pythons().able([bare])) == []
    assert place_of("kernel-big", found) is found[1]
    with pytest.raises(QuestionError, match="there is no Python '/bin/sh' to start a cluster with"):
        place_of("/bin/sh", found)


def test_a_python_is_asked_once_until_something_is_installed(tmp_path: Path) -> None:
    begun, file, own = tmp_path / "begun", tmp_path / "python-counting", tmp_path / "site-packages"
    own.mkdir()
    file.write_text(f'#!/bin/sh\necho >> {begun}\nexec {os.path.realpath(sys.executable)} -S "$@"\n')
    file.chmod(0o700)
    place = PythonEnvironment("kernel-counting", "counting", str(file), {"PYTHONPATH": str(own)})

    async def looks() -> None:
        pythons = Pythons()

        async def found() -> tuple[int, int]:
            able = await pythons.able([place])
            return len(able), len(begun.read_text())

        # What has just changed may be changing.
        assert [await found(), await found()] == [(0, 1), (0, 2)]
        os.utime(file, (1, 1))
        os.utime(own, (1, 1))
        assert await asyncio.gather(found(), found()) == [(0, 3)] * 2
        assert await found() == (0, 3)
        for name in ("speedlab", "torch", "ipyparallel"):
            (own / name).mkdir()
            (own / name / "__init__.py").touch()
        (own / "speedlab" / "cli.py").touch()
        os.utime(own, (2, 2))
        assert [await found(), await found()] == [(1, 4), (1, 4)]

    asyncio.run(looks())


def made_bare(folder: Path) -> str:
    """A Python without any package."""
    file = folder / "python-bare"
    file.write_text(f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} -S "$@"\n')
    file.chmod(0o700)
    return str(file)


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterLauncher:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    return ClusterLauncher(tmp_path)


def program(folder: Path, code: str) -> PythonEnvironment:
    """A Python that does something else than to start a cluster."""
    file = folder / "python-made-up"
    file.write_text(f"#!{sys.executable}\n{code}")
    file.chmod(0o700)
    return PythonEnvironment("kernel-made-up", "made up", str(file), {"WORD": "set"})


def listed(starts: ClusterLauncher) -> list[tuple[str, str, str]]:
    return [(cluster.id, cluster.state, cluster.text) for cluster in starts.reported([])]


def test_a_start_that_fails_says_why_until_it_is_removed_or_tried_again(
    starts: ClusterLauncher, tmp_path: Path
) -> None:
    code = (
        "import os, sys; print('Traceback', file=sys.stderr)\n"
        "print('speedlab start: only 1 GPU for', *sys.argv[4:], os.environ['WORD'], file=sys.stderr); sys.exit(2)"
    )
    cluster_commands.begin(starts, m.Start(name="big", place="", engines=3), program(tmp_path, code))
    failed = eventually(lambda: (found := listed(starts))[0][1] == "failed" and found)
    assert failed == [("big", "failed", "only 1 GPU for big --engines 3 set")]
    for line, words in (
        ("gpu-1:8, gpu-2", "--hosts=gpu-1:8, gpu-2"),
        ("slurm nodes=4,time=1:00:00", "--slurm=nodes=4,time=1:00:00"),
        ("mpi --file", "--mpi=--file"),
    ):
        cluster_commands.begin(starts, m.Start(name="big", place="", hosts=line), program(tmp_path, code))
        eventually(lambda words=words: listed(starts) == [("big", "failed", f"only 1 GPU for big {words} set")])
    cluster_commands.begin(starts, m.Start(name="big", place=""), program(tmp_path, "raise SystemExit(7)"))
    eventually(lambda: listed(starts) == [("big", "failed", "`speedlab start` ended with status 7")])
    with pytest.raises(ClusterError, match="it did not start; remove it"):
        cluster_commands.give("big", "stop", starts)
    cluster_commands.give("big", "remove", starts)
    assert listed(starts) == []


def test_of_a_cluster_that_somebody_else_has_started_since_no_old_failure_is_told(
    starts: ClusterLauncher, tmp_path: Path
) -> None:
    starts.begin("big", None, program(tmp_path, "raise SystemExit(7)"))
    eventually(lambda: listed(starts)[0][1] == "failed")
    # What was under way when it was looked at may be the start that has just failed.
    assert starts.reported([m.ClusterSummary(id="big", name="big", state="starting")])[0].state == "starting"
    assert listed(starts)[0][1] == "failed"
    running = m.ClusterSummary(id="big", name="big", state="running")
    assert starts.reported([running]) == [running]
    ended = m.ClusterSummary(id="big", name="big", state="ended", text="rank 0 ran out of memory")
    assert starts.reported([ended]) == [ended]


def test_a_start_whose_supervisor_is_not_there_yet_is_given_up(starts: ClusterLauncher, tmp_path: Path) -> None:
    waits = program(tmp_path, "import time; time.sleep(60)")
    for number in range(MOST_AT_ONCE):
        cluster_commands.begin(starts, m.Start(name=f"c{number}", place=""), waits)
    with pytest.raises(ClusterError, match="c0, c1, c2, c3 are being started; wait for one of them"):
        cluster_commands.begin(starts, m.Start(name="more", place=""), waits)
    with pytest.raises(ClusterError, match="there is a cluster 'c1': it is being started"):
        cluster_commands.begin(starts, m.Start(name="c1", place=""), waits)
    for number in range(MOST_AT_ONCE):
        cluster_commands.give(f"c{number}", "cancel", starts)
    assert listed(starts) == []


def test_words_for_clusters_that_hang_delay_no_other_question() -> None:
    go_on = threading.Event()

    async def ask() -> None:
        clusters, loop = Clusters(), asyncio.get_running_loop()
        hanging = [loop.create_task(clusters.give_word(lambda: go_on.wait(20) and None)) for _ in range(MOST_WORDS)]
        await asyncio.sleep(0)  # Each has begun.
        try:
            assert await asyncio.wait_for(clusters.in_thread(lambda: "answered"), 10) == "answered"
            with pytest.raises(ClusterError, match="16 words of pages wait already for clusters to end; try again"):
                await clusters.give_word(go_on.set)
            assert not go_on.is_set()
        finally:
            go_on.set()
        await asyncio.gather(*hanging)
        with pytest.raises(ClusterError, match="it runs"):
            await clusters.give_word(refused)

    def refused() -> None:
        raise ClusterError("it runs")

    asyncio.run(ask())


def test_bad_starts_and_words_are_refused_before_anything_is_done(starts: ClusterLauncher, tmp_path: Path) -> None:
    place = program(tmp_path, "raise AssertionError")
    for start, error, match in (
        (m.Start(name="--help", place=""), ClusterError, "cannot name a cluster"),
        (m.Start(name="../up", place=""), ClusterError, "cannot name a cluster"),
        (m.Start(name="none", place="", engines=0), QuestionError, "engines is 0; a page starts 1 to 1024"),
        (m.Start(name="none", place="", engines=2**40), QuestionError, "a page starts 1 to 1024"),
        (m.Start(name="none", place="", hosts="--config x"), ClusterError, "'--config x' is no host"),
        (m.Start(name="none", place="", hosts="slurm"), ClusterError, "what follows 'slurm' is missing"),
        (m.Start(name="none", place="", hosts="a:2", engines=2), ClusterError, "hosts say how many each has"),
    ):
        with pytest.raises(error, match=match):
            cluster_commands.begin(starts, start, place)
    for word, match in (
        (m.Word(word="explode"), "knows no 'explode'"),
        (m.Word(word="stop", arguments={"x": 1}), "'x'"),
    ):
        with pytest.raises(QuestionError, match=match):
            cluster_commands.check(word)
    with pytest.raises(LookupError, match="there is no cluster 'nobody'"):
        cluster_commands.give("nobody", "stop", starts)
    assert listed(starts) == []
