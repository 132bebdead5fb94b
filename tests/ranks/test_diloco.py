"""Islands that meet every few steps: against DiLoCo's loop in one process, their exact cases, and what survives."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import speedlab
from ranks.conftest import PoolOf
from ranks.pool import Pool
from ranks.runs import as_engine, new_run
from ranks.small_steps import batch, engine_of, refusal_of_one_stage, step_of, warnings_of
from ranks.tensor_models import gpt, group_of_all
from speedlab.comm import PeerLost
from speedlab.comm.compressed_allreduce import CompressedMeans, LargestElements, Signs
from speedlab.comm.onebit_allreduce import CHUNK
from speedlab.optim.errors import NonFiniteError
from speedlab.telemetry.run_folder import RunFolder
from speedlab.trainer import run_registry
from tests.benchmarks.planner import compare, measure
from tests.benchmarks.planner_cases import grid

STEPS, LR, EPS, DECAY, CLIP = 5, 3e-3, 1e-5, 0.05, 0.5
OUTER = {"every_steps": 2, "lr": 0.7, "momentum": 0.9}
TOLERANCE = 2e-5


def configuration(islands: int, *, stage: int = 0, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    adamw = {"name": "adamw", "lr": LR, "eps": EPS, "weight_decay": DECAY}
    return {
        "zero": {"stage": stage},
        "optimizer": more.pop("optimizer", adamw),
        "batch": {"micro_size": 2, "accumulation": accumulation},
        "precision": {"dtype": "float32"},
        "parallel": {"islands": islands, **more.pop("parallel", {})},
        "outer": {**OUTER, **more.pop("outer", {})},
        "clip_norm": CLIP,
        **more,
    }


def island_state(engine: Any) -> dict[str, Tensor]:
    """Of this rank's island as it is, apart from others."""
    separate, engine.islands.replicas_differ = engine.islands.replicas_differ, False
    try:
        return engine.state_dict()
    finally:
        engine.islands.replicas_differ = separate


@dataclass
class Trained:
    losses: list[float]
    norms: list[float]
    island: int
    state: dict[str, Tensor]
    reported: list[dict[str, float]]
    sent: list[dict[str, int]]
    flats: list[list[str]]


def train(config: dict[str, Any], steps: int = STEPS) -> Trained:
    with engine_of(config) as engine:
        losses, norms, reported, sent = [], [], [], []
        for step in range(steps):
            engine.traffic.take()
            losses.append(step_of(engine, step))
            norms.append(engine.global_grad_norm)
            reported.append(engine.islands.reported())
            sent.append(engine.traffic.take().sent_bytes)
        flats = [[slot.name for slot in flat.slots] for flat in engine.partitioned_optimizer.flats]
        return Trained(losses, norms, engine.islands.index, island_state(engine), reported, sent, flats)


# ---- the algorithm, written out for n islands in one process ---------------------------------------------------------


def by_hand(
    islands: int, shares: int, outer: dict[str, Any], flats: list[list[str]], *, accumulation: int
) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Losses over all islands, and the parameters of each after all steps. `shares` of the batch in an island; `flats`:
    the parameters that meet together."""
    every, fragments = outer["every_steps"], outer.get("fragments", 1)
    delay, mixing = outer.get("delay_steps", 0), outer.get("mixing", 0.5)
    models: list[nn.Module] = [gpt(tied=True) for _ in range(islands)]
    kept = gpt(tied=True)
    anchor = dict(kept.named_parameters())
    parts = [[name for flat in flats[number::fragments] for name in flat] for number in range(fragments)]
    outer_sgd = [
        torch.optim.SGD([anchor[name] for name in part], lr=outer["lr"], momentum=outer["momentum"], nesterov=True)
        for part in parts
    ]
    ends: dict[int, list[int]] = {}
    inner = []
    for model in models:
        matrices = [p for p in model.parameters() if p.ndim > 1]
        rest = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": DECAY}, {"params": rest, "weight_decay": 0.0}]
        inner.append(torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=EPS))
    losses = []
    for step in range(STEPS):
        found = []
        for island, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            model.zero_grad()
            for micro in range(accumulation):
                for share in range(shares):
                    inputs, targets = batch(step, micro * islands * shares + island * shares + share)
                    loss = model(inputs, targets=targets).loss
                    (loss / (accumulation * shares)).backward()
                    found.append(loss.item())
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
        losses.append(sum(found) / len(found))
        for number, part in enumerate(parts):
            if (step + 1 + every * number // fragments) % every == 0:
                ends.setdefault(step + delay, []).append(number)
                for name in part:
                    own = [dict(model.named_parameters())[name].detach() for model in models]
                    anchor[name].grad = torch.stack([anchor[name].detach() - each for each in own]).mean(0)
        for number in ends.get(step, ()):
            outer_sgd[number].step()
            for model in models:
                for name in parts[number]:
                    with torch.no_grad():
                        dict(model.named_parameters())[name].lerp_(anchor[name], 1 - mixing if delay else 1.0)
    return losses, [{name: p.detach().clone() for name, p in model.named_parameters()} for model in models]


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "stage 0": (2, configuration(2)),
    "stage 1": (4, configuration(2, stage=1)),
    "stage 2, accumulation": (4, configuration(2, stage=2, accumulation=2)),
    "stage 3": (4, configuration(2, stage=3)),
    "four islands": (4, configuration(4)),
    "tp": (4, configuration(2, stage=1, parallel={"tp": 2})),
    "pp": (4, configuration(2, accumulation=2, parallel={"pp": 2})),
    "cp": (4, configuration(2, stage=3, parallel={"cp": 2})),
    "fragments": (4, configuration(2, stage=2, outer={"fragments": 2})),
    "late": (4, configuration(2, stage=1, outer={"every_steps": 3, "fragments": 2, "delay_steps": 1, "mixing": 0.3})),
    "late over gloo": ((2, "gloo"), configuration(2, outer={"delay_steps": 1})),
}


@pytest.mark.parametrize("case", CASES)
def test_islands_are_dilocos_loop(pool_of: PoolOf, case: str) -> None:
    pool, config = CASES[case]
    size, *backend = pool if isinstance(pool, tuple) else (pool,)
    islands, accumulation = config["parallel"]["islands"], config["batch"]["accumulation"]
    shares = size // islands if {"tp", "pp", "cp"}.isdisjoint(config["parallel"]) else 1
    found = pool_of(size, *backend).run(train, config, timeout=60)
    flats = found[0].flats if config["parallel"].keys() == {"islands"} else [list(found[0].state)]
    losses, states = by_hand(islands, shares, config["outer"], flats, accumulation=accumulation)
    for own in found:
        assert own.losses == pytest.approx(losses, abs=TOLERANCE)
        for name, value in states[own.island].items():
            torch.testing.assert_close(
                own.state[name], value, rtol=0, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
            )
    parted = states[0]["head.weight"] if "head.weight" in states[0] else next(iter(states[0].values()))
    assert not parted.equal(next(iter(states[1].values()))), "the last step was each island's own"


# ---- exact cases -----------------------------------------------------------------------------------------------------


def test_one_island_is_plain_training_to_the_bit(two: Pool) -> None:
    plain = {key: value for key, value in configuration(1, stage=1).items() if key not in ("outer", "parallel")}
    for ours, theirs in zip(two.run(train, configuration(1, stage=1)), two.run(train, plain), strict=True):
        assert ours.losses == theirs.losses
        assert all(ours.state[name].equal(value) for name, value in theirs.state.items())
        assert ours.reported == [{}] * STEPS


def test_meetings_in_every_step_that_take_the_mean_are_data_parallel_training(pool_of: PoolOf) -> None:
    """Of SGD without clipping, whose update is linear in gradients."""
    sgd = {"name": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
    mean = {"every_steps": 1, "lr": 1.0, "momentum": 0.0}
    ours = configuration(2, stage=1, optimizer=sgd, outer=mean, clip_norm=None)
    plain = configuration(1, stage=1, optimizer=sgd, clip_norm=None)
    for found, wanted in zip(pool_of(4).run(train, ours), pool_of(4).run(train, plain), strict=True):
        assert found.losses == pytest.approx(wanted.losses, abs=2e-6)
        for name, value in wanted.state.items():
            torch.testing.assert_close(found.state[name], value, rtol=0, atol=2e-6)


def train_written(config: dict[str, Any]) -> list[float]:
    """What the model is, a caller writes into it once there is an engine, as pretrained weights."""
    other = gpt(tied=True)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    engine = speedlab.initialize(model=other, config=config)[0]
    try:
        engine.module.load_state_dict(gpt(tied=True).state_dict())
        return [step_of(engine, step) for step in range(STEPS)]
    finally:
        engine.destroy()


def test_islands_begin_with_what_was_written_before_the_first_step(two: Pool) -> None:
    wanted = two.run(train, configuration(2))
    assert two.run(train_written, configuration(2)) == [rank.losses for rank in wanted]


# ---- what travels, and what is told of it ----------------------------------------------------------------------------


@pytest.mark.parametrize(("compression", "most"), [("none", 1.0), ("signs", 1 / 28), ("topk", 1 / 49)])
def test_bytes_of_a_meeting_are_told_and_sent(two: Pool, compression: str, most: float) -> None:
    outer = {"compression": compression, "topk_share": 0.01}
    for found in two.run(train, configuration(2, outer=outer)):
        assert [reported["met"] for reported in found.reported] == [0.0, 1.0, 0.0, 1.0, 0.0]
        assert [reported["steps_to_meeting"] for reported in found.reported] == [1, 2, 1, 2, 1]
        between, meeting = found.sent[2], found.sent[3]
        extra = {name: meeting[name] - between.get(name, 0) for name in meeting}
        reported = found.reported[3]
        sums = reported["sent_bytes"] / reported["float32_bytes"]
        assert extra["all_gather" if compression != "none" else "all_reduce"] >= reported["sent_bytes"]
        assert sum(between.values()) <= 200, "between meetings islands send each other a few numbers only"
        assert sums <= most
        assert (reported.get("error_norm", 0) > 0) == (compression != "none")


# ---- the feedback ----------------------------------------------------------------------------------------------------


def kept_of(engine: Any) -> dict[str, list[Tensor]]:
    kept = [gradient.kept for gradient in engine.partitioned_optimizer.gradients]
    return {name: [each[name].clone() for each in kept] for name in kept[0]}


def conserved(seed: int, share: float | None) -> float:
    """Given + kept - (sent + kept), over what was given, of one exchange of random sizes and magnitudes."""
    group, draw = group_of_all(), torch.Generator().manual_seed(seed)
    sizes = [int(n) for n in torch.randint(1, 3 * CHUNK, (4,), generator=draw)]
    own = torch.Generator().manual_seed(seed + 1 + group.index)
    given = [torch.randn(n, generator=own) * 10.0 ** (5 - k) for k, n in enumerate(sizes)]
    kept = [torch.randn(n, generator=own) for n in sizes]
    before = [values + errors for values, errors in zip(given, kept, strict=True)]
    code = Signs() if share is None else LargestElements(share)
    wires = CompressedMeans(group, code, sizes)
    wires.send(given, kept)
    worst = 0.0
    for mean, missed, whole in zip(wires.take(), given, before, strict=True):
        lost = group.sum((whole - missed).double()) / group.size - mean.double()
        worst = max(worst, float(lost.abs().max() / whole.abs().max()) if whole.numel() else 0.0)
    return worst


@pytest.mark.parametrize("share", [None, 0.01, 1.0], ids=["signs", "topk", "all of them"])
def test_sent_and_kept_are_what_was_given(pool_of: PoolOf, share: float | None) -> None:
    for size, seed in ((2, 0), (4, 10), (2, 20)):
        assert max(pool_of(size).run(conserved, seed, share)) <= 4 * torch.finfo(torch.float32).eps


def test_what_loses_nothing_is_the_whole_outer_gradient(two: Pool) -> None:
    everything = configuration(2, stage=1, outer={"compression": "topk", "topk_share": 1.0})
    for found, wanted in zip(two.run(train, everything), two.run(train, configuration(2, stage=1)), strict=True):
        assert found.losses == wanted.losses, "means of two in float32 are the same, however they travelled"
        assert found.reported[1]["error_norm"] == 0


def spoil(kind: str) -> Any:
    """A meeting to which an island comes with parameters that are not finite, or that is cut off."""
    with engine_of(configuration(2, outer={"compression": "signs"})) as engine:
        for step in range(3):
            step_of(engine, step)
        before = kept_of(engine)
        if kind == "lost":
            engine.islands.group.all_gather = _lost
        elif engine.world.rank == 1:
            update = engine.partitioned_optimizer.step

            def spoiled(*args: Any, **more: Any) -> None:
                update(*args, **more)
                engine.flats[0].own_master[0] = float(kind)

            engine.partitioned_optimizer.step = spoiled
        reported = []
        for _ in range(2):
            try:
                step_of(engine, 3)
            except (NonFiniteError, PeerLost, RuntimeError) as problem:
                reported.append(str(problem))
        after = kept_of(engine)
        return reported, all(a.equal(b) for name in before for a, b in zip(before[name], after[name], strict=True))


def _lost(*_: Any) -> Tensor:
    raise PeerLost("rank 1 left")


@pytest.mark.parametrize("kind", ["nan", "inf", "lost"])
def test_a_meeting_that_fails_leaves_what_is_kept_as_it_was(two: Pool, kind: str) -> None:
    for (first, second), as_before in two.run(spoil, kind):
        assert ("rank 1 left" if kind == "lost" else "parameters of island 1 are not finite") in first
        assert "go back with load_checkpoint" in second, "one island has made its step, and nobody has met"
        assert as_before


# ---- checkpoints, layouts, the ledger --------------------------------------------------------------------------------


GAPS = {"hidden": 42, "heads": 3}
"""With norms that leave gaps in flats, whose codes must not be part of any feedback."""
SAVED = 3
"""Steps before a save: in the middle between two meetings."""


def save(config: dict[str, Any], folder: str) -> Any:
    with engine_of(config, **GAPS) as engine:
        for step in range(SAVED):
            step_of(engine, step)
        engine.save_checkpoint(folder, "one")
        one = island_state(engine)
        losses = [step_of(engine, step) for step in range(SAVED, SAVED + 2)]
        return one, losses, island_state(engine), engine.islands.index


def go_on(config: dict[str, Any], folder: str) -> Any:
    with engine_of(config, **GAPS) as engine, warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        engine.load_checkpoint(folder, "one")
        one = island_state(engine)
        losses = [step_of(engine, step) for step in range(SAVED, SAVED + 2)]
        return one, losses, island_state(engine), [str(warning.message) for warning in reported]


def test_a_save_makes_islands_one_and_a_loaded_run_goes_on_to_the_bit(pool_of: PoolOf, tmp_path: Path) -> None:
    outer, folder, four = {"compression": "signs"}, str(tmp_path), pool_of(4)
    saved = four.run(save, configuration(2, stage=1, outer=outer), folder)
    for one, *_ in saved[1:]:
        assert all(value.equal(saved[0][0][name]) for name, value in one.items()), "one model"
    parted = [state for _, _, state, _ in saved]
    assert not all(value.equal(parted[2][name]) for name, value in parted[0].items()), "they part again"
    for stage in (1, 3, 0):
        for before, after in zip(
            saved, four.run(go_on, configuration(2, stage=stage, outer=outer), folder), strict=True
        ):
            assert after[1] == before[1]
            assert all(after[2][name].equal(value) for name, value in before[2].items())
            assert after[3] == []
    layouts: list[tuple[int, dict[str, Any]]] = [
        (4, configuration(2, stage=1, outer=outer, parallel={"pp": 2}, accumulation=2)),
        (4, configuration(4, outer=outer)),
        (2, configuration(1, stage=1, accumulation=2)),
    ]
    for size, config in layouts:
        for one, losses, _, reported in pool_of(size).run(go_on, config, folder, timeout=60):
            assert all(value.equal(saved[0][0][name]) for name, value in one.items())
            assert losses == pytest.approx(saved[0][1], abs=0.02)
            assert reported == []
    config = configuration(2, outer={"compression": "topk", "momentum": 0.8, "nesterov": False})
    pool_of(2).run(save, configuration(1), str(tmp_path / "plain"))
    for _, _, _, reported in pool_of(2).run(go_on, config, str(tmp_path / "plain")):
        assert len(reported) == 1
        assert "not all of DiLoCo (anchor, outer_momentum, outer_error; it has nothing" in reported[0]


@pytest.mark.parametrize(("compression", "moments"), [("none", "float32"), ("topk", "8bit")])
def test_a_save_ends_meetings_that_are_under_way(two: Pool, tmp_path: Path, compression: str, moments: str) -> None:
    late = {"compression": compression, "every_steps": 3, "delay_steps": 2, "fragments": 2}
    config = configuration(2, stage=1, outer=late) | {"precision": {"dtype": "float32", "moments": moments}}
    saved = two.run(save, config, str(tmp_path))
    for before, after in zip(saved, two.run(go_on, config, str(tmp_path)), strict=True):
        assert after[1] == before[1]
        assert all(after[2][name].equal(value) for name, value in before[2].items())


def look(stage: int, outer: dict[str, Any]) -> dict[str, Any]:
    with engine_of(configuration(2, stage=stage, outer=outer)) as engine:
        ledger = engine.ledger()
        row = engine.placement.rows[0].described()
        for step in range(SAVED):
            step_of(engine, step)
        before = kept_of(engine)
        engine.reshape(zero=3 - stage)
        after = kept_of(engine)
        losses = [step_of(engine, step) for step in range(SAVED, SAVED + 2)]
        return {
            "gradients": ledger.gradients,
            "padded": sum(flat.padded for flat in engine.flats),
            "states": {name: home["holders"] for name, home in row["states"].items()},
            "unmoved": all(a.equal(b) for name in before for a, b in zip(before[name], after[name], strict=True)),
            "losses": losses,
        }


def test_what_is_kept_is_in_the_ledger_and_a_change_of_stage_moves_nothing(pool_of: PoolOf) -> None:
    outer = {"compression": "signs"}
    found = [pool_of(4).run(look, stage, outer)[0] for stage in (0, 3)]
    for reported, gradient in zip(found, (1, 1 / 2), strict=True):
        assert reported["gradients"] == 4 * reported["padded"] * (gradient + 3 / 2), (
            "anchor, momentum and error, a half each"
        )
        assert reported["states"]["anchor"] == reported["states"]["outer_momentum"] == "a part each"
        assert reported["states"]["outer_error"] == "a part each, in each island another"
        assert reported["unmoved"]
    assert found[0]["losses"] == found[1]["losses"]


def test_tensor_ranks_keep_their_copies_alike_under_signs(pool_of: PoolOf) -> None:
    config = configuration(2, stage=1, parallel={"tp": 2}, outer={"compression": "signs"})
    first, second, *_ = pool_of(4).run(train, config, 4)
    assert all(second.state[name].equal(value) for name, value in first.state.items()), "copies part"


def test_bfloat16_trains_over_float32_masters(two: Pool) -> None:
    narrow = configuration(2) | {"precision": {"dtype": "bfloat16"}}
    (found, _), (exact, _) = two.run(train, narrow), two.run(train, configuration(2))
    assert found.losses == pytest.approx(exact.losses, rel=2e-2)


def refuse(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> str:
    try:
        speedlab.initialize(model=gpt(tied=True).to(dtype), config=config)[0].destroy()
    except speedlab.ConfigError as error:
        return str(error)
    return ""


def test_what_one_pipeline_stage_cannot_all_ranks_refuse(pool_of: PoolOf) -> None:
    reported = set(pool_of(4).run(refusal_of_one_stage, configuration(2, parallel={"pp": 2})))
    assert len(reported) == 1
    assert "norm.weight is trained in torch.float64, and islands meet in float32" in reported.pop()


def said_of(config: dict[str, Any]) -> list[str]:
    with warnings_of("speedlab.engine") as said, engine_of(config):
        return said


def test_meetings_that_nobody_has_are_told_to_be_of_no_use(two: Pool) -> None:
    reported, silent = two.run(said_of, configuration(1, outer={"every_steps": 7, "lr": 0.7}))
    assert reported == [
        "outer.every_steps: said how islands meet, and parallel.islands is 1, so that nothing meets; set "
        "parallel.islands to 2 or more, or leave it out"
    ]
    assert silent == []
    assert two.run(said_of, configuration(2)) == [[], []]


def left_over() -> dict[str, Tensor]:
    """What the module has when its engine is gone, in the middle between two meetings."""
    model = gpt(tied=True)
    engine = speedlab.initialize(model=model, config=configuration(2))[0]
    for step in range(STEPS):
        step_of(engine, step)
    assert engine.replicas_differ
    engine.destroy()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_islands_leave_one_model_behind(two: Pool) -> None:
    first, second = two.run(left_over)
    assert all(second[name].equal(value) for name, value in first.items())


def test_parameters_wider_than_outer_gradients_are_refused(two: Pool) -> None:
    (reported, _) = two.run(refuse, configuration(2), torch.float64)
    assert "is trained in torch.float64, and islands meet in float32" in reported


def advanced(run: str) -> str:
    with as_engine(run):
        return str(run_registry.advance(run))


def test_a_run_tells_when_its_islands_meet(two: Pool, tmp_path: Path) -> None:
    run = new_run(tmp_path, steps=4, parallel={"islands": 2}, outer={"every_steps": 3, "compression": "topk"})
    try:
        assert two.run(advanced, run, timeout=60) == ["finished", "finished"]
    finally:
        two.new_group()
    lines = (Path(run) / "records" / "rank-0.jsonl").read_text().splitlines()
    assert [json.loads(line)["exchange"]["steps_to_meeting"] for line in lines] == [2, 1, 3, 2]
    assert [json.loads(line)["exchange"]["met"] for line in lines] == [0, 0, 1, 0]
    (started,) = [event for event in RunFolder(run).read_events() if event.kind == "started"]
    assert "islands 2 × pp 1 × dp 1 × tp 1" in started.text


@pytest.mark.parametrize(("stage", "dtype"), [(0, "bfloat16"), (3, "float32")])
def test_the_plan_is_what_the_ledger_measures(pool_of: PoolOf, stage: int, dtype: str) -> None:
    case = next(case for case in grid() if case.ranks == 2 and "dp 2" in case.name and "zero 1" in case.name)
    islands = {"zero": stage, "parallel": {"islands": 2, "dp": 2}, "outer": {"every_steps": 2, "compression": "signs"}}
    config = case.config.replace(**islands, precision={"dtype": dtype})
    case = replace(case, config=config, ranks=4)
    for found in compare(case, pool_of(4).run(measure, case.config, timeout=60)[0]):
        assert found.states_agree, f"rank {found.rank}: {found.predicted} predicted, {found.measured} measured"
