"""Visits of flats whose states lie away from the device, or are coded: for an update, a load, a look.

An update that may run beside the next step (`ZeroPolicy.grads_double_buffered`) leaves parameters as they are, and
takes the gradient that waits; `publishing` is the visit that brings masters to the parameters.

1. What the flat has away is on its way, and that of the one behind it, too.
2. It arrives, parameters first, of which masters may be made; whoever has views of it takes them anew (`point`).
3. What was changed goes back, and views show what stands for it.
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
    """Inside, `flat` has its values. None, or one that lies on the device: there is nothing to do.

    `update`: the gradient is visited, too, and comes back unchanged.
    """
    if flat is not None:
        _fetch(flat, _states(flat, update=update), update=update)
    if ahead is not None:
        states = _states(ahead, update=update)
        # In the middle of a pass, whose gather of these parameters may be still to come: it has to be first.
        first = [state for state in states if state is not ahead.offloaded.get("parameter")]
        _fetch(ahead, first if ahead.zero_policy.update_in_backward else states, update=update)
    if flat is None or not flat.lies_away:
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
    """End a visit, if there is one."""
    if not flat.lies_away:
        return
    for state in list(flat.offloaded.values()):
        state.leave(changed=changed)
    gradient = None if flat.gradient is None else flat.gradient.used_by_update
    if gradient is not None:
        gradient.leave(changed=False)
    point(flat)


@contextmanager
def publishing(flat: FlatParam, ahead: FlatParam | None) -> Iterator[None]:
    """Inside, `flat` has its masters, and room for its parameters, which then go to their place; masters of `ahead` are
    on their way. What an exception breaks off has to be left."""
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
    if flat.lies_away:
        needless = flat.offloaded.get("parameter") if flat.written_by_update is not None or flat.at_hand else None
        for state in states:
            state.fetch(values=not (update and state is needless))


def _arrive(flat: FlatParam, state: OffloadedTensor) -> None:
    fills = state.blank and state is flat.offloaded.get("parameter") and flat.written_by_update is None
    if fills and not flat.at_hand:  # It was, when the visit began.
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
