"""Changes to a unit's forward, applied in one visible order: torch.compile inside, activation checkpointing around it,
and outermost where its inputs wait for backward.

Exchanges between ranks break a block's graph, and torch compiles nothing of a checkpoint whose inside breaks: so that
is around, and the forward that backward computes again is the compiled one.
"""

from __future__ import annotations

import copy
import functools
import shutil
import weakref
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from speedlab.config import ConfigError
from speedlab.engine.build.kept_inputs import KeptInputs
from speedlab.models.recomputation import selective_contexts
from speedlab.parallel.zero import Zero
from speedlab.parallel.zero.units import Unit


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
