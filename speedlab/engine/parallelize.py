"""Parallelize a model: pipeline stages, tensor and context parallelism, and ZeRO, in one visible order.

The order is the same for every layout (sizes of 1 change nothing):

1. Pipeline: the modules of this rank's stages, with parameter names of the whole model.
2. Units: what is gathered together, planned over whole parameters.
3. Tensor: this rank's shard of each parameter.
4. Context: this rank's part of a sequence.
5. Unit by unit: compute the values, take this rank's shard, and make flat parameters over the dp ranks.

Also here: `measured_costs` times blocks for `parallel.balance`, and `check_parameters` checks parameters first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from speedlab.comm import Group, World
from speedlab.config import ConfigError, ModelConfig, PrecisionConfig, RunConfig
from speedlab.engine.kernels import CpuKernelOverrides
from speedlab.engine.model_construction import ModelSource, make_everywhere
from speedlab.engine.module_state import NotEncodable, check_state, frozen_tensors
from speedlab.engine.placement_builder import comm_groups_of, place_parameters, refuse_without_room, zero_policy_of
from speedlab.engine.precision import dtypes_of
from speedlab.engine.state import ModelPart
from speedlab.layout import Layout
from speedlab.models import GPT
from speedlab.offload import StoreRegistry
from speedlab.parallel import Construction, Materializer
from speedlab.parallel.context import ContextParallel
from speedlab.parallel.mesh import Mesh
from speedlab.parallel.pipeline import block_costs, cut_model, layer_counts
from speedlab.parallel.tensor import TensorParallel, check_plan, within
from speedlab.parallel.zero import UnitChoice, UnitPlan, Zero, plan_units
from speedlab.parallel.zero.parameter import stays_whole
from speedlab.placement import MemoryKind, StatePlacement

_REPEATS = 5


def measured_costs(
    model: nn.Module,
    *,
    micro_size: int,
    length: int,
    precision: PrecisionConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[list[float], float, float]:
    """Measure forward and backward of one block, of the layers before the blocks, and of those after them.

    Blocks of the built-in GPT are equal, so one is measured.

    Args:
        model: The built-in GPT.
        micro_size: Sequences of the measured batch.
        length: Tokens of a sequence.
        precision: Chooses the kernels.
        dtype: The compute dtype.
        device: The device of this rank.

    Returns:
        (seconds of each block, seconds before the blocks, seconds after them).

    Raises:
        ValueError: For other models, because the arguments of their blocks are unknown.
    """
    if not isinstance(model, GPT):
        raise ValueError(
            f"parallel.balance 'time' measures the built-in GPT's blocks, and this is a {type(model).__name__}; "
            "use 'parameters', or give parallel.cut"
        )
    one = ModelConfig.model_validate({**model.config.model_dump(), "layers": 1})
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        sample = GPT(one).to(dtype)
        tokens = torch.zeros(micro_size, min(length, one.context), dtype=torch.int64)

    def predict() -> Tensor:
        loss = sample.output(x, tokens).loss
        assert loss is not None  # There are targets.
        return loss

    x = sample.embed(tokens).detach().requires_grad_()
    rotation = sample.rotation(x)
    kernels = CpuKernelOverrides([sample], precision, device, dtype)  # The same kernels as in training.
    try:
        with kernels.under_way():
            block = _seconds(lambda: sample.blocks[0](x, rotation).sum(), device)
            first = _seconds(lambda: sample.embed(tokens).sum(), device)
            last = _seconds(predict, device)
    finally:
        kernels.undo()
    return [block] * model.config.layers, first, last


def _seconds(forward: Callable[[], Tensor], device: torch.device) -> float:
    """Return the shortest time of a forward and a backward."""
    best = float("inf")
    for _ in range(_REPEATS):
        _finish(device)
        started = time.perf_counter()
        forward().backward()
        _finish(device)
        best = min(best, time.perf_counter() - started)
    return best


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # A sync outside training, for the measurement.


def check_parameters(module: nn.Module, layout: Layout, compute: torch.dtype) -> None:
    """Check parameters before flat parameters replace them.

    Args:
        module: The whole model.
        layout: The layout of the run.
        compute: The compute dtype of float32 parameters.

    Raises:
        ConfigError: For parameters that would train wrongly, and for state that no checkpoint could hold.
    """
    _check_quantized(module, layout, compute)
    _check_state(module)
    data_size = layout.data_size
    for name, part in module.named_modules() if data_size > 1 else ():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            raise ConfigError(
                f"model: {name or type(part).__name__} has max_norm {part.max_norm}, by which a forward rescales the "
                "rows that it reads, so that ranks with other data would have other parameters; make it without, and "
                "rescale its weight behind each step, all rows alike"
            )
    at: dict[int, str] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.is_complex():
            raise ConfigError(
                f"model: {name} is {parameter.dtype}, and complex parameters are not trained here; keep real and "
                "imaginary parts as two parameters"
            )
        if parameter.is_meta or not parameter.numel() or stays_whole(parameter):
            continue
        if parameter.untyped_storage().nbytes() < parameter.numel() * parameter.element_size():
            raise ConfigError(
                f"model: {name} has no values of its own: an engine that partitioned it was dropped. Call "
                "engine.destroy() before, which gives them back, or build the model again"
            )
        other = at.setdefault(parameter.data_ptr(), name)
        if other != name:
            raise ConfigError(
                f"model: {other} and {name} are two parameters in the same memory, which would part here; make them "
                "one parameter: b.weight = a.weight"
            )


def _check_quantized(module: nn.Module, layout: Layout, compute: torch.dtype) -> None:
    """Check quantised parameters, which belong to no flat parameter."""
    for name, parameter in module.named_parameters():
        if not stays_whole(parameter):
            continue
        kind = type(parameter).__name__
        if parameter.requires_grad:
            raise ConfigError(
                f"model: {name} is a {kind} that requires a gradient, and the engine updates plain tensors; freeze it "
                "(requires_grad_(False)) and train adapters, or give it unquantised"
            )
        if layout.tp > 1 or layout.pp > 1:
            raise ConfigError(
                f"model: {name} is a {kind}, which stays whole on every rank, and {layout} cuts the model; use dp "
                "ranks alone, or give it unquantised"
            )
        if is_traceable_wrapper_subclass(parameter) and parameter.dtype == torch.float32 != compute:
            raise ConfigError(
                f"model: {name} is a {kind} for float32, and the engine computes in {compute}; set precision.dtype to "
                "float32, or quantise a model of that dtype"
            )


def _check_state(module: nn.Module) -> None:
    """Check the extra state of modules."""
    try:
        check_state(module)
    except NotEncodable as error:
        raise ConfigError(
            f"model: {error}, in a module's state, and a checkpoint pickles nothing; let get_extra_state return "
            "numbers, texts, tensors, and lists and dicts of them"
        ) from None


@dataclass(frozen=True, kw_only=True)
class ModelPartPlan:
    """A pipeline stage before it has flat parameters; without a pipeline, the whole model."""

    index: int
    module: nn.Module
    cut: tuple[int, ...] = ()
    """Number of blocks of every pipeline stage."""
    tied: frozenset[str] = frozenset()
    """Names of parameters that the first and the last pipeline stage both hold."""
    construction: Construction | None = None
    """How to compute parameters that the constructor left on `meta`."""


def plan_model_parts(
    source: ModelSource,
    config: RunConfig,
    layout: Layout,
    world: World,
    everyone: Group,
    dtype: torch.dtype,
    tp_plan: Mapping[str, str] | None,
) -> list[ModelPartPlan]:
    """Plan this rank's pipeline stages. Collective over `everyone`.

    Args:
        source: A module, or a callable that makes one.
        config: The configuration of the run.
        layout: The layout of the run.
        world: All ranks and the device of this rank.
        everyone: The group of all ranks.
        dtype: The compute dtype.
        tp_plan: As for `initialize`.

    Returns:
        The stages in order.

    Raises:
        ConfigError: If the model cannot be split as configured.
    """
    model, construction = make_everywhere(source, config.seed, world.device, everyone)
    check_parameters(model, layout, dtype)
    if layout.pp == 1:
        return [ModelPartPlan(index=0, module=model, construction=construction)]
    count = layout.pp * config.parallel.stages_per_rank
    try:
        if tp_plan is not None:
            check_plan(model, tp_plan)  # Only the whole model shows whether a pattern matches nothing at all.
        counts = _block_counts(model, count, config, layout, world, everyone, dtype)
        ends = [_names(cut_model(model, counts, index)) for index in (0, count - 1)]
        own = layout.index(world.rank, "pp")
        return [
            ModelPartPlan(
                index=index,
                module=cut_model(model, counts, index),
                cut=tuple(counts),
                tied=frozenset(ends[0] & ends[1]) if index in (0, count - 1) else frozenset(),
                construction=construction,
            )
            # Interleaved: rank r holds stages r, r + pp, …
            for index in range(own, count, layout.pp)
        ]
    except ValueError as error:
        raise ConfigError(f"parallel.pp {layout.pp}: {error}") from None


def _block_counts(
    model: nn.Module,
    stages: int,
    config: RunConfig,
    layout: Layout,
    world: World,
    everyone: Group,
    dtype: torch.dtype,
) -> tuple[int, ...]:
    """Return the number of blocks of each pipeline stage."""
    costs, first, last = block_costs(model)
    if config.parallel.cut is not None:
        counts = config.parallel.cut
        if sum(counts) != len(costs) or len(counts) != stages:
            cut = " + ".join(map(str, counts))
            raise ValueError(f"cut {cut} does not give {len(costs)} blocks to {stages} pipeline stages; leave it out")
        return counts
    if config.parallel.balance == "time":
        micro_size = config.batch.resolve(layout.data_size).micro_size
        length = config.data.sequence_length
        how = {"precision": config.precision, "dtype": dtype, "device": world.device}
        measured = measured_costs(model, micro_size=micro_size, length=length, **how)
        costs, first, last = everyone.share(measured)  # Share one rank's measurement, so that all ranks split equally.
    return layer_counts(costs, stages, first=first, last=last)


def build_model_part(
    plan: ModelPartPlan,
    config: RunConfig,
    mesh: Mesh,
    *,
    tp_plan: Mapping[str, str] | None,
    units: UnitChoice | None,
    groups: Mapping[int, int],
    compute_dtype: torch.dtype,
    accumulation: int,
    kept: Mapping[str, StatePlacement] | None,
    optimizer_reduces: bool,
    stores: StoreRegistry,
    moments: int,
) -> ModelPart:
    """Build one pipeline stage: tensor and context parallelism, flat parameters, hooks. Collective over its ranks.

    Args:
        plan: The stage.
        config: The configuration of the run.
        mesh: The process groups.
        tp_plan: As for `initialize`.
        units: As for `initialize`.
        groups: Id of a parameter → index of its parameter group.
        compute_dtype: The compute dtype.
        accumulation: Micro-batches of a step.
        kept: As for `place_parameters`.
        optimizer_reduces: As for `place_parameters`.
        stores: The stores of offloaded states.
        moments: Largest number of moments per element.

    Raises:
        ConfigError: If the stage cannot be sharded as configured.
    """
    module, layout = plan.module, mesh.layout
    unit_plans = plan_units(module, units, bucket_bytes=config.zero.bucket_bytes)
    _same_everywhere(mesh.alike, unit_plans)
    try:
        own_plan = within(tp_plan, module) if tp_plan is not None and layout.pp > 1 else tp_plan
        tensor = TensorParallel(module, mesh["tp"], plan=own_plan, sequence=config.parallel.sequence)
    except ValueError as error:
        raise ConfigError(f"parallel.tp {layout.tp}: {error}") from None
    try:
        context = ContextParallel(module, mesh, config.parallel)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    _move_whole(module, mesh.device)
    # Buffers of the group's first rank, as for parameters.
    _set_buffers(module, mesh.alike)
    placement = place_parameters(
        unit_plans,
        tensor,
        mesh,
        tied=plan.tied,
        groups=groups,
        zero_policy=zero_policy_of(config, dp=mesh.gather.size, device=mesh.device.type),
        dtypes=dtypes_of(module, compute_dtype),
        precision=config.precision,
        accumulation=accumulation,
        kept=kept,
        optimizer_reduces=optimizer_reduces,
    )
    refuse_without_room(
        placement.bytes_at(MemoryKind.DISK, dp=mesh.gather.size, moments=moments), stores, mesh.everyone
    )
    zero = Zero(
        module,
        unit_plans,
        placement,
        ways=comm_groups_of(config, mesh),
        stores=stores,
        axes=mesh.summed_first,
        reductions_in_flight=config.zero.reductions_in_flight,
        materialize=_values(plan, tensor, mesh.device, config.seed),
        alike=mesh.alike,
    )
    tensor.attach()
    context.attach()
    return ModelPart(index=plan.index, module=module, cut=plan.cut, tensor=tensor, context=context, zero=zero)


def _names(module: nn.Module) -> frozenset[str]:
    return frozenset(name for name, _ in module.named_parameters())


def _values(part: ModelPartPlan, tensor: TensorParallel, device: torch.device, seed: int) -> Callable[[UnitPlan], None]:
    """Return a function that gives a unit its values: computes those on meta, then takes this rank's shard."""
    on_meta = any(tensor.is_meta for tensor in (*part.module.parameters(), *part.module.buffers()))
    maker = Materializer(part.module, device=device, seed=seed, construction=part.construction) if on_meta else None

    def give(plan: UnitPlan) -> None:
        if maker is not None:
            plan.parameters = maker.parameters(plan.parameters)
        plan.parameters = tensor.cut(plan.parameters)

    if maker is not None:
        maker.buffers()
    return give


def _move_whole(model: nn.Module, device: torch.device) -> None:
    """Move buffers and parameters with values to this rank's device. Parameters on meta wait for their unit.

    Old gradients are dropped, because the first step would add them without scaling.
    """
    for parameter in model.parameters():
        parameter.grad = None
        if not parameter.is_meta and parameter.device != device and not stays_whole(parameter):
            parameter.data = parameter.data.to(device)
    for module in model.modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.device != device and stays_whole(parameter):
                moved = parameter.to(device)  # `.data` of these classes does not contain all of their values.
                module._parameters[key] = (
                    moved if isinstance(moved, nn.Parameter) else nn.Parameter(moved, requires_grad=False)
                )
        for key, buffer in list(module.named_buffers(recurse=False)):
            if not buffer.is_meta and buffer.device != device:
                module._buffers[key] = buffer.to(device)


def _set_buffers(model: nn.Module, group: Group) -> None:
    for buffer in (*model.buffers(), *frozen_tensors(model).values()):
        if not buffer.is_meta:
            group.broadcast(buffer)


def _same_everywhere(group: Group, plans: list[UnitPlan]) -> None:
    """Raise if ranks hold different models, which would hang in the first collective."""
    own = {
        name: [list(p.shape), str(p.dtype), p.requires_grad] for plan in plans for name, p in plan.parameters.items()
    }
    expected = group.share(own)
    wrong = next((name for name in {**expected, **own} if expected.get(name) != own.get(name)), None)
    for rank, name in zip(group.ranks, group.collect(wrong), strict=True):
        if name is not None:
            raise ConfigError(
                f"initialize: rank {rank} has another model than rank {group.ranks[0]}: they differ in {name}"
            )
