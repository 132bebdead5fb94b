"""Convert DeepSpeed's optimizers and learning-rate schedules.

Missing values have DeepSpeed's defaults (ops/adam/fused_adam.py, ops/lion/fused_lion.py, runtime/lr_schedules.py of
0.19); for SGD those of torch.
"""

from __future__ import annotations

from typing import Any

from speedlab.config.deepspeed.hf_trainer import trainer_optimizer, trainer_schedule
from speedlab.config.deepspeed.keys import RemainingKeys, number, pair, whole, word, yes

_ADAM = {"adam": "Adam", "adamw": "AdamW"}
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_ADAM_DEFAULTS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
_LAMB_DEFAULTS: dict[str, Any] = {**_ADAM_DEFAULTS, "max_coeff": 10.0, "min_coeff": 0.01}
_ONEBIT_LAMB_DEFAULTS: dict[str, Any] = {
    **_LAMB_DEFAULTS,
    "coeff_beta": 0.9,
    "factor_max": 4.0,
    "factor_min": 0.5,
    "factor_threshold": 0.1,
}
_FREEZE_STEP = 100_000
"""Default of DeepSpeed's OneBitAdam, OneBitLamb and ZeroOneAdam (runtime/fp16/onebit)."""
_ZERO_ONE = {
    "var_freeze_step": ("freeze_step", _FREEZE_STEP),
    "var_update_scaler": ("variance_doubling", 16),
    "local_step_scaler": ("local_doubling", 32_678),
    "local_step_clipper": ("max_local_steps", 16),
}
"""Parameter of DeepSpeed's ZeroOneAdam -> (our field, its default)."""
_LION_DEFAULTS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.0}
_SGD_DEFAULTS: dict[str, Any] = {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0}
_PARAMETERS = (
    *("lr", "betas", "eps", "weight_decay", "momentum", "nesterov", "dampening", "adam_w_mode", "bias_correction"),
    *("amsgrad", "torch_adam", "max_grad_norm", "freeze_step", "cuda_aware", "comm_backend_name", "eps_inside_sqrt"),
    *("max_coeff", "min_coeff", "coeff_beta", "factor_max", "factor_min", "factor_threshold"),
    *("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper"),
)
_SCHEDULE_PARAMETERS = (
    *("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "total_num_steps", "warmup_min_ratio"),
    *("cos_min_ratio", "last_batch_iteration"),
)
_WARMUP_STEPS = 1000
_TOP_RATE = 1e-3
_COSINE_FLOOR = 1e-4
_FLOOR_DIGITS = 12
"""Digits of a floor: a ratio of two rates of the file; further digits are rounding errors of the division."""

_PARAMS = "optimizer.params"
_SCHEDULE = "scheduler.params"


def optimizer(keys: RemainingKeys) -> None:
    """Convert the optimizer and its parameters."""
    name = keys.take("optimizer.type", word)
    if name is None:
        for path in keys.under(_PARAMS):
            keys.ignore(path, "no optimizer.type says whose parameter it is", warn=True)
        if keys.arguments is not None and not keys.has_section("optimizer"):
            trainer_optimizer(keys)
        elif not keys.refused_under("optimizer"):
            keys.assumed.append("optimizer: the one that the program brings, or SpeedLab's default AdamW")
        return
    kind = name.lower()
    if kind in _ADAM:
        _adam(keys, name)
    elif kind == "sgd":
        _sgd(keys)
    elif kind == "lion":
        keys.honour("optimizer.type", "optimizer.name", "lion")
        for key, reads in (("lr", number), ("betas", pair), ("weight_decay", number)):
            _parameter(keys, key, reads, _LION_DEFAULTS)
    elif kind == "lamb":
        _lamb(keys)
    elif kind == "onebitadam":
        _onebit(keys, "onebit_adam", "OneBitAdam", _ADAM_DEFAULTS)
    elif kind == "onebitlamb":
        _onebit(keys, "onebit_lamb", "OneBitLamb", _ONEBIT_LAMB_DEFAULTS)
    elif kind == "zerooneadam":
        _onebit(keys, "zero_one_adam", "ZeroOneAdam", _ADAM_DEFAULTS)
    else:
        keys.lack(
            "optimizer.type",
            "optimizer",
            f"{name!r} is not built; there are Adam, AdamW, Lamb, OneBitAdam, OneBitLamb, ZeroOneAdam, Lion and SGD",
        )
    for path in keys.under(_PARAMS):
        if "optimizer" not in keys.settings:
            keys.ignore(path, f"it belongs to {name}")
        elif path.endswith(".max_grad_norm"):
            keys.ignore(path, "DeepSpeed does not act on it either; gradient_clipping is the key")
        else:
            _stranger(keys, path, _PARAMETERS, f"{name} has no such parameter here")


def _stranger(keys: RemainingKeys, path: str, names: tuple[str, ...], reason: str) -> None:
    """Refuse an unknown parameter if it is a typing error for one of `names`, otherwise ignore it with a warning."""
    near = None if path.rpartition(".")[2] in names else keys.nearest(path, names)
    if near is None:
        keys.ignore(path, reason, warn=True)
    else:
        keys.refuse(path, f"DeepSpeed has no such parameter; the nearest is {near!r}; correct it or take it out")


def _adam(keys: RemainingKeys, name: str) -> None:
    if name:
        keys.honour("optimizer.type", "optimizer.name", "adamw")
    for key, kind in (("lr", number), ("betas", pair), ("eps", number), ("weight_decay", number)):
        _parameter(keys, key, kind, _ADAM_DEFAULTS)
    decoupled = keys.take(f"{_PARAMS}.adam_w_mode", yes)
    if decoupled is False and name.lower() == "adam" and keys.settings["optimizer"].get("weight_decay", 0.1):
        reason = "with adam_w_mode false the decay is part of the gradient, and here it never is (arXiv:1711.05101)"
        keys.lack(f"{_PARAMS}.adam_w_mode", "optimizer", f"{reason}; weight_decay 0 is the same in both")
    elif decoupled is not None:
        keys.agree(f"{_PARAMS}.adam_w_mode", "the decay is separate from the gradient, or 0")
    corrected = keys.take(f"{_PARAMS}.bias_correction", yes)
    if corrected is False:
        keys.honour(f"{_PARAMS}.bias_correction", "optimizer.bias_correction", False)
    elif corrected:  # No field is set, because the program's own optimizer class may not have this argument.
        keys.agree(f"{_PARAMS}.bias_correction", "moments are corrected for their start at 0")
    if keys.take(f"{_PARAMS}.amsgrad", yes):
        keys.lack(f"{_PARAMS}.amsgrad", "optimizer", "the largest second moment is not kept")
    for key in ("torch_adam", "fused", "foreach", "set_grad_none", "capturable", "amsgrad"):
        if keys.has(f"{_PARAMS}.{key}"):
            keys.ignore(f"{_PARAMS}.{key}", "one kernel updates each partition")


def _onebit(keys: RemainingKeys, name: str, theirs: str, defaults: dict[str, Any]) -> None:
    keys.honour("optimizer.type", "optimizer.name", name)
    for key in defaults:
        _parameter(keys, key, pair if key == "betas" else number, defaults)
    if name == "zero_one_adam":
        for key, (field, default) in _ZERO_ONE.items():
            _parameter(keys, key, whole, {key: default}, field)
    else:
        _parameter(keys, "freeze_step", whole, {"freeze_step": _FREEZE_STEP})
    path = f"{_PARAMS}.bias_correction"
    if keys.has(path):
        if (corrected := keys.take(path, yes)) is not None:
            keys.honour(path, "optimizer.bias_correction", corrected, f"DeepSpeed's {theirs} never does")
    else:
        keys.set("optimizer.bias_correction", False)
        keys.assumed.append(f"{path}: false, whatever is said: DeepSpeed's {theirs} corrects no moments")
    keys.assumed.append(
        "optimizer.variance_floor: signs cannot throw about what was hardly used in the warm-up; DeepSpeed has no such "
        "floor, which is 0"
    )
    for key in ("cuda_aware", "comm_backend_name"):
        if keys.has(f"{_PARAMS}.{key}"):
            keys.ignore(f"{_PARAMS}.{key}", "signs travel as flats do, by what joins the ranks")
    for key in ("amsgrad", "eps_inside_sqrt"):
        if keys.take(f"{_PARAMS}.{key}", yes):
            keys.lack(f"{_PARAMS}.{key}", "optimizer", f"{name} has the plain root of its variance")


def _lamb(keys: RemainingKeys) -> None:
    keys.honour("optimizer.type", "optimizer.name", "lamb")
    for key in _LAMB_DEFAULTS:
        _parameter(keys, key, pair if key == "betas" else number, _LAMB_DEFAULTS)
    path = f"{_PARAMS}.bias_correction"
    reason = "moments are corrected inside the norms, as in the paper; DeepSpeed corrects the rate after them"
    corrected = keys.take(path, yes)
    if corrected is None:
        keys.assumed.append(f"{path}: {reason}")
    elif corrected:
        keys.agree(path, reason)
    else:
        keys.honour(path, "optimizer.bias_correction", False)
    for key in ("amsgrad", "eps_inside_sqrt"):
        if keys.take(f"{_PARAMS}.{key}", yes):
            keys.lack(f"{_PARAMS}.{key}", "optimizer", "LAMB has the plain root of its variance")


def _sgd(keys: RemainingKeys) -> None:
    keys.honour("optimizer.type", "optimizer.name", "sgd")
    for key in ("lr", "momentum", "weight_decay"):
        _parameter(keys, key, number, _SGD_DEFAULTS)
    if keys.take(f"{_PARAMS}.nesterov", yes):
        keys.lack(f"{_PARAMS}.nesterov", "optimizer", "the configuration's sgd has no Nesterov momentum")
    if keys.take(f"{_PARAMS}.dampening", number):
        keys.lack(f"{_PARAMS}.dampening", "optimizer", "the configuration's sgd has no dampening")


def _parameter(keys: RemainingKeys, key: str, kind: Any, defaults: dict[str, Any], ours: str = "") -> None:
    """Convert one number of the optimizer, or take DeepSpeed's default. `ours`: our name, if it differs."""
    path, field = f"{_PARAMS}.{key}", f"optimizer.{ours or key}"
    if not keys.has(path):
        keys.set(field, defaults[key])
        keys.assumed.append(f"{path}: {defaults[key]}")
        keys.leave_out(path, defaults[key])
    elif (value := keys.take(path, kind, field)) is not None:
        note = "of matrices only; DeepSpeed decays every parameter" if key == "weight_decay" and value else ""
        keys.honour(path, field, value, note)


def schedule(keys: RemainingKeys) -> None:
    """Convert the learning-rate schedule and its parameters."""
    name = keys.take("scheduler.type", word)
    if name is None:
        for path in keys.under(_SCHEDULE):
            keys.ignore(path, "no scheduler.type says whose parameter it is", warn=True)
        if keys.arguments is not None and not keys.has_section("scheduler"):
            trainer_schedule(keys)
        elif not keys.refused_under("scheduler"):
            _constant(keys)
            keys.assumed.append("scheduler: the learning rate is constant")
        return
    if name not in _SCHEDULES:
        known = ", ".join(_SCHEDULES)
        if keys.lack("scheduler.type", "schedule", f"{name!r} is not built; there are {known}"):
            _constant(keys)
    else:
        keys.honour("scheduler.type", "schedule.kind", _SCHEDULES[name])
        _warm_up(keys)
        if name != "WarmupLR":
            _fall(keys)
        {"WarmupLR": _ends, "WarmupDecayLR": _ends, "WarmupCosineLR": _ratios}[name](keys)
    for path in keys.under(_SCHEDULE):
        if name not in _SCHEDULES:
            keys.ignore(path, f"it belongs to {name}")
        elif path.endswith(".last_batch_iteration"):
            keys.ignore(path, "a checkpoint says where a schedule goes on")
        else:
            _stranger(keys, path, _SCHEDULE_PARAMETERS, f"{name} has no such parameter")


def _constant(keys: RemainingKeys) -> None:
    keys.set("schedule.kind", "constant")
    keys.set("schedule.warmup_steps", 0)


def _warm_up(keys: RemainingKeys) -> None:
    steps, shape = f"{_SCHEDULE}.warmup_num_steps", f"{_SCHEDULE}.warmup_type"
    if not keys.has(steps):
        keys.set("schedule.warmup_steps", _WARMUP_STEPS)
        keys.assumed.append(f"{steps}: {_WARMUP_STEPS}")
    elif (count := keys.take(steps, whole, "schedule.warmup_steps")) is not None:
        note = "step k (from 0) has k + 1 of n + 1 parts of the rate; DeepSpeed's first two steps have none"
        keys.honour(steps, "schedule.warmup_steps", count, note if count else "")
    rises = keys.take(shape, word)
    if rises == "linear":
        keys.agree(shape, "the rate rises linearly")
    elif keys.settings["schedule"].get("warmup_steps", 1):
        reason = "the rate rises linearly here; DeepSpeed's 'log' rises faster at first"
        if rises is None:
            keys.warnings.append(f"{shape} is left out, which is 'log': {reason}")
        else:
            keys.ignore(shape, reason, warn=True)
    elif rises is not None:
        keys.ignore(shape, "there is no warm-up")


def _fall(keys: RemainingKeys) -> None:
    path = f"{_SCHEDULE}.total_num_steps"
    if not keys.has(path):
        keys.refuse(path, "it is missing, so the rate's fall has no end; give it")
    elif (total := keys.take(path, whole, "steps")) is not None:
        keys.honour(path, "steps", total)


def _ends(keys: RemainingKeys) -> None:
    """Convert the lowest and highest rate of WarmupLR and WarmupDecayLR.

    The highest rate replaces the optimizer's own rate.
    """
    low_path, top_path = f"{_SCHEDULE}.warmup_min_lr", f"{_SCHEDULE}.warmup_max_lr"
    own = keys.settings.get("optimizer", {}).get("lr")
    falls = keys.settings["schedule"]["kind"] == "linear"
    if keys.has(top_path):
        if (top := keys.take(top_path, number, "optimizer.lr")) is not None:
            keys.honour(top_path, "optimizer.lr", top)
            if own is not None and own != top and keys.has_said(f"{_PARAMS}.lr"):
                keys.warnings.append(f"{top_path} {top:g} counts, not {_PARAMS}.lr {own:g}: the schedule sets the rate")
    elif falls:
        keys.set("optimizer.lr", _TOP_RATE)
        keys.assumed.append(f"{top_path}: {_TOP_RATE}")
    top = keys.settings.get("optimizer", {}).get("lr", _TOP_RATE)
    if keys.is_auto(low_path):
        keys.agree(low_path, "0, as the Trainer has it")
        return keys.set("schedule.floor", 0.0) if falls else None
    low = keys.take(low_path, number) or 0.0
    if falls:
        floor = float(f"{low / top:.{_FLOOR_DIGITS}g}") if top else 0.0
        keys.set("schedule.floor", floor)
        if keys.has_said(low_path):
            keys.honour(low_path, "schedule.floor", floor, "the rate rises from near 0, not from here" if low else "")
    elif low:
        keys.ignore(low_path, "the warm-up starts near 0")
    elif keys.has_said(low_path):
        keys.agree(low_path, "the warm-up starts near 0")


def _ratios(keys: RemainingKeys) -> None:
    """Convert the shares of the top rate of WarmupCosineLR."""
    low, floor = f"{_SCHEDULE}.warmup_min_ratio", f"{_SCHEDULE}.cos_min_ratio"
    if keys.take(low, number):
        keys.ignore(low, "the warm-up starts near 0")
    elif keys.has_said(low):
        keys.agree(low, "the warm-up starts near 0")
    if not keys.has(floor):
        keys.set("schedule.floor", _COSINE_FLOOR)
        keys.assumed.append(f"{floor}: {_COSINE_FLOOR}")
    elif (share := keys.take(floor, number, "schedule.floor")) is not None:
        keys.honour(floor, "schedule.floor", share)
