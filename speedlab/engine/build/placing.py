"""Filling the placement table: from units, tensor parallelism and the layout to a row for each parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from speedlab.config import PrecisionConfig, RunConfig
from speedlab.engine.step.forms import Needs
from speedlab.layout import REPLICATED, Layout
from speedlab.parallel.mesh import ENDS, Mesh
from speedlab.parallel.tensor import TensorParallel
from speedlab.parallel.zero import UnitPlan
from speedlab.parallel.zero.flat_param import trainable_in_low_precision
from speedlab.placement import EIGHT_BITS, Holders, Home, Placement, Residency, Row, Where, homes


def residency_of(config: RunConfig, *, dp: int, device: str) -> Residency:
    """Who holds the states of a run's flats, and where, with `dp` ranks on devices of a kind."""
    return Residency.of_stage(
        config.zero.stage,
        dp,
        optimizer=Where.of_choice(config.offload.optimizer),
        parameters=Where.of_choice(config.offload.parameters),
        in_backward=config.optimizer.in_backward,
        delayed=config.offload.delayed_update is not None,
        device=device,
        quantized_weights=config.zero.quantized_weights,
        quantized_gradients=config.zero.quantized_gradients,
        secondary_ranks=config.zero.secondary_partition or 0,
    )


def needs_of(config: RunConfig, mesh: Mesh) -> Needs:
    """What a run asks of the forms in which its optimizer is given parameters."""
    residency = residency_of(config, dp=mesh.gather.size, device=mesh.device.type)
    settings = {
        f"offload.optimizer {config.offload.optimizer!r}": residency.states_at is not Where.DEVICE,
        f"offload.parameters {config.offload.parameters!r}": residency.parameters_at is not Where.DEVICE,
        f"precision.moments {config.precision.moments!r}": config.precision.moments == EIGHT_BITS,
        f"precision.masters {config.precision.masters!r}": config.precision.masters != "float32",
    }
    return Needs(
        stage=config.zero.stage,
        ranks=mesh.gather.size if residency.optimizer_states is Holders.PARTITIONED else 1,
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
    residency: Residency,
    dtypes: Mapping[int, torch.dtype],
    precision: PrecisionConfig,
    accumulation: int,
    kept: Mapping[str, Home] | None = None,
    left_to_optimizer: bool = False,
) -> Placement:
    """The rows of one pipeline stage on this rank; its parameters are still whole, and may be on meta.

    Args:
        tied: names of parameters that the first and the last pipeline stage both hold.
        groups: id of a parameter → index of its optimizer group.
        dtypes: id of a parameter → what it computes in.
        precision: as what masters and moments are kept.
        accumulation: micro-batches of a step. The gradients of several are summed in float32.
        kept: what stays beside gradients from step to step.
        left_to_optimizer: whether the optimizer may sum gradients itself; these are in float32.
    """
    layout = mesh.layout
    rows = []
    for plan in plans:
        for name, parameter in plan.parameters.items():
            part = tensor.parts.get(name)
            first = (("tp",) if name in tensor.partial else ()) + ((ENDS,) if name in tied else ())
            wide = accumulation > 1 or left_to_optimizer
            forms = _forms(dtypes[id(parameter)], parameter.requires_grad, precision, wide=wide)
            holder = _answering(layout, mesh.rank, tensor.first_holder(name), name in tied)
            rows.append(
                Row(
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
                    left_to_optimizer=left_to_optimizer,
                    trainable=parameter.requires_grad,
                    states=homes(residency, **forms, kept=kept),
                )
            )
    return Placement(rank=mesh.rank, residency=residency, rows=tuple(rows))


def _spread(layout: Layout) -> tuple[str]:
    """The name of the ranks that ZeRO partitions over, as one."""
    return (" × ".join(axis for axis in REPLICATED if layout.size(axis) > 1 or axis == "dp"),)


def _answering(layout: Layout, rank: int, tensor_index: int, tied: bool) -> int:
    """The rank, of this rank's dp index, that answers for a parameter."""
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
        # What has no master is rounded stochastically, which bfloat16 alone has a kernel for.
        if precision.masters == "float32" or dtype is not torch.bfloat16:
            forms["master"] = "float32"
    if precision.moments == EIGHT_BITS and dtype.itemsize <= 4:
        forms["moments"] = EIGHT_BITS
    return forms
