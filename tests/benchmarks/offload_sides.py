"""The sides of `python -m tests.benchmarks offload`, each in a rank process of its own: one training at a time, a step
a call."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

_VOCABULARY = 512


@dataclass(frozen=True)
class Case:
    """What all sides train."""

    layers: int
    hidden: int
    tokens: int
    in_backward: bool
    dtype: str


@dataclass
class _Training:
    """A training that is on."""

    case: Case
    train: Callable[[Any, Any], float]
    """Tokens and targets (1, T) int64 -> loss."""
    close: Callable[[], None]
    facts: dict[str, Any]
    engine: Any = None
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    moved: dict[str, int] = field(default_factory=dict)


_ON: list[_Training] = []
"""The one of this process."""


def warm(case: Case, places: dict[str, Any]) -> int:
    """Everything that a training needs is imported and compiled; returns the process."""
    begin(replace(case, layers=2, hidden=64, tokens=16), places)
    for _ in range(2):
        step()
    end()
    return os.getpid()


def begin(case: Case, places: dict[str, Any]) -> dict[str, Any]:
    """Set up our engine with states at `places`; returns bytes of states and the number of parameters."""
    import speedlab
    from speedlab.models import GPT

    config = _config(case, places)
    engine = speedlab.initialize(model=lambda: GPT(config.model), config=config)[0]
    ledger = engine.ledger()
    away = sum(sum(held.values()) for held in (ledger.host, ledger.disk))
    moments = 0 if away else 2 * 4 * sum(flat.numel for flat in engine.flats)  # Made by the first update.
    facts = {
        "parameters": sum(flat.numel for flat in engine.flats),
        "states": ledger.model_states + away + moments,
    }
    close = lambda: engine.destroy(keep_parameters=False)  # noqa: E731
    _ON.append(_Training(case, lambda tokens, targets: engine.train_batch([(tokens, targets)]), close, facts, engine))
    return facts


def _config(case: Case, places: dict[str, Any]) -> Any:
    import speedlab

    return speedlab.RunConfig(
        model={
            "layers": case.layers,
            "hidden": case.hidden,
            "heads": max(1, case.hidden // 64),
            "ffn_hidden": 4 * case.hidden,
            "vocab_size": _VOCABULARY,
            "context": case.tokens,
        },
        data={"sequence_length": case.tokens, "tokenizer": "bytes"},
        zero={"stage": 3, "bucket_bytes": 1},
        precision=case.dtype,
        batch={"micro_size": 1, "accumulation": 1},
        activation={"checkpointing": "block"},
        offload=places,
        optimizer={"in_backward": case.in_backward},
        clip_norm=None,
    )


def step() -> None:
    """One more step, of the same data on all sides."""
    import torch

    training = _ON[0]
    generator = torch.Generator().manual_seed(len(training.losses))
    rows = torch.randint(_VOCABULARY, (1, training.case.tokens + 1), generator=generator)
    if training.engine is not None:
        training.engine.traffic.take()
    start = time.perf_counter()
    training.losses.append(training.train(rows[:, :-1], rows[:, 1:]))
    training.seconds.append(time.perf_counter() - start)
    if training.engine is not None:
        training.moved = training.engine.traffic.take().moved_bytes


def turn(steps: int) -> float:
    """Seconds of each of so many more steps, when the last update has been made, too."""
    training = _ON[0]
    start = time.perf_counter()
    for _ in range(steps):
        step()
    training.engine.finish_update()
    return (time.perf_counter() - start) / steps


def end() -> dict[str, Any]:
    """What was seen, after the training has been closed."""
    import resource

    training = _ON.pop()
    training.close()
    return training.facts | {
        "losses": training.losses,
        "seconds": training.seconds,
        "read": training.moved.get("disk read", 0),
        "written": training.moved.get("disk write", 0),
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def begin_deepspeed(case: Case, place: str) -> None:
    """Set up DeepSpeed with states and parameters in the folder `place`."""
    import functools

    from torch.utils.checkpoint import checkpoint

    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", LOCAL_SIZE="1")
    import deepspeed  # type: ignore[import-not-found]  # a peer, only where somebody installed it

    from speedlab.models import GPT

    config = _config(case, {})
    model = GPT(config.model)
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=_deepspeed_config(case, place)
    )

    def train(tokens: Any, targets: Any) -> float:
        loss = engine(tokens, targets).loss
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    _ON.append(_Training(case, train, lambda: None, {}))


def _deepspeed_config(case: Case, place: str) -> dict[str, Any]:
    """ZeRO-3 from disk with reads ahead and writes behind, a block at a time; what does without a limit on memory."""
    unit = 12 * case.hidden**2 + 13 * case.hidden
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": case.dtype == "bfloat16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": unit,
            "stage3_prefetch_bucket_size": 2 * unit,
            "stage3_max_live_parameters": 3 * unit,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 0,
            "offload_optimizer": {
                "device": "nvme", "nvme_path": place, "buffer_count": 16, "pipeline_read": True,
                "pipeline_write": True, "pin_memory": True,
            },
            "offload_param": {
                "device": "nvme", "nvme_path": place, "buffer_count": 6, "buffer_size": int(1.1 * unit),
                "pin_memory": True,
            },
        },
        "aio": {
            "block_size": 1 << 20, "queue_depth": 32, "intra_op_parallelism": 2, "single_submit": False,
            "overlap_events": True,
        },
    }  # fmt: skip
