"""Convert DeepSpeed's keys into fields of a RunConfig, one function for each subject.

The last line of the file, `RULES`, has the order. Optimizers and schedules are in `optimizers`, attention in
`sparse_attention`. The first functions convert offload (`offload_optimizer`, `offload_param`, and older switches),
which acts from a certain ZeRO stage on. Tuning of offload (`aio`, buffers, pinned memory) has no effect here; the
schema lists these keys.
"""

from __future__ import annotations

import math
from typing import Any

from speedlab.config.batch import DEFAULT_MICRO_SIZE
from speedlab.config.deepspeed.hf_trainer import trainer_batch, trainer_dtype, trainer_steps
from speedlab.config.deepspeed.keys import RemainingKeys, dtype_name, number, whole, word, yes
from speedlab.config.deepspeed.optimizers import optimizer, schedule
from speedlab.config.deepspeed.schema import OFFLOAD
from speedlab.config.deepspeed.sparse_attention import sparse_attention

_PLACES = {"none": "none", "cpu": "host", "nvme": "disk"}
"""DeepSpeed's device -> our storage of a state between two uses."""

_ACTS = {
    "optimizer": (OFFLOAD[0], "zero_optimization.cpu_offload", 1),
    "parameters": (OFFLOAD[1], "zero_optimization.cpu_offload_param", 3),
}
"""Field of offload -> (its section, the older switch, the ZeRO stage from which on they act)."""


def offload(keys: RemainingKeys) -> None:
    """Convert the storage of optimizer states and parameters."""
    stage = keys.settings.get("zero", {}).get("stage", 2)
    for field, (section, switch, least) in _ACTS.items():
        _switch(keys, switch, field, stage, least)
        _section(keys, section, field, stage, least)
    places = keys.settings.get("offload", {})
    if places.get("parameters", "none") != "none" and places.get("optimizer", "none") == "none":
        keys.set("offload.optimizer", "host")
        keys.warnings.append(
            "offload_param without offload_optimizer: offload.optimizer is 'host' here, where DeepSpeed leaves "
            "optimizer states on the device, because an update reads and writes both in one place"
        )


def _switch(keys: RemainingKeys, path: str, field: str, stage: int, least: int) -> None:
    """Convert the switch of releases before offload had sections."""
    if not keys.has(path):
        return
    if stage < least:
        keys.ignore(path, _too_low(stage, least))
    elif (on := keys.take(path, yes)) is True:
        keys.honour(path, f"offload.{field}", "host")
    elif on is False:
        keys.agree(path, "partitions stay on the device")


def _section(keys: RemainingKeys, section: str, field: str, stage: int, least: int) -> None:
    device_path, folder_path = f"{section}.device", f"{section}.nvme_path"
    if stage < least:
        for path in (device_path, folder_path):
            if keys.has(path):
                keys.ignore(path, _too_low(stage, least))
        return
    device = keys.take(device_path, word)
    if device == "none":
        keys.set(f"offload.{field}", "none")  # Overrides an older switch.
        keys.agree(device_path, "partitions stay on the device")
    elif device in _PLACES:
        keys.honour(device_path, f"offload.{field}", _PLACES[device])
    elif device is not None:
        keys.refuse(device_path, f"{device!r} is none of DeepSpeed's places; it has {', '.join(_PLACES)}")
    if device == "nvme":
        _folder(keys, folder_path)
    elif keys.has(folder_path):
        keys.ignore(folder_path, "nothing of this section is on disk")


def _folder(keys: RemainingKeys, path: str) -> None:
    """Convert the folder of states on disk; SpeedLab has one folder for all of them."""
    folder: Any = keys.take(path, word)
    chosen = keys.settings.get("offload", {}).get("folder")
    if folder is None and chosen is None:
        keys.assumed.append(f"{path}: the run's own folder; DeepSpeed asks for one")
    elif folder is not None and chosen in (None, folder):
        keys.honour(path, "offload.folder", folder)
    elif folder is not None:
        keys.ignore(path, f"all states on disk are in one folder here, {chosen!r}", warn=True)


def _too_low(stage: int, least: int) -> str:
    return f"it acts from ZeRO stage {least} on, and the stage is {stage}"


def activations(keys: RemainingKeys) -> None:
    """Convert offload of block inputs. It implies that blocks are recomputed."""
    path = "activation_checkpointing.cpu_checkpointing"
    if (on := keys.take(path, yes)) is True:
        keys.set("activation.checkpointing", "block")
        keys.honour(path, "offload.activations", "host", "what waits there are inputs of blocks")
    elif on is False:
        keys.agree(path, "inputs of blocks stay on the device")


STATIC_WINDOW = 2**31 - 1
"""Growth interval that makes the loss scale constant: it never grows."""

_LARGEST_SCALE_POWER = 100
"""The loss is scaled in float32, which ends at 2¹²⁸."""


def batch(keys: RemainingKeys) -> None:
    """Convert the batch sizes."""
    micro, accumulation = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    fields = {"train_batch_size": "batch.global_size", micro: "batch.micro_size", accumulation: "batch.accumulation"}
    trainer_batch(keys)
    if "batch" not in keys.settings and not any(keys.has(path) for path in ("train_batch_size", micro)):
        keys.assumed.append(f"{micro}: {DEFAULT_MICRO_SIZE}, SpeedLab's default; DeepSpeed asks for a batch size")
    for path, field in fields.items():
        if keys.is_auto(path):
            keys.agree(path, f"{field} follows from the batch equation global = micro × accumulation × dp")
        elif (value := keys.take(path, whole)) is not None:
            keys.honour(path, field, value)


def clipping(keys: RemainingKeys) -> None:
    """Convert gradient clipping."""
    path = "gradient_clipping"
    if not keys.has(path):
        keys.set("clip_norm", None)
        keys.assumed.append(f"{path}: gradients are not clipped")
        keys.leave_out(path, 0.0)
    elif (value := keys.take(path, number, "clip_norm")) is not None:
        keys.honour(path, "clip_norm", value or None)


def precision(keys: RemainingKeys) -> None:
    """Convert fp16 and bf16 into the compute dtype, with the loss scale."""
    dtypes = {"fp16": "float16", "bf16": "bfloat16"}
    automatic = [name for name in dtypes if keys.is_auto(f"{name}.enabled")]
    chosen = []
    for name in dtypes:
        if name not in automatic and (on := keys.take(f"{name}.enabled", yes)) is not None:
            chosen += [name] if on else []
            keys.agree(f"{name}.enabled", f"precision.dtype is {'' if on else 'not '}{dtypes[name]!r}")
    if not chosen and not automatic and (theirs := trainer_dtype(keys)) is not None:
        chosen.append(theirs)
        keys.honour(f"training_args.{theirs}", "precision.dtype", dtypes[theirs])
    dtype = dtypes[chosen[0]] if chosen else "auto" if automatic else "float32"
    for name in automatic:
        if chosen:
            keys.agree(f"{name}.enabled", f"precision.dtype is {dtype!r}, which is enabled")
        else:
            keys.take(f"{name}.enabled", yes, "precision.dtype")
    if len(chosen) > 1:
        keys.refuse("bf16.enabled", "fp16 and bf16 are both enabled, but a model computes in one dtype; turn one off")
    if not chosen and not keys.has_said("fp16.enabled", "bf16.enabled"):
        keys.assumed.append("fp16, bf16: off, the model computes in float32")
    keys.set("precision.dtype", dtype)
    for name in dtypes:
        if name not in chosen and (chosen or name not in automatic):
            for path in keys.known_under(name):
                keys.ignore(path, f"{name} is off")
    _loss_scale(keys)


def _loss_scale(keys: RemainingKeys) -> None:
    scale = keys.take("fp16.loss_scale", number, "precision.initial_loss_scale")
    if scale:
        keys.honour(
            "fp16.loss_scale",
            "precision.initial_loss_scale",
            scale,
            "constant; a step that overflows ends the run here, where DeepSpeed skips it",
        )
        keys.set("precision.min_loss_scale", scale)
        keys.set("precision.loss_scale_window", STATIC_WINDOW)
        for name in ("initial_scale_power", "loss_scale_window", "min_loss_scale", "hysteresis"):
            if keys.has(f"fp16.{name}"):
                keys.ignore(f"fp16.{name}", "the loss scale is constant")
        return
    if scale == 0:
        keys.agree("fp16.loss_scale", "0: the loss scale is dynamic")
    power = keys.take("fp16.initial_scale_power", number, "precision.initial_loss_scale")
    if power is not None and not abs(power) <= _LARGEST_SCALE_POWER:
        keys.refuse("fp16.initial_scale_power", f"the loss cannot be scaled by 2 to the power of {power:g}; use 16")
    elif power is not None:
        keys.honour("fp16.initial_scale_power", "precision.initial_loss_scale", 2.0**power)
    window = keys.take("fp16.loss_scale_window", whole, "precision.loss_scale_window")
    if window is not None:
        keys.honour("fp16.loss_scale_window", "precision.loss_scale_window", window)
    least = keys.take("fp16.min_loss_scale", number, "precision.min_loss_scale")
    if least is not None and least <= 0:
        keys.ignore("fp16.min_loss_scale", "a scale of 0 leaves no gradient; precision.min_loss_scale is 1", warn=True)
    elif least is not None:
        keys.honour("fp16.min_loss_scale", "precision.min_loss_scale", float(least))
    hysteresis = keys.take("fp16.hysteresis", whole)
    if hysteresis == 1:
        keys.agree("fp16.hysteresis", "the loss scale is halved at the first overflow")
    elif hysteresis is not None:
        keys.ignore("fp16.hysteresis", f"the loss scale is halved at the first overflow, not at number {hysteresis}")


def gradient_sums(keys: RemainingKeys) -> None:
    """Convert the dtype for sums over micro-batches, which here always is float32."""
    path = "data_types.grad_accum_dtype"
    wanted = keys.take(path, dtype_name)
    if wanted is None:
        return
    if wanted == "float32":
        keys.agree(path, "gradients of several micro-batches are added up in float32")
    elif _one_micro_batch(keys) and keys.settings["precision"]["dtype"] in (wanted, "auto"):
        keys.agree(path, "a step has one micro-batch, whose gradients stay in the compute dtype")
    else:
        reason = (
            f"gradients are added up in float32 here, not in {wanted}, so more bytes are held than this file counts on"
        )
        keys.lack(path, "narrow-states", reason)


def _one_micro_batch(keys: RemainingKeys) -> bool:
    """Return whether a step is known to have one micro-batch."""
    sizes, ways = keys.settings.get("batch", {}), keys.settings.get("parallel", {})
    total, micro, accumulation = (sizes.get(name) for name in ("global_size", "micro_size", "accumulation"))
    if accumulation is not None or total is None or micro is None:
        return accumulation in (None, 1)
    ranks = (keys.engines or 0) // math.prod(ways.get(axis) or 1 for axis in ("tp", "pp", "cp"))
    return total == micro * ranks


def zero(keys: RemainingKeys) -> None:
    """Convert the ZeRO stage, buckets and ZeRO++."""
    whole_section = "zero_optimization"
    if keys.has(whole_section) and (on := keys.take(whole_section, yes)) is not None:
        keys.honour(whole_section, "zero.stage", int(on), "the switch of DeepSpeed's first releases")
    elif keys.has("zero_optimization.stage"):
        if (stage := keys.take("zero_optimization.stage", whole, "zero.stage")) is not None:
            keys.honour("zero_optimization.stage", "zero.stage", stage)
    else:
        keys.set("zero.stage", 0)
        keys.assumed.append("zero_optimization.stage: 0, all states are replicated")
    stage = keys.settings.get("zero", {}).get("stage", 2)
    _buckets(keys, stage)
    _plus_plus(keys, stage)


def _plus_plus(keys: RemainingKeys, stage: int) -> None:
    """Convert ZeRO++, which DeepSpeed supports only at stage 3 (runtime/zero/config.py).

    A partition of one rank means none.
    """
    switches = {
        "zero_quantized_weights": ("zero.quantized_weights", yes),
        "zero_quantized_gradients": ("zero.quantized_gradients", yes),
        "zero_hpz_partition_size": ("zero.secondary_partition", whole),
    }
    for name, (field, kind) in switches.items():
        path = f"zero_optimization.{name}"
        if keys.has(path) and stage != 3:
            keys.ignore(path, f"it acts at ZeRO stage 3, and the stage is {stage}")
        elif (value := keys.take(path, kind, field)) is not None:
            keys.honour(path, field, None if kind is whole and value in (0, 1) else value)


def _buckets(keys: RemainingKeys, stage: int) -> None:
    """Convert bucket sizes.

    DeepSpeed counts elements. Here they are bytes in the compute dtype, one size for gathers and reductions.
    """
    names = ["stage3_prefetch_bucket_size"] if stage == 3 else []
    names += ["reduce_bucket_size", "allgather_bucket_size"]
    paths = [f"zero_optimization.{name}" for name in names]
    element_bytes = 4 if keys.settings["precision"]["dtype"] == "float32" else 2
    used = None
    for path in paths:
        if used is not None and keys.has(path):
            keys.ignore(path, f"gathers and sums share one bucket size here, that of {used}")
            continue
        if keys.has(path):
            used = path.rpartition(".")[2]
        if (elements := keys.take(path, whole, "zero.bucket_bytes")) is not None:
            note = f"{elements} elements of {element_bytes} bytes"
            keys.honour(path, "zero.bucket_bytes", max(1, elements * element_bytes), note)
    if keys.has("zero_optimization.stage3_prefetch_bucket_size"):
        keys.ignore(
            "zero_optimization.stage3_prefetch_bucket_size", f"it acts at ZeRO stage 3, and the stage is {stage}"
        )


def activation(keys: RemainingKeys) -> None:
    """Convert activation checkpointing.

    The section tunes a model's own checkpoint calls, so its presence implies them.
    """
    partition, count = "activation_checkpointing.partition_activations", "activation_checkpointing.number_checkpoints"
    if (on := keys.take(partition, yes)) is True:
        keys.set("activation.checkpointing", "block")
        note = "of blocks that are computed again (activation.checkpointing 'block')"
        keys.honour(partition, "activation.partition_inputs", True, note)
    elif on is False:
        keys.agree(partition, "inputs of blocks are not cut over tensor ranks")
    if keys.has(count):
        keys.ignore(count, "it only sizes DeepSpeed's buffers; activation.checkpointing is what computes blocks again")
    interval = "pipeline.activation_checkpoint_interval"
    if blocks := keys.take(interval, whole):
        note = f"DeepSpeed keeps the input of every {blocks} layers" if blocks > 1 else ""
        keys.honour(interval, "activation.checkpointing", "block", note)
    elif keys.has_said(interval):
        keys.agree(interval, "0: the pipeline asks for no block to be computed again")


def parallel(keys: RemainingKeys) -> None:
    """Convert pipeline stages, tensor parallelism and sequence parallelism."""
    if keys.is_auto("pipeline.stages"):
        keys.agree("pipeline.stages", "parallel.pp 1: a file says how many pipeline stages, or the program does")
    elif (stages := keys.take("pipeline.stages", whole)) is not None:
        keys.honour("pipeline.stages", "parallel.pp", stages)
    how = keys.take("pipeline.partition", word)
    if how in ("parameters", "best"):
        keys.honour("pipeline.partition", "parallel.balance", "parameters")
    elif how is not None:
        keys.ignore("pipeline.partition", "stages are balanced by parameters or by time; give parallel.cut for others")
    if (size := keys.take("tensor_parallel.autotp_size", whole, "parallel.tp")) is not None:
        keys.honour("tensor_parallel.autotp_size", "parallel.tp", size or 1)
    if (size := keys.take("sequence_parallel_size", whole, "parallel.cp")) is not None:
        keys.honour("sequence_parallel_size", "parallel.cp", size or 1)


def reports(keys: RemainingKeys) -> None:
    """Convert the switches of reports."""
    for path in ("wall_clock_breakdown", "memory_breakdown"):
        if (on := keys.take(path, yes)) is not None:
            keys.agree(
                path, "recorded for every step" if on else "recorded for every step all the same; it costs nothing"
            )
    if (on := keys.take("tensorboard.enabled", yes)) is not None:
        keys.honour("tensorboard.enabled", "telemetry.tensorboard", on)


RULES = (
    *(batch, clipping, precision, zero, offload, optimizer, schedule, trainer_steps),
    *(activation, activations, parallel, gradient_sums, sparse_attention, reports),
)
"""The order of conversion: later rules read settings of earlier ones."""
