"""What a configuration of block-sparse attention sees at a length: blocks, their share of dense attention's, and how
many layers the first token needs to reach the last. Plain data: neither torch nor a kernel is needed.

Each row depends on its own number alone, so that the pattern of a shorter sequence is the beginning of a longer one's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from speedlab.config.attention import AttentionConfig, Pattern

_SHOWN = 64
"""A grid of more blocks than this is not printed."""


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
    ends = {key for key in range(row) if key % run >= run - attention.global_blocks}
    return ends | set(range(row // run * run, row + 1))


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


@dataclass(frozen=True, kw_only=True)
class AttentionView:
    """What is seen over a sequence of `length` tokens; print it."""

    length: int
    block: int
    rows: tuple[tuple[int, ...], ...]
    """The blocks that each block of queries sees."""
    last_sees: int
    """Tokens that the last token attends to, itself included."""
    layers_to_first: int | None
    """Layers after which the last token can depend on the first; None: it never does."""

    @property
    def density(self) -> float:
        """Blocks computed over those of dense causal attention."""
        return sum(map(len, self.rows)) / (len(self.rows) * (len(self.rows) + 1) // 2)

    def __str__(self) -> str:
        count = self.layers_to_first
        reach = "never depends on the first" if count is None else f"can depend on the first after {count} layers"
        lines = [
            f"{self.length:,} tokens in {len(self.rows)} blocks of {self.block}: density {self.density:.3f}, "
            f"{1 - self.density:.0%} of dense attention's work saved",
            f"the last token sees {self.last_sees:,} tokens, and {reach if count != 1 else 'sees the first'}",
        ]
        if len(self.rows) <= _SHOWN:
            places = range(len(self.rows))
            lines += ["".join("■" if key in row else "·" for key in places) for row in map(set, self.rows)]
        return "\n".join(lines)


def describe(attention: AttentionConfig, length: int) -> AttentionView:
    """What `attention` sees over `length` tokens, at least 1."""
    rows, block = seen_blocks(attention, length), attention.block
    last = [min((key + 1) * block, length) - key * block for key in rows[-1]]
    sliding = attention.kind == "block_sparse" and attention.pattern == "sliding"
    return AttentionView(
        length=length,
        block=block,
        rows=rows,
        last_sees=min(attention.window, length) if sliding else sum(last),
        layers_to_first=_hops(length, attention.window) if sliding else _layers_to_first(rows),
    )


def _hops(length: int, window: int) -> int | None:
    """Layers of a window of tokens from the last token of `length` to the first."""
    if length == 1:
        return 1
    return None if window == 1 else -(-(length - 1) // (window - 1))


def _layers_to_first(rows: tuple[tuple[int, ...], ...]) -> int | None:
    """The least number of steps from the last block to the first, each to a block that is seen."""
    reached, newest, layers = {len(rows) - 1}, {len(rows) - 1}, 0
    while newest:
        layers += 1
        seen = {key for row in newest for key in rows[row]}
        if 0 in seen:
            return layers
        newest = seen - reached
        reached |= newest
    return None
