"""Giving values to a model that was built on `meta`, unit by unit, so that no rank ever holds the whole of it."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import nn


class Materializer:
    """Initialises modules that stand on `meta`, each from a seed of its own name, so that layouts do not change the
    values."""

    def __init__(self, model: nn.Module, *, device: torch.device, seed: int) -> None:
        self.model, self.device, self.seed = model, device, seed
        self._holders: dict[int, list[tuple[str, nn.Module, str]]] = defaultdict(list)
        for name, module in model.named_modules():
            for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                self._holders[id(parameter)].append((name, module, key))

    def parameters(self, named: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Real parameters in the place of those in `named` (full name → parameter on meta), initialised by their
        modules.

        1. Memory is allocated, and shared parameters stay shared.
        2. Every module that holds one of them resets its parameters, in the order of registration.
        Raises ValueError naming a module that cannot.
        """
        real: dict[str, nn.Parameter] = {}
        touched: dict[str, nn.Module] = {}
        for name, parameter in named.items():
            if not parameter.is_meta:
                real[name] = parameter
                continue
            value = nn.Parameter(torch.empty_like(parameter, device=self.device), parameter.requires_grad)
            for holder_name, holder, key in self._holders[id(parameter)]:
                setattr(holder, key, value)
                touched[holder_name] = holder
            real[name] = value
        self._reset(touched.items())
        return real

    def buffers(self) -> None:
        """Buffers that are left on meta: allocated, and filled by their modules."""
        touched: dict[str, nn.Module] = {}
        for name, module in self.model.named_modules():
            for key, buffer in list(module.named_buffers(recurse=False)):
                if buffer.is_meta:
                    persistent = key not in module._non_persistent_buffers_set
                    module.register_buffer(key, torch.empty_like(buffer, device=self.device), persistent=persistent)
                    if not any(True for _ in module.parameters(recurse=False)):
                        touched[name] = module
        self._reset(touched.items())

    def _reset(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        for name, module in modules:
            for key, buffer in list(module.named_buffers(recurse=False)):
                if buffer.is_meta:
                    persistent = key not in module._non_persistent_buffers_set
                    module.register_buffer(key, torch.empty_like(buffer, device=self.device), persistent=persistent)
            devices = [self.device] if self.device.type == "cuda" else []
            with torch.random.fork_rng(devices), torch.no_grad():
                torch.manual_seed(_seed_of(self.seed, name))
                self._initialiser(name, module)()

    def _initialiser(self, name: str, module: nn.Module) -> Callable[[], object]:
        own = next(
            (
                getattr(module, method)
                for method in ("reset_parameters", "_reset_parameters")
                if hasattr(module, method)
            ),
            None,
        )
        by_model = getattr(self.model, "_init_weights", None)  # The convention of Hugging Face models.
        if callable(by_model):
            # It has the last word, but it leaves alone what it does not know.
            return lambda: (own() if own is not None else None, by_model(module))
        if own is not None:
            return own
        raise ValueError(
            f"{name or 'the model'} ({type(module).__name__}) was built on meta and has no reset_parameters(); "
            "give it one, or build the model with its values"
        )


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "little")
