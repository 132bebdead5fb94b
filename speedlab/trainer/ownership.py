"""What a rank holds of each parameter: elements and bytes of each state, and the ranks that own them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from speedlab.layout import partition_range
from speedlab.parallel.zero import FlatParam, Zero
from speedlab.parallel.zero.param_slot import ParamSlot
from speedlab.placement import ITEM_BYTES, Replication, StatePlacement


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
