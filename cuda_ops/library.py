"""Registration with `torch.library`: operations are `torch.ops.cuda_ops.<name>`, known to FakeTensor and
`torch.compile`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("cuda_ops", "DEF")  # Held: the operations live as long as this object.


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
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, cpu, "CPU")
    if cuda is not None:
        _library.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"cuda_ops::{name}", fake)
    return getattr(torch.ops.cuda_ops, name).default
