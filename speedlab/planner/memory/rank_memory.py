"""Describe the memory of a rank at the peak of a step, and compute the model states of each rank of a run. No torch."""

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
"""The categories of `telemetry.records.Ledger`."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of one rank at the peak of a step, by ledger category and place. `ranks` is the number of equal ranks."""

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
    """Category -> bytes in host memory. Buffers here are the staging buffers of states on disk."""
    disk: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Category -> bytes on disk."""
    one_memory: bool = False
    """Whether host and device share one memory, as for a rank on CPU cores."""

    @property
    def model_states(self) -> int:
        """Bytes of parameters, gradients, master weights and moments on the device."""
        return self.parameters + self.gradients + self.master_weights + self.optimizer_moments

    @property
    def counted(self) -> int:
        """Bytes of torch's tensors on the device: model states, activations, communication buffers."""
        return self.model_states + self.activations + self.communication_buffers

    @property
    def host_bytes(self) -> int:
        """Bytes of offloaded states in host memory (for a rank on CPU cores, without its compute memory)."""
        return sum(self.host.values())

    @property
    def disk_bytes(self) -> int:
        """Bytes of states on disk."""
        return sum(self.disk.values())

    @property
    def total(self) -> int:
        """Bytes of device memory; on CPU cores with those of the host, which is the same memory."""
        device = self.counted + self.other_framework + self.outside_framework
        return device + self.host_bytes if self.one_memory else device

    def by_category(self) -> dict[str, int]:
        """Return category -> bytes on the device, in the ledger's order."""
        return {name: getattr(self, name) for name in CATEGORIES}

    def by_place(self) -> dict[str, dict[str, int]]:
        """Return place (device, host, disk) -> category -> bytes, in the ledger's order, without unused places."""
        away = {"host": self.host, "disk": self.disk}
        ordered = {place: {name: held[name] for name in CATEGORIES if held.get(name)} for place, held in away.items()}
        return {"device": self.by_category()} | {place: held for place, held in ordered.items() if held}


assert {field.name for field in fields(RankMemory)} > set(CATEGORIES)


_FLOAT32_BYTES = 4


def parameters_by_rank(config: RunConfig, layout: Layout, *, whole: int | None = None) -> list[int]:
    """Return the parameters that each rank computes with.

    Args:
        config: a run's configuration.
        layout: its ranks.
        whole: parameters of the whole model. If they are not those of the built-in GPT, the ranks are assumed to have
            equal shares.
    """
    if whole is not None and whole != parameter_count(config.model):
        return [-(-whole // (layout.pp * layout.tp))] * layout.world_size
    counts = config.parallel.cut or stage_blocks(config.model, layout.pp * config.parallel.stages_per_rank)
    return rank_parameters(config.model, layout, counts)


def rank_states(
    config: RunConfig, layout: Layout, parameters: Sequence[int], *, stage: int, dtype: str
) -> list[ModelStates]:
    """Return the model states of each rank between two passes.

    Gradients of several micro-batches are summed in float32. The states of islands between meetings count as gradients.

    Args:
        config: a run's configuration.
        layout: its ranks.
        parameters: parameters that each rank computes with, by rank.
        stage: ZeRO stage, 0 to 3.
        dtype: compute dtype, not "auto".
    """
    several = config.batch.resolve(layout.data_size).accumulation > 1
    sums = dtype != "float32" and several and not config.optimizer.sums_itself  # Those always sum in float32.
    found = []
    for count in parameters:
        state = model_states(count, dp=layout.replicas, stage=stage, dtype=dtype, optimizer=config.optimizer)
        gradients = (2 if sums else 1) * state.gradients
        if layout.islands > 1:
            gradients += _FLOAT32_BYTES * config.outer.states * Replication.OWN_PART.share(count, layout.replicas)
        found.append(replace(state, gradients=gradients))
    return found
