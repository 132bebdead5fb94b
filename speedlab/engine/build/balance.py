"""What blocks cost, measured: a pipeline is balanced by it where `parallel.balance` says so."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from speedlab.config import ModelConfig, PrecisionConfig
from speedlab.engine.build.own_kernels import OwnKernels
from speedlab.models import GPT

_REPEATS = 5


def measured_costs(
    model: nn.Module,
    *,
    micro_size: int,
    length: int,
    precision: PrecisionConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[list[float], float, float]:
    """Seconds of forward and backward of each block, of what stands before the blocks and of what follows them.

    The built-in GPT's blocks are alike, so that one is measured, with `micro_size` sequences of `length` tokens.
    Raises ValueError for other models: what their blocks take as arguments is not known.
    """
    if not isinstance(model, GPT):
        raise ValueError(
            f"parallel.balance 'time' measures the built-in GPT's blocks, and this is a {type(model).__name__}; "
            "use 'parameters', or give parallel.cut"
        )
    one = ModelConfig.model_validate({**model.config.model_dump(), "layers": 1})
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        sample = GPT(one).to(dtype)
        tokens = torch.zeros(micro_size, min(length, one.context), dtype=torch.int64)

    def predict() -> Tensor:
        loss = sample.output(x, tokens).loss
        assert loss is not None  # There are targets.
        return loss

    x = sample.embed(tokens).detach().requires_grad_()
    rotation = sample.rotation(x)
    kernels = OwnKernels([sample], precision, device, dtype)  # Those of the training.
    try:
        with kernels.under_way():
            block = _seconds(lambda: sample.blocks[0](x, rotation).sum(), device)
            first = _seconds(lambda: sample.embed(tokens).sum(), device)
            last = _seconds(predict, device)
    finally:
        kernels.undo()
    return [block] * model.config.layers, first, last


def _seconds(forward: Callable[[], Tensor], device: torch.device) -> float:
    """The least time of a forward and a backward."""
    best = float("inf")
    for _ in range(_REPEATS):
        _finish(device)
        started = time.perf_counter()
        forward().backward()
        _finish(device)
        best = min(best, time.perf_counter() - started)
    return best


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # Outside training: this is the measurement.
