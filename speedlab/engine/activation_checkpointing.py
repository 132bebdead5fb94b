"""Activation checkpointing and torch.compile of blocks, and the storage of checkpointed inputs.

`BlockWrapper` changes a block's forward in one visible order: torch.compile inside, activation checkpointing around it,
and input storage outermost. Collectives cause graph breaks, and torch compiles nothing of a checkpoint whose inside
breaks. So checkpointing is around compile, and backward recomputes the compiled forward.

`KeptInputs` stores the inputs of checkpointed blocks until backward, on the device unchanged, or:

1. Sharded over the tensor ranks, which have equal inputs: each keeps 1/tp, and a gather precedes the recomputation
   (Megatron-LM's distributed saved activations; partitioned activations of arXiv:1910.02054, section 6.1).
2. In host memory, what remains of it.
"""

from __future__ import annotations

import copy
import functools
import shutil
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from speedlab.comm import Group
from speedlab.config import ConfigError, RunConfig
from speedlab.models.selective_checkpointing import selective_contexts
from speedlab.offload import StoreRegistry
from speedlab.parallel.mesh import Mesh
from speedlab.parallel.zero import Zero
from speedlab.parallel.zero.units import Unit

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype by bytes."""


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """A rank's part of a stored input."""

    tensor: Tensor
    shape: torch.Size | None
    """Shape of the whole, if `tensor` is this rank's shard of it."""
    device: torch.device


class KeptInputs:
    """The storage of inputs of checkpointed blocks."""

    def __init__(self, *, ranks: Group | None, stores: StoreRegistry | None) -> None:
        """Choose the storage.

        Args:
            ranks: Ranks over which inputs are sharded; None does not shard.
            stores: Host memory for inputs; None keeps them on the device.
        """
        self._ranks, self._stores = ranks, stores
        self._compared: set[nn.Module] = set()

    def around(self, forward: Callable[..., Any], module: nn.Module, name: str) -> Callable[..., Any]:
        """Wrap the forward of a checkpointed block so that its positional arguments are stored.

        Args:
            forward: The forward to wrap.
            module: The block.
            name: Name of the block in its model.

        Returns:
            The wrapped forward. Its first call raises ConfigError, on all ranks, if tensor ranks have different inputs.
        """

        @functools.wraps(forward)
        def keeping(*args: Any, **kwargs: Any) -> Any:
            if not (torch.is_grad_enabled() and module.training):
                return forward(*args, **kwargs)
            given = [each for each in args if isinstance(each, Tensor)]
            # Inputs without gradients are shared by all blocks, and a leaf's gradient has a user: both stay unchanged.
            streams = [each for each in given if each.requires_grad and not each.is_leaf]
            if self._ranks is not None and module not in self._compared:
                for each in streams:
                    _refuse_different(each, self._ranks, name)
                self._compared.add(module)
            known, cut = ({_place(each) for each in some} for some in (given, streams))
            # A compiled block also saves other tensors, such as parameters.
            leave = lambda saved: self._leave(saved, cut=_place(saved) in cut) if _place(saved) in known else saved  # noqa: E731  # one expression
            with saved_tensors_hooks(leave, self._come):
                return forward(*args, **kwargs)

        return keeping

    def _leave(self, saved: Tensor, *, cut: bool) -> Tensor | _Kept:
        kept, shape = saved.detach(), None
        if cut and self._ranks is not None and saved.numel() > 0:  # 1
            flat = kept.reshape(-1)
            # Ceiling division; the last shards are padded.
            width = -(-len(flat) // self._ranks.size)
            part = flat[width * self._ranks.index :][:width]
            # A copy, so that the whole tensor can be freed.
            kept, shape = F.pad(part, (0, width - len(part))) if len(part) < width else part.clone(), saved.shape
        if self._stores is not None and saved.device.type == "cuda" and kept.numel() > 0:  # 2
            # Copies run in order on their own stream, so that neither the host nor the device waits
            # for the transfer.
            source = kept.contiguous()
            kept = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._stores.hold(self._stores.copies.to_host(source, kept))
        elif shape is None:
            return saved
        return _Kept(tensor=kept, shape=shape, device=saved.device)

    def _come(self, packed: Tensor | _Kept) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        here = packed.tensor
        if here.device != packed.device:
            assert self._stores is not None  # Set, because an input was stored in it.
            here = torch.empty(packed.tensor.shape, dtype=packed.tensor.dtype, device=packed.device)
            self._stores.copies.to_device(packed.tensor, here).wait()
        if packed.shape is None:
            return here
        assert self._ranks is not None  # Set, because the input was sharded.
        return self._ranks.gather_along(here, 0)[: packed.shape.numel()].view(packed.shape)


def kept_inputs_of(config: RunConfig, mesh: Mesh, stores: StoreRegistry) -> KeptInputs | None:
    """Return the storage of checkpointed inputs.

    Args:
        config: The configuration of the run.
        mesh: The process groups.
        stores: The stores of this rank.

    Returns:
        The storage; None if inputs stay unchanged.
    """
    # With sequence parallelism each tensor rank already has only its own tokens.
    cut = config.activation.partition_inputs and mesh.layout.tp > 1 and not config.parallel.sequence
    away = config.offload.activations == "host"
    if not (cut or away):
        return None
    return KeptInputs(ranks=mesh["tp"] if cut else None, stores=stores if away else None)


def _place(tensor: Tensor) -> tuple[int, torch.Size]:
    return tensor.untyped_storage()._cdata, tensor.shape


def _refuse_different(x: Tensor, ranks: Group, name: str) -> None:
    """Raise ConfigError unless all `ranks` have equal bits."""
    if isinstance(x, FakeTensor) or x.element_size() not in _INTEGERS:
        return
    bits = x.detach().contiguous().view(_INTEGERS[x.element_size()]).sum(dtype=torch.int64)
    every = ranks.gather_along(bits[None], 0)
    if bool((every != bits).any()):  # One sync per block, in its first forward.
        raise ConfigError(
            f"activation.partition_inputs: the input of {name} is not the same on all {ranks.size} tensor ranks, so "
            "that no rank's part of it would be the others'; give units that are whole blocks, or set "
            "activation.partition_inputs to false"
        )


class BlockWrapper:
    """A wrapper of block forwards that stores the originals, so that `undo` restores the user's module."""

    def __init__(
        self,
        zeros: Sequence[Zero],
        *,
        checkpointing: Literal["none", "selective", "block"],
        compile: bool,
        device: torch.device,
        inputs: KeptInputs | None = None,
    ) -> None:
        """Wrap the forwards of all blocks.

        Args:
            zeros: The partitioners, which define the blocks.
            checkpointing: As in `activation.checkpointing`.
            compile: Whether to compile blocks.
            device: The device of this rank.
            inputs: Storage of checkpointed inputs; None leaves them unchanged.

        Raises:
            ConfigError: If `compile` has no C++ compiler on a CPU.
        """
        self._originals: list[tuple[nn.Module, Any]] = []
        if compile and device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
            raise ConfigError(
                "compile: torch.compile needs a C++ compiler on CPUs and none is installed; install g++ or set "
                "compile: false"
            )
        self._caching: list[Any] = []
        """Configurations of Hugging Face models whose cache was disabled."""
        if checkpointing == "none" and not compile:
            return
        if checkpointing != "none":  # A recomputed block would add to a cache twice.
            configs = {id(c): c for zero in zeros if (c := getattr(zero.module, "config", None)) is not None}
            self._caching = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
            for config in self._caching:
                config.use_cache = False
        names = {module: name for zero in zeros for name, module in zero.module.named_modules()}
        blocks = [(zero, unit, module) for zero in zeros for unit in zero.units[1:] for module in unit.modules]
        for zero, unit, module in blocks:
            forward = module.forward
            if compile:
                # With torch's generator, dropout does not depend on the layout.
                forward = torch.compile(forward, options={"fallback_random": True})
            if checkpointing != "none":
                again = _unsharded(forward, module, zero, unit)
                forward = _checkpointed(again, module, selective=checkpointing == "selective")
            if checkpointing != "none" and inputs is not None:
                forward = inputs.around(forward, module, names[module])
            self._originals.append((module, module.__dict__.get("forward")))
            # Hooks stay outside, so that a recomputation does not gather or release.
            module.forward = _Replaced(module, forward)

    def undo(self) -> None:
        """Restore the original forwards and caches."""
        for module, own in self._originals:
            del module.forward  # The class's method is visible again, unless the module had its own.
            if own is not None:
                module.forward = own
        self._originals.clear()
        for config in self._caching:
            config.use_cache = True
        self._caching.clear()


class _Replaced:
    """A replacement of a module's forward. Copies of the module have their original forward."""

    def __init__(self, module: nn.Module, forward: Any) -> None:
        functools.update_wrapper(self, forward)  # First, because this copies the attributes of `forward`.
        self._module, self._forward = weakref.ref(module), forward
        self._own = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._own is not None:
            return copy.deepcopy(self._own, memo)
        module = memo.get(id(self._module()))
        return self if module is None else _forward_of(module)

    def __reduce__(self) -> Any:
        return _forward_of, (self._module(), self._own)


def _forward_of(module: Any, own: Any = None) -> Any:
    """Return the `own` forward, or that of the class."""
    return type(module).forward.__get__(module) if own is None else own


def _unsharded(forward: Any, module: nn.Module, zero: Zero, unit: Unit) -> Any:
    """Wrap the forward of a unit's module, so that a backward through a side output also finds gathered parameters."""
    this, hooked = weakref.ref(zero), weakref.ref(module)

    @functools.wraps(forward)
    def unsharded(*args: Any, **kwargs: Any) -> Any:
        zero, module = this(), hooked()
        if zero is None or module is None:
            return forward(*args, **kwargs)
        with zero.checkpointed(unit, module):
            return forward(*args, **kwargs)

    return unsharded


def _checkpointed(forward: Any, module: nn.Module, *, selective: bool) -> Any:
    contexts = {"context_fn": selective_contexts} if selective else {}

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and module.training):
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **contexts, **kwargs)

    return recomputed
