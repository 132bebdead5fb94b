"""Compile the CPU kernels of a training run once for this machine: `python -m cuda_ops.warm`.

Whoever comes first compiles, under a lock; whoever comes meanwhile waits, and everybody after that finds the machine
code on disk.
"""

from __future__ import annotations

import fcntl
import sys
import time
from collections.abc import Callable

import torch

from cuda_ops import adamw, flags, grad_stats, linear_cross_entropy, reduce, sgd_momentum
from cuda_ops.compile import cache_folder

_STEPS: tuple[tuple[str, Callable[[torch.dtype], None]], ...] = (
    ("flags", flags.warm),
    ("reduce", reduce.warm),
    ("grad_stats", grad_stats.warm),
    ("adamw", adamw.warm),
    ("sgd_momentum", sgd_momentum.warm),
    ("linear_cross_entropy", linear_cross_entropy.warm),
)
"""What every run uses; other kernels are compiled by their first call."""

_DTYPES = (torch.float32, torch.bfloat16)

_SILENT_SECONDS = 1.0


def warm_up(progress: Callable[[str], None] | None = None) -> None:
    """Return when the kernels of a run in float32 and bfloat16 are compiled.

    `progress` gets a line for each kernel once it takes more than a second.
    """
    folder = cache_folder()
    done = folder / "warm"
    if done.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "warm.lock").open("w") as lock:
        began = time.monotonic()
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            _compile(began, progress)
            done.touch()


def _compile(began: float, progress: Callable[[str], None] | None) -> None:
    number, total = 0, len(_STEPS) * len(_DTYPES)
    for name, warm in _STEPS:
        for dtype in _DTYPES:
            number += 1
            if progress is not None and time.monotonic() - began > _SILENT_SECONDS:
                short = str(dtype).removeprefix("torch.")
                progress(f"compiling kernels for this machine, once: {number} of {total}, {name} {short}")
            warm(dtype)


if __name__ == "__main__":
    warm_up(lambda line: print(line, file=sys.stderr, flush=True))
