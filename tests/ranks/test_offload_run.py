"""Runs whose states lie away from the device: they come and go in a run that is on, and a disk that fails costs no more
than the way back to the last checkpoint."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from ranks.pool import Pool
from ranks.runs import as_engine, new_run, own_rank, trainer_of
from ranks.test_trainer import advance, events, post
from speedlab.engine.phase_timer import PhaseClock, StepCosts
from speedlab.telemetry.records import RunState
from speedlab.telemetry.run_folder import RunFolder
from speedlab.trainer import run_registry

ON_DISK: dict[str, Any] = {"zero": 3, "offload": {"optimizer": "disk", "parameters": "disk"}}


@pytest.fixture
def world(two: Pool) -> Iterator[Pool]:
    """Two ranks that may leave their world: the pool's own is made anew behind them."""
    yield two
    two.new_group()


def advanced(run: str) -> tuple[str, dict[str, Tensor]]:
    with as_engine(run):
        return advance(run), trainer_of(run).engine.state_dict()


def same(states: list[dict[str, Tensor]]) -> bool:
    return all(torch.equal(value, state[name]) for state in states[1:] for name, value in states[0].items())


def folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_states_come_and_go_while_a_run_is_on(world: Pool, tmp_path: Path) -> None:
    stays = new_run(folder(tmp_path / "stays"), steps=6, zero=3, batch={"global_size": 4, "micro_size": 2})
    goes = new_run(folder(tmp_path / "goes"), steps=6, zero=3, batch={"global_size": 4, "micro_size": 2})
    ways = [("disk", "none"), ("disk", "disk"), ("none", "none")]
    for places in [{"optimizer": optimizer, "parameters": parameters} for optimizer, parameters in ways]:
        post(goes, ("step", {"n": 1}), ("reshape", {"offload": places}))
    post(goes, ("resume", {}))
    ended = [*world.run(advanced, stays), *world.run(advanced, goes)]
    assert [state for state, _ in ended] == ["finished"] * 4
    assert [event.details["through"] for event in events(goes, "reshaped")] == ["in place"] * 3
    assert same([parameters for _, parameters in ended])


def with_a_pause(run: str, change: dict[str, Any] | None) -> tuple[list[tuple[str, int | None]], dict[str, Tensor]]:
    """Three steps, a pause, a change of shape, and the rest; without a change (None), neither is there a pause. How it
    stood when the engines were idle, with the step of an update under way."""
    stood = []
    with as_engine(run):
        if change is not None:
            stood.append((advance(run), trainer_of(run).engine.partitioned_optimizer.late))
            if own_rank() == 0:
                for word in ([("reshape", change)] if change else []) + [("resume", {})]:
                    post(run, word)
        stood.append((advance(run), trainer_of(run).engine.partitioned_optimizer.late))
        return stood, trainer_of(run).engine.state_dict()


def test_a_run_with_late_updates_that_pauses_or_is_moved_is_the_one_that_saves_there(
    world: Pool, tmp_path: Path
) -> None:
    """Whoever pauses, changes the places or the layout looks, and so does a checkpoint: the same bits follow; a run
    without any of it goes another way."""
    late = {"steps": 6, "zero": 2, "batch": {"global_size": 4, "micro_size": 2}, "eval": {"every_steps": 0}}
    late["offload"] = {"optimizer": "host", "delayed_update": 2}
    runs = {name: new_run(folder(tmp_path / name), **late) for name in ("pauses", "moves", "changes", "stays")}
    runs["saves"] = new_run(folder(tmp_path / "saves"), **late, checkpoint={"every_steps": 3})
    moves = {"pauses": {}, "moves": {"offload": {"optimizer": "disk"}, "zero": 3}, "changes": {"tp": 2}}
    states = {}
    for name, run in runs.items():
        if name in moves:
            post(run, ("step", {"n": 3}))
        ended = world.run(with_a_pause, run, moves.get(name))
        assert [stood for stood, _ in ended] == [[("paused", None)] * (name in moves) + [("finished", None)]] * 2, name
        assert same([state for _, state in ended])
        states[name] = ended[0][1]
    assert same([states["saves"], states["pauses"], states["moves"]])
    assert not same([states["saves"], states["stays"]])
    for name, value in states["saves"].items():
        torch.testing.assert_close(states["changes"][name], value, rtol=0, atol=2e-4)


def with_a_slow_disk(run: str) -> str:
    """Steps of which half is a wait for the disk, as the clock says."""
    take = PhaseClock.take

    def slow(clock: PhaseClock) -> StepCosts:
        costs = take(clock)
        return replace(costs, seconds=2.0, phases={**costs.phases, "offload": 1.0})

    with as_engine(run), patch.object(PhaseClock, "take", slow):
        return advance(run)


def test_a_disk_that_limits_is_told_after_the_first_steps_and_allowed(world: Pool, tmp_path: Path) -> None:
    run = new_run(tmp_path, steps=6, **ON_DISK)
    assert world.run(with_a_slow_disk, run) == ["finished"] * 2
    (reported,) = events(run, "warning")
    assert reported.step == 4
    assert reported.text.startswith("offload: steps wait 1 s of 2 s (50%, measured) for the disk with states")


def with_a_disk_that_fails(run: str, rank: int, number: int, steps: int, call: str = "pwritev") -> tuple[str, str]:
    """On `rank` the system's `call` fails with `number` after so many steps; then, repaired, the run goes on."""
    works = getattr(os, call)

    def fails(*arguments: Any) -> int:
        trainer = run_registry._trainers.get(Path(run))
        if trainer is not None and trainer.engine.global_step >= steps:
            raise OSError(number, os.strerror(number))
        return works(*arguments)

    with as_engine(run):
        with patch.object(os, call, fails if own_rank() == rank else works):
            first = advance(run)
        if own_rank() == 0:
            post(run, ("resume", {"step": 2}))
        return first, advance(run)


@pytest.mark.parametrize("late", [{}, {"delayed_update": 1}], ids=["at once", "late"])
@pytest.mark.parametrize(("rank", "number", "says"), [(0, errno.EIO, "EIO"), (1, errno.ENOSPC, "ENOSPC")])
def test_a_disk_that_fails_in_a_step_costs_the_way_back_to_the_last_checkpoint(
    world: Pool, tmp_path: Path, rank: int, number: int, says: str, late: dict[str, int]
) -> None:
    run = new_run(tmp_path, steps=5, checkpoint={"every_steps": 2}, zero=3, offload={**ON_DISK["offload"], **late})
    outcomes = world.run(with_a_disk_that_fails, run, rank, number, 3)
    assert outcomes[rank][0].startswith("OffloadError"), outcomes
    assert says in outcomes[rank][0]
    assert "go back to the last checkpoint" in outcomes[rank][0]
    assert outcomes[1 - rank][0].startswith("PeerLost"), outcomes
    assert [after for _, after in outcomes] == ["finished"] * 2
    assert RunFolder(run).read_status().state is RunState.FINISHED
    [failed] = events(run, "failed")  # The first rank writes it, and knows of the others that they left.
    assert (says if rank == 0 else "rank 1 left") in failed.text


def test_parameters_that_cannot_be_read_in_a_forward_cost_no_more(world: Pool, tmp_path: Path) -> None:
    """What was on its way then is nobody's any more, so that the load meets nothing of it."""
    run = new_run(tmp_path, steps=5, checkpoint={"every_steps": 2}, **ON_DISK)
    outcomes = world.run(with_a_disk_that_fails, run, 0, errno.EIO, 3, "preadv")
    assert "cannot read states" in outcomes[0][0], outcomes
    assert [after for _, after in outcomes] == ["finished"] * 2
