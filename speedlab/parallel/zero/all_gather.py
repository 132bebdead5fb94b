"""Schedule the all-gathers of units: when partitioned or offloaded parameters are gathered and released.

Every pass gathers every unit once. There are two modes:

- Offered shards (`Group.ordered` is False): each rank reads a unit when it needs the unit, and reads the skipped units
  at the end of the pass. So ranks may take different branches.
- Collectives: all ranks must start the gathers in the same order. So a rank takes part in all gathers before the unit
  that it needs, and releases those units at once. Offloaded parameters use this mode too: they are read before they
  are sent, so they cannot be offered ahead.

Before parameters change, each rank waits until its peers have read everything that it offered. A pass may stay open: a
submodule was called directly, or an exception interrupted a forward. An open pass would block another engine on the
same ranks. So the next `wait_until_all_read` of any engine ends it (`_resting`).

Units are gathered in the order in which the first step called them. In the first step itself nothing is prefetched. So
a model that calls its blocks in another order than it registers them is never gathered as a whole.
"""

from __future__ import annotations

import contextlib
import weakref
from itertools import pairwise

import torch

from speedlab.comm import Group, PeerLost
from speedlab.offload import OffloadError
from speedlab.parallel.zero.comm_groups import ReadThenGathered, ZeroCommGroups
from speedlab.parallel.zero.flat_param import FlatParam
from speedlab.parallel.zero.units import Unit, UnitPhase
from speedlab.placement import MemoryKind, ZeroPolicy

_resting: dict[weakref.ref[UnshardScheduler], list[Group]] = {}
"""Open passes that may never end, with the groups on which they have offers. The groups stay listed even if the engine
is gone."""


class UnshardScheduler:
    """Gathers and releases the units of one module, in the order of a pass."""

    def __init__(self, units: list[Unit], ways: ZeroCommGroups) -> None:
        self.units = units
        """The root first, then blocks in the order in which the model registers them."""
        self.order = list(units)
        """Units in the order of a forward pass, root first. Gathers use this order; reductions use the reverse."""
        self.order_is_known = False
        self.params_unsharded_on_demand = False
        """Whether parameters have to be gathered."""
        self._offered = True
        """Whether peers can read shards from memory, so that shards are offered at the start of a pass."""
        self.current = UnitPhase.IDLE
        self.forwards = 0
        """Number of forwards with gradients so far."""
        self._group, self._groups = ways.gather, ways.of_parameters
        self._seen: list[Unit] = []
        """Units in the order in which the current or last forward with gradients called them."""
        self._left: list[Unit] = []
        """Units that this pass has not started to gather, in the order of the pass."""
        self._following: dict[Unit, Unit] = {}
        """Maps each unit to the next one of the pass, which is prefetched while the unit computes."""
        self._for_part: Unit | None = None
        """A unit that was gathered for a submodule called without its block. No hook signals the end of its use."""
        self._this: weakref.ref[UnshardScheduler] = weakref.ref(self)

    def place(self, zero_policy: ZeroPolicy) -> None:
        """Use a new policy from now on.

        Args:
            zero_policy: The policy of the flats.
        """
        self.params_unsharded_on_demand = zero_policy.params_unsharded_on_demand
        self._offered = zero_policy.parameters_at is MemoryKind.DEVICE

    @property
    def ordered(self) -> bool:
        """Whether all ranks must start all gathers in the same order."""
        return not self._offered or any(group.ordered for group in self._groups)

    @property
    def root(self) -> Unit:
        return self.units[0]

    @property
    def backward_order(self) -> list[Unit]:
        """Units in the order of backward. The root is last, because several blocks share its parameters."""
        return [*self.order[:0:-1], self.root]

    def begin(self, which: UnitPhase) -> None:
        """Start a pass, and offer the shards of all units that it will gather.

        Args:
            which: FORWARD or BACKWARD.
        """
        self.close()
        self.current, self._for_part = which, None
        for unit in self.units:
            unit.calls = 0  # Forwards that raised are over.
        if which is UnitPhase.FORWARD and torch.is_grad_enabled():
            self._seen = []
            self.forwards += 1
        if self.params_unsharded_on_demand:
            # The root comes first in both directions: it is needed at both ends of a pass.
            order = self.order if which is UnitPhase.FORWARD else [self.root, *self.order[:0:-1]]
            # All ranks keep the same units gathered, so all ranks offer the same shards.
            self._left = [unit for unit in order if unit.gathers is None]
            self._following = dict(pairwise(order))
            if self._offered:
                for flat in (each for unit in self._left for each in unit.flats):
                    flat.offer()

    def rest(self) -> None:
        """Note that the open pass may never end."""
        _resting[self._this] = list(self._groups)

    def end(self) -> None:
        """End the pass."""
        self.current = UnitPhase.IDLE
        _resting.pop(self._this, None)

    def met(self, unit: Unit) -> None:
        """Record that a forward pass called this unit.

        Args:
            unit: The unit that is called.
        """
        if self.current is UnitPhase.FORWARD and torch.is_grad_enabled() and unit not in self._seen:
            self._seen.append(unit)

    def enter(self, unit: Unit, *, alone: bool) -> None:
        """Release the unit of an earlier submodule call, because another unit is called now.

        Args:
            unit: The unit that is called.
            alone: Whether a submodule is called without its block.
        """
        if unit is self.root or self.current is not UnitPhase.FORWARD:
            return
        other, self._for_part = self._for_part, unit if alone else None
        if self.params_unsharded_on_demand and other not in (None, unit) and not self.stays(other):
            other.release()

    def require(self, unit: Unit) -> None:
        """Gather a unit, and start to prefetch the next one.

        Args:
            unit: On return, its parameters have values.

        Raises:
            OffloadError: This rank's shard cannot be read.
            PeerLost: A peer is gone.
        """
        if not self.params_unsharded_on_demand:
            return
        if unit in self._left:
            if self.ordered and self.order_is_known:
                # Take part in the gathers of skipped units, so that all ranks start the same collectives in the same
                # order.
                while self._left[0] is not unit:
                    other = self._left.pop(0)
                    other.start_gather()
                    other.release()
            self._left.remove(unit)
        unit.start_gather()
        unit.finish_gather()
        following = self._following.get(unit)
        # Prefetch the next unit, so that its transfer overlaps with the computation of this one.
        if self.order_is_known and following in self._left:
            self._left.remove(following)
            following.start_gather()

    def is_ahead(self, unit: Unit) -> bool:
        """Return whether the current pass has not started to gather the unit yet.

        Args:
            unit: The unit.
        """
        return unit in self._left

    def stays(self, unit: Unit) -> bool:
        """Return whether a forward pass leaves the unit gathered, because backward starts with it.

        Args:
            unit: The unit.
        """
        last = self.order_is_known and unit is self.order[-1]
        return torch.is_grad_enabled() and (unit is self.root or last)

    def end_forward(self) -> None:
        """End the forward pass: take part in gathers that this rank skipped, and release all units that backward does
        not need first.
        """
        self._take_rest()
        if self.params_unsharded_on_demand:
            for unit in self.units:
                if not self.stays(unit):
                    unit.release()
        self.end()

    def end_backward(self) -> None:
        """Take part in the remaining gathers, and release all units. The caller then calls `end`."""
        self._take_rest()
        self.release_all()

    def _take_rest(self) -> None:
        left, self._left = self._left, []
        for unit in left:
            if self._group.size == 1 and not self.stays(unit):
                continue  # No peer needs this rank's shard.
            unit.start_gather()
            unit.finish_gather()  # The caller may read parameters of a unit that stays gathered.
            if not (self.current is UnitPhase.FORWARD and self.stays(unit)):
                unit.release()

    def release_all(self) -> None:
        """End an open forward pass, and release all units."""
        self.close()
        self.free_all()

    def free_all(self) -> None:
        """Release all units without communication."""
        if self.params_unsharded_on_demand:
            for unit in self.units:
                unit.release()

    def leave(self, *, lost: bool) -> None:
        """Release all units when the engine ends, and withdraw the offers of an open pass.

        Args:
            lost: Whether peers are lost, so that no pending transfer will end.
        """
        for unit in self.units if self.params_unsharded_on_demand else ():
            if not (lost or unit.cut_off):
                try:
                    unit.release()
                except (PeerLost, OffloadError):  # The values are not needed any more.
                    lost = True
            if unit.gathers is not None:
                unit.forget_gather()
        if self.current is not UnitPhase.IDLE:
            self._left = []
            self.end()
            for group in self._groups:
                group.withdraw()

    def wait_until_all_read(self) -> None:
        """Wait until peers have read all offered shards of this rank."""
        _end_resting()
        for group in self._groups:
            group.wait_until_all_read()
        for flat in self._flats:
            flat.all_read()
        # Peers of this host read these shards in place, through mapped memory.
        self._group.wait_until_let_go([flat.shard for flat in self._flats if flat.is_used_in_place])

    def before_change(self) -> None:
        """Prepare for a change of the parameters: release all units, and wait for peers that still read."""
        self.release_all()
        self.wait_until_all_read()
        self.invalidate()

    def invalidate(self) -> None:
        """Mark secondary partitions as stale."""
        for flat in self._flats:
            flat.invalidate()

    @property
    def _flats(self) -> list[FlatParam]:
        return [flat for unit in self.units for flat in unit.flats]

    def close(self) -> None:
        """End an open forward pass, if any."""
        if self.current is UnitPhase.FORWARD:
            self._take_rest()
            self.end()

    def agree_on_order(self) -> None:
        """Adopt the order of units of rank 0's last forward with gradients. Collective."""
        names = [unit.name for unit in self._seen] + [unit.name for unit in self.units if unit not in self._seen]
        by_name = {unit.name: unit for unit in self.units}
        # Rank 0 decides, because ranks may have taken different branches.
        order = [by_name[name] for name in self._group.share(names)]
        self.order = [self.root, *(unit for unit in order if unit is not self.root)]
        self.order_is_known = True

    def abandon(self) -> None:
        """Clean up after an exception in a pass: release all units, and withdraw this rank's offers."""
        self._left = []
        self.end()
        for unit in self.units if self.params_unsharded_on_demand else ():
            with contextlib.suppress(OffloadError):  # The caller that needed the values already got this error.
                unit.release()
        self.release_all()
        for group in self._groups:
            group.withdraw()
        self.invalidate()  # Ranks may have filled different units before the exception.

    def abandon_alone(self) -> None:
        """Clean up as `abandon` does, but without starting a collective: the peers' engines may be gone."""
        for unit in self.units:
            if any(isinstance(pending, ReadThenGathered) for pending in unit.gathers or ()):
                unit.forget_gather()
        self.abandon()

    def forget(self) -> None:
        """Drop the pass after the world was left, because no pending transfer will end."""
        for unit in self.units:
            unit.forget_calls()
            unit.forget_gather()
        self.invalidate()
        self._left = []
        self.end()


def _end_resting() -> None:
    for this, groups in list(_resting.items()):
        gathers = this()
        with contextlib.suppress(PeerLost, OffloadError):  # The values are not needed any more.
            if gathers is not None:
                gathers.abandon_alone()
            for group in groups:
                group.withdraw()
        _resting.pop(this, None)
