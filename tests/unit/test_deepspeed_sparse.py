"""DeepSpeed's section sparse_attention: the pattern that it means here, what is refused, and the way back."""

from __future__ import annotations

from typing import Any

import pytest

from speedlab.config import AttentionConfig, RunConfig
from speedlab.config.deepspeed import Reading

CAUSAL = {"attention": "unidirectional"}


def reading(section: Any, *ignore: str) -> Reading:
    return RunConfig.deepspeed_reading({"train_batch_size": 8, "sparse_attention": section}, ignore=ignore)


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (
            {**CAUSAL, "mode": "fixed"},
            {"pattern": "fixed", "block": 16, "window": 64, "global_blocks": 1},
        ),
        (
            {
                **CAUSAL,
                "block": 32,
                "num_local_blocks": 8,
                "num_global_blocks": 2,
                "horizontal_global_attention": False,
            },
            {"pattern": "fixed", "block": 32, "window": 256, "global_blocks": 2},
        ),
        (
            {**CAUSAL, "mode": "bigbird", "num_random_blocks": 3, "num_sliding_window_blocks": 5},
            {"pattern": "bigbird", "block": 16, "window": 48, "global_blocks": 1, "random_blocks": 3},
        ),
        (
            {**CAUSAL, "mode": "bigbird", "num_random_blocks": 0, "different_layout_per_head": True},
            {"pattern": "bigbird", "block": 16, "window": 32, "global_blocks": 1, "random_blocks": 0},
        ),
        (
            {**CAUSAL, "mode": "bslongformer", "different_layout_per_head": True},
            {"pattern": "longformer", "block": 16, "window": 32, "global_blocks": 1},
        ),
        (
            {**CAUSAL, "mode": "bslongformer", "global_block_indices": [0, 1], "global_block_end_indices": [1, 3]},
            {"pattern": "longformer", "block": 16, "window": 32, "global_blocks": 3},
        ),
        ({"mode": "local", "block": 64}, {"pattern": "longformer", "block": 64, "window": 128, "global_blocks": 0}),
    ],
)
def test_a_mode_is_a_pattern(section, expected) -> None:
    config = reading(section).config
    assert config.model.attention == AttentionConfig(kind="block_sparse", **expected)
    again = RunConfig.from_deepspeed(config.to_deepspeed())
    assert again.model.attention == config.model.attention


def test_what_is_left_out_and_what_is_not_used_is_told() -> None:
    read = reading({**CAUSAL, "mode": "bslongformer", "num_local_blocks": 4})
    assert read.assumed[-3:] == (
        "sparse_attention.global_block_indices: [0]",
        "sparse_attention.block: 16",
        "sparse_attention.num_sliding_window_blocks: 3",
    )
    told = {entry.path: entry.text for entry in (*read.honoured, *read.ignored)}
    assert told["sparse_attention.num_local_blocks"] == "mode 'bslongformer' does not use it"
    assert told["sparse_attention.mode"] == (
        "model.attention.pattern 'longformer'; of the built-in GPT; a model of your own attends as it does by itself"
    )


@pytest.mark.parametrize("section", [{"mode": "dense", "block": 3}, False, None])
def test_dense_attention_is_dense(section) -> None:
    read = reading(section)
    assert read.config.model.attention == AttentionConfig()
    assert not read.refused


@pytest.mark.parametrize(
    ("section", "path", "beginning", "ignore"),
    [
        ({"mode": "bigbird"}, "mode", "attention is 'bidirectional', which is DeepSpeed's default", "sparse-attention"),
        ({"attention": "bidirectional"}, "attention", "attention is 'bidirectional', and the GPT", "sparse-attention"),
        ({**CAUSAL, "mode": "variable"}, "mode", "runs of several lengths have no pattern here", "sparse-attention"),
        (
            {**CAUSAL, "mode": "bslongformer", "global_block_indices": [0, 4]},
            "global_block_indices",
            "only the first blocks can be global here",
            "sparse-attention",
        ),
        (
            {**CAUSAL, "different_layout_per_head": True, "num_different_global_patterns": 4},
            "different_layout_per_head",
            "all heads of the GPT here see the same blocks",
            "head-layouts",
        ),
        (
            {**CAUSAL, "mode": "bigbird", "different_layout_per_head": True},
            "different_layout_per_head",
            "all heads of the GPT here see the same blocks",
            "head-layouts",
        ),
        ({**CAUSAL, "horizontal_global_attention": True}, "horizontal_global_attention", "DeepSpeed takes it with", ""),
        ({"mode": "longformer"}, "mode", "expected dense, fixed, variable, bigbird, bslongformer or local_", ""),
        ({"attention": "both"}, "attention", "expected unidirectional or bidirectional", ""),
        ({**CAUSAL, "block": 24}, "block", "24 is no multiple of 16, in which the kernels work; 16 or 32 would", ""),
        ({**CAUSAL, "num_global_blocks": 5}, "num_global_blocks", "5 of a run of 4 blocks", ""),
        ({"atention": "unidirectional"}, "atention", "DeepSpeed has no such key; the nearest is 'sparse_", ""),
        (True, "", "expected keys and values in { }, with a mode among them", ""),
    ],
)
def test_what_is_refused(section, path, beginning, ignore) -> None:
    refused = {entry.path: entry for entry in reading(section).refused}
    entry = refused[".".join(filter(None, ("sparse_attention", path)))]
    assert entry.text.startswith(beginning)
    assert entry.feature == ignore
    if ignore:
        attention = reading(section, ignore).config.model.attention
        assert (attention.kind == "dense") == (ignore == "sparse-attention")
