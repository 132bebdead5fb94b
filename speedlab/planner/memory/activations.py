"""Activations of the built-in GPT on one rank: what forward and backward of a micro-batch keep and pass on.

Each layer is written down as what it takes and frees, in the order in which torch does so: tensors that autograd saves
stay until the layer's backward, results live until their last use. A walk over a micro-batch then gives the bytes after
its forward, and the most there are at any moment; that is what `Engine.trace_activations` measures by following every
storage. What an operation takes inside itself (a kernel's workspace) is seen by a GPU's allocator only, and counted
there only.

Where devices differ:

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
    keeps_probabilities,
    lays_heads_anew,
)
from speedlab.planner.memory.long_sequences import (
    attends_long,
    is_tiled,
    lays_out_anew,
    leave_attention,
    ring_kept,
    shares_heads,
    tiles_backward,
    tiles_forward,
)

_FLOAT32 = 4

# ---- norms -----------------------------------------------------------------------------------------------------------


def norm_forward(t: Tally, s: ActivationSizes) -> None:
    """Leaves its result, and what it saves beside its input."""
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
    """From the gradient of its result, which is freed, to that of its input; with `residual` added to what came round
    the layer, which is freed too. Frees what it saved, and its input."""
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
    t.take(wide, wide, vector)  # Of the weight, and of what it was multiplied with.
    t.free(vector, wide, wide, wide)  # The first product, the gradient that came, the normalised input.
    t.take(wide, wide, row)
    t.free(wide, wide)
    if not s.low:
        _add(t, x, residual)
    t.take(wide)
    t.free(row, row)
    t.take(wide, wide, wide)
    t.free(wide, wide, wide, wide)  # All but the last product, and the saved input.
    t.take(wide)
    t.free(wide, wide)
    if s.low:
        t.take(x)
        t.free(wide)
        _add(t, x, residual)


def _statistics(s: ActivationSizes) -> tuple[int, int]:
    """Mean and inverse deviation of LayerNorm."""
    size = s.row if s.device == "cuda" else s.row // _FLOAT32 * s.element
    return size, size


def _add(t: Tally, size: int, wanted: bool) -> None:
    """The sum of two tensors that end with it."""
    if wanted:
        t.take(size)
        t.free(size, size)


# ---- between tensor-parallel ranks -----------------------------------------------------------------------------------


def _gathered(t: Tally, s: ActivationSizes) -> None:
    """All tokens of what each rank has some of."""
    t.take(s.hidden)
    t.take(s.hidden)
    t.free(s.hidden)


def _scattered(t: Tally, s: ActivationSizes) -> None:
    """A rank's tokens of a sum; the terms are freed."""
    t.take(s.hidden, s.local)
    t.free(s.hidden, s.hidden)


def _summed(t: Tally, size: int) -> None:
    """A sum over the ranks in a new tensor; the term is freed."""
    t.take(size)
    t.free(size)


def enter(t: Tally, s: ActivationSizes) -> None:
    """Into layers of which each rank has a part. Sequence parallelism leaves two tensors where one was."""
    if s.sequence:
        _gathered(t, s)


def enter_backward(t: Tally, s: ActivationSizes) -> None:
    if s.sequence:
        _scattered(t, s)
    elif s.tp > 1:
        _summed(t, s.hidden)


def leave(t: Tally, s: ActivationSizes, layer: Bias) -> None:
    """Out of them: the sum over the ranks, bias, norm, dropout, residual. The first input of `enter` is freed."""
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
    """Returns the bytes of the gradient that goes on, 0 where it is still the residual's."""
    own = 0
    if s.setup.shape.dropout:
        own = s.local
        t.take(own)
        t.free(s.mask)
    if s.setup.shape.norms == 4:
        t.live += s.local - own  # The gradient that comes is the residual's, too, and is not freed with the norm.
        norm_backward(t, s, residual=False)
        own = s.local
    if s.sequence:
        _gathered(t, s)
        t.free(own)
        own = s.hidden
    return own


def drop(t: Tally, s: ActivationSizes) -> None:
    """Dropout of the residual stream: its mask stays."""
    if s.sequence:
        t.touch(s.hidden)  # Drawn for all tokens.
    t.take(s.mask, s.local)
    t.free(s.local)


# ---- a block ---------------------------------------------------------------------------------------------------------


def block_forward(t: Tally, s: ActivationSizes, *, again: bool = False) -> None:
    """From the block's input, which stays, to its output. `again`: for a backward that only wants what is saved; the
    last layer is left out."""
    norm_forward(t, s)
    enter(t, s)
    t.take(s.heads + s.pair)
    attend_forward(t, s)
    t.take(s.hidden)
    if not keeps_probabilities(s):
        leave_attention(t, s)
    leave(t, s, "attention out")
    if s.setup.shape.norms == 1:
        t.take(s.local)  # The first one's result, as if it were another.
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
    t.take(_steps(s), _widths(s) * s.inner)  # Of a gate its function, and the product with what it lets through.
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
    """From the gradient of the output to that of the input; everything the block has saved is freed. `held`: somebody
    else keeps the gradient of the output."""
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
            t.free(3 * s.inner)  # The product's gradient, and its factors.
        t.take(s.inner)
        t.free(2 * s.inner, _steps(s))
        _linear_backward(t, weight=widths * up, out=s.hidden, gradient=widths * s.inner, saved=s.hidden)
    enter_backward(t, s)
    if shape.norms == 1:
        _add(t, s.local, True)
    else:
        t.live += s.local if shape.parallel else 0  # Its input is the first one's.
        norm_backward(t, s, residual=True)
    if held:
        t.take(s.local)
    came = leave_backward(t, s)
    size = shape.head_size or shape.hidden // shape.heads
    queries = shape.heads * size
    anew = lays_out_anew(s) if attends_long(s) else lays_heads_anew(s)
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
    """(bytes that selective recomputation keeps of a block beside its input; of them what nobody asks for again):
    results of linear layers and of fused attention, and what came of exchanges between ranks."""
    attention = 0 if keeps_probabilities(s) else s.heads + s.queries + ring_kept(s)
    inner = 0 if is_tiled(s) else _widths(s) * s.inner  # Tiles are one operation, whose result alone stays.
    layers = s.heads + s.pair + s.hidden + inner
    exchanged = 2 * s.heads + s.pair if shares_heads(s) else 0  # Heads for tokens, there and back.
    summed = s.local if s.sequence else s.hidden if s.tp > 1 else 0
    entered = s.hidden if s.sequence else 0
    last = s.hidden + summed
    drawn_from = s.setup.shape.dropout or s.setup.shape.norms == 4
    return layers + exchanged + attention + summed + 2 * entered + last, 0 if drawn_from else last


def _widths(s: ActivationSizes) -> int:
    """Results of the feed-forward layer's first matrices: a gate, and what it multiplies."""
    return 2 if s.setup.shape.gated else 1


def _steps(s: ActivationSizes) -> int:
    """What an activation function in steps keeps beside its input: a half of it, a hyperbolic tangent, one more."""
    return 3 * s.inner if s.setup.shape.stepwise else 0


def _linear_backward(t: Tally, *, weight: int, out: int, gradient: int, saved: int) -> None:
    """`out`: the gradient of the inputs; `gradient`, `saved`: what is freed, of outputs and inputs."""
    with t.passing(weight):
        t.take(out)
        t.free(gradient, saved)
