"""How many layers two tokens need to hear of each other, by the blocks that each block sees.

Sets of blocks are the bits of a number. What is reached after a + b layers is what is reached after a, and after b from
the blocks that are exactly a away: so powers of two are doubled until all is reached, and the least number of layers is
put together from them.
"""

from __future__ import annotations

Rows = tuple[tuple[int, ...], ...]


def hops(length: int, window: int) -> int | None:
    """Layers of a window of tokens from the last token of `length` to the first."""
    if length == 1:
        return 1
    return None if window == 1 else -(-(length - 1) // (window - 1))


def longest_path(rows: Rows, last_tokens: int, *, causal: bool) -> int | None:
    """Layers after which each block can depend on itself and on all others, under `causal` those before it; None: some
    never do. `last_tokens`: of the last block."""
    tokens = [last_tokens if block == len(rows) - 1 else 2 for block in range(len(rows))]
    if any(block not in row and tokens[block] > 1 for block, row in enumerate(rows)):
        if causal:
            return None  # Its tokens do not see each other, and nothing leads back to a block that was left.
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
    if len(powers) == 1:
        return 1
    layers, (reached, before) = 2 ** (len(powers) - 2), powers[-2]
    for power in range(len(powers) - 3, -1, -1):
        further = _after(reached, before, powers[power][0])
        if further != whole:
            layers, reached, before = layers + 2**power, further, _after(reached, before, powers[power][1])
    return layers + 1


def _halved(rows: Rows, tokens: list[int]) -> Rows:
    """Each block of several tokens as two, so that two tokens of a block that does not see itself are told apart: what
    leads from one to the other goes by way of other blocks."""
    parts, end = [], 0
    for count in tokens:
        parts.append(tuple(range(end, end + min(count, 2))))
        end = parts[-1][-1] + 1
    return tuple(
        tuple(half for key in row for half in parts[key]) for row, own in zip(rows, parts, strict=True) for _ in own
    )


def _after(reached: list[int], before: list[int], then: list[int]) -> list[int]:
    """What is reached after a + b layers, from what is reached after a and after a - 1, and `then`, after b."""
    found = []
    for within, less in zip(reached, before, strict=True):
        newest, total = within & ~less, within
        while newest:
            lowest = newest & -newest
            total |= then[lowest.bit_length() - 1]
            newest ^= lowest
        found.append(total)
    return found
