"""What a rank holds at the peak of a step, under the ledger's names. No torch."""

from __future__ import annotations

from dataclasses import dataclass, fields

CATEGORIES = (
    "parameters",
    "gradients",
    "master_weights",
    "optimizer_moments",
    "activations",
    "communication_buffers",
    "other_framework",
    "outside_framework",
)
"""Those of `telemetry.records.Ledger`."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of one rank at the peak of a step, under the ledger's names. `ranks` are as many that hold the same."""

    pipeline: int = 0
    tensor: int = 0
    ranks: int = 1
    parameters: int = 0
    gradients: int = 0
    master_weights: int = 0
    optimizer_moments: int = 0
    activations: int = 0
    communication_buffers: int = 0
    other_framework: int = 0
    outside_framework: int = 0
    host: int = 0
    """In the host's memory, where something is offloaded to it."""

    @property
    def model_states(self) -> int:
        """Parameters, gradients, master weights and moments on the device."""
        return self.parameters + self.gradients + self.master_weights + self.optimizer_moments

    @property
    def counted(self) -> int:
        """What torch's tensors take: model states, activations, communication buffers."""
        return self.model_states + self.activations + self.communication_buffers

    @property
    def total(self) -> int:
        return self.counted + self.other_framework + self.outside_framework

    def by_category(self) -> dict[str, int]:
        """Category → bytes, in the ledger's order."""
        return {name: getattr(self, name) for name in CATEGORIES}


assert {field.name for field in fields(RankMemory)} > set(CATEGORIES)
