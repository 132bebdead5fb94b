"""Which states of a run can lie away from its device, and whether inputs of blocks can be cut over tensor ranks. The
planner asks as much as RunConfig does."""

from __future__ import annotations

from speedlab.config.parts import OffloadConfig


def offload_problems(
    offload: OffloadConfig, *, stage: int, checkpointing: str, in_backward: bool = False, masters: str = "float32"
) -> list[str]:
    """What stands against `offload` at a ZeRO stage: the rule, the values, what to change; empty when nothing does.

    `in_backward`: of the optimizer; `masters`: of the precision."""
    problems = _delay_problems(offload, in_backward=in_backward, masters=masters)
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


def partition_problems(*, asked: bool, checkpointing: str) -> list[str]:
    """What stands against inputs of blocks that are cut over tensor ranks; empty when nothing does."""
    if not asked or checkpointing != "none":
        return []
    return [
        "activation.partition_inputs true needs activation.checkpointing 'block' or 'selective', and it is 'none': "
        "what is cut over tensor ranks are inputs of blocks that are computed again; set activation.checkpointing to "
        "'block', or activation.partition_inputs to false"
    ]


def partition_words(*, tp: int, sequence: bool) -> str:
    """What becomes of inputs of blocks that are to be cut over tensor ranks."""
    if tp == 1:
        return "inputs of blocks stay whole, as tp is 1"
    if sequence:
        return "inputs of blocks are cut by sequence parallelism already"
    return f"inputs of blocks cut over tp {tp}"


def _delay_problems(offload: OffloadConfig, *, in_backward: bool, masters: str) -> list[str]:
    delayed = f"offload.delayed_update {offload.delayed_update}"
    problems = {
        f"{delayed} needs offload.optimizer 'host' or 'disk', and it is 'none': an update on the device has "
        "nothing to hide behind; set offload.optimizer to 'host', or offload.delayed_update to null": (
            offload.optimizer == "none"
        ),
        f"{delayed} cannot be with optimizer.in_backward, whose gradients are used before the step ends; set one of "
        "them to null, or false": in_backward,
        f"{delayed} needs precision.masters 'float32', and it is {masters!r}: the update would change the parameters "
        "that the next forward reads; set precision.masters to 'float32', or offload.delayed_update to null": (
            masters == "none"
        ),
    }
    return [] if offload.delayed_update is None else [problem for problem, is_one in problems.items() if is_one]
