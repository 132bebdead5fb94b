"""Files as they are in use: each is read as its author meant it, or refused at the key or the place that is at fault.

`CASES` are small files of this project's own. `EXPECTED` speaks of public files that are not part of it: the test looks
for them in the folder that SPEEDLAB_DEEPSPEED_CONFIGS names, and is skipped where there is none.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from speedlab.config import ConfigError, RunConfig
from speedlab.config.deepspeed import reader

FOLDER_VARIABLE = "SPEEDLAB_DEEPSPEED_CONFIGS"


@dataclass(frozen=True)
class Read:
    """The file is a configuration; some of its fields."""

    fields: dict[str, Any]
    warnings: tuple[str, ...] = ()
    """Starts of what is said, in order."""


@dataclass(frozen=True)
class Refused:
    """The file is refused at these keys; without the features in `ignore` it is read, unless that is empty."""

    paths: tuple[str, ...]
    ignore: tuple[str, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Broken:
    """The text is not JSON, nor anything near it."""

    line: int
    column: int
    text: str


Expected = Read | Refused | Broken

ON_HOST = {"offload.optimizer": "host", "offload.parameters": "host"}
ALONE = "offload_param without offload_optimizer"
LOG = "scheduler.params.warmup_type is left out, which is 'log'"
NO_ARGS = 'there are no training_args to fill "auto"'

EXPECTED: dict[str, Expected] = {
    "001_ai-forever_ru-gpts_gpt3_xl_sparse_2048.json": Refused(
        ("sparse_attention.different_layout_per_head",),
        ("head-layouts",),
        {
            "model.attention.kind": "block_sparse",
            "model.attention.pattern": "fixed",
            "model.attention.block": 16,
            "model.attention.window": 128,
            "model.attention.global_blocks": 1,
            "batch.micro_size": 2,
            "batch.accumulation": 1,
            "precision.dtype": "float16",
            "precision.loss_scale_window": 2000,
            "precision.min_loss_scale": 1.0,
            "zero.stage": 2,
            "zero.bucket_bytes": 100_000_000,
        },
    ),
    "003_aqlaboratory_openfold_deepspeed_config.json": Read(
        {
            "offload.optimizer": "host",
            "precision.dtype": "bfloat16",
            "clip_norm": 0.1,
            "zero.stage": 2,
            "activation.checkpointing": "block",
        },
    ),
    "005_axolotl-ai-cloud_axolotl_zero3_bf16_cpuoffload_params.json": Read(
        {**ON_HOST, "precision.dtype": "bfloat16", "zero.stage": 3, "clip_norm": 1.0}, (ALONE, NO_ARGS)
    ),
    "007_benywon_ChiQA_ds_config.json": Read(
        {
            "batch.global_size": 256,
            "batch.micro_size": 32,
            "optimizer.lr": 1e-5,
            "optimizer.weight_decay": 0.01,
            "precision.initial_loss_scale": 256.0,
            "precision.loss_scale_window": 100,
            "zero.stage": 2,
            "zero.bucket_bytes": 166_000_000,
        },
        ("zero_optimization.verbose",),
    ),
    "009_CalogeroZarbo_bioshield_ds_config.json": Read(
        {"batch.global_size": 4, "precision.dtype": "float16", "zero.stage": 0, "clip_norm": None}
    ),
    "011_catid_cifar10deepspeed_deepspeed_config.json": Refused(
        ("scheduler.type",),
        ("schedule",),
        {
            "schedule.kind": "constant",
            "optimizer.lr": 1e-4,
            "optimizer.betas": (0.8, 0.999),
            "clip_norm": 5.0,
            "telemetry.tensorboard": False,
        },
    ),
    "013_CoinCheung_gdGPT_ds_config.json": Broken(3, 1, "put it in { }"),
    "015_deepspeedai_DeepSpeed_smoke_ds_zero3.json": Read(
        {"optimizer.lr": 1e-6, "optimizer.betas": (0.9, 0.95), "zero.stage": 3, "zero.bucket_bytes": 100_000_000}
    ),
    "017_deepspeedai_DeepSpeed_deepspeed_bsz24_fp16_config.json": Read(
        {
            "zero.stage": 1,
            "batch.global_size": 24,
            "batch.micro_size": 3,
            "optimizer.lr": 3e-5,
            "precision.dtype": "float16",
            "clip_norm": None,
            "telemetry.tensorboard": False,
            "optimizer.bias_correction": False,
        },
    ),
    "019_deepspeedai_DeepSpeed_ds_config_z3_deepcompile_no_persist.json": Read(
        {
            "batch.global_size": 8,
            "schedule.kind": "constant",
            "schedule.warmup_steps": 1000,
            "optimizer.weight_decay": 3e-7,
            "precision.dtype": "bfloat16",
            "zero.stage": 3,
        },
        (LOG,),
    ),
    "021_deepspeedai_DeepSpeedExamples_zero3_nvme_offload_annotated.json": Read(
        {
            "zero.stage": 3,
            "batch.global_size": 1,
            "offload.parameters": "disk",
            "offload.optimizer": "host",
            "offload.folder": Path("/local_nvme/sglang"),
        },
        ("138 comments", ALONE, NO_ARGS),
    ),
    "023_deepspeedai_DeepSpeedExamples_zf_config.json": Refused(
        ("zero_optimization.zenflow",),
        ("zenflow",),
        {"offload.optimizer": "host", "optimizer.lr": 2e-5, "zero.stage": 2},
    ),
    "025_duyubo_GPU-Training-Profiling-for-DeepSpeed_ds_config_zero3.json": Read(
        {
            "precision.dtype": "auto",
            "precision.initial_loss_scale": 512.0,
            "precision.min_loss_scale": 512.0,
            "zero.stage": 3,
            "schedule.kind": "constant",
            "optimizer.lr": 1e-3,
        },
        (LOG, NO_ARGS),
    ),
    "027_haotian-liu_LLaVA_zero3_offload.json": Read(
        {**ON_HOST, "precision.dtype": "bfloat16", "zero.stage": 3, "clip_norm": 1.0}, (LOG, NO_ARGS)
    ),
    "029_hiyouga_LLaMA-Factory_ds_z3_fp8_config.json": Refused(
        ("fp8",),
        ("fp8",),
        {"offload.optimizer": "host", "precision.dtype": "float32", "zero.stage": 3, "clip_norm": 0.001},
    ),
    "031_hiyouga_LLaMA-Factory_ds_z3_e7_gradaccum_bf16.json": Read(
        {"precision.dtype": "bfloat16", "zero.stage": 3, "zero.bucket_bytes": 400_000_000}, (NO_ARGS,)
    ),
    "033_HuangLK_transpeeder_ds_config.json": Read(
        {
            "batch.global_size": 128,
            "batch.micro_size": 16,
            "precision.initial_loss_scale": 4096.0,
            "optimizer.lr": 1e-5,
            "schedule.kind": "linear",
            "schedule.warmup_steps": 100,
            "schedule.floor": 0.1,
            "steps": 1000,
            "zero.stage": 0,
            "activation.checkpointing": "none",
        },
        (LOG,),
    ),
    "035_huggingface_accelerate_zero_stage1_config.json": Read(
        {"zero.stage": 1, "zero.bucket_bytes": 2**20, "schedule.kind": "linear", "batch.accumulation": 1},
        (LOG, NO_ARGS),
    ),
    "037_InternLM_xtuner_deepspeed_zero3_offload.json": Read(
        {**ON_HOST, "precision.dtype": "float16", "zero.stage": 3}, (NO_ARGS,)
    ),
    "039_LLaVA-VL_LLaVA-NeXT_zero3pp.json": Read(
        {
            "zero.stage": 3,
            "zero.quantized_weights": True,
            "zero.secondary_partition": 16,
            "zero.quantized_gradients": True,
        },
        (NO_ARGS,),
    ),
    "041_MantasLukauskas_DeepSpeed-Test_zero3.json": Broken(46, 1, "the file ends before '{' of line 1, column 1"),
    "043_microsoft_DeepSpeedExamples_ds_zero_stage_2_config_curriculum_fixed_linear.json": Refused(
        ("curriculum_learning",),
        ("curriculum",),
        {"batch.global_size": 512, "optimizer.lr": 1.5e-4, "clip_norm": 1.0, "zero.stage": 2},
    ),
    "045_microsoft_DeepSpeedExamples_ds_zero_stage_infinity_config.json": Read(
        {
            "offload.optimizer": "disk",
            "offload.parameters": "disk",
            "offload.folder": Path("/nvme_data"),
            "batch.micro_size": 4,
            "zero.stage": 3,
            "zero.bucket_bytes": 100_000_000,
        },
        ("zero_optimization.stage3_param_persitence_threshold",),
    ),
    "047_microsoft_DeepSpeedExamples_ds_config.json": Refused(("train_micro_batch_size_per_gpu",)),
    "049_microsoft_DeepSpeedExamples_ds_config_nvme.json": Read(
        {
            "offload.parameters": "disk",
            "offload.optimizer": "host",
            "batch.micro_size": 1,
            "zero.bucket_bytes": 2_000_000_000,
        },
        (ALONE,),
    ),
    "051_microsoft_DeepSpeedExamples_ds_config.json": Read(
        {"batch.global_size": 256, "batch.micro_size": 16, "optimizer.lr": 1e-3, "precision.dtype": "float32"},
        ("one trailing comma (line 19)",),
    ),
    "053_microsoft_DeepSpeedExamples_deepspeed_bsz4k_01adam_config_seq128_nccl.json": Refused(
        ("optimizer.type",), ("optimizer",), {"optimizer.lr": 4e-4, "optimizer.weight_decay": 0.01}
    ),
    "055_microsoft_DeepSpeedExamples_deepspeed_bsz4k_progressive_layer_drop_config_seq128.json": Refused(
        ("progressive_layer_drop",), ("layer-drop",), {"batch.global_size": 4096, "optimizer.weight_decay": 0.01}
    ),
    "057_microsoft_DeepSpeedExamples_ds_config_gpt_base_random_ltd.json": Refused(
        ("data_efficiency",), ("curriculum",), {"zero.stage": 0, "optimizer.betas": (0.8, 0.999)}
    ),
    "059_microsoft_Megatron-DeepSpeed_ds_config-gpt.json": Read(
        {"batch.global_size": 1, "zero.stage": 0, "precision.initial_loss_scale": 4096.0}
    ),
    "061_microsoft_Megatron-DeepSpeed_ds_config_gpt_TEMPLATE_elastic.json": Broken(
        2, 24, "'CONFIG_BATCH_SIZE' is no value; if it is a template's placeholder, fill it in"
    ),
    "063_microsoft_Megatron-DeepSpeed_ds_config.json": Read(
        {"batch.global_size": 16, "batch.micro_size": 16, "zero.stage": 1, "precision.dtype": "bfloat16"}
    ),
    "065_OptimalScale_LMFlow_ds_config_multimodal.json": Read(
        {"batch.micro_size": 1, "precision.dtype": "float32", "zero.stage": 0}
    ),
    "067_SulRash_minLLMTrain_ds_config.json": Read(
        {"offload.optimizer": "host", "precision.dtype": "auto", "zero.stage": 2, "zero.bucket_bytes": 400_000_000},
        (NO_ARGS,),
    ),
    "069_THUDM_GLM_ds_onebit_config.json": Read(
        {
            "optimizer.name": "onebit_adam",
            "optimizer.lr": 1.5e-4,
            "optimizer.freeze_step": 10_000,
            "optimizer.bias_correction": False,
            "zero.stage": 0,
            "batch.micro_size": 8,
        }
    ),
    "071_TUM-DI-Lab-Graph-Scaling_ocp_ds_config.json": Read(
        {"batch.global_size": 2, "batch.accumulation": 1, "optimizer.lr": 1e-4, "zero.stage": 1},
        ("one trailing comma (line 17)", "optimizer.params.freeze_step"),
    ),
}

CASES: dict[str, tuple[str, Expected]] = {
    "everything a Trainer fills": (
        '{"bf16": {"enabled": "auto"}, "gradient_clipping": "auto", "train_batch_size": "auto",\n'
        ' "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": true}},\n'
        ' "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "overlap_comm": true}}',
        Read({"precision.dtype": "auto", "zero.stage": 2, "clip_norm": 1.0, "optimizer.weight_decay": 0.0}, (NO_ARGS,)),
    ),
    "comments and a trailing comma": (
        '{\n  // why\n  "train_batch_size": 8, # sequences\n  "zero_optimization": {"stage": 1,},\n}\n',
        Read({"batch.global_size": 8, "zero.stage": 1}, ("2 comments (the first in line 2)", "2 trailing commas")),
    ),
    "keys that stand twice": (
        '{"train_batch_size": 8, "train_batch_size": 16}',
        Read({"batch.global_size": 16}, ("the key 'train_batch_size' is twice in one object",)),
    ),
    "names of the first releases": (
        '{"train_batch_size": 8, "zero_optimization": true, "allgather_size": 500, "bfloat16": {"enabled": true}}',
        Read({"zero.stage": 1, "precision.dtype": "bfloat16"}),
    ),
    "offload under old names": (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 3, "cpu_offload": true, "cpu_offload_params": true,\n'
        ' "stage3_gather_fp16_weights_on_model_save": true}}',
        Read({**ON_HOST, "zero.stage": 3}),
    ),
    "offload to disk, and its tuning": (
        '{"train_micro_batch_size_per_gpu": 1, "aio": {"thread_count": 2}, "zero_optimization": {"stage": 3,\n'
        ' "offload_param": {"device": "nvme", "nvme_path": "/disk"}, "offload_optimizer": {"device": "nvme"}}}',
        Read(
            {
                "batch.micro_size": 1,
                "zero.stage": 3,
                "offload.optimizer": "disk",
                "offload.parameters": "disk",
                "offload.folder": Path("/disk"),
            }
        ),
    ),
    "features that are not built": (
        '{"train_batch_size": 8, "sparse_attention": {"mode": "fixed"}, "optimizer": {"type": "Muon",\n'
        ' "params": {"lr": 0.001}}, "curriculum_learning": {"enabled": true}, "fp8": {"enabled": true}}',
        Refused(
            ("optimizer.type", "sparse_attention.mode", "curriculum_learning", "fp8"),
            ("optimizer", "sparse-attention", "curriculum", "fp8"),
            {"optimizer.name": "adamw"},
        ),
    ),
    "a batch for autotuning": (
        '{"train_micro_batch_size_per_gpu": [8], "autotuning": {"enabled": true}}',
        Refused(("train_micro_batch_size_per_gpu",)),
    ),
    "reports and services": (
        '{"train_batch_size": 8, "wandb": {"enabled": true}, "flops_profiler": {"enabled": true},\n'
        ' "comms_logger": {"enabled": true}, "steps_per_print": 1e5, "tensorboard": {"enabled": true}}',
        Read({"telemetry.tensorboard": True}),
    ),
    "no braces around the keys": ('// mine\n\n"train_batch_size": 8\n', Broken(3, 1, "put it in { }")),
    "an object that never ends": ('{\n"fp16": {"enabled": true\n}\n', Broken(4, 1, "'{' of line 1, column 1")),
    "a template": ('{"train_batch_size": BATCH}', Broken(1, 22, "if it is a template's placeholder, fill it in")),
}


@pytest.mark.parametrize("name", CASES)
def test_our_own_files(name, tmp_path) -> None:
    text, expected = CASES[name]
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    hold(path, expected)


@pytest.mark.parametrize("name", EXPECTED)
def test_public_files(name) -> None:
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        pytest.skip(f"{FOLDER_VARIABLE} names no folder of public DeepSpeed files; they are not part of the project")
    hold(Path(folder) / name, EXPECTED[name])


def test_no_public_file_is_without_expectation() -> None:
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        pytest.skip(f"{FOLDER_VARIABLE} names no folder of public DeepSpeed files; they are not part of the project")
    assert {path.name for path in Path(folder).glob("*.json")} == set(EXPECTED)


def hold(path: Path, expected: Expected) -> None:
    """The file does what is expected of it, through every door."""
    assert reader.recognises(path, RunConfig)
    if isinstance(expected, Broken):
        with pytest.raises(ConfigError) as caught:
            RunConfig.deepspeed_reading(path)
        start = f"{path}: not valid JSON at line {expected.line}, column {expected.column}: "
        assert str(caught.value).startswith(start)
        assert expected.text in str(caught.value)
        return
    reading = RunConfig.deepspeed_reading(path)
    assert all(entry.text and entry.path for entry in (*reading.honoured, *reading.ignored, *reading.refused))
    if isinstance(expected, Refused):
        assert tuple(entry.path for entry in reading.refused) == expected.paths
        with pytest.raises(ConfigError) as caught:
            _ = reading.config
        assert str(caught.value).startswith(f"{path}: {expected.paths[0]}: ")
        if not expected.ignore:
            return
        reading = RunConfig.deepspeed_reading(path, ignore=expected.ignore)
    else:
        assert len(reading.warnings) == len(expected.warnings), reading.warnings
        for said, start in zip(reading.warnings, expected.warnings, strict=True):
            assert said.startswith(start)
    config = reading.config
    assert {name: dug(config, name) for name in expected.fields} == expected.fields
    written = config.to_deepspeed()
    assert RunConfig.deepspeed_reading(written).config.to_deepspeed() == written


def dug(config: RunConfig, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value
