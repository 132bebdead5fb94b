"""Run folders and checkpoints that earlier versions wrote: they open, and training resumes from them.

`tests/fixtures/make_old_runs.py` made the archives: each is named after the version that wrote its files.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from fixtures.make_old_runs import KINDS, STEPS, own_loop

from ranks.conftest import PoolOf
from ranks.runs import as_engine
from speedlab.telemetry.feed import Feed
from speedlab.telemetry.records import RunState, StepRecord
from speedlab.telemetry.report import write_report
from speedlab.telemetry.run_folder import RunFolder
from speedlab.trainer import run_registry

ARCHIVES = sorted((Path(__file__).parents[1] / "fixtures").glob("old_runs_*.tar.xz"))
TOLERANCE = {"float32": 1e-5, "float16": 5e-4, "bfloat16": 5e-4}
"""Of losses near 5.5 and gradient norms near 1. On the machine that wrote the files all are equal bit for bit; other
processors round 16-bit products differently. Adam's moments set to zero would change a norm by 1e-3 or more."""

each_archive = pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name)
each_kind = pytest.mark.parametrize("kind", KINDS)


def unpacked(archive: Path, name: str, folder: Path) -> Path:
    """The folder `name` of an archive, unpacked into `folder`."""
    with tarfile.open(archive) as file:
        file.extractall(folder, [each for each in file if each.name.split("/")[0] == name], filter="data")
    return folder / name


def records_of(run: Path, rank: int = 0) -> list[StepRecord]:
    lines = (run / "records" / f"rank-{rank}.jsonl").read_text(encoding="utf-8").splitlines()
    return [StepRecord.from_json(line) for line in lines]


def numbers(records: list[StepRecord]) -> list[tuple[int, float, float, float]]:
    return [(record.step, record.loss, record.grad_norm, record.learning_rate) for record in records]


@each_archive
@each_kind
def test_an_old_run_folder_opens(tmp_path: Path, archive: Path, kind: str) -> None:
    path, (ranks, _) = unpacked(archive, kind, tmp_path), KINDS[kind]
    run = RunFolder(path)
    assert (run.config.name, run.config.steps) == (kind, STEPS)
    assert (run.read_status().state, run.read_status().step) == (RunState.FINISHED, STEPS)
    kinds = [event.kind for event in run.read_events()]
    assert kinds[0] == "started"
    assert {"checkpoint", "finished"} <= set(kinds)
    assert all(run.read_placement(rank) for rank in range(ranks))
    feed = Feed(run)
    feed.poll(files=True)
    feed.close()
    assert [[record.step for record in feed.records[rank]] for rank in range(ranks)] == [[1, 2, 3, 4]] * ranks
    assert feed.damaged_lines == 0
    assert "finished" in write_report(run).read_text(encoding="utf-8")


def resumed(run: str) -> str:
    with as_engine(run):
        return run_registry.advance(run)


@each_archive
@each_kind
def test_an_old_run_resumes_from_its_checkpoint(pool_of: PoolOf, tmp_path: Path, archive: Path, kind: str) -> None:
    path, (ranks, _) = unpacked(archive, kind, tmp_path), KINDS[kind]
    before: Any = numbers(records_of(path))
    (tmp_path / "meeting").mkdir()
    RunFolder(path).post("resume", step=2)
    pool = pool_of(ranks)
    assert pool.run(resumed, str(path)) == ["finished"] * ranks
    pool.new_group()
    after = numbers(records_of(path))
    assert [event.text for event in RunFolder(path).read_events() if event.kind == "resumed"] == ["from step-000002"]
    allowed = TOLERANCE["float16" if kind == "float16_sgd" else "bfloat16"]
    # The records of the steps before the checkpoint stay. Readers take the later one of two records of a step.
    assert after[:STEPS] == before
    assert after[STEPS:] == [pytest.approx(values, rel=0, abs=allowed) for values in before[2:]]


@each_archive
def test_an_old_checkpoint_of_an_own_loop_loads(pool_of: PoolOf, tmp_path: Path, archive: Path) -> None:
    path = unpacked(archive, "own_loop", tmp_path)
    losses = json.loads((path / "losses.json").read_text(encoding="utf-8"))
    for again in pool_of(2).run(own_loop, str(path), steps=range(2, STEPS), resume=True):
        assert again == pytest.approx(losses[2:], abs=TOLERANCE["float32"])
