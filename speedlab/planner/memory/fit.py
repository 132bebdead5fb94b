"""Whether a run fits the ranks that it has: what each is predicted to hold at the peak of a step, and its capacity."""

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
    """What each rank would hold at the peak of a step, and what it can hold; both by rank."""

    memory: tuple[RankMemory, ...]
    capacity_bytes: tuple[int, ...]

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        return tuple(memory.total for memory in self.memory)

    @property
    def tightest(self) -> int:
        """The rank with the least left, or the most missing; the first of several."""
        left = [capacity - peak for peak, capacity in zip(self.peak_bytes, self.capacity_bytes, strict=True)]
        return left.index(min(left))

    @property
    def fits(self) -> bool:
        """Whether no rank would hold more than it can."""
        return self.peak_bytes[self.tightest] <= self.capacity_bytes[self.tightest]


def predicted_peaks(
    config: RunConfig,
    world_size: int,
    *,
    capacity_bytes: Sequence[int],
    dtype: Literal["float32", "bfloat16", "float16"],
    device: Device,
    beside_bytes: Sequence[int] = (),
    parameters: int | None = None,
) -> Peaks | None:
    """The peaks of `config` on so many ranks; None where they cannot be predicted, because the model is the user's own.
    Then what is known of such a model is its states (`rank_states`) and what its ranks held until now (their ledgers).

    Args:
        capacity_bytes: of each rank.
        dtype: the configuration's precision, resolved for the device.
        device: activations and buffers as a GPU's allocator counts them, or as the engine's trace does on CPUs.
        beside_bytes: of each rank, what its process holds beside tensors, as its ledger says; empty: nothing is known.
        parameters: of the whole model, as they were counted; None: the model is the configuration's GPT.

    Stages that are balanced by time are predicted as those that are balanced by parameters.
    Raises LayoutError or ConfigError when there is no such run.
    """
    for name, values in (("capacity_bytes", capacity_bytes), ("beside_bytes", beside_bytes)):
        if len(values) != world_size and (values or name == "capacity_bytes"):
            raise ValueError(f"{name} has {len(values)} numbers for {world_size} ranks; give one for each rank")
    if parameters is not None and parameters != parameter_count(config.model):
        return None
    setup = Setup.of_config(config, world_size, dtype=dtype)
    held = memory_by_rank(setup, predict_memory(setup, device=device))
    if beside_bytes:
        held = [replace(rank, outside_framework=beside) for rank, beside in zip(held, beside_bytes, strict=True)]
    return Peaks(memory=tuple(held), capacity_bytes=tuple(capacity_bytes))
