"""Compile the CPU kernels of a training run once for this machine: `python -m cuda_ops.warm`.

The first process compiles and holds a lock. Other processes wait for the lock. Later processes find the machine code
on disk.
"""

from __future__ import annotations

import fcntl
import itertools
import sys
import time
from collections.abc import Callable

import torch

from cuda_ops import (
    adam_frozen_variance,
    adamw,
    block_sparse_attention,
    blockwise8,
    grad_stats,
    lamb,
    linear_cross_entropy,
    onebit,
    reduce,
    sgd_momentum,
    shared_flags,
    stochastic,
)
from cuda_ops.compile import cache_folder

Steps = tuple[Callable[[torch.dtype], None], ...]

EVERY_RUN: Steps = (
    shared_flags.warm,
    reduce.warm,
    grad_stats.warm,
    adamw.warm,
    sgd_momentum.warm,
    linear_cross_entropy.warm,
)
"""Kernels of every run. The first call of another kernel compiles it, unless a caller compiles `COMPACT`, `SPARSE`,
`SIGNS` or `LAYERWISE` ahead.
"""

COMPACT: Steps = (blockwise8.warm, stochastic.warm)
"""Additional kernels of a run with 8-bit moments or without float32 master weights."""

SPARSE: Steps = (block_sparse_attention.warm,)
"""Additional kernels of a run with block-sparse attention or separate documents; on some CPUs also of dense
attention.
"""

SIGNS: Steps = (onebit.warm, onebit.warm_take, adam_frozen_variance.warm)
"""Additional kernels of a run that sends signs (1-bit optimizers)."""

LAYERWISE: Steps = (lamb.warm, adam_frozen_variance.warm)
"""Additional kernels of a run with LAMB."""

_SILENT_SECONDS = 1.0


def warm_up(
    progress: Callable[[str], None] | None = None,
    steps: Steps = EVERY_RUN,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16),
) -> None:
    """Compile the kernels of `steps`, or wait until another process has done so.

    Args:
        progress: Called with a line of text after the first second, and with one at the end.
        steps: Functions that compile kernels for a dtype.
        dtypes: The dtypes to compile for.
    """
    folder = cache_folder()
    names = [step.__module__ for step in steps if step not in EVERY_RUN]
    done = folder / "-".join(["warm", *names, *(str(dtype).removeprefix("torch.") for dtype in dtypes)])
    if done.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "warm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            with torch.inference_mode(False), torch.enable_grad():  # Some kernels are compiled by a backward pass.
                _compile(progress or (lambda line: None), steps, dtypes)
            done.touch()


def _compile(progress: Callable[[str], None], steps: Steps, dtypes: tuple[torch.dtype, ...]) -> None:
    began, reported = time.monotonic(), False
    for number, (warm, dtype) in enumerate(itertools.product(steps, dtypes)):
        took = time.monotonic() - began
        if not reported and took > _SILENT_SECONDS:
            total = len(steps) * len(dtypes)
            progress(f"compiling {total} kernels for this machine, once; about {took * total / number:.0f} s")
            reported = True
        warm(dtype)
    if reported:
        progress(f"kernels are compiled ({time.monotonic() - began:.0f} s)")


if __name__ == "__main__":
    warm_up(lambda line: print(line, file=sys.stderr, flush=True))
