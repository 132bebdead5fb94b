"""List the known models, for configurations and plans: shapes with sources, and announced sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from speedlab.config.model_shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class ModelPreset:
    """A known model."""

    shape: ModelShape
    """`sequence_length` is that of the announced training."""
    announced: float
    """Announced number of parameters."""
    source: str
    built_in: bool = False
    """Whether the built-in GPT can have this shape; other presets are for plans."""

    def of_config(self) -> dict[str, Any]:
        """Return the fields of `ModelConfig` for this shape."""
        fields = ("layers", "hidden", "heads", "ffn_hidden", "vocab_size", "position", "norm", "tied")
        found = {name: getattr(self.shape, name) for name in fields}
        return {**found, "context": self.shape.positions, "bias": bool(self.shape.biases)}


def _gpt(name: str, layers: int, hidden: int, heads: int, *, announced: float, source: str, sequence: int = 2048):
    shape = ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        ffn_hidden=4 * hidden,
        # 50,257 tokens; Megatron-LM pads to 51,200, a multiple of 128 on each of 8 ranks.
        vocab_size=50257 if name.startswith("gpt2") else 51200,
        sequence_length=sequence,
        # Released models have a fixed position table; for the others the table grows with the sequence.
        context=sequence if name.startswith("gpt2") else None,
        dropout=0.1,
    )
    return ModelPreset(shape=shape, announced=announced, source=source, built_in=name.startswith("gpt2"))


def _small(name: str, layers: int, hidden: int, vocabulary: int, context: int, *, announced: float):
    """Return a small preset of the built-in GPT, for CPUs."""
    shape = ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=6,
        ffn_hidden=4 * hidden,
        vocab_size=vocabulary,
        sequence_length=context,
        position="rotary",
        norm="rms",
        biases=frozenset(),
    )
    return ModelPreset(shape=shape, announced=announced, source="the built-in GPT, for CPUs", built_in=True)


def _t5(name: str, heads: int, ffn: int, *, announced: float):
    shape = ModelShape(
        name=name,
        layers=24,
        decoder_layers=24,
        hidden=1024,
        heads=heads,
        head_size=128,
        ffn_hidden=ffn,
        vocab_size=32128,
        sequence_length=512,
        position="relative",
        norm="rms",
        biases=frozenset(),
        causal=False,
        dropout=0.1,
    )
    return ModelPreset(shape=shape, announced=announced, source="arXiv:1910.10683, section 3.7")


def _llama(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    vocabulary: int,
    *,
    announced: float,
    source: str,
    kv_heads: int = 8,
    **changes: Any,
):
    """Return a preset like Llama: rotary positions, RMSNorm, grouped heads, gated feed-forward layers, no biases."""
    shape = ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn_hidden=ffn,
        vocab_size=vocabulary,
        gated=True,
        position="rotary",
        norm="rms",
        tied=False,
        **{"biases": frozenset(), "sequence_length": 8192, **changes},
    )
    return ModelPreset(shape=shape, announced=announced, source=source)


_GPT2 = "GPT-2: arXiv:1908.09203; 25 heads of the largest as released"
_AZURE = "DeepSpeed on Azure (July 2022)"
_LLAMA3 = "arXiv:2407.21783, table 3; sequences of Llama 3's first pre-training"
_QWEN = "arXiv:2412.15115, table 1, and the released configuration; pre-trained with 4,096 tokens"
_QUERIES: Mapping[str, Any] = {"biases": frozenset({"attention in"}), "sequence_length": 4096}

MODELS = {
    preset.shape.name: preset
    for preset in (
        _small("gpt-tiny", 6, 192, 4096, 256, announced=3.4e6),
        _small("gpt-mini", 8, 384, 8192, 512, announced=17.3e6),
        _gpt("gpt2", 12, 768, 12, announced=124e6, source=_GPT2, sequence=1024),
        _gpt("gpt2-medium", 24, 1024, 16, announced=355e6, source=_GPT2, sequence=1024),
        _gpt("gpt2-large", 36, 1280, 20, announced=774e6, source=_GPT2, sequence=1024),
        _gpt("gpt2-xl", 48, 1600, 25, announced=1.558e9, source=_GPT2, sequence=1024),
        _llama("mistral-7b", 32, 4096, 32, 14336, 32000, announced=7.24e9, source="arXiv:2310.06825, table 1"),
        _llama("qwen2.5-7b", 28, 3584, 28, 18944, 152064, announced=7.61e9, source=_QWEN, kv_heads=4, **_QUERIES),
        _llama("qwen2.5-72b", 80, 8192, 64, 29568, 152064, announced=72.7e9, source=_QWEN, **_QUERIES),
        _llama("llama-3-8b", 32, 4096, 32, 14336, 128256, announced=8.03e9, source=_LLAMA3),
        _llama("llama-3-70b", 80, 8192, 64, 28672, 128256, announced=70.6e9, source=_LLAMA3),
        _gpt("megatron-8.3b", 72, 3072, 32, announced=8.3e9, source="arXiv:1909.08053, table 1", sequence=1024),
        _t5("t5-3b", 32, 16384, announced=2.8e9),
        _t5("t5-11b", 128, 65536, announced=11e9),
        _gpt("turing-nlg-17b", 78, 4256, 28, announced=17e9, source="Turing-NLG (Feb 2020)", sequence=1024),
        _gpt("gpt3-175b", 96, 12288, 96, announced=175e9, source="arXiv:2005.14165, table 2.1"),
        _gpt("mt-nlg-530b", 105, 20480, 128, announced=530e9, source="arXiv:2201.11990"),
        _gpt("1t", 128, 25600, 160, announced=1e12, source="arXiv:2104.04473, table 1"),
        _gpt("1t-deep", 298, 17408, 136, announced=1.084e12, source="DeepSpeed, 3D parallelism (Sept 2020)"),
        _gpt("2t", 160, 32768, 256, announced=2e12, source=_AZURE),
    )
}
