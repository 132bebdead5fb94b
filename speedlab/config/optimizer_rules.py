"""Which runs can have an optimizer that looks at whole parameters, or sends signs of momenta in the place of gradients.
The planner asks as much as RunConfig does."""

from __future__ import annotations

from speedlab.config.parts import OffloadConfig
from speedlab.config.updates import OptimizerConfig


def optimizer_problems(
    optimizer: OptimizerConfig, *, stage: int, offload: OffloadConfig, masters: str, moments: str, cp: int
) -> list[str]:
    """What stands against an optimizer that sums gradients itself, or looks at norms of parameters: the rule, the
    values, what to change; empty when nothing does. `masters`, `moments`: of the precision; `cp`: of the layout."""
    problems: list[str] = []
    if optimizer.looks_at_parameters and optimizer.min_coeff > optimizer.max_coeff:
        problems.append(
            f"optimizer.min_coeff {optimizer.min_coeff:g} is more than optimizer.max_coeff {optimizer.max_coeff:g}, "
            "and a trust ratio lies between them; lower the first or raise the second"
        )
    if optimizer.name == "onebit_lamb" and optimizer.factor_min > optimizer.factor_max:
        problems.append(
            f"optimizer.factor_min {optimizer.factor_min:g} is more than optimizer.factor_max "
            f"{optimizer.factor_max:g}, and the factor of a trust ratio lies between them; lower the first or raise "
            "the second"
        )
    if optimizer.name == "zero_one_adam":
        problems += _problems_of_own_steps(stage, cp)
    if optimizer.sums_itself:
        return problems + _problems_of_sums(optimizer, stage, offload, masters, moments)
    if optimizer.looks_at_parameters:
        problems += _problems_of_looks(optimizer, offload, masters, moments)
    return problems


def _problems_of_own_steps(stage: int, cp: int) -> list[str]:
    name = "optimizer.name 'zero_one_adam' lets each rank make steps of its own, and"
    problems = {
        f"{name} zero.stage {stage} partitions what they change; set zero.stage to 0, or optimizer.name to "
        "'onebit_adam', which goes with 1": stage == 1,
        f"{name} the {cp} ranks of parallel.cp compute one sequence together, with the same parameters; set "
        "parallel.cp to 1, or optimizer.name to 'onebit_adam'": cp > 1,
    }
    return [problem for problem, is_one in problems.items() if is_one]


def _problems_of_sums(
    optimizer: OptimizerConfig, stage: int, offload: OffloadConfig, masters: str, moments: str
) -> list[str]:
    name = f"optimizer.name '{optimizer.name}'"
    or_one = "" if optimizer.name == "zero_one_adam" else " or 1"
    problems = {
        f"{name} needs whole gradients on every rank, and zero.stage {stage} partitions them; set zero.stage to "
        f"0{or_one}": stage > 1,
        f"{name} keeps its error feedback and states on the device, and offload.optimizer is {offload.optimizer!r}; "
        f"set offload.optimizer to 'none', or optimizer.name to '{optimizer.plain}'": offload.optimizer != "none",
        f"{name} freezes a variance in float32, and precision.moments is {moments!r}; set precision.moments to "
        "'float32'": moments != "float32",
        f"{name} updates float32 masters, and precision.masters is {masters!r}; set precision.masters to 'float32'": (
            masters != "float32"
        ),
        f"{name} sums gradients itself, whole ones, and optimizer.in_backward uses each unit's as it comes; set it to "
        "false": optimizer.in_backward,
    }
    return [problem for problem, is_one in problems.items() if is_one]


def _problems_of_looks(optimizer: OptimizerConfig, offload: OffloadConfig, masters: str, moments: str) -> list[str]:
    name = f"optimizer.name '{optimizer.name}' goes over all states twice, first for norms of whole parameters, and"
    problems = {
        f"{name} offload.optimizer {offload.optimizer!r} would bring them twice; set offload.optimizer to 'none', or "
        "optimizer.name to 'adamw'": offload.optimizer != "none",
        f"{name} precision.moments is {moments!r}; set precision.moments to 'float32'": moments != "float32",
        f"{name} precision.masters is {masters!r}; set precision.masters to 'float32'": masters != "float32",
        f"{name} optimizer.in_backward makes each unit's update in one; set it to false": optimizer.in_backward,
        f"{name} offload.delayed_update makes the update beside the next step, without exchanges; set it to null": (
            offload.delayed_update is not None
        ),
    }
    return [problem for problem, is_one in problems.items() if is_one]


def warmup_problem(optimizer: OptimizerConfig, steps: int) -> list[str]:
    """What stands against a warm-up in a run of so many steps."""
    if optimizer.name == "zero_one_adam":
        return _plain_problem(optimizer, steps)
    if not optimizer.sums_itself or optimizer.freeze_step is None or optimizer.freeze_step < steps:
        return []
    return [
        f"optimizer.freeze_step {optimizer.freeze_step} is no earlier than the run's last step, {steps}, so that "
        f"nothing would ever be compressed; set it to {max(1, round(0.2 * steps))}, a fifth of the run, or "
        f"optimizer.name to '{optimizer.plain}'"
    ]


def _plain_problem(optimizer: OptimizerConfig, steps: int) -> list[str]:
    """The same of 0/1 Adam, which compresses as soon as a step does not update the variance."""
    freeze, doubling = optimizer.freeze_step, optimizer.variance_doubling
    if min(doubling, doubling if freeze is None else freeze) < steps:
        return []
    return [
        f"optimizer.variance_doubling {doubling} updates the variance by whole gradients up to the run's last step, "
        f"{steps}, so that nothing would ever be compressed; set it to {max(1, round(0.2 * steps))}, a fifth of the "
        f"run, or optimizer.name to '{optimizer.plain}'"
    ]
