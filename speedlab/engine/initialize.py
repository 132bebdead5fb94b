"""`speedlab.initialize`: from a plain module to an engine, with DeepSpeed's signature and return value."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from speedlab.comm import Group, Traffic, World, join
from speedlab.config import ConfigError, RunConfig
from speedlab.engine.engine import Engine
from speedlab.engine.memory import PeakMemory, keep_freed_memory
from speedlab.engine.optimizer import OptimizerChoice, PartitionedOptimizer, Recipe
from speedlab.engine.precision import compute_dtype
from speedlab.engine.schedule import make_schedule
from speedlab.parallel import Materializer
from speedlab.parallel.zero import Residency, UnitChoice, UnitPlan, Zero, plan_units

_engines: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Engine]] = weakref.WeakKeyDictionary()
"""The engine that drives a module, so that setting up twice leaves nothing of the first behind."""


def initialize(
    args: Any = None,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    optimizer: OptimizerChoice = None,
    model_parameters: Any = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    config: RunConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    units: UnitChoice | None = None,
    collate_fn: Callable[..., Any] | None = None,
    device: torch.device | str | None = None,
) -> tuple[Engine, Optimizer, DataLoader[Any] | None, Any]:
    """Wrap any module for training on all ranks of the world. Collective: every rank calls it with the same arguments.

    Args:
        args: ignored; it stands where DeepSpeed's signature has it. Likewise `model_parameters`.
        model: a module with equal parameters on all ranks (rank 0's count), or a callable that makes one. The callable
            runs under the meta device, and parameters are made unit by unit: use it for models that do not fit whole.
        optimizer: an elementwise torch optimizer as class (arguments come from `config.optimizer`), as callable of the
        list of
            trainable parameters, or as an instance over them; None makes the one that the configuration names.
        training_data: a dataset; the returned loader gives each rank its share in micro-batches.
        lr_scheduler: a torch scheduler, or a callable that makes one of the optimizer; None makes the configuration's
            when the optimizer too comes from it, and else none. `engine.step` steps it.
        config: RunConfig, a dict of its fields, or the path of a JSON or YAML file.
        units: which modules are gathered together; None chooses repeated blocks.

    Returns (engine, optimizer, loader or None, scheduler or None).
    Raises ConfigError before anything is changed.
    """
    if model is None:
        raise ConfigError("initialize: model is missing; give a torch.nn.Module, or a callable that makes one")
    config = _config(config)
    gc.collect()  # What an earlier set-up of a notebook cell left behind may still be held by cycles.
    world = join(device)
    layout = config.layout(world.size)
    batch = config.batch.resolve(layout.dp)
    dtype = compute_dtype(config.precision, world.device)
    if world.device.type == "cpu":
        keep_freed_memory()
    outside_bytes = PeakMemory.resident()

    if not isinstance(model, nn.Module):
        with torch.random.fork_rng([]), torch.device("meta"):
            model = model()  # Initialisers draw numbers even on meta; the caller's random state stays.
    _take_back(model)
    recipe = Recipe(optimizer, model, config.optimizer)
    plans = plan_units(model, units, bucket_bytes=config.zero.bucket_bytes)
    _move_whole(model, world)

    traffic = Traffic()
    peers = layout.dp_peers(world.rank)
    gather_group = Group(peers, traffic, world.device)
    reduce_group = Group(peers, traffic, world.device, channel="reduce")
    _same_everywhere(gather_group, plans)
    _set_buffers(model, gather_group)
    zero = Zero(
        model,
        plans,
        groups=recipe.group_of,
        gather_group=gather_group,
        reduce_group=reduce_group,
        compute_dtype=dtype,
        gradient_dtype=torch.float32 if batch.accumulation > 1 else None,
        materialize=_materializer(model, world, config.seed),
        residency=Residency.of_stage(config.zero.stage, layout.dp),
    )
    partitioned = PartitionedOptimizer(zero.flats, recipe)
    scheduler = _scheduler(lr_scheduler, optimizer, config, partitioned.inner)
    engine = Engine(
        model,
        zero=zero,
        optimizer=partitioned,
        scheduler=scheduler,
        config=config,
        world=world,
        layout=layout,
        parts={},
        duplicates=(),
        group=gather_group,
        everyone=Group(range(world.size), traffic, world.device),
        traffic=traffic,
        dtype=dtype,
        accumulation=batch.accumulation,
        outside_bytes=outside_bytes,
    )
    _engines[model] = weakref.ref(engine)
    loader = _loader(training_data, batch.micro_size, gather_group, config.seed, collate_fn)
    return engine, partitioned.inner, loader, scheduler


def _config(config: RunConfig | Mapping[str, Any] | str | Path | None) -> RunConfig:
    if config is None:
        return RunConfig()
    if isinstance(config, RunConfig):
        return config
    if isinstance(config, str | Path):
        return RunConfig.load(config)
    if isinstance(config, Mapping):
        return RunConfig(**config)
    raise ConfigError(f"config: expected a RunConfig, a dict or a path, not {type(config).__name__}")


def _take_back(model: nn.Module) -> None:
    """If an engine drives this module already, its parameters come back whole and that engine ends."""
    reference = _engines.pop(model, None)
    earlier = reference() if reference is not None else None
    if earlier is None:
        return
    earlier.destroy()


def _move_whole(model: nn.Module, world: World) -> None:
    """Buffers and parameters that have values go to this rank's device; those on meta wait for their unit."""
    for parameter in model.parameters():
        if not parameter.is_meta and parameter.device != world.device:
            parameter.data = parameter.data.to(world.device)
    for module in model.modules():
        for key, buffer in list(module.named_buffers(recurse=False)):
            if not buffer.is_meta and buffer.device != world.device:
                module._buffers[key] = buffer.to(world.device)


def _materializer(model: nn.Module, world: World, seed: int) -> Callable[[UnitPlan], None] | None:
    if not any(parameter.is_meta for parameter in model.parameters()):
        return None
    maker = Materializer(model, device=world.device, seed=seed)

    def materialize(plan: UnitPlan) -> None:
        plan.parameters = maker.parameters(plan.parameters)

    maker.buffers()
    return materialize


def _set_buffers(model: nn.Module, group: Group) -> None:
    for buffer in model.buffers():
        if not buffer.is_meta:
            group.broadcast(buffer)


def _same_everywhere(group: Group, plans: list[UnitPlan]) -> None:
    """Ranks that hold different models would hang in the first collective; say so instead."""
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


def _scheduler(choice: Any, optimizer_choice: OptimizerChoice, config: RunConfig, optimizer: Optimizer) -> Any:
    if choice is None:
        return make_schedule(config.schedule, optimizer, config.steps) if optimizer_choice is None else None
    return choice if hasattr(choice, "step") else choice(optimizer)


def _loader(
    data: Dataset[Any] | None, micro_size: int, group: Group, seed: int, collate_fn: Callable[..., Any] | None
) -> DataLoader[Any] | None:
    if data is None:
        return None
    sampler = DistributedSampler(data, num_replicas=group.size, rank=group.index, shuffle=True, seed=seed)
    return DataLoader(data, batch_size=micro_size, sampler=sampler, collate_fn=collate_fn, drop_last=True)
