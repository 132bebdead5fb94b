"""What the GPU tests train: the cases of `ranks.loops` with their modules and batches on this process's GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from ranks import models
from ranks.loops import Case, Tolerance
from torch import Tensor, nn

# Sums are taken in another order than by the plain loop, 2^-24 each, and reductions inside kernels in blocks. Matrix
# products are of float32 (torch leaves TF32 off). In bfloat16 the order of a sum may decide a rounding (2^-9).
FLOAT32 = Tolerance(loss=1e-5, norm=1e-5, update=1e-3)
BFLOAT16 = Tolerance(loss=1e-3, norm=5e-3, update=0.05)


def transformer() -> nn.Module:
    return models.transformer().cuda()


def rounded_transformer() -> nn.Module:
    return models.rounded_transformer().cuda()


def tokens(step: int, index: int) -> tuple[Tensor, ...]:
    return tuple(part.cuda() for part in models.tokens(step, index))


def gpu_case(**changes: Any) -> Case:
    """A training of ten steps, on the GPU for the engine and for the plain loop."""
    low = changes.get("dtype", "float32") != "float32"
    build = rounded_transformer if low else transformer
    return Case(**{"build": build, "batch": tokens, "clip_norm": 0.3, "whole": not low, **changes})


@contextmanager
def waits_are_errors() -> Iterator[None]:
    """Inside, torch raises where the host would wait for the device to copy something or to know a size."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Allowed:
    """Lets the host read one tensor of the GPU, and counts how often: what is summed over all ranks in a step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        tolist = Tensor.tolist

        def look(tensor: Tensor) -> Any:
            if not tensor.is_cuda:
                return tolist(tensor)
            self.count += 1
            torch.cuda.set_sync_debug_mode("default")
            try:
                return tolist(tensor)
            finally:
                torch.cuda.set_sync_debug_mode("error")

        monkeypatch.setattr(Tensor, "tolist", look)
