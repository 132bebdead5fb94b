"""Transformers architectures that compute exactly the same as the built-in GPT: parameter names and layouts.

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
    """The transformers tensors of one of our parameters: joined along our first dimension, each transposed or not."""

    names: tuple[str, ...]
    transposed: bool = False

    def join(self, values: list[Tensor]) -> Tensor:
        """Return our parameter from their tensors.

        Args:
            values: Their tensors, in the order of `names`.
        """
        own = [value.t() if self.transposed else value for value in values]
        return (own[0] if len(own) == 1 else torch.cat(own)).contiguous()

    def split(self, whole: Tensor) -> list[Tensor]:
        """Return their tensors from our parameter.

        Args:
            whole: Our parameter.
        """
        # A 0-dimensional parameter cannot be split.
        parts = whole.chunk(len(self.names)) if len(self.names) > 1 else [whole]
        return [(part.t() if self.transposed else part).contiguous() for part in parts]


@dataclass(frozen=True)
class Architecture:
    """A transformers model: its configuration, and its tensors for each of our parameters."""

    config: dict[str, Any]
    parameters: Mapping[str, Theirs]
    prefix: str
    """Prefix of all names except the head's; some files omit it."""


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the built-in GPT's parameters, by name.

    Args:
        config: The model's shape.
    """
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in GPT(config).named_parameters()}


def architecture_of(config: ModelConfig) -> Architecture:
    """Return the transformers architecture of a built-in GPT.

    Args:
        config: The model's shape.

    Raises:
        CheckpointError: If no architecture computes exactly the same.
    """
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
