"""Plan a training before anything runs: `speedlab plan`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from speedlab.cluster.launch.placement import choose_devices
from speedlab.config import ConfigError
from speedlab.config.command_line import read_options, refuse_two_values
from speedlab.config.sections import Away
from speedlab.planner.plan import Plan
from speedlab.planner.request import PlanRequest


@dataclass(frozen=True, kw_only=True)
class PlanOptions(PlanRequest):
    """What fits, how fast, and why, before anything runs: memory by rank, the step's time, days and cost.

    speedlab plan llama-3-8b --machines "8 H100" --zero 3
    speedlab plan gpt3-175b --machines "128x8 A100-80 nvlink3 ib-200x8" --tp 8 --pp 16 --zero 1 --global 1536
    speedlab plan ./Qwen2.5-7B --config ds_config.json --machines "2x8 H100"
    speedlab plan llama-3-8b --machines "1 V100" --offload.optimizer disk --disk-bytes 2TB
    """

    model: Annotated[str, tyro.conf.Positional] = ""
    """A model by name (gpt2, llama-3-8b, gpt3-175b, …), a Hugging Face folder or config.json, or a configuration."""
    zero: Annotated[Literal[0, 1, 2, 3] | None, tyro.conf.arg(aliases=["--zero.stage"])] = None
    """ZeRO stage."""
    global_size: Annotated[int | None, tyro.conf.arg(name="global")] = None
    """Sequences of a step."""
    offload_optimizer: Annotated[Away | None, tyro.conf.arg(name="offload.optimizer")] = None
    """Where optimizer states, float32 masters and summed gradients are stored."""
    offload_parameters: Annotated[Away | None, tyro.conf.arg(name="offload.parameters")] = None
    """Where parameters are stored while no unit needs them; ZeRO stage 3 only."""
    offload_activations: Annotated[Literal["none", "host"] | None, tyro.conf.arg(name="offload.activations")] = None
    """Where inputs of blocks are stored until backward; with checkpointing of blocks only."""
    offload_delayed_update: Annotated[int | None, tyro.conf.arg(name="offload.delayed-update")] = None
    """First step whose update overlaps with the next step, which then uses parameters one update older."""
    published: bool = False
    """Compare the planner with published figures, row by row."""


def plan(argv: list[str]) -> int:
    """Print the plan, or the results of a search.

    Args:
        argv: arguments of the command.

    Returns:
        The exit status: 0 it fits, 1 it does not.

    Raises:
        ConfigError: the request is invalid.
    """
    options = parse(argv)
    try:
        return _answer(options)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def parse(argv: list[str]) -> PlanOptions:
    """Parse the options of the command.

    Raises:
        ConfigError: an option is unknown, or is given twice with different values.
    """
    refuse_two_values(argv, {"--zero": "--zero.stage"})
    return read_options(PlanOptions, argv, "speedlab plan", config=(tyro.conf.FlagCreatePairsOff,))


def _answer(options: PlanOptions) -> int:
    devices = choose_devices(options.engines, "auto")
    if options.published:
        from speedlab.planner.published import report

        print(report())
        return 0
    found = options.answer(devices)
    print(found)
    return 0 if (found.fits if isinstance(found, Plan) else found.candidates) else 1
