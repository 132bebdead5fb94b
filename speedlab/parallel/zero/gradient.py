"""The gradient of one flat on one rank: the local gradient, and its sum over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from speedlab.comm import Group, Transfer
from speedlab.layout import padded_numel
from speedlab.offload import OffloadedTensor, StoreRegistry
from speedlab.parallel.zero.comm_groups import PendingWork, ZeroCommGroups
from speedlab.parallel.zero.param_slot import ParamSlot
from speedlab.placement import MemoryKind, ParamPlacement, Replication, ZeroPolicy


class Gradient:
    """Owns the gradient of a flat.

    | tensor      | gradients stay (`ZeroPolicy`)   | gradients are sharded: partitioned or offloaded             |
    |-------------|---------------------------------|-------------------------------------------------------------|
    | `own`       | always has values; reduced in place | borrowed while a pass has local gradients, else None    |
    | `partition` | this rank's slice of `own`      | its own memory; if offloaded, values only during a visit    |

    With delayed updates there is also `waiting`: the offloaded gradient of the previous step over the state range. It
    has values only during a visit.
    """

    def __init__(
        self,
        slots: Sequence[ParamSlot],
        *,
        padded: int,
        partition: tuple[int, int],
        dtype: torch.dtype,
        ways: ZeroCommGroups,
        summed_first: dict[tuple[Group, ...], list[ParamSlot]],
        kept: dict[str, Tensor],
    ) -> None:
        """Create the gradient without memory; call `place` before any other method.

        Args:
            slots: The parameters' positions in the flat.
            padded: Elements of the flat, padding included.
            partition: [start, end) of the flat that this rank reduces.
            dtype: Dtype of the gradient.
            ways: Groups and codecs of the reductions.
            summed_first: Slots by the groups over which their gradients are summed before the main reduction. Slots of
                one entry are sent together.
            kept: State that an optimizer keeps next to the gradient, by name.
        """
        self.slots, self.dtype, self.summed_first = slots, dtype, summed_first
        self.used = [False] * len(slots)
        """Which parameters got a gradient from this rank in this step."""
        self.own: Tensor | None = None
        self.optimizer_reduces = False
        """Whether the optimizer does the last sum of this step itself, from full gradients."""
        self.offloaded: OffloadedTensor | None = None
        """`partition`, if it is offloaded."""
        self.waiting: OffloadedTensor | None = None
        """The gradient that a delayed update reads, while backward fills the other buffer."""
        self.look: Callable[[int, Tensor], None] | None = None
        """Called with (parameter index, gradient) for each local gradient."""
        self.measure: Callable[[int, Tensor], Tensor] | None = None
        """Returns the squared norm of `counted`, given its offset and tensor. Called before a reduced gradient is
        offloaded."""
        self.use: Callable[[], None] | None = None
        """Applies the update as soon as the gradient is reduced, with `update_in_backward`. Called after `measure`."""
        self.squares: Tensor | None = None
        """Squared norm of the current sum, from `measure`."""
        self.kept = kept
        """State that the optimizer keeps from step to step (error feedback), over the full flat or this rank's
        partition."""
        self.group, self._ways, self._padded = ways.reduce, ways, padded
        self._summing = ways.summing("")
        self._start, self._end = partition
        self._residency = ZeroPolicy.of_stage(0, 1)
        self._borrowed: Tensor | None = None
        """`own`, while it is borrowed."""
        self._earlier: Tensor | None = None
        """The sum of earlier passes of this step, if the current pass overwrites it."""
        self._filled = [False] * len(slots)
        """Which parameters already have a gradient of this pass in `own`."""
        ends = [0] + [slot.offset + slot.numel for slot in slots]
        starts = [slot.offset for slot in slots] + [padded]
        self._gaps = [(low, high) for low, high in zip(ends, starts, strict=True) if low < high]
        self.partition: Tensor
        self._stores: StoreRegistry

    def place(self, zero_policy: ZeroPolicy, stores: StoreRegistry) -> None:
        """Allocate memory for a new policy. Gradients that stay accumulate in place; sharded ones borrow a full buffer
        per pass.

        Args:
            zero_policy: The new policy.
            stores: The host and disk stores.

        Raises:
            OffloadError: A store has no room.
        """
        self.clear()
        self._residency, self._stores, self.own = zero_policy, stores, None
        form = str(self.dtype).removeprefix("torch.")
        self._summing = self._ways.summing(zero_policy.sent_as("gradient", form))
        self.partition = torch.empty(0)  # Frees the old memory before the new memory is allocated.
        for state in filter(None, (self.offloaded, self.waiting)):
            state.kept.drop()
        self.offloaded = self.waiting = None
        if zero_policy.gradients_at is not MemoryKind.DEVICE:
            numel = self._end - self._start
            self.offloaded = OffloadedTensor(lambda: stores.of(zero_policy.gradients_at).keep(numel, self.dtype))
            self.partition = self.offloaded.tensor
        elif zero_policy.update_in_backward:
            pass  # `own` is borrowed until the update has used it.
        elif zero_policy.gradients is Replication.REPLICATED:
            self.own = self.group.empty(self._padded, self.dtype).zero_()
            self.partition = self.own[self._start : self._end]
        else:
            self.partition = torch.zeros(self._end - self._start, dtype=self.dtype, device=self.group.device)
        if zero_policy.grads_double_buffered:
            whole = zero_policy.optimizer_states is Replication.REPLICATED and not zero_policy.grads_sharded
            waits = self._padded if whole else self._end - self._start
            self.waiting = OffloadedTensor(lambda: stores.of(zero_policy.states_at).keep(waits, self.dtype))

    @property
    def own_range(self) -> tuple[int, int]:
        """[start, end) of the flat that this rank reduces."""
        return self._start, self._end

    @property
    def update(self) -> Tensor:
        """The reduced gradient over the state range: the input of the optimizer."""
        return self._sum if self.waiting is None else self.waiting.tensor

    @property
    def used_by_update(self) -> OffloadedTensor | None:
        """The offloaded tensor of `update`, if it is offloaded."""
        return self.offloaded if self.waiting is None else self.waiting

    def lay_by(self) -> Transfer | None:
        """Move the reduced gradient to `waiting`, so that the next backward does not overwrite it.

        Returns:
            The pending copy; None if the two buffers were swapped.
        """
        assert self.waiting is not None  # Only policies with `grads_double_buffered` get here.
        if self.offloaded is None:
            return self.waiting.kept.write(self._sum)
        # One statement, so that Ctrl-C leaves either the old or the new state.
        self.offloaded, self.waiting, self.partition = self.waiting, self.offloaded, self.waiting.tensor
        return None

    @property
    def _sum(self) -> Tensor:
        """The reduced gradient of the current step over the state range."""
        partly = self._residency.optimizer_states is Replication.PARTITIONED or self._residency.grads_sharded
        if partly and not self._residency.update_in_backward:
            return self.partition
        assert self.own is not None  # Replicated states go with replicated gradients.
        return self.own

    @property
    def counted(self) -> tuple[int, Tensor]:
        """(offset in the flat, tensor) that this rank counts in norms: its partition, or its full local gradient if no
        reduction has happened.
        """
        if self.optimizer_reduces or self._residency.update_in_backward:
            assert self.own is not None  # In both cases the gradient is complete on this rank.
            return 0, self.own
        return self._start, self.partition

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors with memory now, the borrowed buffer included."""
        here = [] if self.offloaded is not None else [self.partition]
        return [*here, *self.kept.values(), *([] if self.own is None else [self.own])]

    # ---- a pass ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def receive(self, index: int, gradient: Tensor) -> None:
        """Add a parameter's gradient of this backward pass to the local gradient.

        Args:
            index: Index of the parameter in `slots`.
            gradient: Dense gradient with the parameter's shape.
        """
        if self.look is not None:
            self.look(index, gradient)
        slot = self.slots[index]
        view = self._whole()[slot.range].view(slot.shape)
        if self._filled[index]:
            view.add_(gradient)
        else:
            # The first gradient overwrites old values, so the buffer is never zeroed.
            view.copy_(gradient)
            self._filled[index] = self.used[index] = True

    @torch.no_grad()
    def reduce(self, *, accumulate: bool) -> PendingWork | None:
        """Start to reduce the local gradients. Parameters without a gradient count as zero.

        Args:
            accumulate: Whether to add to the sum of earlier passes of this step.

        Returns:
            The pending reduction; None if the optimizer reduces.
        """
        own = self._whole()
        for slot, filled in zip(self.slots, self._filled, strict=True):
            if not filled:
                own[slot.range].zero_()
        for groups, slots in self.summed_first.items():
            self._sum_first(own, groups, slots)
        if self.optimizer_reduces:
            return None
        if self._residency.grads_sharded and not self._residency.update_in_backward:
            return self._summing.reduce_scatter(own, self._summed_into(accumulate), accumulate=accumulate)
        # Each rank updates only its partition, so it needs only this part of the sum.
        if self._residency.optimizer_states is Replication.PARTITIONED:
            return self._summing.reduce_scatter(own, self.partition)
        return self.group.all_reduce(own)

    def _summed_into(self, accumulate: bool) -> Tensor:
        """Return the output buffer of the reduction on the device. With `accumulate`, it contains the sum of earlier
        passes.
        """
        away = self.offloaded
        if away is None:
            return self.partition
        if self.group.device.type == "cpu":
            away.fetch(values=accumulate)
            return away.arrive()
        self.partition = torch.empty(away.kept.numel, dtype=self.dtype, device=self.group.device)
        if accumulate:
            away.kept.read(self.partition).wait()
        return self.partition

    @staticmethod
    def _sum_first(own: Tensor, groups: tuple[Group, ...], slots: list[ParamSlot]) -> None:
        """Sum the gradients of `slots` over each of `groups`, one after the other, and wait."""
        pieces = [own[slot.range] for slot in slots]
        total = sum(slot.numel for slot in slots)
        for group in groups:
            together = group.borrow(padded_numel(total, group.size), own.dtype)
            # All slots of a group travel in one message.
            torch.cat(pieces, out=together[:total])
            together[total:].zero_()
            group.all_reduce(together).wait()
            for piece, summed in zip(pieces, together[:total].split([piece.numel() for piece in pieces]), strict=True):
                piece.copy_(summed)
            group.give_back(together)

    def reduced(self, *, wanted: bool = True) -> None:
        """Finish a reduction: measure, offload or use the sum, and return the borrowed buffer.

        Args:
            wanted: Whether an update may use the sum. False after an exception.
        """
        self._filled = [False] * len(self.slots)
        if self._earlier is not None:
            assert self.own is not None
            self.group.wait_until_read(self.own)
            self._summed.add_(self._earlier)
            self._earlier = None
        if self.offloaded is not None:
            self._send_away(self.offloaded)
        if self.use is not None and wanted:
            self._measure()
            self.use()
        self._give_back()

    def _measure(self) -> None:
        if self.measure is not None:
            self.squares = self.measure(*self.counted)

    def _send_away(self, away: OffloadedTensor) -> None:
        """Measure the reduced gradient, then offload it."""
        self._measure()
        if self.group.device.type == "cpu":
            away.leave(changed=True)
            return
        # Later operations on this state wait for this write.
        self._stores.hold(away.kept.write(self.partition))
        self.partition = away.tensor

    def set_aside(self) -> None:
        """Save the sum before another backward of a step that was already reduced. Sharded gradients need no copy,
        because they accumulate in memory of their own.

        Raises:
            RuntimeError: The update in backward already used the sum.
        """
        if self.use is not None:
            raise RuntimeError(
                "backward: optimizer.in_backward has updated the parameters in this step's first backward already; "
                "call engine.step() after each one"
            )
        if not self._residency.grads_sharded and self._earlier is None:
            self._earlier = self._summed.clone()

    def clear(self) -> None:
        """Drop all gradients of this step. The next pass overwrites the memory, so no zeroing is needed."""
        self._earlier = None
        self._filled = [False] * len(self.slots)
        self.used = [False] * len(self.slots)
        self.squares = None
        if self.offloaded is not None:
            self.offloaded.leave(changed=False)  # An exception may have interrupted the visit.
        self._give_back()

    @property
    def _summed(self) -> Tensor:
        """The tensor that holds the sum of a pass, for replicated gradients."""
        return self._sum if not self.optimizer_reduces else self._whole()

    def zero_gaps(self, tensor: Tensor, start: int = 0) -> None:
        """Zero the padding elements of a tensor.

        Args:
            tensor: A contiguous part of a flat, 1-D.
            start: Its offset in the flat.
        """
        for low, high in self._gaps:
            tensor[max(0, low - start) : max(0, high - start)].zero_()

    def forget_kept(self) -> None:
        """Reset the optimizer's state next to the gradient, because the parameters were replaced."""
        for tensor in self.kept.values():
            tensor.zero_()

    def _whole(self) -> Tensor:
        if self.own is None:
            self.own = self._borrowed = self.group.borrow(self._padded, self.dtype)
            for low, high in self._gaps:
                self.own[low:high].zero_()
        return self.own

    def _give_back(self) -> None:
        if self._borrowed is not None:
            self.group.give_back(self._borrowed)
            self.own = self._borrowed = None


def gradient_of(
    rows: Sequence[ParamPlacement],
    slots: Sequence[ParamSlot],
    *,
    padded: int,
    partition: tuple[int, int],
    ways: ZeroCommGroups,
    axes: Mapping[str, Group],
) -> Gradient:
    """Return the gradient of a flat, with zeros in the optimizer's state next to the gradient.

    Args:
        rows: The flat's rows of the placement table.
        slots: Their positions in the flat.
        padded: Elements of the flat, padding included.
        partition: [start, end) of the flat that this rank reduces.
        ways: Groups and codecs of the reductions.
        axes: Groups by the names in the rows' `summed_over`.
    """
    states, group = rows[0].states, ways.gather
    summed_first: dict[tuple[Group, ...], list[ParamSlot]] = {}
    for row, slot in zip(rows, slots, strict=True):
        groups = tuple(axes[axis] for axis in row.summed_over[:-1])
        if groups:
            summed_first.setdefault(groups, []).append(slot)
    return Gradient(
        slots,
        padded=padded,
        partition=partition,
        dtype=getattr(torch, states["gradient"].form),
        ways=ways,
        summed_first=summed_first,
        kept={
            state: torch.zeros(
                home.holders.share(padded, group.size), dtype=getattr(torch, home.form), device=group.device
            )
            for state, home in states.items()
            if home.holders.optimizers
        },
    )


def used_by_any(gradients: Sequence[Gradient], also: Group | None = None) -> list[list[bool]]:
    """Return which parameters of each flat got a gradient from any rank in this step. Collective; one exchange per
    group.

    Args:
        gradients: The gradients of all flats.
        also: One more group whose ranks count.
    """
    if not gradients:
        return []
    counts = torch.tensor([used for gradient in gradients for used in gradient.used], dtype=torch.int64)
    places: dict[tuple[Group, ...], list[int]] = {}
    start = 0
    for gradient in gradients:
        for groups, slots in gradient.summed_first.items():
            names = {slot.name for slot in slots}
            own = [start + index for index, slot in enumerate(gradient.slots) if slot.name in names]
            places.setdefault(groups, []).extend(own)
        start += len(gradient.slots)
    for groups, indices in places.items():
        for group in groups:
            # The same order as for gradients: first the groups of `summed_over`, then the group of the flat.
            counts[indices] = group.sum(counts[indices])
    counts = gradients[0].group.sum(counts)
    every = iter(((counts if also is None else also.sum(counts)) > 0).tolist())
    return [[next(every) for _ in gradient.slots] for gradient in gradients]
