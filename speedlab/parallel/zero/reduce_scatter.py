"""When gradients of units are summed over the ranks: each unit once in a backward pass, in one order on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch.autograd.profiler import record_function

from speedlab.comm import Group
from speedlab.parallel.zero.all_gather import UnshardScheduler
from speedlab.parallel.zero.comm_groups import Work
from speedlab.parallel.zero.units import Unit
from speedlab.placement import ZeroPolicy


class ReduceScheduler:
    """The reductions of one module's gradients."""

    def __init__(self, gathers: UnshardScheduler, group: Group, *, in_flight: int | None) -> None:
        """`in_flight`: units whose reduction may be under way while the next unit computes, each of which holds a whole
        gradient of a unit where gradients go; None takes what suits device and gradients."""
        self.around: Callable[[], AbstractContextManager[object]] = nullcontext
        """Entered around what reductions take of this rank's time; a pipeline's timeline hangs here."""
        self.optimizer_reduces: Callable[[], bool] = lambda: False
        """Whether the optimizer sums the gradients of the present step over the ranks; asked before each backward."""
        self.sync = True
        """Whether the present backward pass is summed over the ranks, or leaves its gradients with each rank."""
        self.unsummed = False
        """Whether gradients of the last backward are still with each rank."""
        self._gathers, self._group, self._in_flight = gathers, group, in_flight
        self._reduced_before = False
        """Whether gradients of an earlier backward pass of this step are summed already."""
        self._order: list[Unit] = []
        self._turn: dict[Unit, int] = {}
        self._cursor = 0
        self._under_way: list[tuple[Unit, list[Work | None]]] = []

    @property
    def idle(self) -> bool:
        return not self._under_way

    def begin(self, *, sync: bool) -> None:
        """A backward pass begins. Without `sync` its gradients stay with each rank."""
        self._group.wait_until_all_read()  # Replicated gradients are about to be written over.
        left = self.optimizer_reduces()
        for gradient in (each for unit in self._gathers.units for each in unit.gradients):
            gradient.optimizer_reduces = left
            if self._reduced_before:
                gradient.set_aside()
        self.sync = sync
        self._order = self._gathers.backward_order
        self._turn = {unit: turn for turn, unit in enumerate(self._order)}
        self._cursor = 0
        for unit in self._order:
            unit.missing = unit.trainable_count

    def is_over(self, unit: Unit) -> bool:
        """Whether the unit's gradients of this pass are summed, or on their way: none may come any more."""
        return self.sync and self._cursor > self._turn[unit]

    def advance(
        self, zero_policy: ZeroPolicy, *, everything: bool = False, leave_root: bool = False, wanted: bool = True
    ) -> None:
        """Start the reductions that are due: of units whose gradients are all here, or of all that are left. Unless
        they are `wanted`, nothing uses them."""
        if not self.sync:
            return
        while self._cursor < len(self._order) and (everything or self._order[self._cursor].missing <= 0):
            unit = self._order[self._cursor]
            if unit is self._gathers.root and (leave_root or not everything):
                return  # Gradients of shared parameters may still come.
            self._cursor += 1
            accumulate = self._reduced_before and zero_policy.grads_sharded
            with record_function(f"speedlab::reduce {unit.name}"), self.around():
                works = [gradient.reduce(accumulate=accumulate) for gradient in unit.gradients]
            self._under_way.append((unit, works))
            self._finish(self._limit(zero_policy), wanted=wanted)

    def end(self, zero_policy: ZeroPolicy, *, leave_root: bool) -> None:
        """The backward pass is over; `leave_root`: those of the root unit wait for `end_root`."""
        if self.sync:
            self.advance(zero_policy, everything=True, leave_root=leave_root)
            self._finish(0)
            self._reduced_before = not leave_root
        self.unsummed = not self.sync or leave_root

    def end_root(self, zero_policy: ZeroPolicy) -> None:
        """Sum what `end(leave_root=True)` has left."""
        self.advance(zero_policy, everything=True)
        self._finish(0)
        self._reduced_before, self.unsummed = True, False

    def _limit(self, zero_policy: ZeroPolicy) -> int:
        """How many reductions may be under way when the next unit computes."""
        if zero_policy.update_in_backward:
            return 0  # What uses gradients takes most of a unit's time: there is nothing to hide behind it.
        if self._in_flight is not None:
            return self._in_flight
        if self._group.device.type != "cpu":
            return 2  # A GPU computes on while two are under way.
        # Nothing overlaps, but ranks that are not quite abreast need not wait where a second one takes no memory.
        return 2 if self._group.at_hand and not zero_policy.grads_sharded else 1

    def _finish(self, leave: int, *, wanted: bool = True) -> None:
        while len(self._under_way) > leave:
            unit, works = self._under_way.pop(0)
            with self.around():
                for work in works:
                    if work is not None:
                        work.wait()
                for gradient in unit.gradients:
                    gradient.reduced(wanted=wanted)

    def clear(self) -> None:
        """The step is over, or given up: its gradients are forgotten."""
        for unit in self._gathers.units:
            for gradient in unit.gradients:
                gradient.clear()
        self._reduced_before = self.unsummed = False

    def abandon(self, zero_policy: ZeroPolicy) -> None:
        """After an exception in a backward pass: finish what is under way, and forget the gradients of the step.

        Ranks may have come to their exceptions, or to the end, by different ways: this one takes part in what is left,
        so that all have started the same reductions. (Where each gather is a collective of its own, peers may wait for
        one of this rank's, and it must not wait for them.)"""
        self._finish(0, wanted=False)  # Before: where a peer was lost, others must not be drawn into what is left.
        if not self._gathers.ordered:
            self.advance(zero_policy, everything=True, wanted=False)
        self._finish(0, wanted=False)
        self.clear()

    def forget(self) -> None:
        """After the world was left: nothing that is under way ends any more."""
        self._under_way.clear()
        self.clear()
