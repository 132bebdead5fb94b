"""Saving while training goes on: what is saved, what a failure tells, and what a damaged checkpoint offers instead."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor

from ranks.conftest import PoolOf
from ranks.loops import Case, adamw, engine_for, engine_step
from ranks.pool import Pool
from ranks.test_checkpoint import flip_a_byte, load_from, save_after
from speedlab.engine import checkpoint
from speedlab.engine.checkpoint import CheckpointError, safetensors_files
from speedlab.engine.checkpoint import async_save as saving_module
from speedlab.engine.checkpoint import write as write_module
from speedlab.engine.checkpoint.async_save import write_report
from speedlab.telemetry.checkpoint_index import find_checkpoint


def held_up(gate: threading.Event) -> Any:
    """Writing that waits for `gate`."""

    def wait_and_write(*args: Any, **named: Any) -> Any:
        assert gate.wait(30)
        return safetensors_files.write_tensors(*args, **named)

    return mock.patch.object(write_module, "write_tensors", wait_and_write)


def states_of(engine: Any) -> dict[str, Tensor]:
    partitioned = engine.partitioned_optimizer
    return {
        **engine.state_dict(),
        **{
            f"{flat.name}/{kind}": state.clone()
            for flat in partitioned.flats
            for kind, state in partitioned.states_of(flat).items()
        },
    }


def save_after_the_steps(case: Case, folder: Path) -> tuple[bool, dict[str, Tensor], dict[str, Tensor]]:
    """Save while two more steps are made; (whether it was still under way then, the state at the save, what was
    read)."""
    gate = threading.Event()
    with engine_for(case) as engine, held_up(gate):
        engine_step(engine, case, 0)
        expected = states_of(engine)
        path = checkpoint.save(engine, folder, "here", {"a": 1}, wait=False)
        saving = checkpoint.saving_of(engine)
        for step in (1, 2):
            engine_step(engine, case, step)
        under_way = not saving.done and not path.exists()
        gate.set()
        assert saving.wait(30) == path == folder / "here"
        assert saving.done
        assert saving.error is None
        assert saving.seconds > 0
        assert saving.bytes >= sum(p.numel() * 12 for p in engine.module.parameters())
        _, client_state = engine.load_checkpoint(folder, "here")
        assert client_state == {"a": 1}
        assert engine.global_step == 1
        return under_way, expected, states_of(engine)


@pytest.mark.parametrize("ranks", [1, 2, 4], indirect=True)
@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_saved_is_what_was_there_when_it_began(ranks: Pool, tmp_path: Path, stage: int) -> None:
    for under_way, expected, read in ranks.run(save_after_the_steps, Case(stage=stage, optimizer=adamw), tmp_path):
        assert under_way
        assert expected.keys() == read.keys()
        assert [name for name in expected if not expected[name].equal(read[name])] == []
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def save_twice_at_once(case: Case, folder: Path) -> list[str]:
    with engine_for(case) as engine:
        for tag in ("first", "second"):
            engine_step(engine, case, 0)
            checkpoint.save(engine, folder, tag, {}, wait=False)
        first_is_there = (folder / "first").exists()
        checkpoint.saving_of(engine).wait(30)
        return [str(first_is_there), find_checkpoint(folder).name]


def test_a_second_save_waits_for_the_first(two: Pool, tmp_path: Path) -> None:
    for result in two.run(save_twice_at_once, Case(stage=2), tmp_path):
        assert result == ["True", "second"]


def fill_the_disk(case: Case, folder: Path, wait: bool) -> list[str]:
    """Rank 1's disk is full; then there is room again, and the same tag is saved."""

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    said = []
    with engine_for(case) as engine:
        engine_step(engine, case, 0)
        with mock.patch("os.fsync", full) if engine.world.rank == 1 else mock.patch("os.nothing", create=True):
            try:
                checkpoint.save(engine, folder, "here", {}, wait=wait)
                checkpoint.saving_of(engine).wait(30)
            except Exception as error:  # the test looks at its text
                said.append(f"{type(error).__name__}: {error}")
        engine.everyone.barrier()
        said.append(str(sorted(path.name for path in folder.rglob("*.safetensors"))))
        engine.everyone.barrier()
        checkpoint.save(engine, folder, "here", {})
        said.append(engine.load_checkpoint(folder)[0].name)
    return said


@pytest.mark.parametrize("wait", [True, False])
def test_a_full_disk_is_told_on_every_rank_and_makes_room(two: Pool, tmp_path: Path, wait: bool) -> None:
    for error, left, loaded in two.run(fill_the_disk, Case(stage=1), tmp_path, wait):
        assert error.startswith("CheckpointError")
        assert "rank-1.safetensors: cannot be written: No space left on device" in error
        assert left == "[]"
        assert loaded == "here"
    assert [path.name for path in tmp_path.iterdir()] == ["here"], "the note of the failure is gone too"


def fail_after_the_steps(case: Case, folder: Path, how: str) -> list[str]:
    """What each of two ranks is told of a save of which one rank's part does not come; then the same tag is saved."""
    rank, patches = dist.get_rank(), contextlib.ExitStack()

    def fails(error: BaseException) -> Any:
        def fail(*args: Any, **named: Any) -> Any:
            raise error

        return fail

    def no_room_for_words(file: Path, report: dict[str, Any]) -> None:
        if file.with_suffix(".safetensors").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        write_report(file, report)

    with engine_for(case) as engine, patches:
        engine_step(engine, case, 0)
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if how == "no room for a word" and rank == 1:
            patches.enter_context(mock.patch("os.fsync", fails(full)))
            patches.enter_context(mock.patch.object(write_module, "write_report", no_room_for_words))
            patches.enter_context(mock.patch.object(saving_module, "write_report", no_room_for_words))
        elif how == "no memory" and rank == 0:
            patches.enter_context(mock.patch.object(write_module, "write_tensors", fails(MemoryError("no room"))))
        elif how == "interrupt" and rank == 1:
            patches.enter_context(mock.patch.object(write_module.RankPart, "copied", fails(KeyboardInterrupt("now"))))
        try:
            checkpoint.save(engine, folder, "here", {}, wait=False)
            checkpoint.saving_of(engine).wait(20)
            said = "saved"
        except (CheckpointError, KeyboardInterrupt) as error:
            said = f"{type(error).__name__}: {error}"
        patches.close()
        engine.everyone.barrier()
        checkpoint.save(engine, folder, "here", {})
        return [said, engine.load_checkpoint(folder)[0].name]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("no room for a word", ["cannot be written: No space left on device"] * 2),
        ("no memory", ["was not saved: MemoryError: no room"] * 2),
        ("interrupt", ["rank 1 did not begin its part: KeyboardInterrupt: now", "KeyboardInterrupt: now"]),
    ],
)
def test_nobody_waits_for_a_part_that_will_not_come(two: Pool, tmp_path: Path, how: str, expected: list[str]) -> None:
    found = two.run(fail_after_the_steps, Case(stage=1), tmp_path, how)
    for (said, loaded), words in zip(found, expected, strict=True):
        assert words in said
        assert loaded == "here"
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def change_what_was_given(case: Case, folder: Path) -> dict[str, Any]:
    gate = threading.Event()
    with engine_for(case) as engine, held_up(gate):
        state = {"epoch": 1, "seen": [1]}
        checkpoint.save(engine, folder, "here", state, wait=False)
        state["epoch"] = 2
        state["seen"].append(2)
        gate.set()
        checkpoint.saving_of(engine).wait(20)
        return engine.load_checkpoint(folder)[1]


def test_the_client_state_is_that_of_the_call(two: Pool, tmp_path: Path) -> None:
    assert two.run(change_what_was_given, Case(), tmp_path) == [{"epoch": 1, "seen": [1]}] * 2


def save_what_json_cannot_hold(case: Case, folder: Path) -> str:
    with engine_for(case) as engine:
        try:
            engine.save_checkpoint(folder, "here", {"x": {1, 2}})
        except Exception as error:  # the test looks at its text
            return f"{type(error).__name__}: {error}"
    return "saved"


def test_a_client_state_that_json_cannot_hold_is_refused(two: Pool, tmp_path: Path) -> None:
    for said in two.run(save_what_json_cannot_hold, Case(), tmp_path):
        assert said.startswith("CheckpointError")
        assert "client state" in said


def test_the_interpreter_ends_when_the_save_has_ended(tmp_path: Path) -> None:
    """The thread writes only once the main thread is over."""
    script = f"""
        import threading
        from pathlib import Path
        import torch, speedlab
        from speedlab.engine import checkpoint
        from speedlab.engine.checkpoint import write

        inner = write.write_tensors
        def late(*args, **named):
            threading.main_thread().join()
            return inner(*args, **named)
        write.write_tensors = late
        engine = speedlab.initialize(model=torch.nn.Linear(3, 3), config={{}})[0]
        checkpoint.save(engine, Path({str(tmp_path)!r}), "here", {{}}, wait=False)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)
    assert (tmp_path / "here" / "manifest.json").exists()


# ---- damage, and what is good ----------------------------------------------------------------------------------------


def save_steps(case: Case, folder: Path) -> None:
    with engine_for(case) as engine:
        for step in range(3):
            engine_step(engine, case, step)
            engine.save_checkpoint(folder)


def test_the_newest_good_one_is_offered(two: Pool, tmp_path: Path) -> None:
    two.run(save_steps, Case(stage=2), tmp_path)
    for damaged, offered in (("step-000003", "step-000002"), ("step-000002", "step-000001")):
        flip_a_byte(tmp_path / damaged)
        for tag in (None, damaged):
            for said in two.run(load_from, Case(stage=2), tmp_path, tag):
                assert str(tmp_path / (tag or "step-000003") / "rank-1.safetensors") in said
                assert f"The newest good one is {offered}; load it with tag='{offered}'" in said
    flip_a_byte(tmp_path / "step-000001")
    for said in two.run(load_from, Case(stage=2), tmp_path, None):
        assert f"{tmp_path} holds no other that is good" in said


# ---- versions and folders in memory ----------------------------------------------------------------------------------


def load_and_return(case: Case, folder: Path, verify: bool = True) -> dict[str, Tensor]:
    with engine_for(case) as engine:
        checkpoint.load(engine, folder, "here", verify=verify)
        return engine.state_dict()


def test_version_1_is_read(pool_of: PoolOf, tmp_path: Path) -> None:
    expected = pool_of(2).run(save_after, Case(stage=2), tmp_path, 2)[0]
    file = tmp_path / "here" / "manifest.json"
    manifest = json.loads(file.read_text())
    for key in ("layout", "buffers", "model", "huggingface"):
        manifest.pop(key, None)
    file.write_text(json.dumps({**manifest, "version": 1}))
    for read in pool_of(4).run(load_and_return, Case(stage=3), tmp_path):
        assert [name for name in expected if not expected[name].equal(read[name])] == []


def save_in_memory(case: Case, folder: Path) -> dict[str, Tensor]:
    with engine_for(case) as engine, mock.patch("os.fsync", side_effect=AssertionError):
        engine_step(engine, case, 0)
        checkpoint.save(engine, folder, "here", {}, verify=False)
        return engine.state_dict()


def test_without_verifying_nothing_is_hashed_or_brought_to_the_disk(two: Pool, tmp_path: Path) -> None:
    expected = two.run(save_in_memory, Case(stage=1), tmp_path)[0]
    files = json.loads((tmp_path / "here" / "manifest.json").read_text())["files"]
    assert {entry["sha256"] for entry in files.values()} == {None}
    for verify in (False, True):
        for read in two.run(load_and_return, Case(stage=2), tmp_path, verify):
            assert [name for name in expected if not expected[name].equal(read[name])] == []
    cut = tmp_path / "here" / "rank-0.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    for said in two.run(load_from, Case(stage=2), tmp_path, "here"):
        assert "it was cut or changed" in said
