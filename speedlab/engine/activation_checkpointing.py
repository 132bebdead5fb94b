"""Where the input of a block that is computed again waits for backward: on the device as it is, or

1. cut over the tensor ranks, which all have the same: each keeps its 1/tp, and before the block is computed again they
   gather it (Megatron-LM's distributed saved activations; the partitioned activations of arXiv:1910.02054, section
   6.1);
2. in the host's memory, what is left of it.

Changes to a unit's forward, applied in one visible order: torch.compile inside, activation checkpointing around it,
and outermost where its inputs wait for backward.

Exchanges between ranks break a block's graph, and torch compiles nothing of a checkpoint whose inside breaks: so that
is around, and the forward that backward computes again is the compiled one.
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
"""By bytes."""


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """What a rank has of an input."""

    tensor: Tensor
    shape: torch.Size | None
    """Of the whole, where `tensor` is this rank's part of it."""
    device: torch.device


class KeptInputs:
    """How inputs of checkpointed blocks wait."""

    def __init__(self, *, ranks: Group | None, stores: StoreRegistry | None) -> None:
        """`ranks`: those over which they are cut; `stores`: of the host's memory; None where there is no such thing."""
        self._ranks, self._stores = ranks, stores
        self._compared: set[nn.Module] = set()

    def around(self, forward: Callable[..., Any], module: nn.Module, name: str) -> Callable[..., Any]:
        """`forward` of a checkpointed block, `name` in its model, whose positional arguments wait so.

        Raises ConfigError in the first forward where tensor ranks have different inputs, on all of them."""

        @functools.wraps(forward)
        def keeping(*args: Any, **kwargs: Any) -> Any:
            if not (torch.is_grad_enabled() and module.training):
                return forward(*args, **kwargs)
            given = [each for each in args if isinstance(each, Tensor)]
            # What needs no gradient all blocks are given, and somebody waits for that of a leaf: both stay as they are.
            streams = [each for each in given if each.requires_grad and not each.is_leaf]
            if self._ranks is not None and module not in self._compared:
                for each in streams:
                    _refuse_different(each, self._ranks, name)
                self._compared.add(module)
            known, cut = ({_place(each) for each in some} for some in (given, streams))
            # Of a compiled block other tensors come, too: parameters.
            leave = lambda saved: self._leave(saved, cut=_place(saved) in cut) if _place(saved) in known else saved  # noqa: E731  # one expression
            with saved_tensors_hooks(leave, self._come):
                return forward(*args, **kwargs)

        return keeping

    def _leave(self, saved: Tensor, *, cut: bool) -> Tensor | _Kept:
        kept, shape = saved.detach(), None
        if cut and self._ranks is not None and saved.numel() > 0:  # 1
            flat = kept.reshape(-1)
            width = -(-len(flat) // self._ranks.size)
            part = flat[width * self._ranks.index :][:width]
            # A copy: the whole is to go.
            kept, shape = F.pad(part, (0, width - len(part))) if len(part) < width else part.clone(), saved.shape
        if self._stores is not None and saved.device.type == "cuda" and kept.numel() > 0:  # 2
            # Copies run on a stream of their own, in order, so that neither the host nor what the device computes waits
            # for the way there.
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
            assert self._stores is not None  # It is there.
            here = torch.empty(packed.tensor.shape, dtype=packed.tensor.dtype, device=packed.device)
            self._stores.copies.to_device(packed.tensor, here).wait()
        if packed.shape is None:
            return here
        assert self._ranks is not None  # They cut it.
        return self._ranks.gather_along(here, 0)[: packed.shape.numel()].view(packed.shape)


def kept_inputs_of(config: RunConfig, mesh: Mesh, stores: StoreRegistry) -> KeptInputs | None:
    """How inputs of checkpointed blocks wait under this configuration; None where they stay as they are."""
    # Under sequence parallelism each tensor rank has its own tokens of them.
    cut = config.activation.partition_inputs and mesh.layout.tp > 1 and not config.parallel.sequence
    away = config.offload.activations == "host"
    if not (cut or away):
        return None
    return KeptInputs(ranks=mesh["tp"] if cut else None, stores=stores if away else None)


def _place(tensor: Tensor) -> tuple[int, torch.Size]:
    return tensor.untyped_storage()._cdata, tensor.shape


def _refuse_different(x: Tensor, ranks: Group, name: str) -> None:
    """Raise ConfigError unless all `ranks` have the same bits."""
    if isinstance(x, FakeTensor) or x.element_size() not in _INTEGERS:
        return
    bits = x.detach().contiguous().view(_INTEGERS[x.element_size()]).sum(dtype=torch.int64)
    every = ranks.gather_along(bits[None], 0)
    if bool((every != bits).any()):  # The host waits for the device, once.
        raise ConfigError(
            f"activation.partition_inputs: the input of {name} is not the same on all {ranks.size} tensor ranks, so "
            "that no rank's part of it would be the others'; give units that are whole blocks, or set "
            "activation.partition_inputs to false"
        )


class BlockWrapper:
    """Keeps the forwards it replaced, so that `undo` gives the user's module back as it was."""

    def __init__(
        self,
        zeros: Sequence[Zero],
        *,
        checkpointing: Literal["none", "selective", "block"],
        compile: bool,
        device: torch.device,
        inputs: KeptInputs | None = None,
    ) -> None:
        """`inputs`: how the inputs of checkpointed blocks wait for backward; None leaves them as they are."""
        self._originals: list[tuple[nn.Module, Any]] = []
        if compile and device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
            raise ConfigError(
                "compile: torch.compile needs a C++ compiler on CPUs and none is installed; install g++ or set "
                "compile: false"
            )
        self._caching: list[Any] = []
        """Configurations of Hugging Face's models whose cache was taken off."""
        if checkpointing == "none" and not compile:
            return
        if (
            checkpointing != "none"
        ):  # What a block adds to a cache in its forward, it would add again when it is recomputed.
            configs = {id(c): c for zero in zeros if (c := getattr(zero.module, "config", None)) is not None}
            self._caching = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
            for config in self._caching:
                config.use_cache = False
        names = {module: name for zero in zeros for name, module in zero.module.named_modules()}
        blocks = [(zero, unit, module) for zero in zeros for unit in zero.units[1:] for module in unit.modules]
        for zero, unit, module in blocks:
            forward = module.forward
            if compile:
                # Drawn by torch's generator, what is dropped depends on no layout.
                forward = torch.compile(forward, options={"fallback_random": True})
            if checkpointing != "none":
                again = _unsharded(forward, module, zero, unit)
                forward = _checkpointed(again, module, selective=checkpointing == "selective")
            if checkpointing != "none" and inputs is not None:
                forward = inputs.around(forward, module, names[module])
            self._originals.append((module, module.__dict__.get("forward")))
            # Hooks stay outside, so a recomputation does not gather or release.
            module.forward = _Replaced(module, forward)

    def undo(self) -> None:
        for module, own in self._originals:
            del module.forward  # The class's method shows again, unless the module had one of its own.
            if own is not None:
                module.forward = own
        self._originals.clear()
        for config in self._caching:
            config.use_cache = True
        self._caching.clear()


class _Replaced:
    """What a module has in place of its forward. Its copies have their own, as if nothing had been replaced."""

    def __init__(self, module: nn.Module, forward: Any) -> None:
        functools.update_wrapper(self, forward)  # First: it takes over what `forward` has of its own.
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
    """That of its class, where it has none of its `own`."""
    return type(module).forward.__get__(module) if own is None else own


def _unsharded(forward: Any, module: nn.Module, zero: Zero, unit: Unit) -> Any:
    """`forward` of the unit's `module`, which a backward can also enter through a side output."""
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
