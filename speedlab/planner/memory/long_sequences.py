"""Predict activations of long sequences: block-sparse attention, context parallelism, tiled feed-forward layers.

Each line allocates or frees a tensor. Compared with dense attention on one rank, backward keeps:

| | kept |
|---|---|
| sparse | queries, keys, values separately, so that the projections are freed; a copy of the outputs |
| heads shared | the same, as received from the other ranks |
| a ring | what dense attention keeps; keys and values in transit, and their gradients' sums, are temporary |
| a ring with dropout | in addition a byte for each probability's mask, instead of the probabilities themselves |
| tiles | only the layer's input |
"""

from __future__ import annotations

from speedlab.planner.memory.activation_sizes import ActivationSizes, Tally

_FLOAT32 = 4


def attends_long(s: ActivationSizes) -> bool:
    """Return whether attention is sparse or context-parallel."""
    return s.setup.attention == "sparse" or s.setup.layout.cp > 1


def shares_heads(s: ActivationSizes) -> bool:
    """Return whether context-parallel ranks exchange tokens for heads."""
    return s.setup.layout.cp > 1 and s.setup.heads_shared > 1


def is_ring(s: ActivationSizes) -> bool:
    """Return whether keys and values are sent around a ring."""
    return s.setup.layout.cp > s.setup.heads_shared


def ring_kept(s: ActivationSizes) -> int:
    """Return the bytes of a ring's dropout mask: one byte for each probability of this rank's queries."""
    return s.probabilities // s.element if is_ring(s) and s.setup.shape.dropout > 0 else 0


def _turn_scores(s: ActivationSizes) -> tuple[int, int]:
    """Return (float32 scores of a head in a turn, random numbers of a head) in bytes, for a ring with dropout."""
    setup = s.setup
    ring = setup.layout.cp // setup.heads_shared
    of_head = ring_kept(s) // max(1, setup.shape.heads // s.tp // setup.heads_shared)
    return of_head // ring * _FLOAT32, of_head * ring


def _rotary(s: ActivationSizes) -> bool:
    return s.setup.shape.position == "rotary"


def _grouped(s: ActivationSizes) -> bool:
    """Return whether sparse attention gets a copy of keys and values for each head of queries."""
    return s.setup.attention == "sparse" and s.pair < 2 * s.heads


def copies_layout(s: ActivationSizes) -> bool:
    """Return whether a copy of attention's outputs is kept in the layout of the next layer."""
    return s.setup.attention == "sparse" or shares_heads(s) or _rotary(s)


def _exchange(t: Tally, size: int) -> None:
    """Count an all-to-all: send, receive, then a new tensor in the right layout. The input stays alive."""
    t.take(size, size)  # Sent, received.
    t.free(size)
    t.take(size)
    t.free(size)


def attend_long_forward(t: Tally, s: ActivationSizes) -> None:
    """Count attention's forward, from projections, partly copied by rotation, to the concatenated outputs.

    Args:
        t: bytes alive; changed in place.
        s: sizes of the tensors.
    """
    q, pair = s.heads, s.pair
    if shares_heads(s):
        with t.passing(q + pair):  # Queries, keys and values in one tensor.
            _exchange(t, q + pair)
    elif s.setup.attention == "sparse":
        t.take(2 * q if _grouped(s) else pair // 2 if _rotary(s) else q + pair)
    if is_ring(s):
        wide, (scores, drawn) = q // s.element * _FLOAT32, _turn_scores(s)
        kept = ring_kept(s)
        t.touch(kept, max(kept, drawn))  # One head after the other, then concatenated.
        t.take(kept)
        with t.passing(wide, 2 * pair):  # The sum of turns; keys and values, here and in transit.
            if kept:
                t.touch(wide, max(wide, 3 * scores + scores // _FLOAT32))
            t.touch(q, q)
            t.take(q, s.queries)
    else:
        t.take(q, s.queries)
    if shares_heads(s):
        _exchange(t, q)
    if copies_layout(s):
        t.take(q)


def leave_attention(t: Tally, s: ActivationSizes) -> None:
    """Count the frees of tensors that only the layer's local variables kept alive.

    Args:
        t: bytes alive; changed in place.
        s: sizes of the tensors.
    """
    q, pair = s.heads, s.pair
    if shares_heads(s):
        t.free(q + pair, (q + pair // 2) if _rotary(s) else 0, q)
    elif s.setup.attention == "sparse":
        t.free(q + pair, pair // 2 if _rotary(s) and _grouped(s) else 0)


def attend_long_backward(t: Tally, s: ActivationSizes) -> None:
    """Count attention's backward.

    It goes from the gradient of the outputs to those of the rotated queries, keys and values.

    Args:
        t: bytes alive; changed in place.
        s: sizes of the tensors.
    """
    q, pair = s.heads, s.pair
    given = q + (2 * q if _grouped(s) else pair)
    if shares_heads(s):
        _exchange(t, q)
        t.free(q)
    if is_ring(s):
        wide = (q + pair) // s.element * _FLOAT32
        kept, (scores, _) = ring_kept(s), _turn_scores(s)
        with t.passing(wide, 2 * pair, 2 * (wide - wide // 3)):  # Sums; keys and values; sums in transit, twice.
            if kept:
                t.touch(wide, max(wide, 4 * scores + scores // _FLOAT32))
            t.take(given)
            t.touch(given)
        t.free(kept)
    else:
        with t.passing(q if s.setup.attention == "sparse" and not shares_heads(s) else 0):
            t.take(given)
    t.free(q, given, s.queries, q)  # The gradient, and the saved inputs, statistics, outputs.
    if _grouped(s):
        t.take(pair)
        t.free(2 * q)
    if _rotary(s) and is_ring(s) and not shares_heads(s):
        t.free(q, pair // 2)
    if shares_heads(s):
        t.take(q + pair)
        t.free(q + pair)
        _exchange(t, q + pair)
        t.free(q + pair)


# ---- feed-forward layers in tiles ------------------------------------------------------------------------------------


def is_tiled(s: ActivationSizes) -> bool:
    """Return whether a rank's sequences are longer than a tile of the feed-forward layer."""
    tile = s.setup.ffn_tile
    return tile is not None and tile < s.setup.padded_length // s.setup.layout.cp


def _of_tile(s: ActivationSizes, size: int) -> int:
    assert s.setup.ffn_tile is not None
    return size * s.setup.ffn_tile * s.setup.layout.cp // s.setup.padded_length


def tiles_forward(t: Tally, s: ActivationSizes) -> None:
    """Count the forward of a tiled feed-forward layer.

    Args:
        t: bytes alive; changed in place. The layer's input stays alive.
        s: sizes of the tensors.
    """
    inner, out = _of_tile(s, s.inner), _of_tile(s, s.hidden)
    t.take(inner, inner)
    t.free(inner)
    with t.passing(out):
        t.free(inner)
        t.take(s.hidden)


def tiles_backward(t: Tally, s: ActivationSizes, came: int) -> None:
    """Count the backward of a tiled feed-forward layer, which recomputes each tile.

    Args:
        t: bytes alive; changed in place.
        s: sizes of the tensors.
        came: bytes of the incoming gradient that are freed. The input is freed, too.
    """
    inner, out = _of_tile(s, s.inner), _of_tile(s, s.hidden)
    shape = s.setup.shape
    matrix = s.matrix(shape.hidden, shape.ffn_hidden)
    sums = 2 * matrix // s.element * _FLOAT32  # Float32 sums of the weights' gradients over the tiles.
    t.take(s.hidden, sums)
    t.take(inner, inner, out)  # Recompute forward,
    t.take(inner, matrix)  # then the backwards of its three operations.
    t.free(inner)
    t.take(inner)
    t.free(2 * inner)
    t.take(out, matrix)
    t.free(inner, out, out, 2 * matrix)
    if s.low:
        t.touch(2 * matrix)
    t.free(sums, came, s.hidden)
