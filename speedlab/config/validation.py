"""Check combinations of optimizer, offload, islands, ZeRO++ and checkpointing.

RunConfig and the planner use these rules. Each function returns messages with the rule, the values and what to change.
An empty list, or None, means no problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from speedlab.config.optimizer import OptimizerConfig, OuterConfig
from speedlab.config.sections import OffloadConfig, ZeroConfig
from speedlab.layout import Layout

if TYPE_CHECKING:
    from speedlab.config.run_config import RunConfig


def optimizer_problems(
    optimizer: OptimizerConfig, *, stage: int, offload: OffloadConfig, masters: str, moments: str, cp: int
) -> list[str]:
    """Return why an optimizer that compresses gradients, or uses norms of parameters, does not work here.

    Args:
        optimizer: the optimizer.
        stage: ZeRO stage.
        offload: which states are offloaded.
        masters: `precision.masters`.
        moments: `precision.moments`.
        cp: context-parallel ranks.
    """
    problems: list[str] = []
    if optimizer.looks_at_parameters and optimizer.min_coeff > optimizer.max_coeff:
        problems.append(
            f"optimizer.min_coeff {optimizer.min_coeff:g} is more than optimizer.max_coeff {optimizer.max_coeff:g}, "
            "and a trust ratio is between them; lower the first or raise the second"
        )
    if optimizer.name == "onebit_lamb" and optimizer.factor_min > optimizer.factor_max:
        problems.append(
            f"optimizer.factor_min {optimizer.factor_min:g} is more than optimizer.factor_max "
            f"{optimizer.factor_max:g}, and the factor of a trust ratio is between them; lower the first or raise "
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
        f"{name} offload.delayed_update makes the update during the next step, without exchanges; set it to null": (
            offload.delayed_update is not None
        ),
    }
    return [problem for problem, is_one in problems.items() if is_one]


def warmup_problem(optimizer: OptimizerConfig, steps: int) -> list[str]:
    """Return why an optimizer's warm-up does not work in a run of `steps` steps.

    Args:
        optimizer: the optimizer.
        steps: steps of the whole run.
    """
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
    """Return the same for 0/1 Adam, which compresses from the first step that does not update the variance."""
    freeze, doubling = optimizer.freeze_step, optimizer.variance_doubling
    if min(doubling, doubling if freeze is None else freeze) < steps:
        return []
    return [
        f"optimizer.variance_doubling {doubling} updates the variance by whole gradients up to the run's last step, "
        f"{steps}, so that nothing would ever be compressed; set it to {max(1, round(0.2 * steps))}, a fifth of the "
        f"run, or optimizer.name to '{optimizer.plain}'"
    ]


def in_backward_problems(config: RunConfig, layout: Layout) -> list[str]:
    """Return why `optimizer.in_backward` does not work, if it is set.

    Each line names a value that is known only after backward has ended.

    Args:
        config: the configuration.
        layout: its layout.
    """
    if not config.optimizer.in_backward:
        return []
    accumulation = config.batch.resolve(layout.data_size).accumulation
    problems = {
        f"clip_norm {config.clip_norm}: the global norm is known when all gradients are; set clip_norm to null": (
            config.clip_norm is not None
        ),
        f"batch.accumulation {accumulation}: gradients of several micro-batches have to be summed before; set it to "
        "1": accumulation > 1,
        f"parallel.dp {layout.dp}: what no rank used is known when the backward has ended; use one dp rank, with tp "
        "for more devices": layout.dp > 1,
        f"parallel.cp {layout.cp}: gradients are summed over these ranks when all are; set it to 1": layout.cp > 1,
        f"parallel.pp {layout.pp}: a pipeline sums the gradients of its micro-batches; set it to 1": layout.pp > 1,
        "precision.dtype float16: whether a step overflows is known when the backward has ended; use bfloat16": (
            config.precision.dtype == "float16"
        ),
    }
    return [f"optimizer.in_backward cannot be with {problem}" for problem, is_one in problems.items() if is_one]


def island_problems(
    islands: int,
    optimizer: OptimizerConfig,
    outer: OuterConfig,
    *,
    offload: OffloadConfig,
    masters: str,
    switches: str,
) -> list[str]:
    """Return why several islands do not work here.

    Args:
        islands: number of islands.
        optimizer: the optimizer.
        outer: how islands synchronise.
        offload: which states are offloaded.
        masters: `precision.masters`.
        switches: active parts of ZeRO++ as text.
    """
    if islands == 1:
        return []
    name = f"parallel.islands {islands}"
    problems = {
        f"{name}: gradients stay inside an island, and optimizer.name {optimizer.name!r} is for those that cross "
        "slow links in every step; set optimizer.name to 'adamw', and outer.compression to 'signs'": (
            optimizer.sums_itself
        ),
        f"{name}: the parameters of a meeting are kept on the device, and offload.optimizer is {offload.optimizer!r}, "
        "where masters lie away from it; set offload.optimizer to 'none'": offload.optimizer != "none",
        f"{name}: islands meet with float32 masters, and precision.masters is {masters!r}; set precision.masters to "
        "'float32'": masters != "float32",
        f"{name}: what no rank used is agreed on when the backward has ended, and optimizer.in_backward updates each "
        "unit before; set it to false": optimizer.in_backward,
        f"{name}: inside an island links are fast, and ZeRO++ is for slow ones ({switches}); leave its switches off": (
            bool(switches)
        ),
        f"outer.delay_steps {outer.delay_steps}: a part of the model meets again after outer.every_steps "
        f"{outer.every_steps}, when its last meeting has to have ended; set delay_steps to at most "
        f"{outer.every_steps - 1}": outer.delay_steps >= outer.every_steps,
        f"outer.fragments {outer.fragments}: each of them meets once in outer.every_steps {outer.every_steps}; set "
        f"fragments to at most {outer.every_steps}": outer.fragments > outer.every_steps,
    }
    return [problem for problem, is_one in problems.items() if is_one]


def meeting_problem(islands: int, outer: OuterConfig, steps: int) -> list[str]:
    """Return why islands would never synchronise in a run of `steps` steps.

    Args:
        islands: number of islands.
        outer: how islands synchronise.
        steps: steps of the whole run.
    """
    if islands == 1 or outer.every_steps <= steps:
        return []
    return [
        f"outer.every_steps {outer.every_steps} is more than the run's {steps} steps, so that its {islands} islands "
        f"would never meet; set it to {max(1, steps // 4)}, a quarter of the run, or parallel.islands to 1"
    ]


def host_problem(islands: int, hosts: Sequence[str]) -> str | None:
    """Return why these hosts cannot have so many islands; None if they can.

    An island must be several whole hosts, or a host several whole islands. Otherwise a link inside an island would be
    as slow as those between islands.

    Args:
        islands: number of islands.
        hosts: the host of each rank, by rank.
    """
    cut = _cut_host(islands, hosts)
    if cut is None:
        return None
    work = [count for count in range(1, len(hosts) + 1) if len(hosts) % count == 0 and not _cut_host(count, hosts)]
    near = sorted(work, key=lambda count: abs(count - islands))[:2]
    return (
        f"parallel.islands {islands}: islands of {len(hosts) // islands} ranks cut the ranks of host {cut} into "
        "unequal groups; an island is several whole hosts, or a host several whole islands: "
        f"{' or '.join(map(str, near))} islands would do"
    )


def _cut_host(islands: int, hosts: Sequence[str]) -> str | None:
    size, start = len(hosts) // islands, 0
    for host, ranks in groupby(hosts):
        end = start + len(list(ranks))
        # A host may start and end at borders of islands, or be inside one island.
        whole_islands = start % size == end % size == 0
        if not whole_islands and start // size != (end - 1) // size:
            return host
        start = end
    return None


def offload_problems(
    offload: OffloadConfig, *, stage: int, checkpointing: str, in_backward: bool = False, masters: str = "float32"
) -> list[str]:
    """Return why `offload` does not work at a ZeRO stage.

    Args:
        offload: which states are offloaded.
        stage: ZeRO stage.
        checkpointing: `activation.checkpointing`.
        in_backward: `optimizer.in_backward`.
        masters: `precision.masters`.
    """
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
    """Return why inputs of blocks cannot be partitioned over tensor-parallel ranks.

    Args:
        asked: `activation.partition_inputs`.
        checkpointing: `activation.checkpointing`.
    """
    if not asked or checkpointing != "none":
        return []
    return [
        "activation.partition_inputs true needs activation.checkpointing 'block' or 'selective', and it is 'none': "
        "what is cut over tensor ranks are inputs of blocks that are computed again; set activation.checkpointing to "
        "'block', or activation.partition_inputs to false"
    ]


def partition_words(*, tp: int, sequence: bool) -> str:
    """Return as text what partitioning of block inputs does.

    Args:
        tp: tensor-parallel ranks.
        sequence: whether sequence parallelism is used.
    """
    if tp == 1:
        return "inputs of blocks stay whole, as tp is 1"
    if sequence:
        return "inputs of blocks are cut by sequence parallelism already"
    return f"inputs of blocks cut over tp {tp}"


def _delay_problems(offload: OffloadConfig, *, in_backward: bool, masters: str) -> list[str]:
    delayed = f"offload.delayed_update {offload.delayed_update}"
    problems = {
        f"{delayed} needs offload.optimizer 'host' or 'disk', and it is 'none': an update on the device has "
        "nothing to overlap with; set offload.optimizer to 'host', or offload.delayed_update to null": (
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


def quantized_problems(
    zero: ZeroConfig, optimizer: OptimizerConfig, *, offload: OffloadConfig, masters: str
) -> list[str]:
    """Return why ZeRO++'s switches do not work here.

    Args:
        zero: the ZeRO section.
        optimizer: the optimizer.
        offload: which states are offloaded.
        masters: `precision.masters`.
    """
    stays = zero.quantized_weights and zero.stage in (1, 2)
    problems = {
        "zero.quantized_weights true needs zero.stage 1, 2 or 3, and it is 0, under which parameters never travel; set "
        "zero.stage to 2, or zero.quantized_weights to false": zero.quantized_weights and zero.stage == 0,
        "zero.quantized_gradients true needs zero.stage 1, 2 or 3, and it is 0, under which no rank owns the sum of a "
        "part; set zero.stage to 2, or zero.quantized_gradients to false": (
            zero.quantized_gradients and zero.stage == 0
        ),
        f"zero.secondary_partition {zero.secondary_partition} needs zero.stage 3, and it is {zero.stage}, under which "
        "every rank holds all parameters; set zero.stage to 3, or zero.secondary_partition to null": (
            zero.secondary_partition is not None and zero.stage != 3
        ),
        f"zero.secondary_partition {zero.secondary_partition} holds parameters on the device, and offload.parameters "
        f"is {offload.parameters!r}; set offload.parameters to 'none', or zero.secondary_partition to null": (
            zero.secondary_partition is not None and offload.parameters != "none"
        ),
        f"zero.quantized_weights true at zero.stage {zero.stage} makes parameters of their masters after each update, "
        f"on the device, and offload.optimizer is {offload.optimizer!r}; set zero.stage to 3, or offload.optimizer to "
        "'none'": stays and offload.optimizer != "none",
        f"zero.quantized_weights true at zero.stage {zero.stage} leaves parameters rounded to integers on every rank, "
        f"and precision.masters is {masters!r}, so that nothing else would hold their values; set zero.stage to 3, or "
        "precision.masters to 'float32'": stays and masters == "none",
        f"optimizer.name {optimizer.name!r} exchanges signs itself, and zero.quantized_weights or "
        "zero.quantized_gradients asks for integers; set both to false, or optimizer.name to 'adamw'": (
            optimizer.sums_itself and (zero.quantized_weights or zero.quantized_gradients)
        ),
    }
    return [problem for problem, is_one in problems.items() if is_one]


def unequal_problem(counts: Sequence[int]) -> str | None:
    """Return why ZeRO++'s host-aware switches do not work on these hosts; None if they work.

    Args:
        counts: data-parallel ranks of each host. They must be equal, because each rank pairs with one on every other
            host.
    """
    if len(set(counts)) == 1:
        return None
    return (
        f"zero.quantized_gradients, zero.secondary_partition: the data-parallel ranks lie on hosts of "
        f"{' and '.join(map(str, counts))}, and each is paired with one on every other host; put {min(counts)} on each "
        "host, or set both to their defaults"
    )


def secondary_problem(size: int | None, on_host: int) -> str | None:
    """Return why a secondary partition of `size` ranks does not work; None if it does.

    Args:
        size: `zero.secondary_partition`; None: unused.
        on_host: data-parallel ranks of a host.
    """
    if size is None or on_host % size == 0:
        return None
    nearest = max(divisor for divisor in range(1, min(size, on_host) + 1) if on_host % divisor == 0)
    return (
        f"zero.secondary_partition {size} does not divide the {on_host} data-parallel ranks of a host, outside of "
        f"which it would send parameters; set it to {nearest}, or to null"
    )
