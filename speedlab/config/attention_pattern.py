"""Which blocks a configuration of block-sparse attention sees at a length. Plain data: neither torch nor a kernel is
needed. What follows from them is in `attention_view.py`.

Each row depends on its own number alone, so that the pattern of a shorter sequence is the beginning of a longer one's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from random import Random

from speedlab.config.attention import AttentionConfig, Pattern


@lru_cache(maxsize=64)
def seen_blocks(attention: AttentionConfig, length: int, *, causal: bool = True) -> tuple[tuple[int, ...], ...]:
    """For each block of queries of `length` tokens, the blocks of keys at or before it that it sees, ascending.

    Without `causal`, as in encoders, a block also sees the later ones that see it; a custom mask is taken as written.
    Raises ValueError where a custom mask has fewer rows than there are blocks.
    """
    blocks = -(-length // attention.block)
    if attention.kind == "dense":
        return tuple(tuple(range(row + 1 if causal else blocks)) for row in range(blocks))
    if attention.mask is not None and len(attention.mask) < blocks:
        raise ValueError(
            f"model.attention.mask: {len(attention.mask)} rows, expected {blocks} for {length} tokens in blocks of "
            f"{attention.block}; cut the sequence, or give more rows"
        )
    row_of = _ROWS[attention.pattern]
    if not causal and attention.pattern == "custom":
        return tuple(tuple(sorted(key for key in row_of(attention, row) if key < blocks)) for row in range(blocks))
    rows = tuple(tuple(sorted(key for key in row_of(attention, row) if 0 <= key <= row)) for row in range(blocks))
    return rows if causal else _both_ways(rows)


def _both_ways(rows: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Each block with those at or before it that it sees, and with the later ones that see it."""
    later: list[list[int]] = [[] for _ in rows]
    for row, seen in enumerate(rows):
        for key in seen:
            if key != row:
                later[key].append(row)
    return tuple((*seen, *after) for seen, after in zip(rows, later, strict=True))


def _sliding(attention: AttentionConfig, row: int) -> set[int]:
    return set(range((row * attention.block - attention.window + 1) // attention.block, row + 1))


def _window(attention: AttentionConfig, row: int) -> set[int]:
    return set(range(row - attention.window // attention.block + 1, row + 1))


def _fixed(attention: AttentionConfig, row: int) -> set[int]:
    """The run that `row` is in, and the last blocks of those before."""
    run = attention.window // attention.block
    begin = row // run * run
    ends = {key for last in range(run - attention.global_blocks, run) for key in range(last, begin, run)}
    return ends | set(range(begin, row + 1))


def _longformer(attention: AttentionConfig, row: int) -> set[int]:
    return _window(attention, row) | set(range(attention.global_blocks))


def _bigbird(attention: AttentionConfig, row: int) -> set[int]:
    seen = _longformer(attention, row)
    others = [key for key in range(row) if key not in seen]
    draw = Random(f"{attention.seed}/{row}").random
    return seen | set(sorted(others, key=lambda _: draw())[: attention.random_blocks])


def _strided(attention: AttentionConfig, row: int) -> set[int]:
    return _window(attention, row) | set(range(row, -1, -(attention.stride // attention.block)))


def _custom(attention: AttentionConfig, row: int) -> set[int]:
    assert attention.mask is not None  # AttentionConfig refuses that.
    return {key for key, seen in enumerate(attention.mask[row]) if seen == "x"}


_ROWS: dict[Pattern, Callable[[AttentionConfig, int], set[int]]] = {
    "sliding": _sliding,
    "fixed": _fixed,
    "longformer": _longformer,
    "bigbird": _bigbird,
    "strided": _strided,
    "custom": _custom,
}
