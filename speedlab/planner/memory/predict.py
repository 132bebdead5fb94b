"""Predict the memory of each rank at the peak of a step, by ledger category, and its course over a step. No torch.

- Model states follow the engine's flats to the byte: units, padding, alignment, dtypes, partitions (arXiv:1910.02054).
- Communication buffers are those of the engine: gathered units under stage 3, and buffers for whole gradients while
  partitions are reduced. The same for offloaded states (`speedlab.planner.memory.offload`).
- Activations: `speedlab.planner.memory.activations`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from speedlab.layout import padded_numel
from speedlab.placement import EIGHT_BITS, MemoryKind, Replication, ZeroPolicy
from speedlab.planner.layer_shapes import block_cut, block_vectors, kv_heads, norm_vectors
from speedlab.planner.memory.activation_sizes import DTYPE_BYTES, ActivationSizes, Device
from speedlab.planner.memory.buffers import Passing, most_at_work, sent_by_update
from speedlab.planner.memory.megatron_rules import memory_by_rules
from speedlab.planner.memory.offload import (
    decoded_bytes,
    decodes_on_host,
    staging_bytes,
    state_places,
    state_widths,
    zero_policy_of,
)
from speedlab.planner.memory.pipeline_stage import MicroBatchMemory, held, most_in_flight, step_peak, walk
from speedlab.planner.memory.rank_memory import RankMemory
from speedlab.planner.setup import ModelShape, Setup

_FLOAT32 = 4
_ALIGNMENT_BYTES = 16
"""Parameters start at multiples of this inside a flat."""

_CODES = 256
"""Elements of a block of 8-bit codes."""

_BORROWED = 2
"""Number of buffers of one size that reductions use alternately."""


def predict_memory(
    setup: Setup, *, device: Device = "cuda", other_framework: int = 0, outside_framework: int = 0
) -> list[RankMemory]:
    """Return the memory of each distinct (pipeline, tensor) position of the layout, first pipeline rank first.

    An encoder-decoder is predicted by the rules of published systems, because the built-in GPT has no encoder.

    Args:
        setup: the training.
        device: count activations and buffers like a GPU's allocator, or like the engine's trace on CPUs.
        other_framework: bytes of framework memory outside tensors, from a calibration; equal for all ranks.
        outside_framework: bytes of the process outside the framework, from a calibration; equal for all ranks.

    Raises:
        ValueError: the layout or cut does not divide the model.
    """
    if setup.shape.decoder_layers:
        ranks = memory_by_rules(setup)
        return [replace(r, other_framework=other_framework, outside_framework=outside_framework) for r in ranks]
    _check(setup)
    cut = block_cut(setup)
    walks = _Walks(setup, device)
    found = []
    for pipeline in range(setup.layout.pp):
        stages = range(pipeline, len(cut), setup.layout.pp)
        for tensor, count in _tensor_positions(setup, ends=stages[0] == 0 or stages[-1] == len(cut) - 1).items():
            passes = walks.of(cut, stages, tensor)
            rank = RankMemory(
                pipeline=pipeline,
                tensor=tensor,
                ranks=count * setup.layout.islands * setup.layout.replicas,
                activations=step_peak(setup, passes, pipeline),
                host=_waiting_inputs(setup, passes, pipeline),
                communication_buffers=_buffers(setup, cut, stages, tensor, device),
                other_framework=other_framework,
                outside_framework=outside_framework,
            )
            found.append(_with_states(rank, setup, [Flats(setup, cut, number, tensor) for number in stages], device))
    return found


def memory_by_rank(setup: Setup, positions: Sequence[RankMemory]) -> list[RankMemory]:
    """Return the memory of each rank, by rank.

    Args:
        setup: the training.
        positions: the result of `predict_memory`; each entry represents all equal ranks.
    """
    rows = [ActivationSizes(setup, "cpu", tensor).vocabulary for tensor in range(setup.layout.tp)]
    of_pipeline: dict[int, dict[int, RankMemory]] = {}
    for memory in positions:
        of_pipeline.setdefault(memory.pipeline, {})[rows[memory.tensor]] = memory
    found = []
    for rank in range(setup.layout.world_size):
        at = setup.layout.coordinates(rank)
        # Ranks of a pipeline stage differ only in the rows of their vocabulary share.
        alike = of_pipeline[at["pp"]]
        found.append(alike.get(rows[at["tp"]]) or next(iter(alike.values())))
    return found


def memory_timeline(
    setup: Setup, position: tuple[int, int] = (0, 0), *, device: Device = "cuda"
) -> list[tuple[str, dict[str, int]]]:
    """Return the memory of one rank over a step, in order of time.

    Without a pipeline there is an entry for each unit of one micro-batch. With a pipeline there is an entry for each
    action (for instance F2 or B0 of a stage), with the peak bytes during the action.

    Args:
        setup: the training.
        position: (pipeline, tensor) indices of the rank.
        device: count activations like a GPU's allocator, or like the engine's trace on CPUs.

    Returns:
        (label, bytes by category) for each moment.
    """
    _check(setup)
    pipeline, tensor = position
    cut = block_cut(setup)
    stages = range(pipeline, len(cut), setup.layout.pp)
    rank = _with_states(
        RankMemory(communication_buffers=_buffers(setup, cut, stages, tensor, device)),
        setup,
        [Flats(setup, cut, number, tensor) for number in stages],
        device,
    )
    passes = _Walks(setup, device).of(cut, stages, tensor)
    moments = [("between steps", 0)]
    if setup.layout.pp == 1:
        for label, marks in (("forward", passes[0].forward), ("backward", passes[0].backward)):
            moments += [(f"{label} {mark.label}", mark.peak) for mark in marks]
    else:
        seen: Counter[tuple[str, int]] = Counter()
        for kind, chunk, _, peak in held(setup, passes, pipeline, setup.accumulation):
            if kind != "W":
                moments.append((f"{kind}{seen[kind, chunk]} of stage {stages[chunk]}", peak))
                seen[kind, chunk] += 1
    moments.append(("update", 0))
    return [(label, replace(rank, activations=peak).by_category()) for label, peak in moments]


def _check(setup: Setup) -> None:
    shape = setup.shape
    if shape.decoder_layers:
        raise ValueError(
            f"{shape.name}: {shape.decoder_layers} layers with attention to an encoder; how memory comes and goes in a "
            f"step is known of decoders only"
        )
    for name, count in (("heads", shape.heads), ("KV heads", kv_heads(shape)), ("ffn_hidden", shape.ffn_hidden)):
        if count % setup.layout.tp:
            raise ValueError(f"{shape.name}: {count} {name} do not divide by tp {setup.layout.tp}")
    if setup.cut is not None and sum(setup.cut) != shape.layers:
        raise ValueError(f"cut {' + '.join(map(str, setup.cut))} is not the model's {shape.layers} blocks")


def _tensor_positions(setup: Setup, *, ends: bool) -> dict[int, int]:
    """Return tensor index -> number of equal ranks. Ranks differ only if tp does not divide the vocabulary."""
    if not ends:
        return {0: setup.layout.tp}
    rows = [ActivationSizes(setup, "cpu", tensor).vocabulary for tensor in range(setup.layout.tp)]
    return {rows.index(count): rows.count(count) for count in dict.fromkeys(rows)}


class _Walks:
    """Cached simulations of a micro-batch through a stage; most stages are equal."""

    def __init__(self, setup: Setup, device: Device) -> None:
        self._setup = setup
        self._device: Device = device
        self._known: dict[tuple[int, bool, bool, int], MicroBatchMemory] = {}

    def of(self, cut: Sequence[int], stages: Sequence[int], tensor: int) -> list[MicroBatchMemory]:
        return [self._walk(cut[number], number == 0, number == len(cut) - 1, tensor) for number in stages]

    def _walk(self, blocks: int, first: bool, last: bool, tensor: int) -> MicroBatchMemory:
        key = blocks, first, last, tensor
        if key not in self._known:
            sizes = ActivationSizes(self._setup, self._device, tensor)
            self._known[key] = walk(sizes, blocks=blocks, first=first, last=last)
        return self._known[key]


# ---- parameters ------------------------------------------------------------------------------------------------------


def block_sizes(shape: ModelShape, tp: int = 1) -> list[int]:
    """Return the elements of a block's parameters on each tensor-parallel rank.

    Args:
        shape: the model.
        tp: tensor-parallel ranks.

    Returns:
        Matrices first, as in flats, then vectors.
    """
    hidden, inner = shape.hidden, shape.ffn_hidden
    size = shape.head_size or hidden // shape.heads
    queries = shape.heads * size
    projections = queries + 2 * (shape.kv_heads or shape.heads) * size
    ups = 2 if shape.gated else 1
    matrices = [hidden * projections // tp, hidden * queries // tp, ups * hidden * inner // tp, hidden * inner // tp]
    return [*matrices, *(v.elements // (tp if v.cut else 1) for v in block_vectors(shape))]


def flat_elements(sizes: Sequence[int], element: int, dp: int, *, coded: bool = False) -> int:
    """Return the elements of a flat, with alignment and padding.

    Args:
        sizes: elements of each parameter, in order.
        element: bytes of an element.
        dp: data-parallel ranks that share the flat.
        coded: whether moments are in 8 bits; then each rank gets whole blocks of codes.
    """
    step = max(1, _ALIGNMENT_BYTES // element)
    end = 0
    for size in sizes:
        end = padded_numel(end, step) + size
    return padded_numel(end, dp * (_CODES if coded else step))


@dataclass(frozen=True)
class Flats:
    """The flats of one pipeline stage: padded elements of each unit."""

    setup: Setup
    cut: Sequence[int]
    number: int
    tensor: int

    @property
    def first(self) -> bool:
        """Whether the stage has the embedding."""
        return self.number == 0

    @property
    def last(self) -> bool:
        """Whether the stage has the head."""
        return self.number == len(self.cut) - 1

    @cached_property
    def rows(self) -> int:
        """Rows of the token table on this rank."""
        return ActivationSizes(self.setup, "cpu", self.tensor).vocabulary

    @cached_property
    def root(self) -> int:
        """Padded elements of the root unit: tables, positions and final norm."""
        shape = self.setup.shape
        table = self.rows * shape.hidden
        sizes = [table] if self.first or (self.last and shape.tied) else []
        if self.first and shape.position == "learned":
            sizes.append(shape.positions * shape.hidden)
        if self.last:
            sizes += ([] if shape.tied else [table]) + list(norm_vectors(shape))
            sizes += [self.rows] if "head" in shape.biases else []
        return self._elements(sizes)

    @cached_property
    def merged(self) -> list[int]:
        """Number of blocks in each unit after the root.

        Small neighbours share a unit up to `bucket_bytes` of float32 values.
        """
        # Whole blocks, before tensor parallelism, as in the engine's units.
        together = max(1, self.setup.bucket_bytes // (_FLOAT32 * sum(block_sizes(self.setup.shape))))
        full, rest = divmod(self.cut[self.number], together)
        return [together] * full + ([rest] if rest else [])

    @cached_property
    def units(self) -> list[int]:
        """Padded elements of the units after the root, in order."""
        sizes = block_sizes(self.setup.shape, self.setup.layout.tp)
        elements = {count: self._elements(sizes[:4] * count + sizes[4:] * count) for count in set(self.merged)}
        return [elements[count] for count in self.merged]

    def _elements(self, sizes: Sequence[int]) -> int:
        coded = self.setup.moments == EIGHT_BITS
        return (
            flat_elements(sizes, DTYPE_BYTES[self.setup.dtype], self.setup.layout.replicas, coded=coded) if sizes else 0
        )

    def partial(self) -> Iterator[int]:
        """Yield the elements of each flat whose gradients are partial sums on tensor-parallel ranks.

        Under sequence parallelism these are norms, and biases that are added to sums.
        """
        shape = self.setup.shape
        if not (self.setup.sequence_parallel and self.setup.layout.tp > 1):
            return
        block = sum(vector.elements for vector in block_vectors(shape) if not vector.cut)
        yield from (count * block for count in set(self.merged))
        if self.last:
            yield sum(norm_vectors(shape))


# ---- states and buffers ----------------------------------------------------------------------------------------------


def _gradient_bytes(setup: Setup) -> int:
    """Return the bytes of a gradient's element: several micro-batches, and some optimizers, sum in float32."""
    return _FLOAT32 if setup.accumulation > 1 or setup.optimizer.sums_itself else DTYPE_BYTES[setup.dtype]


def _with_states(rank: RankMemory, setup: Setup, stages: Sequence[Flats], device: Device) -> RankMemory:
    elements = sum(flats.root + sum(flats.units) for flats in stages)
    largest = max(size for flats in stages for size in (flats.root, *flats.units))
    dp, zero_policy = setup.layout.replicas, zero_policy_of(setup)
    owned = zero_policy.optimizer_states.share(elements, dp)
    widths = state_widths(setup, device)
    held = {
        "parameters": zero_policy.parameters.share(elements, dp),
        "gradients": zero_policy.gradients.share(elements, dp),
        "master_weights": owned,
        "optimizer_moments": owned,
    }
    by_place: dict[MemoryKind, dict[str, int]] = {
        MemoryKind.DEVICE: {},
        MemoryKind.HOST: dict(rank.host),
        MemoryKind.DISK: {},
    }
    for state, where in state_places(zero_policy).items():
        by_place[where][state] = round(widths[state] * held[state])
    if setup.optimizer.sums_itself:  # Each rank's own error feedback, and that of the partition it reduces.
        kept = _FLOAT32 * (elements + Replication.OWN_PART.share(elements, dp))
        by_place[MemoryKind.DEVICE]["gradients"] += kept
    if setup.layout.islands > 1:
        # Anchor, momentum and error feedback of the outer optimizer.
        by_place[MemoryKind.DEVICE]["gradients"] += (
            _FLOAT32 * setup.outer.states * Replication.OWN_PART.share(elements, dp)
        )
    if zero_policy.secondary_ranks:
        # The second copy of the parameters, partitioned inside a host (ZeRO++).
        again = Replication.SECONDARY.share(elements, zero_policy.secondary_ranks)
        by_place[MemoryKind.DEVICE]["parameters"] += round(widths["parameters"] * again)
    if zero_policy.grads_double_buffered:
        # A delayed update reads the last step's gradients while backward writes new ones.
        there = by_place[zero_policy.states_at]
        there["gradients"] = there.get("gradients", 0) + round(widths["gradients"] * owned)
    passing = zero_policy.optimizer_states.share(largest, dp)
    staging = staging_bytes(setup, passing, widths)
    staging += decoded_bytes(setup, passing) if decodes_on_host(setup, device) else 0
    by_place[MemoryKind.HOST]["communication_buffers"] = staging
    return replace(
        rank,
        **by_place[MemoryKind.DEVICE],
        host={name: count for name, count in by_place[MemoryKind.HOST].items() if count},
        disk={name: count for name, count in by_place[MemoryKind.DISK].items() if count},
        one_memory=device == "cpu",
    )


def _waiting_inputs(setup: Setup, passes: Sequence[MicroBatchMemory], pipeline: int) -> dict[str, int]:
    """Return the bytes of offloaded block inputs on the host, for all micro-batches in flight."""
    waiting = sum(each.away for each in passes)
    return {"activations": math.ceil(most_in_flight(setup, pipeline) * waiting)} if waiting else {}


def _buffers(setup: Setup, cut: Sequence[int], numbers: Sequence[int], tensor: int, device: Device) -> int:
    """Return the peak bytes of communication buffers on the device, for a rank with the pipeline stages `numbers`."""
    stages = [Flats(setup, cut, number, tensor) for number in numbers]
    width, pp = _gradient_bytes(setup), setup.layout.pp
    total = 0
    zero_policy = zero_policy_of(setup)
    borrowed = 0
    if zero_policy.grads_sharded:
        # Gradients of equal size share their buffers.
        kinds = Counter(width * size for flats in stages for size in (flats.root, *flats.units) if size)
        borrowed = borrowed_bytes(kinds, kept=pp > 1)
    element, dp = DTYPE_BYTES[setup.dtype], setup.layout.replicas

    def passing(size: int) -> Passing:
        return Passing.of([(size, element, True)] if size else [], zero_policy, dp)

    ways = [(passing(flats.root), [passing(size) for size in flats.units]) for flats in stages]
    gathered = passing_bytes(ways, zero_policy)
    largest = max(size for flats in stages for size in (flats.root, *flats.units))
    owned = zero_policy.optimizer_states.share(largest, setup.layout.replicas)
    decoded = 0 if decodes_on_host(setup, device) else decoded_bytes(setup, owned)
    # The update needs no gathered units, unless it runs in backward or overlaps with the next step.
    alongside = zero_policy.update_in_backward or zero_policy.grads_double_buffered
    sent = sent_by_update((each for root, units in ways for each in (root, *units)), zero_policy)
    total += borrowed + (gathered + decoded if alongside else max(gathered, decoded, sent))
    # Buffers for the sums of partial gradients over tensor-parallel ranks (sequence parallelism).
    sizes = {padded_numel(size, setup.layout.tp) for flats in stages for size in flats.partial()}
    total += _BORROWED * width * sum(sizes)
    # A tied table on two pipeline ranks: its gradients are summed between them.
    if setup.shape.tied and pp > 1 and any(flats.first or flats.last for flats in stages):
        total += _BORROWED * width * padded_numel(stages[0].rows * setup.shape.hidden, 2)
    return total


def borrowed_bytes(kinds: Counter[int], *, kept: bool) -> int:
    """Return the bytes of the buffers for whole gradients while their partitions are reduced.

    Args:
        kinds: bytes of a flat's gradient -> number of flats of this size. Two buffers of each size alternate.
        kept: whether all of them stay until the end of the step, as in a pipeline.
    """
    return sum(size * max(_BORROWED, count if kept else 0) for size, count in kinds.items())


def passing_bytes(stages: Sequence[tuple[Passing, Sequence[Passing]]], zero_policy: ZeroPolicy) -> int:
    """Return the peak bytes of temporary buffers over all stages of a rank.

    The stage at work uses its units one after the other. Each other stage keeps its root and last unit gathered,
    because its backward begins with them.

    Args:
        stages: for each stage its root, and the units after the root.
        zero_policy: which states are partitioned, quantized or offloaded.
    """
    at_work = [most_at_work(root, units, zero_policy) for root, units in stages]
    waiting = [sum(each.gathered for each in (root, *units[-1:])) for root, units in stages]
    return max(work + sum(waiting) - waiting[k] for k, work in enumerate(at_work))
