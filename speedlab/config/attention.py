"""Configure attention, dense or block-sparse, and compute the blocks that each block of queries sees. No torch.

The configuration is for the built-in GPT and for transformers' models. `attention_report` describes the consequences. A
row of a pattern depends only on its own number, so the pattern of a shorter sequence is a prefix of a longer one's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator, model_validator

from speedlab.config.base import ConfigSection
from speedlab.config.errors import ConfigError

_SEEN, _UNSEEN = "x", "."
_BLOCK_MULTIPLE = 16
_HEAD_MULTIPLE, _LEAST_HEAD, _LARGEST_HEAD = 8, 16, 256
"""Limits of the kernels for the elements of a head: cuda_ops/block_sparse_attention.py."""

HEADS_THAT_FIT = f"heads of a multiple of {_HEAD_MULTIPLE} elements from {_LEAST_HEAD} to {_LARGEST_HEAD}"

_MOST_BLOCKS = 2**18
_NAMED = 3
"""Number of working values in an error."""

Pattern = Literal["sliding", "fixed", "longformer", "bigbird", "strided", "custom"]

_TOKENS: dict[Pattern, tuple[str, ...]] = {
    "sliding": ("window",),
    "fixed": ("window",),
    "longformer": ("window",),
    "bigbird": ("window",),
    "strided": ("window", "stride"),
    "custom": (),
}
"""Pattern -> its fields that are counted in tokens."""


class AttentionConfig(ConfigSection):
    """Dense or block-sparse causal attention; block-sparse takes time and memory only for the blocks it sees."""

    kind: Literal["dense", "block_sparse"] = Field(
        default="dense", description="Whether a query attends to all before it, or to the blocks of a pattern"
    )
    pattern: Pattern = Field(
        default="sliding",
        description="sliding: the last `window` tokens; fixed: runs of `window` tokens and the last blocks of earlier "
        "runs (arXiv:1904.10509); longformer: a window of blocks and the first ones (arXiv:2004.05150); bigbird: and "
        "random ones (arXiv:2007.14062); strided: a window and every stride-th block; custom: `mask`",
    )
    block: int = Field(default=64, ge=1, description="Tokens of a block, a multiple of 16")
    window: int = Field(
        default=128,
        ge=1,
        description="Tokens nearest to a query that it sees, itself included; whole blocks but under sliding",
    )
    global_blocks: int = Field(
        default=1,
        ge=0,
        description="longformer, bigbird: so many first blocks are seen by all; fixed: so many last ones of each run",
    )
    random_blocks: int = Field(
        default=2, ge=0, description="bigbird: further blocks that each block sees, drawn from those before it"
    )
    stride: int = Field(
        default=128, ge=1, description="strided: tokens from a block seen to the next one, whole blocks"
    )
    seed: int = Field(default=0, ge=0, description="bigbird: seed of the random blocks")
    both_ways: bool = Field(
        default=False,
        description="Whether the model has to be an encoder, where a block also sees the later ones that see it; a "
        "causal model, as the built-in GPT is, is refused then",
    )
    mask: tuple[str, ...] | None = Field(
        default=None,
        description="custom: a row of text for each block of queries, 'x' for a block of keys that it sees, '.' for "
        "others, as many as model.context has blocks: x.. xx. x.x",
    )

    if TYPE_CHECKING:  # pydantic adds it to frozen models; type checkers do not see it.

        def __hash__(self) -> int: ...

    @field_validator("block")
    @classmethod
    def _whole_tiles(cls, block: int) -> int:
        if block % _BLOCK_MULTIPLE:
            raise ValueError(
                f"{block} is no multiple of {_BLOCK_MULTIPLE}, in which the kernels work; "
                f"{_multiples_text(block, _BLOCK_MULTIPLE)} would work"
            )
        return block

    @model_validator(mode="after")
    def _pattern_fits(self) -> AttentionConfig:
        problems = self._mask_problems()
        if self.both_ways and (self.kind == "dense" or self.pattern == "sliding"):
            what = "kind is 'dense', which every model does its own way"
            if self.kind != "dense":
                what = (
                    "pattern 'sliding' counts tokens before a query, where 'longformer' with global_blocks 0 does not"
                )
            problems.append(("both_ways", f"is set, and {what}; set it to false, or choose another pattern"))
        if self.kind == "block_sparse" and self.pattern != "sliding":
            problems += [
                (
                    name,
                    f"{tokens} tokens are no whole blocks of {self.block}, as pattern {self.pattern!r} needs; "
                    f"{_multiples_text(tokens, self.block)} would work",
                )
                for name in _TOKENS[self.pattern]
                if (tokens := getattr(self, name)) % self.block
            ]
        runs = self.kind == "block_sparse" and self.pattern == "fixed"
        if runs and not problems and self.global_blocks > (blocks := self.window // self.block):
            problems.append(
                (
                    "global_blocks",
                    f"{self.global_blocks} of a run of {blocks} blocks (window {self.window} / block {self.block}); "
                    f"at most {blocks} would work",
                )
            )
        if problems:
            raise ConfigError(problems=problems)
        return self

    def _mask_problems(self) -> list[tuple[str, str]]:
        if self.pattern != "custom":
            unused = "is given, and pattern {!r} does not use it; set pattern to 'custom', or leave mask out"
            return [] if self.mask is None else [("mask", unused.format(self.pattern))]
        if self.mask is None:
            example = "['x..', 'xx.', 'x.x']"
            return [("mask", f"pattern 'custom' needs it: a row for each block of queries, for instance {example}")]
        rows = len(self.mask)
        for number, row in enumerate(self.mask):
            if len(row) != rows or set(row) - {_SEEN, _UNSEEN}:
                return [
                    ("mask", f"row {number} is {row!r}; expected {rows} of '{_SEEN}' and '{_UNSEEN}', as many as rows")
                ]
            if _SEEN not in row[: number + 1]:
                return [
                    (
                        "mask",
                        f"row {number} is {row!r}, and sees nothing at or before itself (later blocks do not count); "
                        f"put '{_SEEN}' at one of its places 0 to {number}",
                    )
                ]
        return []


def attention_problems(
    attention: AttentionConfig, *, hidden: int, heads: int, dropout: float, context: int
) -> list[tuple[str, str]]:
    """Return why `attention` does not work in a model of these sizes; empty if it works.

    Args:
        attention: the configuration.
        hidden: width of the residual stream.
        heads: attention heads.
        dropout: the model's dropout.
        context: longest sequence, in tokens.

    Returns:
        (field, the rule with its values and what to change) for each problem.
    """
    if attention.kind == "dense":
        return []
    problems = []
    if not head_fits(hidden // heads):
        possible = [n for n in range(1, hidden + 1) if hidden % n == 0 and head_fits(hidden // n)]
        near = sorted(sorted(possible, key=lambda n: abs(n - heads))[:_NAMED])
        way_out = f"heads {_or(near)} would work" if near else "set hidden to a multiple of 16"
        problems.append(
            (
                "attention.kind",
                f"'block_sparse' takes {HEADS_THAT_FIT}, and hidden {hidden} / heads {heads} are {hidden // heads}; "
                f"{way_out}",
            )
        )
    if dropout:
        problems.append(
            (
                "attention.kind",
                f"'block_sparse' drops no attention probabilities, and dropout is {dropout}; set dropout to 0, or "
                "attention.kind to 'dense'",
            )
        )
    needed = -(-context // attention.block)
    if needed > _MOST_BLOCKS:
        problems.append(
            (
                "attention.block",
                f"context {context} in blocks of {attention.block} are {needed:,} blocks; at most {_MOST_BLOCKS:,} are "
                f"looked through: set context to at most {_MOST_BLOCKS * attention.block}, or take larger blocks",
            )
        )
    if attention.mask is not None and len(attention.mask) < needed:
        reach = len(attention.mask) * attention.block
        problems.append(
            (
                "attention.mask",
                f"{len(attention.mask)} rows are for {reach} tokens in blocks of {attention.block}, and context is "
                f"{context}; give {needed} rows, or set context to {reach}",
            )
        )
    return problems


def direction_problem(attention: AttentionConfig, model: str) -> str | None:
    """Return why `attention` does not work in a causal model; None if it works.

    Args:
        attention: the configuration.
        model: name of the model, for the message.
    """
    if not attention.both_ways:
        return None
    return (
        f"model.attention.both_ways is for encoders, and {model} is causal; give an encoder of transformers as the "
        "model, or set both_ways to false"
    )


def length_problems(attention: AttentionConfig, length: int) -> list[str]:
    """Return why `attention` does not work over sequences of `length` tokens; empty if it works.

    Args:
        attention: the configuration.
        length: tokens of a sequence. A pattern that reaches beyond it would not save anything.
    """
    if attention.kind == "dense":
        return []
    return [
        f"model.attention.{name}: {tokens} tokens are more than data.sequence_length {length}, so that none is left "
        f"out by it; at most {_most(length, attention)} would work, or model.attention.kind 'dense'"
        for name in _TOKENS[attention.pattern]
        if (tokens := getattr(attention, name)) > max(length, attention.block)
    ]


def _most(length: int, attention: AttentionConfig) -> int:
    whole = 1 if attention.pattern == "sliding" else attention.block
    return max(length // whole * whole, whole)


def head_fits(size: int) -> bool:
    """Return whether the kernels support a head size.

    Args:
        size: elements of a head.
    """
    return size % _HEAD_MULTIPLE == 0 and _LEAST_HEAD <= size <= _LARGEST_HEAD


def _multiples_text(number: int, of: int) -> str:
    return _or([n for n in (number // of * of, (number // of + 1) * of) if n])


def _or(numbers: list[int]) -> str:
    return " or ".join(map(str, numbers))


@lru_cache(maxsize=64)
def seen_blocks(attention: AttentionConfig, length: int, *, causal: bool = True) -> tuple[tuple[int, ...], ...]:
    """Return for each block of queries the blocks of keys that it sees, ascending.

    Args:
        attention: the pattern.
        length: tokens of a sequence.
        causal: whether a block sees no later ones. If not (encoders), it also sees the later ones that see it; a custom
            mask is used as written.

    Raises:
        ValueError: a custom mask has fewer rows than there are blocks.
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
    """Return each row with the later blocks that see it."""
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
    """Return the blocks of the row's own run, and the last blocks of earlier runs."""
    run = attention.window // attention.block
    begin = row // run * run
    ends = {key for last in range(run - attention.global_blocks, run) for key in range(last, begin, run)}
    return ends | set(range(begin, row + 1))


def _longformer(attention: AttentionConfig, row: int) -> set[int]:
    return _window(attention, row) | set(range(attention.global_blocks))


def _bigbird(attention: AttentionConfig, row: int) -> set[int]:
    seen = _longformer(attention, row)
    others = [key for key in range(row) if key not in seen]
    # One generator for each row, so that a row does not depend on the length.
    draw = Random(f"{attention.seed}/{row}").random
    return seen | set(sorted(others, key=lambda _: draw())[: attention.random_blocks])


def _strided(attention: AttentionConfig, row: int) -> set[int]:
    return _window(attention, row) | set(range(row, -1, -(attention.stride // attention.block)))


def _custom(attention: AttentionConfig, row: int) -> set[int]:
    assert attention.mask is not None  # AttentionConfig requires a mask.
    return {key for key, seen in enumerate(attention.mask[row]) if seen == "x"}


_ROWS: dict[Pattern, Callable[[AttentionConfig, int], set[int]]] = {
    "sliding": _sliding,
    "fixed": _fixed,
    "longformer": _longformer,
    "bigbird": _bigbird,
    "strided": _strided,
    "custom": _custom,
}
