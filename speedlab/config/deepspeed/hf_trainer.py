"""Apply the arguments of Hugging Face's Trainer for sections that a DeepSpeed file omits.

Optimizer and schedule are those of `Trainer.create_optimizer` and `create_scheduler` (transformers 5). accelerate adds
the precision to the file. The batch comes from per_device_train_batch_size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speedlab.config.deepspeed.auto_values import total_steps, warmup_steps
from speedlab.config.deepspeed.keys import RemainingKeys

_ADAMW = (
    *("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused", "adamw_apex_fused", "adamw_hf"),
    "paged_adamw_32bit",
)
_LION = ("lion_32bit", "paged_lion_32bit")
_OF_RATES = ("learning_rate", "lr_scheduler_type", "max_steps", "num_train_epochs", "warmup_steps", "warmup_ratio")
"""Arguments that indicate a deliberate schedule."""

_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
_HALF_A_WAVE = {"num_cycles": 0.5}
"""The default of `cosine`."""

_WARMUP_NOTE = "step k (from 0) has k + 1 of n + 1 parts of the rate; the Trainer's first step has none"


def trainer_batch(keys: RemainingKeys) -> None:
    """Take missing batch sizes from the arguments, unless the file gives the whole batch as a number."""
    if keys.arguments is None or (keys.has("train_batch_size") and not keys.is_auto("train_batch_size")):
        return
    for key, name, field in (
        ("train_micro_batch_size_per_gpu", "per_device_train_batch_size", "batch.micro_size"),
        ("gradient_accumulation_steps", "gradient_accumulation_steps", "batch.accumulation"),
    ):
        if not keys.has(key):
            keys.honour(f"training_args.{name}", field, keys.arguments[name])


def trainer_dtype(keys: RemainingKeys) -> str | None:
    """Return the dtype that the arguments request for a file without a section for it.

    Args:
        keys: the keys of the file.

    Returns:
        "bf16" or "fp16"; None if the arguments request none.
    """
    args = keys.arguments or {}
    for name in ("bf16", "fp16"):
        if args.get(name) and not keys.has_section(name):
            return name
    return None


def trainer_optimizer(keys: RemainingKeys) -> None:
    """Take the optimizer from the arguments."""
    args = keys.arguments
    assert args is not None
    name, path = args["optim"], "training_args.optim"
    if name in _LION:
        kind = "lion"
    elif name == "sgd":
        kind = "sgd"
        keys.set("optimizer.momentum", 0.0)
    elif name in _ADAMW:
        kind = "adamw"
    else:
        kind = "adamw"
        known = ", ".join((*_ADAMW, *_LION, "sgd"))
        if not keys.lack(path, "optimizer", f"{name!r} is not built; there are {known}"):
            return
    keys.honour(path, "optimizer.name", kind)
    keys.honour("training_args.learning_rate", "optimizer.lr", args["learning_rate"])
    keys.honour("training_args.weight_decay", "optimizer.weight_decay", args["weight_decay"], "of matrices only")
    if kind != "sgd":
        betas = (args["adam_beta1"], args["adam_beta2"])
        keys.honour("training_args.adam_beta1", "optimizer.betas", betas, "with adam_beta2")
    if kind == "adamw":
        keys.honour("training_args.adam_epsilon", "optimizer.eps", args["adam_epsilon"])


def trainer_schedule(keys: RemainingKeys) -> None:
    """Take the schedule from the arguments."""
    args = keys.arguments
    assert args is not None
    name, path = args["lr_scheduler_type"], "training_args.lr_scheduler_type"
    kind = _SCHEDULES.get(name)
    if kind is None:
        known = ", ".join(_SCHEDULES)
        if keys.lack(path, "schedule", f"{name!r} is not built; there are {known}"):
            keys.set("schedule.kind", "constant")
            keys.set("schedule.warmup_steps", 0)
        return
    keys.honour(path, "schedule.kind", kind)
    total = total_steps(args)
    if total is None and kind != "constant":
        total = keys.default("steps")
        said = (
            f"training_args.max_steps is {args['max_steps']}: how many steps the data make is not known here, so the "
            f"rate falls over SpeedLab's default of {total} steps; give max_steps"
        )
        (keys.warnings if keys.speaks_of(*_OF_RATES) else keys.assumed).append(said)
    warm = 0 if name == "constant" else warmup_steps(args, total)
    if warm is None:
        warm = 0
        keys.warnings.append("training_args.warmup_ratio: of how many steps is not known; give max_steps")
    keys.honour("training_args.warmup_steps", "schedule.warmup_steps", warm, _WARMUP_NOTE if warm else "")
    if kind != "constant":
        keys.set("schedule.floor", _floor(keys, name, args))


def _floor(keys: RemainingKeys, name: str, args: Mapping[str, Any]) -> float:
    """Return the final share of the top rate. Other arguments of a schedule are refused."""
    given = dict(args["lr_scheduler_kwargs"] or {})
    floor = 0.0
    if name == "cosine_with_min_lr":
        rate = given.pop("min_lr_rate", None)
        least = given.pop("min_lr", None)
        top = args["learning_rate"]
        floor = rate if rate is not None else least / top if least and top else 0.0
    if name.startswith("cosine") and given.items() <= _HALF_A_WAVE.items():
        given = {}
    if given:
        reason = f"{name} has no {', '.join(given)} here"
        keys.lack("training_args.lr_scheduler_kwargs", "schedule", reason)
    return float(floor)


def trainer_steps(keys: RemainingKeys) -> None:
    """Take the number of steps from the arguments, unless the file's schedule has it."""
    total = total_steps(keys.arguments or {"max_steps": None})
    if total is not None and "steps" not in keys.settings:
        keys.honour("training_args.max_steps", "steps", total)
