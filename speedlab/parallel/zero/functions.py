"""Unshard a unit before the backward of a custom autograd function that can read its parameters.

A torch.autograd.Function can keep a parameter, or a view of one, as an attribute of its context, and read it in
backward. No hook on saved tensors sees that. So, while parameters are partitioned or offloaded, each node that such a
function adds to the graph has a hook: it unshards the units of the parameters that the function was called with, and
the unit whose forward called it.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.autograd.function import _SingleLevelFunction

from speedlab.parallel.zero.walk import tensors_of

if TYPE_CHECKING:
    from speedlab.parallel.zero.saved_tensors import SavedTensors

_watching: weakref.WeakSet[SavedTensors] = weakref.WeakSet()


def watch_functions(saved: SavedTensors) -> None:
    """Call `saved.read` before the backward of each custom function, as long as `saved` lives."""
    _watching.add(saved)
    # torch has no hook for it. Function.apply, which torch.compile knows by its identity, calls this method.
    _SingleLevelFunction.apply = classmethod(_apply)  # type: ignore[method-assign]


def _apply(function: Any, *args: Any, **kwargs: Any) -> Any:
    output = super(_SingleLevelFunction, function).apply(*args, **kwargs)  # type: ignore[misc]  # torch's own, in C++
    if _watching:
        node = next((tensor.grad_fn for tensor in tensors_of(output) if tensor.grad_fn is not None), None)
        for saved in _watching if node is not None else ():
            _watch(node, saved, args)
    return output


def _watch(node: Any, saved: SavedTensors, args: Any) -> None:
    owners = {index for tensor in tensors_of(args) if (index := saved.index_of(tensor)) is not None}
    for index in owners:
        node.register_prehook(partial(_read, saved, index, saved.version, True))
    if saved.running and saved.running[-1] not in owners:
        node.register_prehook(partial(_read, saved, saved.running[-1], saved.version, False))


def _read(saved: SavedTensors, index: int, version: int, reads_parameters: bool, gradients: Any) -> None:
    saved.read(index, version, reads_parameters=reads_parameters)
