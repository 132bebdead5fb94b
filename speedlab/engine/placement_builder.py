"""Build the placement table: one row per parameter, from units, tensor parallelism and the layout.

1. `zero_policy_of` and `needs_of` read the configuration.
2. `place_parameters` makes the rows of one pipeline stage.
3. `refuse_without_room` checks disk space for offloaded states, on all ranks, before anything is made or moved.
4. `comm_groups_of` makes the groups of collectives: the dp ranks, and groups by host for ZeRO++ (arXiv:2306.10209).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from speedlab.comm import Group, HierarchicalGroups, hosts_of
from speedlab.config import ConfigError, PrecisionConfig, RunConfig
from speedlab.config.validation import secondary_problem, unequal_problem
from speedlab.layout import REPLICATED, Layout
from speedlab.offload import OffloadError, StoreRegistry
from speedlab.optim.parameter_forms import RequiredForms
from speedlab.parallel.mesh import ENDS, Mesh
from speedlab.parallel.tensor import TensorParallel
from speedlab.parallel.zero import UnitPlan, ZeroCommGroups
from speedlab.parallel.zero.flat_param import trainable_in_low_precision
from speedlab.placement import (
    EIGHT_BITS,
    MemoryKind,
    ParamPlacement,
    Placement,
    Replication,
    StatePlacement,
    ZeroPolicy,
    state_placements,
)


def zero_policy_of(config: RunConfig, *, dp: int, device: str) -> ZeroPolicy:
    """Return which ranks hold the states of flat parameters, and in which memory.

    Args:
        config: The configuration of the run.
        dp: Number of data-parallel ranks.
        device: Kind of device, for example "cuda".
    """
    return ZeroPolicy.of_stage(
        config.zero.stage,
        dp,
        optimizer=MemoryKind.of_choice(config.offload.optimizer),
        parameters=MemoryKind.of_choice(config.offload.parameters),
        in_backward=config.optimizer.in_backward,
        delayed=config.offload.delayed_update is not None,
        device=device,
        quantized_weights=config.zero.quantized_weights,
        quantized_gradients=config.zero.quantized_gradients,
        secondary_ranks=config.zero.secondary_partition or 0,
    )


def needs_of(config: RunConfig, mesh: Mesh) -> RequiredForms:
    """Return the parameter forms that a run needs from its optimizer.

    Args:
        config: The configuration of the run.
        mesh: The process groups.
    """
    zero_policy = zero_policy_of(config, dp=mesh.gather.size, device=mesh.device.type)
    settings = {
        f"offload.optimizer {config.offload.optimizer!r}": zero_policy.states_at is not MemoryKind.DEVICE,
        f"offload.parameters {config.offload.parameters!r}": zero_policy.parameters_at is not MemoryKind.DEVICE,
        f"precision.moments {config.precision.moments!r}": config.precision.moments == EIGHT_BITS,
        f"precision.masters {config.precision.masters!r}": config.precision.masters != "float32",
    }
    return RequiredForms(
        stage=config.zero.stage,
        ranks=mesh.gather.size if zero_policy.optimizer_states is Replication.PARTITIONED else 1,
        tp=mesh.layout.tp,
        pp=mesh.layout.pp,
        offload=next((setting for setting, is_used in settings.items() if is_used), ""),
        in_backward=config.optimizer.in_backward,
    )


def place_parameters(
    plans: Sequence[UnitPlan],
    tensor: TensorParallel,
    mesh: Mesh,
    *,
    tied: frozenset[str],
    groups: Mapping[int, int],
    zero_policy: ZeroPolicy,
    dtypes: Mapping[int, torch.dtype],
    precision: PrecisionConfig,
    accumulation: int,
    kept: Mapping[str, StatePlacement] | None = None,
    optimizer_reduces: bool = False,
) -> Placement:
    """Return the placement of one pipeline stage on this rank. Its parameters are still whole, and may be on `meta`.

    Args:
        plans: The units of the stage.
        tensor: The tensor parallelism of the stage.
        mesh: The process groups.
        tied: Names of parameters that the first and the last pipeline stage both hold.
        groups: Id of a parameter → index of its parameter group.
        zero_policy: Which ranks hold which states.
        dtypes: Id of a parameter → its compute dtype.
        precision: Formats of masters and moments.
        accumulation: Micro-batches of a step. Gradients of several are summed in float32.
        kept: Extra tensors per gradient that persist between steps.
        optimizer_reduces: Whether the optimizer may reduce gradients itself; these are float32.
    """
    layout = mesh.layout
    rows = []
    for plan in plans:
        for name, parameter in plan.parameters.items():
            part = tensor.parts.get(name)
            first = (("tp",) if name in tensor.partial else ()) + ((ENDS,) if name in tied else ())
            wide = accumulation > 1 or optimizer_reduces
            forms = _forms(dtypes[id(parameter)], parameter.requires_grad, precision, wide=wide)
            holder = _answering(layout, mesh.rank, tensor.first_holder(name), name in tied)
            rows.append(
                ParamPlacement(
                    name=name,
                    unit=plan.name,
                    group=groups.get(id(parameter), 0),
                    shape=tuple(parameter.shape) if part is None else part.own_shape,
                    part=part,
                    cut_over=() if part is None else ("tp",),
                    summed_over=(*first, *_spread(layout)),
                    scale=1.0 / (accumulation * layout.replicas),
                    answered_by=holder,
                    answers=holder == mesh.rank,
                    optimizer_reduces=optimizer_reduces,
                    trainable=parameter.requires_grad,
                    states=state_placements(zero_policy, **forms, kept=kept),
                )
            )
    return Placement(rank=mesh.rank, zero_policy=zero_policy, rows=tuple(rows))


def _spread(layout: Layout) -> tuple[str]:
    """Return one name for the ranks that ZeRO partitions over."""
    return (" × ".join(axis for axis in REPLICATED if layout.size(axis) > 1 or axis == "dp"),)


def _answering(layout: Layout, rank: int, tensor_index: int, tied: bool) -> int:
    """Return the rank, of this rank's dp index, that writes and counts a parameter."""
    place = layout.coordinates(rank) | {"tp": tensor_index}
    return layout.rank(**(place | {"pp": 0} if tied else place))


def _forms(dtype: torch.dtype, trainable: bool, precision: PrecisionConfig, *, wide: bool) -> dict[str, str]:
    name = str(dtype).removeprefix("torch.")
    if not trainable:
        return {"parameter": name}
    forms = {"parameter": name, "gradient": name}
    if trainable_in_low_precision(dtype):
        forms["gradient"] = "float32" if wide else name
        forms["moments"] = "float32"
        # Without a master, values are rounded stochastically; only bfloat16 has a kernel for this.
        if precision.masters == "float32" or dtype is not torch.bfloat16:
            forms["master"] = "float32"
    if precision.moments == EIGHT_BITS and dtype.itemsize <= 4:
        forms["moments"] = EIGHT_BITS
    return forms


def offload_folder(config: RunConfig) -> Path:
    """Return the folder of states on disk: next to the runs, unless configured. The files have no names.

    Args:
        config: The configuration of the run.
    """
    if config.offload.folder is not None:
        return config.offload.folder.expanduser()
    return config.folder if config.folder.is_dir() else Path.cwd()


def more_on_disk(placement: Placement, wanted: ZeroPolicy, *, dp: int, moments: int) -> int:
    """Return the additional bytes that this rank will have on disk.

    Args:
        placement: The present placement.
        wanted: The planned policy.
        dp: Number of data-parallel ranks.
        moments: Number of moments per element.
    """
    needed, had = (
        table.bytes_at(MemoryKind.DISK, dp=dp, moments=moments) for table in (placement.moved(wanted), placement)
    )
    return max(0, needed - had)


def refuse_without_room(needed: int, stores: StoreRegistry, everyone: Group) -> None:
    """Check free disk space for more states. Collective.

    Args:
        needed: Additional bytes of this rank on disk.
        stores: The stores of this rank.
        everyone: All ranks.

    Raises:
        ConfigError: On all ranks, if space is too small or the folder is unusable.
    """
    if not any(everyone.collect(needed)):
        return
    reported = everyone.collect(_own(stores, needed))
    problems = {problem for *_, problem in reported if problem}
    if problems:
        raise ConfigError("\n".join(sorted(problems)))
    for host, disk, folder, _, free, _ in reported:
        total = sum(each[3] for each in reported if each[:2] == [host, disk])
        if total > free:
            raise ConfigError(
                f"offload: the states of the ranks on {host} need {total / 2**30:,.2f} GiB in {folder}, where "
                f"{free / 2**30:,.2f} GiB are free; make room, give offload.folder on another disk, or keep some of "
                "them on the host"
            )


def _own(stores: StoreRegistry, needed: int) -> list[object]:
    """Return [host, disk, folder, bytes needed, bytes free, problem] of this rank."""
    host = os.uname().nodename
    if not needed:
        return [host, -1, "", 0, 0, ""]
    try:
        store = stores.of(MemoryKind.DISK)
    except OffloadError as error:
        return [host, -1, "", 0, 0, str(error)]
    folder = stores.folder
    return [host, folder.stat().st_dev, str(folder), needed, store.capacity_bytes - store.nbytes, ""]


def comm_groups_of(config: RunConfig, mesh: Mesh) -> ZeroCommGroups:
    """Make the process groups of this rank's flat parameters. Collective over all ranks.

    Args:
        config: The configuration of the run.
        mesh: The process groups of the layout.

    Raises:
        ConfigError: On all ranks, if the hosts of a group do not fit the configuration.
    """
    zero = config.zero
    if mesh.gather.size == 1 or not (zero.quantized_gradients or zero.secondary_partition):
        return ZeroCommGroups(gather=mesh.gather, reduce=mesh.reduce)
    hosts = hosts_of(mesh.gather)
    # All ranks make the same number of groups, or none.
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
    return ZeroCommGroups(
        gather=mesh.gather,
        reduce=mesh.reduce,
        hosts=_exchanging(mesh, hosts) if zero.quantized_gradients else None,
        secondary=_partition(mesh, hosts, zero.secondary_partition) if zero.secondary_partition else None,
    )


def _exchanging(mesh: Mesh, hosts: Sequence[Sequence[int]]) -> HierarchicalGroups[Group]:
    own = mesh.gather.index
    inside = next(ranks for ranks in hosts if own in ranks)
    place = inside.index(own)
    columns = list(zip(*hosts, strict=True))
    return HierarchicalGroups(
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
