"""The bubble's theory against a clock: torch's own order of actions, with unit times and free messages."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining import schedules

from speedlab.planner import bubble_share

KIND = schedules._ComputationType
TURNS = {KIND.FORWARD: 1, KIND.FULL_BACKWARD: 2, KIND.BACKWARD_INPUT: 1, KIND.BACKWARD_WEIGHT: 1}


def torch_orders(schedule: str, pp: int, chunks: int, micro_batches: int) -> list[list]:
    """What each rank does, in order, as torch computes it."""
    kinds = {"interleaved": schedules.ScheduleInterleaved1F1B, "zero-bubble": schedules.ScheduleInterleavedZeroBubble}
    made = kinds[schedule].__new__(kinds[schedule])  # Only its arithmetic: no stages, no processes.
    made.pp_group_size, made.n_local_stages, made._n_microbatches = pp, chunks, micro_batches
    made.number_of_rounds = max(1, micro_batches // pp)
    made.microbatches_per_round = micro_batches // made.number_of_rounds
    return [[action for action in made._calculate_single_rank_operations(rank) if action] for rank in range(pp)]


def plain_orders(schedule: str, pp: int, micro_batches: int) -> list[list]:
    """GPipe: all forwards, then all backwards. 1F1B: as many forwards ahead as ranks follow, then in turns."""
    orders = []
    for rank in range(pp):
        ahead = micro_batches if schedule == "gpipe" else min(pp - 1 - rank, micro_batches)
        forwards = [schedules._Action(rank, KIND.FORWARD, i) for i in range(micro_batches)]
        backwards = [schedules._Action(rank, KIND.FULL_BACKWARD, i) for i in range(micro_batches)]
        turns = [action for pair in zip(forwards[ahead:], backwards, strict=False) for action in pair]
        orders.append(forwards[:ahead] + turns + backwards[micro_batches - ahead :])
    return orders


def measured(orders: list[list], stages: int) -> float:
    """The idle share when every action starts as soon as its rank is free and what it needs is there."""
    ends: dict[tuple, int] = {}
    free, busy, position = [0] * len(orders), 0, [0] * len(orders)
    left = sum(map(len, orders))
    while left:
        before = left
        for rank, actions in enumerate(orders):
            while position[rank] < len(actions):
                stage, kind, micro_batch = actions[position[rank]][:3]
                needs = _needs(stage, kind, micro_batch, stages)
                if any(need not in ends for need in needs):
                    break
                free[rank] = max([free[rank], *(ends[need] for need in needs)]) + TURNS[kind]
                ends[_name(kind), stage, micro_batch] = free[rank]
                busy += TURNS[kind]
                position[rank] += 1
                left -= 1
        assert left < before, "the order locks up"
    return 1 - busy / (len(orders) * max(free))


def _name(kind) -> str:
    return {KIND.FORWARD: "F", KIND.BACKWARD_WEIGHT: "W"}.get(kind, "B")


def _needs(stage: int, kind, micro_batch: int, stages: int) -> list[tuple]:
    if kind is KIND.FORWARD:
        return [("F", stage - 1, micro_batch)] if stage else []
    if kind is KIND.BACKWARD_WEIGHT:
        return [("B", stage, micro_batch)]
    return [("F", stage, micro_batch), *([("B", stage + 1, micro_batch)] if stage < stages - 1 else [])]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("pp", [1, 2, 3, 4, 7])
def test_one_stage_a_rank(schedule: str, pp: int) -> None:
    for micro_batches in range(1, 4 * pp):
        share = bubble_share(schedule, pp=pp, chunks=5, micro_batches=micro_batches)
        assert share == pytest.approx(measured(plain_orders(schedule, pp, micro_batches), pp))


@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble"])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("pp", [1, 2, 3, 4, 6])
def test_several_stages_a_rank(schedule: str, chunks: int, pp: int) -> None:
    for micro_batches in (m for m in range(1, 4 * pp) if m % max(1, m // pp) == 0):
        share = bubble_share(schedule, pp=pp, chunks=chunks, micro_batches=micro_batches)
        orders = torch_orders(schedule, pp, chunks, micro_batches)
        assert share == pytest.approx(measured(orders, pp * chunks)), micro_batches


def test_known_values() -> None:
    assert bubble_share("1f1b", pp=4, micro_batches=8) == 3 / 11
    assert bubble_share("interleaved", pp=4, chunks=2, micro_batches=8) == pytest.approx(3 / 19)
    assert bubble_share("zero-bubble", pp=4, chunks=2, micro_batches=8) == pytest.approx(3 / 51)
    assert bubble_share("gpipe", pp=1, micro_batches=3) == 0


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="schedule 'fifo' is not one of gpipe, 1f1b, interleaved, zero-bubble"):
        bubble_share("fifo", pp=2, micro_batches=2)
    with pytest.raises(ValueError, match="pp 0, chunks 1 and micro_batches 2 must each be at least 1"):
        bubble_share("1f1b", pp=0, micro_batches=2)
