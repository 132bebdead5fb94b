"""Which runs can train on islands that meet every few steps. The planner asks as much as RunConfig does."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from speedlab.config.parts import OffloadConfig
from speedlab.config.updates import OptimizerConfig, OuterConfig


def island_problems(
    islands: int,
    optimizer: OptimizerConfig,
    outer: OuterConfig,
    *,
    offload: OffloadConfig,
    masters: str,
    switches: str,
) -> list[str]:
    """What stands against several islands: the rule, the values, what to change; empty when nothing does. `masters`: of
    the precision; `switches`: those of ZeRO++ that are on."""
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
    """What stands against meetings in a run of so many steps."""
    if islands == 1 or outer.every_steps <= steps:
        return []
    return [
        f"outer.every_steps {outer.every_steps} is more than the run's {steps} steps, so that its {islands} islands "
        f"would never meet; set it to {max(1, steps // 4)}, a quarter of the run, or parallel.islands to 1"
    ]


def host_problem(islands: int, hosts: Sequence[str]) -> str | None:
    """What stands against so many islands on `hosts`, the host of each rank in their order: an island is several whole
    hosts, or a host several whole islands, or a link inside an island would be as slow as those between them."""
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
        whole_islands = start % size == end % size == 0
        if not whole_islands and start // size != (end - 1) // size:
            return host
        start = end
    return None
