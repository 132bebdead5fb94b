"""Changes to a unit's forward, applied in one visible order: activation checkpointing inside, torch.compile around
it."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from speedlab.config import ConfigError
from speedlab.models.recomputation import selective_contexts
from speedlab.offload import Stores
from speedlab.parallel.zero import Zero


class BlockWrapper:
    """Keeps the forwards it replaced, so that `undo` gives the user's module back as it was."""

    def __init__(
        self,
        zeros: Sequence[Zero],
        *,
        checkpointing: Literal["none", "selective", "block"],
        compile: bool,
        device: torch.device,
        waiting: Stores | None = None,
    ) -> None:
        """`waiting`: where the inputs of checkpointed blocks wait for backward; None leaves them on the device."""
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
        for module in (module for zero in zeros for unit in zero.units[1:] for module in unit.modules):
            forward = module.forward
            if checkpointing != "none":
                forward = _checkpointed(forward, module, waiting, selective=checkpointing == "selective")
            if compile:
                forward = torch.compile(forward)
            self._originals.append((module, module.__dict__.get("forward")))
            module.forward = forward  # Hooks stay outside, so a recomputation does not gather or release.

    def undo(self) -> None:
        for module, own in self._originals:
            del module.forward  # The class's method shows again, unless the module had one of its own.
            if own is not None:
                module.forward = own
        self._originals.clear()
        for config in self._caching:
            config.use_cache = True
        self._caching.clear()


def _checkpointed(forward: Any, module: nn.Module, waiting: Stores | None, *, selective: bool) -> Any:
    contexts = {"context_fn": selective_contexts} if selective else {}

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and module.training):
            return forward(*args, **kwargs)
        with nullcontext() if waiting is None else _inputs_on_host(waiting):
            return checkpoint(forward, *args, use_reentrant=False, **contexts, **kwargs)

    return recomputed


def _inputs_on_host(stores: Stores) -> AbstractContextManager[object]:
    """What a checkpoint saves inside, its inputs, waits in pinned memory of the host. Copies run on a stream of their
    own, in order, so that neither the host nor what the device computes waits for the way there."""

    def leave(saved: Tensor) -> Tensor | tuple[Tensor, torch.device]:
        if saved.device.type != "cuda" or saved.numel() == 0:
            return saved
        source = saved.detach().contiguous()
        kept = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        stores.hold(stores.copies.to_host(source, kept))
        return kept, saved.device

    def come(packed: Tensor | tuple[Tensor, torch.device]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        kept, device = packed
        made = torch.empty(kept.shape, dtype=kept.dtype, device=device)
        stores.copies.to_device(kept, made).wait()
        return made

    return saved_tensors_hooks(leave, come)
