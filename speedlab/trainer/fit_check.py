"""Measure what ranks hold, and predict whether a run fits in memory under another layout before anything changes.

- For the GPT of the configuration, the planner predicts the peak of a step.
- For any other model, the planner knows the states. Activations are scaled from the current ones, in proportion to the
  tokens of a micro-batch, the number of micro-batches in flight, and the rank's share of the model.

`holdings` lists the states of each parameter on a rank: elements, bytes and the ranks that own them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from speedlab.comm import Group
from speedlab.config import ConfigError, RunConfig
from speedlab.config.errors import more_in
from speedlab.engine.engine import Engine
from speedlab.layout import LayoutError, partition_range
from speedlab.parallel.zero import FlatParam, Zero
from speedlab.parallel.zero.param_slot import ParamSlot
from speedlab.placement import ITEM_BYTES, Replication, StatePlacement
from speedlab.planner import Peaks, parameter_count, parameters_by_rank, predicted_peaks, rank_states
from speedlab.planner.memory.rank_memory import RankMemory
from speedlab.telemetry.current_config import changed_config
from speedlab.trainer.collective_errors import CommandRefused, agreed

_CHANGES_NAMED = 3
"""How many changes that would fit are suggested."""


@dataclass(frozen=True, kw_only=True)
class RankCapacity:
    """Capacity and current memory use of each rank, in bytes, under the layout of `config`."""

    config: RunConfig
    parameters: int
    """Number of parameters of the whole model."""
    built_in: bool
    """Whether the model is the GPT of the configuration."""
    dtype: Any
    device: Any
    capacity: Sequence[int]
    activations: Sequence[int]
    buffers: Sequence[int]
    alongside: Sequence[int]
    """Memory of each process outside of tensors."""

    @property
    def known(self) -> bool:
        """Whether the planner knows the model: it is the GPT of the configuration, or has the same number of
        parameters.
        """
        return self.built_in or self.parameters == parameter_count(self.config.model)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.capacity)


def held_now(engine: Engine, config: RunConfig, parameters: int, control: Group, *, built_in: bool) -> RankCapacity:
    """Measure the memory of all ranks. Collective.

    Args:
        engine: Engine of this rank.
        config: Current configuration.
        parameters: Number of parameters of the whole model.
        control: Group of all ranks.
        built_in: Whether the model is the GPT of the configuration.
    """
    ledger = agreed(control, engine.ledger)
    alongside = max(0, ledger.other_framework) + ledger.outside_framework
    own = [ledger.capacity_bytes, ledger.activations, ledger.communication_buffers, alongside]
    capacity, activations, buffers, processes = zip(*control.collect(own), strict=True)
    return RankCapacity(
        config=config,
        parameters=parameters,
        built_in=built_in,
        dtype=str(engine.dtype).removeprefix("torch."),
        device=engine.world.device.type,
        capacity=capacity,
        activations=activations,
        buffers=buffers,
        alongside=processes,
    )


def refuse_what_does_not_fit(held: RankCapacity, wanted: RunConfig) -> Peaks:
    """Return the predicted peaks of `wanted`, if they fit.

    A layout that needs more than the capacity is accepted if its peak is not above the current layout's peak.

    Args:
        held: Capacity and memory use of the ranks.
        wanted: Configuration to check.

    Raises:
        CommandRefused: If a rank cannot hold its part. The text names the rank, its memory by category, its capacity,
            and changes that would fit.
    """
    try:
        peaks = peaks_of(held, wanted)
        if peaks.fits or max(peaks.peak_bytes) <= max(peaks_of(held, held.config).peak_bytes):
            return peaks
    except ValueError as error:
        raise CommandRefused(str(error)) from error
    rank = peaks.tightest
    layout = wanted.layout(held.size, built_in=False)
    parts = sorted(((count, name) for name, count in peaks.memory[rank].by_category().items()), reverse=True)
    most = ", ".join(f"{name.replace('_', ' ')} {_mib(count)}" for count, name in parts if count > 0)
    how = "" if held.known else _HOW
    fitting = [_words(change) for change in _changes_that_fit(held, wanted)]
    advice = f"what would fit: {'; '.join(fitting)}" if fitting else "take more engines"
    raise CommandRefused(
        f"{layout} at ZeRO stage {wanted.zero.stage} would hold {_mib(peaks.peak_bytes[rank])} on rank {rank} at "
        f"the peak of a step, which has {_mib(held.capacity[rank])}: {most}{how}; {advice}; {more_in('memory')}"
    )


_HOW = " (activations are those of now, in proportion to a micro-batch's tokens and the share of the model)"


def peaks_of(held: RankCapacity, wanted: RunConfig) -> Peaks:
    """Predict the memory of each rank at the peak of a step.

    Args:
        held: Capacity and memory use of the ranks.
        wanted: Configuration to predict.

    Raises:
        ValueError: If `wanted` is not a valid run on these ranks.
    """
    found = predicted_peaks(
        wanted,
        held.size,
        capacity_bytes=held.capacity,
        dtype=held.dtype,
        device=held.device,
        alongside_bytes=held.alongside,
        parameters=None if held.known else held.parameters,
    )
    return found if found is not None else _scaled(held, wanted)


def _scaled(held: RankCapacity, wanted: RunConfig) -> Peaks:
    layout = wanted.layout(held.size, built_in=False)
    counts = parameters_by_rank(wanted, layout, whole=held.parameters)
    states = rank_states(wanted, layout, counts, stage=wanted.zero.stage, dtype=held.dtype)
    share = _activation_share(wanted, held.size) / _activation_share(held.config, held.size)
    activations, buffers = int(max(held.activations) * share), max(held.buffers)
    memory = [
        RankMemory(
            parameters=state.parameters,
            gradients=state.gradients,
            master_weights=state.master_weights,
            optimizer_moments=state.optimizer_moments,
            activations=activations,
            communication_buffers=buffers,
            outside_framework=alongside,
        )
        for state, alongside in zip(states, held.alongside, strict=True)
    ]
    return Peaks(memory=tuple(memory), capacity_bytes=tuple(held.capacity))


def _activation_share(config: RunConfig, size: int) -> float:
    """Return the tokens whose activations a rank keeps at once, times its share of the model."""
    layout = config.layout(size, built_in=False)
    batch = config.batch.resolve(layout.data_size)
    # GPipe keeps the activations of all micro-batches; other schedules of at most one per pipeline stage.
    waiting = batch.accumulation if config.parallel.schedule == "gpipe" else min(batch.accumulation, layout.pp)
    model_ranks = layout.tp * layout.cp * layout.pp
    return batch.micro_size * config.data.sequence_length * (waiting if layout.pp > 1 else 1) / model_ranks


def _changes_that_fit(held: RankCapacity, wanted: RunConfig) -> Iterator[dict[str, Any]]:
    """Yield the first few changes under which `wanted` would fit, as arguments of `reshape`: single changes, then
    pairs.
    """
    layout = wanted.layout(held.size, built_in=False)
    micro_batches = wanted.batch.resolve(layout.data_size).accumulation
    singles: list[dict[str, Any]] = [
        *({"zero": stage} for stage in range(wanted.zero.stage + 1, 4)),
        *({"micro_batches": micro_batches * more} for more in (2, 4, 8)),
        {"tp": 2 * layout.tp},
        {"cp": 2 * layout.cp},
        {"pp": 2 * layout.pp},
    ]
    pairs = [
        one | other for k, one in enumerate(singles) for other in singles[k + 1 :] if not one.keys() & other.keys()
    ]
    fitting = (change for change in (*singles, *pairs) if _fits(held, wanted, change))
    yield from itertools.islice(fitting, _CHANGES_NAMED)


def _fits(held: RankCapacity, wanted: RunConfig, change: dict[str, Any]) -> bool:
    try:
        return peaks_of(held, changed_config(wanted, held.size, built_in=held.built_in, **change)).fits
    except (ConfigError, LayoutError):
        return False


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def _words(change: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in change.items())


def holdings(zeros: Iterable[Zero], moments_of: Callable[[FlatParam], int]) -> dict[str, dict[str, Any]]:
    """Return, for each parameter's name, a mapping that JSON can hold.

    - `held`: state → [first, end, bytes]. The rank keeps the elements first ≤ i < end of its tensor between two steps;
      the bytes are without padding.
    - `owners`: [count, first, last] of the ranks whose partitions hold the tensor; [] if the tensor is not partitioned.

    Args:
        zeros: ZeRO instances of this rank.
        moments_of: Number of moments that the optimizer keeps of each element of a flat parameter.
    """
    found: dict[str, dict[str, Any]] = {}
    for zero in zeros:
        for flat in zero.flats:
            states = zero.placement.flats[flat.name][0].states
            for slot in flat.slots:
                found[slot.name] = {
                    "held": {state: _held(state, home, slot, flat, moments_of) for state, home in states.items()},
                    "owners": _owners(slot, flat, states),
                }
    return found


def _held(
    state: str, home: StatePlacement, slot: ParamSlot, flat: FlatParam, moments_of: Callable[[FlatParam], int]
) -> list[int]:
    first, end = 0, slot.numel
    if home.holders not in (Replication.REPLICATED, Replication.OWN):
        low, high = flat.start, flat.end
        if home.holders is Replication.SECONDARY and flat.secondary is not None:
            group = flat.secondary.group
            low, high = partition_range(flat.padded, group.size, group.index)
        # Intersect the partition [low, high) of the flat parameter with this tensor.
        first = min(max(low - slot.offset, 0), slot.numel)
        end = max(first, min(high - slot.offset, slot.numel))
    copies = moments_of(flat) if state == "moments" else 1
    # The gradient is freed as soon as it is reduced.
    used = state == "gradient" and flat.zero_policy.update_in_backward
    return [first, end, 0 if used else math.ceil((end - first) * copies * ITEM_BYTES[home.form])]


def _owners(slot: ParamSlot, flat: FlatParam, states: Mapping[str, StatePlacement]) -> list[int]:
    whole = (Replication.REPLICATED, Replication.OWN, Replication.SECONDARY)
    if not slot.numel or all(home.holders in whole for home in states.values()):
        return []
    share = flat.end - flat.start
    ranks = flat.gather_group.ranks[slot.offset // share : (slot.offset + slot.numel - 1) // share + 1]
    # A full list would be long: with 1,000 ranks, each rank would write all numbers.
    return [len(ranks), ranks[0], ranks[-1]]
