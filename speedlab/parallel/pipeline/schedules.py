"""Pipeline schedules as data: the actions of each pipeline rank in a step, in order.

GPipe and 1F1B are a few lines. Interleaved 1F1B and zero-bubble come from torch.distributed.pipelining, whose
schedules compute the order of all ranks. `with_transfers` adds sends and receives, for all schedules alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum
from types import SimpleNamespace
from typing import Any, NamedTuple


class ActionKind(Enum):
    """The kind of an action. The values are those of torch and of the timeline."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    """First half of a backward: the gradient of the stage's input, which the previous stage waits for."""
    BACKWARD_WEIGHT = "W"
    """Second half: the gradients of parameters. No other rank waits for them."""
    SEND_ACTIVATION = "SEND_F"
    RECEIVE_ACTIVATION = "RECV_F"
    SEND_GRADIENT = "SEND_B"
    RECEIVE_GRADIENT = "RECV_B"


class Action(NamedTuple):
    """One action. `stage` is the index of the pipeline stage in the full model. Prints as in a grid: 2F0, 1RECV_B3."""

    kind: ActionKind
    stage: int
    micro_batch: int

    def __repr__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"


Orders = list[list[Action]]
"""The actions of each pipeline rank."""


def training_plan(schedule: str, *, pp: int, chunks: int, micro_batches: int) -> Orders:
    """Return every rank's actions of a training step, with transfers. Stage s is on pipeline rank s % pp.

    Args:
        schedule: "gpipe", "1f1b", "interleaved" or "zero-bubble".
        pp: Number of pipeline ranks.
        chunks: Stages per rank.
        micro_batches: Micro-batches per step.

    Raises:
        ValueError: The schedule does not exist for these numbers.
    """
    if schedule not in _ORDERS:
        raise ValueError(f"schedule {schedule!r} is not one of {', '.join(_ORDERS)}")
    if schedule in ("gpipe", "1f1b") and chunks != 1:
        raise ValueError(
            f"schedule {schedule} has one pipeline stage on each rank, not {chunks}; use chunks 1, or the schedule "
            f"interleaved or zero-bubble"
        )
    check_micro_batches(schedule, pp=pp, micro_batches=micro_batches)
    return with_transfers(_ORDERS[schedule](pp, chunks, micro_batches), stages=pp * chunks)


def forward_plan(*, pp: int, chunks: int, micro_batches: int) -> Orders:
    """Return every rank's actions of an evaluation: forwards only, with transfers.

    Args:
        pp: Number of pipeline ranks.
        chunks: Stages per rank.
        micro_batches: Number of micro-batches.
    """
    orders = [
        [Action(ActionKind.FORWARD, chunk * pp + rank, k) for chunk in range(chunks) for k in range(micro_batches)]
        for rank in range(pp)
    ]
    return with_transfers(orders, stages=pp * chunks)


def check_micro_batches(schedule: str, *, pp: int, micro_batches: int) -> None:
    """Check that a schedule exists for a number of micro-batches.

    Args:
        schedule: Name of the schedule.
        pp: Number of pipeline ranks.
        micro_batches: Micro-batches per step.

    Raises:
        ValueError: The schedule does not exist; the message gives the nearest numbers that work.
    """
    if micro_batches < 1:
        raise ValueError(f"{micro_batches} micro-batches; a pipeline has at least 1")
    if schedule in ("gpipe", "1f1b") or _in_rounds(pp, micro_batches):
        return
    near = [k for k in range(max(1, micro_batches - pp), micro_batches + 2 * pp) if _in_rounds(pp, k)]
    below = max(k for k in near if k < micro_batches)
    above = min(k for k in near if k > micro_batches)
    raise ValueError(
        f"schedule {schedule}: {micro_batches} micro-batches on pp {pp} would go round {micro_batches // pp} times in "
        f"groups of equal size, and {micro_batches} does not divide by {micro_batches // pp}; use accumulation "
        f"{below} or {above}"
    )


def _in_rounds(pp: int, micro_batches: int) -> bool:
    return micro_batches % max(1, micro_batches // pp) == 0


def _gpipe(pp: int, _chunks: int, micro_batches: int) -> Orders:
    """Return all forwards, then all backwards (arXiv:1811.06965)."""
    return [
        [Action(kind, rank, k) for kind in (ActionKind.FORWARD, ActionKind.BACKWARD) for k in range(micro_batches)]
        for rank in range(pp)
    ]


def _one_forward_one_backward(pp: int, _chunks: int, micro_batches: int) -> Orders:
    """Return one forward and one backward in turn, after one forward for each rank that follows (arXiv:2104.04473,
    section 2.2).
    """
    orders = []
    for rank in range(pp):
        ahead = min(pp - 1 - rank, micro_batches)
        actions = [Action(ActionKind.FORWARD, rank, k) for k in range(ahead)]
        for k in range(micro_batches):
            if ahead + k < micro_batches:
                actions.append(Action(ActionKind.FORWARD, rank, ahead + k))
            actions.append(Action(ActionKind.BACKWARD, rank, k))
        orders.append(actions)
    return orders


def _of_torch(schedule: str, pp: int, chunks: int, micro_batches: int) -> Orders:
    # Imported here, because the import loads the compiler and takes more than a second.
    from torch.distributed import pipelining

    # The attributes of a stage that a schedule reads to compute the orders of all ranks.
    stage: Any = SimpleNamespace(group_size=pp, group_rank=0, num_stages=pp * chunks, submod=None)
    made = getattr(pipelining, schedule)([stage] * chunks, micro_batches)
    return [
        [
            Action(ActionKind(action.computation_type.value), action.stage_index, action.microbatch_index)
            for action in made.pipeline_order[rank]
            if action is not None
        ]
        for rank in range(pp)
    ]


def _interleaved(pp: int, chunks: int, micro_batches: int) -> Orders:
    """Return interleaved 1F1B: several stages per rank (arXiv:2104.04473, section 2.2)."""
    return _of_torch("ScheduleInterleaved1F1B", pp, chunks, micro_batches)


def _zero_bubble(pp: int, chunks: int, micro_batches: int) -> Orders:
    """Return backwards in two halves; the second halves fill the bubble (arXiv:2401.10241)."""
    return _of_torch("ScheduleInterleavedZeroBubble", pp, chunks, micro_batches)


_ORDERS = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
    "zero-bubble": _zero_bubble,
}


def with_transfers(orders: Sequence[Iterable[Action]], *, stages: int) -> Orders:
    """Add sends and receives to the orders of all ranks.

    A send directly follows the action that computes its message. Its receive is at the position that the other rank
    has reached by then, if all ranks run one action at a time. So both ranks start their transfers in the same order.
    And no rank waits for a message whose receive is later in its own plan.

    Args:
        orders: Actions of each rank, without transfers.
        stages: Number of stages of the model.

    Raises:
        ValueError: The orders deadlock.
    """
    pp = len(orders)
    waiting = [deque(actions) for actions in orders]
    plan: Orders = [[] for _ in orders]
    done: set[Action] = set()
    while any(waiting):
        progress = False
        for rank, queue in enumerate(waiting):
            # The next action needs a result that no rank has computed yet, so this rank waits for one round.
            if not queue or not done.issuperset(_needed(queue[0], stages)):
                continue
            action = queue.popleft()
            progress = True
            plan[rank].append(action)
            done.add(_as_whole(action))
            if (transfer := _transfer(action, stages)) is not None and transfer[1].stage % pp != rank:
                plan[rank].append(transfer[0])
                plan[transfer[1].stage % pp].append(transfer[1])
        if not progress:
            stuck = ", ".join(repr(queue[0]) for queue in waiting if queue)
            raise ValueError(f"these orders lock up: nothing can begin of {stuck}")
    return plan


def _as_whole(action: Action) -> Action:
    """Return the action that other ranks wait for: the first half of a backward counts as the full backward."""
    return action._replace(kind=ActionKind.BACKWARD) if action.kind is ActionKind.BACKWARD_INPUT else action


def _needed(action: Action, stages: int) -> list[Action]:
    """Return the actions of a neighbouring stage that must run before."""
    kind, stage, micro_batch = action
    if kind is ActionKind.FORWARD and stage > 0:
        return [Action(ActionKind.FORWARD, stage - 1, micro_batch)]
    if kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT) and stage < stages - 1:
        return [Action(ActionKind.BACKWARD, stage + 1, micro_batch)]
    return []


def _transfer(action: Action, stages: int) -> tuple[Action, Action] | None:
    """Return (send, receive) of the message that `action` computes for a neighbouring stage; None if there is none."""
    kind, stage, micro_batch = action
    if kind is ActionKind.FORWARD and stage < stages - 1:
        return (
            Action(ActionKind.SEND_ACTIVATION, stage, micro_batch),
            Action(ActionKind.RECEIVE_ACTIVATION, stage + 1, micro_batch),
        )
    if kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT) and stage > 0:
        return Action(ActionKind.SEND_GRADIENT, stage, micro_batch), Action(
            ActionKind.RECEIVE_GRADIENT, stage - 1, micro_batch
        )
    return None
