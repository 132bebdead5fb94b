"""List the parts of an estimate that no measurement has validated. No torch.

Times are compared with published runs and with measurements of this machine (`speedlab.planner.time`). Memory is
compared with the engine itself, over the grid of `bench planner`.
"""

from __future__ import annotations

from speedlab.planner.setup import Setup
from speedlab.planner.time.step_time import StepTime

_MOST_PUBLISHED = 16_384
"""Devices of the largest published run in the comparison of times."""


def caution(time: StepTime) -> str:
    """Return the parts of a prediction that no measurement has validated.

    Args:
        time: the predicted time, with its set-up.

    Returns:
        The text; empty if everything was validated.
    """
    doubts = [time.caution, *_memory_doubts(time.setup)]
    devices = time.setup.layout.world_size
    if devices > _MOST_PUBLISHED:
        doubts.append(f"{devices:,} devices are more than any run that was compared ({_MOST_PUBLISHED:,})")
    return "; ".join(doubt for doubt in doubts if doubt)


def _memory_doubts(setup: Setup) -> list[str]:
    shape = setup.shape
    if shape.decoder_layers:
        return ["memory by published rules, not by this engine's"]
    unlike = {
        "grouped heads": shape.kv_heads not in (None, shape.heads),
        "gated feed-forward layers": shape.gated,
        "activation functions in steps": shape.stepwise,
        "norms after layers or of heads": shape.norms == 4 or shape.head_norms,
        "attention parallel to the feed-forward layer": shape.parallel,
        "attention's probabilities computed again": setup.checkpointing == "selective" and setup.attention == "plain",
        "offload": setup.offload.used,
        "one sum of gradients in 16 bits": not setup.wide_sums and setup.dtype != "float32" and setup.accumulation > 1,
    }
    named = [name for name, found in unlike.items() if found]
    return [f"memory with {' and '.join(named)} was not compared with the engine"] if named else []
