"""Shapes of Hugging Face's `config.json`: parameters are those of transformers' own models, and what is not read is
refused with what is."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from speedlab import cli
from speedlab.config import AttentionConfig, RunConfig
from speedlab.engine.loss import loss_of
from speedlab.engine.memory_ledger import activation_trace
from speedlab.engine.model_check import plan_module
from speedlab.layout import Layout
from speedlab.models.hf_attention import registered
from speedlab.planner.hf_config import FAMILIES, read_shape, shape_of
from speedlab.planner.layer_shapes import shape_parameters
from speedlab.planner.memory.predict import predict_memory
from speedlab.planner.setup import Setup

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


def _built(kind: str, **values: Any) -> tuple[int, Any]:
    """Parameters of transformers' own model, and its configuration."""
    config = AutoConfig.for_model(kind, **values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters()), config


def _some(kind: str, rng: random.Random, known: dict[str, Any]) -> dict[str, Any]:
    """A small model of a family, with everything that a file of it may say."""
    heads, size = rng.choice([2, 4, 6]), rng.choice([8, 16])
    values: dict[str, Any] = {"vocab_size": rng.choice([97, 128]), "tie_word_embeddings": rng.random() < 0.5}
    values |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    for key in ("attention_bias", "mlp_bias", "qk_layernorm", "use_parallel_residual"):
        if key in known:
            values[key] = rng.random() < 0.5
    if kind == "gpt2":
        own = {"n_layer": 3, "n_embd": heads * size, "n_head": heads, "n_inner": rng.choice([None, 40])}
        return values | own | {"n_positions": 33}
    values |= {"num_hidden_layers": 3, "hidden_size": heads * size, "num_attention_heads": heads}
    values |= {"intermediate_size": rng.choice([48, 56]), "max_position_embeddings": 40}
    if "num_key_value_heads" in known:
        values["num_key_value_heads"] = rng.choice([1, 2, heads])
    if "head_dim" in known and rng.random() < 0.5:
        values["head_dim"] = rng.choice([4, 12, 24])
    return values


@pytest.mark.parametrize("kind", FAMILIES)
def test_parameters_are_those_of_transformers(kind: str) -> None:
    whole, config = _built(kind)
    assert shape_parameters(shape_of({"model_type": kind}, "silent")) == whole, "what a file leaves out is the default"
    rng = random.Random(kind)
    for _ in range(5):
        values = _some(kind, rng, config.to_dict())
        count, built = _built(kind, **values)
        for data in (built.to_dict(), built.to_diff_dict(), {"model_type": kind, **values}):
            assert shape_parameters(shape_of(data, "small")) == count, values


SMALL: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 4, "head_dim": 64},
    "gpt_neox": {},
    "phi": {},
    "phi3": {"num_key_value_heads": 2},
    "gpt2": {"n_layer": 4, "n_embd": 256, "n_head": 4, "n_positions": 256, "resid_pdrop": 0, "attn_pdrop": 0},
}


SPARSE = AttentionConfig(kind="block_sparse", block=16, window=48)


def _config(kind: str, ffn: int, sparse: AttentionConfig | None) -> Any:
    sizes: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4}
    sizes |= {"intermediate_size": ffn, "max_position_embeddings": 256}
    values = {**(sizes if kind != "gpt2" else {"n_inner": ffn, "embd_pdrop": 0}), **SMALL[kind]}
    config = AutoConfig.for_model(kind, vocab_size=512, tie_word_embeddings=False, pad_token_id=0, **values)
    if sparse is not None:
        config._attn_implementation = registered(sparse)
    return config


def _planned(config: Any, documents: str = "joined") -> int:
    """Activations of transformers' own module, run on fake tensors, in float32 on processors."""
    data = {"sequence_length": 256, "documents": documents}
    run = RunConfig(data=data, zero=0, precision="float32", batch={"micro_size": 2})
    return plan_module(lambda: AutoModelForCausalLM.from_config(config), run).activations


def _traced(kind: str, ffn: int, sparse: AttentionConfig | None = None) -> tuple[int, int]:
    """Activations of transformers' own module, run on fake tensors, and of the planner, in float32 on processors."""
    config = _config(kind, ffn, sparse)
    setup = Setup(
        shape=shape_of(config.to_dict(), kind),
        layout=Layout(),
        zero_stage=0,
        dtype="float32",
        micro_size=2,
        accumulation=1,
        **({} if sparse is None else {"attention": "sparse", "pattern": sparse}),
    )
    (rank,) = predict_memory(setup, device="cpu")
    return _planned(config), rank.activations


def _held(config: Any, batch: tuple[Tensor, ...]) -> int:
    """Activations of transformers' own module, run on real tensors."""
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    with activation_trace(lambda: own) as trace:
        loss_of(model.train(), batch, None).backward()
    return trace.peak_bytes


@pytest.mark.parametrize("documents", ["joined", "separate"])
def test_a_module_is_planned_with_the_mask_that_it_makes(documents: str) -> None:
    """A mask leads to another kernel of attention. Real batches have a mask if documents are separate only."""
    config, tokens = _config("gpt_neox", 1024, None), torch.zeros(2, 256, dtype=torch.int64)
    positions = (torch.arange(256) % 128).expand(2, -1)
    batch = (tokens, tokens.clone(), positions) if documents == "separate" else (tokens, tokens.clone())
    assert _planned(config, documents) == pytest.approx(_held(config, batch), rel=0.002)


@pytest.mark.parametrize("kind", SMALL)
def test_activations_are_near_those_of_transformers(kind: str) -> None:
    """Its norms are written otherwise. What a wider feed-forward layer holds more is nearly alike: a tensor that was
    left out would be a fifth."""
    (real, ours), (wide_real, wide_ours) = _traced(kind, 1024), _traced(kind, 2048)
    assert ours == pytest.approx(real, rel=0.12)
    assert wide_ours - ours == pytest.approx(wide_real - real, rel=0.05)


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "gpt2", "phi3"])
def test_activations_of_sparse_attention_are_near_those_of_transformers(kind: str) -> None:
    """Keys and values of fewer heads are there once for each head of queries."""
    real, ours = _traced(kind, 1024, SPARSE)
    assert ours == pytest.approx(real, rel=0.01)


def test_a_folder_is_read_and_planned(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "Meta-Llama-3-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    shape = read_shape(folder)
    assert shape == read_shape(folder / "config.json")
    assert (shape.name, shape.sequence_length, shape_parameters(shape)) == ("Meta-Llama-3-8B", 8192, 8_030_261_248)
    assert (shape.gated, shape.kv_heads, shape.tied, shape.position) == (True, 8, False, "rotary")
    assert cli.main(["plan", str(folder), "--machines", "8xA100", "--zero", "3", "--seq", "2048"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Meta-Llama-3-8B: 8.03 G parameters, bfloat16, on 1 × 8 A100-80")
    assert "sequences of 2,048" in printed


def test_long_contexts_are_not_planned_whole_unless_asked() -> None:
    assert shape_of({**LLAMA, "max_position_embeddings": 131072}, "long").sequence_length == 8192


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "mixtral", "num_local_experts": 8}, r"mixtral is a mixture of experts \(num_local_experts 8\)"),
        ({"model_type": "mamba"}, "model_type 'mamba' is not read; read are dense decoders: llama, mistral, qwen2"),
        ({"model_type": "gemma3", "text_config": {}}, r"'gemma3' with a model inside \(text_config\) is not read"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "is no language model; read are …ForCausalLM"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "attention to an encoder is not read"),
        ({"hidden_size": "4096"}, "hidden_size is '4096'; it must be a whole number"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None; it must be a whole number"),
        ({"num_attention_heads": 24}, "hidden 4096 does not divide by heads 24; use"),
        ({"num_key_value_heads": 5}, "heads 32 do not divide by kv_heads 5"),
    ],
)
def test_what_is_not_read_is_refused_with_what_is(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        shape_of({**LLAMA, **changes}, "other")


def test_a_wrong_file_is_named(tmp_path: Path, capsys) -> None:
    assert cli.main(["plan", str(tmp_path)]) == 2
    assert "there is no config.json in it" in capsys.readouterr().err
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "model_type": "mamba"}))
    assert cli.main(["plan", str(tmp_path)]) == 2
    assert f"{path}: model_type 'mamba' is not read" in capsys.readouterr().err
    path.write_text("{")
    assert cli.main(["plan", str(path)]) == 2
    assert f"{path}: not valid JSON at line 1" in capsys.readouterr().err
    assert cli.main(["plan", "meta-llama/Meta-Llama-3-8B"]) == 2
    assert "a Hugging Face model is read from its downloaded config.json" in capsys.readouterr().err
