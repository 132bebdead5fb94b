"""`speedlab.initialize`: wrap a module in an engine, with DeepSpeed's signature and return value.

1. `initialize` checks the arguments and resolves configuration, layout and batch sizes.
2. `_build` partitions the model, makes the optimizer over its flat parameters, and makes the engine.
3. The checks (`_check_*`, `_refuse_*`) raise ConfigError on all ranks, before any change.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, IterableDataset

from cuda_ops import cpu_sdpa, warm
from speedlab.comm import CommStats, World, join
from speedlab.comm.shared.memfd import host_identity
from speedlab.comm.timeouts import Timeout, checked_seconds
from speedlab.config import ConfigError, ConfigLike, OuterConfig, RunConfig, ScheduleConfig, as_config
from speedlab.config.batch import Batch
from speedlab.config.validation import host_problem
from speedlab.data import Epochs
from speedlab.engine.engine import Engine
from speedlab.engine.kernels import prepare_optimizer, prepare_small_states
from speedlab.engine.loss import LossFunction, check_loss
from speedlab.engine.memory_ledger import PeakMemory, suit_allocator
from speedlab.engine.parallelize import build_model_part, plan_model_parts
from speedlab.engine.placement_builder import needs_of, offload_folder, zero_policy_of
from speedlab.engine.precision import LossScale, compute_dtype
from speedlab.engine.sparse_attention import BlockSparse, check_attention
from speedlab.engine.state import ModelPart
from speedlab.layout import Layout
from speedlab.models.gpt import CausalAttention
from speedlab.offload import StoreRegistry
from speedlab.optim.communicating_protocols import check_whole_gradients, kept_by, steps_separate
from speedlab.optim.diloco import kept_by_diloco
from speedlab.optim.factory import Groups, OptimizerChoice, OptimizerFactory, param_groups_from
from speedlab.optim.fused import FusedOptimizer, LayerwiseOptimizer
from speedlab.optim.lr_schedule import make_schedule
from speedlab.optim.sharded_optimizer import PartitionedOptimizer
from speedlab.parallel.mesh import Mesh
from speedlab.parallel.zero import UnitChoice
from speedlab.placement import Placement

log = logging.getLogger("speedlab.engine")

_engines: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Engine]] = weakref.WeakKeyDictionary()
"""The engine of each module, so that a second `initialize` of the module destroys the first engine."""


def initialize(
    args: Any = None,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    optimizer: OptimizerChoice = None,
    model_parameters: Any = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    config: ConfigLike | None = None,
    *,
    loss: LossFunction | None = None,
    units: UnitChoice | None = None,
    tp_plan: Mapping[str, str] | None = None,
    collate_fn: Callable[..., Any] | None = None,
    device: torch.device | str | None = None,
    timeout_seconds: float | None = None,
) -> tuple[Engine, Optimizer, DataLoader[Any] | None, Any]:
    """Wrap any module for training on all ranks. Collective: every rank calls it with the same arguments.

    Args:
        args: Ignored; DeepSpeed's signature has it.
        model_parameters: As in DeepSpeed: the parameters of an optimizer that is made here. All that require gradients,
            or parameter groups with their options.
        model: A module with equal parameters on all ranks (rank 0's values are used), or a callable that makes one. The
            callable's model equals `torch.manual_seed(config.seed); model()` bit for bit. Large parameters are freed
            while the callable runs and computed again unit by unit, so use a callable for models that do not fit whole.
            Parameters that the callable loads (`from_pretrained`) stay whole on each rank until they are partitioned.
        optimizer: One of: an elementwise torch optimizer class; a callable that takes the list of trainable parameters;
            an instance over them; or None for the configured optimizer. A class gets the arguments that
            `config.optimizer` names and else its own defaults. An optimizer that sends signs, such as 1-bit Adam, uses
            all of `config.optimizer`. With None, all parameters may be frozen (a teacher): the engine computes, without
            steps.
        training_data: A map-style dataset. The returned loader gives each rank its share in micro-batches, in another
            order each epoch. After `engine.load_checkpoint` it continues after the items that the checkpoint had used,
            under any layout.
        lr_scheduler: A torch scheduler, or a callable that makes one from the optimizer. None makes the configured
            schedule if the optimizer is configured too, else no scheduler. `engine.step` steps it.
        config: RunConfig, a dict of its fields, or the path of a JSON or YAML file. DeepSpeed's keys work too. A
            RunConfig counts with all its defaults. A dict or file clips gradients and uses a schedule only if it names
            `clip_norm` and `schedule`.
        loss: `loss(model, batch)` calls the model and returns the mean loss of a micro-batch. `train_batch` and
            `evaluate` use it, for batches of any kind. Without it, a forward takes (tokens, targets), optionally with
            `positions` of documents, or a dict of keyword arguments, and returns the loss or an output with `.loss`.
        units: Which modules are gathered together; None chooses the repeated blocks.
        tp_plan: How layers are sharded over tensor-parallel ranks, as in Hugging Face's plans: a dict from patterns of
            module names to styles. None takes the model's own plan.
        collate_fn: As in torch's DataLoader, for `training_data`.
        device: The device of this rank; None chooses it.
        timeout_seconds: How long collectives of SpeedLab's groups wait for a missing rank while the engine exists. Then
            PeerLost names the call in which each rank is. None takes `config.timeout_seconds`, else the timeout of the
            cluster or the world of ranks, else 1,800.

    Returns:
        (engine, optimizer, loader or None, scheduler or None).

    Raises:
        ConfigError: For wrong arguments, before any change.
        LayoutError: If the number of ranks does not fit the layout.
    """
    if model is None:
        raise ConfigError("initialize: model is missing; give a torch.nn.Module, or a callable that makes one")
    config = _config(config)
    gc.collect()  # Reference cycles may keep the engine of an earlier notebook cell in memory.
    timeout = _timeout(config.timeout_seconds if timeout_seconds is None else timeout_seconds)
    world = join(device)
    layout = config.layout(world.size, built_in=False)
    check_loss(loss, layout)
    groups = None
    # A callable's parameters do not exist yet, and an optimizer object already has its groups.
    if isinstance(model, nn.Module) and (optimizer is None or isinstance(optimizer, type)):
        groups = param_groups_from(model, model_parameters)
    batch = config.batch.resolve(layout.data_size)
    if isinstance(model, nn.Module):
        check_attention(model, config.model.attention)
    _prepare_kernels(config, optimizer, world.device)
    epochs = _epochs(training_data, batch, layout, world.rank, config.seed)
    parts = {"loss": loss, "units": units, "tp_plan": tp_plan, "batch": batch, "groups": groups, "timeout": timeout}
    engine = _build(model, optimizer, lr_scheduler, config, world, **parts)
    # Only now, because `lr_scheduler` may be a callable.
    _refuse_plateau(engine)
    for module in engine.modules:
        _engines[module] = weakref.ref(engine)
    _prepare_attention(engine)  # After the registration, so that a call after an interrupt destroys this engine.
    engine.epochs = epochs
    loader = _loader(training_data, epochs, batch, config.seed, collate_fn)
    return engine, engine.optimizer, loader, engine.scheduler


def _build(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: OptimizerChoice,
    lr_scheduler: Any,
    config: RunConfig,
    world: World,
    *,
    loss: LossFunction | None,
    units: UnitChoice | None,
    tp_plan: Mapping[str, str] | None,
    batch: Batch,
    groups: Groups | None,
    timeout: Timeout | None,
) -> Engine:
    """Build the model parts of this rank, the optimizer over their flat parameters, and the engine. Collective."""
    layout, dtype = config.layout(world.size, built_in=False), compute_dtype(config.precision, world.device)
    suit_allocator(world.device, sparing=config.offload.used)
    outside_bytes = PeakMemory.resident()
    if isinstance(model, nn.Module):
        _take_back(model)
    attention = BlockSparse(config.model.attention)
    with ExitStack() as on_failure:
        # On an error the caller's model gets its own attention back.
        on_failure.callback(attention.undo)
        model = attention.within(model)
        traffic = CommStats()
        mesh = Mesh(layout, world, traffic)
        _check_islands(mesh, config)
        plans = plan_model_parts(model, config, layout, world, mesh.everyone, dtype, tp_plan)
        trains = _check_trains(optimizer, [plan.module for plan in plans], mesh)
        recipe = _recipe(optimizer, [plan.module for plan in plans], config, groups, mesh)
        _check_scheduler(lr_scheduler, recipe.instance)
        _check_communicating(recipe.kind, config, mesh)
        # One warning instead of one per rank.
        if mesh.rank == 0:
            _tell_of_no_use(optimizer, recipe.kind, config)
        _check_masters(recipe.kind, [plan.module for plan in plans], mesh)
        stores = StoreRegistry(offload_folder(config), rank=world.rank, traffic=traffic, device=world.device)
        parts = [
            build_model_part(
                plan,
                config,
                mesh,
                tp_plan=tp_plan,
                units=units,
                groups=recipe.group_of,
                compute_dtype=dtype,
                accumulation=batch.accumulation,
                # Never both: `_check_communicating` refuses such optimizers with islands.
                kept=kept_by(recipe.kind) or kept_by_diloco(config.outer, layout.islands),
                optimizer_reduces=kept_by(recipe.kind) is not None,
                stores=stores,
                # Unknown for a user's optimizer: assume two moments, as Adam.
                moments=config.optimizer.moments if optimizer is None else 2,
            )
            for plan in plans
        ]
        partitioned = _partitioned(recipe, parts, mesh)
        engine = Engine(
            parts,
            optimizer=partitioned,
            scheduler=_scheduler(lr_scheduler, optimizer, config, partitioned.inner),
            config=config,
            batch=batch,
            world=world,
            mesh=mesh,
            traffic=traffic,
            stores=stores,
            loss_scale=LossScale(config.precision, dtype),
            dtype=dtype,
            outside_bytes=outside_bytes,
            loss=loss,
            attention=attention,
            trains=trains,
            timeout=timeout,
        )
        # Success: from now on `engine.destroy` undoes the attention.
        on_failure.pop_all()
    return engine


def _check_trains(optimizer: OptimizerChoice, modules: Sequence[nn.Module], mesh: Mesh) -> bool:
    """Return whether any rank has a parameter to train; all pipeline stages of one rank may be frozen. Collective.

    Raises ConfigError, on all ranks, if an optimizer was given and no rank has a trainable parameter.
    """
    own = any(parameter.requires_grad for module in modules for parameter in module.parameters())
    trains = any(mesh.everyone.collect(own))
    if not trains and optimizer is not None:
        raise ConfigError(
            "model: no parameter is to be trained; set requires_grad of those that shall be. Without `optimizer`, an "
            "engine computes with a frozen model, as a teacher's, and is never stepped"
        )
    return trains


def _recipe(
    optimizer: OptimizerChoice,
    modules: Sequence[nn.Module],
    config: RunConfig,
    groups: Groups | None,
    mesh: Mesh,
) -> OptimizerFactory:
    """Return the factory of the optimizer. Collective.

    Ranks may have different parameters. So an error on one rank raises on all ranks.
    """
    recipe, error, problem = None, None, ""
    try:
        recipe = OptimizerFactory(optimizer, modules, config.optimizer, groups, trial_on=mesh.device)
        problem = recipe.forms.problem(recipe.kind.__name__, needs_of(config, mesh))
    except Exception as raised:
        error, problem = raised, str(raised) or type(raised).__name__
    # All ranks raise together, so that none waits in the next collective.
    problem = next(filter(None, mesh.everyone.collect(problem)), "")
    if error is not None:
        raise error
    if problem or recipe is None:
        raise ConfigError(problem)
    return recipe


def _timeout(seconds: float | None) -> Timeout | None:
    """Return the timeout. Raises ConfigError if `seconds` is not a number of seconds."""
    try:
        return None if seconds is None else Timeout(checked_seconds(seconds, "timeout_seconds"))
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _partitioned(recipe: OptimizerFactory, parts: Sequence[ModelPart], mesh: Mesh) -> PartitionedOptimizer:
    """Return the optimizer over the flat parameters of all parts. Collective."""
    partitioned = PartitionedOptimizer(
        [flat for part in parts for flat in part.zero.flats],
        Placement.joined(part.zero.placement for part in parts),
        mesh.summed_first,
        recipe.build,
        group_count=recipe.group_count,
        # Layer-wise optimizers, and those that fail on joined parameters, need one segment per parameter.
        separate=issubclass(recipe.kind, LayerwiseOptimizer) or recipe.forms.whole_only,
        forms=recipe.forms,
    )
    partitioned.prepare()
    return partitioned


def _config(config: ConfigLike | None) -> RunConfig:
    """Return the caller's configuration.

    A RunConfig counts with its defaults, because the caller could see them. A dict or file clips gradients and uses a
    schedule only if it names them.
    """
    if isinstance(config, RunConfig):
        return config
    named = as_config({} if config is None else config)
    unasked = {"clip_norm": None, "schedule": ScheduleConfig(kind="constant", warmup_steps=0)}
    return named.model_copy(update={key: value for key, value in unasked.items() if key not in named.model_fields_set})


def _prepare_kernels(config: RunConfig, optimizer: OptimizerChoice, device: torch.device) -> None:
    """Compile the kernels that only some configurations need. Raises ConfigError if a kernel is missing."""
    prepare_small_states(config, device)
    if optimizer is None:
        prepare_optimizer(config, device)
    sparse = config.model.attention.kind == "block_sparse" or config.data.documents == "separate"
    if sparse and device.type == "cpu":
        warm.warm_up(lambda line: print(line, flush=True), steps=warm.SPARSE)


def _prepare_attention(engine: Engine) -> None:
    """Compile the CPU attention kernel for the compute dtype, if the model is known to call torch's attention.

    Other models compile the kernel at their first call.
    """
    choice = engine.config.precision.attention
    asks = any(_asks_for_attention(module) for part in engine.modules for module in part.modules())
    if asks and cpu_sdpa.in_use(engine.world.device, choice) != "torch":
        warm.warm_up(lambda line: print(line, flush=True), steps=warm.SPARSE, dtypes=(engine.dtype,))


def _asks_for_attention(module: nn.Module) -> bool:
    """Return whether a module is known to call torch's `scaled_dot_product_attention`.

    Known are the built-in GPT, torch's layer, and transformers.
    """
    chosen = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return chosen == "sdpa" or isinstance(module, CausalAttention | nn.MultiheadAttention)


def _check_islands(mesh: Mesh, config: RunConfig) -> None:
    """Raise ConfigError, on all ranks, if a host has ranks of several islands. Collective with several islands.

    With one island, warn about `outer` settings that have no effect.
    """
    if mesh.layout.islands == 1:
        usual = OuterConfig()
        unused = [name for name in OuterConfig.model_fields if getattr(config.outer, name) != getattr(usual, name)]
        if unused and mesh.rank == 0:
            log.warning(
                "%s: said how islands meet, and parallel.islands is 1, so that nothing meets; set parallel.islands to "
                "2 or more, or leave it out",
                ", ".join(f"outer.{name}" for name in unused),
            )
        return
    problem = host_problem(mesh.layout.islands, mesh.everyone.collect(host_identity()))
    if problem is not None:
        raise ConfigError(problem)


def _tell_of_no_use(optimizer: OptimizerChoice, kind: type[Optimizer], config: RunConfig) -> None:
    """Warn about settings of an optimizer other than the one that trains.

    An optimizer that sends signs uses all of the configuration, also if the caller made it.
    """
    settings = config.optimizer
    if kept_by(kind) is not None:
        return
    name = settings.name if optimizer is None else ""
    if not name and settings.sums_itself:
        log.warning(
            "optimizer.name: says %s, and the optimizer that was given trains, %s, whose gradients travel whole; leave "
            "out `optimizer` to have the other",
            settings.name,
            kind.__name__,
        )
    for field, made_for in settings.of_no_use(name):
        log.warning(
            "optimizer.%s: says how %s goes, and %s trains; set optimizer.name to it%s, or leave it out",
            field,
            " or ".join(made_for),
            name or kind.__name__,
            "" if name else " and give no `optimizer`",
        )


def _check_communicating(kind: type[Optimizer], config: RunConfig, mesh: Mesh) -> None:
    """Check the settings of an optimizer that reduces gradients itself: raise ConfigError, or warn."""
    if kept_by(kind) is not None and mesh.layout.islands > 1:
        raise ConfigError(
            f"parallel.islands {mesh.layout.islands}: {kind.__name__} sums gradients itself, over all ranks in every "
            "step; use AdamW, with outer.compression 'signs'"
        )
    if steps_separate(kind) and mesh.layout.cp > 1:
        raise ConfigError(
            f"parallel.cp {mesh.layout.cp}: ranks of {kind.__name__} make steps of their own, and cp ranks compute one "
            "sequence together, with the same parameters; set it to 1"
        )
    if kept_by(kind) is not None and config.optimizer.in_backward:
        raise ConfigError(f"optimizer.in_backward: {kind.__name__} sums gradients itself, whole ones; set it to false")
    try:
        zero_policy = zero_policy_of(config, dp=mesh.gather.size, device=mesh.device.type)
        check_whole_gradients(kind, zero_policy, config.zero.stage)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if kept_by(kind) is not None and config.clip_norm is not None and mesh.rank == 0:
        log.warning("clip_norm %g: not in steps whose gradients %s sums itself", config.clip_norm, kind.__name__)


def _check_masters(kind: type[Optimizer], modules: Iterable[nn.Module], mesh: Mesh) -> None:
    """Raise ConfigError, on all ranks, if an optimizer with fused kernels would have masters wider than float32.

    Collective, because ranks may have different pipeline stages.
    """
    if not issubclass(kind, FusedOptimizer):
        return
    every = (item for module in modules for item in module.named_parameters())
    wide = [
        (name, parameter.dtype) for name, parameter in every if parameter.requires_grad and parameter.dtype.itemsize > 4
    ]
    found = "{} is trained in {}".format(*wide[0]) if wide else ""
    if problem := next(filter(None, mesh.everyone.collect(found)), ""):
        raise ConfigError(
            f"optimizer: {kind.__name__} updates float32 masters, and {problem}; give parameters in float32 or narrower"
        )


def _take_back(model: nn.Module) -> None:
    """Destroy the engine that already drives this module; the module gets its whole parameters back."""
    reference = _engines.pop(model, None)
    earlier = reference() if reference is not None else None
    if earlier is None:
        return
    earlier.destroy()


def _scheduler(choice: Any, optimizer_choice: OptimizerChoice, config: RunConfig, optimizer: Optimizer) -> Any:
    if choice is None:
        return make_schedule(config.schedule, optimizer, config.steps) if optimizer_choice is None else None
    made = not isinstance(choice, type) and hasattr(choice, "step")
    return choice if made else choice(optimizer)


def _check_scheduler(choice: Any, instance: Optimizer | None) -> None:
    """Raise ConfigError if the scheduler belongs to another optimizer than the one that trains.

    `instance` is the user's optimizer object, if that object trains.
    """
    its = None if isinstance(choice, type) else getattr(choice, "optimizer", None)
    if isinstance(its, Optimizer) and its is not instance:
        raise ConfigError(
            "lr_scheduler: it was made of another optimizer than the one that will train, whose rate would never "
            "change; give its optimizer as optimizer, too, or give a callable that makes the scheduler of an optimizer"
        )


def _refuse_plateau(engine: Engine) -> None:
    """Destroy the engine and raise ConfigError if `engine.step` cannot step the scheduler."""
    if isinstance(engine.scheduler, ReduceLROnPlateau):
        engine.destroy()
        raise ConfigError(
            "lr_scheduler: ReduceLROnPlateau.step takes a metric, which engine.step does not have; leave lr_scheduler "
            "out, make it of the returned optimizer and step it yourself"
        )


def _epochs(data: Dataset[Any] | None, batch: Batch, layout: Layout, rank: int, seed: int) -> Epochs | None:
    """Return the data order of this rank, checked before anything is built."""
    if data is None:
        return None
    # An IterableDataset may have a length, and its inherited __getitem__ only raises.
    if not isinstance(data, Sized) or not hasattr(data, "__getitem__") or isinstance(data, IterableDataset):
        raise ConfigError(
            f"training_data: a {type(data).__name__} has no length or no items by number, so that its order cannot be "
            "shared out; give a map-style dataset, or make a loader of your own"
        )
    share, size = layout.data_index(rank), len(data)
    return Epochs(size, micro_size=batch.micro_size, shares=layout.data_size, share=share, seed=seed)


def _loader(
    data: Dataset[Any] | None, epochs: Epochs | None, batch: Batch, seed: int, collate_fn: Callable[..., Any] | None
) -> DataLoader[Any] | None:
    if data is None or epochs is None:
        return None
    # An own generator, so that starting an epoch does not change torch's random state.
    numbers = torch.Generator().manual_seed(seed)
    return DataLoader(data, batch_size=batch.micro_size, sampler=epochs, collate_fn=collate_fn, generator=numbers)
