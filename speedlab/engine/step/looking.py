"""Looking at what a rank holds: the ledger, and an exact trace of activations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from speedlab.engine.step.memory import (
    PeakMemory,
    activation_trace,
    known_storages,
    make_ledger,
    measure_away,
    measure_states,
)
from speedlab.engine.step.state import TrainingState
from speedlab.placement import Where
from speedlab.telemetry.records import Ledger


class Looking:
    """The memory of one rank, and what was last measured of its activations."""

    def __init__(self, state: TrainingState, *, outside_bytes: int) -> None:
        """`outside_bytes`: what the process held before the engine was built."""
        self._state, self._outside_bytes = state, outside_bytes
        self._peak = PeakMemory(state.world.device)
        self._activation_bytes = 0

    @contextmanager
    def trace_activations(self) -> Iterator[None]:
        """Measure the activations of what is done inside exactly; it is slower. Later ledgers carry the figure on."""

        def known() -> set[int]:
            state = self._state
            lent = [buffer for group in state.mesh.groups for buffer in group.idle_buffers]
            # On CPUs what the host keeps is used where it is, and no activation either.
            away = state.stores.in_memory
            return known_storages([*state.buffers, *lent, *away], state.flats, state.partitioned_optimizer)

        def follows() -> bool:  # What an optimizer makes in its first step are moments.
            traffic = self._state.traffic
            return traffic.phase != "optimizer" and not traffic.encoding

        with activation_trace(known, follows) as trace:
            yield
        self._activation_bytes = trace.peak_bytes

    def ledger(self) -> Ledger:
        """Bytes by category at the peak since the last call."""
        state = self._state
        away = {where: measure_away(state.zeros, where) for where in state.stores.made}
        if staging := state.stores.take_staging_peak():
            away.setdefault(Where.HOST, {})["communication_buffers"] = staging
        return make_ledger(
            measure_states(state.buffers, state.zeros, state.partitioned_optimizer),
            activations=self._activation_bytes,
            buffers=state.traffic.buffers.take_peak(),
            peak=self._peak.take(),
            outside=self._outside_bytes,
            device=state.world.device,
            away=away,
            capacities={where: store.capacity_bytes for where, store in state.stores.made.items() if away[where]},
        )

    def start_anew(self) -> None:
        """Peaks of before count no more."""
        self._peak.take()
