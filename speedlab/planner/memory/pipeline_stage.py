"""Predict the activations of a pipeline stage of the built-in GPT, and of a whole step under each schedule.

1. `walk` simulates one micro-batch through a stage: embedding, blocks, head and loss, forward and backward.
2. `step_order` lists the actions of a pipeline rank under its schedule.
3. `held` and `step_peak` combine both: bytes alive during a step, and their maximum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from speedlab.planner.memory.activation_sizes import ActivationSizes, Tally
from speedlab.planner.memory.activations import (
    block_backward,
    block_forward,
    drop,
    enter,
    enter_backward,
    kept_results,
    norm_backward,
    norm_forward,
)
from speedlab.planner.setup import Setup

_INT64, _FLOAT32 = 8, 4
_LOSS_NUMBERS = 80
"""Bytes for each token of a chunk that a loss over a partitioned vocabulary needs in addition to its matrices."""

_ROUNDS = 3
"""After this many rounds of micro-batches, the memory of a pipeline repeats."""


@dataclass(frozen=True)
class Mark:
    """A moment of a micro-batch: bytes alive at its end, and the maximum since the previous mark."""

    label: str
    live: int
    peak: int


@dataclass(frozen=True)
class MicroBatchMemory:
    """Activations of one micro-batch on one stage, in bytes."""

    kept: int
    """Bytes alive between forward and backward."""
    forward_peak: int
    backward_peak: int
    away: int
    """Bytes of kept activations that are offloaded to the host."""
    halves: tuple[int, int]
    """For a backward in two halves: the peak of the first half, and the bytes alive between the halves."""
    forward: tuple[Mark, ...]
    backward: tuple[Mark, ...]


def walk(s: ActivationSizes, *, blocks: int, first: bool, last: bool) -> MicroBatchMemory:
    """Simulate one micro-batch through a pipeline stage.

    Args:
        s: sizes of the activations.
        blocks: number of blocks of the stage.
        first: whether the stage has the embedding.
        last: whether the stage has the head and the loss.
    """
    t, marks = Tally(), []

    def mark(label: str) -> None:
        marks.append(Mark(label, t.live, t.peak))
        t.peak = t.live

    # With both ends on one stage, the two gradients of a tied table meet in this backward.
    tied = first and last and s.setup.shape.tied
    if first:
        _embed(t, s)
    else:
        t.take(s.local)
    if s.setup.shape.position == "rotary":
        t.take(_rotation(s))
    mark("embedding" if first else "receive")
    for number in range(blocks):
        _forward(t, s, given=number == 0 and not first)
        mark(f"block {number}")
    if last:
        _head(t, s)
        mark("head and loss")
    # The message to the next stage stays alive, too: it is the root of the autograd graph.
    kept, forward = t.live, tuple(marks)
    marks.clear()
    without_head = (forward[-2].live if last else kept) - s.local

    if last:
        _head_backward(t, s, tied=tied)
    else:
        t.take(s.local)
    mark("head and loss" if last else "receive")
    for number in reversed(range(blocks)):
        _backward(t, s, given=number == 0 and not first, held=number == blocks - 1 and not last)
        mark(f"block {number}")
    if s.setup.shape.position == "rotary":
        t.free(_rotation(s))
    if first:
        _embed_backward(t, s, tied=tied)
    if not last:
        t.free(s.local)  # The output of the stage, which the graph held.
    mark("embedding" if first else "send")
    # The first half of backward frees no saved tensors, and keeps the gradients of layer outputs for the second half.
    between = without_head + blocks * _layer_gradients(s)
    return MicroBatchMemory(
        halves=(max(marks[0].peak, kept + blocks * _layer_gradients(s) + 2 * s.local), between),
        kept=kept,
        away=s.input_away * (blocks - (not first)),
        forward_peak=max(each.peak for each in forward),
        backward_peak=max(each.peak for each in marks),
        forward=forward,
        backward=tuple(marks),
    )


def _forward(t: Tally, s: ActivationSizes, *, given: bool) -> None:
    """Count a block's forward, from its input to its output. `given`: the pipeline owns the input."""
    t.take(0 if given else s.input_left)
    if s.setup.checkpointing == "block":
        inner = (4 if s.setup.shape.gated else 2) * s.inner
        t.touch(2 * s.local + s.hidden + max(inner, 4 * s.heads + s.pair))  # Less than the peak of backward.
        t.take(s.local)
        t.free(0 if given else s.input_gone)
        return
    if s.setup.checkpointing == "selective":
        before = t.live
        block_forward(t, s)  # Less is alive here than in backward.
        t.live = before + s.local + kept_results(s)[0]
        t.free(0 if given else s.input_gone)
        return
    block_forward(t, s)
    if not (s.saves_norm_input or given):
        t.free(s.local)


def _backward(t: Tally, s: ActivationSizes, *, given: bool, held: bool) -> None:
    checkpointed = s.setup.checkpointing != "none"
    kept, unused = kept_results(s) if s.setup.checkpointing == "selective" else (0, 0)
    if checkpointed:
        t.free(kept - unused)  # The recomputation below counts them again.
        t.take(0 if given else s.input_gone)
        block_forward(t, s, again=True)
    # If the norm saved only a copy of the input: a gathered input is freed at once, otherwise its owner keeps it.
    unsaved = not s.saves_norm_input and (checkpointed or given)
    gathered = s.input_left > 0 and not given
    t.free(s.local if unsaved and gathered else 0)
    block_backward(t, s, held=held)
    t.free(unused)
    if held:
        t.free(s.local)
    t.free(s.local if unsaved and not gathered else 0)
    t.free(s.input_left if gathered else 0)


def _layer_gradients(s: ActivationSizes) -> int:
    """Return bytes of the gradients of all outputs of a block's linear layers and norms.

    The second half of backward computes the parameters' gradients from them.
    """
    wide = 1 if s.saves_norm_input else _FLOAT32 // s.element
    widths = 2 if s.setup.shape.gated else 1
    return s.heads + s.pair + widths * s.inner + 2 * s.hidden + 2 * wide * s.local


# ---- embedding -------------------------------------------------------------------------------------------------------


def _rotation(s: ActivationSizes) -> int:
    """Return bytes of the cosines and sines of a sequence's positions."""
    shape = s.setup.shape
    return shape.sequence_length * (shape.head_size or shape.hidden // shape.heads) * _FLOAT32


def _embed(t: Tally, s: ActivationSizes) -> None:
    shape = s.setup.shape
    if s.tp > 1:
        t.take(s.tokens, _INT64 * s.tokens)  # The mask of tokens of other ranks' rows, and the local indices.
        with t.passing(s.hidden, s.hidden):
            t.take(s.hidden)
    else:
        t.take(s.hidden)
    if shape.position == "learned":
        positions = s.hidden // s.setup.micro_size
        t.take(shape.sequence_length * _INT64)
        with t.passing(positions):
            t.take(s.hidden)
        t.free(s.hidden)
    if s.sequence:
        t.take(s.local)
        t.free(s.hidden)
    if shape.dropout:
        drop(t, s)


def _embed_backward(t: Tally, s: ActivationSizes, *, tied: bool) -> None:
    """Count the backward of the embedding. `tied`: the gradient of the head's use of the table is still alive."""
    shape = s.setup.shape
    if shape.dropout:
        t.take(s.local)
        t.free(s.local, s.mask)
    if s.sequence:
        t.take(s.hidden, s.hidden)
        t.free(s.hidden, s.local)
    if shape.position == "learned":
        with t.passing(shape.positions * shape.hidden * s.element):
            t.touch(s.hidden // s.setup.micro_size)
        t.free(shape.sequence_length * _INT64)
    if s.tp > 1:
        t.take(s.hidden)
        t.free(s.hidden)
    t.take(s.table)
    t.free(s.hidden)
    if tied:
        t.take(s.table)
        t.free(s.table, s.table)
    t.free(s.table)
    if s.tp > 1:
        t.free(s.tokens, _INT64 * s.tokens)


# ---- head and loss ---------------------------------------------------------------------------------------------------


def _head(t: Tally, s: ActivationSizes) -> None:
    """Count from the last block's output to the loss.

    The final norm has no residual, so its input stays alive only if the norm saves it.
    """
    norm_forward(t, s)
    enter(t, s)
    t.take(_INT64 * s.tokens)
    if s.tp > 1:
        _cut_loss(t, s)
    elif s.setup.shape.chunked_loss:
        t.take(s.hidden, s.table)
        if s.device == "cuda":  # Logits and probabilities of a chunk, and their gradient.
            t.touch(s.chunk * s.vocabulary * (_FLOAT32 + 2 * s.element))
        t.free(s.hidden)
    else:
        logits, wide = _logits(s)
        t.take(logits)
        if s.low:
            t.take(wide)
            t.free(logits)
        t.take(wide)
        t.free(wide)
    if not s.saves_norm_input:
        t.free(s.local)


def _logits(s: ActivationSizes) -> tuple[int, int]:
    """Return bytes of the (n, V) logits in the compute dtype and in float32."""
    count = s.tokens * s.vocabulary
    return count * s.element, count * _FLOAT32


def _cut_loss(t: Tally, s: ActivationSizes) -> None:
    """Count `vocabulary_cross_entropy`: it computes gradients in forward, from exponentials of a chunk of tokens."""
    t.take(s.hidden, s.table)
    exponentials = s.chunk * s.vocabulary * s.element
    some = exponentials if s.chunk == s.tokens else 2 * exponentials  # The next is made before the last is freed.
    if s.setup.dtype == "float16" or s.device == "cuda":
        some += s.chunk * s.vocabulary * (2 * _FLOAT32 + s.element)
    inputs = s.chunk * s.setup.shape.hidden
    narrowed = inputs * s.element if s.low else 0
    t.touch(some + inputs * _FLOAT32 + narrowed + _LOSS_NUMBERS * s.chunk + 2 * _INT64 * s.tokens)
    t.free(s.hidden)
    if s.sequence:
        t.free(s.local)


def _head_backward(t: Tally, s: ActivationSizes, *, tied: bool) -> None:
    """Count down to the gradient of the last block's output.

    `tied`: the gradient of the table stays alive until the embedding adds its own.
    """
    setup = s.setup
    scaled = setup.accumulation * setup.layout.replicas > 1 or setup.dtype == "float16"
    if s.tp > 1:
        if scaled:
            t.take(s.hidden, s.table)
            t.free(s.hidden, s.table)
    elif not setup.shape.chunked_loss:
        logits, wide = _logits(s)
        t.take(wide, wide)
        t.free(wide, wide)
        if s.low:
            t.take(logits)
            t.free(wide)
        t.take(s.table, s.hidden)
        t.free(logits, s.hidden)
    t.free(_INT64 * s.tokens)
    if not tied:
        t.free(s.table)
    enter_backward(t, s)
    norm_backward(t, s, residual=False)


# ---- a step ----------------------------------------------------------------------------------------------------------


def step_order(setup: Setup, pipeline: int, micro_batches: int) -> Iterator[tuple[str, int]]:
    """Yield the actions of a pipeline rank, in order.

    Args:
        setup: layout, schedule and chunks.
        pipeline: index of the pipeline rank.
        micro_batches: micro-batches of the step.

    Yields:
        (F, B or W; index of the stage on this rank). W is the second half of a backward; under other schedules than
        zero-bubble, W directly follows its B and does nothing.
    """
    pp, m = setup.layout.pp, micro_batches
    # Only these schedules place several stages on a rank.
    wound = pp > 1 and setup.schedule in ("interleaved", "zero-bubble")
    chunks = setup.chunks if wound else 1
    total, turn = m * chunks, _round(pp, m)
    ahead = _ahead(setup, pipeline, m)
    # ZB1P: rank p delays p weight gradients (W), which then fill its bubble at the end.
    late = min(pipeline, total) if wound and setup.schedule == "zero-bubble" else 0
    for k in range(ahead):
        yield "F", k // turn % chunks
    for k in range(total):
        if ahead + k < total:
            yield "F", (ahead + k) // turn % chunks
        yield "B", chunks - 1 - k // turn % chunks
        if k >= late:
            yield "W", chunks - 1 - (k - late) // turn % chunks
    for k in range(total - late, total):
        yield "W", chunks - 1 - k // turn % chunks


def most_in_flight(setup: Setup, pipeline: int) -> float:
    """Return the maximum number of micro-batches whose activations a pipeline rank keeps.

    With several stages on the rank, each stage counts as its part of one.

    Args:
        setup: layout, schedule and micro-batches.
        pipeline: index of the pipeline rank.
    """
    chunks = setup.stages_per_rank
    begun = _ahead(setup, pipeline, setup.accumulation) + 1
    return min(begun, setup.accumulation * chunks) / chunks


def _ahead(setup: Setup, pipeline: int, micro_batches: int) -> int:
    """Return the number of forwards before a pipeline rank alternates forwards and backwards."""
    pp, m = setup.layout.pp, micro_batches
    if pp == 1:
        return 0
    if setup.schedule == "gpipe":
        return m
    if setup.schedule == "1f1b":
        return min(pp - 1 - pipeline, m)
    # Interleaved 1F1B warms up with two forwards for each later rank (arXiv:2104.04473).
    together = 2 if setup.schedule == "interleaved" else 1
    return min((setup.chunks - 1) * _round(pp, m) + together * (pp - 1 - pipeline), m * setup.chunks)


def _inputs(setup: Setup) -> int:
    """Return bytes of the tokens and targets of all micro-batches, which a pipeline concatenates."""
    n = setup.micro_size * setup.shape.sequence_length
    return 2 * setup.accumulation * n * _INT64 if setup.layout.pp > 1 else 0


def _round(pp: int, micro_batches: int) -> int:
    """Return the micro-batches that a stage takes in one round."""
    return micro_batches // max(1, micro_batches // pp)


def held(
    setup: Setup, stages: Sequence[MicroBatchMemory], pipeline: int, micro_batches: int
) -> Iterator[tuple[str, int, int, int]]:
    """Yield the memory of each action of a step.

    The halves of a backward are separate unless blocks are recomputed. The model's first stage does everything in the
    second half, because no rank waits for gradients of tokens.

    Args:
        setup: layout and schedule.
        stages: memory of a micro-batch on each stage of this rank.
        pipeline: index of the pipeline rank.
        micro_batches: micro-batches to simulate.

    Yields:
        (F, B or W; index of the stage; bytes alive after the action; maximum bytes during it).
    """
    live = _inputs(setup)
    split = setup.layout.pp > 1 and setup.schedule == "zero-bubble"
    for kind, chunk in step_order(setup, pipeline, micro_batches):
        stage, first = stages[chunk], pipeline == 0 and chunk == 0
        # The action that runs a backward without a split.
        whole = "W" if split and first else "B"
        peak = live
        if kind == "F":
            peak = live + stage.forward_peak
            live += stage.kept
        elif split and not first and setup.checkpointing == "none":
            if kind == "B":
                peak = live - stage.kept + stage.halves[0]
                live += stage.halves[1] - stage.kept
            else:
                live -= stage.halves[1]
        elif kind == whole:
            peak = live - stage.kept + stage.backward_peak
            live -= stage.kept
        yield kind, chunk, live, max(peak, live)


def step_peak(setup: Setup, stages: Sequence[MicroBatchMemory], pipeline: int) -> int:
    """Return the peak bytes of activations in a step of a pipeline rank.

    With one stage a rank, the peak is at the last forward, at the backward after it, or at the last backward. Otherwise
    the function simulates some rounds, after which a pipeline repeats.

    Args:
        setup: layout, schedule and micro-batches.
        stages: memory of a micro-batch on each stage of this rank.
        pipeline: index of the pipeline rank.
    """
    pp, m = setup.layout.pp, setup.accumulation
    if pp > 1 and setup.schedule in ("interleaved", "zero-bubble"):
        # The memory is periodic, so a few rounds have the same peak as all micro-batches.
        some = min(m, _ROUNDS * _round(pp, m))
        return max(peak for *_, peak in held(setup, stages, pipeline, some))
    (stage,) = stages
    before = max(0, m - 1 - _ahead(setup, pipeline, m))
    """Backwards before the last forward."""

    def live(forwards: int, backwards: int) -> int:
        return _inputs(setup) + (forwards - backwards) * stage.kept

    return max(
        live(m - 1, before) + stage.forward_peak,
        live(m, before) - stage.kept + stage.backward_peak,
        live(m, m - 1) - stage.kept + stage.backward_peak,
        live(m, m),
    )
