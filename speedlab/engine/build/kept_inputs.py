"""Where the input of a block that is computed again waits for backward: on the device as it is, or

1. cut over the tensor ranks, which all have the same: each keeps its 1/tp, and before the block is computed again they
   gather it (Megatron-LM's distributed saved activations; the partitioned activations of arXiv:1910.02054, section
   6.1);
2. in the host's memory, what is left of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from speedlab.comm import Group
from speedlab.config import ConfigError, RunConfig
from speedlab.offload import Stores
from speedlab.parallel.mesh import Mesh

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

    def __init__(self, *, ranks: Group | None, stores: Stores | None) -> None:
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


def kept_inputs_of(config: RunConfig, mesh: Mesh, stores: Stores) -> KeptInputs | None:
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
