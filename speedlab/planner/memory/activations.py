"""Predict activations of the built-in GPT on one rank: what forward and backward of a micro-batch keep and free.

Each layer is a list of allocations and frees in torch's order. Tensors that autograd saves live until the layer's
backward; results live until their last use. A walk over a micro-batch then gives the bytes after its forward and the
peak at any moment. `Engine.trace_activations` measures the same by following every storage. The workspace of a kernel
is visible only to a GPU's allocator, and counts only there.

Differences between devices:

| layer       | cpu                                                 | cuda                                          |
|-------------|-----------------------------------------------------|-----------------------------------------------|
| RMSNorm     | elementwise operations; in float32 for 16-bit dtypes | one kernel; keeps its input                   |
| dropout     | the mask in the compute dtype                       | the mask, one byte an element                 |
| attention   | flash without dropout; probabilities with it, a     | flash with or without: q, k, v, output and a  |
|             | head at a time                                      | float32 a query                               |

B sequences, T tokens, C hidden, V vocabulary; n = B T tokens; sizes are bytes.
"""

from __future__ import annotations

from speedlab.config.model_shape import Bias
from speedlab.planner.memory.activation_sizes import ActivationSizes, Tally
from speedlab.planner.memory.attention import (
    attend_backward,
    attend_forward,
    copies_heads,
    keeps_probabilities,
)
from speedlab.planner.memory.long_sequences import (
    attends_long,
    copies_layout,
    is_tiled,
    leave_attention,
    ring_kept,
    shares_heads,
    tiles_backward,
    tiles_forward,
)

_FLOAT32 = 4

# ---- norms -----------------------------------------------------------------------------------------------------------


def norm_forward(t: Tally, s: ActivationSizes) -> None:
    """Count a norm's forward: its result and the tensors it saves stay alive.

    Args:
        t: bytes alive; changed in place. The norm's input is not freed here.
        s: sizes of the tensors.
    """
    x, row = s.local, s.row
    if s.setup.shape.norm == "layer":
        t.take(x, *_statistics(s))
    elif s.device == "cuda":
        t.take(x, row)
    else:
        wide = x // s.element * _FLOAT32
        if s.low:
            t.take(wide)
        with t.passing(wide, row):
            t.take(row)
        t.take(wide)
        if s.low:
            with t.passing(wide):
                t.take(x)
        else:
            t.take(x)


def norm_backward(t: Tally, s: ActivationSizes, *, residual: bool) -> None:
    """Count a norm's backward, and free the tensors that it saved, with its input.

    Args:
        t: bytes alive; changed in place.
        s: sizes of the tensors.
        residual: whether the gradient is added to that of the residual path, which is freed, too.
    """
    x, row = s.local, s.row
    vector = s.setup.shape.hidden * _FLOAT32
    if s.setup.shape.norm == "layer" or s.device == "cuda":
        with t.passing(vector):
            t.take(x)
            t.free(x, x, *(_statistics(s) if s.setup.shape.norm == "layer" else (row,)))
            _add(t, x, residual)
        return
    wide = x // s.element * _FLOAT32
    if s.low:
        t.take(wide)
        t.free(x)
    t.take(wide, wide, vector)  # Gradients of the weight and of its factor.
    t.free(vector, wide, wide, wide)  # First product, incoming gradient, normalised input.
    t.take(wide, wide, row)
    t.free(wide, wide)
    if not s.low:
        _add(t, x, residual)
    t.take(wide)
    t.free(row, row)
    t.take(wide, wide, wide)
    t.free(wide, wide, wide, wide)  # All products but the last, and the saved input.
    t.take(wide)
    t.free(wide, wide)
    if s.low:
        t.take(x)
        t.free(wide)
        _add(t, x, residual)


def _statistics(s: ActivationSizes) -> tuple[int, int]:
    """Return the bytes of LayerNorm's mean and inverse deviation."""
    size = s.row if s.device == "cuda" else s.row // _FLOAT32 * s.element
    return size, size


def _add(t: Tally, size: int, wanted: bool) -> None:
    """Count the sum of two tensors that are freed afterwards."""
    if wanted:
        t.take(size)
        t.free(size, size)


# ---- between tensor-parallel ranks -----------------------------------------------------------------------------------


def _gathered(t: Tally, s: ActivationSizes) -> None:
    """Count the all-gather of a sequence's tokens from tensor-parallel ranks."""
    t.take(s.hidden)
    t.take(s.hidden)
    t.free(s.hidden)


def _scattered(t: Tally, s: ActivationSizes) -> None:
    """Count the reduce-scatter to a rank's own tokens; the input is freed."""
    t.take(s.hidden, s.local)
    t.free(s.hidden, s.hidden)


def _summed(t: Tally, size: int) -> None:
    """Count an all-reduce into a new tensor; the input is freed."""
    t.take(size)
    t.free(size)


def enter(t: Tally, s: ActivationSizes) -> None:
    """Count the entry into tensor-parallel layers.

    Sequence parallelism keeps both the local and the gathered tensor.

    Args:
        t: bytes alive; changed in place.
        s: sizes of the tensors.
    """
    if s.sequence:
        _gathered(t, s)


def enter_backward(t: Tally, s: ActivationSizes) -> None:
    """Count the backward of `enter`: reduce-scatter or all-reduce of the gradient.

    Args:
        t: bytes alive; changed in place.
        s: sizes of the tensors.
    """
    if s.sequence:
        _scattered(t, s)
    elif s.tp > 1:
        _summed(t, s.hidden)


def leave(t: Tally, s: ActivationSizes, layer: Bias) -> None:
    """Count the exit of tensor-parallel layers: sum over the ranks, bias, norm, dropout, residual.

    The first input of `enter` is freed.

    Args:
        t: bytes alive; changed in place.
        s: sizes of the tensors.
        layer: which bias the layer would have.
    """
    if s.sequence:
        _scattered(t, s)
        t.free(s.local)
    elif s.tp > 1:
        _summed(t, s.hidden)
    if s.tp > 1 and layer in s.setup.shape.biases:
        _summed(t, s.local)
    if s.setup.shape.norms == 4:
        norm_forward(t, s)
        if not s.saves_norm_input:
            t.free(s.local)
    if s.setup.shape.dropout:
        drop(t, s)
    _summed(t, s.local)


def leave_backward(t: Tally, s: ActivationSizes) -> int:
    """Count the backward of `leave`.

    Returns:
        Bytes of the new gradient; 0 if it still is the gradient of the residual.
    """
    own = 0
    if s.setup.shape.dropout:
        own = s.local
        t.take(own)
        t.free(s.mask)
    if s.setup.shape.norms == 4:
        t.live += s.local - own  # The incoming gradient is also the residual's; the norm must not free it.
        norm_backward(t, s, residual=False)
        own = s.local
    if s.sequence:
        _gathered(t, s)
        t.free(own)
        own = s.hidden
    return own


def drop(t: Tally, s: ActivationSizes) -> None:
    """Count dropout of the residual stream; its mask stays alive.

    Args:
        t: bytes alive; changed in place.
        s: sizes of the tensors.
    """
    if s.sequence:
        t.touch(s.hidden)  # The mask is drawn for all tokens.
    t.take(s.mask, s.local)
    t.free(s.local)


# ---- a block ---------------------------------------------------------------------------------------------------------


def block_forward(t: Tally, s: ActivationSizes, *, again: bool = False) -> None:
    """Count a block's forward, from its input, which stays alive, to its output.

    Args:
        t: bytes alive; changed in place.
        s: sizes of the tensors.
        again: whether this is a recomputation, which needs only the saved tensors and skips the last layer.
    """
    norm_forward(t, s)
    enter(t, s)
    t.take(s.heads + s.pair)
    attend_forward(t, s)
    t.take(s.hidden)
    if not keeps_probabilities(s):
        leave_attention(t, s)
    leave(t, s, "attention out")
    if s.setup.shape.norms == 1:
        t.take(s.local)  # The shared norm has one result; count its second use.
    else:
        norm_forward(t, s)
    enter(t, s)
    if is_tiled(s):
        tiles_forward(t, s)
        if again:
            t.free(s.hidden)
        else:
            leave(t, s, "feed-forward")
        return
    t.take(_widths(s) * s.inner)
    t.take(_steps(s), _widths(s) * s.inner)  # The activation of the gate, and its product.
    if again and s.setup.shape.norms < 4:
        if s.sequence:
            t.free(s.local)
        if s.setup.shape.dropout:
            t.touch(s.hidden, s.local)
            t.take(s.mask)
    else:
        t.take(s.hidden)
        leave(t, s, "feed-forward")
        if again:
            t.free(s.local)
    if s.setup.shape.parallel or not s.saves_norm_input:
        t.free(s.local)  # The residual stream between attention and feed-forward.


def block_backward(t: Tally, s: ActivationSizes, *, held: bool = False) -> None:
    """Count a block's backward, from the gradient of the output to that of the input. All saved tensors are freed.

    Args:
        t: bytes alive; changed in place.
        s: sizes of the tensors.
        held: whether another owner keeps the gradient of the output.
    """
    shape = s.setup.shape
    came = leave_backward(t, s)
    down, up = s.matrix(shape.ffn_hidden, shape.hidden), s.matrix(shape.hidden, shape.ffn_hidden)
    if is_tiled(s):
        tiles_backward(t, s, came)
    else:
        _linear_backward(t, weight=down, out=s.inner, gradient=came, saved=s.inner)
        widths = _widths(s)
        if shape.gated:
            t.take(2 * s.inner)
            t.free(3 * s.inner)  # The product's gradient and its factors.
        t.take(s.inner)
        t.free(2 * s.inner, _steps(s))
        _linear_backward(t, weight=widths * up, out=s.hidden, gradient=widths * s.inner, saved=s.hidden)
    enter_backward(t, s)
    if shape.norms == 1:
        _add(t, s.local, True)
    else:
        t.live += s.local if shape.parallel else 0  # Both norms share one input.
        norm_backward(t, s, residual=True)
    if held:
        t.take(s.local)
    came = leave_backward(t, s)
    size = shape.head_size or shape.hidden // shape.heads
    queries = shape.heads * size
    anew = copies_layout(s) if attends_long(s) else copies_heads(s)
    copied = s.heads if anew or keeps_probabilities(s) else 0
    _linear_backward(t, weight=s.matrix(queries, shape.hidden), out=s.heads, gradient=came, saved=copied)
    attend_backward(t, s)
    projections = queries * (s.heads + s.pair) // s.heads
    _linear_backward(
        t, weight=s.matrix(shape.hidden, projections), out=s.hidden, gradient=s.heads + s.pair, saved=s.hidden
    )
    enter_backward(t, s)
    norm_backward(t, s, residual=True)


def kept_results(s: ActivationSizes) -> tuple[int, int]:
    """Return the bytes that selective recomputation keeps of a block, in addition to its input.

    Kept are results of linear layers, of fused attention and of exchanges between ranks.

    Args:
        s: sizes of the tensors.

    Returns:
        (kept bytes, the part of them that no recomputation reads).
    """
    attention = 0 if keeps_probabilities(s) else s.heads + s.queries + ring_kept(s)
    inner = 0 if is_tiled(s) else _widths(s) * s.inner  # Tiles are one operation; only its result is kept.
    layers = s.heads + s.pair + s.hidden + inner
    exchanged = 2 * s.heads + s.pair if shares_heads(s) else 0  # The all-to-all before and after attention.
    summed = s.local if s.sequence else s.hidden if s.tp > 1 else 0
    entered = s.hidden if s.sequence else 0
    last = s.hidden + summed
    drawn_from = s.setup.shape.dropout or s.setup.shape.norms == 4
    return layers + exchanged + attention + summed + 2 * entered + last, 0 if drawn_from else last


def _widths(s: ActivationSizes) -> int:
    """Return the number of first matrices of the feed-forward layer: 2 with a gate."""
    return 2 if s.setup.shape.gated else 1


def _steps(s: ActivationSizes) -> int:
    """Return the bytes that a stepwise activation function saves besides its input: three tensors."""
    return 3 * s.inner if s.setup.shape.stepwise else 0


def _linear_backward(t: Tally, *, weight: int, out: int, gradient: int, saved: int) -> None:
    """Count a linear layer's backward.

    `out`: bytes of the inputs' gradient; `gradient`, `saved`: freed bytes of the outputs' gradient and saved inputs.
    """
    with t.passing(weight):
        t.take(out)
        t.free(gradient, saved)
