"""Write a configuration as DeepSpeed's JSON. Reading the result and writing it again gives the same JSON."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from speedlab.config.batch import DEFAULT_MICRO_SIZE
from speedlab.config.deepspeed.convert import STATIC_WINDOW
from speedlab.config.deepspeed.sparse_attention import section_of

if TYPE_CHECKING:
    from speedlab.config.run_config import RunConfig
    from speedlab.config.sections import ZeroConfig

_WARM_UP_PARTS = 5
_RATE_DIGITS = 9
"""Fewer digits than for reading a floor, so that a round trip gives the same digits."""


def as_deepspeed(config: RunConfig) -> dict[str, Any]:
    """Return the configuration as DeepSpeed's JSON, as far as its keys allow.

    DeepSpeed has no keys for:

    - model (except attention with the patterns fixed, longformer and bigbird), data, seed
    - dp, islands and their synchronisation, the pipeline's schedule and cut, sequence parallelism
    - evaluation, checkpoints
    - offload at ZeRO stage 0, ZeRO++ at stages 1 and 2
    - missing masters, moments in 8 bits, updates in backward or delayed by a step, selective recomputation
    - settings of 1-bit Adam other than the end of its warm-up

    Some values change their form:

    - A warm-up that ends with a steady variance is written as a fifth of the steps.
    - Recomputed blocks are written as a setting of the pipeline, even without one.
    - States on disk get a folder; that of all runs if none is set.
    - The dtype 'auto' is written as bf16.
    - A warm-up of 0 steps before a falling rate is written as 1, DeepSpeed's minimum.
    """
    written: dict[str, Any] = {
        **_batch(config),
        "gradient_clipping": config.clip_norm or 0.0,
        "optimizer": _optimizer(config),
        **_scheduler(config),
        **_precision(config),
        "zero_optimization": _zero(config),
        **_parallel(config),
        **section_of(config.model.attention),
        "tensorboard": {"enabled": config.telemetry.tensorboard},
    }
    return written


def _batch(config: RunConfig) -> dict[str, Any]:
    batch = config.batch
    micro = DEFAULT_MICRO_SIZE if batch.global_size is None and batch.micro_size is None else batch.micro_size
    sizes = {
        "train_batch_size": batch.global_size,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": batch.accumulation,
    }
    return {key: value for key, value in sizes.items() if value is not None}


def _optimizer(config: RunConfig) -> dict[str, Any]:
    optimizer = config.optimizer
    if optimizer.name == "sgd":
        params = {"lr": optimizer.lr, "momentum": optimizer.momentum, "weight_decay": optimizer.weight_decay}
        return {"type": "SGD", "params": params}
    params = {"lr": optimizer.lr, "betas": list(optimizer.betas), "weight_decay": optimizer.weight_decay}
    if optimizer.name == "lion":
        return {"type": "Lion", "params": params}
    params |= {"eps": optimizer.eps, "bias_correction": optimizer.bias_correction}
    if optimizer.looks_at_parameters:
        params |= {"max_coeff": optimizer.max_coeff, "min_coeff": optimizer.min_coeff}
    if optimizer.name == "lamb":
        return {"type": "Lamb", "params": params}
    if optimizer.name == "onebit_lamb":
        params |= {"coeff_beta": optimizer.coeff_beta, "factor_threshold": optimizer.factor_threshold}
        params |= {"factor_max": optimizer.factor_max, "factor_min": optimizer.factor_min}
    if optimizer.name == "zero_one_adam":
        never = config.steps + 1  # DeepSpeed's default of 100,000 could be reached.
        params |= {"var_freeze_step": optimizer.freeze_step or never, "var_update_scaler": optimizer.variance_doubling}
        params |= {"local_step_scaler": optimizer.local_doubling, "local_step_clipper": optimizer.max_local_steps}
        return {"type": "ZeroOneAdam", "params": params}
    if optimizer.sums_itself:
        freeze = optimizer.freeze_step or max(1, config.steps // _WARM_UP_PARTS)
        kind = {"onebit_adam": "OneBitAdam", "onebit_lamb": "OneBitLamb"}[optimizer.name]
        return {"type": kind, "params": {**params, "freeze_step": freeze}}
    return {"type": "AdamW", "params": params}


def _scheduler(config: RunConfig) -> dict[str, Any]:
    schedule, top = config.schedule, config.optimizer.lr
    if schedule.kind == "constant" and schedule.warmup_steps == 0:
        return {}
    params: dict[str, Any] = {"warmup_num_steps": max(1, schedule.warmup_steps), "warmup_type": "linear"}
    if schedule.kind == "cosine":
        params = {"total_num_steps": config.steps, **params, "warmup_min_ratio": 0, "cos_min_ratio": schedule.floor}
        return {"scheduler": {"type": "WarmupCosineLR", "params": params}}
    if schedule.kind == "linear":
        low = float(f"{schedule.floor * top:.{_RATE_DIGITS}g}")
        params = {"total_num_steps": config.steps, "warmup_min_lr": low, "warmup_max_lr": top, **params}
        return {"scheduler": {"type": "WarmupDecayLR", "params": params}}
    return {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": top, **params}}}


def _precision(config: RunConfig) -> dict[str, Any]:
    precision = config.precision
    if precision.dtype == "float32":
        return {}
    if precision.dtype != "float16":
        return {"bf16": {"enabled": True}}
    constant = precision.min_loss_scale == precision.initial_loss_scale
    if constant and precision.loss_scale_window >= STATIC_WINDOW:
        return {"fp16": {"enabled": True, "loss_scale": precision.initial_loss_scale}}
    least = precision.min_loss_scale
    return {
        "fp16": {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": round(math.log2(precision.initial_loss_scale)),
            "loss_scale_window": precision.loss_scale_window,
            "hysteresis": 1,
            "min_loss_scale": int(least) if least == int(least) else least,
        }
    }


def _zero(config: RunConfig) -> dict[str, Any]:
    element_bytes = 4 if config.precision.dtype == "float32" else 2
    key = "stage3_prefetch_bucket_size" if config.zero.stage == 3 else "reduce_bucket_size"
    return {
        "stage": config.zero.stage,
        key: max(1, config.zero.bucket_bytes // element_bytes),
        **(_plus_plus(config.zero) if config.zero.stage == 3 else {}),  # DeepSpeed supports it only at stage 3.
        **_offload(config),
    }


def _plus_plus(zero: ZeroConfig) -> dict[str, Any]:
    written = {
        "zero_quantized_weights": zero.quantized_weights,
        "zero_quantized_gradients": zero.quantized_gradients,
        "zero_hpz_partition_size": zero.secondary_partition or 0,
    }
    return {key: value for key, value in written.items() if value}


def _offload(config: RunConfig) -> dict[str, Any]:
    places, folder = config.offload, str(config.offload.folder or config.folder)
    sections = {"none": None, "host": {"device": "cpu"}, "disk": {"device": "nvme", "nvme_path": folder}}
    written = {"offload_optimizer": sections[places.optimizer], "offload_param": sections[places.parameters]}
    return {key: section for key, section in written.items() if section is not None and config.zero.stage >= 1}


def _parallel(config: RunConfig) -> dict[str, Any]:
    written: dict[str, Any] = {}
    checkpointing = config.activation.checkpointing == "block"
    if checkpointing:
        written["activation_checkpointing"] = {
            "partition_activations": config.activation.partition_inputs,
            "number_checkpoints": config.model.layers,
            **({"cpu_checkpointing": True} if config.offload.activations == "host" else {}),
        }
        written["pipeline"] = {"activation_checkpoint_interval": 1}
    if config.parallel.pp > 1:
        written["pipeline"] = {"stages": config.parallel.pp, "activation_checkpoint_interval": int(checkpointing)}
    if config.parallel.tp > 1:
        written["tensor_parallel"] = {"autotp_size": config.parallel.tp}
    if config.parallel.cp > 1:
        written["sequence_parallel_size"] = config.parallel.cp
    return written
