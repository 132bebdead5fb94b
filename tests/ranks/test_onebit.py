"""1-bit Adam: its phases, its exact cases, the paper's algorithm written out, and what its feedback survives."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import speedlab
from cuda_ops.adam_frozen_variance import adam_frozen
from cuda_ops.adamw import adamw
from ranks.conftest import PoolOf
from ranks.pool import Pool
from ranks.runs import as_engine, new_run
from ranks.small_steps import batch, engine_of, refusal_of_one_stage, step_of, warnings_of
from ranks.tensor_models import gpt, group_of_all, shaken
from speedlab.comm import PeerLost, onebit_allreduce
from speedlab.comm.onebit_allreduce import CHUNK, SignMeans
from speedlab.engine.checkpoint import CheckpointError
from speedlab.optim.errors import NonFiniteError
from speedlab.telemetry.run_folder import RunFolder
from speedlab.trainer import run_registry
from tests.benchmarks.planner import compare, measure
from tests.benchmarks.planner_cases import grid

FREEZE, STEPS = 3, 7
LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1


def configuration(stage: int, *, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    optimizer = {"name": "onebit_adam", "lr": LR, "freeze_step": FREEZE, "variance_floor": 0}
    optimizer |= more.pop("optimizer", {})
    return {
        "zero": {"stage": stage},
        "optimizer": optimizer,
        "batch": {"micro_size": 2, "accumulation": accumulation},
        "precision": {"dtype": "float32"},
        **more,
    }


@dataclass
class Trained:
    losses: list[float]
    state: dict[str, Tensor]
    reported: list[dict[str, float]]
    sent: list[dict[str, int]]
    flats: list[dict[str, Any]]


def train(config: dict[str, Any], steps: int = STEPS) -> Trained:
    with engine_of(config) as engine:
        losses, reported, sent = [], [], []
        for step in range(steps):
            engine.traffic.take()
            losses.append(step_of(engine, step))
            reported.append(engine.partitioned_optimizer.reported())
            sent.append(engine.traffic.take().sent_bytes)
        flats = [
            {"padded": f.padded, "slots": [(s.name, s.offset, s.numel, s.group) for s in f.slots]} for f in engine.flats
        ]
        return Trained(losses, engine.state_dict(), reported, sent, flats)


# ---- the algorithm, written out for n workers in one process ---------------------------------------------------------


def signs_of(values: Tensor, pieces: int) -> Tensor:
    """Signs times the mean magnitude of each chunk of each of so many slices."""
    sent = []
    for part in values.view(pieces, -1):
        for chunk in part.split(CHUNK):
            sent.append(torch.where(chunk >= 0, 1.0, -1.0) * chunk.abs().mean())
    return torch.cat(sent)


def laid_out(flats: list[dict[str, Any]], take: Any) -> list[Tensor]:
    """What `take` gives for each name, where it lies in its flat."""
    found = [torch.zeros(flat["padded"]) for flat in flats]
    for whole, flat in zip(found, flats, strict=True):
        for name, offset, numel, _ in flat["slots"]:
            whole[offset : offset + numel] = take(name).reshape(-1)
    return found


def by_hand(
    workers: int, flats: list[dict[str, Any]], *, accumulation: int, compress: bool, pieces: int, owned: bool
) -> dict[str, Tensor]:
    """Of so many workers, or hosts; `pieces`: the ranks of all. `owned`: states are partitioned, and what signs of
    changes miss is in the server's place."""
    model = gpt(tied=True)
    parameters = dict(model.named_parameters())
    sizes = [flat["padded"] for flat in flats]
    masters, m, v, server = ([torch.zeros(size) for size in sizes] for _ in range(4))
    worker = [[torch.zeros(size) for size in sizes] for _ in range(workers)]

    masters = laid_out(flats, lambda name: parameters[name].detach())
    for step in range(STEPS):
        gradients = []
        for place in range(workers):
            model.zero_grad()
            for micro in range(accumulation):
                inputs, targets = batch(step, micro * workers + place)
                (model(inputs, targets=targets).loss * (1 / (accumulation * workers))).backward()
            gradients.append(laid_out(flats, lambda name: parameters[name].grad))
        for k, flat in enumerate(flats):
            bounds = [(o, o + n, 0.0 if group else DECAY) for _, o, n, group in flat["slots"]]
            if step < FREEZE:
                total = gradients[0][k].clone()
                for own in gradients[1:]:
                    total += own[k]
                for low, high, decay in bounds:
                    adamw(
                        masters[k][low:high], total[low:high], m[k][low:high], v[k][low:high],
                        lr=LR, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, weight_decay=decay, step=step + 1,
                    )  # fmt: skip  # one argument a line says no more
                if step + 1 == FREEZE:
                    v[k] /= 1 - BETAS[1] ** FREEZE
                    v[k][v[k] == 0] = math.inf
                continue
            carried = torch.zeros_like(m[k]) if owned else BETAS[0] * m[k]
            own = [gradients[w][k] * ((1 - BETAS[0]) * workers) for w in range(workers)]
            if compress:
                sent = torch.zeros_like(carried)
                for w in range(workers):
                    corrected = own[w] + (worker[w][k] + carried)
                    signs = signs_of(corrected, pieces)
                    worker[w][k] = corrected - signs
                    sent += signs / workers
                if not owned:
                    corrected = sent + server[k]
                    m[k] = signs_of(corrected, pieces)
                    server[k] = corrected - m[k]
            else:
                sent = (own[0] + carried).clone()
                for w in range(1, workers):
                    sent += own[w] + carried
                sent /= workers
                m[k] = m[k] if owned else sent
            if owned:
                m[k] = sent.add(m[k], alpha=BETAS[0])
            shown = masters[k].clone()
            if owned and compress:
                masters[k] += server[k]
            for low, high, decay in bounds:
                adam_frozen(
                    masters[k][low:high], m[k][low:high], torch.empty(high - low), v[k][low:high],
                    size=LR / (1 - BETAS[0] ** (step + 1)), decay=LR * decay, eps=EPS,
                )  # fmt: skip  # as above
            if owned and compress:
                sent, move = signs_of(masters[k] - shown, pieces), torch.zeros_like(shown)
                for low, high, _ in bounds:
                    move[low:high] = sent[low:high]
                server[k] = masters[k] - (shown + move)
                masters[k] = shown + move
        with torch.no_grad():
            for whole, flat in zip(masters, flats, strict=True):
                for name, offset, numel, _ in flat["slots"]:
                    parameters[name].copy_(whole[offset : offset + numel].view(parameters[name].shape))
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def largest_differences(
    workers: int, config: dict[str, Any], *, compress: bool, accumulation: int = 1, pieces: int | None = None
) -> list[float]:
    ours = train(config)
    pieces = pieces or workers
    owned = config["zero"]["stage"] == 1 and pieces > 1
    theirs = by_hand(workers, ours.flats, accumulation=accumulation, compress=compress, pieces=pieces, owned=owned)
    return [float((ours.state[name] - value).abs().max()) for name, value in theirs.items()]


@pytest.mark.parametrize(
    ("ranks", "stage", "accumulation"), [(1, 0, 2), (2, 0, 1), (2, 1, 2), (4, 1, 1)], indirect=["ranks"]
)
def test_what_loses_nothing_is_the_written_out_definition_to_the_bit(
    ranks: Pool, stage: int, accumulation: int
) -> None:
    lossless = {} if ranks.size == 1 else {"compression": "none"}
    config = configuration(stage, accumulation=accumulation, optimizer=lossless)
    for found in ranks.run(
        largest_differences, ranks.size, config, compress=False, accumulation=accumulation, timeout=60
    ):
        assert found == [0.0] * len(found)


@pytest.mark.parametrize(
    ("ranks", "stage", "accumulation"),
    [(2, 0, 2), (4, 1, 1), ((2, "gloo"), 0, 1)],
    indirect=["ranks"],
    ids=["dp2", "dp4", "gloo"],
)
def test_signs_are_the_papers_algorithm(ranks: Pool, stage: int, accumulation: int) -> None:
    """But for the order in which magnitudes of a chunk are added up: of some 10⁴ that is a few units in the last place,
    and a few more of the update, whose largest is some lr × 10."""
    config = configuration(stage, accumulation=accumulation)
    for found in ranks.run(
        largest_differences, ranks.size, config, compress=True, accumulation=accumulation, timeout=60
    ):
        assert max(found) <= 1e-3 * LR


def test_hosts_of_several_ranks_are_the_papers_workers(pool_of: PoolOf) -> None:
    """Ranks 0 and 2 are on one host: what they have is summed exactly, as one worker's two micro-batches."""
    pool, arguments = pool_of(4, "shared", "abab"), {"compress": True, "accumulation": 2, "pieces": 4}
    for stage in (0, 1):
        for found in pool.run(largest_differences, 2, configuration(stage), **arguments, timeout=60):
            assert max(found) <= 1e-3 * LR
    for found in pool.run(train, configuration(0), FREEZE + 1):
        assert found.reported[-1]["sent_bytes"] <= found.reported[-1]["float32_bytes"] / 28
        assert found.reported[-1]["float32_bytes"] == sum(flat["padded"] for flat in found.flats) * 4 / 2
    for seed in range(2):
        assert max(pool_of(4, "shared", "aabb").run(conserved, seed)) <= 8 * torch.finfo(torch.float32).eps


def test_the_warm_up_is_adamw_with_its_clipping(two: Pool) -> None:
    config = configuration(1, optimizer={"freeze_step": STEPS}, clip_norm=0.01)
    plain = {**config, "optimizer": {"name": "adamw", "lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}}
    for ours, theirs in zip(two.run(train, config), two.run(train, plain), strict=True):
        assert ours.losses == theirs.losses
        assert all(ours.state[name].equal(value) for name, value in theirs.state.items())
        assert ours.reported == [{"compressed": 0.0}] * STEPS


# ---- what it costs, and what is told of it ---------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1])
def test_bytes_are_a_28th_of_float32_and_told(two: Pool, stage: int) -> None:
    config = configuration(stage, optimizer={"angle_every_steps": FREEZE + 1})
    for found in two.run(train, config, FREEZE + 2):
        total = sum(flat["padded"] for flat in found.flats)
        assert [reported["compressed"] for reported in found.reported] == [0.0] * FREEZE + [1.0] * 2
        reported, sent = found.reported[-1], found.sent[-1]
        assert reported["float32_bytes"] == total * 4
        assert sum(found.sent[0].values()) >= reported["float32_bytes"]
        # The flats here are small, so that words of magnitudes weigh; of large ones it is 1/31.
        assert reported["sent_bytes"] <= reported["float32_bytes"] / 28
        assert sent["all_to_all"] + sent["all_gather"] == reported["sent_bytes"]
        assert reported["error_norm"] > 0
        assert 0 < found.reported[FREEZE]["angle"] < 90, "it was due, and signs are not all that wrong"
        assert "angle" not in reported
    exact = configuration(stage, optimizer={"angle_every_steps": 1, "compression": "none"})
    for found in two.run(train, exact, FREEZE + 1):
        assert found.reported[-1]["angle"] == pytest.approx(0, abs=0.02)
        assert found.reported[-1]["error_norm"] == 0


def warm_up_of(config: dict[str, Any], steps: int, rates: list[float]) -> list[dict[str, float]]:
    with engine_of(config) as engine:
        reported = []
        for step in range(steps):
            for group in engine.optimizer.param_groups:
                group["lr"] = rates[min(step, len(rates) - 1)]
            step_of(engine, step)
            reported.append(engine.optimizer.reported())
        return reported


def test_the_warm_up_ends_when_the_variance_is_steady_and_the_rate_does_not_rise(two: Pool) -> None:
    adaptive = {"freeze_step": None, "betas": (0.9, 0.5), "steady": 0.2}  # Looked at every second update.
    rising = [LR * step for step in range(1, 6)] + [5 * LR]
    first, second = two.run(warm_up_of, configuration(1, optimizer=adaptive), 10, rising)
    assert first[-1]["compressed"] == 1.0
    assert [reported["compressed"] for reported in first] == [reported["compressed"] for reported in second]
    looks = [step for step, reported in enumerate(first, 1) if "steadiness" in reported]
    assert looks[:2] == [4, 6], "the first look has nothing to compare with"
    frozen = next(step for step, reported in enumerate(first) if reported["compressed"])
    assert frozen >= 8, "the rate rose until the fifth update, so that the look behind the sixth came too early"
    never = configuration(1, optimizer=adaptive | {"steady": 0.999})
    assert all(not reported["compressed"] for reported in two.run(warm_up_of, never, 8, [LR])[0])


# ---- the feedback ----------------------------------------------------------------------------------------------------


def errors_of(engine: Any) -> dict[str, list[Tensor]]:
    kept = [gradient.kept for gradient in engine.partitioned_optimizer.gradients]
    return {name: [each[name].clone() for each in kept] for name in kept[0]}


def spoil(kind: str, stage: int) -> Any:
    """A step whose gradient is not finite, or whose exchange is cut off, at stage 0 behind its first message."""
    with engine_of(configuration(stage)) as engine:
        for step in range(FREEZE + 1):
            step_of(engine, step)
        before, parameters = errors_of(engine), engine.state_dict()
        first = next(iter(engine.module.parameters()))
        group = engine.partitioned_optimizer.gradients[0].group
        if kind == "lost":
            setattr(group, "start_exchange" if stage else "gather_along", _lost)
        elif kind == "large":  # Finite gradients, whose mean magnitude is not.
            first.register_hook(lambda grad: torch.full_like(grad, 1e38))
        elif engine.world.rank == 1:  # On one rank: all of them have to refuse it.
            first.register_hook(lambda grad: grad.fill_(float(kind)))
        error = ""
        try:
            step_of(engine, FREEZE + 1)
        except (NonFiniteError, PeerLost) as problem:
            error = str(problem)
        after = errors_of(engine)
        same = all(a.equal(b) for name in before for a, b in zip(before[name], after[name], strict=True))
        unmoved = all(value.equal(parameters[name]) for name, value in engine.state_dict().items())
        return error, same and unmoved, engine.global_step


def _lost(*_: Any) -> Tensor:
    raise PeerLost("rank 1 left")


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("kind", ["nan", "inf", "large", "lost"])
def test_what_fails_leaves_feedback_and_parameters_as_they_were(two: Pool, kind: str, stage: int) -> None:
    for error, as_before, step in two.run(spoil, kind, stage):
        assert ("rank 1 left" if kind == "lost" else "not finite") in error
        assert as_before
        assert step == FREEZE + 1


def lose_changes() -> list[str]:
    """What a step tells whose second message is cut off, behind the update of partitioned masters, and the next one."""
    with engine_of(configuration(1)) as engine:
        for step in range(FREEZE + 1):
            step_of(engine, step)
        engine.partitioned_optimizer.gradients[0].group.gather_along = _lost
        reported = []
        for step in range(FREEZE + 1, FREEZE + 3):
            with pytest.raises((PeerLost, RuntimeError)) as error:
                step_of(engine, step)
            reported.append(str(error.value))
        return reported


def test_an_update_whose_changes_are_lost_is_told_as_cut_off(two: Pool) -> None:
    for first, second in two.run(lose_changes):
        assert "rank 1 left" in first
        assert "was cut off and has changed some parameters only; go back with load_checkpoint" in second


def fail_after_a_change_of_stage(stage: int, calls: int | None) -> tuple[bool, bool]:
    """Whether all is as it was where the exchange behind a change of stage loses a peer at its n-th gather (None: it
    does not), and what a next try gives is what a run gives that lost none."""
    found = []
    for lost in (None, calls):
        with engine_of(configuration(stage)) as engine:
            for step in range(FREEZE + 2):
                step_of(engine, step)
            engine.reshape(zero=1 - stage)
            before, parameters = errors_of(engine), {name: each.clone() for name, each in engine.state_dict().items()}
            kept = True
            if lost is not None:
                with _losing(engine.partitioned_optimizer.gradients[0].group, lost), pytest.raises(PeerLost):
                    step_of(engine, FREEZE + 2)
                after, now = errors_of(engine), engine.state_dict()
                kept = all(a.equal(b) for name in before for a, b in zip(before[name], after[name], strict=True))
                kept &= all(value.equal(now[name]) for name, value in parameters.items())
            losses = [step_of(engine, step) for step in range(FREEZE + 2, FREEZE + 4)]
            found.append((kept, losses, engine.state_dict()))
    (_, expected, state), (kept, losses, again) = found
    return kept, losses == expected and all(value.equal(again[name]) for name, value in state.items())


@contextmanager
def _losing(group: Any, calls: int) -> Iterator[None]:
    """Its `calls`-th gather, of whatever kind, loses a peer."""
    made = 0

    def counted(function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal made
            made += 1
            return _lost() if made == calls else function(*arguments, **named)

        return call

    names = ("all_gather", "gather_along")
    for name in names:
        setattr(group, name, counted(getattr(group, name)))
    try:
        yield
    finally:
        for name in names:
            delattr(group, name)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("calls", [1, 2])
def test_a_change_of_stage_that_fails_changes_nothing(two: Pool, stage: int, calls: int) -> None:
    for kept, same in two.run(fail_after_a_change_of_stage, stage, calls):
        assert kept
        assert same


def lose_the_angle() -> tuple[bool, bool]:
    """Whether errors and parameters are as they were where the look at the angle loses a peer."""
    with engine_of(configuration(1, optimizer={"angle_every_steps": 1})) as engine:
        for step in range(FREEZE + 1):
            step_of(engine, step)
        before, parameters = errors_of(engine), engine.state_dict()
        group, made = engine.partitioned_optimizer.gradients[0].group, 0
        whole = group.sum

        def sum_(tensor: Tensor) -> Tensor:
            nonlocal made
            made += tensor.shape == (3,) and tensor.dtype is torch.float64
            return _lost() if made else whole(tensor)

        group.sum = sum_
        with pytest.raises(PeerLost):
            step_of(engine, FREEZE + 1)
        del group.sum
        after, now = errors_of(engine), engine.state_dict()
        same = all(a.equal(b) for name in before for a, b in zip(before[name], after[name], strict=True))
        return same, all(value.equal(now[name]) for name, value in parameters.items())


def test_a_look_at_the_angle_that_fails_leaves_feedback_as_it_was(two: Pool) -> None:
    assert two.run(lose_the_angle) == [(True, True)] * 2


def overflow_on_some(stage: int, parallel: str) -> tuple[str, int]:
    """What a step tells of finite gradients whose sums are not, on one rank of a pipeline or a tensor."""
    with engine_of(configuration(stage, parallel={parallel: 2})) as engine:
        for step in range(FREEZE + 1):
            step_of(engine, step)
        if engine.mesh[parallel].index == 0:
            names = [(name, each) for module in engine.modules for name, each in module.named_parameters()]
            next(each for name, each in names if "qkv" in name).register_hook(lambda grad: torch.full_like(grad, 1e38))
        with pytest.raises(NonFiniteError) as error:
            step_of(engine, FREEZE + 1)
        return str(error.value), engine.global_step


@pytest.mark.parametrize("parallel", ["tp", "pp"])
def test_all_ranks_refuse_what_is_not_finite_where_some_sum_it(pool_of: PoolOf, parallel: str) -> None:
    for stage in (0, 1):
        for reported, step in pool_of(4).run(overflow_on_some, stage, parallel):
            assert "the gradient's norm is" in reported
            assert "is not finite where it is summed. The update was not made" in reported
            assert step == FREEZE + 1


class Masked(nn.Module):
    """With an infinite parameter, as masks of attention have, next to finite ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.mask = nn.Linear(16, 16), nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight(x).view(-1, 2, 8) + 0 * self.mask.nan_to_num(neginf=0.0)).square().mean()


def move_an_infinity() -> tuple[str, int]:
    model = shaken(Masked)
    with torch.no_grad():
        model.mask[3] = -math.inf
    config = configuration(1, optimizer={"weight_decay": 0.0}, **AS_IT_IS)
    engine = speedlab.initialize(model=model, config=config)[0]
    try:
        for step in range(FREEZE + 1):
            engine.backward(engine(torch.randn(2, 16, generator=torch.Generator().manual_seed(step))))
            if step < FREEZE:
                engine.step()
        with pytest.raises(NonFiniteError) as error:
            engine.step()
        return str(error.value), sum(int(flat.full.isnan().sum()) for flat in engine.flats)
    finally:
        engine.destroy()


def test_a_change_that_is_not_finite_is_told_before_parameters_move(two: Pool) -> None:
    for reported, spoiled in two.run(move_an_infinity):
        assert f"step {FREEZE + 1}: a parameter, or what the update has moved it by, is not finite" in reported
        assert spoiled == 0


def conserved(seed: int) -> float:
    """Given + kept - (sent + kept), over what was given, of one exchange of random sizes and magnitudes."""
    group, draw = group_of_all(), torch.Generator().manual_seed(seed)
    sizes = [group.size * int(n) for n in torch.randint(1, 3 * CHUNK, (3,), generator=draw)]
    shared = torch.Generator().manual_seed(seed + 1 + group.index)
    given = [torch.randn(n, generator=shared) * 10.0 ** (5 - k) for k, n in enumerate(sizes)]
    worker = [torch.randn(n, generator=shared) for n in sizes]
    server = [torch.randn(n // group.size, generator=shared) for n in sizes]
    before = [own + kept for own, kept in zip(given, worker, strict=True)]
    wires = SignMeans(group, sizes)
    errors = wires.reduce(given, worker).means()
    means = wires.spread(errors, server)
    worst = 0.0
    for k, n in enumerate(sizes):
        sent = group.sum((before[k] - given[k]).double()) / group.size  # What workers sent, in the mean.
        missed = float(given[k].double().square().sum())
        out, kept = given[k], torch.empty(n)
        decoded = torch.empty(n)
        means.decode(k, decoded)
        assert float(means.take(k, out, kept, share=0.0)) == pytest.approx(missed, rel=1e-5)
        assert decoded.equal(out)
        own = slice(group.index * (n // group.size), (group.index + 1) * (n // group.size))
        lost = sent[own] + server[k] - (out[own].double() + errors[k])
        worst = max(worst, float(lost.abs().max() / before[k].abs().max()))
    return worst


@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
def test_sent_and_kept_are_what_was_given(ranks: Pool) -> None:
    for seed in range(5):
        assert max(ranks.run(conserved, seed)) <= 4 * torch.finfo(torch.float32).eps


def reduced_as(least_bytes: int) -> tuple[int, list[list[Tensor]]]:
    """How many messages there were, and means and errors of tensors of many sizes."""
    group, sizes = group_of_all(), [4 * n for n in (3000, 1, 9000, 40, 5000, 7)]
    draw = torch.Generator().manual_seed(group.index)
    given, worker = ([torch.randn(n, generator=draw) for n in sizes] for _ in range(2))
    wires = SignMeans(group, sizes)
    with mock.patch.object(onebit_allreduce, "_LEAST_BYTES", least_bytes):
        messages = len(wires._messages())
        return messages, [wires.reduce(given, worker, factor=0.5).means(), given]


@pytest.mark.parametrize("hosts", ["ab", "abab", "aabb"])
def test_as_many_messages_as_there_are_means_are_the_same(pool_of: PoolOf, hosts: str) -> None:
    """One behind the other over a network, while others are packed; through memory they go in one."""
    ranks = pool_of(len(hosts), hosts=hosts)
    for (one, together), (several, separate) in zip(
        ranks.run(reduced_as, 1 << 20), ranks.run(reduced_as, 400), strict=True
    ):
        assert one == 1 < several
        for before, after in zip(together, separate, strict=True):
            assert all(a.equal(b) for a, b in zip(before, after, strict=True))
    assert pool_of(2).run(reduced_as, 400)[0][0] == 1


# ---- checkpoints, layouts, the ledger --------------------------------------------------------------------------------


GAPS = {"hidden": 42, "heads": 3}
"""With norms that leave gaps in flats, whose signs must not be part of any feedback."""


def save(config: dict[str, Any], folder: str, steps: int, **shape: int) -> Any:
    with engine_of(config, **shape) as engine:
        for step in range(steps):
            step_of(engine, step)
        engine.save_checkpoint(folder, "one")
        kept = errors_of(engine)
        losses = [step_of(engine, step) for step in range(steps, steps + 2)]
        return losses, kept, engine.state_dict()


def go_on(config: dict[str, Any], folder: str, steps: int, **shape: int) -> Any:
    with engine_of(config, **shape) as engine:
        engine.load_checkpoint(folder, "one")
        kept = errors_of(engine)
        losses = [step_of(engine, step) for step in range(steps, steps + 2)]
        return losses, kept, engine.state_dict(), engine.optimizer.reported()


def test_a_checkpoint_goes_on_to_the_bit(two: Pool, tmp_path: Path) -> None:
    for steps in (FREEZE - 1, FREEZE + 2):
        folder = str(tmp_path / str(steps))
        saved = two.run(save, configuration(1), folder, steps, **GAPS)
        for before, after in zip(saved, two.run(go_on, configuration(1), folder, steps, **GAPS), strict=True):
            assert after[0] == before[0]
            assert all(after[2][name].equal(value) for name, value in before[2].items())
            assert after[3]["compressed"] == 1.0


@pytest.mark.parametrize("stage", [0, 1])
def test_another_stage_goes_on_with_all_that_was_kept(two: Pool, tmp_path: Path, stage: int) -> None:
    """Without compression from there on, so that both stages make one step of all that they have."""
    two.run(save, configuration(stage), str(tmp_path), FREEZE + 2, **GAPS)
    same, other = (configuration(each, optimizer={"compression": "none"}) for each in (stage, 1 - stage))
    (_, kept, expected, _), _ = two.run(go_on, same, str(tmp_path), FREEZE + 2, **GAPS)
    assert all(error.any() for each in kept.values() for error in each)
    for _, _, found, _ in two.run(go_on, other, str(tmp_path), FREEZE + 2, **GAPS):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=2e-3 * LR)


def test_another_layout_goes_on_with_the_mean_of_the_errors(pool_of: PoolOf, tmp_path: Path) -> None:
    folder, steps = str(tmp_path), FREEZE + 2
    saved = pool_of(4).run(save, configuration(0), folder, steps)
    means = [torch.stack(each).mean(0) for each in zip(*(kept["carried"] for _, kept, _ in saved), strict=True)]
    for losses, kept, _, reported in pool_of(2).run(go_on, configuration(1, accumulation=2), folder, steps):
        for own, mean in zip(kept["carried"], means, strict=True):
            assert own.numel() == mean.numel()
            torch.testing.assert_close(own, mean)
        assert losses == pytest.approx(saved[0][0], rel=2e-3)
        assert reported["compressed"] == 1.0
    alone = configuration(0, accumulation=4, optimizer={"angle_every_steps": 1})
    for losses, kept, _, reported in pool_of(1).run(go_on, alone, folder, steps):
        assert losses == pytest.approx(saved[0][0], rel=2e-3)
        assert all(error.any() for error in kept["server_error"])
        assert reported["angle"] == pytest.approx(0, abs=1e-3), "nothing is compressed, and no error waits for ever"
    tensor = configuration(0, parallel={"tp": 2}, accumulation=2)
    for losses, _, _, reported in pool_of(4).run(go_on, tensor, folder, steps):
        assert losses == pytest.approx(saved[0][0], rel=2e-3)
        assert reported["compressed"] == 1.0


def test_tensor_ranks_keep_their_copies_alike_and_pipelines_train(pool_of: PoolOf) -> None:
    plain = pool_of(2).run(train, configuration(0), FREEZE + 3)[0]
    for parallel in ({"tp": 2}, {"pp": 2}):
        found = pool_of(4).run(train, configuration(1, parallel=parallel), FREEZE + 3, timeout=60)
        assert found[0].losses == pytest.approx(plain.losses, rel=2e-3)
        for other in found[1:]:
            assert all(other.state[name].equal(value) for name, value in found[0].state.items()), "copies part"


def look(stage: int, *, then: int) -> dict[str, Any]:
    with engine_of(configuration(stage)) as engine:
        ledger = engine.ledger()
        row = engine.placement.rows[0].described()
        for step in range(FREEZE + 1):
            step_of(engine, step)
        before = errors_of(engine)
        engine.reshape(zero=then)
        after = errors_of(engine)
        loss = step_of(engine, FREEZE + 1)
        return {
            "gradients": ledger.gradients,
            "padded": sum(flat.padded for flat in engine.flats),
            "states": row["states"],
            "unmoved": all(a.equal(b) for name in before for a, b in zip(before[name], after[name], strict=True)),
            "loss": loss,
        }


def test_what_is_kept_is_in_the_ledger_and_a_change_of_stage_moves_nothing(two: Pool) -> None:
    for stage in (0, 1):
        reported = two.run(look, stage, then=1 - stage)[0]
        assert reported["loss"] == two.run(look, stage, then=stage)[0]["loss"]
        assert reported["gradients"] == 4 * reported["padded"] * (1 + 1 + 1 / 2), (
            "gradient, worker's error, server's part"
        )
        assert reported["states"]["carried"]["holders"] == "each its own"
        assert reported["states"]["server_error"]["holders"] == "a part each"
        assert reported["unmoved"]


def thaw(folder: str, parallel: dict[str, int]) -> tuple[list[str], list[float], bool]:
    """What a load tells that trains a norm which the checkpoint's run did not, in whose last stage of a pipeline it is;
    whether the first step behind it is compressed, and whether the norm moves in a warm-up that begins."""
    config = configuration(1, parallel=parallel)
    for trained in (False, True):
        model = gpt(tied=False)
        model.norm.weight.requires_grad_(trained)
        engine = speedlab.initialize(model=model, config=config)[0]
        try:
            if not trained:
                for step in range(FREEZE + 1):
                    step_of(engine, step)
                engine.save_checkpoint(folder, "one")
                continue
            with warnings.catch_warnings(record=True) as reported:
                warnings.simplefilter("always")
                engine.load_checkpoint(folder, "one")
            before = engine.state_dict()["norm.weight"].clone()
            compressed = []
            for step in range(FREEZE + 1, 2 * FREEZE + 2):
                step_of(engine, step)
                compressed.append(engine.optimizer.reported()["compressed"])
            moved = not engine.state_dict()["norm.weight"].equal(before)
            return [str(each.message) for each in reported if each.category is UserWarning], compressed, moved
        finally:
            engine.destroy()
    raise AssertionError("unreachable")


@pytest.mark.parametrize("parallel", [{}, {"pp": 2}], ids=str)
def test_what_was_not_trained_when_it_was_saved_has_a_warm_up(
    two: Pool, tmp_path: Path, parallel: dict[str, int]
) -> None:
    for reported, compressed, moved in two.run(thaw, str(tmp_path), parallel):
        (sentence,) = reported
        assert "norm.weight was not trained when the checkpoint was written, so that it has not all of" in sentence
        assert "OneBitAdam, which begins as on the first step" in sentence
        assert compressed == [0.0] * FREEZE + [1.0]
        assert moved


# ---- what nobody uses ------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Of which some data uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.seldom = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, seldom: bool) -> Tensor:
        found = self.always(x)
        return (found + self.seldom(x) if seldom else found).square().mean()


USED = [True, True, True, False, True, False, False, True, False, True, True]

AS_IT_IS: dict[str, Any] = {"schedule": {"kind": "constant", "warmup_steps": 0}, "clip_norm": None}


def branches() -> nn.Module:
    return shaken(Branches)


def through_branches(engine: Any, step: int) -> None:
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(step)).to(engine.module.always.weight.dtype)
    engine.backward(engine(x, USED[step]))
    engine.step()


def stands_still(name: str, compression: str, stage: int, dtype: str) -> tuple[list[bool], float]:
    """Whether in each step all that the optimizer has of the seldom branch stayed, and how far that is in the end from
    what `by_used_steps` has."""
    optimizer = {"name": name, "compression": compression, "lr": 1e-2}
    config = configuration(stage, optimizer=optimizer, **AS_IT_IS) | {"precision": {"dtype": dtype}}
    engine = speedlab.initialize(model=branches(), config=config)[0]
    try:
        stayed, before = list[bool](), list[Tensor]()
        for step in range(len(USED)):
            through_branches(engine, step)
            after = seldom_of(engine)
            stayed.append(len(before) == len(after) and all(a.equal(b) for a, b in zip(before, after, strict=True)))
            before = after
        own = dict(engine.state_dict())
    finally:
        engine.destroy()
    return stayed, float((own["seldom.weight"] - by_used_steps()["seldom.weight"]).abs().max())


def seldom_of(engine: Any) -> list[Tensor]:
    """Parameters, moments and errors of the seldom branch, as far as this rank has them."""
    found = []
    for flat in engine.partitioned_optimizer.flats:
        start, end = flat.gradient.own_range
        low, high = flat.state_range
        states = [(low, high, state) for state in engine.partitioned_optimizer.states_of(flat).values()]
        if engine.optimizer.communicates:
            states.append((0, flat.padded, flat.gradient.kept[engine.optimizer.worker]))
        states += [(start, end, flat.gradient.kept["server_error"]), (low, high, flat.master)]
        for slot in flat.slots:
            for first, last, state in states if slot.name.startswith("seldom") else ():
                place = slice(max(slot.offset, first) - first, max(0, min(slot.offset + slot.numel, last) - first))
                found.append(state[place].clone())
    return found


def by_used_steps() -> dict[str, Tensor]:
    """1-bit Adam that loses nothing, written out for whole parameters."""
    model = branches()
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in model.named_parameters()}
    counts = dict.fromkeys(moments, 0)
    for step, seldom in enumerate(USED):
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        model(x, seldom).backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.grad is None:
                    continue
                m, v = moments[name]
                counts[name] += 1
                m.lerp_(p.grad, 1 - BETAS[0])
                if step < FREEZE:
                    v.mul_(BETAS[1]).addcmul_(p.grad, p.grad, value=1 - BETAS[1])
                root = (v / (1 - BETAS[1] ** min(counts[name], FREEZE))).sqrt() + EPS
                p.sub_(1e-2 * (m / (1 - BETAS[0] ** counts[name]) / root + (DECAY * p if p.ndim > 1 else 0.0)))
    return dict(model.named_parameters())


@pytest.mark.parametrize(
    ("name", "compression", "dtype"),
    [
        ("onebit_adam", "none", "float32"),
        ("onebit_adam", "signs", "float32"),
        ("onebit_adam", "signs", "bfloat16"),
        ("onebit_lamb", "signs", "float32"),
    ],
)
@pytest.mark.parametrize("stage", [0, 1])
def test_what_nobody_uses_in_a_compressed_step_stands_still(
    two: Pool, name: str, compression: str, dtype: str, stage: int
) -> None:
    for stayed, off in two.run(stands_still, name, compression, stage, dtype):
        assert stayed == [not used for used in USED]
        if compression == "none":
            assert off <= 1e-6, "some units in the last place"


def with_what_is_missed(compressed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Of the seldom branch: parameters plus what changes have missed before partitions go, and parameters behind a step
    that does not use it."""
    engine = speedlab.initialize(model=branches(), config=configuration(1, optimizer={"lr": 1e-2}, **AS_IT_IS))[0]
    try:
        for _ in range(FREEZE + compressed):
            through_branches(engine, 0)
        expected = {}
        for flat in engine.flats:
            missed = torch.empty(flat.padded)
            flat.gradient.group.all_gather(missed, flat.gradient.kept["server_error"]).wait()
            for slot in flat.slots:
                if slot.name.startswith("seldom"):
                    expected[slot.name] = (flat.full + missed)[slot.range].view(slot.shape)
        engine.reshape(zero=0)
        through_branches(engine, USED.index(False))
        return expected, {name: engine.state_dict()[name] for name in expected}
    finally:
        engine.destroy()


def test_masters_that_are_whole_take_what_changes_have_missed_whoever_is_used(two: Pool) -> None:
    for expected, found in two.run(with_what_is_missed, 2):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-7)


# ---- rates, and what somebody else writes ----------------------------------------------------------------------------


class TwoLayers(nn.Module):
    """Whose parameters share chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.high(torch.relu(self.low(x))) - y).square().mean()


def moved_at(rate: float, stage: int, dtype: str = "float32") -> tuple[float, Tensor]:
    """How far parameters of a layer have moved whose rate is this beside one of 1e-3, and where they are."""
    model = shaken(TwoLayers)
    optimizer = {"lr": 1e-3, "weight_decay": 0.0, "variance_floor": 0.3, "freeze_step": 10}
    config = configuration(stage, optimizer=optimizer, **AS_IT_IS) | {"precision": {"dtype": dtype}}
    groups = [{"params": list(model.low.parameters()), "lr": rate}, {"params": list(model.high.parameters())}]
    engine = speedlab.initialize(model=model, model_parameters=groups, config=config)[0]
    try:
        start = engine.state_dict()["low.weight"].clone()
        for step in range(40):
            draw = torch.Generator().manual_seed(10 * step + engine.mesh.data_index)
            x, y = (torch.randn(2, width, generator=draw).to(getattr(torch, dtype)) for width in (32, 8))
            engine.backward(engine(x, y))
            engine.step()
        found = engine.state_dict()["low.weight"]
        return float((found - start).abs().max()), found
    finally:
        engine.destroy()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_at_a_rate_of_0_nothing_moves_beside_what_does(two: Pool, dtype: str) -> None:
    for stage in (0, 1):
        assert [moved for moved, _ in two.run(moved_at, 0.0, stage, dtype)] == [0.0, 0.0]


def test_at_a_far_lower_rate_parameters_move_by_their_own(two: Pool) -> None:
    expected, _ = two.run(moved_at, 1e-6, 0)[0]
    for moved, _ in two.run(moved_at, 1e-6, 1):
        assert moved <= 1.5 * expected


def part_by_hand(dtype: str) -> dict[str, Tensor]:
    """Parameters of this rank behind steps before which all ranks have written the same through `.data`."""
    with engine_of(configuration(1) | {"precision": {"dtype": dtype}}) as engine:
        for step in range(FREEZE + 2):
            if step == FREEZE + 1:
                for parameter in engine.module.parameters():
                    parameter.data.mul_(0.9)
            step_of(engine, step)
        return {flat.name: flat.full.clone() for flat in engine.flats}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_stay_alike_where_all_have_written_the_same(two: Pool, dtype: str) -> None:
    first, second = two.run(part_by_hand, dtype)
    assert all(second[name].equal(value) for name, value in first.items())


def refuse(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> str:
    try:
        speedlab.initialize(model=gpt(tied=True).to(dtype), config=config)[0].destroy()
    except speedlab.ConfigError as error:
        return str(error)
    return ""


def said_of(optimizer: dict[str, Any], *, given: bool = False) -> list[str]:
    config = {"batch": {"micro_size": 2}, "zero": {"stage": 1}, "optimizer": optimizer}
    with warnings_of("speedlab.engine") as said:
        chosen = (lambda parameters: torch.optim.SGD(parameters, lr=0.1)) if given else None
        speedlab.initialize(model=gpt(tied=True), optimizer=chosen, config=config)[0].destroy()
    return said


def test_what_is_said_of_another_optimizer_is_told_to_be_of_no_use(two: Pool) -> None:
    reported, silent = two.run(said_of, {"freeze_step": 5, "coeff_beta": 0.5})
    assert reported == [
        "optimizer.freeze_step: says how onebit_adam or onebit_lamb or zero_one_adam goes, and adamw trains; set "
        "optimizer.name to it, or leave it out",
        "optimizer.coeff_beta: says how onebit_lamb goes, and adamw trains; set optimizer.name to it, or leave it out",
    ]
    assert silent == []
    reported, _ = two.run(said_of, {"name": "onebit_adam", "freeze_step": 5}, given=True)
    assert reported[0].startswith(
        "optimizer.name: says onebit_adam, and the optimizer that was given trains, SGD, whose"
    )
    assert reported[1].endswith("SGD trains; set optimizer.name to it and give no `optimizer`, or leave it out")
    for used in ({"name": "onebit_adam", "freeze_step": 5}, {"name": "lamb", "max_coeff": 0.3}, {"lr": 0.1}):
        assert two.run(said_of, used) == [[], []]


def go_on_as(saved: str, then: str, folder: str) -> str:
    """What a load says to the checkpoint of another optimizer, or '' where a step follows."""
    configs = [
        {"batch": {"micro_size": 2}, "zero": {"stage": 1}, "optimizer": {"name": name, "lr": LR}}
        for name in (saved, then)
    ]
    with engine_of(configs[0]) as engine:
        step_of(engine, 0)
        engine.save_checkpoint(folder, f"{saved}-{then}")
    with engine_of(configs[1]) as engine:
        try:
            engine.load_checkpoint(folder, f"{saved}-{then}")
        except CheckpointError as error:
            return str(error)
        step_of(engine, 1)
        return ""


def test_what_another_optimizer_has_kept_is_refused_where_it_is_not_enough(two: Pool, tmp_path: Path) -> None:
    lacking = {("sgd", "adamw"): "exp_avg, exp_avg_sq, step", ("lion", "onebit_adam"): "exp_avg_sq, step"}
    lacking |= {("adamw", "sgd"): "momentum_buffer", ("sgd", "lion"): "exp_avg"}
    for (saved, then), lacks in lacking.items():
        for reported in two.run(go_on_as, saved, then, str(tmp_path)):
            assert f"cannot begin in the middle without {lacks}: set optimizer.name to the one with which" in reported
    for saved, then in (("adamw", "onebit_adam"), ("onebit_adam", "lamb"), ("lamb", "adamw")):
        assert two.run(go_on_as, saved, then, str(tmp_path)) == ["", ""]


def test_masters_of_another_width_are_refused(two: Pool) -> None:
    (reported, _) = two.run(refuse, configuration(0), torch.float64)
    assert "OneBitAdam updates float32 masters" in reported


def test_every_pipeline_stage_refuses_what_one_of_them_cannot_train(two: Pool) -> None:
    first, second = two.run(refusal_of_one_stage, configuration(0, parallel={"pp": 2}))
    assert first == second
    assert "OneBitAdam updates float32 masters, and norm.weight is trained in torch.float64" in first


def test_bfloat16_trains_over_float32_masters(two: Pool) -> None:
    narrow = configuration(1) | {"precision": {"dtype": "bfloat16"}}
    (found, _), (exact, _) = two.run(train, narrow), two.run(train, configuration(1))
    assert found.losses == pytest.approx(exact.losses, rel=2e-2)
    assert found.reported[-1]["compressed"] == 1.0


def conserves(dtype: str) -> tuple[float, dict[str, Tensor]]:
    """How far parameters and what signs missed of their changes have moved otherwise than the update says, in `LR`, in
    the worst of some steps; the parameters."""
    with engine_of(configuration(1, precision={"dtype": dtype})) as engine:
        for step in range(FREEZE):
            step_of(engine, step)
        worst, optimizer = 0.0, engine.partitioned_optimizer
        for step in range(FREEZE, FREEZE + 3):
            befores = [flat.master + flat.gradient.kept["server_error"] for flat in optimizer.flats]
            step_of(engine, step)
            for flat, before in zip(optimizer.flats, befores, strict=True):
                states = optimizer.states_of(flat)
                update = states["exp_avg"] / (1 - BETAS[0] ** (step + 1)) / (states["exp_avg_sq"].sqrt() + EPS)
                now = flat.master + flat.gradient.kept["server_error"]
                low, high = flat.state_range
                for slot in flat.slots:
                    own = slice(max(0, slot.offset - low), max(0, min(slot.offset + slot.numel, high) - low))
                    decay = 0.0 if slot.group else DECAY
                    off = now[own] - (before[own] - LR * (update[own] + decay * before[own]))
                    worst = max(worst, float(off.abs().max()) if off.numel() else 0.0)
                assert flat.master.equal(flat.shard.float()), "masters are what parameters show"
                assert flat.gradient.kept["server_error"].any()
        return worst / LR, {f"{flat.name}": flat.full.clone() for flat in engine.flats}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_parameters_have_not_moved_by_is_kept(two: Pool, dtype: str) -> None:
    (worst, first), (other, second) = two.run(conserves, dtype)
    assert max(worst, other) <= 2e-3, "some units in the last place of a parameter"
    assert all(first[name].equal(second[name]) for name in first), "the same bits on all ranks"


def advanced(run: str) -> str:
    with as_engine(run):
        return str(run_registry.advance(run))


RUNS = {
    "onebit_adam": (
        {"freeze_step": 4},
        "000011",
        {5: "the variance is frozen: momenta travel compressed; clip_norm 1 is off from now on"},
    ),
    "zero_one_adam": (
        {"freeze_step": 4, "variance_doubling": 1, "local_doubling": 1, "max_local_steps": 2},
        "001011",
        {
            3: "momenta travel compressed, but where the variance is updated; clip_norm 1 is off from now on but there",
            5: "the variance is frozen: ranks exchange compressed momenta, ever more seldom; clip_norm 1 is off from "
            "now on",
        },
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_tells_of_its_phases_once(two: Pool, tmp_path: Path, name: str) -> None:
    options, compressed, events = RUNS[name]
    run = new_run(tmp_path, steps=6, zero=0, optimizer={"name": name, **options})
    try:
        assert two.run(advanced, run, timeout=60) == ["finished", "finished"]
    finally:
        two.new_group()
    lines = (Path(run) / "records" / "rank-0.jsonl").read_text().splitlines()
    assert [json.loads(line)["exchange"]["compressed"] for line in lines] == [float(each) for each in compressed]
    reported = {event.step: event.text for event in RunFolder(run).read_events() if event.kind == "compressed"}
    assert reported == events


def test_a_step_that_is_skipped_has_sent_nothing(two: Pool, tmp_path: Path) -> None:
    precision = {"dtype": "float16", "initial_loss_scale": 2.0**15, "loss_scale_window": 1}
    run = new_run(tmp_path, steps=12, zero=0, optimizer={"name": "onebit_adam", "freeze_step": 3}, precision=precision)
    try:
        assert two.run(advanced, run, timeout=60) == ["finished", "finished"]
    finally:
        two.new_group()
    lines = (Path(run) / "records" / "rank-0.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["exchange"].get("compressed")]
    skipped = [b["step"] == a["step"] for a, b in pairwise(records)]
    assert any(skipped)
    assert not all(skipped)
    for record, was_skipped in zip(records[1:], skipped, strict=True):
        exchange, sent = record["exchange"], record["sent_bytes"]
        assert exchange["sent_bytes"] == sent.get("all_to_all", 0) + sent.get("all_gather", 0)
        assert ("error_norm" in exchange) == (not was_skipped)
        assert exchange["float32_bytes"] > 0
    assert len([event for event in RunFolder(run).read_events() if event.kind == "compressed"]) == 1


@pytest.mark.parametrize(("stage", "dtype"), [(0, "bfloat16"), (1, "float32")])
def test_the_plan_is_what_the_ledger_measures(two: Pool, stage: int, dtype: str) -> None:
    case = next(case for case in grid() if case.ranks == 2 and "dp 2" in case.name and "zero 1" in case.name)
    optimizer = {"name": "onebit_adam", "freeze_step": 2}
    case = replace(case, config=case.config.replace(zero=stage, optimizer=optimizer, precision={"dtype": dtype}))
    for found in compare(case, two.run(measure, case.config, timeout=60)[0]):
        assert found.states_agree, f"rank {found.rank}: {found.predicted} predicted, {found.measured} measured"
