"""Compile the CPU kernels of a training run once for this machine: `python -m cuda_ops.warm`.

Whoever comes first compiles, under a lock; whoever comes meanwhile waits, and everybody after that finds the machine
code on disk.
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
"""What every run uses. Other kernels are compiled by their first call, or ahead by whoever knows that a run needs them:
`COMPACT`, `SPARSE`, `SIGNS`, `LAYERWISE`."""

COMPACT: Steps = (blockwise8.warm, stochastic.warm)
"""What a run with 8-bit moments or without float32 masters uses beside that."""

SPARSE: Steps = (block_sparse_attention.warm,)
"""What a run with block-sparse attention, or separate documents, uses beside that; and dense attention on some CPUs."""

SIGNS: Steps = (onebit.warm, onebit.warm_take, adam_frozen_variance.warm)
"""What a run that sends signs uses beside that."""

LAYERWISE: Steps = (lamb.warm, adam_frozen_variance.warm)
"""What a run of LAMB uses beside that."""

_SILENT_SECONDS = 1.0


def warm_up(
    progress: Callable[[str], None] | None = None,
    steps: Steps = EVERY_RUN,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16),
) -> None:
    """Return when the kernels of `steps` are compiled for `dtypes`.

    `progress` gets a line once it has taken more than a second, and one at the end.
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
            with torch.inference_mode(False), torch.enable_grad():  # Some kernels are found by a backward pass.
                _compile(progress or (lambda line: None), steps, dtypes)
            done.touch()


def _compile(progress: Callable[[str], None], steps: Steps, dtypes: tuple[torch.dtype, ...]) -> None:
    began, told = time.monotonic(), False
    for number, (warm, dtype) in enumerate(itertools.product(steps, dtypes)):
        took = time.monotonic() - began
        if not told and took > _SILENT_SECONDS:
            total = len(steps) * len(dtypes)
            progress(f"compiling {total} kernels for this machine, once; about {took * total / number:.0f} s")
            told = True
        warm(dtype)
    if told:
        progress(f"kernels are compiled ({time.monotonic() - began:.0f} s)")


if __name__ == "__main__":
    warm_up(lambda line: print(line, file=sys.stderr, flush=True))
