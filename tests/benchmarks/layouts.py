"""`python -m tests.benchmarks step --layout`: a training step under tensor and pipeline parallelism, ours and torch's
own.

Both train the 17M-parameter GPT on the same collectives, with the same cut of its blocks, 1F1B, the same allocator
setting, and the same loss: torch's cross-entropy of the full logits, over parts of the vocabulary by `loss_parallel`
where these are cut. "shipped" is what a user of SpeedLab gets, whose loss is computed in chunks. The limit is as many
independent processes of plain torch, which share the same global batch out. Before anything is timed, the losses of
each are held against those of one process.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from speedlab.calibrate.interleave import Times
from speedlab.calibrate.rank_processes import KEPT_MEMORY, RankSet
from speedlab.layout import Layout
from tests.benchmarks.contest import BEFORE, Contestant, hold, let_onednn_multiply

LAYOUTS = {
    "tp2": Layout(tp=2),
    "pp2": Layout(pp=2),
    "pp2-tp2": Layout(pp=2, tp=2),
    "dp2-tp2": Layout(dp=2, tp=2),
    "pp2-dp2": Layout(pp=2, dp=2),
}

_CUTS = {1: (6,), 2: (5, 1)}
"""Blocks of each pipeline stage: the head multiplies as much as three and a half blocks."""

_PIPELINE_MICRO_BATCHES = 4


def tokens_of(name: str) -> int:
    """Tokens in a step under the layout `name`."""
    from tests.benchmarks.workload import MICRO_BATCH, SEQUENCE

    return LAYOUTS[name].data_size * _micro_batches(LAYOUTS[name]) * MICRO_BATCH * SEQUENCE


def peers_of(contestant: str) -> tuple[str, ...]:
    """Whom a contestant is shown beside; "" is nobody."""
    known = {"torch": ("limit",), "ours": (BEFORE + "ours", "torch"), "shipped": (BEFORE + "shipped", "torch")}
    return known.get(contestant, ("",))


def measure(name: str, *, dtype: str, backend: str, rounds: int, steps: int, against: Path | None = None) -> Times:
    """Seconds of a step by contestant, one number for each round. `against`: the checkout of "before".

    Raises RuntimeError when a contestant does not train as one process does.
    """
    from tests.benchmarks import ours
    from tests.benchmarks.layout_case import LayoutCase

    layout = LAYOUTS[name]
    size = layout.world_size
    with ExitStack() as stack:
        plain = stack.enter_context(RankSet(size, backend, environment=KEPT_MEMORY))
        own = {"": stack.enter_context(RankSet(size, backend))}
        if against is not None:
            own[BEFORE] = stack.enter_context(RankSet(size, backend, project=against))
        case = LayoutCase(
            sizes=layout.sizes,
            data_index=tuple(layout.data_index(rank) for rank in range(size)),
            cut=_CUTS[layout.pp],
            accumulation=_micro_batches(layout),
            dtype=dtype,
            expected=plain.call(_losses_of_one_process, name, dtype),
        )
        entered = {
            "limit": Contestant(ranks=plain, build=_build_limit, arguments=(name, dtype)),
            "torch": Contestant(ranks=plain, build=_build_torch, arguments=(name, case)),
        }
        for kind in ("ours", "shipped"):
            for version, ranks in own.items():
                entered[version + kind] = Contestant(ranks=ranks, build=ours.build_under, arguments=(kind, case))
        return hold(entered, rounds=rounds, steps=steps, label=name)


def _micro_batches(layout: Layout) -> int:
    return _PIPELINE_MICRO_BATCHES if layout.pp > 1 else 1


# ---- in a rank process -----------------------------------------------------------------------------------------------


def _plain_step(dtype: str) -> Callable[[Any], float | None]:
    import torch

    from tests.benchmarks import torch_layouts
    from tests.benchmarks.layout_case import OPTIMIZER
    from tests.benchmarks.workload import model_of

    let_onednn_multiply()
    return torch_layouts.make_plain_step(model_of("limit"), getattr(torch, dtype), OPTIMIZER)


def _losses_of_one_process(name: str, dtype: str) -> tuple[float, ...]:
    """Of the first steps of the plain loop on the whole global batch."""
    from tests.benchmarks.layout_case import STEPS_CHECKED, make_batches

    layout, step = LAYOUTS[name], _plain_step(dtype)
    count = _micro_batches(layout)
    whole = [batch for index in range(layout.data_size) for batch in make_batches(index, count)]
    return tuple(step(whole) or 0.0 for _ in range(STEPS_CHECKED))


def _build_limit(name: str, dtype: str) -> Callable[[], object]:
    """The plain loop on what one of as many independent processes gets of the global batch."""
    from tests.benchmarks.layout_case import make_batches
    from tests.benchmarks.workload import MICRO_BATCH

    layout, step = LAYOUTS[name], _plain_step(dtype)
    sequences = layout.data_size * _micro_batches(layout) * MICRO_BATCH // layout.world_size
    size = min(sequences, MICRO_BATCH)
    batches = make_batches(0, sequences // size, size)
    return lambda: step(batches)


def _build_torch(name: str, case: Any) -> Callable[[], object]:
    import torch

    from tests.benchmarks import torch_layouts
    from tests.benchmarks.layout_case import OPTIMIZER
    from tests.benchmarks.workload import model_of

    let_onednn_multiply()
    dtype = getattr(torch, case.dtype)
    step = torch_layouts.make_step(model_of("torch"), LAYOUTS[name], case.cut, dtype, OPTIMIZER)
    return case.checked("torch", step)
