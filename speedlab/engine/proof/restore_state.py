"""Restore a training state after forwards and backwards: random streams, buffers, gradients, modes, the step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from speedlab.engine.rng import random_tensors, random_words, restore_random
from speedlab.engine.state import TrainingState
from speedlab.engine.train_step import StepState


@contextmanager
def left_as_it_was(state: TrainingState, step: StepState) -> Iterator[None]:
    """Undo what forwards and backwards inside change, except in parameters. Use this between two steps.

    Args:
        state: The training state.
        step: The step, reset afterwards.
    """
    device = state.world.device
    words, tensors = random_words(), random_tensors(device)
    has_gradients = torch.is_grad_enabled()
    modes = [(module, module.training) for part in state.modules for module in part.modules()]
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for part in state.modules
        for module in part.modules()
        for name, buffer in module._buffers.items()
        if isinstance(buffer, Tensor)
    ]
    # Training takes this number from its first step and rounds by it, so a trial must not set it.
    counted = state.counted_per_micro_batch
    before, step.only_looked_at = step.only_looked_at, True
    try:
        yield
        step.reset()
    except Exception:
        step.reset()  # Not after an interrupt, which must not wait for peers; `reconnect` resets the step then.
        raise
    finally:
        step.only_looked_at = before
        state.counted_per_micro_batch = counted
        for module, mode in modes:
            module.training = mode
        _restore(buffers)
        torch.set_grad_enabled(has_gradients)
        restore_random(words, tensors, device)


@torch.no_grad()
def _restore(buffers: list[tuple[nn.Module, str, Tensor, Tensor]]) -> None:
    for module, name, buffer, values in buffers:
        module._buffers[name] = buffer
        if not torch.equal(buffer, values):  # A needless write would change the version counter.
            buffer.copy_(values)
