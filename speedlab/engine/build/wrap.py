"""Changes to a unit's forward, applied in one visible order: activation checkpointing inside, torch.compile around
it."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from speedlab.config import ConfigError
from speedlab.parallel.zero import Zero


class BlockWrapper:
    """Keeps the forwards it replaced, so that `undo` gives the user's module back as it was."""

    def __init__(self, zeros: Sequence[Zero], *, checkpointing: bool, compile: bool, device: torch.device) -> None:
        self._originals: list[tuple[nn.Module, Any]] = []
        if compile and device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
            raise ConfigError(
                "compile: torch.compile needs a C++ compiler on CPUs and none is installed; install g++ or set "
                "compile: false"
            )
        self._caching: list[Any] = []
        """Configurations of Hugging Face's models whose cache was taken off."""
        if not (checkpointing or compile):
            return
        if checkpointing:  # What a block adds to a cache in its forward, it would add again when it is recomputed.
            configs = {id(c): c for zero in zeros if (c := getattr(zero.module, "config", None)) is not None}
            self._caching = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
            for config in self._caching:
                config.use_cache = False
        for module in (module for zero in zeros for unit in zero.units[1:] for module in unit.modules):
            forward = module.forward
            if checkpointing:
                forward = _checkpointed(forward, module)
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


def _checkpointed(forward: Any, module: nn.Module) -> Any:
    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and module.training):
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return recomputed
