"""DeepSpeed's section sparse_attention: the pattern that it means here, what is refused, and the way back."""

from __future__ import annotations

from typing import Any

import pytest

from speedlab.config import AttentionConfig, ConfigError, RunConfig
from speedlab.config.attention import seen_blocks
from speedlab.config.deepspeed.reader import DeepSpeedReport

CAUSAL = {"attention": "unidirectional"}


def reading(section: Any, *ignore: str) -> DeepSpeedReport:
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
        (
            {"mode": "bslongformer"},
            {"pattern": "longformer", "block": 16, "window": 32, "global_blocks": 1, "both_ways": True},
        ),
        (
            {"mode": "bigbird", "attention": "bidirectional", "num_random_blocks": 2},
            {
                "pattern": "bigbird",
                "block": 16,
                "window": 32,
                "global_blocks": 1,
                "random_blocks": 2,
                "both_ways": True,
            },
        ),
        (
            {"mode": "local", "block": 64, "attention": "bidirectional", "num_sliding_window_blocks": 5},
            {"pattern": "longformer", "block": 64, "window": 192, "global_blocks": 0, "both_ways": True},
        ),
    ],
)
def test_a_mode_is_a_pattern(section, expected) -> None:
    config = reading(section).config
    assert config.model.attention == AttentionConfig(kind="block_sparse", **expected)
    again = RunConfig.from_deepspeed(config.to_deepspeed())
    assert again.model.attention == config.model.attention


def deepspeed_layout(mode: str, blocks: int, window: int, globals_: int) -> list[list[bool]]:
    """As its sparsity_config.py lays it out, bidirectional and without random blocks."""
    near = window // 2
    return [
        [
            max(0, row - near) <= key <= min(row + near, blocks - 1)
            or (mode != "local_sliding_window" and (row < globals_ or key < globals_))
            for key in range(blocks)
        ]
        for row in range(blocks)
    ]


@pytest.mark.parametrize("mode", ["bslongformer", "local_sliding_window", "bigbird"])
def test_encoders_see_the_blocks_that_they_see_under_deepspeed(mode) -> None:
    section = {"mode": mode, "attention": "bidirectional", "num_sliding_window_blocks": 5, "num_random_blocks": 0}
    if mode == "bslongformer":
        section["global_block_indices"] = [0, 1]
    attention = reading(section).config.model.attention
    rows = seen_blocks(attention, 9 * 16, causal=False)
    found = [[key in row for key in range(9)] for row in rows]
    assert found == deepspeed_layout(mode, 9, 5, 2 if mode == "bslongformer" else 1)


def test_a_causal_model_is_no_encoder() -> None:
    config = reading({"mode": "bslongformer"}).config
    reported = (
        "model.attention.both_ways is for encoders, and the built-in GPT is causal; give an encoder of transformers"
    )
    with pytest.raises(ConfigError, match=reported):
        config.layout(1)
    assert config.layout(1, built_in=False).world_size == 1
    with pytest.raises(ConfigError, match=r"attention.both_ways: is set, and pattern 'sliding' counts tokens"):
        RunConfig(model={"attention": {"kind": "block_sparse", "both_ways": True}})
    with pytest.raises(ConfigError, match=r"attention.both_ways: is set, and kind is 'dense'"):
        RunConfig(model={"attention": {"both_ways": True}})


def test_what_is_left_out_and_what_is_not_used_is_told() -> None:
    read = reading({**CAUSAL, "mode": "bslongformer", "num_local_blocks": 4})
    assert read.assumed[-3:] == (
        "sparse_attention.global_block_indices: [0]",
        "sparse_attention.block: 16",
        "sparse_attention.num_sliding_window_blocks: 3",
    )
    reported = {entry.path: entry.text for entry in (*read.honoured, *read.ignored)}
    assert reported["sparse_attention.num_local_blocks"] == "mode 'bslongformer' does not use it"
    assert reported["sparse_attention.mode"] == (
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
        ({"mode": "fixed"}, "mode", "attention is 'bidirectional', which is DeepSpeed's default", "sparse-attention"),
        ({"attention": "bidirectional"}, "attention", "attention is 'bidirectional', and runs", "sparse-attention"),
        ({"mode": "bslongformer", "global_block_indices": [4]}, "global_block_indices", "only the", "sparse-attention"),
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
