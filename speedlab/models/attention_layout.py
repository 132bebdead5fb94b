"""The blocks of attention as kernels take them, from the configuration of a model."""

from __future__ import annotations

from functools import lru_cache

import torch

from cuda_ops.block_layout import BlockLayout, as_usual
from cuda_ops.torch_compat import uncompiled
from speedlab.config import AttentionConfig
from speedlab.config.attention_pattern import seen_blocks


@uncompiled  # It would be traced past its cache.
def layout_of(attention: AttentionConfig, length: int, *, causal: bool = True) -> BlockLayout:
    """The layout of `attention` over `length` tokens, causal or both ways; the same object for the same arguments.

    Raises ValueError where a custom mask has fewer rows than `length` needs, and for a sliding window both ways.
    """
    return _made(attention, length, causal)


@lru_cache(maxsize=64)
def _made(attention: AttentionConfig, length: int, causal: bool) -> BlockLayout:
    rows = seen_blocks(attention, length, causal=causal)
    with as_usual():
        mask = torch.zeros(len(rows), len(rows), dtype=torch.bool)
        for row, seen in zip(mask, rows, strict=True):
            row[list(seen)] = True
        window = attention.window if attention.pattern == "sliding" else None
        return BlockLayout.from_mask(mask, causal=causal, block=attention.block, window=window)
