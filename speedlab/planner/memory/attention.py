"""Activations of attention, as activations.py has those of the rest: fused, or step by step through probabilities.

Attention of long sequences, over blocks and between ranks, is in activations_long.py.
"""

from __future__ import annotations

from speedlab.planner.memory.activation_sizes import ActivationSizes, Tally
from speedlab.planner.memory.long_sequences import attend_long_backward, attend_long_forward, attends_long, is_ring

_FLOAT32 = 4


def keeps_probabilities(s: ActivationSizes) -> bool:
    """Whether attention of this set-up works through whole probabilities."""
    if s.setup.attention == "plain":
        return True
    return s.setup.shape.dropout > 0 and s.device == "cpu" and not is_ring(s)


def attend_forward(t: Tally, s: ActivationSizes) -> None:
    """From queries, keys and values, one tensor, to the outputs side by side."""
    q, pair = s.heads, s.pair
    rotary = s.setup.shape.position == "rotary"
    if rotary:
        for size in (q, pair // 2):
            wide = size // s.element * _FLOAT32
            t.take(wide)
            t.touch(wide)
            if s.low:
                t.take(size)
                t.free(wide)
    if not keeps_probabilities(s):
        if attends_long(s):
            attend_long_forward(t, s)
            return
        t.take(q, s.queries)
        if lays_heads_anew(s):
            t.take(q)
        return
    (_whole_attention if s.setup.attention == "plain" else _attention_by_head)(t, s)
    if rotary:
        t.free(q, pair // 2)


def lays_heads_anew(s: ActivationSizes) -> bool:
    """Whether the output of fused attention is copied to lie head beside head for each token: that of turned queries
    does not lie so, and with dropout each head has an output of its own."""
    return s.setup.shape.position == "rotary" or s.setup.shape.dropout > 0


def _whole_attention(t: Tally, s: ActivationSizes) -> None:
    """Attention through whole probabilities, which stay, as do dropout's mask and their product."""
    q, pair = s.heads, s.pair
    wide, p = _math_sizes(s)
    t.take(3 * wide)  # Queries and keys scaled, values, contiguous.
    _to_probabilities(t, s, wide, p)
    t.take(q)
    t.free(wide if _keeps_projections(s) else q + pair)


def _keeps_projections(s: ActivationSizes) -> bool:
    """With one sequence, values are used where they are, as torch needs no copy to see heads side by side."""
    return s.setup.micro_size == 1 and not s.low and s.device == "cpu" and s.tp == 1


def _attention_by_head(t: Tally, s: ActivationSizes) -> None:
    """The same of one head after the other, as dropout draws them (`Attend`). One head's values are used where they
    are, unless they are widened: then nothing keeps the projections."""
    count = _own_heads(s)
    wide, p = (size // count for size in _math_sizes(s))
    for _ in range(count):
        t.take(3 * wide if s.low else 2 * wide)
        _to_probabilities(t, s, wide, p)
        t.take(s.heads // count)
    t.touch(s.heads)  # Side by side, and then once more in the order of tokens.
    if s.low:
        t.free(s.heads + s.pair)


def _to_probabilities(t: Tally, s: ActivationSizes, wide: int, p: int) -> None:
    """From queries and keys, of `wide` bytes each, to the probabilities, of `p`, that values are multiplied with."""
    with t.passing(4 * wide if s.low else wide):
        t.take(p)
        t.touch(p)
        if s.setup.shape.dropout > 0:
            t.take(p, p)
            t.touch(p // 2 if s.low else 0, 2 * wide)


def attend_backward(t: Tally, s: ActivationSizes) -> None:
    """From the gradient of the outputs, which is freed, to that of queries, keys and values in one tensor."""
    q, pair = s.heads, s.pair
    rotary = s.setup.shape.position == "rotary"
    if not keeps_probabilities(s) and attends_long(s):
        attend_long_backward(t, s)
    elif not keeps_probabilities(s):
        t.take(q + pair)
        t.free(q, q + pair, s.queries, q)  # What came; and saved: the projections, statistics, outputs.
        if rotary:
            t.free(q, pair // 2)
    elif s.setup.attention == "plain":
        _whole_attention_backward(t, s)
    else:
        _attention_by_head_backward(t, s)
    if rotary:
        for size in (q, pair // 2):
            t.touch(2 * size)
    t.touch(q + pair)  # Laid side by side,
    t.touch(q + pair)  # and then contiguous.


def _whole_attention_backward(t: Tally, s: ActivationSizes) -> None:
    q, pair = s.heads, s.pair
    wide, p = _math_sizes(s)
    if _keeps_projections(s):
        t.live += wide - (q + pair)  # What is freed below as values.
    t.take(wide)
    t.free(q)
    t.take(wide, p)
    t.free(wide, wide)  # The gradient, and values.
    _from_probabilities(t, s, wide, p)
    if s.low or pair < 2 * q:  # Narrowed; or summed over the heads that share keys and values.
        t.take(q + pair)
        t.free(3 * wide)


def _attention_by_head_backward(t: Tally, s: ActivationSizes) -> None:
    """Gradients of all heads are there before any are laid side by side; so long stays what came."""
    count = _own_heads(s)
    wide, p = (size // count for size in _math_sizes(s))
    for _ in range(count):
        with t.passing(wide if s.low else 0):
            t.take(wide, p)
        if s.low:
            t.free(wide)  # Values.
        _from_probabilities(t, s, wide, p)
        if s.low:
            t.take(3 * s.heads // count)
            t.free(3 * wide)
    t.free(s.heads)
    t.take(s.heads + s.pair)
    t.free(3 * s.heads)
    if not s.low:
        t.free(s.heads + s.pair)  # The projections.


def _from_probabilities(t: Tally, s: ActivationSizes, wide: int, p: int) -> None:
    """From the gradient of probabilities, of `p` bytes, to those of queries and keys, of `wide` each, which are read
    and freed."""
    if s.setup.shape.dropout > 0:
        t.free(p)  # What was multiplied with values.
        t.take(p)
        t.free(p, p)
    t.take(p)
    t.free(p, p)
    t.take(wide, wide)
    t.free(p, wide, wide)


def _own_heads(s: ActivationSizes) -> int:
    """Heads that drop on this rank: context-parallel ranks share those of a tensor-parallel one."""
    return max(1, s.setup.shape.heads // s.tp // s.setup.layout.cp)


def _math_sizes(s: ActivationSizes) -> tuple[int, int]:
    """(heads, probabilities) of attention that torch computes step by step; on CPUs in float32."""
    factor = _FLOAT32 // s.element if s.device == "cpu" else 1
    return factor * s.heads, factor * s.probabilities
