"""Functions that torch.compile leaves as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def uncompiled(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """As `torch.compiler.disable`, which would import torch's compiler at once: a third of what an engine's start
    computes. With this one it comes with the first call, as for torch's own functions."""
    return torch._disable_dynamo(function)
