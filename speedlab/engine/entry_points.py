"""Entry points of the engine outside a step: all ranks must make the same call.

1. The entry point records its name and the step (`comm.activity`).
2. All ranks exchange name and step. If they differ, every rank raises before any change. If a rank is in a step, or in
   no call, the others wait for `timeout_seconds`, and report it.
3. The entry point does its work. Entry points that it calls skip 1 and 2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from speedlab.comm import World, doing, exchange_numbers, named_calls

_P = ParamSpec("_P")
_R = TypeVar("_R")
_E = TypeVar("_E")

_names: list[str] = []
"""Names of all entry points in order of definition, which is equal on all ranks."""


def entry_point(
    name: str = "",
    *,
    refuse: Callable[[Any], None] = lambda engine: None,
    alone: Callable[[Any], bool] = lambda engine: False,
    compares_steps: bool = True,
) -> Callable[[Callable[Concatenate[_E, _P], _R]], Callable[Concatenate[_E, _P], _R]]:
    """Make an engine's method, or a function with an engine as first argument, an entry point.

    Args:
        name: The public name; "" takes the name of the method.
        refuse: Raises errors that this rank can detect alone, before the exchange.
        alone: Whether a rank may call this alone now. Must be equal on all ranks.
        compares_steps: Whether ranks at different steps are refused.

    Returns:
        A decorator.
    """

    def decorate(work: Callable[Concatenate[_E, _P], _R]) -> Callable[Concatenate[_E, _P], _R]:
        # Ranks exchange this number instead of the name.
        own_name, number = name or work.__name__, len(_names)
        _names.append(own_name)

        @functools.wraps(work)
        def entered(engine: Any, *args: _P.args, **kwargs: _P.kwargs) -> _R:
            step = getattr(engine, "global_step", None)
            if step is None:  # The function got a checkpoint instead of an engine.
                return work(engine, *args, **kwargs)
            with doing(own_name, step, publish=True) as is_outer:  # 1
                refuse(engine)
                if is_outer and not alone(engine):
                    _agree(engine.world, number, step if compares_steps else -1)  # 2
                return work(engine, *args, **kwargs)  # 3

        return entered

    return decorate


def _agree(world: World, number: int, step: int) -> None:
    found = exchange_numbers([number, step], range(world.size))
    if any(each != found[0] for each in found):
        raise RuntimeError(
            f"{named_calls([(_names[call], at) for call, at in found])}. Nothing was changed. All ranks must make the "
            "same calls of the engine, in the same order."
        )
