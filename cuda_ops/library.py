"""Register operations with `torch.library` as `torch.ops.cuda_ops.<name>`, for FakeTensor and `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_libraries: dict[str, torch.library.Library] = {}
"""One library per operation. Kept alive, because an operation lives only as long as its library."""


def register(
    schema: str,
    *,
    cpu: Callable[..., Any],
    cuda: Callable[..., Any] | None = None,
    fake: Callable[..., Any],
) -> Callable[..., Any]:
    """Define an operation and return it.

    Args:
        schema: For example "name(Tensor x) -> Tensor". Mark an argument that is written to: `Tensor(a!) x`.
        cpu: Implementation for CPUs.
        cuda: Implementation for CUDA devices, if any.
        fake: Returns outputs of the right shape and dtype without values; checks its arguments like the others.
    """
    name = schema.partition("(")[0]
    if name in _libraries:
        # A KeyboardInterrupt has stopped the import of the operation's module, which is now imported again.
        _libraries.pop(name)._destroy()
    library = _libraries[name] = torch.library.Library("cuda_ops", "FRAGMENT")
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, cpu, "CPU")
    if cuda is not None:
        library.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"cuda_ops::{name}", fake, lib=library)
    return getattr(torch.ops.cuda_ops, name).default


def register_autograd(name: str, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
    """Make a registered operation differentiable, as `torch.library.register_autograd` does.

    Args:
        name: Name of the operation.
        backward: Returns the gradients of the inputs.
        setup_context: Saves what `backward` needs.
    """
    torch.library.register_autograd(f"cuda_ops::{name}", backward, setup_context=setup_context, lib=_libraries[name])
