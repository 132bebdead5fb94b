"""What the planner said of a run, to be drawn beside what was measured. A miss is shown like a hit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from speedlab.config import RunConfig
from speedlab.hardware import Device
from speedlab.planner import parameter_count
from speedlab.planner.hardware.links import pretended
from speedlab.planner.hardware.local import hardware_here
from speedlab.planner.memory.rank_memory import RankMemory
from speedlab.planner.setup import Setup
from speedlab.telemetry.records import Event, Ledger
from speedlab.telemetry.run_shape import layout_in, present_config, shape_after


@dataclass(frozen=True, kw_only=True)
class RunPrediction:
    """Memory of each rank in the present shape, and the speed in each shape that the run has had."""

    memory: Sequence[RankMemory]
    """By rank."""
    speeds: tuple[tuple[int, float], ...]
    """(step after which the shape was so, tokens/s), in order."""
    note: str = ""
    """'(not yet calibrated)'."""

    def tokens_per_second(self, steps: np.ndarray) -> np.ndarray:
        """(n,) what was predicted for each of `steps`."""
        after = np.array([step for step, _ in self.speeds])
        found = np.maximum(np.searchsorted(after, steps, side="left") - 1, 0)
        return np.array([speed for _, speed in self.speeds])[found]

    def counted(self, rank: int) -> int:
        """Bytes of tensors on a rank: model states, activations, buffers; 0 for a rank that is not known."""
        return self.memory[rank].counted if rank < len(self.memory) else 0

    def model_states(self, rank: int) -> int:
        return self.memory[rank].model_states if rank < len(self.memory) else 0


def counted(ledger: Ledger) -> int:
    """Bytes of tensors as they were measured: what `RunPrediction.counted` predicts."""
    return ledger.model_states + ledger.activations + ledger.communication_buffers


def prediction_of(config: RunConfig, events: Sequence[Event], devices: Sequence[Device]) -> RunPrediction | None:
    """What is predicted for a run that began as `config`, from what its events tell of it; None where there is nothing
    to go by: it has not begun, its model is not the built-in GPT, or its devices are not known."""
    said = next((event.details for event in events if event.kind == "started"), None)
    if said is None or not devices or said.get("parameters") != parameter_count(config.model):
        return None
    changes = [event for event in events if event.kind == "reshaped"]
    try:
        dtype = said["dtype"]
        shapes = [said, *(shape_after(event) for event in changes)]
        speeds, setup, hardware = [], None, None
        size = 1
        for number, shape in enumerate(shapes):
            layout = layout_in(shape)
            size = size if layout is None else layout.world_size
            here = list(devices) if len(devices) == size else [devices[0]] * size
            setup = Setup.of_config(present_config(config, changes[:number], size), size, dtype=dtype)
            hardware = hardware_here(here, dtype, config.offload.folder or config.folder)
            if "pretended_link" in said:
                hardware = hardware.over(pretended(**said["pretended_link"]))
            speeds.append((changes[number - 1].step if number else 0, hardware.time(setup).tokens_per_second))
    except (KeyError, TypeError, ValueError):  # Of another version; nothing to go by.
        return None
    assert setup is not None
    assert hardware is not None
    return RunPrediction(memory=hardware.by_rank(setup), speeds=tuple(speeds), note=hardware.note)


def error_text(predicted: float, measured: float) -> str:
    """'3 % more than measured', '4.5 times what was measured': how far the prediction lies from that; '' where nothing
    was, or what is no number."""
    times = predicted / measured if measured > 0 else math.nan
    if not math.isfinite(times):
        return ""
    off = round(100 * (times - 1))
    if off >= 100:
        return f"{times:.2g} times what was measured" if times < 99 else f"{times:,.0f} times what was measured"
    return f"{abs(off)} % {'more' if off > 0 else 'less'} than measured" if off else "as measured"
