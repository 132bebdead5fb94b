"""Whether a step waits for the disk that holds states: measured in the first steps of a run, said once, and allowed."""

from __future__ import annotations

from speedlab.config import OffloadConfig
from speedlab.engine.step.clock import StepCosts
from speedlab.planner.offload_time import LIMITING_SHARE

_PASSED_BY, _MEASURED = 1, 3
"""Steps: the first makes the files, learns what comes after what and is traced; so many behind it are measured."""


class SlowDisk:
    """Looks at the steps of one rank, anew after each change of where states lie."""

    def __init__(self) -> None:
        self._offload: OffloadConfig | None = None
        self._steps = 0
        self._seconds = self._waited = 0.0

    def after_step(self, offload: OffloadConfig, costs: StepCosts) -> str:
        """What is to be said after a step under `offload`: '' unless it is the one that ends the measurement, and the
        disk limits. Waits for the host's memory count with the disk's, where states lie in both."""
        if offload != self._offload:
            self._offload, self._steps, self._seconds, self._waited = offload, 0, 0.0, 0.0
        self._steps += 1
        if "disk" not in (offload.optimizer, offload.parameters) or self._steps <= _PASSED_BY:
            return ""
        self._seconds += costs.seconds
        self._waited += costs.phases.get("offload", 0.0)
        if self._steps != _PASSED_BY + _MEASURED or self._waited < LIMITING_SHARE * self._seconds:
            return ""
        host = "the host and " if "host" in (offload.optimizer, offload.parameters) else ""
        return (
            f"offload: steps wait {self._waited / _MEASURED:.2g} s of {self._seconds / _MEASURED:.2g} s "
            f"({self._waited / self._seconds:.0%}, measured) for {host}the disk with states, which limits them; the "
            "run goes on. Larger micro-batches, offload.folder on a faster disk, or offload.optimizer 'host' would "
            "wait less"
        )
