"""Unshard a unit before autograd reads a tensor that a forward saved.

Hooks on outputs see only what a module returns. But backward can also enter a unit through a side output:

- a view that was modified in place, or an activation that a user's hook kept;
- a loss stored on the module;
- a tensor inside an object, a list or a generator.

So, while parameters are gathered on demand, every tensor that autograd saves in a forward passes through a pack hook
and an unpack hook (torch.autograd.graph.saved_tensors_hooks):

1. pack notes the unit whose memory the tensor shares, if any. unpack unshards this unit.
2. With hooks, torch does not check for in-place modifications. So unpack does.
3. A torch.autograd.Function can keep a parameter, or a view of one, as an attribute of its context. No hook on saved
   tensors sees this. So each node that a custom function adds to the graph gets a hook. The hook unshards the units of
   the parameters that the function was called with, and the unit whose forward called the function.

Hooks that the caller entered before (save_on_cpu, torch.utils.checkpoint around the whole module) get every tensor, as
they would without the hooks of this file.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import _SingleLevelFunction
from torch.autograd.graph import saved_tensors_hooks

from speedlab.parallel.zero.module_hooks import tensors_of
from speedlab.parallel.zero.units import Unit

_watching: weakref.WeakSet[SavedTensors] = weakref.WeakSet()


def watch_functions(saved: SavedTensors) -> None:
    """Call `saved.read` before the backward of each custom function, as long as `saved` lives.

    Args:
        saved: Its units are unsharded; only a weak reference is kept.
    """
    _watching.add(saved)
    # torch has no hook for custom functions. torch.compile compares Function.apply by identity, so we patch the method
    # that it calls.
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
    # The function may also have kept parameters of the unit whose forward is running.
    if saved.running and saved.running[-1] not in owners:
        node.register_prehook(partial(_read, saved, saved.running[-1], saved.version, False))


def _read(saved: SavedTensors, index: int, version: int, reads_parameters: bool, gradients: Any) -> None:
    saved.read(index, version, reads_parameters=reads_parameters)


_Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""(pack, unpack)."""


class Unshard(Protocol):
    """Unshards a unit before autograd reads its parameters.

    With `reads_parameters` False, a custom function of its forward runs next and may read them. `index` is the unit;
    `version` is `SavedTensors.version` at the time of the forward.
    """

    def __call__(self, index: int, version: int, *, reads_parameters: bool) -> None: ...


class SavedTensors:
    """The hooks on the tensors that autograd saves in the forwards of one module.

    A graph can outlive its engine, so what autograd keeps are indices of units.
    """

    def __init__(self, unshard: Unshard) -> None:
        """Watch nothing yet.

        Args:
            unshard: A bound method; its object is referenced only weakly.
        """
        self._unshard: Callable[[], Unshard | None] = weakref.WeakMethod(unshard)  # type: ignore[arg-type]  # a method
        self._indices: dict[int, int] = {}
        """Unit index by the storage of its flats."""
        self._entered: list[tuple[nn.Module, _Hooks | None]] = []
        """Modules whose forwards are running, each with the hooks that it entered."""
        self.running: list[int] = []
        """Indices of the units whose forwards are running, outer ones first."""
        self.version = 0
        """Counts the changes of the parameters."""

    def watch(self, units: Sequence[Unit]) -> None:
        """Watch the parameters of these units and of no others.

        Args:
            units: All units with parameters on demand. Their flats must keep their storages until the next call.
        """
        self._indices = {
            flat.full.untyped_storage()._cdata: index for index, unit in enumerate(units) for flat in unit.flats
        }
        if self._indices:
            watch_functions(self)

    def index_of(self, tensor: Tensor) -> int | None:
        """Return the index of the watched unit whose parameters share memory with a tensor.

        Args:
            tensor: Any tensor.

        Returns:
            The index; None for other tensors.
        """
        try:
            return self._indices.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # Sparse tensors and some subclasses have no storage.
            return None

    def enter(self, module: nn.Module, *, recomputing: bool) -> None:
        """Enter the hooks at the start of a forward, unless they are already the innermost hooks.

        If the model itself entered hooks (torch.utils.checkpoint around a block), the hooks are entered again below
        them.

        Args:
            module: The module whose forward starts.
            recomputing: Whether the forward runs inside a backward. There, the hooks of torch.utils.checkpoint must
                see the same tensors as in the first forward.
        """
        if not self._indices:
            return
        hooks, outer = None, _active_hooks()
        if torch.is_grad_enabled() and not (recomputing and outer is not None) and not self._is_own(outer):
            hooks = self._hooks(outer)
            saved_tensors_hooks(*hooks).__enter__()
        self._entered.append((module, hooks))

    def _is_own(self, hooks: _Hooks | None) -> bool:
        return hooks is not None and any(own == hooks for _, own in reversed(self._entered))

    def leave(self, module: nn.Module) -> None:
        """Leave the hooks at the end of a forward, if this forward entered them.

        Args:
            module: The module whose forward ends.
        """
        if self._entered and self._entered[-1][0] is module:
            _, hooks = self._entered.pop()
            if hooks is not None:
                _leave(hooks)

    def ended(self, index: int) -> None:
        """Note that the forward of a unit returned. Nested forwards that raised end too.

        Args:
            index: Index of the unit.
        """
        while self.running and self.running.pop() != index:
            pass

    def reset(self) -> None:
        """Leave all hooks, because no forward is running. Ctrl-C ends a forward without calling its modules' hooks."""
        outermost = next((hooks for _, hooks in self._entered if hooks is not None), None)
        self._entered.clear()
        self.running.clear()
        if outermost is not None:
            _leave(outermost)

    def _hooks(self, outer: _Hooks | None) -> _Hooks:
        """Return the hooks for one forward inside the `outer` ones."""

        def pack(tensor: Tensor) -> Any:
            own = self.index_of(tensor)
            if outer is not None:
                return outer[0](tensor), None, own, self.version
            # A saved output of the node would keep its own graph alive, so it is detached.
            kept = tensor.detach()
            return kept, kept._version, own, self.version

        def unpack(packed: Any) -> Tensor:
            kept, written, own, version = packed
            if own is not None:
                self.read(own, version, reads_parameters=True)
            if outer is not None:
                return outer[1](kept)
            if kept._version != written:
                _refuse_modified(kept, written)
            return kept

        return pack, unpack

    def read(self, index: int, version: int, *, reads_parameters: bool) -> None:
        """Unshard a unit before a read; see `Unshard`.

        Args:
            index: Index of the unit.
            version: `version` at the time of the forward.
            reads_parameters: Whether parameters are certainly read.

        Raises:
            RuntimeError: The engine is gone.
        """
        unshard = self._unshard()
        if unshard is not None:
            unshard(index, version, reads_parameters=reads_parameters)
        elif reads_parameters:
            raise RuntimeError(
                "backward: the engine of this loss is gone, and with it the partitioned parameters of its forward; run "
                "the forward again"
            )


def _active_hooks() -> _Hooks | None:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]  # has no stub


def _leave(hooks: _Hooks) -> None:
    """Leave these hooks, and restore the ones above them, which Ctrl-C can leave active. Does nothing if they were
    left already.
    """
    above = list[_Hooks]()
    while (top := _active_hooks()) is not None:
        saved_tensors_hooks(*top).__exit__()
        if top == hooks:
            return
        above.append(top)
    for each in reversed(above):
        saved_tensors_hooks(*each).__enter__()


def _refuse_modified(tensor: Tensor, expected: int) -> None:
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a saved "
        f"tensor of shape {list(tensor.shape)} and {tensor.dtype} is at version {tensor._version}; expected version "
        f"{expected}. Modify a clone instead, or run the forward again"
    )
