"""Which blocks go from rank to rank in a ring of block-sparse attention."""

from __future__ import annotations

from typing import Any, get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from speedlab.config import AttentionConfig
from speedlab.config.attention import Pattern, seen_blocks
from speedlab.config.layout_rules import ring_needs

BLOCK = 16


@st.composite
def attentions(draw: st.DrawFn) -> tuple[AttentionConfig, int, int]:
    """(attention, blocks of a sequence, ranks)"""
    ranks = draw(st.integers(1, 5))
    count = 2 * ranks * draw(st.integers(1, 4))
    pattern: Pattern = draw(st.sampled_from(get_args(Pattern)))
    options: dict[str, Any] = {"window": BLOCK * draw(st.integers(1, 6)), "stride": BLOCK * draw(st.integers(1, 6))}
    options["global_blocks"] = draw(st.integers(0, options["window"] // BLOCK))
    if pattern == "sliding":
        options["window"] = draw(st.integers(1, 6 * BLOCK))
    if pattern == "custom":
        rows = draw(st.integers(max(1, count - 3), count))  # Behind them there is padding.
        options["mask"] = tuple(
            "".join("x" if draw(st.booleans()) or key == 0 else "." for key in range(rows)) for _ in range(rows)
        )
    return AttentionConfig(kind="block_sparse", block=BLOCK, pattern=pattern, **options), count, ranks


@settings(max_examples=150, deadline=None)
@given(attentions())
def test_each_pair_is_computed_once_and_nothing_else_is_sent(case: tuple[AttentionConfig, int, int]) -> None:
    attention, count, ranks = case
    needs = ring_needs(attention, count * BLOCK, ranks)
    assert sorted(block for own in needs.blocks for block in own) == list(range(count))
    known = count if attention.mask is None else len(attention.mask)
    rows = seen_blocks(attention, known * BLOCK)
    pairs = {(row, key) for row, seen in enumerate(rows) for key in seen}
    computed, useful = [], set()
    for places in (0, *needs.turns):  # As the ranks do it, turn by turn.
        for rank, own in enumerate(needs.blocks):
            source = (rank - places) % ranks
            came = needs.blocks[rank] if not places else needs.needed[rank][source]
            here = [(row, key) for row in own for key in came if (row, key) in pairs]
            computed += here
            useful |= {(rank, key) for _, key in here}
    assert len(computed) == len(set(computed))
    assert set(computed) == pairs
    sent = [(rank, key) for rank in range(ranks) for k in needs.turns for key in needs.needed[rank][(rank - k) % ranks]]
    assert len(sent) == len(set(sent))
    assert set(sent) <= useful
    for k in needs.turns:
        assert any(needs.needed[rank][(rank - k) % ranks] for rank in range(ranks))
    for rank, of_rank in enumerate(needs.needed):
        for source, blocks in enumerate(of_rank):
            assert set(blocks) <= set(needs.blocks[source]), (rank, source)
            assert list(blocks) == sorted(blocks)
