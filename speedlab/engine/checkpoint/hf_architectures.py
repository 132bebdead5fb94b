"""Under which names, and in which order of elements, transformers holds a model that it computes exactly as ours.

| position | norm  | bias | architecture of transformers                                   |
|----------|-------|------|----------------------------------------------------------------|
| learned  | layer | yes  | GPT-2: its linear layers are stored transposed                 |
| rotary   | rms   | any  | Arcee: Llama's attention with a feed-forward of two layers     |
| rotary   | layer | yes  | StarCoder2                                                     |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speedlab.config import ModelConfig
from speedlab.models import GPT
from speedlab.telemetry.checkpoint_index import CheckpointError

_ROTARY_BASE = 10_000.0


@dataclass(frozen=True)
class Theirs:
    """How transformers holds one of our parameters: several of theirs end to end along ours' first dimension, each
    transposed or not."""

    names: tuple[str, ...]
    transposed: bool = False

    def join(self, values: list[Tensor]) -> Tensor:
        """Our parameter from theirs."""
        own = [value.t() if self.transposed else value for value in values]
        return (own[0] if len(own) == 1 else torch.cat(own)).contiguous()

    def split(self, whole: Tensor) -> list[Tensor]:
        """Theirs from our parameter."""
        # A parameter without dimensions has no parts.
        parts = whole.chunk(len(self.names)) if len(self.names) > 1 else [whole]
        return [(part.t() if self.transposed else part).contiguous() for part in parts]


@dataclass(frozen=True)
class Architecture:
    """A model of transformers: its configuration, and how it holds each of our parameters."""

    config: dict[str, Any]
    parameters: Mapping[str, Theirs]
    prefix: str
    """Before the names of all but the head; some files leave it out."""


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The parameters of the built-in GPT."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in GPT(config).named_parameters()}


def architecture_of(config: ModelConfig) -> Architecture:
    """What transformers calls a GPT of this configuration. Raises CheckpointError when it has none that is exact."""
    if config.position == "learned" and config.norm == "layer" and config.bias:
        return Architecture(_gpt2_config(config), _gpt2_names(config), "transformer.")
    if config.position == "rotary" and (config.norm == "rms" or config.bias):
        up, down = ("up_proj", "down_proj") if config.norm == "rms" else ("c_fc", "c_proj")
        return Architecture(_rotary_config(config), _rotary_names(config, up, down), "model.")
    raise CheckpointError(
        f"no architecture of transformers computes position {config.position!r} with norm {config.norm!r} and bias "
        f"{str(config.bias).lower()}; it has position 'learned' with norm 'layer' and bias true (GPT-2), position "
        "'rotary' with norm 'rms' (Arcee) or with norm 'layer' and bias true (StarCoder2)"
    )


def _gpt2_config(config: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": config.layers,
        "n_embd": config.hidden,
        "n_head": config.heads,
        "n_inner": config.ffn_hidden,
        "n_positions": config.context,
        "vocab_size": config.vocab_size,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        "tie_word_embeddings": config.tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _gpt2_names(config: ModelConfig) -> dict[str, Theirs]:
    layers = {
        "attention_norm": ("ln_1", False),
        "attention.qkv": ("attn.c_attn", True),
        "attention.out": ("attn.c_proj", True),
        "mlp_norm": ("ln_2", False),
        "mlp.up": ("mlp.c_fc", True),
        "mlp.down": ("mlp.c_proj", True),
    }
    names = {
        "embedding.weight": Theirs(("transformer.wte.weight",)),
        "positions.weight": Theirs(("transformer.wpe.weight",)),
        "norm.weight": Theirs(("transformer.ln_f.weight",)),
        "norm.bias": Theirs(("transformer.ln_f.bias",)),
    }
    for block in range(config.layers):
        for ours, (theirs, transposed) in layers.items():
            names[f"blocks.{block}.{ours}.weight"] = Theirs((f"transformer.h.{block}.{theirs}.weight",), transposed)
            names[f"blocks.{block}.{ours}.bias"] = Theirs((f"transformer.h.{block}.{theirs}.bias",))
    return names if config.tied else {**names, "head.weight": Theirs(("lm_head.weight",))}


def _rotary_config(config: ModelConfig) -> dict[str, Any]:
    common = {
        "num_hidden_layers": config.layers,
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn_hidden,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.heads,
        "max_position_embeddings": config.context,
        "vocab_size": config.vocab_size,
        "hidden_act": "gelu_pytorch_tanh",
        "rope_parameters": {"rope_type": "default", "rope_theta": _ROTARY_BASE},
        "attention_dropout": config.dropout,
        "tie_word_embeddings": config.tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if config.norm == "rms":
        own: dict[str, Any] = {"rms_norm_eps": 1e-5, "attention_bias": config.bias, "mlp_bias": config.bias}
        return {"model_type": "arcee", "architectures": ["ArceeForCausalLM"], **common, **own}
    own = {"norm_epsilon": 1e-5, "use_bias": True, "residual_dropout": config.dropout}
    own |= {"embedding_dropout": config.dropout, "sliding_window": None}
    return {"model_type": "starcoder2", "architectures": ["Starcoder2ForCausalLM"], **common, **own}


def _rotary_names(config: ModelConfig, up: str, down: str) -> dict[str, Theirs]:
    layers = {
        "attention_norm": ("input_layernorm",),
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.out": ("self_attn.o_proj",),
        "mlp_norm": ("post_attention_layernorm",),
        "mlp.up": (f"mlp.{up}",),
        "mlp.down": (f"mlp.{down}",),
    }
    names: dict[str, tuple[str, ...]] = {
        "embedding": ("model.embed_tokens",),
        "norm": ("model.norm",),
        "head": ("lm_head",),
    }
    for block in range(config.layers):
        for ours, theirs in layers.items():
            names[f"blocks.{block}.{ours}"] = tuple(f"model.layers.{block}.{name}" for name in theirs)
    return {
        name: Theirs(tuple(f"{theirs}.{kind}" for theirs in names[module]))
        for name in shapes_of(config)
        for module, _, kind in (name.rpartition("."),)
    }
