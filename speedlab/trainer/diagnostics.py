"""Two diagnostics of a run: the matmul speed of this device, and the first module with a non-finite output."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from cuda_ops import onednn_matmul
from speedlab.engine.engine import Engine
from speedlab.parallel.zero import tensors_of

_MEASURE_SECONDS = 0.1


def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Measure a large square matmul; the result is the peak to which a run's speed is compared.

    Args:
        device: CUDA (4096 x 4096) or CPU (512 x 512).
        dtype: Type of the matrices.

    Returns:
        Floating-point operations per second of the fastest repetition.
    """
    size = 4096 if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    # Warm up.
    for _ in range(3):
        onednn_matmul.mm(a, b, out)
    best, started = float("inf"), time.perf_counter()
    while time.perf_counter() - started < _MEASURE_SECONDS:
        best = min(best, _time_matmuls(a, b, out))
    # A product of two n × n matrices has 2 n³ floating-point operations.
    return 2 * size**3 / best


def _time_matmuls(a: Tensor, b: Tensor, out: Tensor, count: int = 4) -> float:
    """Return the mean seconds of one matmul out of `count` in a row."""
    if a.is_cuda:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        for _ in range(count):
            onednn_matmul.mm(a, b, out)
        after.record()
        after.synchronize()  # This sync is part of the measurement and runs outside of training steps.
        return before.elapsed_time(after) / 1e3 / count
    start = time.perf_counter()
    for _ in range(count):
        onednn_matmul.mm(a, b, out)
    return (time.perf_counter() - start) / count


@torch.no_grad()
def first_non_finite(engine: Engine, batches: Iterable[tuple[Tensor, ...]]) -> str | None:
    """Run the forward passes of the given micro-batches again and find the first non-finite output. Collective.

    Args:
        engine: Engine whose modules are hooked.
        batches: Micro-batches of this rank.

    Returns:
        Name of the first module on this rank with a non-finite output, or None.
    """
    found: list[str] = []
    named = [(name, module) for part in engine.modules for name, module in part.named_modules()]
    names = {id(module): name or type(module).__name__ for name, module in named}

    def look(module: nn.Module, args: object, output: object) -> None:
        if not found and any(t.is_floating_point() and not bool(torch.isfinite(t).all()) for t in tensors_of(output)):
            found.append(names[id(module)])

    hooks = [module.register_forward_hook(look) for _, module in named]
    try:
        # evaluate runs forward passes without gradients.
        engine.evaluate(batches)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None
