"""What would train wrongly without a word, and is refused where it is met."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from torch import nn
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from speedlab.parallel.zero.flat import Flat

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
        f"{name}: a gradient was asked for outside engine.backward (by torch.autograd.grad, say), and its parameters "
        f"are not here; {_ONLY_IN_BACKWARD}"
    )


def refuse_other_parameters(module: nn.Module, flats: Iterable[Flat]) -> None:
    """Raises RuntimeError for a parameter to train that is in no flat. Walks through all modules."""
    known = {id(parameter) for flat in flats for parameter in flat.parameters}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and id(parameter) not in known:
            raise RuntimeError(
                f"{name} is another parameter than at initialize, or was added since, and would not be trained; write "
                "new values into the old one (parameter.copy_, or load_state_dict as it is), or call initialize again"
            )
