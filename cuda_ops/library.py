"""Registration with `torch.library`: operations are `torch.ops.cuda_ops.<name>`, known to FakeTensor and
`torch.compile`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_libraries: dict[str, torch.library.Library] = {}
"""One for each operation, held: an operation lives as long as its library."""


def register(
    schema: str,
    *,
    cpu: Callable[..., Any],
    cuda: Callable[..., Any] | None = None,
    fake: Callable[..., Any],
) -> Callable[..., Any]:
    """Define the operation `schema` ("name(Tensor x) -> Tensor") and return it.

    `fake` makes outputs of the right shape and dtype without values; it checks its arguments as the others do. An
    argument that is written to is marked in the schema: `Tensor(a!) x`.
    """
    name = schema.partition("(")[0]
    if name in _libraries:
        # A KeyboardInterrupt broke off the import of an operation's module, which is now imported once more.
        _libraries.pop(name)._destroy()
    library = _libraries[name] = torch.library.Library("cuda_ops", "FRAGMENT")
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, cpu, "CPU")
    if cuda is not None:
        library.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"cuda_ops::{name}", fake, lib=library)
    return getattr(torch.ops.cuda_ops, name).default


def register_autograd(name: str, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
    """Make the registered operation `name` differentiable; as `torch.library.register_autograd`."""
    torch.library.register_autograd(f"cuda_ops::{name}", backward, setup_context=setup_context, lib=_libraries[name])
