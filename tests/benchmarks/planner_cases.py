"""The grid of `python -m tests.benchmarks planner`: trainings whose memory is predicted and then measured on CPU ranks.

Nothing is fitted: what is taken and freed was read off single operations (one rank, and two of tp), and these cases
test it. Dropout in attention over cut heads or single sequences, and the two halves of a backward, were written down
anew after a first run had shown them missing (up to 12 % then).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from speedlab.config import RunConfig
from speedlab.planner.memory.offload import offload_words

MODELS: dict[str, dict[str, Any]] = {
    "rotary": {"layers": 4, "hidden": 256, "heads": 4, "ffn_hidden": 1024, "vocab_size": 2003, "context": 128},
    "gpt2": {
        "layers": 5,
        "hidden": 128,
        "heads": 4,
        "ffn_hidden": 512,
        "vocab_size": 1509,
        "context": 160,
        "position": "learned",
        "norm": "layer",
        "bias": True,
    },
    "dropping": {
        "layers": 4,
        "hidden": 128,
        "heads": 4,
        "ffn_hidden": 256,
        "vocab_size": 1200,
        "context": 128,
        "position": "learned",
        "norm": "layer",
        "bias": True,
        "tied": False,
        "dropout": 0.1,
        "loss": "full",
    },
    "wide head": {
        "layers": 4,
        "hidden": 128,
        "heads": 4,
        "ffn_hidden": 512,
        "vocab_size": 8192,
        "context": 128,
        "tied": False,
        "loss": "full",
    },
}
"""Shapes of the built-in GPT: what is kept for backward differs in each."""

_LAYOUTS: list[tuple[int, dict[str, Any], tuple[int, ...]]] = [
    (1, {}, (0, 3)),
    (2, {}, (0, 1, 2, 3)),
    (2, {"tp": 2}, (1,)),
    (2, {"tp": 2, "sequence": True}, (0,)),
    (2, {"pp": 2}, (1,)),
    (2, {"pp": 2, "schedule": "gpipe"}, (0,)),
    (2, {"pp": 2, "schedule": "interleaved"}, (2,)),
    (2, {"pp": 2, "schedule": "zero-bubble"}, (0,)),
    (4, {}, (0, 1, 2, 3)),
    (4, {"tp": 2}, (1, 2, 3)),
    (4, {"tp": 2, "sequence": True}, (0, 3)),
    (4, {"pp": 2}, (1, 2, 3)),
    (4, {"pp": 2, "tp": 2}, (1,)),
    (4, {"pp": 2, "tp": 2, "sequence": True}, (0,)),
    (4, {"pp": 4}, (0,)),
    (4, {"tp": 4}, (1,)),
]
"""(ranks, layout, ZeRO stages to measure); dp follows."""

_AWAY: list[tuple[int, int, dict[str, str]]] = [
    (1, 2, {"optimizer": "disk"}),
    (1, 3, {"optimizer": "disk", "parameters": "disk"}),
    (2, 1, {"optimizer": "host"}),
    (2, 3, {"optimizer": "host", "parameters": "disk"}),
]
"""(ranks, ZeRO stage, what lies away from the device)."""

_SMALL: list[tuple[int, int, dict[str, str], dict[str, Any]]] = [
    (1, 0, {}, {"dtype": "bfloat16", "masters": "none", "moments": "8bit", "in_backward": True}),
    (1, 3, {"optimizer": "disk", "parameters": "disk"}, {"dtype": "float32", "moments": "8bit"}),
    (2, 1, {}, {"dtype": "bfloat16", "masters": "none"}),
    (2, 3, {}, {"dtype": "bfloat16", "masters": "none", "moments": "8bit"}),
]
"""(ranks, ZeRO stage, what lies away from the device, as what states are kept)."""

_LONG_MODELS: dict[str, dict[str, Any]] = {
    "tiled": {**MODELS["rotary"], "ffn_tile": 64},
    "tiled gpt2": {**MODELS["gpt2"], "ffn_tile": 64},
    "sparse": {**MODELS["rotary"], "attention": {"kind": "block_sparse", "block": 16, "window": 40}},
    "sparse gpt2": {
        **MODELS["gpt2"],
        "attention": {"kind": "block_sparse", "block": 16, "pattern": "longformer", "window": 32},
    },
}
"""What long sequences are trained with."""

_LONG: list[tuple[int, dict[str, Any], int, tuple[str, ...]]] = [
    (1, {}, 0, tuple(_LONG_MODELS)),
    (2, {}, 2, ("tiled", "sparse gpt2")),
    (2, {"tp": 2}, 1, ("tiled", "tiled gpt2", "sparse", "sparse gpt2")),
    (2, {"cp": 2}, 1, ("rotary", "gpt2", "dropping", "wide head", "sparse", "tiled gpt2")),
    (2, {"cp": 2, "cp_heads": 1}, 2, ("rotary", "gpt2", "wide head", "tiled")),
    (4, {"cp": 4, "cp_heads": 2}, 3, ("rotary", "gpt2")),
    (4, {"cp": 2, "tp": 2, "sequence": True}, 1, ("gpt2", "rotary")),
    (4, {"cp": 2, "pp": 2}, 0, ("wide head", "sparse gpt2")),
]
"""(ranks, layout, ZeRO stage, models)."""

_SELECTIVE: list[tuple[int, int, dict[str, Any], str]] = [
    (1, 0, {}, "float32"),
    (2, 3, {}, "bfloat16"),
    (2, 0, {"tp": 2, "sequence": True}, "bfloat16"),
    (2, 1, {"tp": 2}, "float32"),
    (2, 1, {"pp": 2}, "float32"),
]
"""(ranks, ZeRO stage, layout, precision) under selective recomputation."""

_PARTITIONED: list[tuple[int, int, dict[str, Any], str, str, str]] = [
    (2, 1, {"tp": 2}, "rotary", "bfloat16", "block"),
    (2, 0, {"tp": 2}, "gpt2", "float32", "block"),
    (2, 1, {"tp": 2}, "rotary", "float32", "selective"),
    (4, 2, {"tp": 2, "cp": 2}, "gpt2", "bfloat16", "block"),
    (4, 1, {"tp": 2, "pp": 2}, "rotary", "float32", "block"),
    (4, 0, {"tp": 4}, "wide head", "bfloat16", "selective"),
]
"""(ranks, ZeRO stage, layout, model, precision, checkpointing) with inputs of blocks cut over tensor ranks."""

_DROPPING_RINGS: list[tuple[int, int, dict[str, Any], str, str]] = [
    (2, 1, {"cp": 2, "cp_heads": 1}, "float32", "none"),
    (2, 2, {"cp": 2, "cp_heads": 1}, "bfloat16", "selective"),
    (4, 0, {"cp": 4, "cp_heads": 2}, "float32", "block"),
    (4, 1, {"cp": 2, "cp_heads": 1, "tp": 2}, "bfloat16", "none"),
]
"""(ranks, ZeRO stage, layout, precision, checkpointing) of a ring in which attention drops."""

_DELAYED: list[tuple[int, int, dict[str, Any]]] = [
    (1, 0, {"optimizer": "host"}),
    (1, 3, {"optimizer": "disk", "parameters": "disk"}),
    (2, 1, {"optimizer": "host"}),
    (2, 3, {"optimizer": "disk"}),
]
"""(ranks, ZeRO stage, what lies away from the device) of updates that are late by a step."""

_QUANTIZED: list[tuple[int, int, dict[str, Any], dict[str, Any]]] = [
    (2, 1, {"quantized_weights": True, "quantized_gradients": True}, {}),
    (2, 2, {"quantized_weights": True, "quantized_gradients": True}, {}),
    (2, 3, {"quantized_weights": True, "quantized_gradients": True, "secondary_partition": 2}, {}),
    (4, 3, {"quantized_weights": True, "quantized_gradients": True}, {}),
    (4, 3, {"secondary_partition": 2}, {}),
    (2, 3, {"quantized_weights": True}, {"optimizer": "host", "parameters": "disk"}),
]
"""(ranks, ZeRO stage, what of ZeRO++, what lies away from the device)."""

_FORMS = [("float32", "none"), ("bfloat16", "block"), ("bfloat16", "none"), ("float32", "block")]
"""(precision, checkpointing)."""

_ROUNDS = 3
"""How often each layout and stage is measured, each time with another model, precision and batch."""

LENGTH = 128
"""Tokens of a sequence."""


_EXTRA = {"schedule": "{}", "sequence": "sequence", "cp_heads": "heads shared by {}"}


@dataclass(frozen=True, kw_only=True)
class GridCase:
    """One training of the grid."""

    name: str
    ranks: int
    config: RunConfig


def grid() -> Iterator[GridCase]:
    """All cases, those of few ranks first."""
    models, forms = cycle(MODELS), cycle(_FORMS)
    sizes, sums = cycle((2, 4, 8)), cycle((1, 2, 1, 3))
    for ranks, parallel, stages in _LAYOUTS:
        for stage in stages:
            for _ in range(_ROUNDS):
                (dtype, checkpointing), model = next(forms), next(models)
                accumulation = next(sums) if "pp" not in parallel else 4
                yield _case(ranks, parallel, stage, model, dtype, checkpointing, next(sizes), accumulation)
            next(forms)  # So that a model meets all forms.
    for ranks, stage, offload in _AWAY:
        for dtype, checkpointing in _FORMS[:2]:
            yield _case(ranks, {}, stage, next(models), dtype, checkpointing, 2, next(sums), offload)
    for ranks, parallel, stage, names in _LONG:
        for model in names:
            (dtype, checkpointing), sums_of = next(forms), 4 if "pp" in parallel else next(sums)
            yield _case(ranks, parallel, stage, model, dtype, checkpointing, next(sizes), sums_of)
        next(forms)
    for ranks, stage, offload, kept in _SMALL:
        sum_of = 1 if kept.get("in_backward") else 2
        yield _case(ranks, {}, stage, next(models), kept["dtype"], "none", 2, sum_of, offload, kept)
    for ranks, stage, parallel, dtype in _SELECTIVE:
        for micro_size in (2, 8):
            yield _case(ranks, parallel, stage, next(models), dtype, "selective", micro_size, 4)
    yield _case(1, {}, 0, "tiled", "float32", "selective", 8, 1)
    yield _case(2, {"cp": 2}, 1, "gpt2", "float32", "selective", 8, 1)
    for ranks, stage, parallel, model, dtype, checkpointing in _PARTITIONED:
        sums_of = 4 if "pp" in parallel else 1
        yield _case(ranks, parallel, stage, model, dtype, checkpointing, 8, sums_of, partition_inputs=True)
    for ranks, stage, parallel, dtype, checkpointing in _DROPPING_RINGS:
        yield _case(ranks, parallel, stage, "dropping", dtype, checkpointing, 4, 2)
    for number, (ranks, stage, offload) in enumerate(_DELAYED):
        late = {**offload, "delayed_update": 1}
        yield _case(ranks, {}, stage, next(models), _FORMS[number][0], "none", 2, 1 + number // 2, late)
    for number, (ranks, stage, switches, offload) in enumerate(_QUANTIZED):
        sums_of = 1 + number % 2
        dtype = _FORMS[number % 2][0]
        yield _case(ranks, {}, stage, "wide head", dtype, "none", 2, sums_of, offload, zero=switches)


def _case(
    ranks: int,
    parallel: dict[str, Any],
    stage: int,
    model: str,
    dtype: str,
    checkpointing: str,
    micro_size: int,
    accumulation: int,
    offload: dict[str, Any] | None = None,
    kept: dict[str, Any] | None = None,
    *,
    partition_inputs: bool = False,
    zero: dict[str, Any] | None = None,
) -> GridCase:
    precision = {word: value for word, value in (kept or {}).items() if word != "in_backward"}
    in_backward = bool(kept and kept.get("in_backward"))
    config = RunConfig(
        model={**MODELS, **_LONG_MODELS}[model],
        data={"sequence_length": LENGTH, "tokenizer": "bytes"},
        parallel=parallel,
        # (Small buckets, so that more units than one are on their way at once.)
        zero={"stage": stage, "bucket_bytes": 2**18 if zero else 2**22, **(zero or {})},
        precision=precision or dtype,
        batch={"micro_size": micro_size, "accumulation": accumulation},
        activation={"checkpointing": checkpointing, "partition_inputs": partition_inputs},
        offload=offload or {},
        optimizer={"name": "sgd" if model == "gpt2" and stage == 1 else "adamw", "in_backward": in_backward},
        clip_norm=None if in_backward else 1.0,
    )
    layout = config.layout(ranks)
    extra = [word for word in ("schedule", "sequence", "cp_heads") if word in parallel]
    extra = [_EXTRA[word].format(parallel[word]) for word in extra]
    extra += filter(None, [offload_words(config.offload), "partitioned inputs" if partition_inputs else ""])
    extra += filter(None, [config.zero.switches])
    extra += [f"{word} {value}" for word, value in (kept or {}).items() if word != "dtype"]
    name = ", ".join([model, str(layout), *extra, f"zero {stage}", dtype, f"checkpointing {checkpointing}"])
    return GridCase(name=f"{name}, {micro_size} × {accumulation}", ranks=ranks, config=config)
