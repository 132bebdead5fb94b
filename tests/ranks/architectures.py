"""Tiny random models of the architectures that people train, built from their configurations without a download."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

HIDDEN, LAYERS, VOCAB = 64, 2, 256

_DECODER = {
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS = {"head_dim": 16}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ENCODER = {**_DECODER, "type_vocab_size": 2}
_VISION = {
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
_TEXT = {**_DECODER, "projection_dim": 32}
_T5 = {"d_model": HIDDEN, "d_kv": 16, "d_ff": 128, "num_layers": LAYERS, "num_heads": 4, "vocab_size": VOCAB}
_BART = {
    "d_model": HIDDEN,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
}
_DEEPSEEK = {
    **_DECODER,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_LINEAR_ATTENTION = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
_MAMBA = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 4}

CAUSAL: dict[str, dict[str, Any]] = {
    "llama": _DECODER,
    "qwen2": _DECODER,
    "qwen3": {**_DECODER, **_HEADS},
    "mistral": _DECODER,
    "gemma2": {**_DECODER, **_HEADS},
    "gemma3_text": {**_DECODER, **_HEADS},
    "gemma3n_text": {
        **_DECODER,
        **_HEADS,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"],
        "activation_sparsity_pattern": [0.0] * LAYERS,
        "intermediate_size": [128] * LAYERS,
    },
    "phi3": _DECODER,
    "olmo2": _DECODER,
    "smollm3": _DECODER,
    "glm4": {**_DECODER, **_HEADS},
    "granite": _DECODER,
    "falcon": {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "vocab_size": VOCAB},
    "bloom": {"hidden_size": HIDDEN, "n_layer": LAYERS, "n_head": 4, "vocab_size": VOCAB},
    "gpt2": {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 4, "vocab_size": VOCAB, "n_positions": 64},
    "gpt_neox": _DECODER,
    "opt": {**_DECODER, "ffn_dim": 128, "word_embed_proj_dim": HIDDEN},
    "mixtral": {**_DECODER, **_EXPERTS},
    "llama4_text": {**_DECODER, **_HEADS, **_EXPERTS, "intermediate_size_mlp": 128, "interleave_moe_layer_step": 2},
    "qwen3_moe": {**_DECODER, **_HEADS, **_EXPERTS},
    "qwen3_next": {
        **_DECODER,
        **_HEADS,
        **_EXPERTS,
        **_LINEAR_ATTENTION,
        "shared_expert_intermediate_size": 32,
    },
    "deepseek_v3": _DEEPSEEK,
    "gpt_oss": {**_DECODER, **_HEADS, **_EXPERTS, "layer_types": ["sliding_attention", "full_attention"]},
    "glm4_moe": {
        **_DECODER,
        **_HEADS,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "mamba2": {
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCAB,
        "state_size": 8,
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 2,
        "chunk_size": 8,
    },
    "rwkv": {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "vocab_size": VOCAB, "context_length": 64},
    "jamba": {
        **_DECODER,
        **_MAMBA,
        "num_experts": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
    },
}
"""Decoders for AutoModelForCausalLM, by `model_type`: arguments of their configuration."""

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("AutoModelForSeq2SeqLM", _T5),
    "bart": ("AutoModelForSeq2SeqLM", _BART),
    "bert": ("AutoModelForMaskedLM", _ENCODER),
    "modernbert": ("AutoModelForMaskedLM", {**_DECODER, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}),
    "deberta-v2": ("AutoModelForMaskedLM", {**_ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "vit": ("AutoModelForImageClassification", _VISION),
    "dinov2": ("AutoModelForImageClassification", {**_VISION, "mlp_ratio": 2}),
    "clip": ("AutoModel", {"text_config": _TEXT, "vision_config": _VISION, "projection_dim": 32}),
    "siglip": ("AutoModel", {"text_config": _DECODER, "vision_config": _VISION}),
    "whisper": (
        "AutoModelForSpeechSeq2Seq",
        {**_BART, "num_mel_bins": 8, "max_source_positions": 16, "pad_token_id": 0},
    ),
    "llava": (
        "AutoModelForImageTextToText",
        {
            "text_config": {"model_type": "llama", **_DECODER},
            "vision_config": {"model_type": "clip_vision_model", **_VISION},
            "image_token_index": 5,
            "vision_feature_layer": -1,
        },
    ),
    "qwen2_vl": (
        "AutoModelForImageTextToText",
        {
            "text_config": {
                **_DECODER,
                "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
            },
            "vision_config": {"depth": LAYERS, "embed_dim": 64, "hidden_size": HIDDEN, "num_heads": 4, "patch_size": 4},
            "image_token_id": 5,
            "video_token_id": 6,
            "vision_start_token_id": 7,
        },
    ),
    "wav2vec2": (
        "AutoModelForCTC",
        {
            **_VISION,
            "vocab_size": 32,
            "conv_dim": [16, 16],
            "conv_kernel": [4, 4],
            "conv_stride": [2, 2],
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 2,
        },
    ),
}
"""Other models of transformers, by `model_type`: their Auto class and arguments of their configuration."""

ELSEWHERE = ("diffusers-unet2d", "diffusers-dit", "diffusers-flux", "timm-resnet18", "timm-convnext", "lstm")
NAMES = (*CAUSAL, *OTHERS, *ELSEWHERE)


def build(name: str) -> Any:
    """A model of this architecture, from torch's random state."""
    if name in ELSEWHERE:
        return _elsewhere(name)
    import transformers

    kind, given = ("AutoModelForCausalLM", CAUSAL[name]) if name in CAUSAL else OTHERS[name]
    config = transformers.AutoConfig.for_model(name, **given)
    return getattr(transformers, kind).from_config(config)


class Lstm(nn.Module):
    """A recurrent language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.LSTM(HIDDEN, HIDDEN, LAYERS, batch_first=True)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens))[0])


def _elsewhere(name: str) -> Any:
    if name == "lstm":
        return Lstm()
    library, _, kind = name.partition("-")
    if library == "timm":
        import timm

        widths = {"convnext": {"depths": (1, 1, 2, 1), "dims": (16, 32, 64, 64)}, "resnet18": {}}[kind]
        made = {"resnet18": "resnet18", "convnext": "convnext_atto"}[kind]
        return timm.create_model(made, pretrained=False, num_classes=10, drop_path_rate=0.1, **widths)
    import diffusers

    if kind == "unet2d":
        return diffusers.UNet2DModel(
            sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(32, HIDDEN),
            down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            norm_num_groups=8,
        )  # fmt: skip
    if kind == "dit":
        return diffusers.DiTTransformer2DModel(
            num_attention_heads=4, attention_head_dim=16, in_channels=4, num_layers=LAYERS, sample_size=8, patch_size=2,
            num_embeds_ada_norm=16, norm_num_groups=8,
        )  # fmt: skip
    return diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=LAYERS, attention_head_dim=16, num_attention_heads=4,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip


def seeded(name: str, seed: int = 5) -> Any:
    """`build` as a plain loop does it: after `torch.manual_seed(seed)`."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return build(name)


Builder = Callable[[], nn.Module]
