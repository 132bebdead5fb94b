"""1-bit LAMB: without compression it is the loop over whole parameters, which says that scales cancel and norms are of
whole parameters; with signs it trains alike; through checkpoints to the bit."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import speedlab
from ranks.conftest import PoolOf
from ranks.pool import Pool
from ranks.small_steps import batch, step_of
from ranks.tensor_models import gpt
from ranks.test_lamb import BETAS, CLIP, DECAY, EPS, LEAST, LR, MOST
from speedlab.engine.checkpoint import CheckpointError
from tests.benchmarks.planner import compare, measure
from tests.benchmarks.planner_cases import grid

FREEZE, STEPS = 3, 7
COEFF_BETA, FACTORS, THRESHOLD, FLOOR = 0.5, (0.5, 1.5), 0.1, 0.2


def configuration(stage: int, *, compression: str = "signs", accumulation: int = 1, **more: Any) -> dict[str, Any]:
    optimizer = {"name": "onebit_lamb", "lr": LR, "freeze_step": FREEZE, "compression": compression}
    optimizer |= {"max_coeff": MOST, "min_coeff": LEAST, "coeff_beta": COEFF_BETA, "factor_threshold": THRESHOLD}
    optimizer |= {"factor_min": FACTORS[0], "factor_max": FACTORS[1], "variance_floor": FLOOR, "eps": EPS}
    optimizer |= more.pop("optimizer", {})
    return {
        "zero": {"stage": stage},
        "optimizer": optimizer,
        "batch": {"micro_size": 2, "accumulation": accumulation},
        "precision": {"dtype": "float32"},
        "clip_norm": CLIP,
        **more,
    }


@dataclass
class Trained:
    losses: list[float]
    state: dict[str, Tensor]
    reported: list[dict[str, float]]
    numbers: dict[str, dict[str, float]]
    """Of each parameter of which this rank has something: coeff, factor, scale."""


def train(config: dict[str, Any], steps: int = STEPS, *, save: str = "", load: str = "", at: int = 0) -> Trained:
    engine = speedlab.initialize(model=gpt(tied=True), config=config)[0]
    try:
        if load:
            engine.load_checkpoint(load, "one")
        losses, reported = [], []
        while engine.global_step < steps:
            losses.append(step_of(engine, engine.global_step))
            reported.append(engine.optimizer.reported())
            if save and engine.global_step == at:
                engine.save_checkpoint(save, "one")
        partitioned = engine.partitioned_optimizer
        numbers = {k: v for flat in partitioned.flats for k, v in partitioned.scalars_of(flat).items() if v}
        return Trained(losses, engine.state_dict(), reported, numbers)
    finally:
        engine.destroy()


def by_hand(places: int) -> tuple[list[float], dict[str, Tensor], dict[str, dict[str, float]]]:
    """Whole parameters and exact means over so many micro-batches, in one process."""
    model = gpt(tied=True)
    parameters = dict(model.named_parameters())
    m, v, w = ({name: torch.zeros_like(p) for name, p in parameters.items()} for _ in range(3))
    numbers = {name: {"coeff": 0.0, "factor": 1.0, "floor": 0.0} for name in parameters}
    losses = []
    for step in range(STEPS):
        model.zero_grad()
        total = 0.0
        for place in range(places):
            inputs, targets = batch(step, place)
            loss = model(inputs, targets=targets).loss / places
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in parameters.values()]))
        clip = min(1.0, CLIP / float(norm + 1e-6)) if step < FREEZE else 1.0
        first, second = (1 - beta ** (step + 1) for beta in BETAS)
        with torch.no_grad():
            for name, p in parameters.items():
                gradient, decay, own = p.grad * clip, DECAY if p.ndim >= 2 else 0.0, numbers[name]
                before = m[name].clone()
                m[name].lerp_(gradient, 1 - BETAS[0])
                if step < FREEZE:
                    v[name].mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
                    update = m[name] / first / ((v[name] / second).sqrt() + EPS) + decay * p
                    norms = float(p.double().norm()), float(update.double().norm())
                    ratio = min(MOST, max(LEAST, norms[0] / norms[1])) if all(norms) else 1.0
                    own["coeff"] = COEFF_BETA * own["coeff"] + (1 - COEFF_BETA) * ratio
                else:
                    reported = (m[name] - BETAS[0] * before) / (1 - BETAS[0])
                    w[name].mul_(BETAS[1]).addcmul_(reported, reported, value=1 - BETAS[1])
                    root = v[name].sqrt() + EPS
                    u = m[name] / first / root
                    update = u + decay * p
                    found = root / (w[name].clamp(min=own["floor"]).sqrt() + EPS)
                    factor = float(torch.where(v[name].isinf(), 0.0, found).max()) or 1.0
                    if decay:
                        share = min(1.0, float(u.double().norm() / update.double().norm()))
                        factor = factor * share + 1 - share
                    factor = min(FACTORS[1], max(FACTORS[0], factor))
                    low, high = own["factor"] * (1 - THRESHOLD), own["factor"] * (1 + THRESHOLD)
                    own["factor"] = min(high, max(low, factor))
                    ratio = own["coeff"] * own["factor"]
                p.sub_(LR * ratio * update)
                if step + 1 == FREEZE:
                    v[name] /= second
                    own["floor"] = (FLOOR * float(v[name].sqrt().mean())) ** 2
                    v[name].clamp_(min=own["floor"])
                    v[name][v[name] == 0] = math.inf
                    w[name].copy_(v[name])
    return losses, {name: p.detach().clone() for name, p in parameters.items()}, numbers


def test_without_compression_it_is_the_loop_over_whole_parameters(two: Pool) -> None:
    losses, state, numbers = by_hand(4)
    assert len({round(own["factor"], 6) for own in numbers.values()}) > 3, "factors say something"
    for stage in (0, 1):
        for rank in two.run(train, configuration(stage, compression="none", accumulation=2), timeout=60):
            assert rank.losses == pytest.approx(losses, rel=1e-5)
            for name, own in rank.numbers.items():
                assert own["coeff"] == pytest.approx(numbers[name]["coeff"], rel=1e-3)
                assert own["factor"] == pytest.approx(numbers[name]["factor"], rel=2e-2)
            for name, value in state.items():
                assert (rank.state[name] - value).abs().max() <= 0.1 * LR * MOST, name
    assert {own["scale"] for own in rank.numbers.values()} != {1.0}


def test_one_rank_has_the_losses_of_the_loop(pool_of: PoolOf) -> None:
    found = pool_of(1).run(train, configuration(0, accumulation=4))[0]
    assert found.losses == pytest.approx(by_hand(4)[0], rel=1e-5)
    assert found.reported[-1]["error_norm"] == 0


def test_signs_train_alike_at_a_28th_of_the_bytes_and_through_checkpoints(two: Pool, tmp_path: Path) -> None:
    exact = two.run(train, configuration(0, compression="none"))[0]
    for stage in (0, 1):
        for at in (FREEZE - 1, FREEZE + 2):
            folder = str(tmp_path / f"{stage}-{at}")
            more = {"optimizer": {"angle_every_steps": STEPS}}
            saved = two.run(train, configuration(stage, **more), save=folder, at=at, timeout=60)
            for rank in saved:
                assert rank.losses == pytest.approx(exact.losses, rel=5e-2), "signs at a high rate; seen: 2.4 %"
                assert [reported["compressed"] for reported in rank.reported] == [0.0] * FREEZE + [1.0] * (
                    STEPS - FREEZE
                )
                assert rank.reported[-1]["sent_bytes"] <= rank.reported[-1]["float32_bytes"] * (1 + stage) / 28
                assert 0 < rank.reported[-1]["angle"] < 90
            for before, after in zip(saved, two.run(train, configuration(stage), load=folder, timeout=60), strict=True):
                assert after.losses == before.losses[at:]
                assert all(after.state[name].equal(value) for name, value in before.state.items())
                assert after.numbers == before.numbers


@pytest.mark.parametrize("parallel", [{"tp": 2}, {"pp": 2}], ids=str)
def test_copies_stay_alike_and_other_layouts_go_on(pool_of: PoolOf, tmp_path: Path, parallel: dict[str, Any]) -> None:
    plain = pool_of(2).run(train, configuration(1), save=str(tmp_path), at=FREEZE + 1)[0]
    config = configuration(1, parallel=parallel)
    found = pool_of(4).run(train, config, timeout=60)
    assert found[0].losses == pytest.approx(plain.losses, rel=1e-2)
    for other in found[1:]:
        assert all(other.state[name].equal(value) for name, value in found[0].state.items()), "copies part"
    loaded = pool_of(4).run(train, config, load=str(tmp_path), timeout=60)[0]
    assert loaded.losses == pytest.approx(plain.losses[FREEZE + 1 :], rel=1e-2)


def other_engine(name: str, **more: Any) -> Any:
    """Of a model of which some rows of a table are never looked up."""
    optimizer = {"name": name, "lr": LR, **more}
    config = {"zero": {"stage": int(name != "zero_one_adam")}, "optimizer": optimizer, "batch": {"micro_size": 2}}
    return speedlab.initialize(model=gpt(tied=False), config=config)[0]


def few_words(engine: Any) -> None:
    tokens = torch.randint(3, (2, 17), generator=torch.Generator().manual_seed(engine.global_step))
    engine.train_batch([(tokens[:, :-1], tokens[:, 1:])])


def save_frozen(folder: str, name: str) -> bool:
    """Whether some of the variance is infinite."""
    more: dict[str, Any] = {"freeze_step": 1, "variance_floor": 0.0}
    more = {"lamb": {}, "zero_one_adam": {"variance_doubling": 1, "variance_floor": 0.0}}.get(name, more)
    engine = other_engine(name, **more)
    try:
        few_words(engine)
        few_words(engine)
        engine.save_checkpoint(folder, "one")
        return not _all_finite(engine)
    finally:
        engine.destroy()


def load_into(name: str, folder: str) -> str:
    """What a load says, or whether every state is finite that it has brought."""
    engine = other_engine(name)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the checkpoint has not all of OneBitAdam")
            engine.load_checkpoint(folder, "one")
        few_words(engine)
        return "finite" if _all_finite(engine) else "not finite"
    except CheckpointError as error:
        return str(error)
    finally:
        engine.destroy()


def _all_finite(engine: Any) -> bool:
    partitioned = engine.partitioned_optimizer
    states = [state for flat in partitioned.flats for state in partitioned.states_of(flat).values()]
    return bool(states) and all(bool(state.isfinite().all()) for state in states)


def test_other_optimizers_go_on_or_say_why_not(two: Pool, tmp_path: Path) -> None:
    """A frozen variance is infinite where there was no gradient, which would never train again."""
    frozen, other = str(tmp_path / "frozen"), str(tmp_path / "other")
    assert any(two.run(save_frozen, frozen, "onebit_adam"))
    assert two.run(load_into, "adamw", frozen) == ["finite"] * 2
    with_scales, seldom = str(tmp_path / "scales"), str(tmp_path / "seldom")
    assert any(two.run(save_frozen, with_scales, "onebit_lamb"))
    assert any(two.run(save_frozen, seldom, "zero_one_adam"))
    for folder in (with_scales, seldom):
        assert two.run(load_into, "onebit_adam", folder) == ["finite"] * 2, "a warm-up begins"
    assert not any(two.run(save_frozen, other, "lamb"))
    for reported in two.run(load_into, "onebit_lamb", other):
        assert "exp_avg, exp_avg_sq in this checkpoint, and OneBitLamb cannot begin in the middle without" in reported
        assert "exp_avg_sq_fresh: set optimizer.name to the one with which the checkpoint was written" in reported


def test_the_plan_is_what_the_ledger_measures(two: Pool) -> None:
    case = next(case for case in grid() if case.ranks == 2 and "dp 2" in case.name and "zero 1" in case.name)
    case = replace(case, config=case.config.replace(optimizer={"name": "onebit_lamb", "freeze_step": 2}))
    for found in compare(case, two.run(measure, case.config, timeout=60)[0]):
        assert found.states_agree, f"rank {found.rank}: {found.predicted} predicted, {found.measured} measured"
