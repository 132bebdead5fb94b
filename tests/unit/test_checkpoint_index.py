"""Which checkpoint is meant: places as people give them, those a run has left behind, and what is said when there is
none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from speedlab.config import RunConfig
from speedlab.config.errors import with_more
from speedlab.engine.checkpoint import prune
from speedlab.telemetry.checkpoint_index import (
    CheckpointError,
    checkpoints_in,
    find_checkpoint,
    go_back_to,
    newest,
    numbered_name,
)
from speedlab.telemetry.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkpoints of a run: steps 10 and 20, and one of a person's at 15."""
    monkeypatch.chdir(tmp_path)
    checkpoints = RunFolder.create(RunConfig(name="a")).path / "checkpoints"
    for name, step in (("step-000010", 10), ("step-000020", 20), ("lunch", 15)):
        save(checkpoints, name, step)
    return checkpoints


def save(folder: Path, name: str, step: int) -> Path:
    (folder / name).mkdir(parents=True)
    manifest = {"format": "speedlab-checkpoint", "step": step, "files": {}}
    (folder / name / "manifest.json").write_text(json.dumps(manifest))
    return folder / name


def names(folder: Path) -> list[str]:
    return [found.path.name for found in checkpoints_in(folder)]


@pytest.mark.parametrize("kind", [str, Path])
def test_a_place_is_a_run_its_checkpoints_or_one_of_them(folder: Path, kind: type) -> None:
    for place in (folder, folder.parent, "runs/a", "runs/a/checkpoints", folder / "step-000020"):
        assert find_checkpoint(kind(place)).resolve() == folder / "step-000020"
    assert find_checkpoint(kind(folder), "lunch") == find_checkpoint(folder, step=15) == folder / "lunch"
    assert find_checkpoint(kind(folder / "lunch"), "lunch") == folder / "lunch"


@pytest.mark.parametrize(
    ("place", "named", "message"),
    [
        ("runs/a", {"tag": "supper"}, "holds no checkpoint 'supper'; it holds step-000020, lunch, step-000010"),
        ("runs/a", {"step": 11}, "holds no checkpoint of step 11; it holds step-000020, lunch, step-000010"),
        (
            "runs/a/records",
            {},
            "holds no complete checkpoint; run.save() writes one while engines hold the run",
        ),
        ("runs/b", {}, "runs/b: there is no such folder"),
        ("runs/a/checkpoints/lunch", {"tag": "supper"}, "is one checkpoint; to choose by tag or step, give its folder"),
        ("runs/a/checkpoints/lunch", {"step": 10}, "is one checkpoint; to choose by tag or step, give its folder"),
    ],
)
def test_what_there_is_not_is_told_with_what_there_is(folder: Path, place: str, named: dict, message: str) -> None:
    with pytest.raises(CheckpointError) as refusal:
        find_checkpoint(place, **named)
    assert message in str(refusal.value)
    assert refusal.value._render_traceback_() == [f"CheckpointError: {with_more(refusal.value)}"]  # No frames.


def test_what_is_no_checkpoint_does_not_count(folder: Path) -> None:
    save(folder, ".step-000030.partial", 30)
    (folder / "step-000040").mkdir()
    (save(folder, "step-000050", 50) / "manifest.json").write_text("{")
    assert names(folder) == ["step-000010", "lunch", "step-000020"]
    assert find_checkpoint(folder, "step-000040") == folder / "step-000040"  # Its reader says what is wrong with it.


def test_a_run_that_has_gone_back_goes_on_from_there(folder: Path) -> None:
    """Steps beyond are left behind: saved ones go first when there is no room, and their names are not taken."""
    go_back_to(folder / "step-000010")
    assert names(folder) == ["lunch", "step-000020", "step-000010"]
    assert numbered_name(folder, 20) == "step-000020-2"
    save(folder, "step-000012", 12)
    assert prune(folder, 2) == [folder / "step-000020"]
    assert newest(folder) == checkpoints_in(folder)[-1]
    assert names(folder) == ["lunch", "step-000010", "step-000012"]
    assert numbered_name(folder, 20) == "step-000020"

    go_back_to(folder / "lunch")  # And forward again, to what was left behind.
    assert names(folder) == ["step-000010", "step-000012", "lunch"]
    go_back_to(folder / "step-000012")
    save(folder, "step-000020", 20)
    assert names(folder) == ["lunch", "step-000010", "step-000012", "step-000020"]
    assert find_checkpoint(folder, step=20).name == "step-000020"


def test_of_two_of_one_step_the_one_that_was_chosen_counts(folder: Path) -> None:
    go_back_to(folder / "step-000010")
    save(folder, numbered_name(folder, 20), 20)
    assert find_checkpoint(folder, step=20).name == "step-000020-2"
    go_back_to(folder / "step-000020")
    assert find_checkpoint(folder, step=20) == find_checkpoint(folder) == folder / "step-000020"
    (folder / "left-behind.json").write_text("[")  # Damaged: the order of steps is what is left to go by.
    assert names(folder) == ["step-000010", "lunch", "step-000020", "step-000020-2"]
