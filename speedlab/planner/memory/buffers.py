"""Predict the temporary buffers of a step: gathered units, and quantized messages of parameters and gradients.

The quantized messages are those of `speedlab.comm.quantized_collectives`. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from speedlab.layout import message_bytes
from speedlab.placement import MemoryKind, ZeroPolicy


@dataclass(frozen=True, kw_only=True)
class Passing:
    """Bytes of one unit's temporary buffers; 0 for buffers that its ZeRO policy does not need."""

    gathered: int = 0
    """The gathered (whole) parameters."""
    message: int = 0
    """This rank's shard, encoded."""
    arriving: int = 0
    """The encoded shards of all ranks."""
    exchanged: int = 0
    """Encoded slices of its gradient, and the same number from other ranks."""

    @classmethod
    def of(cls, flats: Iterable[tuple[int, int, bool]], zero_policy: ZeroPolicy, dp: int) -> Passing:
        """Return the buffers of a unit.

        Args:
            flats: for each flat (padded elements, bytes of an element, whether it trains).
            zero_policy: which states are partitioned, quantized or offloaded.
            dp: data-parallel ranks.
        """
        gathered = message = exchanged = 0
        for elements, element_bytes, trainable in flats:
            shard = elements // dp
            gathered += elements * element_bytes if zero_policy.params_unsharded_on_demand else 0
            if zero_policy.parameters_sent and (trainable or zero_policy.params_unsharded_on_demand):
                # int8 codes.
                message += message_bytes(shard, 8)
            if zero_policy.gradients_sent and trainable:
                # Slices for all ranks, and as many from them; int4 codes.
                exchanged += 2 * dp * message_bytes(shard, 4)
        return cls(gathered=gathered, message=message, arriving=dp * message, exchanged=exchanged)


def most_at_work(root: Passing, units: Sequence[Passing], zero_policy: ZeroPolicy) -> int:
    """Return the peak bytes of temporary buffers while a stage runs forward and backward, on a CPU.

    Args:
        root: buffers of the root unit.
        units: buffers of the units after the root, in order of use.
        zero_policy: which states are partitioned, quantized or offloaded.
    """
    live = peak = 0
    for change in _changes(root, units, zero_policy):
        live += change
        peak = max(peak, live)
    return peak


def _changes(root: Passing, units: Sequence[Passing], zero_policy: ZeroPolicy) -> Iterator[int]:
    """Yield the changes of temporary bytes in order of time.

    The next unit is gathered while one is used. The root and the last unit stay between the passes. A unit's gradient
    is exchanged while the next one is computed.
    """
    come, away = zero_policy.params_unsharded_on_demand, zero_policy.parameters_at is not MemoryKind.DEVICE
    if come and not away:
        yield sum(each.message for each in (root, *units))  # Alive until all ranks have read them.
    again = bool(zero_policy.secondary_ranks)  # Backward gathers from the secondary partition, without encoding.
    order = [root, *units]
    if come:
        yield from _arrives(root, away)
        yield from _is_there(root, away)
        for number, unit in enumerate(units):
            yield from _arrives(unit, away) if number == 0 else ()
            yield from _is_there(unit, away)
            yield from _arrives(units[number + 1], away) if number + 1 < len(units) else ()
            yield -unit.gathered if number + 1 < len(units) else 0
    exchanged = 0
    for number in range(len(order) - 1, -1, -1):
        unit, following = order[number], order[number - 1] if number > 1 else None
        if come and following is not None:
            yield from _arrives(following, away, plain=again)
        yield -unit.gathered if come else 0
        yield unit.exchanged
        yield -exchanged
        exchanged = unit.exchanged
        if come and following is not None:
            yield from _is_there(following, away, plain=again)


def _arrives(unit: Passing, away: bool, *, plain: bool = False) -> Iterator[int]:
    yield unit.gathered
    yield 0 if away or plain else unit.arriving


def _is_there(unit: Passing, away: bool, *, plain: bool = False) -> Iterator[int]:
    """Yield the changes when a unit has arrived. An offloaded shard is encoded and sent only after it is read."""
    encoded = unit.message + unit.arriving
    yield 0 if plain else encoded if away else -unit.arriving
    yield -encoded if away and not plain else 0


def sent_by_update(units: Iterable[Passing], zero_policy: ZeroPolicy) -> int:
    """Return the bytes of messages after the update, for parameters that stay on every rank: all units at once.

    Args:
        units: buffers of each unit.
        zero_policy: which states are partitioned, quantized or offloaded.
    """
    return 0 if zero_policy.params_unsharded_on_demand else sum(each.message + each.arriving for each in units)
