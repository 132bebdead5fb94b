"""Frozen parameters that no flat can hold, because their class keeps values in tensors of its own or replaces them.

They stay whole on every rank, and nothing updates them. So they are at every ZeRO stage as in plain torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def stays_whole(parameter: Tensor) -> bool:
    """Return whether a parameter is of such a class.

    - A tensor subclass of several tensors, as torchao's quantised weights.
    - bitsandbytes' weights of 8 bits, which each forward puts in the place of `.data`; of 4 bits on a CPU, where a
      forward without gradients packs them.
    """
    kind = type(parameter)
    if is_traceable_wrapper_subclass(parameter):
        return not kind.__module__.startswith("torch.distributed.")  # A DTensor is a part of a plain one.
    if kind.__module__.partition(".")[0] != "bitsandbytes":
        return False
    return kind.__name__ == "Int8Params" or parameter.device.type == "cpu"


def tensors_inside(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the plain tensors that a parameter consists of, by names that begin with `name`."""
    if not is_traceable_wrapper_subclass(tensor):
        yield name, tensor.data if isinstance(tensor, nn.Parameter) else tensor
        return
    for inner in tensor.__tensor_flatten__()[0]:
        yield from tensors_inside(f"{name}.{inner}", getattr(tensor, inner))
