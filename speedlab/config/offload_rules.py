"""Which states of a run can lie away from its device. The planner asks as much as RunConfig does."""

from __future__ import annotations

from speedlab.config.parts import OffloadConfig


def offload_problems(offload: OffloadConfig, *, stage: int, checkpointing: str) -> list[str]:
    """What stands against `offload` at a ZeRO stage: the rule, the values, what to change; empty when nothing does."""
    problems = []
    if offload.parameters != "none" and stage != 3:
        problems.append(
            f"offload.parameters {offload.parameters!r} needs zero.stage 3, and it is {stage}, under which parameters "
            "stay on the device between two uses; set zero.stage to 3, or offload.parameters to 'none'"
        )
    if offload.parameters != "none" and offload.optimizer == "none":
        problems.append(
            f"offload.parameters {offload.parameters!r} needs offload.optimizer 'host' or 'disk', and it is 'none': "
            "the update reads and writes both in one place; set offload.optimizer to 'host'"
        )
    if offload.activations != "none" and checkpointing != "block":
        problems.append(
            f"offload.activations {offload.activations!r} needs activation.checkpointing 'block', and it is "
            f"{checkpointing!r}: what waits on the host are the inputs of blocks that are computed again; set "
            "activation.checkpointing to 'block', or offload.activations to 'none'"
        )
    return problems
