"""Fetch of offloaded (or 8-bit) optimizer states for an update, a load, or a read: a *visit*.

1. The states of a flat parameter are fetched, and those of the next one are prefetched.
2. They arrive, parameters first, because masters may be made from them. Then `point` renews the optimizer's views.
3. Changed states are written back, and views show the placeholders.

A policy with a delayed update (`ZeroPolicy.grads_double_buffered`) leaves parameters unchanged and reads the buffered
gradient; `publishing` is the visit that copies masters to the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from speedlab.offload import OffloadedTensor
from speedlab.parallel.zero import FlatParam

Point = Callable[[FlatParam], None]


@contextmanager
def visit(
    flat: FlatParam | None, ahead: FlatParam | None, *, changed: bool, update: bool, point: Point
) -> Iterator[None]:
    """Hold the states of a flat parameter on the device inside.

    Args:
        flat: The flat parameter. Nothing happens for None, or if nothing is offloaded.
        ahead: The next flat parameter, whose states are prefetched.
        changed: Whether to write the states back.
        update: Whether this is an update: it also reads the gradient and always writes back.
        point: Renews the optimizer's views of the states.
    """
    if flat is not None:
        _fetch(flat, _states(flat, update=update), update=update)
    if ahead is not None:
        states = _states(ahead, update=update)
        # In a backward the gather of these parameters may come later, and must fetch them first.
        first = [state for state in states if state is not ahead.offloaded.get("parameter")]
        _fetch(ahead, first if ahead.zero_policy.update_in_backward else states, update=update)
    if flat is None or not flat.is_offloaded:
        yield
        return
    try:
        for state in _states(flat, update=update):
            _arrive(flat, state)
        point(flat)
        yield
    except BaseException:
        leave(flat, changed=False, point=point)
        raise
    leave(flat, changed=changed or update, point=point)


def leave(flat: FlatParam, *, changed: bool, point: Point) -> None:
    """End a visit, if there is one.

    Args:
        flat: The flat parameter.
        changed: Whether to write the states back.
        point: Renews the optimizer's views of the states.
    """
    if not flat.is_offloaded:
        return
    for state in list(flat.offloaded.values()):
        state.leave(changed=changed)
    gradient = None if flat.gradient is None else flat.gradient.used_by_update
    if gradient is not None:
        gradient.leave(changed=False)
    point(flat)


@contextmanager
def publishing(flat: FlatParam, ahead: FlatParam | None) -> Iterator[None]:
    """Hold the masters on the device inside, with a buffer for the parameters that is written back afterwards.

    On an exception the caller must end the visit.

    Args:
        flat: The flat parameter.
        ahead: The next flat parameter, whose masters are prefetched.
    """
    for each in (flat, ahead):
        if each is not None:
            each.offloaded["master"].fetch()
    parameter = flat.offloaded.get("parameter")
    if parameter is not None:
        parameter.fetch(values=False)
        parameter.arrive()
    flat.offloaded["master"].arrive()
    yield
    flat.offloaded["master"].leave(changed=False)
    if parameter is not None:
        parameter.leave(changed=True)


def _fetch(flat: FlatParam, states: list[OffloadedTensor], *, update: bool) -> None:
    if flat.is_offloaded:
        # The update overwrites the parameters, or they are on the device: fetch only a buffer for them.
        needless = flat.offloaded.get("parameter") if flat.written_by_update is not None or flat.at_hand else None
        for state in states:
            state.fetch(values=not (update and state is needless))


def _arrive(flat: FlatParam, state: OffloadedTensor) -> None:
    fills = state.blank and state is flat.offloaded.get("parameter") and flat.written_by_update is None
    if fills and not flat.at_hand:  # The values were on the device when the visit began.
        state.leave(changed=False)
        fills = False
    state.arrive()
    if fills:
        flat.take_gathered()


def _states(flat: FlatParam, *, update: bool) -> list[OffloadedTensor]:
    parameter = flat.offloaded.get("parameter")
    first = [] if parameter is None or (update and flat.zero_policy.grads_double_buffered) else [parameter]
    others = [state for state in flat.offloaded.values() if state is not parameter]
    gradient = flat.gradient.used_by_update if update and flat.gradient is not None else None
    return [*first, *others, *([] if gradient is None else [gradient])]
