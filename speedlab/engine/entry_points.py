"""The entry points of the engine that are no part of a step: all ranks have to be in the same one.

1. The entry point notes its name and the step (`comm.activity`).
2. All ranks exchange the name and the step. Where they differ, every rank raises before anything is changed. Where a
   rank is in a step, or in no call, the others wait for `timeout_seconds`, and say so.
3. The entry point does its work. Entry points that it calls itself do none of this.
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
"""Of all entry points, in the order of their definition, which is the same on all ranks."""


def entry_point(
    name: str = "",
    *,
    refuse: Callable[[Any], None] = lambda engine: None,
    alone: Callable[[Any], bool] = lambda engine: False,
    compares_steps: bool = True,
) -> Callable[[Callable[Concatenate[_E, _P], _R]], Callable[Concatenate[_E, _P], _R]]:
    """Make a method of the engine, or a function of it, an entry point.

    Args:
        name: as the user calls it; '' for the name of the method.
        refuse: raises what this rank can tell by itself, before others are asked.
        alone: whether a rank may make this call without the others now. The answer must be the same on all ranks.
        compares_steps: whether ranks at different steps are refused.
    """

    def decorate(work: Callable[Concatenate[_E, _P], _R]) -> Callable[Concatenate[_E, _P], _R]:
        own_name, number = name or work.__name__, len(_names)
        _names.append(own_name)

        @functools.wraps(work)
        def entered(engine: Any, *args: _P.args, **kwargs: _P.kwargs) -> _R:
            step = getattr(engine, "global_step", None)
            if step is None:  # A function that was given a checkpoint instead of an engine.
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
