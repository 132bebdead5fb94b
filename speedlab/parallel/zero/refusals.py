"""What would train, or be read, wrongly without a word, and is refused where it is met."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

import torch
from torch import nn
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from speedlab.parallel.zero.flat import Flat
from speedlab.parallel.zero.slot import refuse_shape

_ONLY_IN_BACKWARD = (
    "where they are partitioned (ZeRO stage 3) or away from the device, only engine.backward brings them together "
    "again. Use a stage below 3 for such a loss, in place by engine.reshape(zero=2)"
)


def refuse_transforms(name: str) -> None:
    """Raises RuntimeError where tensors are now those of torch.func (grad, vmap, jvp, …) or of forward-mode
    differentiation, whose graphs no hook on an output sees. `name`: of the unit whose parameters come and go."""
    if peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        raise RuntimeError(
            f"{name}: a forward inside torch.func or forward-mode differentiation keeps graphs that nobody gathers its "
            f"parameters for; {_ONLY_IN_BACKWARD}"
        )


def refuse_gradient_elsewhere(name: str) -> NoReturn:
    """A graph of the unit `name` is gone through that would read what was released."""
    raise RuntimeError(
        f"{name}: a gradient was asked for outside engine.backward (by torch.autograd.grad, or by another engine), and "
        f"its parameters are not here; {_ONLY_IN_BACKWARD}. A loss through modules of two engines: one engine over a "
        "module that holds both"
    )


def refuse_loose_gradient(name: str) -> NoReturn:
    """The parameter `name` has a gradient that no `engine.backward` has asked for."""
    raise RuntimeError(
        f"{name} received a gradient outside engine.backward, which scales and sums them over the ranks; call "
        "engine.backward(loss) instead of loss.backward(). Where a loss goes through modules of two engines: to train "
        "both, set up one engine over a module that holds both; to train the other alone, call "
        "module.requires_grad_(False) on this one before its forward and (True) after the backward"
    )


def refuse_taken_gradient(name: str) -> NoReturn:
    """A hook that was there before `initialize` has cleared the gradient of the parameter `name`."""
    raise RuntimeError(
        f"{name}: a post-accumulate hook of before initialize has taken its gradient, so that the engine would never "
        "train it. Remove the hook; to update in backward, set optimizer.in_backward in the configuration"
    )


def refuse_state_dict() -> NoReturn:
    """The module's own is asked for, and parameters are not here."""
    raise RuntimeError(
        "module.state_dict(): the parameters are partitioned (ZeRO stage 3) or away from the device, so that they are "
        "not here; engine.state_dict() or engine.module_state_dict(), on all ranks, puts them together"
    )


def refuse_thawed(flats: Iterable[Flat]) -> None:
    """Raises RuntimeError for a parameter that shall be trained now and was frozen when its flat was made, and for one
    that has another shape than then."""
    with torch._C.DisableTorchFunctionSubclass():  # Released ones look at every question otherwise.
        for flat in flats:
            for slot, parameter in zip(flat.slots, flat.parameters, strict=True):
                if parameter.shape != slot.shape:
                    refuse_shape(slot.name, slot.shape, parameter.shape)
                if parameter.requires_grad and not flat.trainable:
                    raise RuntimeError(
                        f"{slot.name} was frozen at initialize and requires a gradient now, but has no place for one; "
                        "set requires_grad before, and call initialize again"
                    )


def refuse_other_parameters(module: nn.Module, flats: Iterable[Flat]) -> None:
    """Raises RuntimeError for a parameter to train that is in no flat. Walks through all modules."""
    known = {id(parameter) for flat in flats for parameter in flat.parameters}
    for name, parameter in module.named_parameters():
        if id(parameter) not in known and parameter.requires_grad:
            raise RuntimeError(
                f"{name} is another parameter than at initialize, or was added since, and would not be trained; write "
                "new values into the old one (parameter.copy_, or load_state_dict as it is), or call initialize again"
            )
