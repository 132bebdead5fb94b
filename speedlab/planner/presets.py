"""The announced models and clusters. Shapes with their sources; what each was announced to have is kept beside it."""

from __future__ import annotations

from dataclasses import dataclass

from speedlab.planner.devices import Machines
from speedlab.planner.nearest import unknown
from speedlab.planner.setup import ModelShape


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A model that was announced."""

    shape: ModelShape
    announced: float
    """Parameters, as announced."""
    source: str


def _gpt(name: str, layers: int, hidden: int, heads: int, *, announced: float, source: str, sequence: int = 2048):
    shape = ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        ffn_hidden=4 * hidden,
        # 50,257 tokens; Megatron-LM pads them to 51,200 so that they divide by 8 ranks' 128.
        vocab_size=50257 if name.startswith("gpt2") else 51200,
        sequence_length=sequence,
        dropout=0.1,
    )
    return Preset(shape=shape, announced=announced, source=source)


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
        bias=False,
        causal=False,
        dropout=0.1,
    )
    return Preset(shape=shape, announced=announced, source="arXiv:1910.10683, section 3.7")


_GPT2 = "GPT-2: arXiv:1908.09203; 25 heads of the largest as released"
_AZURE = "DeepSpeed on Azure (July 2022)"

MODELS = {
    preset.shape.name: preset
    for preset in (
        _gpt("gpt2", 12, 768, 12, announced=124e6, source=_GPT2, sequence=1024),
        _gpt("gpt2-medium", 24, 1024, 16, announced=355e6, source=_GPT2, sequence=1024),
        _gpt("gpt2-large", 36, 1280, 20, announced=774e6, source=_GPT2, sequence=1024),
        _gpt("gpt2-xl", 48, 1600, 25, announced=1.558e9, source=_GPT2, sequence=1024),
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

_DGX2 = "16 V100-32 nvlink2"  # 8 EDR cards of 100 Gbit/s each.

CLUSTERS = {
    "dgx-2": f"1x{_DGX2}",
    "4-dgx-2": f"4x{_DGX2} ib-100x8",
    "25-dgx-2": f"25x{_DGX2} ib-100x8",  # 400 V100: ZeRO-2's announcement
    "32-dgx-2": f"32x{_DGX2} ib-100x8",  # 512 V100: ZeRO-Infinity
    "50-dgx-2": f"50x{_DGX2} ib-100x8",  # 800 V100: 3D parallelism
    "512-a100": "64x8 A100-80 nvlink3 ib-200x8",
    "1024-a100": "128x8 A100-80 nvlink3 ib-200x8",
    "4000-a100": "500x8 A100-40 nvlink3 ib-200x8",
}
"""Clusters of the announcements, as `Machines.parse` reads them."""


def model(name: str) -> ModelShape:
    """An announced model's shape. Raises ValueError with the nearest known names."""
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    return MODELS[name].shape


def cluster(text: str, *, price_per_device_hour: float | None = None) -> Machines:
    """An announced cluster by its name, or any other as `Machines.parse` reads it."""
    name = text.strip().lower()
    if name not in CLUSTERS and not name[:1].isdigit():
        raise unknown("cluster", text, CLUSTERS)
    return Machines.parse(CLUSTERS.get(name, text), price_per_device_hour=price_per_device_hour)
