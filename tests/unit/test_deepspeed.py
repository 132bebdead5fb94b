"""DeepSpeed's JSON as a configuration: what each key means here, what is ignored or refused, and the way back."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from speedlab import cli
from speedlab.config import ConfigError, OffloadConfig, RunConfig, ScheduleConfig
from speedlab.config.deepspeed import reader
from speedlab.config.deepspeed.auto_values import TRAINER_DEFAULTS
from speedlab.config.deepspeed.schema import FEATURES, HONOURED, IGNORED, LEGACY
from speedlab.config.validation import offload_problems

BATCH = {"train_micro_batch_size_per_gpu": 4}


def dug(config: RunConfig, field: str):
    value = config
    for name in field.split("."):
        value = getattr(value, name)
    return value


def refusals(source, **arguments) -> dict[str, str]:
    return {entry.path: entry.text for entry in RunConfig.deepspeed_reading(source, **arguments).refused}


def params(kind: str, **values) -> dict:
    return {"type": kind, "params": values}


# Honoured keys


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            {"batch.global_size": 64, "batch.micro_size": 4, "batch.accumulation": 2},
        ),
        ({"train_batch_size": 1e2}, {"batch.global_size": 100, "batch.micro_size": None, "batch.accumulation": None}),
        ({"gradient_clipping": 0.5}, {"clip_norm": 0.5}),
        ({"gradient_clipping": 0}, {"clip_norm": None}),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": False, "hysteresis": 2}}, {"precision.dtype": "bfloat16"}),
        ({"bfloat16": {"enabled": True}}, {"precision.dtype": "bfloat16"}),
        ({"bf16": True}, {"precision.dtype": "bfloat16"}),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 500, "min_loss_scale": 2}},
            {
                "precision.dtype": "float16",
                "precision.initial_loss_scale": 4096.0,
                "precision.loss_scale_window": 500,
                "precision.min_loss_scale": 2.0,
            },
        ),
        (
            {"fp16": {"enabled": True, "loss_scale": 128, "min_loss_scale": 0}},
            {"precision.initial_loss_scale": 128.0, "precision.min_loss_scale": 128.0},
        ),
        ({"zero_optimization": {"stage": 3}}, {"zero.stage": 3, "zero.bucket_bytes": 2**20}),
        ({"zero_optimization": True}, {"zero.stage": 1}),
        ({"zero_optimization": False}, {"zero.stage": 0}),
        (
            {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e6}},
            {"zero.bucket_bytes": 10_000_000},
        ),
        ({"zero_optimization": {"stage": 2, "allgather_bucket_size": 1e6}}, {"zero.bucket_bytes": 4_000_000}),
        (
            {
                "fp16": {"enabled": True},
                "zero_optimization": {"stage": 3, "reduce_bucket_size": 7, "prefetch_bucket_size": 100},
            },
            {"zero.bucket_bytes": 200},
        ),
        (
            {"optimizer": params("Adam", lr=3e-4, betas=[0.8, 0.99], eps=1e-6, weight_decay=0.01)},
            {
                "optimizer.name": "adamw",
                "optimizer.lr": 3e-4,
                "optimizer.betas": (0.8, 0.99),
                "optimizer.eps": 1e-6,
                "optimizer.weight_decay": 0.01,
                "schedule.kind": "constant",
                "schedule.warmup_steps": 0,
            },
        ),
        (
            {"optimizer": params("Adam", adam_w_mode=False, weight_decay=0)},
            {"optimizer.name": "adamw", "optimizer.weight_decay": 0.0},
        ),
        (
            {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
            {"optimizer.name": "sgd", "optimizer.lr": 0.1, "optimizer.momentum": 0.0, "optimizer.weight_decay": 0.0},
        ),
        (
            {
                "optimizer": params("AdamW", lr=1e-3),
                "scheduler": params(
                    "WarmupDecayLR",
                    warmup_min_lr=1e-5,
                    warmup_max_lr=2e-4,
                    warmup_num_steps=7,
                    total_num_steps=90,
                    warmup_type="linear",
                ),
            },
            {
                "steps": 90,
                "optimizer.lr": 2e-4,
                "schedule.kind": "linear",
                "schedule.warmup_steps": 7,
                "schedule.floor": 0.05,
            },
        ),
        (
            {
                "optimizer": params("AdamW", lr=1e-3),
                "scheduler": params("WarmupCosineLR", warmup_num_steps=7, total_num_steps=90, cos_min_ratio=0.2),
            },
            {"steps": 90, "optimizer.lr": 1e-3, "schedule.kind": "cosine", "schedule.floor": 0.2},
        ),
        (
            {"scheduler": params("WarmupLR", warmup_max_lr=2e-4)},
            {"optimizer.lr": 2e-4, "schedule.kind": "constant", "schedule.warmup_steps": 1000},
        ),
        (
            {"activation_checkpointing": {"partition_activations": True}},
            {"activation.checkpointing": "block", "activation.partition_inputs": True},
        ),
        (
            {"activation_checkpointing": {"partition_activations": False}},
            {"activation.checkpointing": "none", "activation.partition_inputs": False},
        ),
        ({"activation_checkpointing": {"number_checkpoints": None}}, {"activation.checkpointing": "none"}),
        ({"activation_checkpointing": {"number_checkpoints": 24}}, {"activation.checkpointing": "none"}),
        (
            {"activation_checkpointing": {"number_checkpoints": 24, "partition_activations": True}},
            {"activation.checkpointing": "block"},
        ),
        ({"optimizer": params("Adam", bias_correction=False)}, {"optimizer.bias_correction": False}),
        ({"optimizer": params("AdamW")}, {"optimizer.bias_correction": True}),
        (
            {"optimizer": params("Lion", lr=1e-4, weight_decay=0.3)},
            {
                "optimizer.name": "lion",
                "optimizer.lr": 1e-4,
                "optimizer.betas": (0.9, 0.99),
                "optimizer.weight_decay": 0.3,
            },
        ),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, {"precision.dtype": "bfloat16"}),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}, {"precision.dtype": "bfloat16"}),
        ({"train_batch_size": 8}, {"schedule.kind": "constant", "schedule.warmup_steps": 0}),
        (
            {"pipeline": {"stages": 4, "partition": "best", "activation_checkpoint_interval": 1}},
            {"parallel.pp": 4, "activation.checkpointing": "block"},
        ),
        ({"pipeline": {"stages": "auto"}}, {"parallel.pp": 1}),
        ({"tensor_parallel": {"autotp_size": 2}}, {"parallel.tp": 2}),
        ({"sequence_parallel_size": 2}, {"parallel.cp": 2}),
        ({"tensor_parallel": {"tp": {"tp_size": 2}}}, {"parallel.tp": 2}),
        ({"tensorboard": {"enabled": False}}, {"telemetry.tensorboard": False}),
    ],
)
def test_a_key_that_has_a_meaning_here_is_honoured(data, expected) -> None:
    reading = RunConfig.deepspeed_reading({**BATCH, **data} if "train_batch_size" not in data else data)
    assert not reading.refused
    assert {field: dug(reading.config, field) for field in expected} == expected


def test_what_is_left_out_has_deepspeeds_default_and_it_is_said() -> None:
    reading = RunConfig.deepspeed_reading({**BATCH, "optimizer": {"type": "AdamW"}})
    config = reading.config
    assert (config.zero.stage, config.precision.dtype, config.clip_norm) == (0, "float32", None)
    assert (config.optimizer.lr, config.optimizer.betas, config.optimizer.weight_decay) == (1e-3, (0.9, 0.999), 0.0)
    assert (config.schedule.kind, config.schedule.warmup_steps) == ("constant", 0)
    said = "\n".join(reading.assumed)
    for key in ("zero_optimization.stage", "bf16", "gradient_clipping", "optimizer.params.betas", "scheduler"):
        assert key in said


def test_a_schedule_is_deepspeeds_to_a_step() -> None:
    """After the warm-up no rate is further from DeepSpeed's than its change in one step."""
    from speedlab.optim.lr_schedule import rate_factor

    top, low, warmup, total = 2e-4, 1e-5, 10, 100
    linear = RunConfig.deepspeed_reading(
        {
            **BATCH,
            "scheduler": params(
                "WarmupDecayLR",
                warmup_min_lr=low,
                warmup_max_lr=top,
                warmup_num_steps=warmup,
                total_num_steps=total,
                warmup_type="linear",
            ),
        }
    ).config
    cosine = RunConfig.deepspeed_reading(
        {
            **BATCH,
            "optimizer": params("AdamW", lr=top),
            "scheduler": params("WarmupCosineLR", warmup_num_steps=warmup, total_num_steps=total, cos_min_ratio=0.05),
        }
    ).config
    for step in range(warmup, total):
        done = (step - warmup) / (total - warmup)
        by_line = low + (top - low) * (1 - done)
        by_cosine = top * (0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2)
        assert linear.optimizer.lr * rate_factor(linear.schedule, step, linear.steps) == pytest.approx(by_line)
        assert cosine.optimizer.lr * rate_factor(cosine.schedule, step, cosine.steps) == pytest.approx(by_cosine)
    assert rate_factor(ScheduleConfig(kind="linear", warmup_steps=0, floor=0.5), 200, 100) == 0.5


# Ignored keys and features


@pytest.mark.parametrize("path", [*IGNORED, *FEATURES])
def test_every_known_key_without_effect_has_a_reason(path) -> None:
    value: object = False
    for name in reversed(path.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    reading = RunConfig.deepspeed_reading({**BATCH, **value})
    entry = next(entry for entry in (*reading.ignored, *reading.refused) if entry.path == path)
    assert entry.text
    assert path == "gradient_allreduce_op" or not reading.refused


@pytest.mark.parametrize(
    ("data", "path", "name"),
    [
        ({"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}, "zero_optimization.zenflow", "zenflow"),
        ({"sparse_attention": {"mode": "fixed"}}, "sparse_attention.mode", "sparse-attention"),
        ({"optimizer": params("OneBitAdam", eps_inside_sqrt=True)}, "optimizer.params.eps_inside_sqrt", "optimizer"),
        ({"optimizer": params("Shampoo", lr=1e-3)}, "optimizer.type", "optimizer"),
        (
            {"optimizer": params("Adam", adam_w_mode=False, weight_decay=0.1)},
            "optimizer.params.adam_w_mode",
            "optimizer",
        ),
        ({"optimizer": params("SGD", nesterov=True)}, "optimizer.params.nesterov", "optimizer"),
        ({"scheduler": params("OneCycle", cycle_min_lr=1e-4)}, "scheduler.type", "schedule"),
        (
            {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}},
            "compression_training",
            "compression",
        ),
        ({"elasticity": {"enabled": True}}, "elasticity", "elasticity"),
        ({"curriculum_learning": {"enabled": True}}, "curriculum_learning", "curriculum"),
        ({"data_efficiency": {"enabled": True}}, "data_efficiency", "curriculum"),
        ({"progressive_layer_drop": {"enabled": True}}, "progressive_layer_drop", "layer-drop"),
        ({"amp": {"enabled": True}}, "amp", "amp"),
        ({"fp8": {"enabled": True}}, "fp8", "fp8"),
        ({"expert_parallel": {"enabled": True}}, "expert_parallel", "moe"),
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True}},
            "zero_optimization.zero_quantized_nontrainable_weights",
            "zero++",
        ),
        ({"zero_optimization": {"mics_shard_size": 4}}, "zero_optimization.mics_shard_size", "mics"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op", "gradient-sum"),
        (
            {
                "bf16": {"enabled": True},
                "gradient_accumulation_steps": 2,
                "data_types": {"grad_accum_dtype": "bf16"},
            },
            "data_types.grad_accum_dtype",
            "narrow-states",
        ),
        ({"data_types": {"grad_accum_dtype": "fp16"}}, "data_types.grad_accum_dtype", "narrow-states"),
        (
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
            "bf16.bf16_master_weights_and_grads",
            "narrow-states",
        ),
    ],
)
def test_what_changes_training_or_memory_is_refused_unless_the_caller_goes_without(data, path, name) -> None:
    refused = refusals({**BATCH, **data})
    assert list(refused) == [path]
    assert refused[path].endswith(f'; to go on without it, ignore "{name}"')
    with pytest.raises(ConfigError, match=path):
        RunConfig.from_deepspeed({**BATCH, **data})
    assert RunConfig.deepspeed_reading({**BATCH, **data}).lacking == (name,)
    without = RunConfig.deepspeed_reading({**BATCH, **data}, ignore={name})
    assert without.config is not None
    assert any(entry.path == path and "you asked" in entry.text for entry in without.ignored)


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_plus_plus_is_honoured_at_stage_3_and_acts_at_no_other(stage) -> None:
    keys = {"zero_quantized_weights": True, "zero_hpz_partition_size": 4, "zero_quantized_gradients": True}
    data = {**BATCH, "zero_optimization": {"stage": stage, **keys}}
    reading = RunConfig.deepspeed_reading(data)
    assert reading.config is not None
    zero, acts = reading.config.zero, stage == 3
    assert (zero.quantized_weights, zero.secondary_partition, zero.quantized_gradients) == (
        (True, 4, True) if acts else (False, None, False)
    )
    reported = {entry.path for entry in (reading.honoured if acts else reading.ignored)}
    assert {f"zero_optimization.{key}" for key in keys} <= reported
    again = RunConfig.from_deepspeed({**BATCH, "zero_optimization": reading.config.to_deepspeed()["zero_optimization"]})
    assert again.zero == zero
    none = RunConfig.from_deepspeed({**BATCH, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 1}})
    assert none.zero.secondary_partition is None
    if acts:
        with pytest.raises(ConfigError, match="zero_hpz_partition_size: Input should be greater than or equal to 1"):
            RunConfig.from_deepspeed({**BATCH, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": -4}})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_offload_counts_only_at_the_stages_where_it_acts(stage) -> None:
    cpu = {"device": "cpu", "nvme_path": "/disk"}
    for zero in (
        {"stage": stage, "offload_optimizer": cpu, "offload_param": cpu},
        {"stage": stage, "cpu_offload": True, "cpu_offload_params": True},
    ):
        reading = RunConfig.deepspeed_reading({**BATCH, "zero_optimization": zero})
        offload = reading.config.offload
        assert offload.optimizer == ("host" if stage >= 1 else "none")
        assert offload.parameters == ("host" if stage == 3 else "none")
        assert offload.folder is None
        ignored = [entry for entry in reading.ignored if "it acts from ZeRO stage" in entry.text]
        assert len(ignored) == {0: 2, 1: 1, 2: 1, 3: 0}[stage] * (2 if "offload_param" in zero else 1)


def offload_of(zero: dict, **rest) -> tuple[str, str, Path | None]:
    config = RunConfig.deepspeed_reading({**BATCH, "zero_optimization": zero, **rest}).config
    return config.offload.optimizer, config.offload.parameters, config.offload.folder


def test_states_on_disk_are_in_the_folder_that_the_file_names() -> None:
    nvme = {"device": "nvme", "nvme_path": "/disk"}
    assert offload_of({"stage": 2, "offload_optimizer": nvme}) == ("disk", "none", Path("/disk"))
    both = {"stage": 3, "offload_optimizer": nvme, "offload_param": {"device": "nvme", "nvme_path": "/other"}}
    reading = RunConfig.deepspeed_reading({**BATCH, "zero_optimization": both})
    assert reading.config.offload.folder == Path("/disk")
    assert reading.warnings == (
        "zero_optimization.offload_param.nvme_path: all states on disk are in one folder here, '/disk'",
    )
    left_out = {"stage": 3, "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}}
    reading = RunConfig.deepspeed_reading({**BATCH, "zero_optimization": left_out})
    assert (reading.config.offload.optimizer, reading.config.offload.folder) == ("disk", None)
    assert any("the run's own folder" in text for text in reading.assumed)


def test_parameters_that_lie_away_take_the_optimizer_with_them() -> None:
    for optimizer in ({}, {"offload_optimizer": {"device": "none"}}):
        zero = {"stage": 3, "offload_param": {"device": "cpu"}, **optimizer}
        reading = RunConfig.deepspeed_reading({**BATCH, "zero_optimization": zero})
        assert reading.config.offload == OffloadConfig(optimizer="host", parameters="host")
        assert len(reading.warnings) == 1
        assert reading.warnings[0].startswith("offload_param without offload_optimizer: offload.optimizer is 'host'")
    assert offload_of({"stage": 3, "offload_param": {"device": "none"}}) == ("none", "none", None)
    # A section counts before the switch of older releases.
    zero = {"stage": 3, "cpu_offload": True, "offload_optimizer": {"device": "none"}}
    assert offload_of(zero) == ("none", "none", None)


def test_a_place_that_is_none_is_refused() -> None:
    said = refusals({**BATCH, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "gpu"}}})
    assert said == {
        "zero_optimization.offload_optimizer.device": "'gpu' is none of DeepSpeed's places; it has none, cpu, nvme"
    }
    said = refusals({**BATCH, "zero_optimization": {"stage": 2, "offload_optimizer": True}})
    assert said == {"zero_optimization.offload_optimizer": "expected keys and values in { }, not true"}


def test_how_offload_is_tuned_has_no_effect_and_a_reason() -> None:
    section = {"device": "cpu", "pin_memory": True, "buffer_count": 4, "fast_init": False, "ratio": 0.3}
    reading = RunConfig.deepspeed_reading(
        {**BATCH, "aio": {"queue_depth": 16}, "zero_optimization": {"stage": 2, "offload_optimizer": section}}
    )
    assert reading.config.offload.optimizer == "host"
    ignored = {entry.path.rpartition(".")[2]: entry.text for entry in reading.ignored}
    assert set(ignored) == {"pin_memory", "buffer_count", "fast_init", "ratio", "aio"}
    assert ignored["aio"].endswith("is measured on the disk itself before a run")
    assert not reading.warnings


def test_activations_on_the_host_are_those_of_blocks_that_are_computed_again() -> None:
    config = RunConfig.deepspeed_reading({**BATCH, "activation_checkpointing": {"cpu_checkpointing": True}}).config
    assert (config.offload.activations, config.activation.checkpointing) == ("host", "block")
    config = RunConfig.deepspeed_reading({**BATCH, "activation_checkpointing": {"cpu_checkpointing": False}}).config
    assert (config.offload.activations, config.activation.checkpointing) == ("none", "none")


def test_one_bit_adam_is_read_as_deepspeed_computes_it() -> None:
    numbers = params("OneBitAdam", lr=4e-4, cuda_aware=True, comm_backend_name="nccl")
    reading = RunConfig.deepspeed_reading({**BATCH, "optimizer": numbers})
    optimizer = reading.config.optimizer
    assert (optimizer.name, optimizer.lr, optimizer.freeze_step) == ("onebit_adam", 4e-4, 100_000)
    assert not optimizer.bias_correction, "which DeepSpeed's has not, whatever its default says"
    assert {entry.path.rpartition(".")[2] for entry in reading.ignored} == {"cuda_aware", "comm_backend_name"}
    written = RunConfig(optimizer="onebit_adam", zero=1, steps=100).to_deepspeed()
    assert written["optimizer"]["params"]["freeze_step"] == 20
    assert RunConfig.from_deepspeed(written).to_deepspeed()["optimizer"] == written["optimizer"]
    with pytest.raises(ConfigError, match=r"onebit_adam' needs whole gradients .* zero\.stage 2 partitions them"):
        RunConfig.from_deepspeed({**BATCH, "optimizer": numbers, "zero_optimization": {"stage": 2}})


def test_zero_one_adam_is_read_with_its_intervals_and_written() -> None:
    section = params("ZeroOneAdam", lr=4e-4, var_freeze_step=50, local_step_clipper=8, cuda_aware=False)
    reading = RunConfig.deepspeed_reading({**BATCH, "optimizer": section})
    optimizer = reading.config.optimizer
    assert (optimizer.name, optimizer.freeze_step, optimizer.max_local_steps) == ("zero_one_adam", 50, 8)
    assert (optimizer.variance_doubling, optimizer.local_doubling) == (16, 32_678), "DeepSpeed's defaults"
    assert not optimizer.bias_correction, "which DeepSpeed's has not"
    assert {entry.path.rpartition(".")[2] for entry in reading.ignored} == {"cuda_aware"}
    assert RunConfig.from_deepspeed(reading.config.to_deepspeed()).optimizer == optimizer
    never = RunConfig(optimizer="zero_one_adam", zero=0, steps=100).to_deepspeed()
    assert never["optimizer"]["params"]["var_freeze_step"] == 101, "behind the run's end"
    with pytest.raises(ConfigError, match=r"zero\.stage 1 partitions what they change; set zero\.stage to 0, or"):
        RunConfig.from_deepspeed({**BATCH, "optimizer": section, "zero_optimization": {"stage": 1}})
    with pytest.raises(ConfigError, match=r"zero\.stage 2 partitions them; set zero\.stage to 0"):
        RunConfig.from_deepspeed({**BATCH, "optimizer": section, "zero_optimization": {"stage": 2}})


# Slips


@pytest.mark.parametrize(
    ("data", "path", "text"),
    [
        ({"gradient_cliping": 1.0}, "gradient_cliping", "the nearest is 'gradient_clipping'"),
        ({"zero_optimization": {"stag": 3}}, "zero_optimization.stag", "the nearest is 'zero_optimization.stage'"),
        ({"zero_optimisation": {"stage": 3}}, "zero_optimisation", "the nearest is 'zero_optimization'; correct it"),
        ({"Zero-Optimization": {"stage": 3}}, "Zero-Optimization", "the nearest is 'zero_optimization'"),
        ({"zero_opt": {"stage": 3}}, "zero_opt", "the nearest is 'zero_optimization'"),
        ({"optimiser": {"type": "AdamW"}}, "optimiser", "the nearest is 'optimizer'"),
        ({"schedular": {"type": "WarmupLR"}}, "schedular", "the nearest is 'scheduler'"),
        ({"BF16": {"enabled": True}}, "BF16", "the nearest is 'bf16'"),
        ({"bf16": {"enable": True}}, "bf16.enable", "the nearest is 'bf16.enabled'"),
        ({"activation_checkpoint": {}}, "activation_checkpoint", "the nearest is 'activation_checkpointing'"),
        ({"optimizer": {"type": "AdamW", "lr": 1}}, "optimizer.lr", "the nearest is 'optimizer.params.lr'"),
        (
            {"optimizer": params("AdamW", learning_rate=2e-5)},
            "optimizer.params.learning_rate",
            "the nearest is 'optimizer.params.lr'",
        ),
        (
            {"scheduler": params("WarmupLR", warmup_steps=10)},
            "scheduler.params.warmup_steps",
            "the nearest is 'scheduler.params.warmup_num_steps'",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"devise": "cpu"}}},
            "zero_optimization.offload_optimizer.devise",
            "the nearest is 'zero_optimization.offload_optimizer.device'",
        ),
        (
            {"data_types": {"grad_accum_dtype": "int4"}},
            "data_types.grad_accum_dtype",
            'expected fp32, bf16 or fp16, not "int4"',
        ),
        (
            {"zero_optimization": {"scheduler": {"type": "WarmupLR"}}},
            "zero_optimization.scheduler",
            "DeepSpeed has 'scheduler' at the first level, not inside 'zero_optimization'; move it there",
        ),
        ({"train_micro_batch_size_per_gpu": [8]}, "train_micro_batch_size_per_gpu", "expected a whole number, not [8]"),
        ({"train_batch_size": 1.5}, "train_batch_size", "expected a whole number, not 1.5"),
        ({"train_batch_size": True}, "train_batch_size", "expected a whole number, not true"),
        ({"train_batch_size": float("inf")}, "train_batch_size", "expected a whole number, not Infinity"),
        ({"train_batch_size": 0}, "train_batch_size", "Input should be greater than or equal to 1 (got 0)"),
        ({"fp16": 3}, "fp16", "expected keys and values in { }, not 3"),
        ({"optimizer": "Adam"}, "optimizer", 'expected keys and values in { }, not "Adam"'),
        ({"zero_optimization": {"stage": 5}}, "zero_optimization.stage", "Input should be 0, 1, 2 or 3 (got 5)"),
        ({"fp16": {"enabled": "yes"}}, "fp16.enabled", 'expected true or false, not "yes"'),
        ({"fp16": {"enabled": True, "initial_scale_power": 5000}}, "fp16.initial_scale_power", "cannot be scaled"),
        (
            {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
            "bf16.enabled",
            "fp16 and bf16 are both enabled, but a model computes in one dtype; turn one off",
        ),
        ({"optimizer": params("AdamW", lr=-1)}, "optimizer.params.lr", "Input should be greater than 0 (got -1)"),
        (
            {"optimizer": params("AdamW", betas=[0.9])},
            "optimizer.params.betas",
            "expected two numbers in [ ], not [0.9]",
        ),
        (
            {"scheduler": params("WarmupDecayLR", warmup_num_steps=1)},
            "scheduler.params.total_num_steps",
            "it is missing, so the rate's fall has no end; give it",
        ),
        (
            {"scheduler": params("WarmupDecayLR", total_num_steps=-1)},
            "scheduler.params.total_num_steps",
            "Input should be greater than or equal to 1 (got -1)",
        ),
    ],
)
def test_a_slip_is_refused_under_the_key_as_it_is_written(data, path, text) -> None:
    refused = refusals({**BATCH, **data})
    assert list(refused) == [path]
    assert text in refused[path]


def test_unknown_keys_are_ignored_with_a_warning_and_remarks_without() -> None:
    reading = RunConfig.deepspeed_reading(
        {**BATCH, "my_key": 1, "_remark": "x", "zero_optimization": {"verbose": True}}
    )
    assert reading.config is not None
    assert {entry.path for entry in reading.ignored} >= {"my_key", "_remark", "zero_optimization.verbose"}
    assert [text.partition(":")[0] for text in reading.warnings] == ["my_key", "zero_optimization.verbose"]


def test_what_is_near_a_key_that_the_file_has_is_no_slip() -> None:
    reading = RunConfig.deepspeed_reading({"train_batch_size": 8, "batch_size": 3})
    assert reading.config.batch.global_size == 8
    assert reading.warnings == ("batch_size: DeepSpeed has no such key",)


def test_refusals_say_what_the_caller_at_hand_can_do(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = {**BATCH, "amp": {"enabled": True}, "fp8": {"enabled": True}}
    (tmp_path / "ds.json").write_text(json.dumps(data))
    call = """speedlab.RunConfig.from_deepspeed('ds.json', ignore={"amp", "fp8"})"""
    in_python = f"to go on without amp, fp8: config={call}"
    with pytest.raises(ConfigError) as caught:
        RunConfig.load("ds.json")
    assert str(caught.value).splitlines()[-1] == in_python
    assert "--" not in str(caught.value)
    assert str(RunConfig.deepspeed_reading("ds.json")).splitlines()[4] == in_python
    in_terminal = (
        "to go on without amp, fp8: `speedlab config --from-deepspeed ds.json --ignore amp fp8 > config.yaml`, "
        "then `speedlab train config.yaml`"
    )
    for argv in (["config", "--from-deepspeed", "ds.json"], ["config", "ds.json"], ["train", "ds.json"]):
        assert cli.main(argv) == 2
        said = capsys.readouterr().err
        assert in_terminal in said
        assert "RunConfig" not in said
    assert cli.main(["config", "--from-deepspeed", "ds.json", "--ignore", "amp", "fp8"]) == 0
    args = {"max_steps": 10}
    for source, reported in ((data, "config, training_args=args"), ("ds.json", "'ds.json', training_args=args")):
        with pytest.raises(ConfigError) as caught:
            RunConfig.from_deepspeed(source, training_args=args)
        assert f"from_deepspeed({reported}, ignore=" in str(caught.value)


def test_two_names_of_one_key() -> None:
    reading = RunConfig.deepspeed_reading({**BATCH, "bfloat16": {"enabled": True}, "bf16": {"enabled": False}})
    assert reading.config.precision.dtype == "float32"
    assert reading.warnings == ("bf16.enabled and bfloat16.enabled are two names of one key; bf16.enabled counts",)
    other_order = RunConfig.deepspeed_reading({**BATCH, "bf16": {"enabled": False}, "bfloat16": {"enabled": True}})
    assert other_order.config == reading.config


def test_older_names_lead_to_names_of_today() -> None:
    known = {*HONOURED, *IGNORED, *FEATURES, "bf16", "tensor_parallel", "sparse_attention"}
    assert set(LEGACY.values()) <= known


def test_the_batch_equation_is_checked_for_a_number_of_engines() -> None:
    data = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}
    assert RunConfig.deepspeed_reading(data, engines=4).config.batch.global_size == 24
    text = refusals(data, engines=3)["train_batch_size"]
    assert "global 24 = micro 3 × accumulation 2 × dp 3 does not hold; the right side is 18" in text
    assert list(refusals({**BATCH, "tensor_parallel": {"autotp_size": 3}}, engines=4)) == ["layout"]


# "auto"

AUTOMATIC = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "optimizer": params("AdamW", lr="auto", betas="auto", eps="auto", weight_decay="auto"),
    "scheduler": params(
        "WarmupDecayLR",
        warmup_min_lr="auto",
        warmup_max_lr="auto",
        warmup_num_steps="auto",
        total_num_steps="auto",
        warmup_type="linear",
    ),
    "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto", "reduce_bucket_size": "auto"},
}


def test_auto_without_arguments_is_speedlabs_default_and_it_is_said() -> None:
    reading = RunConfig.deepspeed_reading(AUTOMATIC)
    config, plain = reading.config, RunConfig()
    assert (config.optimizer, config.batch, config.clip_norm) == (plain.optimizer, plain.batch, plain.clip_norm)
    assert (config.precision, config.zero.bucket_bytes) == (plain.precision, plain.zero.bucket_bytes)
    (warning,) = reading.warnings
    assert warning.startswith('there are no training_args to fill "auto", so SpeedLab\'s defaults stand: ')
    assert "optimizer.params.lr" in warning


def test_auto_is_filled_from_training_arguments() -> None:
    args = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "learning_rate": 2e-4,
        "weight_decay": 0.02,
        "adam_beta2": 0.95,
        "max_grad_norm": 0.3,
        "warmup_steps": 0.1,
        "max_steps": 55,
        "bf16": True,
        "hidden_size": 100,
        "output_dir": "x",
    }
    reading = RunConfig.deepspeed_reading(AUTOMATIC, training_args=args)
    config = reading.config
    assert (config.batch.micro_size, config.batch.accumulation, config.batch.global_size) == (2, 3, None)
    assert (config.optimizer.lr, config.optimizer.weight_decay, config.optimizer.betas) == (2e-4, 0.02, (0.9, 0.95))
    assert (config.clip_norm, config.precision.dtype, config.optimizer.eps) == (0.3, "bfloat16", 1e-8)
    assert (config.steps, config.schedule.warmup_steps, config.schedule.kind) == (55, 6, "linear")
    assert config.zero.bucket_bytes == 9000 * 2  # 0.9 · hidden² elements of bfloat16
    assert reading.warnings == ()


def test_arguments_that_are_not_given_have_the_trainers_default() -> None:
    reading = RunConfig.deepspeed_reading(AUTOMATIC, training_args={"fp16": True})
    assert (reading.config.optimizer.lr, reading.config.batch.micro_size) == (5e-5, 8)
    assert reading.config.precision.dtype == "float16"
    (warning,) = reading.warnings
    assert warning.startswith('training_args do not fill "auto", so SpeedLab\'s defaults stand: ')
    assert warning.endswith("scheduler.params.total_num_steps")


def test_a_number_that_is_not_the_arguments_is_said() -> None:
    reading = RunConfig.deepspeed_reading({**BATCH, "gradient_clipping": 0.5}, training_args={"max_grad_norm": 1.0})
    assert reading.config.clip_norm == 0.5
    assert reading.warnings == (
        "gradient_clipping is 0.5 and training_args.max_grad_norm is 1.0; the file counts, the Trainer refuses both",
    )
    assert RunConfig.deepspeed_reading({**BATCH, "gradient_clipping": 0.5}, training_args={}).warnings == ()


ZERO_ONLY = {"zero_optimization": {"stage": 2}, "gradient_clipping": "auto"}


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (
            {"learning_rate": 2e-5, "max_steps": 100},
            {
                "optimizer.name": "adamw",
                "optimizer.lr": 2e-5,
                "optimizer.betas": (0.9, 0.999),
                "optimizer.weight_decay": 0.0,
                "schedule.kind": "linear",
                "schedule.warmup_steps": 0,
                "schedule.floor": 0.0,
                "steps": 100,
                "batch.micro_size": 8,
                "batch.accumulation": 1,
                "clip_norm": 1.0,
                "precision.dtype": "float32",
            },
        ),
        (
            {
                "max_steps": 100,
                "adam_beta1": 0.8,
                "adam_beta2": 0.95,
                "adam_epsilon": 1e-6,
                "weight_decay": 0.1,
                "lr_scheduler_type": "cosine",
                "warmup_ratio": 0.03,
                "bf16": True,
                "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": 4,
            },
            {
                "optimizer.lr": 5e-5,
                "optimizer.betas": (0.8, 0.95),
                "optimizer.eps": 1e-6,
                "optimizer.weight_decay": 0.1,
                "schedule.kind": "cosine",
                "schedule.warmup_steps": 3,
                "schedule.floor": 0.0,
                "precision.dtype": "bfloat16",
                "batch.micro_size": 2,
                "batch.accumulation": 4,
            },
        ),
        (
            {"optim": "sgd", "lr_scheduler_type": "constant", "warmup_steps": 9, "max_steps": 5},
            {
                "optimizer.name": "sgd",
                "optimizer.momentum": 0.0,
                "schedule.kind": "constant",
                "schedule.warmup_steps": 0,
                "steps": 5,
            },
        ),
        (
            {"optim": "lion_32bit", "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 9},
            {"optimizer.name": "lion", "schedule.kind": "constant", "schedule.warmup_steps": 9},
        ),
        (
            {
                "learning_rate": 1e-4,
                "lr_scheduler_type": "cosine_with_min_lr",
                "lr_scheduler_kwargs": {"min_lr": 1e-5},
                "max_steps": 10,
            },
            {"schedule.kind": "cosine", "schedule.floor": pytest.approx(0.1)},
        ),
    ],
)
def test_the_trainer_brings_what_the_file_leaves_out(args, expected) -> None:
    reading = RunConfig.deepspeed_reading(ZERO_ONLY, training_args=args)
    assert {field: dug(reading.config, field) for field in expected} == expected
    assert reading.warnings == ()


def test_the_trainers_rate_is_its_own_schedules_after_the_warm_up() -> None:
    optimization = pytest.importorskip("transformers.optimization")
    import torch

    from speedlab.optim.lr_schedule import rate_factor

    for kind in ("linear", "cosine"):
        args = {"max_steps": 50, "warmup_steps": 10, "lr_scheduler_type": kind}
        config = RunConfig.deepspeed_reading(ZERO_ONLY, training_args=args).config
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        theirs = optimization.get_scheduler(kind, optimizer, num_warmup_steps=10, num_training_steps=50)
        for step in range(50):
            if step >= 10:
                assert rate_factor(config.schedule, step, 50) == pytest.approx(theirs.get_last_lr()[0])
            optimizer.step()
            theirs.step()


def test_sections_of_the_file_come_before_the_trainers() -> None:
    own = {"optimizer": params("AdamW", lr=3e-4), "scheduler": params("WarmupLR", warmup_num_steps=5)}
    args = {"learning_rate": 2e-5, "lr_scheduler_type": "cosine", "max_steps": 40}
    optimizer_only = RunConfig.deepspeed_reading({**ZERO_ONLY, "optimizer": own["optimizer"]}, training_args=args)
    assert (optimizer_only.config.optimizer.lr, optimizer_only.config.schedule.kind) == (3e-4, "cosine")
    schedule_only = RunConfig.deepspeed_reading({**ZERO_ONLY, "scheduler": own["scheduler"]}, training_args=args)
    assert (schedule_only.config.optimizer.lr, schedule_only.config.schedule.warmup_steps) == (2e-5, 5)
    assert schedule_only.config.steps == 40
    no_rate = RunConfig.deepspeed_reading({**ZERO_ONLY, "optimizer": {"type": "AdamW"}}, training_args=args)
    assert no_rate.config.optimizer.lr == 1e-3
    assert no_rate.warnings == (
        'optimizer.params.lr is left out, so it is DeepSpeed\'s 0.001, under the Trainer, too; write "auto" for '
        "training_args.learning_rate 2e-05",
    )


def test_what_the_trainer_would_bring_is_refused_where_it_is_not_built() -> None:
    args = {"optim": "adafactor", "lr_scheduler_type": "polynomial", "max_steps": 9}
    refused = refusals(ZERO_ONLY, training_args=args)
    assert list(refused) == ["training_args.optim", "training_args.lr_scheduler_type"]
    without = RunConfig.deepspeed_reading(ZERO_ONLY, training_args=args, ignore={"optimizer", "schedule"})
    assert (without.config.optimizer.name, without.config.schedule.kind) == ("adamw", "constant")
    kwargs = {"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {"power": 2}, "max_steps": 9}
    assert list(refusals(ZERO_ONLY, training_args=kwargs)) == ["training_args.lr_scheduler_kwargs"]


def test_a_fall_of_unknown_length_is_said() -> None:
    reading = RunConfig.deepspeed_reading(ZERO_ONLY, training_args={"learning_rate": 2e-5, "warmup_ratio": 0.1})
    assert (reading.config.optimizer.lr, reading.config.steps, reading.config.schedule.warmup_steps) == (2e-5, 200, 20)
    (warning,) = reading.warnings
    assert warning.startswith("training_args.max_steps is -1: how many steps the data make is not known here")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"optim": 3}, "training_args.optim: expected a name, not 3"),
        ({"learning_rate": "fast"}, "training_args.learning_rate: expected a number, not 'fast'"),
        (object(), "training_args: expected names and values, not object; give args.to_dict()"),
    ],
)
def test_training_arguments_that_are_none_are_refused(args, message) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.deepspeed_reading(AUTOMATIC, training_args=args)
    assert str(caught.value) == message


def test_the_trainers_defaults_are_those_of_transformers() -> None:
    training_args = pytest.importorskip("transformers.training_args")
    theirs = {field.name: field.default for field in dataclasses.fields(training_args.TrainingArguments)}
    for name, value in TRAINER_DEFAULTS.items():
        # hidden_size is the model's; warmup_ratio went into warmup_steps with transformers 5.
        assert name in ("hidden_size", "warmup_ratio") or theirs[name] == value, name


# Files, doors, the terminal


def test_a_file_is_recognised_by_its_keys(tmp_path) -> None:
    def written(text: str, name: str = "x.json") -> bool:
        path = tmp_path / name
        path.write_text(text)
        return reader.recognises(path, RunConfig)

    assert written('{"train_batch_size": 8, // yes\n}')
    assert written('{"optimizer": {"type": "Adam"}}')
    assert written('{"zero_optimization": {"stage": STAGE}}')
    assert not written(RunConfig().to_json())
    assert not written('{"zero": 2, "train_batch_size": 8}')
    assert not written('{"optimizer": {"lr": 1}}')
    assert not written("{}")
    assert not written("train_batch_size: 8", "x.yaml")
    assert not reader.recognises(tmp_path / "absent.json", RunConfig)


def test_load_takes_a_deepspeed_file_and_warns_once(tmp_path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text('{"train_batch_size": 8, "my_key": 1, "zero_optimization": {"stage": 3},}')
    with pytest.warns(UserWarning, match="trailing comma") as caught:
        config = RunConfig.load(path)
    assert (config.batch.global_size, config.zero.stage) == (8, 3)
    (warning,) = caught
    assert str(warning.message).splitlines() == [
        f"{path}: one trailing comma (line 1): JSON has none; they were skipped",
        f"{path}: my_key: DeepSpeed has no such key",
    ]


def test_a_broken_or_refused_file_is_named(tmp_path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": SIZE}')
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(path)
    assert str(caught.value).startswith(f"{path}: not valid JSON at line 1, column 22: 'SIZE' is no value")
    path.write_text('{"train_batch_size": 8, "fp8": {"enabled": true}}')
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_deepspeed(path)
    assert str(caught.value).startswith(f"{path}: fp8: computing in float8")
    assert caught.value.problems[0][0] == "fp8"
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        RunConfig.from_deepspeed(path)
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ConfigError, match="is not text: byte 7 is not UTF-8"):
        RunConfig.from_deepspeed(path)


def test_text_is_read_like_a_file_and_unknown_features_are_refused() -> None:
    assert RunConfig.deepspeed_reading('// mine\n{"train_batch_size": 8}').config.batch.global_size == 8
    with pytest.raises(ConfigError, match=r"^ignore: 'ofload' is no feature; known: amp, "):
        RunConfig.deepspeed_reading(BATCH, ignore={"ofload"})


def test_the_terminal_prints_configuration_and_lists(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(
        json.dumps(
            {"train_batch_size": 8, "steps_per_print": 5, "zero_optimization": {"stage": 1}, "fp8": {"enabled": True}}
        )
    )
    assert cli.main(["config", "--from-deepspeed", "ds.json"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "refused:\n  fp8 = " in said.err
    assert cli.main(["config", "--from-deepspeed", "ds.json", "--ignore", "fp8"]) == 0
    out = capsys.readouterr().out
    assert "#   train_batch_size = 8: batch.global_size 8\n" in out
    assert "#   steps_per_print = 5: because every step is recorded" in out
    (tmp_path / "again.yaml").write_text(out)
    assert RunConfig.load("again.yaml").zero.stage == 1
    assert cli.main(["config", "--from-deepspeed", "ds.json", "--ignore", "fp8", "--json"]) == 0
    said = capsys.readouterr()
    assert RunConfig(**json.loads(said.out)).batch.global_size == 8
    assert "steps_per_print" in said.err
    assert cli.main(["config", "again.yaml", "--from-deepspeed", "ds.json"]) == 2


# The way back

CONFIGS = st.fixed_dictionaries(
    {
        "steps": st.integers(1, 10**6),
        "zero": st.fixed_dictionaries({"stage": st.sampled_from([0, 1, 2, 3]), "bucket_bytes": st.integers(1, 10**9)}),
        "precision": st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["auto", "float32", "bfloat16", "float16"]),
                "initial_loss_scale": st.sampled_from([1.0, 1000.0, 2.0**16]),
                "min_loss_scale": st.sampled_from([0.5, 1.0]),
            }
        ),
        "optimizer": st.fixed_dictionaries(
            {
                "name": st.sampled_from(["adamw", "lion", "sgd"]),
                "lr": st.floats(1e-6, 1),
                "weight_decay": st.floats(0, 1),
                "bias_correction": st.booleans(),
            }
        ),
        "schedule": st.fixed_dictionaries(
            {
                "kind": st.sampled_from(["cosine", "linear", "constant"]),
                "warmup_steps": st.integers(0, 3000),
                "floor": st.floats(0, 1),
            }
        ),
        "batch": st.fixed_dictionaries(
            {key: st.none() | st.integers(1, 4096) for key in ("global_size", "micro_size", "accumulation")}
        ),
        "parallel": st.fixed_dictionaries({"tp": st.sampled_from([1, 2]), "pp": st.sampled_from([1, 2])}),
        "activation": st.sampled_from([("none", False), ("block", False), ("block", True)]).map(
            lambda chosen: {"checkpointing": chosen[0], "partition_inputs": chosen[1]}
        ),
        "offload": st.fixed_dictionaries(
            {key: st.sampled_from(["none", "host", "disk"]) for key in ("optimizer", "parameters")}
            | {"activations": st.sampled_from(["none", "host"]), "folder": st.sampled_from([None, "/disk"])}
        ),
        "clip_norm": st.none() | st.floats(1e-3, 10),
    }
)


@settings(deadline=None, max_examples=150)
@given(data=CONFIGS)
def test_what_is_written_is_read_and_written_again_the_same(data) -> None:
    offload = OffloadConfig(**data["offload"])
    assume(
        not offload_problems(offload, stage=data["zero"]["stage"], checkpointing=data["activation"]["checkpointing"])
    )
    config = RunConfig(**data)
    written = config.to_deepspeed()
    reading = RunConfig.deepspeed_reading(json.loads(json.dumps(written)))
    again = reading.config
    if config.zero.stage >= 1:  # Below it DeepSpeed moves no optimizer states.
        assert (again.offload.optimizer, again.offload.parameters) == (offload.optimizer, offload.parameters)
    assert again.offload.activations == offload.activations
    assert again.to_deepspeed() == written
    assert (again.zero.stage, again.clip_norm, again.activation) == (
        config.zero.stage,
        config.clip_norm,
        config.activation,
    )
    assert (again.parallel.tp, again.parallel.pp) == (config.parallel.tp, config.parallel.pp)
    assert (again.optimizer.name, again.optimizer.lr) == (config.optimizer.name, config.optimizer.lr)
    assert again.optimizer.weight_decay == config.optimizer.weight_decay
    assert config.optimizer.name != "adamw" or again.optimizer.bias_correction == config.optimizer.bias_correction
    assert again.schedule.kind == config.schedule.kind
    if config.schedule.kind != "constant":
        assert again.steps == config.steps
        assert again.schedule.floor == pytest.approx(config.schedule.floor, rel=1e-8)
    if config.precision.dtype != "auto":
        assert again.precision.dtype == config.precision.dtype


def test_a_constant_loss_scale_comes_back_constant() -> None:
    fp16 = {"enabled": True, "loss_scale": 128.0}
    assert RunConfig.deepspeed_reading({**BATCH, "fp16": fp16}).config.to_deepspeed()["fp16"] == fp16


def test_lamb_is_read_with_its_coefficients_and_written() -> None:
    config = RunConfig.from_deepspeed({"optimizer": params("Lamb", lr=4e-4, max_coeff=0.5, bias_correction=False)})
    optimizer = config.optimizer
    assert (optimizer.name, optimizer.lr, optimizer.betas) == ("lamb", 4e-4, (0.9, 0.999))
    assert (optimizer.max_coeff, optimizer.min_coeff, optimizer.bias_correction) == (0.5, 0.01, False)
    again = RunConfig.from_deepspeed(config.to_deepspeed()).optimizer
    assert again == optimizer
    with pytest.raises(ConfigError, match=r"min_coeff 0.01 is more than optimizer.max_coeff 0.001"):
        RunConfig(optimizer={"name": "lamb", "max_coeff": 0.001})
    for changes, reported in (
        ({"zero": 2, "offload": {"optimizer": "host"}}, "offload.optimizer 'host' would bring them twice"),
        ({"precision": {"moments": "8bit"}}, "norms of whole parameters, and precision.moments is '8bit'"),
        ({"precision": {"masters": "none", "dtype": "bfloat16"}}, "precision.masters is 'none'"),
        ({"optimizer": {"in_backward": True}, "clip_norm": None}, "in_backward makes each unit's update in one"),
    ):
        with pytest.raises(ConfigError, match=reported):
            RunConfig(**{**changes, "optimizer": {"name": "lamb", **changes.get("optimizer", {})}})


def test_one_bit_lamb_is_read_and_written() -> None:
    section = params("OneBitLamb", lr=4e-4, freeze_step=70, factor_max=3.0, cuda_aware=False)
    config = RunConfig.from_deepspeed({"optimizer": section, "zero_optimization": {"stage": 1}})
    optimizer = config.optimizer
    assert (optimizer.name, optimizer.freeze_step, optimizer.bias_correction) == ("onebit_lamb", 70, False)
    assert (optimizer.factor_max, optimizer.factor_min, optimizer.coeff_beta) == (3.0, 0.5, 0.9)
    assert RunConfig.from_deepspeed(config.to_deepspeed()).optimizer == optimizer
