"""The loss of a global batch does not depend on how the batch is cut into micro-batches and over ranks.

Micro-batches have other numbers of targets that count, one of them none. Each training is compared with one process
that sees the whole global batch in one forward: the mean over all its targets.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import speedlab
from ranks import models
from ranks.conftest import PoolOf
from ranks.layout_cases import LayoutCase, gpt, gpt2, labels_loss, llama, untied_gpt2
from ranks.loops import Tolerance, Trajectory, adamw
from ranks.pool import Pool, RanksFailed
from ranks.test_layouts import PlainOf
from ranks.test_layouts import check as check_of_one_size
from speedlab.layout import Layout

FLOAT32 = Tolerance(loss=2e-6, norm=1e-5, update=5e-4)


def uneven(step: int, index: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets (2, 8), of which 16, none, 1, and some count in turn."""
    generator = torch.Generator().manual_seed(1_000_003 * step + index)
    rows = torch.randint(models.VOCABULARY, (2, 9), generator=generator)
    targets = (rows[:, 1:] + rows[:, :-1]) % models.VOCABULARY
    kind = index % 4
    if kind == 1:
        targets[:] = -100
    elif kind == 2:
        targets.view(-1)[:-1] = -100  # Only the last target counts.
    elif kind == 3:
        targets[torch.rand(targets.shape, generator=generator) < 0.6] = -100
    return rows[:, :-1], targets


case_of = partial(LayoutCase, batch=uneven)


def check(pool_of: PoolOf, plain: PlainOf, cases: list[LayoutCase]) -> None:
    """Cases of any number of ranks."""
    for size in sorted({case.layout.world_size for case in cases}):
        own = [case for case in cases if case.layout.world_size == size]
        check_of_one_size(pool_of, plain, own, FLOAT32, timeout=120)


def test_cut_over_accumulation_and_data_ranks(pool_of: PoolOf, plain: PlainOf) -> None:
    cases = [
        case_of(layout=Layout(), accumulation=4),
        *(case_of(layout=Layout(dp=2), stage=stage, accumulation=2) for stage in (0, 1, 2, 3)),
        case_of(layout=Layout(dp=4), stage=2, accumulation=1),
        case_of(layout=Layout(dp=2), stage=1, accumulation=2, build=untied_gpt2, optimizer=adamw),
    ]
    check(pool_of, plain, cases)


def test_cut_over_other_ranks(pool_of: PoolOf, plain: PlainOf) -> None:
    cases = [
        case_of(layout=Layout(tp=2), stage=0, accumulation=4),
        case_of(layout=Layout(cp=2), stage=1, accumulation=4),
        case_of(layout=Layout(cp=2), stage=1, accumulation=4, cp_heads=1),
        case_of(layout=Layout(tp=2, dp=2), stage=3, accumulation=2, sequence=True),
        case_of(layout=Layout(cp=2, dp=2), stage=2, accumulation=2),
    ]
    check(pool_of, plain, cases)


def test_cut_over_pipelines(pool_of: PoolOf, plain: PlainOf) -> None:
    schedules = ("gpipe", "1f1b", "interleaved", "zero-bubble")
    cases = [
        *(case_of(layout=Layout(pp=2), stage=1, accumulation=4, schedule=schedule) for schedule in schedules),
        case_of(layout=Layout(pp=2, dp=2), stage=3, accumulation=2, schedule="1f1b"),
        case_of(layout=Layout(pp=2, cp=2), stage=0, accumulation=4),
    ]
    check(pool_of, plain, cases)


@pytest.mark.parametrize("build", [gpt2, llama])
def test_models_of_transformers(pool_of: PoolOf, plain: PlainOf, build: Callable[[], object]) -> None:
    cases = [
        case_of(layout=Layout(dp=2), stage=3, accumulation=2, build=build, loss=labels_loss),
        case_of(layout=Layout(tp=2), stage=1, accumulation=4, build=build, loss=labels_loss),
        case_of(layout=Layout(pp=2), stage=1, accumulation=4, build=build, loss=labels_loss),
    ]
    check(pool_of, plain, cases)


# ---- dicts, and loops of one's own -----------------------------------------------------------------------------------


def as_labels(batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """A row of one token more, with the same targets as labels, padded on the right to 12 tokens."""
    tokens, targets = batch
    tokens = torch.cat((tokens, tokens[:, :4]), dim=1)
    labels = torch.cat((torch.full((2, 1), -100), targets, torch.full((2, 3), -100)), dim=1)
    mask = torch.ones_like(tokens)
    mask[:, 9:] = 0
    return {"input_ids": tokens, "labels": labels, "attention_mask": mask}


def trained(case: LayoutCase, form: str, **changes: Any) -> tuple[list[float], list[int], dict[str, Tensor], float]:
    """(losses, numbers of targets, parameters, evaluation) of a training with batches in this form."""
    config = {**case.config(), **changes}
    engine: Any = speedlab.initialize(model=case.build(), optimizer=case.optimizer, config=config)[0]
    losses, counts = [], []
    try:
        for step in range(case.steps):
            given: list[Any] = [
                case.batch(step, micro * case.layout.dp + engine.mesh.data_index) for micro in range(case.accumulation)
            ]
            if form == "loop":
                for tokens, targets in given:
                    engine.backward(engine(tokens, targets).loss)
                    engine.step()
            elif form == "declared":
                for tokens, targets in given:
                    logits = engine(tokens).logits
                    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
                    count = (targets != -100).sum()
                    engine.backward(each / count.clamp(min=1), counted_targets=count)
                    engine.step()
            else:
                engine.train_batch([as_labels(each) if form == "dict" else each for each in given])
            losses.append(engine.totals.loss)
            counts.append(engine.totals.counted)
        given = [case.batch(9, micro * case.layout.dp + engine.mesh.data_index) for micro in range(case.accumulation)]
        found = engine.evaluate([as_labels(each) if form == "dict" else each for each in given])
        return losses, counts, engine.state_dict(), found
    finally:
        engine.destroy(keep_parameters=False)


def differences(case: LayoutCase, found: Any, plain: Trajectory) -> float:
    losses, counts, parameters, evaluated = found
    assert losses == pytest.approx(plain.losses, rel=2e-6)
    numbers = [sum(int((case.batch(step, index)[1] != -100).sum()) for index in range(4)) for step in range(case.steps)]
    assert counts == numbers
    assert evaluated > 0
    return max(float((parameters[name] - value).abs().max()) for name, value in plain.parameters.items())


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(pp=2)], ids=str)
def test_dicts_of_models_of_transformers(pool_of: PoolOf, plain: PlainOf, layout: Layout) -> None:
    case = case_of(layout=layout, stage=1, accumulation=4 // layout.dp, build=llama, loss=labels_loss)
    for found in pool_of(2).run(trained, case, "dict", timeout=60):
        assert differences(case, found, plain(case.plain(), layout.dp)) <= 2e-5


@pytest.mark.parametrize(("form", "stage"), [("loop", 3), ("declared", 2)])
def test_a_loop_that_asks_for_it(two: Pool, plain: PlainOf, form: str, stage: int) -> None:
    case = case_of(layout=Layout(dp=2), stage=stage, accumulation=2)
    for found in two.run(trained, case, form, loss_over="tokens", timeout=60):
        assert differences(case, found, plain(case.plain(), 2)) <= 2e-5


def test_without_it_a_loop_is_a_mean_over_micro_batches(two: Pool) -> None:
    """As with DeepSpeed, and `train_batch` if it is asked for: a rank without any target is refused on all."""
    case = case_of(layout=Layout(dp=2), stage=1, accumulation=2)
    for form, changes in (("loop", {}), ("pair", {"loss_over": "micro_batches"})):
        with pytest.raises(RanksFailed) as caught:
            two.run(trained, case, form, timeout=60, **changes)
        for failure in caught.value.by_rank.values():
            assert failure.kind == "NonFiniteError"
            assert (
                "not finite on rank 1, and the gradient is, as of a micro-batch without any target" in failure.message
            )


def test_a_loop_that_does_not_say_how_many_targets_count(two: Pool) -> None:
    with pytest.raises(RanksFailed, match="its forward was given no targets"):
        two.run(untold, timeout=60)


def untold() -> None:
    case = case_of(layout=Layout(dp=2))
    config = {**case.config(), "loss_over": "tokens"}
    engine: Any = speedlab.initialize(model=case.build(), optimizer=case.optimizer, config=config)[0]
    try:
        engine.backward(engine(uneven(0, 0)[0]).logits.sum())
    finally:
        engine.destroy(keep_parameters=False)


def no_targets(layout: Layout) -> list[str]:
    case = case_of(layout=layout, stage=2, accumulation=2)
    engine: Any = speedlab.initialize(model=case.build(), optimizer=case.optimizer, config=case.config())[0]
    said = []
    try:
        before = engine.state_dict()
        for call in (engine.train_batch, engine.evaluate):
            try:
                call([uneven(0, 1), uneven(0, 5)])
            except ValueError as error:
                said.append(str(error))
        after = engine.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        engine.train_batch([uneven(0, 0), uneven(0, 1)])
        assert engine.global_step == 1
        return said
    finally:
        engine.destroy(keep_parameters=False)


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(pp=2)], ids=str)
def test_a_step_without_any_target_is_refused(two: Pool, layout: Layout) -> None:
    for trained, evaluated in two.run(no_targets, layout, timeout=60):
        assert trained.startswith("step 1: no target of the whole step counts (all are -100)")
        assert evaluated.startswith("evaluate: no target counts")


def test_the_weights_go_on_after_a_checkpoint(two: Pool, tmp_path: Any) -> None:
    """The same bits, though the first batch after it has other numbers of targets."""
    for straight, resumed in two.run(gone_on, str(tmp_path), timeout=60):
        assert straight == resumed


def gone_on(folder: str) -> tuple[list[float], list[float]]:
    case = case_of(layout=Layout(dp=2), stage=1, accumulation=2)
    found: list[list[float]] = []
    for resumes in (False, True):
        engine: Any = speedlab.initialize(model=gpt(), optimizer=adamw, config=case.config())[0]
        try:
            if resumes:
                engine.load_checkpoint(folder)
            else:
                engine.train_batch([uneven(0, engine.mesh.data_index), uneven(1, 0)])
                engine.save_checkpoint(folder)
            losses = [engine.train_batch([uneven(step, 3), uneven(step, 2)]) for step in (2, 3, 4)]
            found.append([*losses, *(value.sum().item() for value in engine.state_dict().values())])
        finally:
            engine.destroy(keep_parameters=False)
    return found[0], found[1]
