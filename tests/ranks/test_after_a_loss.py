"""A rank has died: what its peers waited for then is never waited for again, so that the next engine trains."""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import speedlab
from ranks.conftest import PoolOf
from ranks.runs import as_engine, new_run, own_rank
from ranks.small_steps import step_of
from ranks.tensor_models import gpt
from speedlab.comm import Blocks, CodedSums, CommStats, Group, HierarchicalGroups, PeerLost, Transfer, join, leave
from speedlab.engine.engine import Engine
from speedlab.parallel.pipeline.pipeline import Pipeline
from speedlab.parallel.zero.all_gather import UnshardScheduler
from speedlab.parallel.zero.reduce_scatter import ReduceScheduler
from speedlab.telemetry.run_folder import RunFolder
from speedlab.trainer import run_registry

# ---- a run -----------------------------------------------------------------------------------------------------------


def killed_before_its_third_step(run: str, backend: str) -> list[str]:
    """Rank 1 is gone with all it held when rank 0 waits for its parameters; then both advance again."""
    works = Engine.train_batch

    def killed(engine: Engine, *args: Any, **kwargs: Any) -> float:
        if own_rank() == 1 and engine.global_step == 2:
            run_registry._trainers.clear()
            engine.disconnect()
            leave(failed=True)
            raise SystemExit
        return works(engine, *args, **kwargs)

    with as_engine(run):
        os.environ["SPEEDLAB_BACKEND"] = backend
        found = []
        with patch.object(Engine, "train_batch", killed):
            try:
                found.append(run_registry.advance(run))
            except (PeerLost, SystemExit) as error:
                found.append(type(error).__name__)
        if own_rank() == 1:
            run_registry._trainers.clear()
        else:
            RunFolder(run).post("resume")
        try:
            found.append(run_registry.advance(run))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        return found


@pytest.mark.parametrize("backend", ["shared", "gloo"])
def test_the_first_resume_after_a_kill_trains(pool_of: PoolOf, tmp_path: Path, backend: str) -> None:
    pool = pool_of(2, backend)
    run = new_run(tmp_path, steps=4, zero={"stage": 3}, checkpoint={"every_steps": 1})
    RunFolder(run).post("resume")
    found = pool.run(killed_before_its_third_step, run, backend)
    pool.new_group()
    assert found == [["PeerLost", "finished"], ["SystemExit", "finished"]]


# ---- one exchange ----------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Instead of the end of the process: no exception that an engine would handle."""


@contextmanager
def killed_in(place: Any, name: str, after: Sequence[Path] = ()) -> Iterator[None]:
    """A call of `place.name` ends with `Killed`, after these files exist."""

    def ends(*args: Any, **kwargs: Any) -> Any:
        deadline = time.monotonic() + 20
        while not all(file.exists() for file in after) and time.monotonic() < deadline:
            time.sleep(0.01)
        raise Killed

    with patch.object(place, name, ends):
        yield


def begun(group: Group, kind: str, kept: list[Any]) -> Any:
    """An exchange of `kind` with the other rank of the group, under way."""
    size, peer = group.size, 1 - group.index
    whole, part = torch.ones(8 * size), torch.ones(8)
    kept += [whole, part]
    match kind:
        case "gather":
            return group.all_gather(whole, part)
        case "offer":
            group.offer([part])
            return group.all_gather(whole, part)
        case "reduce":
            return group.reduce_scatter(whole, part)
        case "exchange":
            return group.start_exchange(whole, torch.empty_like(whole))
        case "coded":
            rails = HierarchicalGroups(Group([dist.get_rank()], group.traffic, group.device), group, ((0, 1),))
            return CodedSums(group, rails, Blocks(8)).reduce_scatter(torch.ones(256 * size), torch.ones(256))
        case "sum":
            return SimpleNamespace(wait=lambda: group.sum(part))
        case "shift":
            return group.shift(part, torch.empty_like(part), 1, group.take_tags(1))
        case _:
            tag = group.take_tags(2) + group.index
            kept.append(group.send(part, peer, tag))
            return group.receive(torch.empty_like(part), peer, tag + (-1 if group.index else 1))


def left_with_all_in_hand(folder: Path, kind: str) -> tuple[str, bool]:
    """Rank 1 leaves while an exchange is under way, another has failed, and all of them are kept, with the group, the
    error and its frames. Returns what rank 0 meets in the next exchange, and whether it is there within 5 seconds."""
    world, kept = join(), list[Any]()
    group = Group(range(world.size), CommStats(), world.device)
    group.barrier()  # Rank 0, too, has all of its connections.
    for _ in range(2):
        kept.append(begun(group, kind, kept))
    if world.rank == 1:
        try:
            with killed_in(CommStats, "waited"):
                kept[-1].wait()
        except Killed as error:
            kept.append(error)
        leave(failed=True)
        while not (folder / "seen").exists():  # Until then nothing is let go.
            time.sleep(0.01)
        return "left", True
    start = time.monotonic()
    try:
        for each in kept:
            if hasattr(each, "wait"):
                each.wait()
        begun(group, kind, kept).wait()
        met = "none"
    except PeerLost:
        met = "PeerLost"
    (folder / "seen").touch()
    return met, time.monotonic() - start < 5


@pytest.mark.parametrize("kind", ["gather", "offer", "reduce", "exchange", "coded", "sum", "shift", "message"])
def test_a_rank_that_left_is_missed_whatever_it_keeps(pool_of: PoolOf, tmp_path: Path, kind: str) -> None:
    pool = pool_of(2, "gloo")
    found = pool.run(left_with_all_in_hand, tmp_path, kind, timeout=15)
    pool.new_group()
    assert found == [("PeerLost", True), ("left", True)]


# ---- an engine -------------------------------------------------------------------------------------------------------


@contextmanager
def interrupted(seen: Path) -> Iterator[None]:
    """Ctrl-C while this rank waits for a gather; the file `seen` tells of it."""
    waits = Transfer.wait

    def wait(transfer: Transfer) -> None:
        if transfer.name != "all_gather":
            waits(transfer)
            return
        seen.touch()
        with patch.object(CommStats, "waited", side_effect=KeyboardInterrupt):
            waits(transfer)

    with patch.object(Transfer, "wait", wait):
        yield


def meet_again(folder: Path, backend: str, rank: int, size: int) -> None:
    """The world is left and joined again, as by the engines of a cluster."""
    gc.collect()  # What holds connections of gloo in a circle would leave them open.
    leave(failed=True)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), SPEEDLAB_RENDEZVOUS=str(folder))
    try:
        join(backend=backend)
    finally:
        for name in ("RANK", "WORLD_SIZE", "SPEEDLAB_RENDEZVOUS"):
            del os.environ[name]


def engine_of(config: dict[str, Any]) -> Engine:
    return speedlab.initialize(model=gpt(tied=True), config=config)[0]


def steps_of(engine: Engine) -> list[float]:
    return [step_of(engine, step) for step in range(2)]


def lost_and_again(folder: Path, config: dict[str, Any], where: str, backend: str) -> list[Any]:
    """Losses of two steps: of an engine to which nothing happens; of one whose first step ends with the death of the
    last rank, after the ranks have met again; and of the next one, after another death."""
    rank, size = dist.get_rank(), dist.get_world_size()
    place, name = {
        "gather": (UnshardScheduler, "require"),
        "reduction": (ReduceScheduler, "advance"),
        "message": (Pipeline, "_arrived"),
        "interrupt": (UnshardScheduler, "require"),
    }[where]

    def dies(engine: Engine, which: str) -> str:
        fate: Any = nullcontext()
        seen = [folder / f"interrupted-{which}-{each}" for each in range(size)]
        if rank == size - 1:
            fate = killed_in(place, name, after=seen[:-1] if where == "interrupt" else ())
        elif where == "interrupt":
            fate = interrupted(seen[rank])
        death = "none"
        try:
            with fate:
                step_of(engine, 0)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # They hold connections of gloo, which would stay open.
            death = type(error).__name__
        engine.disconnect()
        meet_again(folder, backend, rank, size)
        return death

    engine = engine_of(config)
    found: list[Any] = [steps_of(engine)]
    engine.destroy(keep_parameters=False)
    engine = engine_of(config)
    found.append(dies(engine, "first"))
    engine.reconnect()
    found.append(steps_of(engine))
    engine.destroy(keep_parameters=False)
    engine = engine_of(config)
    found.append(dies(engine, "second"))
    engine.destroy(keep_parameters=False)  # As before a run is built anew in a process that survived.
    engine = engine_of(config)
    found.append(steps_of(engine))
    engine.destroy(keep_parameters=False)
    leave()
    return found


def configuration(**more: Any) -> dict[str, Any]:
    return {
        "zero": {"stage": 3, "bucket_bytes": 1, **more.pop("zero", {})},
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "batch": {"micro_size": 2, "accumulation": more.pop("accumulation", 1)},
        "precision": {"dtype": "float32"},
        **more,
    }


SENT = {"quantized_weights": True, "quantized_gradients": True}
CASES = {
    "plain": (2, "shared", "", configuration()),
    "gloo": (2, "gloo", "", configuration()),
    "three-gloo": (4, "gloo", "", configuration()),
    "host": (2, "shared", "", configuration(offload={"parameters": "host", "optimizer": "host"})),
    "disk-gloo": (2, "gloo", "", configuration(offload={"parameters": "disk", "optimizer": "disk"})),
    "codecs": (2, "shared", "", configuration(zero={**SENT, "secondary_partition": 2})),
    "two-hosts": (4, "shared", "aabb", configuration(zero={**SENT, "secondary_partition": 2})),
    "stage-2": (2, "shared", "", configuration(zero={"stage": 2})),
}


USUAL = {("plain", "gather"), ("plain", "interrupt"), ("gloo", "gather"), ("codecs", "reduction")}
PLACES = [
    pytest.param(name, where, marks=() if (name, where) in USUAL else pytest.mark.nightly)
    for name in CASES
    for where in ("gather", "reduction", "interrupt")
    if name != "stage-2" or where == "reduction"  # It gathers nothing in a step.
]


@pytest.mark.parametrize(("name", "where"), PLACES)
def test_nothing_of_before_is_waited_for(pool_of: PoolOf, tmp_path: Path, name: str, where: str) -> None:
    size, backend, hosts, config = CASES[name]
    check(pool_of, tmp_path, (size, backend, hosts), config, where)


@pytest.mark.nightly
def test_messages_of_a_pipeline_of_before_are_not_waited_for(pool_of: PoolOf, tmp_path: Path) -> None:
    config = configuration(parallel={"pp": 2}, accumulation=2)
    check(pool_of, tmp_path, (4, "shared", ""), config, "message")


def check(pool_of: PoolOf, folder: Path, world: tuple[int, str, str], config: dict[str, Any], where: str) -> None:
    pool = pool_of(*world)
    found = pool.run(lost_and_again, folder, config, where, world[1], timeout=60)
    pool.new_group()
    for rank, (first, death, after, other_death, again) in enumerate(found):
        error = "Killed" if rank == world[0] - 1 else "KeyboardInterrupt" if where == "interrupt" else "PeerLost"
        assert (death, other_death) == (error, error), rank
        assert after == again == first, rank
