"""Activations of what long sequences are trained with, as activations.py has those of the rest: block-sparse attention,
attention between context-parallel ranks, and feed-forward layers in tiles. Each line is what takes or frees a tensor.

| | kept for backward instead of what dense attention on one rank keeps |
|---|---|
| sparse | queries, keys, values each for itself, so that the projections go; outputs once more, laid out anew |
| heads shared | the same, as they came from the other ranks |
| a ring | what dense attention keeps; keys and values on their way, and the sums of their gradients, pass |
| a ring that drops | besides, which probabilities stay, in bytes, where others keep the probabilities themselves |
| tiles | the layer's input alone |
"""

from __future__ import annotations

from speedlab.planner.memory.activation_sizes import ActivationSizes, Tally

_FLOAT32 = 4


def attends_long(s: ActivationSizes) -> bool:
    """Whether attention is one of these."""
    return s.setup.attention == "sparse" or s.setup.layout.cp > 1


def shares_heads(s: ActivationSizes) -> bool:
    return s.setup.layout.cp > 1 and s.setup.heads_shared > 1


def is_ring(s: ActivationSizes) -> bool:
    return s.setup.layout.cp > s.setup.heads_shared


def ring_kept(s: ActivationSizes) -> int:
    """Of a ring with dropout: a byte for each probability of this rank's queries, whether it stays."""
    return s.probabilities // s.element if is_ring(s) and s.setup.shape.dropout > 0 else 0


def _turn_scores(s: ActivationSizes) -> tuple[int, int]:
    """Of a ring with dropout: (float32 scores of one head in a turn, what is drawn of one head)."""
    setup = s.setup
    ring = setup.layout.cp // setup.heads_shared
    of_head = ring_kept(s) // max(1, setup.shape.heads // s.tp // setup.heads_shared)
    return of_head // ring * _FLOAT32, of_head * ring


def _rotary(s: ActivationSizes) -> bool:
    return s.setup.shape.position == "rotary"


def _grouped(s: ActivationSizes) -> bool:
    """Whether sparse attention is given a copy of keys and values for each head of queries."""
    return s.setup.attention == "sparse" and s.pair < 2 * s.heads


def lays_out_anew(s: ActivationSizes) -> bool:
    """Whether outputs of attention are kept once more, in the order in which the next layer takes them."""
    return s.setup.attention == "sparse" or shares_heads(s) or _rotary(s)


def _exchange(t: Tally, size: int) -> None:
    """Parts go to other ranks, what comes is laid out: a new tensor; what was given stays."""
    t.take(size, size)  # Sent, received.
    t.free(size)
    t.take(size)
    t.free(size)


def attend_long_forward(t: Tally, s: ActivationSizes) -> None:
    """From projections, which rotation has copied in part, to the outputs side by side."""
    q, pair = s.heads, s.pair
    if shares_heads(s):
        with t.passing(q + pair):  # One tensor of all three.
            _exchange(t, q + pair)
    elif s.setup.attention == "sparse":
        t.take(2 * q if _grouped(s) else pair // 2 if _rotary(s) else q + pair)
    if is_ring(s):
        wide, (scores, drawn) = q // s.element * _FLOAT32, _turn_scores(s)
        kept = ring_kept(s)
        t.touch(kept, max(kept, drawn))  # Head after head, then side by side.
        t.take(kept)
        with t.passing(wide, 2 * pair):  # The sum of turns; keys and values here and on their way.
            if kept:
                t.touch(wide, max(wide, 3 * scores + scores // _FLOAT32))
            t.touch(q, q)
            t.take(q, s.queries)
    else:
        t.take(q, s.queries)
    if shares_heads(s):
        _exchange(t, q)
    if lays_out_anew(s):
        t.take(q)


def leave_attention(t: Tally, s: ActivationSizes) -> None:
    """What nothing has saved goes with the names it had in the layer."""
    q, pair = s.heads, s.pair
    if shares_heads(s):
        t.free(q + pair, (q + pair // 2) if _rotary(s) else 0, q)
    elif s.setup.attention == "sparse":
        t.free(q + pair, pair // 2 if _rotary(s) and _grouped(s) else 0)


def attend_long_backward(t: Tally, s: ActivationSizes) -> None:
    """From the gradient of the outputs, which is freed, to those of queries, keys and values that were turned."""
    q, pair = s.heads, s.pair
    given = q + (2 * q if _grouped(s) else pair)
    if shares_heads(s):
        _exchange(t, q)
        t.free(q)
    if is_ring(s):
        wide = (q + pair) // s.element * _FLOAT32
        kept, (scores, _) = ring_kept(s), _turn_scores(s)
        with t.passing(wide, 2 * pair, 2 * (wide - wide // 3)):  # Sums, keys and values, sums on their way twice.
            if kept:
                t.touch(wide, max(wide, 4 * scores + scores // _FLOAT32))
            t.take(given)
            t.touch(given)
        t.free(kept)
    else:
        with t.passing(q if s.setup.attention == "sparse" and not shares_heads(s) else 0):
            t.take(given)
    t.free(q, given, s.queries, q)  # What came; and saved: what it was given, statistics, outputs.
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
    """Whether a rank's sequences are longer than a tile."""
    tile = s.setup.ffn_tile
    return tile is not None and tile < s.setup.padded_length // s.setup.layout.cp


def _of_tile(s: ActivationSizes, size: int) -> int:
    assert s.setup.ffn_tile is not None
    return size * s.setup.ffn_tile * s.setup.layout.cp // s.setup.padded_length


def tiles_forward(t: Tally, s: ActivationSizes) -> None:
    """From the layer's input, which stays, to its output."""
    inner, out = _of_tile(s, s.inner), _of_tile(s, s.hidden)
    t.take(inner, inner)
    t.free(inner)
    with t.passing(out):
        t.free(inner)
        t.take(s.hidden)


def tiles_backward(t: Tally, s: ActivationSizes, came: int) -> None:
    """From the gradient of the output, of which `came` is freed, to that of the input, which is freed, too."""
    inner, out = _of_tile(s, s.inner), _of_tile(s, s.hidden)
    shape = s.setup.shape
    matrix = s.matrix(shape.hidden, shape.ffn_hidden)
    sums = 2 * matrix // s.element * _FLOAT32  # Of the weights' gradients, over the tiles.
    t.take(s.hidden, sums)
    t.take(inner, inner, out)  # Forward again,
    t.take(inner, matrix)  # and the backwards of its three operations.
    t.free(inner)
    t.take(inner)
    t.free(2 * inner)
    t.take(out, matrix)
    t.free(inner, out, out, 2 * matrix)
    if s.low:
        t.touch(2 * matrix)
    t.free(sums, came, s.hidden)
