"""Unshard a unit before autograd reads a tensor that a forward saved.

Hooks on outputs see only what a module returns. Backward can also enter a unit through a side output: a view that was
modified in place, an activation that a user's hook kept, a loss stored on the module, a tensor inside an object, a list
or a generator. So, while parameters are partitioned or offloaded, every tensor that autograd saves in a forward passes
through a pack hook and an unpack hook (torch.autograd.graph.saved_tensors_hooks):

1. pack notes the unit whose memory the tensor shares, and the unit whose forward is running.
2. unpack unshards the first of the two, or else the second one if this backward has not reached it yet: a custom
   autograd function can keep a parameter as an attribute, which no hook sees.
3. torch does not look for in-place modifications if there are hooks, so unpack does.

Hooks that the caller entered before (save_on_cpu, torch.utils.checkpoint around the whole module) get every tensor, as
they would without these.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from speedlab.parallel.zero.unit import Unit

_Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""(pack, unpack)."""


class Unshard(Protocol):
    """Called with a unit's index before autograd reads a tensor: a part of the unit's parameters if `reads_parameters`,
    else another one that its forward saved. `version` is `SavedTensors.version` at the forward."""

    def __call__(self, index: int, version: int, *, reads_parameters: bool) -> None: ...


class SavedTensors:
    """The hooks on the tensors that autograd saves in the forwards of one module.

    A graph can outlive its engine, so what autograd keeps are indices of units.
    """

    def __init__(self, unshard: Unshard) -> None:
        """`unshard`: a method, whose object is not kept alive."""
        self._unshard: Callable[[], Unshard | None] = weakref.WeakMethod(unshard)  # type: ignore[arg-type]  # a method
        self._indices: dict[int, int] = {}
        """Of units, by the storage of their flat parameters."""
        self._active: _Hooks | None = None
        """The hooks that were entered and not left."""
        self._entered_by: nn.Module | None = None
        self.running: int | None = None
        """The index of the unit whose forward is running."""
        self.version = 0
        """Raised with every change of the parameters."""

    def watch(self, units: Sequence[Unit]) -> None:
        """Watch the parameters of `units` and no others. Their flats keep their storages until the next call."""
        self._indices = {
            flat.full.untyped_storage()._cdata: index for index, unit in enumerate(units) for flat in unit.flats
        }

    def index_of(self, tensor: Tensor) -> int | None:
        """Return the index of the watched unit whose parameters share memory with `tensor`; None for other tensors."""
        try:
            return self._indices.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # Sparse tensors and some subclasses have no storage.
            return None

    def enter(self, module: nn.Module, *, recomputing: bool) -> None:
        """Enter the hooks at the outermost `module` of a forward; inner ones change nothing.

        `recomputing`: the forward runs inside a backward. There torch.utils.checkpoint has hooks of its own, which must
        see the same tensors as in the first forward.
        """
        if self._active is not None or not self._indices or not torch.is_grad_enabled():
            return
        outer = _active_hooks()
        if recomputing and outer is not None:
            return
        self._active, self._entered_by = self._hooks(outer), module
        saved_tensors_hooks(*self._active).__enter__()

    def leave(self, module: nn.Module) -> None:
        """Leave the hooks if `module` entered them."""
        if module is self._entered_by:
            self.reset()

    def reset(self) -> None:
        """Leave the hooks, if any: no forward is running. Ctrl-C ends a forward without calling its modules' hooks."""
        active, self._active, self._entered_by, self.running = self._active, None, None, None
        if active is not None and _active_hooks() == active:
            saved_tensors_hooks(*active).__exit__()

    def _hooks(self, outer: _Hooks | None) -> _Hooks:
        """Return the hooks for one forward inside the `outer` ones."""

        def pack(tensor: Tensor) -> Any:
            own = self.index_of(tensor)
            if outer is not None:
                return outer[0](tensor), None, own, self.running, self.version
            # An output of the node itself would keep its own graph alive, so the graph is left out.
            kept = tensor.detach()
            return kept, kept._version, own, self.running, self.version

        def unpack(packed: Any) -> Tensor:
            kept, written, own, running, version = packed
            index = running if own is None else own
            if index is not None:
                self._read(index, version, reads_parameters=own is not None)
            if outer is not None:
                return outer[1](kept)
            if kept._version != written:
                _refuse_modified(kept, written)
            return kept

        return pack, unpack

    def _read(self, index: int, version: int, *, reads_parameters: bool) -> None:
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


def _refuse_modified(tensor: Tensor, expected: int) -> None:
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a saved "
        f"tensor of shape {list(tensor.shape)} and {tensor.dtype} is at version {tensor._version}; expected version "
        f"{expected}. Modify a clone instead, or run the forward again"
    )
