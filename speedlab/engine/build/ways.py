"""The groups that a run's flats travel over: the dp ranks, and where the configuration asks for it how they lie on
hosts (ZeRO++, arXiv:2306.10209)."""

from __future__ import annotations

from collections.abc import Sequence

from speedlab.comm import Group, Rails, hosts_of
from speedlab.config import ConfigError, RunConfig
from speedlab.config.quantized_rules import secondary_problem, unequal_problem
from speedlab.parallel.mesh import Mesh
from speedlab.parallel.zero import Ways


def ways_of(config: RunConfig, mesh: Mesh) -> Ways:
    """The groups of this rank's flats. Collective over all ranks.

    Raises ConfigError, on all ranks, where the ranks of a group lie on hosts in a way that does not go with what is
    asked for.
    """
    zero = config.zero
    if mesh.gather.size == 1 or not (zero.quantized_gradients or zero.secondary_partition):
        return Ways(gather=mesh.gather, reduce=mesh.reduce)
    hosts = hosts_of(mesh.gather)
    # All ranks make equally many groups, or none.
    every = [list(map(len, each)) for each in mesh.everyone.collect(hosts)]
    for counts in every:
        if problem := unequal_problem(counts) or secondary_problem(zero.secondary_partition, counts[0]):
            raise ConfigError(problem)
    if any(list(place) != sorted(place) for place in zip(*hosts, strict=True)):
        raise ConfigError(
            f"zero.quantized_gradients, zero.secondary_partition: ranks lie on hosts as {hosts}, in another order on "
            "one than on another; name hosts so that their ranks follow each other"
        )
    if len({tuple(counts) for counts in every}) > 1:
        raise ConfigError(
            "zero.quantized_gradients, zero.secondary_partition: groups of data-parallel ranks lie on hosts in "
            f"different ways ({', '.join(' + '.join(map(str, counts)) for counts in every)} ranks a host); choose "
            "parallel.tp and parallel.pp so that they divide the ranks of a host, or set both to their defaults"
        )
    return Ways(
        gather=mesh.gather,
        reduce=mesh.reduce,
        hosts=_exchanging(mesh, hosts) if zero.quantized_gradients else None,
        secondary=_partition(mesh, hosts, zero.secondary_partition) if zero.secondary_partition else None,
    )


def _exchanging(mesh: Mesh, hosts: Sequence[Sequence[int]]) -> Rails[Group]:
    own = mesh.gather.index
    inside = next(ranks for ranks in hosts if own in ranks)
    place = inside.index(own)
    columns = list(zip(*hosts, strict=True))
    return Rails(
        inside=_group(mesh, "reduce inside", inside),
        across=_group(mesh, "reduce between", columns[place]),
        places=tuple(columns),
    )


def _partition(mesh: Mesh, hosts: Sequence[Sequence[int]], size: int) -> Group:
    own = mesh.gather.index
    inside = next(ranks for ranks in hosts if own in ranks)
    first = inside.index(own) // size * size
    return _group(mesh, "secondary", inside[first : first + size])


def _group(mesh: Mesh, channel: str, indices: Sequence[int]) -> Group:
    return mesh.group(channel, [mesh.gather.ranks[index] for index in indices])
