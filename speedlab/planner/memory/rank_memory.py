"""What a rank holds at the peak of a step, in each place, under the ledger's names. No torch.

Model states of each rank of a run: its layout, its stage, how its gradients are summed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from speedlab.config import RunConfig
from speedlab.layout import Layout
from speedlab.placement import Replication
from speedlab.planner.formulas import ModelStates, model_states, parameter_count, rank_parameters, stage_blocks

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
    host: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Category -> bytes in the host's memory; buffers there are those through which states on disk pass."""
    disk: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Category -> bytes on disk."""
    one_memory: bool = False
    """Whether the host's memory is the device's, as for a rank on CPU cores."""

    @property
    def model_states(self) -> int:
        """Parameters, gradients, master weights and moments on the device."""
        return self.parameters + self.gradients + self.master_weights + self.optimizer_moments

    @property
    def counted(self) -> int:
        """What torch's tensors take on the device: model states, activations, communication buffers."""
        return self.model_states + self.activations + self.communication_buffers

    @property
    def host_bytes(self) -> int:
        """In the host's memory, beside what a rank on CPU cores computes with."""
        return sum(self.host.values())

    @property
    def disk_bytes(self) -> int:
        return sum(self.disk.values())

    @property
    def total(self) -> int:
        """Of the device's memory, which on CPU cores is the host's too."""
        device = self.counted + self.other_framework + self.outside_framework
        return device + self.host_bytes if self.one_memory else device

    def by_category(self) -> dict[str, int]:
        """Category → bytes on the device, in the ledger's order."""
        return {name: getattr(self, name) for name in CATEGORIES}

    def by_place(self) -> dict[str, dict[str, int]]:
        """Place (device, host, disk) → category → bytes, in the ledger's order; places where something lies."""
        away = {"host": self.host, "disk": self.disk}
        ordered = {place: {name: held[name] for name in CATEGORIES if held.get(name)} for place, held in away.items()}
        return {"device": self.by_category()} | {place: held for place, held in ordered.items() if held}


assert {field.name for field in fields(RankMemory)} > set(CATEGORIES)


_FLOAT32_BYTES = 4


def parameters_by_rank(config: RunConfig, layout: Layout, *, whole: int | None = None) -> list[int]:
    """Parameters that each rank computes with. `whole`: of a model that is not the configuration's GPT, whose ranks are
    taken to hold equal shares."""
    if whole is not None and whole != parameter_count(config.model):
        return [-(-whole // (layout.pp * layout.tp))] * layout.world_size
    counts = config.parallel.cut or stage_blocks(config.model, layout.pp * config.parallel.stages_per_rank)
    return rank_parameters(config.model, layout, counts)


def rank_states(
    config: RunConfig, layout: Layout, parameters: Sequence[int], *, stage: int, dtype: str
) -> list[ModelStates]:
    """Model states at `stage` on each rank that computes with so many `parameters`: what it keeps between two passes.

    Gradients of several micro-batches are summed in float32. What islands keep between meetings counts with them.
    """
    several = config.batch.resolve(layout.data_size).accumulation > 1
    sums = dtype != "float32" and several and not config.optimizer.sums_itself  # Whose gradients always are.
    found = []
    for count in parameters:
        state = model_states(count, dp=layout.replicas, stage=stage, dtype=dtype, optimizer=config.optimizer)
        gradients = (2 if sums else 1) * state.gradients
        if layout.islands > 1:
            gradients += _FLOAT32_BYTES * config.outer.states * Replication.OWN_PART.share(count, layout.replicas)
        found.append(replace(state, gradients=gradients))
    return found
