"""Updates that are late by a step: what their definition says (`speedlab.optim.delayed_update`), wherever states
lie."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from grids import thinned
from torch import Tensor, nn

import speedlab
from ranks import models
from ranks.conftest import Check, PoolOf
from ranks.layout_cases import LayoutCase, train_layouts
from ranks.loops import Case, adamw, engine_for, engine_step, problems, sgd, train_cases, train_plain, worst_update
from ranks.pool import Pool
from ranks.small_steps import warnings_of
from ranks.test_compressed_optimizer import PlainSums
from ranks.test_modules import MODULES
from ranks.test_parity import BFLOAT16, FLOAT32
from speedlab.config import ConfigError, RunConfig
from speedlab.layout import Layout
from speedlab.offload import OffloadError
from speedlab.optim.delayed_update import DelayedUpdate
from speedlab.optim.fused import FusedAdamW

PLACES = [
    {"optimizer": "host"},
    {"optimizer": "disk"},
    {"optimizer": "disk", "parameters": "disk"},
    {"optimizer": "host", "parameters": "disk"},
]

HOST = (("optimizer", "host"), ("delayed_update", 2))
DISK = (("optimizer", "disk"), ("parameters", "disk"), ("delayed_update", 2))


def cases(stage: int, dtype: str) -> list[Case]:
    """Places, and delays from the first step on, from a later one, and never."""
    found = []
    for number, places in enumerate(PLACES):
        if stage < 3 and "parameters" in places:
            continue
        case = Case(
            stage=stage,
            dtype=dtype,
            build=models.transformer if dtype == "float32" else models.rounded_transformer,
            whole=dtype == "float32",
            accumulation=1 + (number + stage) % 2,
            checkpointing="block" if number % 3 == 0 else "none",
            optimizer=sgd if number == 1 else adamw,
            clip_norm=0.3 if number % 2 == 0 else None,
            steps=6,
        )
        firsts = (1, 4) if number else (1, 4, 99)
        found += [replace(case, offload=(*places.items(), ("delayed_update", first))) for first in firsts]
    return found


@pytest.mark.parametrize(
    ("stage", "dtype", "ranks"),
    thinned(
        itertools.product((0, 1, 2, 3), ("float32", "bfloat16"), (1, 2)),
        lambda stage, dtype, ranks: (stage + (dtype == "float32") + ranks) % 2 == 0,
    ),
    indirect=["ranks"],
)
def test_plain_loop(check: Check, ranks: Pool, stage: int, dtype: str) -> None:
    check(ranks, cases(stage, dtype), FLOAT32 if dtype == "float32" else BFLOAT16)


@pytest.mark.parametrize("name", ["tied weights", "frozen parameters", "block unused by some data, accumulated"])
def test_awkward_modules(check: Check, two: Pool, name: str) -> None:
    """What no rank used in a step has no late update either."""
    module = replace(MODULES[name], optimizer=adamw, steps=6)
    # Parameters stay: of those that are away every gather is one of all ranks, and these go different ways.
    places = ((1, HOST), (3, (("optimizer", "disk"), ("delayed_update", 2))))
    check(two, [replace(module, stage=stage, offload=offload) for stage, offload in places], FLOAT32)


def test_several_dtypes(check: Check, two: Pool) -> None:
    """Masters of float64 layers are apart as well, and those of bfloat16 ones in float32."""
    case = Case(build=models.mixed, batch=models.points, whole=False, steps=6)
    check(two, [replace(case, stage=stage, offload=offload) for stage, offload in ((2, HOST), (3, DISK))], BFLOAT16)


def test_the_oracle_knows_a_delay_from_none() -> None:
    """The judge itself: these tolerances tell a delay from the second step on from none, and from one from the
    first."""
    late = train_plain(Case(offload=HOST, steps=6), 1)
    for other in (Case(steps=6), Case(offload=(*HOST[:1], ("delayed_update", 1)), steps=6)):
        assert problems([train_plain(other, 1)], late, FLOAT32)


@pytest.mark.parametrize(
    ("size", "pp", "tp"),
    thinned([(2, 2, 1), (2, 1, 2), (4, 2, 1), (4, 1, 2)], lambda size, pp, tp: size // 2 == pp),
)
def test_under_every_axis(pool_of: PoolOf, plain: Any, size: int, pp: int, tp: int) -> None:
    layout = Layout.for_world(size, pp=pp, tp=tp)
    given = [
        LayoutCase(layout=layout, stage=stage, steps=4, optimizer=adamw, offload=offload)
        for stage, offload in ((1, HOST), (3, DISK))
    ]
    for case, *paths in zip(given, *pool_of(size).run(train_layouts, given), strict=True):
        oracle = plain(case.plain(), layout.dp)
        for path in paths:
            assert path.losses == pytest.approx(oracle.losses, rel=FLOAT32.loss), str(case)
            assert path.norms == pytest.approx(oracle.norms, rel=1e-5), str(case)
            worst, name = worst_update(path.parameters, oracle)
            assert worst <= FLOAT32.update, f"{case}: {name}"


# ---- its own learning rate, and looks --------------------------------------------------------------------------------


def rate(step: int) -> float:
    """Of each step another one."""
    return [1.0, 0.1, 0.7, 0.05, 0.9, 0.3, 0.6, 0.2][step]


def by_definition(case: Case, first: int, looks: tuple[int, ...]) -> tuple[list[float], dict[str, Tensor]]:
    """Delayed AdamW with a schedule; behind the steps in `looks` somebody looks."""
    model, masters = case.build(), case.build()
    optimizer = adamw(masters.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    losses = []
    for step in range(case.steps):
        loss = case.loss(model, case.batch(step, 0))
        losses.append(loss.item())
        for master, gradient in zip(
            masters.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
        ):
            master.grad = gradient
        before = {name: value.clone() for name, value in masters.state_dict().items()}
        nn.utils.clip_grad_norm_(masters.parameters(), 0.3)
        optimizer.step()
        scheduler.step()
        late = step + 1 >= first and step not in looks
        model.load_state_dict(before if late else masters.state_dict())
    return losses, masters.state_dict()


def look(engine: Any, how: str, folder: str) -> None:
    if how == "save":
        engine.save_checkpoint(folder)
    elif how == "evaluate":
        engine.evaluate([models.tokens(99, 0)] * engine.accumulation)
    elif how == "call":
        with torch.no_grad():
            engine(*models.tokens(99, 0))
    elif how == "gather":
        speedlab.gather(list(engine.module.parameters()))
    elif how == "reshape":
        engine.reshape(offload={"optimizer": "disk"})
    else:
        getattr(engine, how)()


@pytest.mark.parametrize(
    "how", ["save", "evaluate", "call", "gather", "state_dict", "module_state_dict", "reshape", "finish_update"]
)
def test_a_look_sees_the_last_update_and_the_next_step_does(how: str, tmp_path: Path) -> None:
    case = Case(offload=HOST, clip_norm=0.3, steps=7)
    losses, expected = by_definition(case, 2, looks=(3,))
    found = []
    scheduler = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, rate)  # noqa: E731
    with engine_for(case, optimizer=adamw, lr_scheduler=scheduler) as engine:
        for step in range(case.steps):
            found.append(engine_step(engine, case, step))
            assert engine.partitioned_optimizer.late == (step + 1 if step >= 1 else None)
            if step == 3:
                look(engine, how, str(tmp_path))
                assert engine.partitioned_optimizer.late is None
                masters = engine.state_dict()
                assert all(p.equal(masters[name]) for name, p in engine.module.named_parameters())
        state = engine.state_dict()
    assert found == pytest.approx(losses, rel=2e-6)
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-6)


def went_on(case: Case, folder: str, *, load: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Three steps, a save, and three more; or what was saved, and three more."""
    losses = []
    with engine_for(case) as engine:
        for step in range(case.steps):
            if step == 3 and load:
                assert engine.load_checkpoint(folder)
            elif step == 3:
                engine.save_checkpoint(folder)
            if step >= 3 or not load:
                losses.append(engine_step(engine, case, step))
        return losses[-3:], engine.state_dict()


@pytest.mark.parametrize("offload", [HOST, DISK])
@pytest.mark.parametrize("size", [1, 2])
def test_a_run_that_was_loaded_is_the_one_that_saved(
    pool_of: PoolOf, tmp_path: Path, size: int, offload: tuple[tuple[str, str | int], ...]
) -> None:
    """To the bit; and not the one that did not save."""
    case = Case(stage=3, offload=offload, steps=6, accumulation=2)
    pool, folder = pool_of(size), str(tmp_path)
    saved = pool.run(went_on, case, folder, load=False)
    loaded = pool.run(went_on, case, folder, load=True)
    for (losses, state), (again, same) in zip(saved, loaded, strict=True):
        assert losses == again
        assert not [name for name, value in state.items() if not value.equal(same[name])]
    unsaved = train_plain(case, size)
    assert sum(losses[-1] for losses, _ in saved) / size != pytest.approx(unsaved.losses[-1], rel=FLOAT32.loss)


# ---- beside the step -------------------------------------------------------------------------------------------------


def test_the_update_is_made_while_the_next_step_computes() -> None:
    """It waits for that step's backward, which never comes where somebody waits for the update first."""
    reached, threads, update = threading.Event(), set(), FusedAdamW._update

    def waits(self: Any, *given: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            threads.add(threading.current_thread().name)
            assert reached.wait(30)
        update(self, *given)

    case = Case(offload=(("optimizer", "host"), ("delayed_update", 1)), optimizer=adamw)
    with engine_for(case) as engine, patch.object(FusedAdamW, "_update", waits):
        for step in range(2):
            loss = case.loss(engine, case.batch(step, 0))
            if step == 1:
                loss.register_hook(lambda gradient: reached.set())
            engine.backward(loss)
            engine.step()
            assert reached.is_set() == (step == 1)
            assert engine.clock.take().phases.get("offload", 0) == 0, "what is hidden is no part of the step"
        assert threads == {"speedlab-update"}
        engine.finish_update()
    assert not [thread for thread in threading.enumerate() if thread.name == "speedlab-update"]


def test_what_a_look_past_the_engine_would_miss_is_refused() -> None:
    with engine_for(Case(offload=HOST, optimizer=adamw)) as engine:
        for step in range(2):
            engine_step(engine, Case(), step)
        with pytest.raises(RuntimeError, match=r"module.state_dict\(\): the last update is still under way"):
            engine.module.state_dict()
        for training in (False, True):
            engine.train(training)
            with torch.no_grad(), pytest.raises(RuntimeError, match="a forward without gradients: the last update"):
                engine.module(*models.tokens(0, 0))
        engine.finish_update()
        engine.module.state_dict()


def write_too_early(writers: list[int]) -> tuple[list[str], list[str], list[float]]:
    """What a rank is told when these ones write under an update that is late: by steps, and by what makes it the
    parameters'. Then a parameter, and that behind a write in its time."""
    case = Case(offload=HOST, optimizer=adamw)
    with engine_for(case) as engine, warnings_of("speedlab.engine") as reported:
        for step in range(2):
            engine_step(engine, case, step)
        first, second, *_ = engine.module.parameters()
        if engine.world.rank in writers:
            with torch.no_grad():
                first.add_(1.0)
            second.data = torch.zeros_like(second)
        refused: list[str] = []
        for _ in range(2 if writers else 0):
            engine.backward(engine(*models.tokens(3, engine.world.rank)))
            try:
                engine.step()
            except RuntimeError as error:
                refused.append(str(error))
        engine.finish_update()
        found = [float(each.detach().double().sum()) for each in (first, second)]
        with torch.no_grad():
            first.fill_(7.0)
        engine_step(engine, case, 2)
        engine.finish_update()
        return refused, reported, [*found, float((first.detach() - 7.0).abs().max())]


def test_what_is_written_under_a_late_update_is_refused_on_all_ranks_and_behind_it_kept(two: Pool) -> None:
    (refused, reported, found), (others, theirs, theirs_found) = two.run(write_too_early, [0])
    _, _, plain = two.run(write_too_early, [])[0]
    said = "changed while an update was under way (offload.delayed_update), whose values come in its place"
    assert [text.partition(":")[2].partition(";")[0] for text in refused] == [
        f" embedding.weight and 1 more: {said}"
    ] * 2
    assert [text.partition(";")[0] for text in others] == [f"step: a parameter on another rank: {said}"] * 2
    assert ([text.partition(";")[0] for text in reported], theirs) == ([f"embedding.weight and 1 more: {said}"], [])
    assert found == theirs_found == plain
    assert 0 < found[2] < 0.1


def test_a_step_that_overflows_ends_with_the_update_before_it() -> None:
    case = Case(dtype="float16", offload=HOST, optimizer=adamw, build=models.rounded_transformer)
    with engine_for(case) as engine:
        for step in range(3):
            loss = engine(*case.batch(step, 0))
            engine.backward(loss * (float("inf") if step == 2 else 1))
            assert engine.step() == (step < 2)
            assert engine.partitioned_optimizer.late == (2 if step == 1 else None)
        assert (engine.global_step, engine.skipped_steps, engine.updating) == (2, 1, False)
        before = engine.state_dict()
        assert all(p.equal(before[name].half()) for name, p in engine.module.named_parameters())
        engine_step(engine, replace(case, batch=models.tokens), 3)
        after = engine.state_dict()
        assert any(not value.equal(before[name]) for name, value in after.items())


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_fails_beside_a_step_stops_the_next_one(tmp_path: Path, number: int) -> None:
    case = Case(stage=3, offload=DISK, optimizer=adamw, steps=6)
    undisturbed = went_on(case, str(tmp_path / "undisturbed"), load=False)

    def fails(*arguments: Any) -> int:
        raise OSError(number, os.strerror(number))

    with engine_for(case) as engine:
        for step in range(3):
            engine_step(engine, case, step)
        saved = engine.save_checkpoint(tmp_path)
        engine_step(engine, case, 3)
        engine.partitioned_optimizer.settle()
        with patch.object(os, "pwritev", fails), pytest.raises(OffloadError, match=errno.errorcode[number]):
            [engine_step(engine, case, step) for step in (4, 5)]
        engine.load_checkpoint(saved)
        losses = [engine_step(engine, case, step) for step in (3, 4, 5)]
        state = engine.state_dict()
    assert losses == undisturbed[0]
    assert not [name for name, value in undisturbed[1].items() if not value.equal(state[name])]


def test_an_update_that_fails_on_its_thread_is_told_by_the_next_step(tmp_path: Path) -> None:
    update = FusedAdamW._update
    calls: list[str] = []

    def breaks(self: Any, *given: Any) -> None:
        calls.append(threading.current_thread().name)
        if calls.count("speedlab-update") == 2:
            raise ArithmeticError("as if")
        update(self, *given)

    case = Case(offload=HOST, optimizer=adamw)
    with engine_for(case) as engine:
        saved = engine.save_checkpoint(tmp_path)
        with patch.object(FusedAdamW, "_update", breaks):
            engine.config = engine.config.replace(offload={"delayed_update": 1})
            engine_step(engine, case, 0)
            with pytest.raises(ArithmeticError, match="as if"):
                engine_step(engine, case, 1)
        with pytest.raises(RuntimeError, match=r"the update of step 1 was cut off .* load_checkpoint"):
            engine_step(engine, case, 1)
        engine.load_checkpoint(saved)
        engine_step(engine, case, 0)
        assert (engine.global_step, engine.updating) == (1, False)


def test_an_interrupt_that_finds_a_step_waiting_for_an_update_leaves_both_whole() -> None:
    case = Case(offload=HOST, clip_norm=0.3, steps=4)
    oracle = train_plain(case, 1)
    losses = []
    with engine_for(case) as engine:
        for step in range(4):
            if step == 2:
                with (
                    patch.object(DelayedUpdate, "wait", side_effect=KeyboardInterrupt),
                    pytest.raises(KeyboardInterrupt),
                ):
                    engine_step(engine, case, step)
                assert (engine.updating, engine.partitioned_optimizer.late) == (False, 2)
                engine.reconnect()
            losses.append(engine_step(engine, case, step))
        state = engine.state_dict()
    assert losses == pytest.approx(oracle.losses, rel=FLOAT32.loss)
    for name, value in oracle.parameters.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-6)


def test_moments_in_8_bits_are_late_as_others_are(pool_of: PoolOf) -> None:
    """The same bits wherever they lie; and those of a training without delay where nothing is late."""
    kept = Case(stage=3, optimizer=adamw, precision=(("moments", "8bit"),), steps=5)
    places = [{"optimizer": "host"}, {"optimizer": "disk"}, {"optimizer": "disk", "parameters": "host"}]
    late = [replace(kept, offload=(*place.items(), ("delayed_update", 1))) for place in places]
    never = [replace(kept, offload=(*place.items(), ("delayed_update", 99))) for place in places]
    at_once = [replace(kept, offload=tuple(place.items())) for place in places]
    for paths in pool_of(2).run(train_cases, [*late, *never, *at_once]):
        for same in (paths[:3], paths[3:]):
            assert all(path.losses == same[0].losses for path in same)
            for name, value in same[0].parameters.items():
                assert all(value.equal(path.parameters[name]) for path in same), name
        assert paths[0].losses != paths[3].losses


# ---- what it is not with ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"offload": {"delayed_update": 3}}, "needs offload.optimizer 'host' or 'disk', and it is 'none'"),
        ({"optimizer": {"in_backward": True}, "clip_norm": None}, "cannot be with optimizer.in_backward"),
        ({"precision": {"dtype": "bfloat16", "masters": "none"}}, "needs precision.masters 'float32'"),
        ({"offload": {"optimizer": "host", "delayed_update": 0}}, "greater than or equal to 1"),
    ],
)
def test_what_it_cannot_be_with_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        RunConfig(**{"offload": {"optimizer": "host", "delayed_update": 3}, **changes})


def refused(config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        speedlab.initialize(model=models.transformer(), optimizer=PlainSums, config=config)
    return str(error.value)


def test_optimizers_that_communicate_are_refused(two: Pool) -> None:
    for reported in two.run(refused, Case(stage=1, offload=HOST).config() | {"optimizer": {"lr": 0.05}}):
        assert reported.startswith("offload.delayed_update: PlainSums sums gradients itself")


class Counting(torch.optim.SGD):
    """torch's own kernels, by an optimizer that notes something beside its states."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.steps += 1


def counting(parameters: Any) -> Counting:
    return Counting(parameters, lr=0.05, momentum=0.9)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_optimizers_without_our_kernels_note_what_they_note(dtype: str) -> None:
    case = Case(offload=HOST, optimizer=counting, dtype=dtype, build=models.rounded_transformer, steps=5, whole=False)
    expected = train_plain(replace(case, optimizer=sgd), 1)
    with engine_for(case) as engine:
        losses = [engine_step(engine, case, step) for step in range(5)]
        assert engine.optimizer.steps == len(engine.flats) * 4, "each flat that lies away is updated by itself"
        engine.finish_update()
        assert engine.optimizer.steps == len(engine.flats) * 5
    assert losses == pytest.approx(expected.losses, rel=(FLOAT32 if dtype == "float32" else BFLOAT16).loss)


def test_it_comes_and_goes_with_a_reshape() -> None:
    case = Case(stage=2, offload=(("optimizer", "host"),), optimizer=adamw, steps=7)
    oracle = train_plain(replace(case, offload=(("optimizer", "host"), ("delayed_update", 3)), steps=5), 1)
    with engine_for(case) as engine:
        losses = [engine_step(engine, case, step) for step in range(2)]
        engine.reshape(zero=3, offload={"optimizer": "disk", "parameters": "host", "delayed_update": 1})
        losses += [engine_step(engine, case, step) for step in range(2, 5)]
        assert losses == pytest.approx(oracle.losses, rel=FLOAT32.loss)
        with pytest.raises(ConfigError, match="delayed_update 1 needs"):
            engine.reshape(offload={"optimizer": "none", "parameters": "none"})
        assert engine.partitioned_optimizer.late == 5, "what is refused changes nothing"
        engine.reshape(zero=0, offload={"optimizer": "none", "parameters": "none", "delayed_update": None})
        engine_step(engine, case, 5)
        assert engine.partitioned_optimizer.late is None
        assert all(flat.master is flat.full for flat in engine.flats)
