"""Fill "auto" in a DeepSpeed file from TrainingArguments, like Hugging Face's Trainer.

Names and defaults are those of transformers 5 (training_args.py, integrations/deepspeed.py). A missing argument has the
Trainer's default. Without any arguments, "auto" means SpeedLab's default. `hf_trainer` covers whole sections that the
file omits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from speedlab.config.errors import ConfigError

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
    "optim": "adamw_torch_fused",
    "lr_scheduler_type": "linear",
    "lr_scheduler_kwargs": None,
    "hidden_size": None,
}
"""The Trainer's defaults. hidden_size is the model's, not an argument of the Trainer: pass it for the bucket sizes."""


def arguments(given: Any) -> dict[str, Any] | None:
    """Return the relevant arguments of the Trainer, filled up with its defaults; None if none are given.

    Args:
        given: names and values, for instance `args.to_dict()`.

    Raises:
        ConfigError: a value has the wrong type.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ConfigError(f"training_args: expected names and values, not {type(given).__name__}; give args.to_dict()")
    args = {name: getattr(value, "value", value) for name, value in {**TRAINER_DEFAULTS, **given}.items()}
    for name, default in TRAINER_DEFAULTS.items():
        value = args[name]
        if name == "lr_scheduler_kwargs":
            kind, expected = Mapping, "names and values"
        elif isinstance(default, str):
            kind, expected = str, "a name"
        else:
            kind, expected = int | float, "a number"
        if value is not None and not isinstance(value, kind):
            raise ConfigError(f"training_args.{name}: expected {expected}, not {value!r}")
    return args


@dataclass(frozen=True, kw_only=True)
class Auto:
    """How to fill one key."""

    source: str
    """Names of the arguments."""
    value: Callable[[Mapping[str, Any]], Any]
    """Their value; None if they do not determine it."""


def _one(name: str) -> Auto:
    return Auto(source=name, value=lambda args: args[name])


def total_steps(args: Mapping[str, Any]) -> int | None:
    """Return the steps of the whole training.

    Args:
        args: the Trainer's arguments.

    Returns:
        The steps; None if they depend on unknown data (no `max_steps`).
    """
    return int(args["max_steps"]) if args["max_steps"] and args["max_steps"] > 0 else None


def warmup_steps(args: Mapping[str, Any], total: int | None) -> int | None:
    """Return the steps of the warm-up; None for a share of an unknown total.

    A `warmup_steps` below 1 is a share, like `warmup_ratio`.

    Args:
        args: the Trainer's arguments.
        total: steps of the whole training, if known.
    """
    steps = args["warmup_steps"] or 0
    if steps >= 1:
        return int(steps)
    share = steps or args["warmup_ratio"] or 0
    if not share:
        return 0
    return math.ceil(share * total) if total else None


def _of_hidden(elements: Callable[[int], int]) -> Auto:
    return Auto(source="hidden_size", value=lambda args: elements(args["hidden_size"]) if args["hidden_size"] else None)


AUTO: dict[str, Auto] = {
    # train_batch_size follows from these two and the number of ranks.
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
    "scheduler.params.warmup_num_steps": Auto(
        source="warmup_steps", value=lambda args: warmup_steps(args, total_steps(args))
    ),
    "scheduler.params.total_num_steps": Auto(source="max_steps", value=total_steps),
    "fp16.enabled": _one("fp16"),
    "bf16.enabled": _one("bf16"),
    "zero_optimization.reduce_bucket_size": _of_hidden(lambda hidden: hidden * hidden),
    "zero_optimization.stage3_prefetch_bucket_size": _of_hidden(lambda hidden: int(0.9 * hidden * hidden)),
}
"""Path of a key -> how the Trainer fills it."""

MAY_DIFFER = ("scheduler.params.warmup_min_lr", "zero_optimization.reduce_bucket_size")
"""Keys that may differ from the arguments. For all others the Trainer requires equal values."""


def _said(path: str, given: Mapping[str, Any]) -> Any:
    """Return the value of a key by the `given` arguments; None if they do not determine it."""
    auto = AUTO.get(path)
    if auto is None or path in MAY_DIFFER or not any(name in given for name in auto.source.split(", ")):
        return None
    return None if "hidden_size" in auto.source else auto.value({**TRAINER_DEFAULTS, **given})


def disagreement(path: str, value: Any, given: Mapping[str, Any]) -> str | None:
    """Return a warning if the file and the arguments differ, which the Trainer refuses; None if they agree.

    Args:
        path: path of the key.
        value: its value in the file.
        given: the arguments that were given.
    """
    theirs = _said(path, given)
    if theirs is None or theirs == value:
        return None
    return (
        f"{path} is {value!r} and training_args.{AUTO[path].source} is {theirs!r}; the file counts, the Trainer "
        "refuses both"
    )


def left_unused(path: str, default: Any, given: Mapping[str, Any]) -> str | None:
    """Return a warning if the file omits a key whose argument differs from DeepSpeed's default; None otherwise.

    The Trainer fills only "auto", so the argument has no effect.

    Args:
        path: path of the key.
        default: DeepSpeed's default.
        given: the arguments that were given.
    """
    theirs = _said(path, given)
    if theirs is None or theirs == default or theirs == list(default if isinstance(default, tuple) else ()):
        return None
    return (
        f'{path} is left out, so it is DeepSpeed\'s {default!r}, under the Trainer, too; write "auto" for '
        f"training_args.{AUTO[path].source} {theirs!r}"
    )
