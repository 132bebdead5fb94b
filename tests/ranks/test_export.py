"""Every export is loaded back before it reports success: adapters, packed experts, tied weights, architectures."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import speedlab
from ranks import architectures
from ranks.pool import Pool
from speedlab.telemetry.checkpoint_index import CheckpointError

pytest.importorskip("transformers")

TOKENS = torch.arange(32).view(2, 16) * 7 % 251 + 3
STAGES = (0, 1, 2, 3)


def config(stage: int, dtype: str = "float32") -> dict[str, Any]:
    return {
        "zero": {"stage": stage, "bucket_bytes": 1},
        "precision": {"dtype": dtype},
        "batch": {"micro_size": 2},
        "optimizer": {"name": "adamw", "lr": 0.01},
    }


def exported(build: Callable[[], nn.Module], folder: Path, stage: int, dtype: str, steps: int) -> tuple[float, str]:
    """The loss after some steps, and the error of the export."""
    engine = speedlab.initialize(model=build(), config=config(stage, dtype))[0]
    try:
        for _ in range(steps):
            engine.backward(engine(input_ids=TOKENS, labels=TOKENS).loss)
            engine.step()
        problem = ""
        try:
            speedlab.export_hf(engine, folder)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if not steps:
            return 0.0, problem
        engine.module.eval()
        with torch.no_grad():
            return float(engine(input_ids=TOKENS, labels=TOKENS).loss), problem
    finally:
        engine.destroy(keep_parameters=False)


def reloaded_loss(folder: Path) -> float:
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, reported = loaded
    assert not reported["missing_keys"]
    assert not reported["unexpected_keys"]
    with torch.no_grad():
        return float(model.eval()(input_ids=TOKENS, labels=TOKENS).loss)


def names_in(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return set(file.keys())


# ---- adapters --------------------------------------------------------------------------------------------------------


def with_adapter(kind: str, base: str = "llama", **options: Any) -> Any:
    """A model with an adapter whose parts are not zero, so that leaving it out shows."""
    import peft

    model = architectures.seeded(base)
    torch.manual_seed(3)
    if kind == "injected":
        model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
        return model
    given = {"task_type": "CAUSAL_LM", **options}
    return peft.get_peft_model(model, getattr(peft, kind)(**given))


def two_adapters() -> Any:
    import peft

    model = with_adapter("LoraConfig", r=4, target_modules=["q_proj"], init_lora_weights=False)
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])
    return model


LORA = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "down_proj"]}
ADAPTERS: dict[str, Callable[[], nn.Module]] = {
    "lora": functools.partial(with_adapter, "LoraConfig", **LORA),
    "rslora with patterns": functools.partial(
        with_adapter, "LoraConfig", **LORA, use_rslora=True, rank_pattern={"q_proj": 2}, alpha_pattern={"q_proj": 3}
    ),
    "dora": functools.partial(with_adapter, "LoraConfig", **LORA, use_dora=True),
    "modules to save": functools.partial(with_adapter, "LoraConfig", **LORA, modules_to_save=["lm_head", "norm"]),
    "trained tokens": functools.partial(with_adapter, "LoraConfig", **LORA, trainable_token_indices=[3, 10, 17]),
    "trained bias": functools.partial(with_adapter, "LoraConfig", "qwen2", **LORA, bias="all"),
    "transposed layers": functools.partial(
        with_adapter, "LoraConfig", "gpt2", r=4, target_modules=["c_attn"], fan_in_fan_out=True
    ),
    "ia3": functools.partial(
        with_adapter, "IA3Config", target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "injected": functools.partial(with_adapter, "injected"),
    "two adapters": two_adapters,
}


def check_adapter(pool: Pool, folder: Path, name: str, stage: int) -> None:
    for loss, problem in pool.run(exported, ADAPTERS[name], folder / "out", stage, "float32", 2):
        assert problem == ""
        assert reloaded_loss(folder / "out") == pytest.approx(loss, rel=2e-6)
    assert not [each for each in names_in(folder / "out") if "lora" in each or "base_model" in each]


@pytest.mark.parametrize("stage", STAGES)
def test_a_merged_adapter_gives_the_loss_of_the_engine(two: Pool, tmp_path: Path, stage: int) -> None:
    pytest.importorskip("peft")
    check_adapter(two, tmp_path, "lora", stage)


@pytest.mark.parametrize("name", [name for name in ADAPTERS if name != "lora"])
def test_kinds_of_adapters_are_merged(two: Pool, tmp_path: Path, name: str) -> None:
    pytest.importorskip("peft")
    check_adapter(two, tmp_path, name, 3)


def test_a_merged_adapter_is_not_rounded(two: Pool, tmp_path: Path) -> None:
    """The frozen base of a bfloat16 run is kept in bfloat16, adapters in float32; `dtype` makes the folder small."""
    pytest.importorskip("peft")
    for _, problem in two.run(exported, ADAPTERS["lora"], tmp_path / "out", 2, "bfloat16", 1):
        assert problem == ""
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


def test_prompts_cannot_be_merged(two: Pool, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    build = functools.partial(with_adapter, "PromptTuningConfig", num_virtual_tokens=4)
    for _, problem in two.run(exported, build, tmp_path / "out", 1, "float32", 0):
        assert "CheckpointError: adapters: default is PROMPT_TUNING, which cannot be merged" in problem
        assert "engine.module.save_pretrained(folder, state_dict=state, is_main_process=rank == 0)" in problem
    assert not (tmp_path / "out").exists()


def adapter_alone(build: Callable[[], nn.Module], folder: Path) -> dict[str, Tensor]:
    """What the refusal advises."""
    engine: Any = speedlab.initialize(model=build(), config=config(3))[0]
    try:
        state = engine.state_dict()
        engine.module.save_pretrained(folder, state_dict=state, is_main_process=engine.world.rank == 0)
        return state
    finally:
        engine.destroy(keep_parameters=False)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT reads it.
def test_the_advice_for_adapters_works(two: Pool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    build = functools.partial(with_adapter, "PromptTuningConfig", num_virtual_tokens=4)
    state = two.run(adapter_alone, build, tmp_path / "adapter")[0]
    loaded = peft.PeftModel.from_pretrained(architectures.seeded("llama"), tmp_path / "adapter")
    assert torch.equal(loaded.prompt_encoder.default.embedding.weight, state["prompt_encoder.default.embedding.weight"])


# ---- other models ----------------------------------------------------------------------------------------------------


def check_architecture(pool: Pool, folder: Path, name: str, stage: int) -> None:
    import transformers

    build = functools.partial(architectures.seeded, name)
    for _, problem in pool.run(exported, build, folder / "out", stage, "float32", 0):
        assert problem == ""
    expected = build()
    loaded = getattr(transformers, type(expected).__name__).from_pretrained(folder / "out")
    for key, value in expected.state_dict().items():
        # Ranks have one thread, by which matrix factorisations (RWKV's initialisation) round otherwise than here.
        torch.testing.assert_close(value, loaded.state_dict()[key], rtol=1e-3, atol=1e-5, msg=key)


@pytest.mark.parametrize(("name", "stage"), [("clip", 3), ("mixtral", 3), ("gpt_oss", 1), ("whisper", 0)])
def test_models_load_back(two: Pool, tmp_path: Path, name: str, stage: int) -> None:
    check_architecture(two, tmp_path, name, stage)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*architectures.CAUSAL, *architectures.OTHERS])
def test_all_models_load_back(two: Pool, tmp_path: Path, name: str) -> None:
    check_architecture(two, tmp_path, name, 3)


def test_packed_experts_have_the_names_of_published_files(two: Pool, tmp_path: Path) -> None:
    check_architecture(two, tmp_path, "mixtral", 2)
    names = names_in(tmp_path / "out")
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in names
    assert not [name for name in names if "gate_up_proj" in name]


def extended() -> Any:
    """A model of transformers with a layer that transformers knows nothing of."""
    model = architectures.seeded("llama")
    model.extra = nn.Linear(4, 4)
    return model


def test_a_model_that_would_not_load_back_is_refused(two: Pool, tmp_path: Path) -> None:
    for _, problem in two.run(exported, extended, tmp_path / "out", 1, "float32", 0):
        assert problem.startswith(
            "CheckpointError: loaded back by transformers' LlamaForCausalLM, extra.bias, extra.weight"
        )
        assert "would be ignored" in problem
    assert list(tmp_path.iterdir()) == []


def test_without_memory_for_the_values_names_are_compared(tmp_path: Path, monkeypatch: Any) -> None:
    from speedlab.engine.checkpoint import hf_model
    from speedlab.engine.checkpoint.safetensors_files import Values

    model = architectures.seeded("llama")
    model.save_pretrained(tmp_path)
    described = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"], "dtype": "float32"}
    tensors = {name: Values.of(value) for name, value in model.named_parameters()}
    hf_model.check_loaded_back(tmp_path, described, tensors)
    other = {**tensors, "model.norm.weight": Values.of(torch.zeros(64))}
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight come back with other values"):
        hf_model.check_loaded_back(tmp_path, described, other)
    monkeypatch.setattr(hf_model, "memory_bytes", lambda: (0, 0))
    hf_model.check_loaded_back(tmp_path, described, other)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        kept = {name: file.get_tensor(name) for name in file.keys() if "norm" not in name}  # noqa: SIM118  # no dict
    from safetensors.torch import save_file

    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="initialised at random"):
        hf_model.check_loaded_back(tmp_path, described, tensors)
