"""A contest of training steps: each contestant stands ready in rank processes, and all take turns in one run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speedlab.calibrate.interleave import Times, take_turns
from speedlab.calibrate.rank_processes import RankSet

KEPT, AS_INSTALLED = "kept", "as installed"
"""What the C library does with the memory that a step frees: keeps it for the next step, as our engines ask it to, or
gives it back to the system, as plain processes of torch do. With the first, torch has float32 multiplied by oneDNN, as
our engines do where that is faster; with the second as it does of itself."""

ON_KERNELS = "on kernels"
"""Ends the name of a contestant of plain torch whose layers multiply, and whose attention is computed, as our engine's
are."""

COMPRESSED = "onebit_adam"
"""Begins the names of our engine's steps with signs of momenta in the place of gradients."""

BEFORE = "before "
"""Begins the names of contestants that another checkout of the project runs."""


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A step that waits in the processes of `ranks`: there `build(*arguments)` makes it. `build` is importable by
    name."""

    ranks: RankSet
    build: Callable[..., Callable[[], object]]
    arguments: tuple[Any, ...]


def hold(contestants: Mapping[str, Contestant], *, rounds: int, steps: int, label: str) -> Times:
    """Seconds of a step by contestant, one number for each round, in which each makes `steps` between two barriers."""
    for name, contestant in contestants.items():
        contestant.ranks.call(_prepare, name, contestant.build, *contestant.arguments)
    return take_turns(
        list(contestants),
        rounds,
        lambda name: contestants[name].ranks.call(_time, name, steps),
        after=lambda number: print(f"  {label}: round {number + 1} of {rounds}", file=sys.stderr, flush=True),
    )


def project_at(path: Path | None) -> Path | None:
    """The checkout of the project at `path`. Ends the program where there is none."""
    if path is None or (path / "speedlab" / "__init__.py").is_file():
        return path and path.resolve()
    print(f"--against {path}: no checkout of the project; there is no speedlab/__init__.py in it", file=sys.stderr)
    sys.exit(2)


# ---- in a rank process -----------------------------------------------------------------------------------------------


def let_onednn_multiply() -> None:
    """Give a process of plain torch the setting with which oneDNN multiplies float32, where our engine lets it."""
    import torch

    from cuda_ops import onednn_matmul

    if onednn_matmul.faster():
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined]  # torch makes it at run time


_ready: dict[str, Callable[[], object]] = {}


def _prepare(name: str, build: Callable[..., Callable[[], object]], *arguments: Any) -> None:
    """Build a contestant on this rank, and make two steps, which are not measured."""
    _ready[name] = build(*arguments)
    for _ in range(2):
        _ready[name]()


def _time(name: str, steps: int) -> float:
    """Seconds of a step, over `steps` of them between two barriers."""
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        _ready[name]()
    dist.barrier()
    return (time.perf_counter() - start) / steps
