"""What each step of 0/1 Adam does, by its number from 1 on (arXiv:2202.06009, section 6)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What travels in a step."""

    WHOLE = "gradients, whole; the variance is updated"
    SIGNS = "signs of the momenta of all steps since the last exchange"
    NOTHING = "nothing: a step of each rank's own"


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Of a run."""

    freeze_step: int | None
    """The last step that may update the variance; None: it always may."""
    variance_doubling: int
    """How often the variance is updated before the distance of these updates doubles."""
    local_doubling: int
    """Steps behind `freeze_step` before the distance of exchanges doubles."""
    max_local_steps: int
    """The largest distance of exchanges."""

    @property
    def plain(self) -> int:
        """The steps at the beginning that are all WHOLE."""
        return self.variance_doubling if self.freeze_step is None else min(self.freeze_step, self.variance_doubling)

    def kind(self, step: int) -> Kind:
        """Of step `step`, counted from 1."""
        if self.freeze_step is None or step <= self.freeze_step:
            return Kind.WHOLE if self._updates_variance(step) else Kind.SIGNS
        return Kind.NOTHING if step % self.distance(step) else Kind.SIGNS

    def distance(self, step: int) -> int:
        """Of exchanges, around step `step`."""
        if self.freeze_step is None or step <= self.freeze_step:
            return 1
        doublings = min((step - self.freeze_step - 1) // self.local_doubling, self.max_local_steps.bit_length())
        return min(self.max_local_steps, 2**doublings)

    def to_exchange(self, step: int) -> int:
        """Steps behind `step` until signs travel the next time."""
        found = step + 1
        while self.kind(found) is not Kind.SIGNS:
            found += 1
        return found - step

    def _updates_variance(self, step: int) -> bool:
        """At multiples of a distance that is 1 at first, and doubles behind so many of them."""
        distance, behind = 1, 0
        while True:
            first = behind // distance + 1
            behind = distance * (first + self.variance_doubling - 1)
            if step <= behind:
                return step % distance == 0
            distance *= 2
