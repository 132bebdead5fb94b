"""List DeepSpeed's keys: those without effect here, those of missing features, and old names.

- IGNORED keys change neither the computation nor what fits: reports, and tuning of parts that work differently here.
- FEATURES change one of the two. A file that enables one is refused, unless the caller ignores the feature.

Keys and defaults are those of DeepSpeed 0.19 (runtime/config.py, runtime/zero/config.py and their imports) and of
earlier releases, as far back as files in use show them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


def _enabled(value: Any) -> bool:
    return bool(value.get("enabled", False)) if isinstance(value, Mapping) else bool(value)


def _enabled_inside(value: Any) -> bool:
    """Return whether any part of `value`, at any depth, is enabled."""
    if not isinstance(value, Mapping):
        return False
    return value.get("enabled") is True or any(_enabled_inside(inner) for inner in value.values())


def _above(value: Any, bound: int) -> bool:
    return isinstance(value, int | float) and value > bound


def _present(value: Any) -> bool:
    return value not in (None, False, {})


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A feature of DeepSpeed that changes the computation or what fits, and that SpeedLab does not have."""

    name: str
    """Name for `ignore`."""
    reason: str
    on: Callable[[Any], bool] = _enabled
    """Whether a value of the key enables the feature."""


_NARROW = Feature(
    name="narrow-states",
    reason="master weights and moments are float32 unless precision.masters 'none' or precision.moments '8bit' says "
    "otherwise, so more bytes are held than this file counts on",
    on=bool,
)
_MOE = "mixtures of experts are not built yet, so experts would not be spread over ranks"

FEATURES: dict[str, Feature] = {
    "compression_training": Feature(
        name="compression", reason="weights and activations are not quantised or pruned here", on=_enabled_inside
    ),
    "quantize_training": Feature(
        name="compression", reason="weights are not quantised in training here", on=_enabled_inside
    ),
    "weight_quantization": Feature(name="compression", reason="weights are not quantised here", on=_present),
    "elasticity": Feature(
        name="elasticity",
        reason="the batch equation is fixed by the configuration, not chosen by the number of ranks; give batch sizes",
    ),
    "curriculum_learning": Feature(
        name="curriculum", reason="sequences have one length through the whole run, so other data would be trained on"
    ),
    "data_efficiency": Feature(
        name="curriculum", reason="data are not sampled by difficulty and no tokens are dropped between layers"
    ),
    "progressive_layer_drop": Feature(
        name="layer-drop", reason="no block is left out of a step, so another function would be trained"
    ),
    "amp": Feature(
        name="amp", reason="apex's mixed precision has no counterpart; set bf16 or fp16, which keep float32 masters"
    ),
    "torch_autocast": Feature(
        name="amp", reason="operations are not cast one by one; set bf16 or fp16, which compute in one dtype"
    ),
    "fp8": Feature(name="fp8", reason="computing in float8 is not built yet; set bf16"),
    "moe": Feature(name="moe", reason=_MOE, on=_present),
    "expert_parallel": Feature(name="moe", reason=_MOE),
    "fp16.fp16_master_weights_and_grads": _NARROW,
    "bf16.bf16_master_weights_and_grads": _NARROW,
    "bf16.bf16_optimizer_states": _NARROW,
    "zero_optimization.zero_quantized_nontrainable_weights": Feature(
        name="zero++",
        reason="frozen parameters are kept as they are, and sent as integers only with zero_quantized_weights",
        on=bool,
    ),
    "zero_optimization.zeropp_loco_param": Feature(
        name="zero++", reason="what int4 gradients miss is not kept for the next step here", on=_present
    ),
    "zero_optimization.zenflow": Feature(
        name="zenflow", reason="an update is not split between host and device, nor delayed on one of them", on=_present
    ),
    "zero_optimization.mics_shard_size": Feature(
        name="mics",
        reason="partitions are over all dp ranks, not over a group of them",
        on=lambda value: _above(value, 0),
    ),
    "gradient_allreduce_op": Feature(
        name="gradient-sum",
        reason="gradients are averaged over ranks; a sum would be one factor dp larger",
        on=lambda value: str(value).lower() != "mean",
    ),
}
"""Path of a key -> the feature that it enables."""

_PRINTED = "every step is recorded in the run folder and shown live, so nothing has to be printed"
_PROFILED = "every step's record has time, bytes sent and kernels by name; `speedlab trace` and the dashboard show them"
_UNITS = (
    "whole units (blocks) are gathered and released, and the next one is gathered ahead; zero.bucket_bytes joins them"
)
_FLATS = "flats are contiguous and each has one reduction, whatever this says"
_ELSEWHERE = "records are in the run folder, and TensorBoard's event files next to them; nothing is sent to a service"
_MEASURED = "how deep queues are, and how large pieces, is measured on the disk itself before a run"
_PINNED = "what travels to a GPU goes through pinned memory that is used again"
_STAGED = "reading ahead and writing back take the room of two flats of each state, whatever this says"
_MEAN = "the mean over ranks is the same; sums of gradients are taken in float32, which does not overflow"
_SAVING = "each rank writes what it owns to the run folder, with a manifest and a hash for each file"
_NARROW_SUMS = "gradients are in the compute dtype, and their sums are taken in float32"

IGNORED: dict[str, str] = {
    "steps_per_print": _PRINTED,
    "dump_state": _PRINTED,
    "log_level": _PRINTED,
    "flops_profiler": _PROFILED,
    "comms_logger": _PROFILED,
    "timers": _PROFILED,
    "monitor_config": _ELSEWHERE,
    "wandb": _ELSEWHERE,
    "comet": _ELSEWHERE,
    "csv_monitor": _ELSEWHERE,
    "tensorboard.output_path": "event files are in the run folder",
    "tensorboard.job_name": "event files carry the run's name",
    "autotuning": "DeepSpeed's launcher acts on it, not a run; SpeedLab's planner searches layouts",
    "hybrid_engine": "it speeds up generating text between steps; training is the same without it",
    "compile": "it tunes DeepSpeed's own compiler passes; `compile` of a SpeedLab configuration is torch.compile",
    "graph_harvesting": "it only changes how kernels are launched",
    "aio": _MEASURED,
    "zero_force_ds_cpu_optimizer": "one kernel updates partitions on the host, whatever optimizer is asked for",
    "zero_allow_untested_optimizer": "any optimizer that updates each element by itself works under every stage",
    "prescale_gradients": _MEAN,
    "gradient_predivide_factor": _MEAN,
    "sparse_gradients": "gradients of embeddings are summed dense, which gives the same sum",
    "communication_data_type": _NARROW_SUMS,
    "seq_parallel_communication_data_type": _NARROW_SUMS,
    "data_types.param_dtype": "masters are float32, and parameters that compute have the dtype of fp16 and bf16",
    "data_types.buffer_dtype": "buffers stay as the model made them",
    "data_types.keep_in_fp32_modules": "all parameters compute in one dtype; their masters are float32",
    "disable_allgather": _FLATS,
    "allgather_size": _FLATS,
    "disable_python_gc": "Python's collector is left as it is",
    "dataloader_drop_last": "every global batch is whole",
    "managed_gradient_accumulation": "`accumulation` micro-batches make a step",
    "use_data_before_expert_parallelism": "there are no experts to order",
    "eigenvalue": "it belongs to quantisation, which is not done here",
    "vocabulary_size": "DeepSpeed only warns about it; the model's own vocabulary counts",
    "optimizer.legacy_fusion": "one kernel updates each partition",
    "nebula": _SAVING,
    "datastates": _SAVING,
    "checkpoint": f"{_SAVING}; any layout loads it; checkpoint.every_steps and checkpoint.keep are SpeedLab's choices",
    "pipeline.seed_layers": "each block has its own seed, whatever the layout",
    "pipeline.pipe_partitioned": "activations between pipeline stages are sent as parallel.sequence says",
    "pipeline.grad_partitioned": "gradients between pipeline stages are sent as activations are",
    "activation_checkpointing.contiguous_memory_optimization": "a block's kept input needs no buffer of its own",
    "activation_checkpointing.synchronize_checkpoint_boundary": "nothing is synchronised at a block's boundary",
    "activation_checkpointing.profile": _PROFILED,
    "tensor_parallel.preset_model": "the plan comes from the model itself (base_model_tp_plan), or from `tp_plan`",
    "tensor_parallel.partition_config": "the plan comes from the model itself, or from `tp_plan` of initialize",
    "tensor_parallel.injection_policy_tuple": "the plan comes from the model itself, or from `tp_plan` of initialize",
    "tensor_parallel.keep_module_on_host": "a model is materialised unit by unit, straight into partitions",
    "tensor_parallel.kernel_inject": "it concerns inference",
    "tensor_parallel.replace_with_kernel_inject": "it concerns inference",
    "tensor_parallel.tp_overlap_comm": "when tensor-parallel sums overlap is not configured",
    "tensor_parallel.vocab_parallel_lm_head": "the plan says how the head is cut",
    "tensor_parallel.vocab_parallel_ce_backend": "model.loss says how head and loss are computed",
    "tensor_parallel.tp.tp_grain_size": "parts of a layer may be uneven, so no grain is needed",
    "tensor_parallel.dtype": "the compute dtype is bf16's and fp16's matter",
    "fp16.auto_cast": "inputs are the caller's; token numbers need no cast",
    "fp16.consecutive_hysteresis": "the loss scale is halved at the first overflow",
    "bf16.immediate_grad_update": "gradients of several micro-batches are summed in float32 as they come",
    "bf16.check_grad_overflow": "gradients are always checked, in the step's one reduction",
    **{
        f"zero_optimization.{key}": reason
        for keys, reason in (
            ("allgather_partitions reduce_scatter use_multi_rank_bucket_allreduce contiguous_gradients", _FLATS),
            ("legacy_stage1 round_robin_gradients parameter_alignment", _FLATS),
            ("overlap_comm", "communication overlaps computing wherever the transport can"),
            ("compute_grad_norm", "the norm costs nothing in addition to the update's own reduction"),
            ("sub_group_size", "the update works on one partition after the other, in pieces where a copy is needed"),
            ("stage3_max_live_parameters stage3_max_reuse_distance stage3_module_granularity_threshold", _UNITS),
            ("stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential leaf_module", _UNITS),
            (
                "stage3_param_persistence_threshold stage3_model_persistence_threshold",
                "small parameters travel with their block, which makes no message more, so none are kept whole",
            ),
            (
                "stage3_gather_16bit_weights_on_model_save",
                "checkpoints need no gathering; state_dict() is whole on every rank",
            ),
            ("load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint", _SAVING),
            ("ignore_unused_parameters", "unused parameters are allowed, on all ranks or on some"),
            ("memory_efficient_linear override_module_apply", "modules are left as they are; hooks do the work"),
            ("log_trace_cache_warnings enable_sanity_checks", "the order of gathers is agreed after the first step"),
            ("mics_hierarchical_params_gather", "partitions are over all dp ranks"),
            ("cpu_offload_use_pin_memory offload_optimizer.pin_memory offload_param.pin_memory", _PINNED),
            ("offload_optimizer.buffer_count offload_param.buffer_count offload_param.buffer_size", _STAGED),
            ("offload_optimizer.pipeline_read offload_optimizer.pipeline_write offload_optimizer.pipeline", _STAGED),
            ("offload_optimizer.fast_init", "states begin as zeros, which are never written one by one"),
            ("offload_optimizer.ratio", "all states are where offload_optimizer says, so that a device holds no more"),
            (
                "offload_optimizer.super_offload offload_optimizer.cpuadam_cores_perc",
                "the update runs on all cores that the rank is bound to",
            ),
            ("offload_param.max_in_cpu", "what is read ahead is in the host's memory, and nothing besides"),
            ("save_muon_momentum_buffer_in_memory", "there is no Muon, so that there is no such buffer"),
        )
        for key in keys.split()
    },
}
"""Path of a key or section -> why it has no effect here."""

LEGACY: dict[str, str] = {
    "bfloat16": "bf16",
    "sparse_attn": "sparse_attention",
    "train_micro_batch_size": "train_micro_batch_size_per_gpu",
    "autotp": "tensor_parallel",
    "tensor_parallel.tp.tp_size": "tensor_parallel.autotp_size",
    "tensor_parallel.tensor_parallel.tp_size": "tensor_parallel.autotp_size",
    "tensor_parallel.tp_size": "tensor_parallel.autotp_size",
    "fp16.initial_loss_scale_power": "fp16.initial_scale_power",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    "zero_optimization.cpu_offload_params": "zero_optimization.cpu_offload_param",
    **{
        f"zero_optimization.{key}": f"zero_optimization.stage3_{key}"
        for key in (
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "model_persistence_threshold",
            "max_live_parameters",
            "max_reuse_distance",
            "gather_16bit_weights_on_model_save",
            "module_granularity_threshold",
            "use_all_reduce_for_fetch_params",
            "allgather_sequential",
        )
    },
}
"""Other names in DeepSpeed, current or old -> the name used here."""

OTHER_NAMES: dict[str, str] = {
    "zero": "zero_optimization",
    "zero_stage": "zero_optimization.stage",
    "zero_optimization.zero_stage": "zero_optimization.stage",
    "optimizer.name": "optimizer.type",
    "scheduler.name": "scheduler.type",
    **{f"optimizer.{name}": f"optimizer.params.{name}" for name in ("lr", "betas", "eps", "weight_decay", "momentum")},
    **{
        f"{section}.{name}": f"optimizer.params.{meant}"
        for section in ("optimizer", "optimizer.params")
        for name, meant in (("learning_rate", "lr"), ("epsilon", "eps"), ("beta", "betas"), ("decay", "weight_decay"))
    },
    **{f"scheduler.{name}": f"scheduler.params.{name}" for name in ("warmup_num_steps", "total_num_steps")},
    **{f"scheduler.{name}": f"scheduler.params.{name}" for name in ("warmup_min_lr", "warmup_max_lr", "warmup_type")},
    "zero_optimization.offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_param_device": "zero_optimization.offload_param.device",
}
"""Wrong names and places that occur in files -> the intended key."""

OFFLOAD = ("zero_optimization.offload_optimizer", "zero_optimization.offload_param")
"""Sections about the storage of partitions."""

SECTIONS = (
    "fp16",
    "bf16",
    "zero_optimization",
    *OFFLOAD,
    "optimizer",
    "optimizer.params",
    "scheduler",
    "scheduler.params",
    "activation_checkpointing",
    "pipeline",
    "tensor_parallel",
    "tensorboard",
    "data_types",
    "sparse_attention",
)
"""Keys that contain keys."""

HONOURED = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "wall_clock_breakdown",
    "memory_breakdown",
    "fp16.enabled",
    "fp16.loss_scale",
    "fp16.initial_scale_power",
    "fp16.loss_scale_window",
    "fp16.min_loss_scale",
    "fp16.hysteresis",
    "bf16.enabled",
    "zero_optimization.stage",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.allgather_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.zero_quantized_weights",
    "zero_optimization.zero_quantized_gradients",
    "zero_optimization.zero_hpz_partition_size",
    "zero_optimization.cpu_offload",
    "zero_optimization.cpu_offload_param",
    *(f"{section}.{key}" for section in OFFLOAD for key in ("device", "nvme_path")),
    "optimizer.type",
    "scheduler.type",
    "activation_checkpointing.partition_activations",
    "activation_checkpointing.cpu_checkpointing",
    "activation_checkpointing.number_checkpoints",
    "pipeline.stages",
    "pipeline.partition",
    "pipeline.activation_checkpoint_interval",
    "tensor_parallel.autotp_size",
    "sequence_parallel_size",
    "tensorboard.enabled",
    "data_types.grad_accum_dtype",
    *(
        f"sparse_attention.{key}"
        for key in (
            *("mode", "block", "attention", "different_layout_per_head", "horizontal_global_attention"),
            *("num_local_blocks", "num_global_blocks", "num_different_global_patterns", "num_random_blocks"),
            *("num_sliding_window_blocks", "global_block_indices", "global_block_end_indices", "local_window_blocks"),
        )
    ),
)
"""Keys with a meaning here, without the parameters of optimizers and schedulers."""

TOP_LEVEL = frozenset(
    path.partition(".")[0] for path in (*HONOURED, *IGNORED, *FEATURES, *(k for k in LEGACY if "." not in k), *SECTIONS)
)
"""Every known first-level key of DeepSpeed."""
