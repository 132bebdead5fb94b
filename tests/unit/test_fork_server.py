"""The asking side of what engines are forked off, with a process that only pretends to fork."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import speedlab.cluster.worker.fork_server_client as nursery_file
from speedlab.cluster.errors import ClusterError
from speedlab.cluster.worker.fork_server_client import ForkServer, can_fork

PRETENDS = """
import json, os, sys, time
print("a banner", flush=True)
answers = int(sys.argv[1])
os.write(answers, b'{"ready": true}\\n')
print("it was here", os.environ["OWN"], os.environ["OMP_NUM_THREADS"], file=sys.stderr, flush=True)
for line in sys.stdin:
    order = json.loads(line)
    match order.get("arguments"):
        case None:
            answer = {"ended": {"7": -9, "8": 1}}
        case ["end"]:
            sys.exit("no more")
        case ["wait"]:
            time.sleep(600)
        case ["late"]:
            time.sleep(1)
            answer = {"pid": -1}
        case ["cannot"]:
            answer = {"problem": "fork: no room"}
        case _:
            answer = {"pid": os.getpid()}
    text = json.dumps({**answer, "number": order["number"]}) + "\\n"
    for part in (text[:3], text[3:]):
        os.write(answers, part.encode())
"""
RANK = {"OMP_NUM_THREADS": "3", "RANK": "1"}


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def never() -> bool:
    return False


@pytest.fixture
def nursery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    (tmp_path / "pretends.py").write_text(PRETENDS)
    monkeypatch.setattr(nursery_file, "NURSERY_MODULE", "pretends")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    nursery = ForkServer({**os.environ, "OWN": "mine"}, tmp_path / "nursery.log", 60.0)
    yield nursery
    nursery.close()


def test_one_process_forks_all_and_another_one_follows_it(nursery: ForkServer, tmp_path: Path) -> None:
    nursery.begin(3)
    assert nursery.ended() == {}, "it is not asked while it imports"
    wait_for(lambda: nursery.ready(3))
    pid = nursery.fork(RANK, [], "log", never)
    assert nursery.ended() == {7: -9, 8: 1}
    assert nursery.fork(RANK, [], "log", never) == pid
    with pytest.raises(ClusterError, match="no engine of rank 1 could be started: fork: no room"):
        nursery.fork(RANK, ["cannot"], "log", never)
    assert nursery.fork(RANK, [], "log", never) == pid
    process = psutil.Process(pid)
    process.kill()
    psutil.wait_procs([process], timeout=10)
    wait_for(lambda: nursery.ready(3))
    assert nursery.ended() == {7: -9, 8: 1}
    assert nursery.fork(RANK, [], "log", never) != pid
    text = (tmp_path / "nursery.log").read_text()
    assert text.count("it was here mine 3\n") == text.count("a banner\n") == 2


def test_what_it_says_last_is_told_and_nothing_is_done_late(nursery: ForkServer, tmp_path: Path) -> None:
    pid = nursery.fork(RANK, [], "log", never)
    with pytest.raises(ClusterError, match=r"(?s)has ended, with status 1.*it was here.*no more"):
        nursery.fork(RANK, ["end"], "log", never)
    process = psutil.Process(nursery.fork(RANK, [], "log", never))
    assert process.pid != pid
    with pytest.raises(ClusterError, match="it was interrupted"):
        nursery.fork(RANK, ["end"], "log", lambda: True)
    assert process.is_running(), "it was ordered nothing"
    late = ForkServer({**os.environ, "OWN": "mine"}, tmp_path / "nursery.log", 0.5)
    wait_for(lambda: late.ready(3))
    with pytest.raises(ClusterError, match=r"(?s)does not answer within 0.5 s.*it was here"):
        late.fork(RANK, ["wait"], "log", never)
    late.close()


def test_a_late_answer_is_no_other_question_s(nursery: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is interrupted over a question has asked it, and a process that is suspended for a second has not ended."""
    process = psutil.Process(nursery.fork(RANK, [], "log", never))
    with monkeypatch.context() as patch:
        patch.setattr(nursery, "_line", lambda seconds: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            nursery.fork(RANK, ["late"], "log", never)
    assert nursery.fork(RANK, [], "log", never) == process.pid
    monkeypatch.setattr(nursery_file, "_LOOK_SECONDS", 0.05)
    process.suspend()
    assert nursery.ended() == {}
    process.resume()
    assert process.is_running()
    assert nursery.fork(RANK, [], "log", never) == process.pid
    monkeypatch.setattr(nursery_file, "_LOOK_SECONDS", 10.0)
    assert nursery.ended() == {7: -9, 8: 1}


def test_what_cannot_be_started_leaves_nothing_open(tmp_path: Path) -> None:
    """Its log is in a folder that is gone."""
    nursery = ForkServer({**os.environ}, tmp_path / "gone" / "nursery.log", 60.0)
    before = psutil.Process().num_fds()
    for _ in range(3):
        with pytest.raises(ClusterError, match=r"cannot be started: .*No such file"):
            nursery.begin(3)
    assert psutil.Process().num_fds() == before


def test_another_number_of_threads_and_what_was_installed_are_imported_anew(
    nursery: ForkServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "site").mkdir()
    monkeypatch.setattr(nursery_file.sysconfig, "get_path", lambda name: str(tmp_path / "site"))

    def pid(threads: int) -> int:
        wait_for(lambda: nursery.ready(threads))
        return nursery.fork(RANK, [], "log", never)

    first = pid(3)
    assert pid(3) == first
    second = pid(1)
    assert second != first
    (tmp_path / "site" / "installed.pth").touch()
    assert pid(1) not in (first, second)


def test_engines_of_gpus_are_no_forks() -> None:
    assert can_fork(["cpu", "cpu"])
    assert not can_fork(["cpu", "cuda"])
