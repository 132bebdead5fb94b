"""Describe attention at a length: its work, what a query sees, the longest path between tokens, a picture. No torch.

A path from a token to an earlier one goes, layer by layer, from a query to a key that it sees. A token depends on
itself in every layer, through the residual stream. In patterns of whole blocks a path between two blocks connects any
of their tokens, so the graph of blocks gives exact lengths. A sliding window is exact to the token: window - 1 tokens a
layer.

`longest_path` represents a set of blocks by the bits of an integer. The blocks reached after a + b layers are those
reached after a, plus those reached after b from the blocks exactly a away.

1. Double powers of two until everything is reached.
2. Compose the smallest number of layers from these powers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from html import escape
from typing import Any

from speedlab.config.attention import AttentionConfig, seen_blocks
from speedlab.display.grid_svg import SIDE, Grid, grid_svg, grid_text

Rows = tuple[tuple[int, ...], ...]


def hops(length: int, window: int) -> int | None:
    """Return the layers of a sliding window from the last token to the first; None if it never gets there.

    Args:
        length: tokens of the sequence.
        window: tokens that a query sees, itself included.
    """
    if length == 1:
        return 1
    return None if window == 1 else -(-(length - 1) // (window - 1))


def longest_path(rows: Rows, last_tokens: int, *, causal: bool) -> int | None:
    """Return the layers after which each block can depend on all others, and on itself; None: some never can.

    Args:
        rows: the blocks that each block sees.
        last_tokens: tokens of the last block.
        causal: whether only earlier blocks count.
    """
    tokens = [last_tokens if block == len(rows) - 1 else 2 for block in range(len(rows))]
    if any(block not in row and tokens[block] > 1 for block, row in enumerate(rows)):
        if causal:
            return None  # Its tokens do not see each other, and no causal path returns to a block.
        rows = _halved(rows, tokens)
    whole = [(2 << block) - 1 if causal else (1 << len(rows)) - 1 for block in range(len(rows))]
    itself = [1 << block for block in range(len(rows))]
    once = [sum(1 << key for key in row) | own for own, row in zip(itself, rows, strict=True)]
    powers = [(once, itself)]
    while (reached := powers[-1][0]) != whole:
        before = powers[-1][1]
        twice = _after(reached, before, reached)
        if twice == reached:
            return None
        powers.append((twice, _after(reached, before, before)))
    # One layer reaches everything.
    if len(powers) == 1:
        return 1
    layers, (reached, before) = 2 ** (len(powers) - 2), powers[-2]
    for power in range(len(powers) - 3, -1, -1):
        further = _after(reached, before, powers[power][0])
        if further != whole:
            layers, reached, before = layers + 2**power, further, _after(reached, before, powers[power][1])
    return layers + 1


def _halved(rows: Rows, tokens: list[int]) -> Rows:
    """Return the rows with each block of several tokens split in two.

    This distinguishes two tokens of a block that does not see itself: a path between them uses other blocks.
    """
    parts, end = [], 0
    for count in tokens:
        parts.append(tuple(range(end, end + min(count, 2))))
        end = parts[-1][-1] + 1
    return tuple(
        tuple(half for key in row for half in parts[key]) for row, own in zip(rows, parts, strict=True) for _ in own
    )


def _after(reached: list[int], before: list[int], then: list[int]) -> list[int]:
    """Return what is reached after a + b layers, from the sets after a and a - 1 layers, and `then`, after b."""
    found = []
    for within, less in zip(reached, before, strict=True):
        newest, total = within & ~less, within
        while newest:
            lowest = newest & -newest
            total |= then[lowest.bit_length() - 1]
            newest ^= lowest
        found.append(total)
    return found


_REPORTED_RUNS = 5
"""Maximum number of runs of visible tokens in a text."""


@dataclass(frozen=True, kw_only=True, repr=False)
class AttentionView:
    """What attention sees over a sequence of `length` tokens. `print` it, or show it in a notebook."""

    attention: AttentionConfig
    length: int
    layers: int | None = None
    """Layers of the model; None: unknown."""
    causal: bool = True
    """Whether no token sees a later one; encoders see both ways."""

    @property
    def rows(self) -> Rows:
        """The blocks that each block of queries sees.

        Raises:
            ValueError: a custom mask is too short.
        """
        return seen_blocks(self.attention, self.length, causal=self.causal)

    @property
    def blocks(self) -> int:
        """Number of blocks in the sequence."""
        return -(-self.length // self.attention.block)

    @cached_property
    def density(self) -> float:
        """Computed blocks relative to those of dense attention: the share of its work, 0 to 1."""
        if self.attention.kind == "dense":
            return 1.0
        return sum(map(len, self.rows)) / (self.blocks * (self.blocks + 1) // 2 if self.causal else self.blocks**2)

    @cached_property
    def last_sees(self) -> int:
        """Tokens that the last token attends to, itself included."""
        return self._seen_by(self.length - 1)

    @cached_property
    def mean_sees(self) -> float:
        """Mean number of tokens that a query attends to, itself included."""
        if (window := self._window) is not None:
            near = min(window, self.length)
            return (near * (near + 1) / 2 + (self.length - near) * near) / self.length
        total = 0
        for block, row in enumerate(self.rows):
            queries = self._tokens_of(block)
            total += queries * sum(map(self._tokens_of, row))
            if self.causal and block in row:
                total -= queries * (queries - 1) // 2
        return total / self.length

    @cached_property
    def layers_to_first(self) -> int | None:
        """Layers after which the last token can depend on the first; None: never."""
        if self._window is not None:
            return hops(self.length, self._window)
        reached, layers = self._steps_from_last(until=0)
        return layers if 0 in reached else None

    @cached_property
    def longest_path(self) -> int | None:
        """Layers after which every token can depend on every earlier one (in encoders on every other); None: never."""
        if self._window is not None:
            return hops(self.length, self._window)
        return longest_path(self.rows, self._tokens_of(self.blocks - 1), causal=self.causal)

    def heard(self, layers: int) -> int:
        """Return how many tokens the last token can depend on after a number of layers, itself included.

        Args:
            layers: number of layers; below 1, only the token itself counts.
        """
        if layers < 1:
            return 1
        if self._window is not None:
            return min(self.length, layers * (self._window - 1) + 1)
        reached, _ = self._steps_from_last(most=layers)
        return sum(map(self._tokens_of, reached)) + (self.blocks - 1 not in reached)

    def _tokens_of(self, block: int) -> int:
        return min(self.attention.block, self.length - block * self.attention.block)

    @property
    def _window(self) -> int | None:
        """Tokens of a sliding window, the only pattern without whole blocks; None for other patterns."""
        sliding = self.attention.kind == "block_sparse" and self.attention.pattern == "sliding"
        return self.attention.window if sliding else None

    def _seen_by(self, token: int) -> int:
        if self._window is not None:
            return min(self._window, token + 1)
        own, place = divmod(token, self.attention.block)
        return sum(place + 1 if self.causal and key == own else self._tokens_of(key) for key in self.rows[own])

    def _steps_from_last(self, *, until: int | None = None, most: int | None = None) -> tuple[set[int], int]:
        """Return (blocks that the last block reaches, number of steps).

        The search ends at block `until`, or after `most` steps.
        """
        reached: set[int] = set()
        newest, layers = {self.blocks - 1}, 0
        while newest and until not in reached and layers != most:
            newest = {key for row in newest for key in self.rows[row]} - reached
            reached |= newest
            layers += 1
        return reached, layers

    # ---- in words ----------------------------------------------------------------------------------------------------

    @property
    def words(self) -> list[str]:
        """One line each: the work, what a query sees, and the longest path between two tokens."""
        dense = "dense causal attention" if self.causal else "dense attention"
        work = f"all of the work of {dense}"
        if self.density < 1:
            work = f"{_percent(self.density)} of {dense}'s work, {1 / self.density:,.3g} times less"
        whole = (self.length + 1) / 2 if self.causal else self.length
        last = f"the last one sees {self.last_sees:,}: {self._runs(self.length - 1)}"
        return [
            f"{self.length:,} tokens in {self.blocks:,} blocks of {self.attention.block}: {work}",
            f"a query sees {self.mean_sees:,.0f} tokens on average (dense: {whole:,.0f}); {last}",
            self._path_words(),
        ]

    def _path_words(self) -> str:
        path, layers = self.longest_path, self.layers
        unheard, everything = ("some before them", "all before it") if self.causal else ("some others", "all others")
        reported = f"longest path: some tokens never depend on {unheard}, whatever the number of layers"
        if path is not None:
            reported = f"longest path between two tokens: {path:,} layer{'s' if path > 1 else ''}"
        if layers is None:
            return reported
        if path is not None and path <= layers:
            return f"{reported}; the model's {layers} are enough for every token to depend on {everything}"
        reach = f"after the model's {layers} the last token depends on {self.heard(layers):,} of {self.length:,} tokens"
        return f"{reported}; {reach}"

    def __str__(self) -> str:
        return "\n".join([*self.words, *grid_text(self.grid)])

    __repr__ = __str__

    # ---- as a picture ------------------------------------------------------------------------------------------------

    @cached_property
    def grid(self) -> Grid:
        """Queries downwards, keys to the right, in cells of one or more blocks: the visible share of each cell."""
        per_cell = -(-self.blocks // SIDE)
        side = -(-self.blocks // per_cell)
        counts = [[0] * (row + 1 if self.causal else side) for row in range(side)]
        for row, seen in enumerate(self.rows):
            cells = counts[row // per_cell]
            for key in seen:
                cells[key // per_cell] += 1
        shares = tuple(
            tuple(count / self._blocks_in(row, column, per_cell) for column, count in enumerate(cells))
            for row, cells in enumerate(counts)
        )
        tokens = per_cell * self.attention.block
        titles = tuple(self._title(row * tokens, min((row + 1) * tokens, self.length) - 1) for row in range(side))
        return Grid(shares=shares, titles=titles, length=self.length)

    def _blocks_in(self, row: int, column: int, per_cell: int) -> int:
        """Return the blocks of a cell that dense attention would compute."""
        height, width = (min(per_cell, self.blocks - cell * per_cell) for cell in (row, column))
        return height * (height + 1) // 2 if self.causal and column == row else height * width

    def _title(self, first: int, last: int) -> str:
        return f"queries {first:,} to {last:,}: the last sees {self._seen_by(last):,} tokens, {self._runs(last)}"

    def _runs(self, token: int) -> str:
        """Return the tokens that a token sees, as text: '0 to 63 and 192 to 255'."""
        if self._window is not None:
            return f"{max(0, token - self._window + 1):,} to {token:,}"
        block, runs = self.attention.block, list[list[int]]()
        for key in self.rows[token // block]:
            first, end = key * block, min((key + 1) * block, token + 1 if self.causal else self.length)
            if runs and runs[-1][1] == first:
                runs[-1][1] = end
            else:
                runs.append([first, end])
        reported = [f"{first:,} to {end - 1:,}" for first, end in runs]
        if len(reported) > _REPORTED_RUNS:
            reported = [*reported[: _REPORTED_RUNS - 2], f"… ({len(reported) - _REPORTED_RUNS + 1} more)", reported[-1]]
        return " and ".join(filter(None, [", ".join(reported[:-1]), reported[-1]]))

    def svg(self) -> str:
        """Return only the picture, in the page's text colour, without script or style sheet."""
        return grid_svg(self.grid, what="; ".join(self.words))

    def _repr_html_(self) -> str:
        return self.html()

    def html(self, *more: str) -> str:
        """Return the picture next to the lines of `words` and additional lines.

        Args:
            more: additional lines.
        """
        lines = "".join(f'<div style="margin:3px 0">{escape(line)}</div>' for line in (*self.words, *more))
        return (
            '<div class="speedlab-attention" style="display:flex;flex-flow:row wrap;gap:4px 16px;align-items:center">'
            f'<div>{self.svg()}</div><div style="flex:1 1 240px">{lines}</div></div>'
        )

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        for number, line in enumerate(str(self).splitlines()):
            if number:
                printer.break_()
            printer.text(line)


@lru_cache(maxsize=16)
def describe(
    attention: AttentionConfig, length: int, *, layers: int | None = None, causal: bool = True
) -> AttentionView:
    """Return what `attention` sees over a sequence.

    Args:
        attention: the configuration.
        length: tokens of the sequence, at least 1.
        layers: layers of the model, to check whether they suffice; None: unknown.
        causal: whether a block sees no later ones. If not (encoders), it also sees the later ones that see it.

    Raises:
        ValueError: the length is below 1, or a sliding window is not causal.
    """
    if length < 1:
        raise ValueError(f"a sequence of {length} tokens; give at least 1")
    if not causal and attention.kind == "block_sparse" and attention.pattern == "sliding":
        raise ValueError(
            "model.attention.pattern 'sliding' counts tokens before a query, and encoders see both ways; take "
            "'longformer' with global_blocks 0"
        )
    return AttentionView(attention=attention, length=length, layers=layers, causal=causal)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
