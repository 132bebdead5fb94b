"""The gradient of one flat on one rank: this rank's own terms, and their sum over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from speedlab.comm import Group, Transfer
from speedlab.layout import padded_numel
from speedlab.offload import OffloadedTensor, StoreRegistry
from speedlab.parallel.zero.comm_groups import Work, ZeroCommGroups
from speedlab.parallel.zero.param_slot import ParamSlot
from speedlab.placement import MemoryKind, ParamPlacement, Replication, ZeroPolicy


class Gradient:
    """Owner of a flat's gradient.

    | tensor      | gradients stay (`ZeroPolicy`)               | gradients go: partitioned, or away                 |
    |-------------|--------------------------------------------|----------------------------------------------------|
    | `own`       | always there; summed where it is           | borrowed while terms of a pass are here, else None |
    | `partition` | this rank's slice of `own`                 | memory of its own; of what is away, during a visit |
    | `waiting`   | away, where an update may run beside the next step: of the step that is over, over the state    |
    |             | range, during a visit                                                                           |
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
        """`padded`: elements of the flat; `partition`: [start, end) of it that this rank sums. `ways`: over which,
        and as what, terms travel. `summed_first`: slots
        whose terms are summed over the same groups before those of `group`; they travel together. `kept`: what an
        optimizer has on this rank beside the gradient."""
        self.slots, self.dtype, self.summed_first = slots, dtype, summed_first
        self.used = [False] * len(slots)
        """Which parameters got a gradient from this rank in this step."""
        self.own: Tensor | None = None
        self.optimizer_reduces = False
        """Whether the sum over `group` of the present step is the optimizer's to take, from whole gradients."""
        self.offloaded: OffloadedTensor | None = None
        """`partition`, where it lies away from the device."""
        self.waiting: OffloadedTensor | None = None
        """What the present update uses, where backward fills the rest meanwhile."""
        self.look: Callable[[int, Tensor], None] | None = None
        """What is told of each gradient that this rank adds, and of which parameter."""
        self.measure: Callable[[int, Tensor], Tensor] | None = None
        """What tells the squared norm of `counted`, given that place and tensor, while a sum that goes away is here."""
        self.use: Callable[[], None] | None = None
        """What uses the sum as soon as it is here, where none stays; it is measured before."""
        self.squares: Tensor | None = None
        """What it told of the present sum."""
        self.kept = kept
        """What the optimizer keeps beside the gradient from step to step, over the whole flat or this rank's partition
        (an error feedback)."""
        self.group, self._ways, self._padded = ways.reduce, ways, padded
        self._summing = ways.summing("")
        self._start, self._end = partition
        self._residency = ZeroPolicy.of_stage(0, 1)
        self._borrowed: Tensor | None = None
        """`own`, where gradients are partitioned and some of this pass are here."""
        self._earlier: Tensor | None = None
        """What was summed by an earlier pass of this step, where the present one writes over it."""
        self._filled = [False] * len(slots)
        """Which parameters have a gradient of this pass in `own`."""
        ends = [0] + [slot.offset + slot.numel for slot in slots]
        starts = [slot.offset for slot in slots] + [padded]
        self._gaps = [(low, high) for low, high in zip(ends, starts, strict=True) if low < high]
        self.partition: Tensor
        self._stores: StoreRegistry

    def place(self, zero_policy: ZeroPolicy, stores: StoreRegistry) -> None:
        """Allocate anew where `zero_policy` says; to be called before anything else. What stays accumulates where it is
        summed; what goes needs a passing whole."""
        self.clear()
        self._residency, self._stores, self.own = zero_policy, stores, None
        form = str(self.dtype).removeprefix("torch.")
        self._summing = self._ways.summing(zero_policy.sent_as("gradient", form))
        self.partition = torch.empty(0)  # The old memory is free before there is new one.
        for state in filter(None, (self.offloaded, self.waiting)):
            state.kept.drop()
        self.offloaded = self.waiting = None
        if zero_policy.gradients_at is not MemoryKind.DEVICE:
            numel = self._end - self._start
            self.offloaded = OffloadedTensor(lambda: stores.of(zero_policy.gradients_at).keep(numel, self.dtype))
            self.partition = self.offloaded.tensor
        elif zero_policy.update_in_backward:
            pass  # It is borrowed, whole, until it was used.
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
        """[start, end) of the flat that this rank sums."""
        return self._start, self._end

    @property
    def update(self) -> Tensor:
        """The sum over the state range of the flat: what the optimizer uses."""
        return self._sum if self.waiting is None else self.waiting.tensor

    @property
    def used_by_update(self) -> OffloadedTensor | None:
        """What `update` is, where it lies away from the device."""
        return self.offloaded if self.waiting is None else self.waiting

    def lay_by(self) -> Transfer | None:
        """The step's sum waits for its update, where the next backward does not touch it, once this is over."""
        assert self.waiting is not None  # Updates of this zero_policy have room for it.
        if self.offloaded is None:
            return self.waiting.kept.write(self._sum)
        # At once, so that Ctrl-C finds all of it or nothing.
        self.offloaded, self.waiting, self.partition = self.waiting, self.offloaded, self.waiting.tensor
        return None

    @property
    def _sum(self) -> Tensor:
        """The present step's sum over the state range."""
        partly = self._residency.optimizer_states is Replication.PARTITIONED or self._residency.grads_sharded
        if partly and not self._residency.update_in_backward:
            return self.partition
        assert self.own is not None  # Replicated states go with replicated gradients.
        return self.own

    @property
    def counted(self) -> tuple[int, Tensor]:
        """What this rank counts in norms, and the place in the flat where that begins: the partition, or all of its own
        terms, where nobody has summed them yet."""
        if self.optimizer_reduces or self._residency.update_in_backward:
            assert self.own is not None  # See `optimizer_reduces`; what is used is whole.
            return 0, self.own
        return self._start, self.partition

    @property
    def tensors(self) -> list[Tensor]:
        """What it holds now, the borrowed whole included."""
        here = [] if self.offloaded is not None else [self.partition]
        return [*here, *self.kept.values(), *([] if self.own is None else [self.own])]

    # ---- a pass ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def receive(self, index: int, gradient: Tensor) -> None:
        """Add the gradient of parameter `index` of this backward pass to this rank's own terms."""
        if self.look is not None:
            self.look(index, gradient)
        slot = self.slots[index]
        view = self._whole()[slot.range].view(slot.shape)
        if self._filled[index]:
            view.add_(gradient)
        else:
            view.copy_(gradient)
            self._filled[index] = self.used[index] = True

    @torch.no_grad()
    def reduce(self, *, accumulate: bool) -> Work | None:
        """Start to sum the ranks' own terms; parameters without one count as zero. None when nothing is under way.

        `accumulate` adds to partitions summed earlier in this step.
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
        if self._residency.optimizer_states is Replication.PARTITIONED:
            return self._summing.reduce_scatter(own, self.partition)
        return self.group.all_reduce(own)

    def _summed_into(self, accumulate: bool) -> Tensor:
        """Memory for the sum on the device; with `accumulate` it holds that of earlier passes."""
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
        """Sum the gradients of `slots` over `groups`, one after the other, and wait."""
        pieces = [own[slot.range] for slot in slots]
        total = sum(slot.numel for slot in slots)
        for group in groups:
            together = group.borrow(padded_numel(total, group.size), own.dtype)
            torch.cat(pieces, out=together[:total])
            together[total:].zero_()
            group.all_reduce(together).wait()
            for piece, summed in zip(pieces, together[:total].split([piece.numel() for piece in pieces]), strict=True):
                piece.copy_(summed)
            group.give_back(together)

    def reduced(self, *, wanted: bool = True) -> None:
        """The sum is here: the passing whole is freed, if there is one. Unless it is `wanted`, nothing uses it."""
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
        """The sum goes to its place, and is measured before."""
        self._measure()
        if self.group.device.type == "cpu":
            away.leave(changed=True)
            return
        # What comes next to this place waits for it.
        self._stores.hold(away.kept.write(self.partition))
        self.partition = away.tensor

    def set_aside(self) -> None:
        """Before another backward of a step that was summed already: keep that sum from being written over.

        Gradients that go have a place of their own and accumulate there. Raises RuntimeError where that sum was used.
        """
        if self.use is not None:
            raise RuntimeError(
                "backward: optimizer.in_backward has updated the parameters in this step's first backward already; "
                "call engine.step() after each one"
            )
        if not self._residency.grads_sharded and self._earlier is None:
            self._earlier = self._summed.clone()

    def clear(self) -> None:
        """Forget everything of this step. What comes next writes over it, so nothing needs zeroing."""
        self._earlier = None
        self._filled = [False] * len(self.slots)
        self.used = [False] * len(self.slots)
        self.squares = None
        if self.offloaded is not None:
            self.offloaded.leave(changed=False)  # Where an exception came between a sum and its way.
        self._give_back()

    @property
    def _summed(self) -> Tensor:
        """Where a pass leaves its sum, of replicated gradients."""
        return self._sum if not self.optimizer_reduces else self._whole()

    def zero_gaps(self, tensor: Tensor, start: int = 0) -> None:
        """Zero the elements of `tensor`, which begins at element `start` of the flat, that are of no parameter."""
        for low, high in self._gaps:
            tensor[max(0, low - start) : max(0, high - start)].zero_()

    def forget_kept(self) -> None:
        """The parameters are others now: what was kept for the old ones would mislead."""
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
    """The gradient of a flat that has these rows of the placement table in these slots, with zeros in what is kept
    beside it. `axes`: the groups by the names in the rows' `summed_over`; the rest as of `Gradient`."""
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
    """Which parameters of each flat got a gradient in this step from any rank whose terms are summed, or of the group
    `also`. Collective over the ranks of all those groups, in one exchange for each."""
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
            counts[indices] = group.sum(counts[indices])
    counts = gradients[0].group.sum(counts)
    every = iter(((counts if also is None else also.sum(counts)) > 0).tolist())
    return [[next(every) for _ in gradient.slots] for gradient in gradients]
