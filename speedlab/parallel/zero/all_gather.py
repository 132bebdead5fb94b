"""When units with partitioned parameters are gathered and released.

Every pass gathers every unit once. Where transfers are offered by their owners (`Group.ordered` is False), a rank takes
a unit when it needs it, and those that it did not need at the end of the pass; so ranks may take different branches. A
collective of its own for each gather has to be started in one order by all: there a rank takes part in the gathers that
come before the unit it needs, and lets go of them at once.

Parameters that lie away from the device are read before they are sent, so that nothing can be offered ahead: there,
too, each gather is a collective of its own.

Peers wait, before parameters change, until all that they offered was taken. A pass that nobody ends (a forward that was
entered below the root, or that an exception has left) would hold up whoever else trains on the same ranks: there it is
over (`_resting`).

The order is that in which the first step met the units. Until it is known, units are gathered when they are needed and
nothing is gathered ahead, so that a model which calls its blocks in another order than it registers them never stands
there whole.
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
"""Passes that are open and may never be ended, with the groups over which they have offers: these count though the
engine is gone."""


class UnshardScheduler:
    """The units of a module in the order of a forward pass, and which of them are here."""

    def __init__(self, units: list[Unit], ways: ZeroCommGroups) -> None:
        self.units = units
        """The root first, then in the order in which the model registers them."""
        self.order = list(units)
        """In the order of a forward pass, the root first: the order of gathers; reductions go the other way."""
        self.order_is_known = False
        self.params_unsharded_on_demand = False
        """Whether there is anything to gather."""
        self._offered = True
        """Whether shards lie where peers can take them, so that they are offered at the start of a pass."""
        self.current = UnitPhase.IDLE
        self.forwards = 0
        """Forwards with gradients that have begun."""
        self._group, self._groups = ways.gather, ways.of_parameters
        self._seen: list[Unit] = []
        """Units in the order in which the present or last forward pass with gradients met them."""
        self._left: list[Unit] = []
        """Units whose gather of this pass has not been started, in the order of the pass."""
        self._following: dict[Unit, Unit] = {}
        """The unit behind each in the present pass: its gather is started while that one computes."""
        self._for_part: Unit | None = None
        """Came in this pass for a part that was called without its block, after which nothing tells that it may go."""
        self._this: weakref.ref[UnshardScheduler] = weakref.ref(self)

    def place(self, zero_policy: ZeroPolicy) -> None:
        """Parameters are where `zero_policy` says from now on."""
        self.params_unsharded_on_demand = zero_policy.params_unsharded_on_demand
        self._offered = zero_policy.parameters_at is MemoryKind.DEVICE

    @property
    def ordered(self) -> bool:
        """Whether every gather is one that all ranks start in one order."""
        return not self._offered or any(group.ordered for group in self._groups)

    @property
    def root(self) -> Unit:
        return self.units[0]

    @property
    def backward_order(self) -> list[Unit]:
        """Blocks as backward meets them; the root last, because it holds what several blocks share."""
        return [*self.order[:0:-1], self.root]

    def begin(self, which: UnitPhase) -> None:
        self.close()
        self.current, self._for_part = which, None
        for unit in self.units:
            unit.calls = 0  # Whatever has raised is over.
        if which is UnitPhase.FORWARD and torch.is_grad_enabled():
            self._seen = []
            self.forwards += 1
        if self.params_unsharded_on_demand:
            # The root comes first in both directions: it is needed at both ends of a pass.
            order = self.order if which is UnitPhase.FORWARD else [self.root, *self.order[:0:-1]]
            # What stays gathered does so on all ranks, so all offer the same.
            self._left = [unit for unit in order if unit.gathers is None]
            self._following = dict(pairwise(order))
            if self._offered:
                for flat in (each for unit in self._left for each in unit.flats):
                    flat.offer()

    def rest(self) -> None:
        """The pass that is open may never be ended."""
        _resting[self._this] = list(self._groups)

    def end(self) -> None:
        """The pass is over."""
        self.current = UnitPhase.IDLE
        _resting.pop(self._this, None)

    def met(self, unit: Unit) -> None:
        """A forward pass has come to this unit."""
        if self.current is UnitPhase.FORWARD and torch.is_grad_enabled() and unit not in self._seen:
            self._seen.append(unit)

    def enter(self, unit: Unit, *, alone: bool) -> None:
        """A block of the unit is called now, or a part of one `alone`: what came for a part of another unit may go."""
        if unit is self.root or self.current is not UnitPhase.FORWARD:
            return
        other, self._for_part = self._for_part, unit if alone else None
        if self.params_unsharded_on_demand and other not in (None, unit) and not self.stays(other):
            other.release()

    def require(self, unit: Unit) -> None:
        """The unit's parameters are there when this returns; the next unit's are on their way."""
        if not self.params_unsharded_on_demand:
            return
        if unit in self._left:
            if self.ordered and self.order_is_known:
                while self._left[0] is not unit:
                    other = self._left.pop(0)
                    other.start_gather()
                    other.release()
            self._left.remove(unit)
        unit.start_gather()
        unit.finish_gather()
        following = self._following.get(unit)
        if self.order_is_known and following in self._left:
            self._left.remove(following)
            following.start_gather()

    def is_ahead(self, unit: Unit) -> bool:
        """Return whether the present pass has not reached the unit yet."""
        return unit in self._left

    def stays(self, unit: Unit) -> bool:
        """Whether a forward pass leaves the unit gathered, because backward begins with it."""
        last = self.order_is_known and unit is self.order[-1]
        return torch.is_grad_enabled() and (unit is self.root or last)

    def end_forward(self) -> None:
        """The root module has returned: take part in the gathers that this rank skipped, and release what backward
        does not need first."""
        self._take_rest()
        if self.params_unsharded_on_demand:
            for unit in self.units:
                if not self.stays(unit):
                    unit.release()
        self.end()

    def end_backward(self) -> None:
        """Take part in what is left, and release everything. Whoever called this calls `end`."""
        self._take_rest()
        self.release_all()

    def _take_rest(self) -> None:
        left, self._left = self._left, []
        for unit in left:
            if self._group.size == 1 and not self.stays(unit):
                continue  # Nobody waits for this rank's part.
            unit.start_gather()
            unit.finish_gather()  # Whoever looks at one that stays shall see its values.
            if not (self.current is UnitPhase.FORWARD and self.stays(unit)):
                unit.release()

    def release_all(self) -> None:
        """Nothing stays gathered, and a pass that somebody entered below the root and never ended is over."""
        self.close()
        self.free_all()

    def free_all(self) -> None:
        """Release what is here, and speak to nobody."""
        if self.params_unsharded_on_demand:
            for unit in self.units:
                unit.release()

    def leave(self, *, lost: bool) -> None:
        """The last word: release what is here. Of a pass that an exception in the bare module has left open, peers wait
        for nothing of this rank any more. `lost`: nothing comes from peers any more."""
        for unit in self.units if self.params_unsharded_on_demand else ():
            if not (lost or unit.cut_off):
                try:
                    unit.release()
                except (PeerLost, OffloadError):  # Nobody needs the values.
                    lost = True
            if unit.gathers is not None:
                unit.forget_gather()
        if self.current is not UnitPhase.IDLE:
            self._left = []
            self.end()
            for group in self._groups:
                group.withdraw()

    def wait_until_all_read(self) -> None:
        """Wait until peers need nothing more of this rank's parameters."""
        _end_resting()
        for group in self._groups:
            group.wait_until_all_read()
        for flat in self._flats:
            flat.all_read()
        self._group.wait_until_let_go([flat.shard for flat in self._flats if flat.is_used_in_place])

    def before_change(self) -> None:
        """Parameters are about to change."""
        self.release_all()
        self.wait_until_all_read()
        self.invalidate()

    def invalidate(self) -> None:
        """What ranks hold beside their shards is not to be used any more."""
        for flat in self._flats:
            flat.invalidate()

    @property
    def _flats(self) -> list[FlatParam]:
        return [flat for unit in self.units for flat in unit.flats]

    def close(self) -> None:
        if self.current is UnitPhase.FORWARD:
            self._take_rest()
            self.end()

    def agree_on_order(self) -> None:
        """Adopt the order in which rank 0's last forward pass with gradients met the units. Collective."""
        names = [unit.name for unit in self._seen] + [unit.name for unit in self.units if unit not in self._seen]
        by_name = {unit.name: unit for unit in self.units}
        order = [by_name[name] for name in self._group.share(names)]
        self.order = [self.root, *(unit for unit in order if unit is not self.root)]
        self.order_is_known = True

    def abandon(self) -> None:
        """After an exception in a pass: release everything and count on no offer of it."""
        self._left = []
        self.end()
        for unit in self.units if self.params_unsharded_on_demand else ():
            with contextlib.suppress(OffloadError):  # Whoever needed the values has been told.
                unit.release()
        self.release_all()
        for group in self._groups:
            group.withdraw()
        self.invalidate()  # Ranks may have come to the exception with other units filled.

    def abandon_alone(self) -> None:
        """As `abandon`, where other ranks' engine may be gone: no collective is begun."""
        for unit in self.units:
            if any(isinstance(pending, ReadThenGathered) for pending in unit.gathers or ()):
                unit.forget_gather()
        self.abandon()

    def forget(self) -> None:
        """After the world was left in the middle of a pass: nothing arrives any more."""
        for unit in self.units:
            unit.forget_calls()
            unit.forget_gather()
        self.invalidate()
        self._left = []
        self.end()


def _end_resting() -> None:
    for this, groups in list(_resting.items()):
        gathers = this()
        with contextlib.suppress(PeerLost, OffloadError):  # Nobody needs what does not come.
            if gathers is not None:
                gathers.abandon_alone()
            for group in groups:
                group.withdraw()
        _resting.pop(this, None)
