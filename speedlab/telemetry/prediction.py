"""The planner's prediction of a run, in the form that plots need. Plots show it next to the measured values."""

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
from speedlab.telemetry.current_config import layout_in, present_config, shape_after
from speedlab.telemetry.records import Event, Ledger


@dataclass(frozen=True, kw_only=True)
class RunPrediction:
    """Predicted memory of each rank in the present shape, and the speed in each shape that the run has had."""

    memory: Sequence[RankMemory]
    """By rank."""
    speeds: tuple[tuple[int, float], ...]
    """(last step before the shape, tokens/s), in order."""
    note: str = ""
    """A remark such as '(not yet calibrated)'."""

    def tokens_per_second(self, steps: np.ndarray) -> np.ndarray:
        """Return the (n,) predicted tokens/s.

        Args:
            steps: (n,) steps.
        """
        after = np.array([step for step, _ in self.speeds])
        found = np.maximum(np.searchsorted(after, steps, side="left") - 1, 0)
        return np.array([speed for _, speed in self.speeds])[found]

    def counted(self, rank: int) -> int:
        """Return the predicted bytes of tensors on a rank: model states, activations, buffers; 0 for an unknown rank.

        Args:
            rank: The rank.
        """
        return self.memory[rank].counted if rank < len(self.memory) else 0

    def model_states(self, rank: int) -> int:
        """Return the predicted bytes of model states on a rank; 0 for an unknown rank.

        Args:
            rank: The rank.
        """
        return self.memory[rank].model_states if rank < len(self.memory) else 0


def counted(ledger: Ledger) -> int:
    """Return the measured bytes of tensors, which `RunPrediction.counted` predicts.

    Args:
        ledger: The ledger of a rank.
    """
    return ledger.model_states + ledger.activations + ledger.communication_buffers


def prediction_of(config: RunConfig, events: Sequence[Event], devices: Sequence[Device]) -> RunPrediction | None:
    """Return the prediction for a run, from its configuration and its events.

    Args:
        config: The configuration at the start of the run.
        events: Events of the run, oldest first.
        devices: Devices by rank.

    Returns:
        None if a prediction is not possible: the run has not started, its model is not the built-in GPT, its devices
        are unknown, or another version wrote the events.
    """
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
            # The devices of another world size are unknown: assume the first device for each rank.
            here = list(devices) if len(devices) == size else [devices[0]] * size
            setup = Setup.of_config(present_config(config, changes[:number], size), size, dtype=dtype)
            hardware = hardware_here(here, dtype, config.offload.folder or config.folder)
            if "pretended_link" in said:
                hardware = hardware.over(pretended(**said["pretended_link"]))
            speeds.append((changes[number - 1].step if number else 0, hardware.time(setup).tokens_per_second))
    except (KeyError, TypeError, ValueError):  # Events of another version.
        return None
    assert setup is not None
    assert hardware is not None
    return RunPrediction(memory=hardware.by_rank(setup), speeds=tuple(speeds), note=hardware.note)


def error_text(predicted: float, measured: float) -> str:
    """Return '3 % more than measured' or '4.5 times what was measured'; '' if nothing was measured or a value is not
    finite.

    Args:
        predicted: The predicted value.
        measured: The measured value, in the same unit.
    """
    times = predicted / measured if measured > 0 else math.nan
    if not math.isfinite(times):
        return ""
    off = round(100 * (times - 1))
    if off >= 100:
        return f"{times:.2g} times what was measured" if times < 99 else f"{times:,.0f} times what was measured"
    return f"{abs(off)} % {'more' if off > 0 else 'less'} than measured" if off else "as measured"
