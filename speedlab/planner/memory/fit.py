"""Check whether a run fits its ranks: the predicted peak of each rank and its capacity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from speedlab.config import RunConfig
from speedlab.planner.formulas import parameter_count
from speedlab.planner.memory.activation_sizes import Device
from speedlab.planner.memory.predict import memory_by_rank, predict_memory
from speedlab.planner.memory.rank_memory import RankMemory
from speedlab.planner.setup import Setup


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Predicted peak and capacity of each rank, both by rank."""

    memory: tuple[RankMemory, ...]
    capacity_bytes: tuple[int, ...]

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Predicted peak of each rank, in bytes."""
        return tuple(memory.total for memory in self.memory)

    @property
    def tightest(self) -> int:
        """The rank with the least free (or the most missing) memory; the first one on a tie."""
        left = [capacity - peak for peak, capacity in zip(self.peak_bytes, self.capacity_bytes, strict=True)]
        return left.index(min(left))

    @property
    def fits(self) -> bool:
        """Whether no rank exceeds its capacity."""
        return self.peak_bytes[self.tightest] <= self.capacity_bytes[self.tightest]


def predicted_peaks(
    config: RunConfig,
    world_size: int,
    *,
    capacity_bytes: Sequence[int],
    dtype: Literal["float32", "bfloat16", "float16"],
    device: Device,
    alongside_bytes: Sequence[int] = (),
    parameters: int | None = None,
) -> Peaks | None:
    """Return the predicted peaks of `config`, or None for a model that is not the built-in GPT.

    For other models only the states (`rank_states`) and the ledgers of past steps are known. Stages that are balanced
    by time are predicted like stages that are balanced by parameters.

    Args:
        config: a run's configuration.
        world_size: number of ranks.
        capacity_bytes: capacity of each rank.
        dtype: the configuration's precision, resolved for the device.
        device: count activations and buffers like a GPU's allocator, or like the engine's trace on CPUs.
        beside_bytes: for each rank the bytes of its process outside tensors, from its ledger; empty if unknown.
        parameters: counted parameters of the whole model; None: the model is the built-in GPT.

    Raises:
        ValueError: a sequence does not have one number for each rank.
        LayoutError: the layout does not fit the ranks.
        ConfigError: the batch does not fit the layout.
    """
    for name, values in (("capacity_bytes", capacity_bytes), ("beside_bytes", alongside_bytes)):
        if len(values) != world_size and (values or name == "capacity_bytes"):
            raise ValueError(f"{name} has {len(values)} numbers for {world_size} ranks; give one for each rank")
    if parameters is not None and parameters != parameter_count(config.model):
        return None
    setup = Setup.of_config(config, world_size, dtype=dtype)
    held = memory_by_rank(setup, predict_memory(setup, device=device))
    if alongside_bytes:
        held = [
            replace(rank, outside_framework=alongside) for rank, alongside in zip(held, alongside_bytes, strict=True)
        ]
    return Peaks(memory=tuple(held), capacity_bytes=tuple(capacity_bytes))
