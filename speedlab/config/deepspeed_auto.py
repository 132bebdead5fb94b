"""What "auto" stands for in a DeepSpeed file: what Hugging Face's Trainer puts there from its TrainingArguments.

Names and defaults are those of transformers 5 (training_args.py, integrations/deepspeed.py). A key that is not in the
arguments has the Trainer's default; without any arguments nothing is filled, and SpeedLab's defaults stand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

TRAINER_DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "warmup_steps": 0,
    "warmup_ratio": 0.0,
    "max_steps": -1,
    "fp16": False,
    "bf16": False,
    "hidden_size": None,
}
"""hidden_size is the model's, not an argument of the Trainer: give it beside them for the bucket sizes."""


@dataclass(frozen=True, kw_only=True)
class Auto:
    """How one key is filled."""

    source: str
    """The arguments it comes from."""
    value: Callable[[Mapping[str, Any]], Any]
    """Their value, or None when they do not say it."""


def _one(name: str) -> Auto:
    return Auto(source=name, value=lambda args: args[name])


def _total_steps(args: Mapping[str, Any]) -> int | None:
    return int(args["max_steps"]) if args["max_steps"] and args["max_steps"] > 0 else None


def _warmup_steps(args: Mapping[str, Any]) -> int | None:
    """Below 1, warmup_steps is a share of all steps, as warmup_ratio was before."""
    steps, total = args["warmup_steps"] or 0, _total_steps(args)
    if steps >= 1:
        return int(steps)
    share = steps or args["warmup_ratio"] or 0
    if not share:
        return 0
    return math.ceil(share * total) if total else None


def _of_hidden(elements: Callable[[int], int]) -> Auto:
    return Auto(source="hidden_size", value=lambda args: elements(args["hidden_size"]) if args["hidden_size"] else None)


AUTO: dict[str, Auto] = {
    # train_batch_size follows from these two and the ranks.
    "train_micro_batch_size_per_gpu": _one("per_device_train_batch_size"),
    "gradient_accumulation_steps": _one("gradient_accumulation_steps"),
    "gradient_clipping": _one("max_grad_norm"),
    "optimizer.params.lr": _one("learning_rate"),
    "optimizer.params.betas": Auto(
        source="adam_beta1, adam_beta2", value=lambda args: [args["adam_beta1"], args["adam_beta2"]]
    ),
    "optimizer.params.eps": _one("adam_epsilon"),
    "optimizer.params.weight_decay": _one("weight_decay"),
    "scheduler.params.warmup_min_lr": Auto(source="the Trainer", value=lambda args: 0),
    "scheduler.params.warmup_max_lr": _one("learning_rate"),
    "scheduler.params.warmup_num_steps": Auto(source="warmup_steps", value=_warmup_steps),
    "scheduler.params.total_num_steps": Auto(source="max_steps", value=_total_steps),
    "fp16.enabled": _one("fp16"),
    "bf16.enabled": _one("bf16"),
    "zero_optimization.reduce_bucket_size": _of_hidden(lambda hidden: hidden * hidden),
    "zero_optimization.stage3_prefetch_bucket_size": _of_hidden(lambda hidden: int(0.9 * hidden * hidden)),
}
"""Path of a key -> how the Trainer fills it."""

MAY_DIFFER = ("scheduler.params.warmup_min_lr", "zero_optimization.reduce_bucket_size")
"""Keys that the Trainer only fills; of the others it asks that a number in the file is its argument's."""


def disagreement(path: str, value: Any, given: Mapping[str, Any]) -> str | None:
    """What to say when the file's `value` is not what `given` arguments say; the Trainer refuses such a pair."""
    auto = AUTO.get(path)
    if auto is None or path in MAY_DIFFER or not any(name in given for name in auto.source.split(", ")):
        return None
    theirs = auto.value({**TRAINER_DEFAULTS, **given})
    if theirs is None or theirs == value or "hidden_size" in auto.source:
        return None
    return (
        f"{path} is {value!r} and training_args.{auto.source} is {theirs!r}; the file counts, the Trainer refuses both"
    )
