"""Schedule the reductions of gradients: each unit once per backward pass, in the same order on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch.autograd.profiler import record_function

from speedlab.comm import Group
from speedlab.parallel.zero.all_gather import UnshardScheduler
from speedlab.parallel.zero.comm_groups import PendingWork
from speedlab.parallel.zero.units import Unit
from speedlab.placement import ZeroPolicy


class ReduceScheduler:
    """Reduces the gradients of one module, unit by unit."""

    def __init__(self, gathers: UnshardScheduler, group: Group, *, in_flight: int | None) -> None:
        """Start with no reduction pending.

        Args:
            gathers: The scheduler of the same units; it knows their order.
            group: Ranks over which gradients are reduced.
            in_flight: Units whose reduction may be pending while the next unit computes. Sharded gradients hold a full
                buffer per pending unit. None: a value that suits the device and policy.
        """
        self.around: Callable[[], AbstractContextManager[object]] = nullcontext
        """A context entered around the time that reductions take on this rank, for the timeline of a pipeline."""
        self.optimizer_reduces: Callable[[], bool] = lambda: False
        """Whether the optimizer reduces the gradients of this step itself; called before each backward."""
        self.sync = True
        """Whether the current backward pass reduces gradients; otherwise they stay local."""
        self.unsummed = False
        """Whether gradients of the last backward are not reduced yet."""
        self._gathers, self._group, self._in_flight = gathers, group, in_flight
        self._reduced_before = False
        """Whether gradients of an earlier backward pass of this step are already reduced."""
        self._order: list[Unit] = []
        self._turn: dict[Unit, int] = {}
        self._cursor = 0
        self._under_way: list[tuple[Unit, list[PendingWork | None]]] = []

    @property
    def idle(self) -> bool:
        return not self._under_way

    def begin(self, *, sync: bool) -> None:
        """Start a backward pass.

        Args:
            sync: Whether to reduce its gradients. If not, they stay local.

        Raises:
            RuntimeError: An update in backward already used the gradients of this step.
        """
        self._group.wait_until_all_read()  # This pass overwrites replicated gradients, which peers may still read.
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
        """Return whether the unit's gradients of this pass are already being reduced, so that no further gradient is
        allowed.

        Args:
            unit: The unit.
        """
        return self.sync and self._cursor > self._turn[unit]

    def advance(
        self, zero_policy: ZeroPolicy, *, everything: bool = False, leave_root: bool = False, wanted: bool = True
    ) -> None:
        """Start the reductions that are due: units with all gradients ready, or all remaining units.

        Args:
            zero_policy: The current policy.
            everything: Whether to reduce all remaining units.
            leave_root: Whether to leave the root unit for `end_root`.
            wanted: Whether an update may use the sums. False after an exception.
        """
        if not self.sync:
            return
        while self._cursor < len(self._order) and (everything or self._order[self._cursor].missing <= 0):
            unit = self._order[self._cursor]
            if unit is self._gathers.root and (leave_root or not everything):
                return  # Gradients of shared parameters may still be computed.
            self._cursor += 1
            accumulate = self._reduced_before and zero_policy.grads_sharded
            with record_function(f"speedlab::reduce {unit.name}"), self.around():
                works = [gradient.reduce(accumulate=accumulate) for gradient in unit.gradients]
            self._under_way.append((unit, works))
            self._finish(self._limit(zero_policy), wanted=wanted)

    def end(self, zero_policy: ZeroPolicy, *, leave_root: bool) -> None:
        """Finish the reductions of a backward pass.

        Args:
            zero_policy: The current policy.
            leave_root: Whether to leave the root unit for `end_root`.
        """
        if self.sync:
            self.advance(zero_policy, everything=True, leave_root=leave_root)
            self._finish(0)
            self._reduced_before = not leave_root
        self.unsummed = not self.sync or leave_root

    def end_root(self, zero_policy: ZeroPolicy) -> None:
        """Reduce the root unit that `end(leave_root=True)` left.

        Args:
            zero_policy: The current policy.
        """
        self.advance(zero_policy, everything=True)
        self._finish(0)
        self._reduced_before, self.unsummed = True, False

    def _limit(self, zero_policy: ZeroPolicy) -> int:
        """Return how many reductions may be pending while the next unit computes."""
        if zero_policy.update_in_backward:
            return 0  # The update takes most of a unit's time, so a reduction has nothing to overlap with.
        if self._in_flight is not None:
            return self._in_flight
        if self._group.device.type != "cpu":
            return 2  # A GPU continues to compute while two reductions are pending.
        # No overlap on CPUs. But two pending reductions let slightly slower ranks catch up, so use two if the second
        # one takes no memory.
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
        """Drop the gradients of the step, after an update or an exception."""
        for unit in self._gathers.units:
            for gradient in unit.gradients:
                gradient.clear()
        self._reduced_before = self.unsummed = False

    def abandon(self, zero_policy: ZeroPolicy) -> None:
        """Finish pending reductions after an exception in backward, and drop the gradients of the step.

        Ranks may have stopped at different units. So this rank takes part in all remaining reductions, until all ranks
        have started the same ones. If gathers are collectives, it must not do so: peers may wait for a gather of this
        rank.

        Args:
            zero_policy: The current policy.
        """
        # First wait for pending reductions: if a peer is lost, this raises before this rank starts new ones.
        self._finish(0, wanted=False)
        if not self._gathers.ordered:
            self.advance(zero_policy, everything=True, wanted=False)
        self._finish(0, wanted=False)
        self.clear()

    def forget(self) -> None:
        """Drop pending reductions after the world was left, because they will never end."""
        self._under_way.clear()
        self.clear()
