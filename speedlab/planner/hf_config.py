"""Read the shape of a model from Hugging Face's `config.json`: dense decoders of the families in `FAMILIES`.

`model_type` names the family; missing keys have the family's defaults. No transformers, no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from speedlab.config.model_shape import BIASES, Bias, ModelShape
from speedlab.config.serialization import read
from speedlab.planner.layer_shapes import check_shape

LONGEST = 8192
"""Default sequence length of a plan, in tokens, unless the model's limit is lower."""

_SIZES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "ffn_hidden": "intermediate_size",
    "vocab_size": "vocab_size",
    "context": "max_position_embeddings",
}
_GPT2_SIZES = {
    "layers": "n_layer",
    "hidden": "n_embd",
    "heads": "n_head",
    "ffn_hidden": "n_inner",
    "vocab_size": "vocab_size",
    "context": "n_positions",
}
_NEOX_SIZES = {name: key for name, key in _SIZES.items() if name not in ("kv_heads", "head_size")}
_STEPWISE = ("gelu_new", "gelu_fast", "quick_gelu")
"""Activation functions that transformers implements as several operations."""
_OPTIONAL = ("kv_heads", "head_size", "ffn_hidden", "context")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "moe_intermediate_size")
_QUERIES: frozenset[Bias] = frozenset({"attention in"})
_ATTENTION: frozenset[Bias] = frozenset({"attention in", "attention out"})
_HEAD: frozenset[Bias] = frozenset({"head"})
_FEED_FORWARD: frozenset[Bias] = frozenset({"feed-forward"})


@dataclass(frozen=True, kw_only=True)
class Family:
    """How a family's models are built, and the defaults of its files."""

    defaults: Mapping[str, Any]
    """Key of the file -> default."""
    sizes: Mapping[str, str] = field(default_factory=lambda: _SIZES)
    """Field of `ModelShape` -> key of the file."""
    biases: frozenset[Bias] = frozenset()
    """Biases of every model of the family."""
    biases_by_key: Mapping[str, frozenset[Bias]] = field(default_factory=dict)
    """Key of a switch -> biases that it adds."""
    gated: bool = True
    norm: Literal["rms", "layer"] = "rms"
    norms: int = 2
    head_norms: bool | str = False
    """A boolean, or the key of a switch."""
    parallel: bool | str = False
    """A boolean, or the key of a switch."""
    position: Literal["rotary", "learned"] = "rotary"
    tied: bool = False
    activation: str = ""
    """The default activation, if it is computed in steps."""
    dropout: str = ""
    """Key of the residual stream's dropout."""


def _sizes(
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    vocabulary: int,
    context: int,
    kv_heads: int | None = None,
    head_size: int | None = None,
) -> dict[str, Any]:
    values = (layers, hidden, heads, kv_heads, head_size, ffn, vocabulary, context)
    return dict(zip(_SIZES.values(), values, strict=True))


FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        defaults=_sizes(32, 4096, 32, 11008, 32000, 2048),
        biases_by_key={"attention_bias": _ATTENTION, "mlp_bias": _FEED_FORWARD},
    ),
    "mistral": Family(defaults=_sizes(32, 4096, 32, 14336, 32000, 131072, kv_heads=8)),
    "qwen2": Family(defaults=_sizes(32, 4096, 32, 22016, 151936, 32768, kv_heads=32), biases=_QUERIES),
    "qwen3": Family(
        defaults=_sizes(32, 4096, 32, 22016, 151936, 32768, kv_heads=32, head_size=128),
        biases_by_key={"attention_bias": _ATTENTION},
        head_norms=True,
    ),
    "gpt2": Family(
        defaults={"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
        | {"resid_pdrop": 0.1},
        sizes=_GPT2_SIZES,
        biases=BIASES,
        gated=False,
        norm="layer",
        position="learned",
        tied=True,
        activation="gelu_new",
        dropout="resid_pdrop",
    ),
    "gpt_neox": Family(
        defaults=_sizes(44, 6144, 64, 24576, 50432, 2048) | {"attention_bias": True, "use_parallel_residual": True},
        sizes=_NEOX_SIZES,
        biases=BIASES - _ATTENTION,
        biases_by_key={"attention_bias": _ATTENTION},
        gated=False,
        norm="layer",
        parallel="use_parallel_residual",
        dropout="hidden_dropout",
    ),
    "phi": Family(
        defaults=_sizes(24, 2048, 32, 8192, 51200, 2048),
        biases=BIASES | _HEAD,
        gated=False,
        norm="layer",
        norms=1,
        head_norms="qk_layernorm",
        activation="gelu_new",
        parallel=True,
        dropout="resid_pdrop",
    ),
    "phi3": Family(defaults=_sizes(32, 3072, 32, 8192, 32064, 4096), dropout="resid_pdrop"),
    "gemma": Family(
        defaults=_sizes(28, 3072, 16, 24576, 256000, 8192, kv_heads=16, head_size=256),
        biases_by_key={"attention_bias": _ATTENTION},
        tied=True,
    ),
    "gemma2": Family(
        defaults=_sizes(26, 2304, 8, 9216, 256000, 8192, kv_heads=4, head_size=256),
        biases_by_key={"attention_bias": _ATTENTION},
        norms=4,
        tied=True,
    ),
    "gemma3_text": Family(
        defaults=_sizes(26, 2304, 8, 9216, 262208, 131072, kv_heads=4, head_size=256),
        biases_by_key={"attention_bias": _ATTENTION},
        norms=4,
        head_norms=True,
        tied=True,
    ),
}
"""`model_type` -> its family. Defaults are those of transformers' configurations."""

READ = ", ".join(FAMILIES)


def describes(data: Mapping[str, Any]) -> bool:
    """Return whether a file is Hugging Face's `config.json`, rather than a run's configuration.

    Args:
        data: keys and values of the file.
    """
    return isinstance(data.get("model_type"), str) or isinstance(data.get("architectures"), list)


def read_shape(path: Path) -> ModelShape:
    """Return the shape that a `config.json` describes.

    Args:
        path: the file, or its folder.

    Raises:
        ValueError: the model is not supported; the message lists what is.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"{path}: there is no config.json in it; give a Hugging Face model's folder, or its config.json"
        )
    try:
        return shape_of(read(file), _name(file))
    except ValueError as error:
        raise ValueError(str(error) if str(file) in str(error) else f"{file}: {error}") from None


def _name(file: Path) -> str:
    """Return a name for the model: that of the folder, or of the file unless it is `config.json`."""
    return file.resolve().parent.name if file.name == "config.json" else file.stem


def shape_of(data: Mapping[str, Any], name: str) -> ModelShape:
    """Return the shape that the keys of a `config.json` describe.

    Sequences are as long as the model allows, up to `LONGEST`.

    Args:
        data: keys and values of the file.
        name: name of the model.

    Raises:
        ValueError: the model is not supported; the message lists what is.
    """
    kind = data.get("model_type")
    experts = [key for key in _EXPERTS if data.get(key)]
    if experts:
        raise ValueError(
            f"{kind} is a mixture of experts ({experts[0]} {data[experts[0]]}), of which each token uses a part: this "
            f"is not planned. Read are dense decoders: {READ}"
        )
    if not isinstance(kind, str) or kind not in FAMILIES:
        inside = " with a model inside (text_config)" if "text_config" in data else ""
        raise ValueError(
            f"model_type {kind!r}{inside} is not read; read are dense decoders: {READ}. Describe another by --layers, "
            "--hidden, --heads, --kv-heads, --ffn, --vocab, --seq and --gated"
        )
    family = FAMILIES[kind]
    _check_head(data)
    # Defaults of the family, then the values of the file.
    values = {**family.defaults, **data}
    sizes = {
        name: _whole(values, _present(data, name, key), optional=name in _OPTIONAL)
        for name, key in family.sizes.items()
    }
    biases = family.biases.union(*(found for key, found in family.biases_by_key.items() if values.get(key)))
    context = sizes["context"] or LONGEST
    ffn = sizes["ffn_hidden"] or 4 * sizes["hidden"]  # GPT-2's files omit the usual width.
    shape = ModelShape(
        **{**sizes, "context": context, "ffn_hidden": ffn},
        name=name,
        sequence_length=min(context, LONGEST),
        biases=biases,
        gated=family.gated,
        stepwise=data.get("activation_function", data.get("hidden_act", family.activation)) in _STEPWISE,
        norm=family.norm,
        norms=family.norms,
        head_norms=_switch(values, family.head_norms),
        parallel=_switch(values, family.parallel),
        position=family.position,
        tied=bool(values.get("tie_word_embeddings", family.tied)),
        dropout=float(values.get(family.dropout) or 0.0),
    )
    check_shape(shape)
    return shape


def _check_head(data: Mapping[str, Any]) -> None:
    """Raise ValueError for a model that is not a causal language model."""
    named = data.get("architectures") or []
    if named and not any(str(each).endswith(("ForCausalLM", "LMHeadModel")) for each in named):
        raise ValueError(f"architecture {named[0]} is no language model; read are …ForCausalLM and …LMHeadModel")
    for key in ("is_encoder_decoder", "add_cross_attention"):
        if data.get(key):
            raise ValueError(f"{key} is true, and attention to an encoder is not read; read are dense decoders: {READ}")


def _present(data: Mapping[str, Any], name: str, key: str) -> str:
    """Return the file's key of a size: the family's own, or the usual one."""
    return _SIZES[name] if key not in data and _SIZES[name] in data else key


def _whole(values: Mapping[str, Any], key: str, *, optional: bool) -> Any:
    """Return a size; None for an optional one that is missing."""
    value = values.get(key)
    if value is None and optional:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} is {value!r}; it must be a whole number of at least 1")
    return value


def _switch(values: Mapping[str, Any], switch: bool | str) -> bool:
    return bool(values.get(switch)) if isinstance(switch, str) else switch
