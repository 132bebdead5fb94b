"""0/1 Adam: the paper's algorithm written out, its exact cases, steps of each rank's own, and what its feedback
survives."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cuda_ops.adam_frozen_variance import adam_frozen
from cuda_ops.adamw import adamw
from ranks.conftest import PoolOf
from ranks.pool import Pool
from ranks.small_steps import batch, engine_of, step_of, warnings_of
from ranks.tensor_models import gpt
from ranks.test_onebit import GAPS, errors_of, laid_out, signs_of
from speedlab.comm import PeerLost
from speedlab.engine.checkpoint import CheckpointError
from speedlab.optim.communicating_protocols import check_whole_gradients
from speedlab.optim.errors import NonFiniteError
from speedlab.optim.zero_one_adam import ZeroOneAdam
from tests.benchmarks.planner import compare, measure
from tests.benchmarks.planner_cases import grid

KINDS = "WWSWSWSSNSNSN"
"""Of the steps: gradients whole, signs, nothing."""
STEPS, FREEZE = len(KINDS), 6
LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1


def configuration(**more: Any) -> dict[str, Any]:
    optimizer = {"name": "zero_one_adam", "lr": LR, "freeze_step": FREEZE, "variance_floor": 0}
    optimizer |= {"variance_doubling": 2, "local_doubling": 2, "max_local_steps": 4} | more.pop("optimizer", {})
    if optimizer["name"] == "adamw":
        optimizer = {"name": "adamw", "lr": LR}
    return {
        "zero": {"stage": 0},
        "optimizer": optimizer,
        "batch": {"micro_size": 2},
        "precision": {"dtype": "float32"},
    } | more


@dataclass
class Trained:
    losses: list[float]
    state: dict[str, Tensor]
    reported: list[dict[str, float]]
    sent: list[dict[str, int]]
    separate: list[bool]
    bits: list[list[int]]
    flats: list[dict[str, Any]]


def train(config: dict[str, Any], steps: int = STEPS, *, same_data: bool = False, **shape: Any) -> Trained:
    with engine_of(config, **shape) as engine:
        losses, reported, sent, separate, bits = [], [], [], [], []
        for step in range(steps):
            engine.traffic.take()
            losses.append(engine.train_batch([batch(step, 0)]) if same_data else step_of(engine, step))
            reported.append(engine.partitioned_optimizer.reported())
            sent.append(engine.traffic.take().sent_bytes)
            separate.append(engine.replicas_differ)
            tensors = [*(flat.master for flat in engine.flats), *engine.module.parameters()]
            bits.append(
                [zlib.crc32(tensor.detach().view(-1).view(torch.uint8).numpy().tobytes()) for tensor in tensors]
            )
        flats = [
            {"padded": f.padded, "slots": [(s.name, s.offset, s.numel, s.group) for s in f.slots]} for f in engine.flats
        ]
        return Trained(losses, engine.state_dict(), reported, sent, separate, bits, flats)


# ---- algorithm 1, written out for n workers in one process -----------------------------------------------------------


def by_hand(workers: int, flats: list[dict[str, Any]], *, compress: bool) -> dict[str, Tensor]:
    """With what each worker has of its own until the next exchange: parameters, momentum, what is to be sent."""
    models = [gpt(tied=True) for _ in range(workers)]
    parameters = [dict(model.named_parameters()) for model in models]
    sizes, everyone = [flat["padded"] for flat in flats], range(workers)
    masters = [laid_out(flats, lambda name, own=own: own[name].detach()) for own in parameters]
    m = [[torch.zeros(size) for size in sizes] for _ in everyone]
    error = [[torch.zeros(size) for size in sizes] for _ in everyone]
    v, server, anchor = ([torch.zeros(size) for size in sizes] for _ in range(3))
    shares, rates = {0.0: 1.0, DECAY: 1.0}, {0.0: 0.0, DECAY: 0.0}
    seen = 0

    def exchange(k: int) -> None:
        if compress:
            sent = torch.zeros(sizes[k])
            for w in everyone:
                signs = signs_of(error[w][k], workers)
                error[w][k] -= signs
                sent += signs / workers
            mean = signs_of(sent + server[k], workers)
            server[k] += sent - mean
        else:
            mean = torch.stack([error[w][k] for w in everyone]).sum(0) / workers
            for w in everyone:
                error[w][k].zero_()
        root = math.sqrt(1 - BETAS[1] ** seen)
        for name, low, high, decay in bounds(flats[k]):
            del name
            for w in everyone:
                master = masters[w][k][low:high].copy_(anchor[k][low:high])
                m[w][k][low:high] = mean[low:high] / rates[decay]
                adam_frozen(
                    master, mean[low:high].clone(), None, v[k][low:high],
                    size=shares[decay] * root, decay=1 - shares[decay], eps=EPS * root,
                )  # fmt: skip  # one argument a line says no more

    for step, kind in enumerate(KINDS, 1):
        gradients = []
        for w in everyone:
            for own, low in zip(flats, masters[w], strict=True):
                for name, start, end, _ in bounds(own):
                    parameters[w][name].data.copy_(low[start:end].view(parameters[w][name].shape))
            models[w].zero_grad()
            inputs, targets = batch(step - 1, w)
            (models[w](inputs, targets=targets).loss * (1 / workers)).backward()
            gradients.append(laid_out(flats, lambda name, w=w: parameters[w][name].grad))
        corrected = LR / (1 - BETAS[0] ** step)
        root = math.sqrt(1 - BETAS[1] ** seen)
        if kind != "W":
            for decay in shares:
                shares[decay] *= 1 - LR * decay
                rates[decay] += corrected / shares[decay]
        for k, flat in enumerate(flats):
            if kind == "W":
                total = gradients[0][k].clone()
                for own in gradients[1:]:
                    total += own[k]
                before = v[k].clone()
                for w in everyone:
                    v[k].copy_(before)
                    for _, low, high, decay in bounds(flat):
                        here = slice(low, high)
                        if step <= 2:
                            adamw(
                                masters[w][k][here], total[here], m[w][k][here], v[k][here],
                                lr=LR, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, weight_decay=decay, step=step,
                            )  # fmt: skip  # as above
                            continue
                        m[w][k][here].mul_(BETAS[0]).add_(total[here], alpha=1 - BETAS[0])
                        adam_frozen(
                            masters[w][k][here], m[w][k][here], None, before[here],
                            size=corrected * root, decay=LR * decay, eps=EPS * root,
                        )  # fmt: skip  # as above
                        v[k][here] = before[here].masked_fill(before[here].isinf(), 0.0) * BETAS[1]
                        v[k][here].addcmul_(total[here], total[here], value=1 - BETAS[1])
                if KINDS[step] != "W":
                    v[k][v[k] == 0] = math.inf
                continue
            if KINDS[step - 2] != "N":
                anchor[k].copy_(masters[0][k])
            for w in everyone:
                for _, low, high, decay in bounds(flat):
                    here, rate = slice(low, high), corrected / shares[decay]
                    sent = kind == "S" and workers > 1  # One sends nothing, and never goes back.
                    weight = rate if sent else 1.0
                    own = gradients[w][k][here] * ((1 - BETAS[0]) * workers * weight)
                    own.add_(m[w][k][here], alpha=BETAS[0] * weight)
                    if sent:
                        error[w][k][here] += own
                        continue
                    error[w][k][here] += own * rate
                    m[w][k][here] = own
                    adam_frozen(
                        masters[w][k][here], own.clone(), None, v[k][here],
                        size=corrected * root, decay=LR * decay, eps=EPS * root,
                    )  # fmt: skip  # as above
            if kind == "S" and workers > 1:
                exchange(k)
        seen += kind == "W"
        if kind == "S":
            shares, rates = dict.fromkeys(shares, 1.0), dict.fromkeys(rates, 0.0)
    if workers > 1:
        for k in range(len(flats)):
            exchange(k)
    return {
        name: masters[0][k][low:high].view(parameters[0][name].shape)
        for k, flat in enumerate(flats)
        for name, low, high, _ in bounds(flat)
    }


def bounds(flat: dict[str, Any]) -> list[tuple[str, int, int, float]]:
    return [(name, start, start + numel, 0.0 if group else DECAY) for name, start, numel, group in flat["slots"]]


def largest_differences(workers: int, config: dict[str, Any], *, compress: bool) -> float:
    ours = train(config)
    theirs = by_hand(workers, ours.flats, compress=compress)
    return max(float((ours.state[name] - value).abs().max()) for name, value in theirs.items())


def test_two_ranks_are_the_papers_algorithm(two: Pool) -> None:
    """To the bit without compression; with signs but for the order in which magnitudes of a chunk are added up."""
    for compress in (False, True):
        config = configuration(optimizer={"compression": "signs" if compress else "none"})
        for found in two.run(largest_differences, 2, config, compress=compress, timeout=60):
            assert found <= (2e-3 * LR if compress else 0)


def in_torchs_words(steps: int) -> float:
    """Adam whose variance is frozen at the same steps, in torch's own words, over whole parameters.

    Returns the largest difference as a share of the way that the parameter went: a variance frozen while gradients
    were next to nothing makes steps of many learning rates, and their rounding grows with them.
    """
    ours = train(configuration(), steps)
    model = gpt(tied=True)
    matrices = {name for flat in ours.flats for name, _, _, group in flat["slots"] if not group}
    states = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in model.named_parameters()}
    ways = {name: torch.full_like(p, LR) for name, p in model.named_parameters()}
    seen = 0
    for step, kind in enumerate(KINDS[:steps], 1):
        model.zero_grad()
        inputs, targets = batch(step - 1, 0)
        model(inputs, targets=targets).loss.backward()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                (m, v), decay = states[name], LR * DECAY if name in matrices else 0.0
                m.mul_(BETAS[0]).add_(parameter.grad, alpha=1 - BETAS[0])
                updated = v * BETAS[1] + parameter.grad.square() * (1 - BETAS[1])
                used, count = (updated, seen + 1) if step <= 2 else (v, seen)
                root = (used / (1 - BETAS[1] ** count)).sqrt().add(EPS)
                root[used == 0] = math.inf if step > 2 else EPS
                update = LR / (1 - BETAS[0] ** step) * m / root
                parameter.mul_(1 - decay).sub_(update)
                ways[name] += update.abs()
                if kind == "W":
                    v.copy_(updated)
        seen += kind == "W"
    return max(float(((ours.state[n] - p.detach()).abs() / ways[n]).max()) for n, p in model.named_parameters())


def test_one_rank_is_adam_whose_variance_is_frozen_at_the_same_steps(pool_of: PoolOf) -> None:
    one, two = pool_of(1), pool_of(2)
    (exact,) = one.run(largest_differences, 1, configuration(), compress=False)
    assert exact == 0
    (found,) = one.run(in_torchs_words, STEPS)
    assert found <= 7e-4  # Of a way of some 14 learning rates: a hundredth of one.
    (plain,) = one.run(train, configuration())
    assert plain.separate == [False] * STEPS
    # With the data of one rank; behind several steps of its own a momentum is their mean, as the paper has it.
    lossless = configuration(optimizer={"compression": "none", "max_local_steps": 1})
    for ours in two.run(train, lossless, same_data=True):
        assert max(float((ours.state[name] - value).abs().max()) for name, value in plain.state.items()) <= 1e-2 * LR
        assert ours.losses == pytest.approx(plain.losses, rel=1e-5)


# ---- what travels, and what is told of it ----------------------------------------------------------------------------


def test_ranks_are_apart_between_exchanges_and_the_same_bits_behind_them(two: Pool) -> None:
    config = configuration(optimizer={"angle_every_steps": 5}, precision={"dtype": "bfloat16"})
    first, second = two.run(train, config)
    assert first.separate == [kind == "N" for kind in KINDS]
    assert [a == b for a, b in zip(first.bits, second.bits, strict=True)] == [kind != "N" for kind in KINDS]
    assert all(value.equal(second.state[name]) for name, value in first.state.items())
    total = sum(flat["padded"] for flat in first.flats)
    for step, kind in enumerate(KINDS, 1):
        reported, sent = first.reported[step - 1], first.sent[step - 1]
        signs = sent.get("all_to_all", 0) + sent.get("all_gather", 0)
        assert reported["compressed"] == (kind != "W")
        if kind == "W":
            assert reported == {"compressed": 0.0} | ({"variance_updated": 1.0} if step > 2 else {})
            assert sent["all_reduce"] >= total * 4
            continue
        assert reported["float32_bytes"] == total * 4
        assert reported["sent_bytes"] <= (total * 4 / 28 if kind == "S" else 0)
        if "angle" not in reported:  # A look at it sends more.
            assert signs == reported["sent_bytes"]
            assert sent.get("all_reduce", 0) < 1000, "a step's few numbers"
        assert ("error_norm" in reported) == (kind == "S")
        assert ("angle" in reported) == (kind == "S" and step % 5 == 0)
        ahead = [following for following in range(1, 5) if (KINDS + "NNSNNNS")[step + following - 1] == "S"]
        assert reported.get("steps_to_exchange") == (ahead[0] if step > FREEZE else None)


# ---- the feedback ----------------------------------------------------------------------------------------------------


def give_up_an_interval() -> Any:
    """What is kept, and what momenta are, before and behind an exchange that comes early."""
    with engine_of(configuration()) as engine:
        for step in range(STEPS):
            step_of(engine, step)
        assert engine.replicas_differ
        kept, optimizer = errors_of(engine), engine.partitioned_optimizer
        rates = [float(engine.optimizer.state[own["params"][0]]["rates"]) for own in engine.optimizer.param_groups]
        engine.average_replicas()
        sent = [optimizer.states_of(flat)["exp_avg"].double() for flat in optimizer.flats]
        for flat, momentum in zip(optimizer.flats, sent, strict=True):
            for slot in flat.slots:
                momentum[slot.range] *= rates[slot.group]
        return kept, errors_of(engine), sent, rates, engine.replicas_differ


def test_sent_and_kept_are_what_was_given(two: Pool) -> None:
    (before, after, sent, rates, separate), other = two.run(give_up_an_interval)
    assert not separate
    assert LR < rates[1] < rates[0], "what decays is summed up with more"
    for k, taken in enumerate(sent):
        given, kept = (
            (own["to_send"][k] + its["to_send"][k]).double() / 2
            + torch.cat([own["server_error"][k], its["server_error"][k]]).double()
            for own, its in ((before, other[0]), (after, other[1]))
        )
        assert float((given - kept - taken).abs().max()) <= 4 * torch.finfo(torch.float32).eps * float(
            given.abs().max()
        )


def at_rates(rate: float, steps: int) -> tuple[float, float, float]:
    """How far norms went at a rate of their own, all others, and the largest momentum."""
    with engine_of(configuration(optimizer={"angle_every_steps": 1, "weight_decay": DECAY})) as engine:
        before = {name: value.clone() for name, value in engine.state_dict().items()}
        for step in range(steps):
            for group in engine.optimizer.param_groups:
                group["lr"] = LR if group["weight_decay"] else rate
            step_of(engine, step)
            assert engine.optimizer.reported().get("angle", 0) < 90
        states = [engine.partitioned_optimizer.states_of(flat)["exp_avg"] for flat in engine.flats]
        momentum = max(float(state.abs().max()) for state in states)
        engine.average_replicas()
        ways = {name: float((value - before[name]).abs().max()) for name, value in engine.state_dict().items()}
        norms = {name for name in ways if "norm" in name}
        return max(ways[name] for name in norms), max(ways[name] for name in ways.keys() - norms), momentum


def test_a_group_goes_at_its_own_rate(two: Pool) -> None:
    """Though signs of a chunk have one magnitude."""
    usual, others, largest = two.run(at_rates, LR, STEPS)[0]
    for share in (1e-2, 0.0):
        for own, theirs, momentum in two.run(at_rates, share * LR, STEPS):
            assert own <= 2 * share * usual
            assert theirs == pytest.approx(others, rel=0.2)
            assert momentum <= 2 * largest


def rest(at: slice, steps: int) -> tuple[list[float], list[float], list[float]]:
    """Of each step: the loss, the largest momentum, and how far parameters went; the learning rate is 0 for a while."""
    with engine_of(configuration()) as engine:
        losses, momenta, ways = [], [], []
        for step in range(steps):
            for group in engine.optimizer.param_groups:
                group["lr"] = 0.0 if step in range(steps)[at] else LR
            before = [flat.master.clone() for flat in engine.flats]
            losses.append(step_of(engine, step))
            states = [engine.partitioned_optimizer.states_of(flat)["exp_avg"] for flat in engine.flats]
            momenta.append(max(float(state.abs().max()) for state in states))
            moved = [(flat.master - old).abs().max() for flat, old in zip(engine.flats, before, strict=True)]
            ways.append(float(torch.stack(moved).max()))
        return losses, momenta, ways


@pytest.mark.parametrize("first", [6, 7, 8, 9])
def test_a_learning_rate_of_nothing_leaves_no_momentum_that_is_none(two: Pool, first: int) -> None:
    """Between two exchanges, at one, and over several: what is kept is worth as much as the rate."""
    at = slice(first, first + 5)
    plain, usual, _ = two.run(rest, slice(0), 20)[0]
    for losses, momenta, ways in two.run(rest, at, 20):
        assert max(momenta) <= 2 * max(usual)
        assert max(losses) <= max(plain) + 0.2
        exchanges = [step for step in range(*at.indices(20)) if (KINDS + "NNSNNNS")[step] == "S"]
        assert all(ways[step] <= 1e-6 for step in range(exchanges[0] + 1, at.stop)), "nothing moves by nothing"


def spoil(kind: str, steps: int) -> Any:
    """A step whose gradient is not finite, or whose exchange is cut off behind its first message."""
    with engine_of(configuration()) as engine:
        for step in range(steps):
            step_of(engine, step)
        before, masters = errors_of(engine), [flat.master.clone() for flat in engine.flats]
        separate = engine.replicas_differ
        first = next(iter(engine.module.parameters()))
        group = engine.partitioned_optimizer.gradients[0].group
        if kind == "lost":
            group.gather_along = _lost
        elif engine.world.rank == 1:  # On one rank: all of them have to refuse it.
            first.register_hook(lambda grad: grad.fill_(float(kind)))
        error = ""
        try:
            step_of(engine, steps)
        except (NonFiniteError, PeerLost) as problem:
            error = str(problem)
        after = errors_of(engine)
        same = all(a.equal(b) for name in before for a, b in zip(before[name], after[name], strict=True))
        unmoved = all(flat.master.equal(value) for flat, value in zip(engine.flats, masters, strict=True))
        group.__dict__.pop("gather_along", None)
        first._backward_hooks = None
        return error, same and unmoved and engine.replicas_differ == separate, engine.global_step


def _lost(*_: Any) -> Tensor:
    raise PeerLost("rank 1 left")


@pytest.mark.parametrize("kind", ["nan", "lost"])
def test_what_fails_leaves_feedback_and_parameters_as_they_were(two: Pool, kind: str) -> None:
    for steps in (2, 11):  # Before the first exchange, and one that ends an interval.
        for error, as_before, step in two.run(spoil, kind, steps):
            assert ("rank 1 left" if kind == "lost" else "not finite") in error
            assert as_before
            assert step == steps


# ---- checkpoints, layouts, the ledger --------------------------------------------------------------------------------


def go_on(config: dict[str, Any], folder: str, steps: int, *, save: bool, **shape: int) -> Any:
    with engine_of(config, **shape) as engine:
        if save:
            for step in range(steps):
                step_of(engine, step)
            engine.save_checkpoint(folder, "one")
        else:
            engine.load_checkpoint(folder, "one")
        kept = errors_of(engine)
        losses = [step_of(engine, step) for step in range(steps, steps + 2)]
        return losses, kept, engine.state_dict(), engine.replicas_differ


def test_a_checkpoint_goes_on_to_the_bit(two: Pool, tmp_path: Path) -> None:
    for steps in (3, 10, 11):  # Before one of whole gradients, at the end of an interval, and in the middle of one.
        folder = str(tmp_path / str(steps))
        saved = two.run(go_on, configuration(), folder, steps, save=True, **GAPS)
        for before, after in zip(
            saved, two.run(go_on, configuration(), folder, steps, save=False, **GAPS), strict=True
        ):
            assert after[0] == before[0]
            for name, each in before[1].items():
                assert all(a.equal(b) for a, b in zip(each, after[1][name], strict=True))
            assert all(after[2][name].equal(value) for name, value in before[2].items())


def test_the_plan_is_what_the_ledger_measures(two: Pool) -> None:
    case = next(case for case in grid() if case.ranks == 2 and "dp 2" in case.name and "zero 1" in case.name)
    optimizer = {"name": "zero_one_adam", "freeze_step": 2, "variance_doubling": 1}
    case = replace(case, config=case.config.replace(zero=0, optimizer=optimizer, precision={"dtype": "bfloat16"}))
    for found in compare(case, two.run(measure, case.config, timeout=60)[0]):
        assert found.states_agree, f"rank {found.rank}: {found.predicted} predicted, {found.measured} measured"


def change_optimizer(folder: str, before: dict[str, Any], after: dict[str, Any], steps: int) -> str | list[float]:
    with engine_of(configuration(optimizer=before)) as engine:
        for step in range(steps):
            step_of(engine, step)
        engine.save_checkpoint(folder, "one")
    with engine_of(configuration(optimizer=after)) as engine:
        try:
            engine.load_checkpoint(folder, "one")
        except CheckpointError as error:
            return str(error)
        return [step_of(engine, step) for step in range(steps, steps + 4)]


def test_other_optimizers_go_on_or_say_why_not(two: Pool, tmp_path: Path) -> None:
    ours: dict[str, Any] = {"variance_doubling": 2}
    plain = {"name": "adamw"}
    for before, after in ((ours, plain), (plain, ours | {"freeze_step": None})):
        folder = str(tmp_path / before.get("name", "ours"))
        found = two.run(change_optimizer, folder, before, after, 9)
        assert found[0] == found[1]
        assert all(2 < loss < 5 for loss in found[0]), found[0]
    (refused, _) = two.run(change_optimizer, str(tmp_path / "refused"), plain, ours, 3)
    assert "ZeroOneAdam cannot begin in the middle without anchor" in refused


def write_separate() -> tuple[list[str], bool, float]:
    """What rank 0 alone is told when it writes between exchanges, whether that is lost, and how far what all write
    behind `average_replicas` is off in the end."""
    with engine_of(configuration()) as engine, warnings_of("speedlab.engine") as reported:
        norm, embedding = engine.module.norm.weight, engine.module.embedding.weight
        for step in range(FREEZE + 5):
            if engine.replicas_differ and engine.world.rank == 0:
                with torch.no_grad():
                    norm.fill_(7.0)
                    embedding.data = torch.full_like(embedding, 7.0)
            step_of(engine, step)
        assert engine.replicas_differ
        engine.average_replicas()
        lost = float(norm.max()) < 2.0
        with torch.no_grad():
            norm.fill_(7.0)
        step_of(engine, FREEZE + 5)
        engine.average_replicas()
        return reported, lost, float((norm - 7.0).abs().max())


def test_what_is_written_between_two_exchanges_is_told_once_and_behind_one_kept(two: Pool) -> None:
    (reported, *_), (others, *_) = found = two.run(write_separate)
    assert len(reported) == 1
    assert "embedding.weight and 1 more: written into between two exchanges of ZeroOneAdam" in reported[0]
    assert "call engine.average_replicas() on all ranks before such a write" in reported[0]
    assert others == []
    for _, lost, off in found:
        assert lost
        assert 0 < off < 10 * LR


def refusals() -> list[str]:
    found = []
    with engine_of(configuration()) as engine:
        step_of(engine, 0)
        for act in (
            lambda: engine.reshape(zero=1),
            lambda: check_whole_gradients(ZeroOneAdam, engine.zeros[0].zero_policy, 1),
        ):
            try:
                act()
            except ValueError as error:
                found.append(str(error))
    return found


def test_a_change_of_stage_is_refused(two: Pool) -> None:
    for found in two.run(refusals):
        assert "zero.stage 1 partitions what they change; set zero.stage to 0" in found[0]
        assert "zero.stage 1: ranks of ZeroOneAdam make steps of their own" in found[1]


@pytest.mark.nightly
def test_it_trains_under_other_layouts_and_goes_on_under_them(pool_of: PoolOf, tmp_path: Path) -> None:
    folder, steps = str(tmp_path), 11
    config = configuration(batch={"micro_size": 2, "accumulation": 1})
    saved = pool_of(2).run(go_on, config, folder, steps, save=True)
    for parallel in ({"tp": 2}, {"pp": 2}):
        found = pool_of(4).run(go_on, config | {"parallel": parallel}, folder, steps, save=False, timeout=60)
        assert found[0][0] == pytest.approx(saved[0][0], rel=2e-3)
        for other in found[1:]:
            assert all(other[2][name].equal(value) for name, value in found[0][2].items()), "copies part"
