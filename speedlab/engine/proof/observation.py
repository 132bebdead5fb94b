"""Observation of a running step: dtypes, positions with a gradient, learning rates, gradients.

Hooks read values and store small tensors; they change nothing. A failure in a hook becomes a reason and never reaches
the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import speedlab.engine.proof.first_update as first_update
from speedlab.engine.state import TrainingState
from speedlab.engine.train_step import StepState
from speedlab.models.gpt import LMHead
from speedlab.optim.sharded_update import engine_hook


class Observation:
    """An observation of one step, or of one forward and backward. Call `start`, run the step, call `stop`."""

    def __init__(self, state: TrainingState, step: StepState) -> None:
        self._state, self._step = state, step
        self._hooks: list[Any] = []
        self.reason = ""
        """Why the head's gradient was not seen."""
        self.counted: Tensor | None = None
        """(B, T) bool: positions of the first micro-batch where the head's input has a gradient."""
        self.logits_dtype: str | None = None
        self.loss_dtype: str | None = None
        self.rates: dict[str, float] = {}
        """Learning rates in the update, by parameter; {} before one."""
        self.gradients: dict[str, tuple[bool, bool]] = {}
        """By parameter: (whether this rank's backward gave a gradient, whether the local sum is known to be 0)."""
        self.update = 0
        """Number of the observed update, from 1; 0 before one."""

    def start(self, *, passes: bool) -> None:
        """Install the hooks.

        Args:
            passes: Whether to observe forwards and backwards, too; otherwise only the update.
        """
        see_update = engine_hook(self._guarded(self._see_update))
        self._hooks.append(self._state.optimizer.register_step_pre_hook(see_update))
        if not passes:
            return
        for module in self._state.modules:
            self._hooks.append(module.register_forward_hook(self._guarded(self._see_output)))
        head, self.reason = _head(self._state.modules), "no output head was found"
        if head is not None:
            self.reason = "the output head was not called"
            self._hooks.append(head.register_forward_hook(self._guarded(self._see_head)))

    def stop(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def see_gradients(self) -> None:
        """Record gradients and the loss, before the step clears them."""
        optimizer = self._state.partitioned_optimizer
        for flat, gradient in zip(optimizer.flats, optimizer.gradients, strict=True):
            for name, (used, is_zero) in first_update.gradient_facts(flat, gradient).items():
                used_before, zero_before = self.gradients.get(name, (False, True))
                self.gradients[name] = used_before or used, zero_before and is_zero
        self.loss_dtype = self._step.loss_dtype or self.loss_dtype

    # ---- hooks -----------------------------------------------------------------------------------------------------

    def _guarded(self, hook: Callable[..., None]) -> Callable[..., None]:
        def guarded(*args: Any) -> None:
            try:
                hook(*args)
            except Exception as error:  # The step must continue; the proof reports the missing observation.
                self.reason = f"{type(error).__name__}: {error}"

        return guarded

    def _see_output(self, module: nn.Module, args: Any, output: Any) -> None:
        logits = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", None)
        if isinstance(logits, Tensor):
            self.logits_dtype = _name(logits.dtype)
        elif isinstance(output, Tensor) and output.dim() == 3 and output.is_floating_point():
            self.logits_dtype = _name(output.dtype)

    def _see_head(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(module, LMHead):
            self.logits_dtype = f"{_name(args[0].dtype)} in chunks" if module.chunked else "float32"
        elif isinstance(output, Tensor):
            self.logits_dtype = self.logits_dtype or _name(output.dtype)
        given = args[0] if args else None
        if self.counted is not None or not isinstance(given, Tensor) or not given.requires_grad:
            return
        self.reason = "no gradient came to the output head"

        def see(gradient: Tensor) -> None:
            if self.counted is None:
                # A position counts if any element of its gradient is nonzero.
                self.counted = (gradient.detach() != 0).any(dim=-1)
                self.reason = ""

        given.register_hook(self._guarded(see))

    def _see_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.update not in (0, self._state.global_step + 1):  # One update may take several optimizer steps.
            self.stop()
            return
        self.see_gradients()
        self.rates |= first_update.rates_of(self._state.flats, optimizer.param_groups)
        self.update = self._state.global_step + 1


def _head(modules: list[nn.Module]) -> nn.Module | None:
    """Return the module that computes logits from the last hidden states, on a rank that has it."""
    inside = [each for module in modules for each in module.modules()]
    for module in inside:
        if isinstance(module, LMHead):
            return module
    for module in inside:
        getter = getattr(module, "get_output_embeddings", None)
        if callable(getter):
            try:
                found = getter()
            except (AttributeError, NotImplementedError):
                continue
            if isinstance(found, nn.Module):
                return found
    # Without a known class: a Linear with one output per token.
    sizes = {module.num_embeddings for module in inside if isinstance(module, nn.Embedding)}
    heads = [module for module in inside if isinstance(module, nn.Linear) and module.out_features in sizes]
    if not heads and not sizes:  # The last pipeline stage has no embedding.
        widest = [module for module in inside if isinstance(module, nn.Linear)]
        heads = [max(widest, key=lambda module: module.out_features)] if widest else []
    return heads[-1] if heads else None


def token_embedding(modules: list[nn.Module]) -> str | None:
    """Return the weight name of the first embedding, which embeds tokens in all known models.

    Args:
        modules: The model parts of this rank.

    Returns:
        The name; None without an embedding on this rank.
    """
    for module in modules:
        for name, inside in module.named_modules():
            if isinstance(inside, nn.Embedding):
                return f"{name}.weight" if name else "weight"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
