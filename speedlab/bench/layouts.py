"""`speedlab bench step --layout`: a training step under tensor and pipeline parallelism, ours and torch's own.

Both train the 17M-parameter GPT on the same collectives, with the same cut of its blocks, 1F1B, and the full logits
with torch's cross-entropy; "shipped" is what a user of SpeedLab gets, whose loss is computed in chunks. The limit is as
many independent processes of plain torch, which share the same global batch out. Before anything is timed, the losses
of each are held against those of one process.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from speedlab.bench.interleave import Times
from speedlab.bench.ranks import RankSet
from speedlab.layout import Layout

LAYOUTS = {
    "tp2": Layout(tp=2),
    "pp2": Layout(pp=2),
    "pp2-tp2": Layout(pp=2, tp=2),
    "dp2-tp2": Layout(dp=2, tp=2),
    "pp2-dp2": Layout(pp=2, dp=2),
}

CONTESTANTS = ("limit", "torch", "ours", "shipped")

_CUTS = {1: (6,), 2: (5, 1)}
"""Blocks of each pipeline stage: the head multiplies as much as three and a half blocks."""

_MICRO_BATCH, _SEQUENCE = 4, 128
_PIPELINE_MICRO_BATCHES = 4
_STEPS_CHECKED = 2
_TOLERANCE = {"float32": 2e-3, "bfloat16": 5e-2}
_OPTIMIZER = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.0}


def tokens_of(name: str) -> int:
    """Tokens in a step under the layout `name`."""
    return LAYOUTS[name].data_size * _micro_batches(LAYOUTS[name]) * _MICRO_BATCH * _SEQUENCE


def measure(name: str, *, dtype: str, backend: str, rounds: int, steps: int) -> Times:
    """Seconds of a step by contestant, one number for each round.

    Ours run in processes of their own: `initialize` sets the allocator, which must not help the others. Raises
    RuntimeError when a contestant does not train as one process does.
    """
    layout = LAYOUTS[name]
    with RankSet(layout.world_size, backend) as plain, RankSet(layout.world_size, backend) as own:
        place = {contestant: own if contestant in ("ours", "shipped") else plain for contestant in CONTESTANTS}
        for contestant in CONTESTANTS:
            place[contestant].call(_prepare, contestant, name, dtype)
        seconds: Times = {contestant: [] for contestant in CONTESTANTS}
        for number in range(rounds):
            turn = number % len(CONTESTANTS)
            for contestant in CONTESTANTS[turn:] + CONTESTANTS[:turn]:
                seconds[contestant].append(place[contestant].call(_time, contestant, steps))
            print(f"  {name}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return seconds


def _micro_batches(layout: Layout) -> int:
    return _PIPELINE_MICRO_BATCHES if layout.pp > 1 else 1


# ---- in a rank process -----------------------------------------------------------------------------------------------

_prepared: dict[str, Callable[[], object]] = {}
"""The contestants that stand ready, each as its step on this rank's batches."""


def _prepare(contestant: str, name: str, dtype: str) -> None:
    """Build a contestant on this rank, and see that it trains as one process does."""
    import torch.distributed as dist

    layout = LAYOUTS[name]
    step = _make(contestant, layout, dtype)
    if contestant == "limit":
        batches = _share_of_a_rank(layout)
    else:
        batches = _batches(layout.data_index(dist.get_rank()), _micro_batches(layout))
        _check_losses(f"{contestant} under {layout}", step, batches, layout, dtype)
    _prepared[contestant] = lambda: step(batches)
    for _ in range(2):
        _prepared[contestant]()


def _make(contestant: str, layout: Layout, dtype: str) -> Callable[[Any], float | None]:
    import torch

    from speedlab.bench import torch_layouts
    from speedlab.bench.contestants import MODEL, SHIPPED
    from speedlab.models import GPT

    torch.manual_seed(0)
    model = GPT(SHIPPED if contestant == "shipped" else MODEL)
    compute = getattr(torch, dtype)
    if contestant == "limit":
        return torch_layouts.make_plain_step(model, compute, _OPTIMIZER)
    if contestant == "torch":
        return torch_layouts.make_step(model, layout, _CUTS[layout.pp], compute, _OPTIMIZER)
    return _ours(model, layout, dtype)


def _ours(model: Any, layout: Layout, dtype: str) -> Callable[[Any], float | None]:
    import torch

    from speedlab.config import RunConfig
    from speedlab.engine import initialize

    cut = {"cut": _CUTS[layout.pp]} if layout.pp > 1 else {}
    config = RunConfig(
        model=model.config.model_dump(),
        data={"sequence_length": _SEQUENCE},
        parallel={"dp": layout.dp, "tp": layout.tp, "pp": layout.pp, **cut},
        zero=2,
        precision=dtype,
        batch={"micro_size": _MICRO_BATCH, "accumulation": _micro_batches(layout)},
        clip_norm=None,
        optimizer=_OPTIMIZER,
    )
    engine, *_ = initialize(model=model, optimizer=torch.optim.AdamW, config=config)
    return engine.train_batch


def _batches(index: int, count: int, size: int = _MICRO_BATCH) -> list[Any]:
    """`count` micro-batches of `size` sequences for the data-parallel rank `index`."""
    import torch

    from speedlab.bench.contestants import MODEL

    generator = torch.Generator().manual_seed(index)
    shape = (2, size, _SEQUENCE)
    return [tuple(torch.randint(0, MODEL.vocab_size, shape, generator=generator)) for _ in range(count)]


def _share_of_a_rank(layout: Layout) -> list[Any]:
    """What one of as many independent processes gets of the global batch."""
    sequences = layout.data_size * _micro_batches(layout) * _MICRO_BATCH // layout.world_size
    size = min(sequences, _MICRO_BATCH)
    return _batches(0, sequences // size, size)


def _check_losses(
    who: str, step: Callable[[Any], float | None], batches: list[Any], layout: Layout, dtype: str
) -> None:
    """Raise RuntimeError unless the first steps have the losses of the plain loop on the whole global batch."""
    import torch
    import torch.distributed as dist

    found = []
    for _ in range(_STEPS_CHECKED):
        loss = step(batches)
        known = torch.tensor([loss or 0.0, float(loss is not None)], dtype=torch.float64)
        dist.all_reduce(known)
        found.append(float(known[0] / known[1]))
    if dist.get_rank() > 0:
        return
    plain = _make("limit", layout, dtype)
    whole = [batch for index in range(layout.data_size) for batch in _batches(index, len(batches))]
    expected = [plain(whole) or 0.0 for _ in range(_STEPS_CHECKED)]
    if any(abs(a - b) > _TOLERANCE[dtype] for a, b in zip(found, expected, strict=True)):
        raise RuntimeError(f"{who}: losses {found}, but one process has {expected}")


def _time(contestant: str, steps: int) -> float:
    """Seconds of a step, over `steps` of them between two barriers."""
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        _prepared[contestant]()
    dist.barrier()
    return (time.perf_counter() - start) / steps
