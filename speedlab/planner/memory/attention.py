"""Predict activations of attention: fused, or step by step through probabilities.

Counterpart of `activations` for the other layers. Attention of long sequences, over blocks and between ranks, is in
`long_sequences`.
"""

from __future__ import annotations

from speedlab.planner.memory.activation_sizes import ActivationSizes, Tally
from speedlab.planner.memory.long_sequences import attend_long_backward, attend_long_forward, attends_long, is_ring

_FLOAT32 = 4


def keeps_probabilities(s: ActivationSizes) -> bool:
    """Return whether attention of this set-up materialises whole probabilities."""
    if s.setup.attention == "plain":
        return True
    return s.setup.shape.dropout > 0 and s.device == "cpu" and not is_ring(s)


def attend_forward(t: Tally, s: ActivationSizes) -> None:
    """Count attention's forward.

    It goes from the tensor of queries, keys and values to the concatenated outputs.

    Args:
        t: bytes alive; changed in place.
        s: sizes of the tensors.
    """
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
        if copies_heads(s):
            t.take(q)
        return
    (_whole_attention if s.setup.attention == "plain" else _attention_by_head)(t, s)
    if rotary:
        t.free(q, pair // 2)


def copies_heads(s: ActivationSizes) -> bool:
    """Return whether the output of fused attention is copied into a layout with adjacent heads.

    The output for rotated queries has another layout, and with dropout each head has a separate output.
    """
    return s.setup.shape.position == "rotary" or s.setup.shape.dropout > 0


def _whole_attention(t: Tally, s: ActivationSizes) -> None:
    """Count attention through whole probabilities, which stay alive, like dropout's mask and their product."""
    q, pair = s.heads, s.pair
    wide, p = _math_sizes(s)
    t.take(3 * wide)  # Scaled queries and keys, contiguous values.
    _to_probabilities(t, s, wide, p)
    t.take(q)
    t.free(wide if _keeps_projections(s) else q + pair)


def _keeps_projections(s: ActivationSizes) -> bool:
    """Return whether values are used in place: with one sequence, torch needs no copy to concatenate heads."""
    return s.setup.micro_size == 1 and not s.low and s.device == "cpu" and s.tp == 1


def _attention_by_head(t: Tally, s: ActivationSizes) -> None:
    """Count the same for one head after the other, which is the order of dropout's random numbers (`Attend`).

    Values of a head are used in place, unless they are widened; then nothing keeps the projections alive.
    """
    count = _own_heads(s)
    wide, p = (size // count for size in _math_sizes(s))
    for _ in range(count):
        t.take(3 * wide if s.low else 2 * wide)
        _to_probabilities(t, s, wide, p)
        t.take(s.heads // count)
    t.touch(s.heads)  # Concatenated, then copied into the order of tokens.
    if s.low:
        t.free(s.heads + s.pair)


def _to_probabilities(t: Tally, s: ActivationSizes, wide: int, p: int) -> None:
    """Count from queries and keys (`wide` bytes each) to the probabilities (`p` bytes) that multiply the values."""
    with t.passing(4 * wide if s.low else wide):
        t.take(p)
        t.touch(p)
        if s.setup.shape.dropout > 0:
            t.take(p, p)
            t.touch(p // 2 if s.low else 0, 2 * wide)


def attend_backward(t: Tally, s: ActivationSizes) -> None:
    """Count attention's backward.

    It goes from the gradient of the outputs, which is freed, to that of queries, keys and values in one tensor.

    Args:
        t: bytes alive; changed in place.
        s: sizes of the tensors.
    """
    q, pair = s.heads, s.pair
    rotary = s.setup.shape.position == "rotary"
    if not keeps_probabilities(s) and attends_long(s):
        attend_long_backward(t, s)
    elif not keeps_probabilities(s):
        t.take(q + pair)
        t.free(q, q + pair, s.queries, q)  # The gradient, saved projections, statistics, outputs.
        if rotary:
            t.free(q, pair // 2)
    elif s.setup.attention == "plain":
        _whole_attention_backward(t, s)
    else:
        _attention_by_head_backward(t, s)
    if rotary:
        for size in (q, pair // 2):
            t.touch(2 * size)
    t.touch(q + pair)  # Concatenate,
    t.touch(q + pair)  # then make contiguous.


def _whole_attention_backward(t: Tally, s: ActivationSizes) -> None:
    q, pair = s.heads, s.pair
    wide, p = _math_sizes(s)
    if _keeps_projections(s):
        t.live += wide - (q + pair)  # The code below frees this as values.
    t.take(wide)
    t.free(q)
    t.take(wide, p)
    t.free(wide, wide)  # The gradient, and values.
    _from_probabilities(t, s, wide, p)
    if s.low or pair < 2 * q:  # Narrowed, or summed over grouped heads.
        t.take(q + pair)
        t.free(3 * wide)


def _attention_by_head_backward(t: Tally, s: ActivationSizes) -> None:
    """Count the backward by head.

    Gradients of all heads exist before they are concatenated; until then the incoming gradient stays alive.
    """
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
    """Count from the gradient of probabilities (`p` bytes) to those of queries and keys (`wide` bytes each).

    Queries and keys are freed.
    """
    if s.setup.shape.dropout > 0:
        t.free(p)  # The probabilities that multiplied the values.
        t.take(p)
        t.free(p, p)
    t.take(p)
    t.free(p, p)
    t.take(wide, wide)
    t.free(p, wide, wide)


def _own_heads(s: ActivationSizes) -> int:
    """Return the heads with dropout on this rank: context-parallel ranks share those of a tensor-parallel rank."""
    return max(1, s.setup.shape.heads // s.tp // s.setup.layout.cp)


def _math_sizes(s: ActivationSizes) -> tuple[int, int]:
    """Return (heads, probabilities) bytes for attention that torch computes step by step; on CPUs in float32."""
    factor = _FLOAT32 // s.element if s.device == "cpu" else 1
    return factor * s.heads, factor * s.probabilities
