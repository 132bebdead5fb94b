"""The run folder: names, status, the mailbox of control words, and what damaged or hostile folders get."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import threading
from dataclasses import replace

import pytest
from telemetry_samples import make_event, make_folder

from speedlab.config import ConfigError, RunConfig
from speedlab.telemetry import run_folder as folder_module
from speedlab.telemetry.records import RunState
from speedlab.telemetry.run_folder import (
    RunCommand,
    RunFolder,
    RunFolderError,
    Status,
    find_runs,
    require_space,
    write_atomically,
)


def test_create_writes_a_folder_that_opens_again(tmp_path):
    made = make_folder(tmp_path, "first", steps=7, zero=3)
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o700
    opened = RunFolder(made.path)
    assert opened.name == "first"
    assert opened.config == made.config
    assert opened.config.zero.stage == 3
    status = opened.read_status()
    assert (status.state, status.steps, status.command) == (RunState.STARTING, 7, 0)


def test_create_fills_in_the_first_free_name(tmp_path):
    names = [make_folder(tmp_path, None).config.name for _ in range(3)]
    assert names == ["run-1", "run-2", "run-3"]


@pytest.mark.parametrize(
    ("taken", "suggested"),
    [(["a"], "a-2"), (["a", "a-2"], "a-3"), (["run-3", "run-4"], "run-5"), (["b-9"], "b-10")],
)
def test_a_name_that_exists_is_refused_with_the_next_free_one(tmp_path, taken, suggested):
    for name in taken:
        make_folder(tmp_path, name)
    with pytest.raises(ConfigError, match=f"'{taken[0]}' exists in .*'{suggested}'$"):
        make_folder(tmp_path, taken[0])


def test_a_folder_that_cannot_be_written_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot hold a run"):
        make_folder(tmp_path / "file")

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder_module, "write_atomically", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        make_folder(tmp_path, "sample")
    assert not (tmp_path / "sample").exists()


def test_status_survives_the_round_trip(tmp_path):
    folder = make_folder(tmp_path)
    status = Status(
        state=RunState.PAUSED, step=12, steps=200, cluster="lab", rank_pids=(4, 5), command=3, text="after step 12"
    )
    folder.write_status(status)
    read = folder.read_status()
    assert read.updated > 0
    assert replace(read, updated=0.0) == status


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        "{",
        '{"state": "flying"}',
        '{"state": "paused", "step": -1}',
        '{"state": "paused", "step": "many"}',
        '{"state": "paused", "rank_pids": [99999999999]}',
        '{"state": "paused", "rank_pids": ["<b>"]}',
        "[" * 100_000,
        '{"state": "' + "x" * 2**19 + '"}',
    ],
)
def test_a_damaged_status_is_refused_by_name(tmp_path, text):
    folder = make_folder(tmp_path)
    (folder.path / "status.json").write_text(text)
    with pytest.raises(RunFolderError, match=r"status\.json"):
        folder.read_status()


def test_a_pipe_instead_of_a_file_does_not_stop_the_reader(tmp_path):
    folder = make_folder(tmp_path)
    (folder.path / "status.json").unlink()
    os.mkfifo(folder.path / "status.json")
    with pytest.raises(RunFolderError, match="it is a pipe or a device, not a file"):
        folder.read_status()


def test_opening_something_else_names_the_runs_there_are(tmp_path):
    make_folder(tmp_path, "good")
    (tmp_path / "other").mkdir()
    with pytest.raises(RunFolderError, match=r"no config\.json.*good"):
        RunFolder(tmp_path / "other")


def test_what_a_later_version_has_written_is_shown_and_not_gone_on_with(tmp_path):
    """It would be another run."""
    folder = make_folder(tmp_path)
    for file in ("config.json", "status.json"):
        path = folder.path / file
        path.write_text(json.dumps(json.loads(path.read_text()) | {"of_a_later_version": {"deep": 1}}))
    number = folder.post("pause")
    word = folder.path / "control" / f"{number:06d}.json"
    word.write_text(json.dumps(json.loads(word.read_text()) | {"of_a_later_version": 1}))
    found = RunFolder(folder.path)
    assert (found.config, found.read_status()) == (folder.config, folder.read_status())
    assert [command.word for command in found.pending(0)] == ["pause"]
    with pytest.raises(RunFolderError, match=r"config\.json: .*of_a_later_version.* can show the run"):
        found.update_config(folder.config)
    written = json.loads(folder.config.to_json())
    written["optimizer"]["weight_deca"] = 1.0
    (folder.path / "config.json").write_text(json.dumps(written))
    with pytest.raises(RunFolderError, match=r"optimizer: .*'weight_decay'"):
        found.require_known()  # The handle that is open sees it, too.
    assert found.config == folder.config


def test_words_come_in_order_and_only_those_after(tmp_path):
    folder = make_folder(tmp_path)
    assert folder.pending(0) == []
    assert folder.post("pause") == 1
    assert folder.post("reshape", zero=3) == 2
    assert RunFolder(folder.path).post("step", n=5) == 3
    assert folder.pending(1) == [
        RunCommand(number=2, word="reshape", arguments={"zero": 3}),
        RunCommand(number=3, word="step", arguments={"n": 5}),
    ]
    assert folder.pending(3) == []
    assert sorted(path.name for path in (folder.path / "control").iterdir()) == [f"00000{n}.json" for n in (1, 2, 3)]


@pytest.mark.parametrize("links", [True, False], ids=["links", "no-links"])
def test_words_posted_at_once_by_many_clients_all_get_their_own_number(tmp_path, monkeypatch, links):
    if not links:  # As exFAT, and folders shared with a virtual machine.

        def refused(source, target):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

        monkeypatch.setattr(os, "link", refused)
    folder = make_folder(tmp_path)
    numbers: list[int] = []
    start = threading.Barrier(4)

    def client():
        mine = RunFolder(folder.path)
        start.wait()
        for _ in range(25):
            numbers.append(mine.post("save"))

    threads = [threading.Thread(target=client) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(1, 101))
    assert [command.number for command in folder.pending(0)] == list(range(1, 101))


def test_unknown_words_and_huge_arguments_are_refused(tmp_path):
    folder = make_folder(tmp_path)
    with pytest.raises(ValueError, match="unknown control word 'explode'"):
        folder.post("explode")
    with pytest.raises(ValueError, match="at most"):
        folder.post("save", tag="x" * 20_000)
    assert folder.pending(0) == []


def test_damaged_words_are_passed_over_and_numbers_never_fall_back(tmp_path):
    folder = make_folder(tmp_path)
    for text in ("{", '{"word": "rm", "arguments": {}}', '{"word": "pause", "arguments": 3}'):
        number = folder.post("pause")
        (folder.path / "control" / f"{number:06d}.json").write_text(text)
    folder.post("resume")
    assert [(command.number, command.word) for command in folder.pending(0)] == [(4, "resume")]
    folder.write_status(Status(command=4))
    for path in (folder.path / "control").iterdir():
        path.unlink()
    assert folder.post("stop") == 5
    assert [command.number for command in folder.pending(4)] == [5]


def test_runs_are_found_newest_first(tmp_path):
    for name in ("a", "b", "c"):
        make_folder(tmp_path, name)
    (tmp_path / "no-run").mkdir()
    for age, name in enumerate(("b", "c", "a")):
        for file in ("config.json", "status.json"):
            os.utime(tmp_path / name / file, (1000 - age, 1000 - age))
    assert [path.name for path in find_runs(tmp_path)] == ["b", "c", "a"]
    assert find_runs(tmp_path / "missing") == []
    (tmp_path / "circle").symlink_to("circle")  # It hides no other.
    assert [path.name for path in find_runs(tmp_path)] == ["b", "c", "a"]


def test_space_is_looked_for_on_the_disk_that_will_hold_the_path(tmp_path):
    require_space(tmp_path / "not" / "yet" / "there", 1)
    with pytest.raises(RunFolderError, match=r"no disk space: 1048576\.00 GiB needed"):
        require_space(tmp_path / "not" / "yet" / "there", 2**50)


def test_a_failed_atomic_write_leaves_the_old_file_and_no_draft(tmp_path):
    path = tmp_path / "file.json"
    write_atomically(path, "old")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file.json"]


def test_config_keeps_the_name_it_was_given(tmp_path):
    folder = RunFolder.create(RunConfig(folder=tmp_path))
    assert json.loads((folder.path / "config.json").read_text())["name"] == "run-1"


@pytest.mark.parametrize("damage", ["a file", "gone", "a folder in the place of a word"])
def test_a_mailbox_that_cannot_be_read_is_named_and_nobody_waits_for_it(tmp_path, damage):
    folder = make_folder(tmp_path)
    control = folder.path / "control"
    folder.post("pause")
    shutil.rmtree(control)
    if damage == "a file":
        control.write_text("")
    if damage == "a folder in the place of a word":
        (control / "000001.json").mkdir(parents=True)
        assert folder.pending(0) == []
        assert folder.post("stop") == 2
        assert [command.number for command in folder.pending(0)] == [2]
    elif damage == "gone":
        assert folder.pending(0) == []  # As a run that nobody has ever told anything.
    else:
        with pytest.raises(RunFolderError, match="control: cannot be read"):
            folder.pending(0)


@pytest.mark.parametrize(
    "line",
    [
        *("null", "5", "[]", '"x"', "{", "[" * 50_000),
        '{"kind": "started", "step": 1, "time": 0, "details": []}',
        '{"kind": "started", "step": "1", "time": 0}',
        '{"kind": "started", "step": 1, "time": 0, "command": "1"}',
    ],
)
def test_a_line_that_is_no_event_is_passed_over(tmp_path, line):
    folder = make_folder(tmp_path)
    (folder.path / "events.jsonl").write_text(f"{line}\n{make_event('paused', 3).to_json()}\n")
    assert folder.read_events() == [make_event("paused", 3)]
