"""List what `speedlab calibrate` measures: sizes of kernels, and configurations of whole steps.

No case of `bench steptimes` is among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from speedlab.config import ModelConfig, RunConfig
from speedlab.layout import Layout
from speedlab.planner.setup import ModelShape, Setup

BlockCase = tuple[str, int, int, int, int]
"""(kind of block, hidden, heads, tokens of a sequence, sequences). The feed-forward layer is four times as wide."""

HeadCase = tuple[int, int, int, int, str]
"""(hidden, vocabulary, tokens of a sequence, sequences, loss)"""

DTYPES = ("float32", "bfloat16")

_SMALL_BLOCK: BlockCase = ("rotary", 128, 8, 64, 1)
"""A block of the small models."""


@dataclass(frozen=True, kw_only=True)
class CaseSizes:
    """Sizes for one kind of device, as large as typical trainings there."""

    blocks: Sequence[BlockCase]
    """The first one is a block of the small models."""
    heads: Sequence[tuple[int, int, int, int]]
    product: int
    """Width of the matrix product that gives the peak rate."""
    copied_bytes: int
    """Bytes of the copy that gives the best memory rate. On CPUs the size of an activation, so it stays in caches."""
    larger_model: dict[str, Any]
    """Model whose whole steps, with each kind of block, show how much slower kernels are in a training."""
    larger_micro_size: int


ON_PROCESSORS = CaseSizes(
    blocks=(
        _SMALL_BLOCK,
        ("rotary", 64, 2, 64, 2),
        ("rotary", 64, 1, 128, 4),
        ("rotary", 128, 4, 64, 2),
        ("rotary", 128, 2, 256, 2),
        ("rotary", 192, 6, 128, 4),
        ("rotary", 384, 6, 64, 2),
        ("rotary", 384, 6, 256, 1),
        ("rotary", 768, 12, 64, 1),
        ("learned", 64, 2, 64, 1),
        ("learned", 64, 2, 128, 4),
        ("learned", 192, 6, 128, 2),
        ("learned", 384, 6, 128, 1),
        ("dropping", 64, 2, 64, 1),
        ("dropping", 64, 2, 128, 4),
        ("dropping", 192, 6, 128, 2),
        ("dropping", 384, 6, 128, 1),
    ),
    heads=((64, 1024, 64, 1), (96, 4096, 64, 4), (384, 8192, 128, 2), (64, 8192, 128, 8)),
    product=256,
    copied_bytes=1 << 19,
    larger_model={
        "layers": 3,
        "hidden": 192,
        "heads": 6,
        "ffn_hidden": 768,
        "vocab_size": 4096,
        "context": 128,
        "loss": "full",
    },
    larger_micro_size=4,
)

ON_GPUS = CaseSizes(
    blocks=(
        _SMALL_BLOCK,
        ("rotary", 1024, 16, 512, 2),
        ("rotary", 1024, 8, 2048, 2),
        ("rotary", 2048, 16, 1024, 2),
        ("rotary", 2048, 32, 2048, 2),
        ("rotary", 4096, 32, 1024, 2),
        ("learned", 1024, 16, 512, 2),
        ("learned", 1024, 16, 1024, 4),
        ("learned", 2048, 16, 1024, 2),
        ("dropping", 1024, 16, 512, 2),
        ("dropping", 1024, 16, 1024, 4),
        ("dropping", 2048, 16, 1024, 2),
    ),
    heads=((1024, 32768, 512, 2), (1024, 32768, 1024, 4), (2048, 51200, 1024, 2), (4096, 32768, 512, 2)),
    product=4096,
    copied_bytes=1 << 28,
    larger_model={
        "layers": 4,
        "hidden": 1024,
        "heads": 16,
        "ffn_hidden": 4096,
        "vocab_size": 32768,
        "context": 1024,
    },
    larger_micro_size=4,
)
"""Not yet measured on GPUs."""

ROW = 2
"""Blocks that are timed in sequence, so that weights and activations do not all stay in the nearest cache."""

_KINDS: dict[str, dict[str, Any]] = {
    "rotary": {},
    "learned": {"position": "learned", "norm": "layer", "bias": True},
    "dropping": {"position": "learned", "norm": "layer", "bias": True, "dropout": 0.1},
}
"""Kind of block (`calibration.kind_of`) -> fields of the model."""

_SMALL_RUNS = (
    # blocks, ZeRO stage, micro-batches of a step, axis of the layout
    (2, 2, 1, "dp"),
    (2, 1, 3, "dp"),
    (6, 1, 3, "dp"),
    (6, 3, 2, "dp"),
    (6, 1, 2, "tp"),
    (6, 1, 2, "sequence"),
)
"""Whole steps of small models, for the engine's own time. With one engine all axes are equal."""


def sizes_on(device: str) -> CaseSizes:
    """Return the sizes for a device: 'cpu' or 'cuda'."""
    return ON_GPUS if device == "cuda" else ON_PROCESSORS


def larger_configs(sizes: CaseSizes, dtype: str) -> list[RunConfig]:
    """Return a configuration for each kind of block, 'rotary' first.

    Args:
        sizes: sizes of the device.
        dtype: the compute dtype.
    """
    model = sizes.larger_model
    return [
        RunConfig(
            model={**model, **kind},
            data={"sequence_length": model["context"], "vocab_size": model["vocab_size"]},
            zero=1,
            precision=dtype,
            batch={"micro_size": sizes.larger_micro_size},
        )
        for kind in _KINDS.values()
    ]


def small_configs(dtype: str, engines: int) -> list[RunConfig]:
    """Return the small models that this number of engines can train.

    The engine's own time is independent of the dtype, so it is measured in the first one only.

    Args:
        dtype: the compute dtype; other than the first one, the result is empty.
        engines: number of ranks.
    """
    if dtype != DTYPES[0]:
        return []
    _, _, heads, length, _ = _SMALL_BLOCK
    # Tensor parallelism needs a whole number of heads on each rank.
    cut = engines > 1 and heads % engines == 0
    parallel = {"dp": {}, "tp": {"tp": engines}, "sequence": {"tp": engines, "sequence": True}}
    return [
        RunConfig(
            model=_small_model(depth).model_dump(),
            data={"sequence_length": length, "vocab_size": 512},
            zero=stage,
            precision=dtype,
            parallel=parallel[axis],
            batch={"micro_size": 1, "accumulation": micro_batches},
        )
        for depth, stage, micro_batches, axis in _SMALL_RUNS
        if axis == "dp" or cut
    ]


def block_model(case: BlockCase) -> ModelConfig:
    """Return the model of a block case."""
    kind, hidden, heads, length, _ = case
    sizes = {"layers": ROW, "hidden": hidden, "heads": heads, "ffn_hidden": 4 * hidden}
    return ModelConfig(**sizes, vocab_size=1024, context=length, **_KINDS[kind])


def head_model(case: HeadCase) -> ModelConfig:
    """Return the model of a head case."""
    hidden, vocabulary, _, _, loss = case
    return ModelConfig(layers=1, hidden=hidden, heads=1, ffn_hidden=hidden, vocab_size=vocabulary, loss=loss)  # type: ignore[arg-type]  # one of the two


def head_cases(sizes: CaseSizes) -> list[HeadCase]:
    """Return the head cases for both kinds of loss."""
    return [(*case, loss) for loss in ("chunked", "full") for case in sizes.heads]


def _small_model(depth: int) -> ModelConfig:
    _, hidden, heads, length, _ = _SMALL_BLOCK
    return ModelConfig(layers=depth, hidden=hidden, heads=heads, ffn_hidden=4 * hidden, vocab_size=512, context=length)


def setup_of(model: ModelConfig, length: int, micro: int, dtype: Any) -> Setup:
    """Return a single rank's set-up, to count kernels with the planner's formulas.

    Args:
        model: the model.
        length: tokens of a sequence.
        micro: sequences of a micro-batch.
        dtype: the compute dtype.
    """
    return Setup(
        shape=ModelShape.of_config(model, length),
        layout=Layout(pp=1, dp=1, tp=1),
        zero_stage=2,
        dtype=dtype,
        micro_size=micro,
        accumulation=1,
    )
