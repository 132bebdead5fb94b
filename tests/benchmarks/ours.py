"""Our own training steps in `bench step`: the same code runs this checkout's engine and that of another one, so it uses
nothing of the project but public names."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

import speedlab
from tests.benchmarks.contest import COMPRESSED, let_onednn_multiply
from tests.benchmarks.cut_loss import loss_of_head
from tests.benchmarks.layout_case import OPTIMIZER, LayoutCase
from tests.benchmarks.workload import LEARNING_RATE, MICRO_BATCH, SEQUENCE, batch, model_of

_HARDLY = 1e-8
"""A rate at which parameters hardly move: over the variance of one step a training would diverge while it is timed."""


def build(name: str, dtype: str) -> Callable[[], object]:
    """The step of "ours 2" or "shipped 2" (the ZeRO stage), or of "onebit_adam 1", compressed, on this rank."""
    kind, stage = name.split()
    optimizer: dict[str, Any] = {"lr": LEARNING_RATE}
    if kind == COMPRESSED:  # The first step, which nobody measures, is its whole warm-up.
        optimizer |= {"name": kind, "freeze_step": 1, "lr": _HARDLY}
    config = speedlab.RunConfig(
        zero=int(stage),
        precision=dtype,
        batch={"micro_size": MICRO_BATCH},
        clip_norm=None,
        optimizer=optimizer,
    )
    chosen = None if kind == COMPRESSED else torch.optim.AdamW
    engine: Any = speedlab.initialize(model=model_of(kind), optimizer=chosen, config=config)[0]
    tokens, targets = batch()

    def step() -> None:
        engine.backward(engine(tokens, targets).loss)
        engine.step()

    return step


def build_under(kind: str, case: LayoutCase) -> Callable[[], object]:
    """The step of "ours" or "shipped" under a layout."""
    model = model_of(kind)
    cut = {"cut": case.cut} if len(case.cut) > 1 else {}
    config = speedlab.RunConfig(
        model=model.config.model_dump(),
        data={"sequence_length": SEQUENCE},
        parallel={axis: case.sizes[axis] for axis in ("dp", "tp", "pp")} | cut,
        zero=2,
        precision=case.dtype,
        batch={"micro_size": MICRO_BATCH, "accumulation": case.accumulation},
        clip_norm=None,
        optimizer=OPTIMIZER,
    )
    engine: Any = speedlab.initialize(model=model, optimizer=torch.optim.AdamW, config=config)[0]
    step: Callable[[Any], float] = engine.train_batch
    if kind == "ours" and case.sizes["tp"] > 1:
        # Cut layers come with the chunked loss; here both sides shall compute the same one. Its head is no layer: it
        # has torch's setting, as on the other side.
        if find_spec("cuda_ops.onednn_matmul") is not None:  # Another checkout may have none.
            let_onednn_multiply()
        mesh = init_device_mesh("cpu", tuple(case.sizes.values()), mesh_dim_names=tuple(case.sizes))
        engine.module.prediction.loss = loss_of_head(mesh["tp"])
        step = loss_parallel()(step)
    return case.checked(kind, step)
