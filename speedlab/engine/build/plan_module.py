"""Predicted memory of any module: its own forward and backward are run on fake tensors, which hold no memory, and
counted as `Engine.trace_activations` counts a real step.

1. Units are planned as for a run (`plan_units`), and flats laid out as `planner.memory` does.
2. The module becomes fake, in the compute dtype, its blocks wrapped as a run's (`BlockWrapper`).
3. A micro-batch goes through it; gradients are let go when they arrive, as flats take them.

Under data parallelism only: layers that are cut, and pipelines, communicate while they compute.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from speedlab.config import ConfigError, RunConfig
from speedlab.engine.build.placing import residency_of
from speedlab.engine.build.recipe import Recipe
from speedlab.engine.build.wrap import BlockWrapper
from speedlab.engine.step.losses import LossFunction, loss_of
from speedlab.engine.step.memory import activation_trace
from speedlab.engine.step.precision import compute_dtype, dtypes_of
from speedlab.layout import padded_numel
from speedlab.models.packed import packed_if_given
from speedlab.parallel.zero import UnitChoice, UnitPlan, Zero, map_tensors, plan_units
from speedlab.parallel.zero.flat_param import trainable_in_low_precision
from speedlab.placement import EIGHT_BITS, ITEM_BYTES, Holders, Where
from speedlab.planner.away import PAGE_BYTES, state_places
from speedlab.planner.memory import borrowed_bytes, flat_elements, passing_bytes
from speedlab.planner.passing import Passing, sent_by_update
from speedlab.planner.rank_memory import RankMemory

_FLOAT32 = 4


def plan_module(
    source: nn.Module | Callable[[], nn.Module],
    config: RunConfig,
    engines: int = 1,
    *,
    batch: Callable[[], Any] | None = None,
    loss: LossFunction | None = None,
    units: UnitChoice | None = None,
) -> RankMemory:
    """What each of `engines` ranks will hold at the peak of a step, by the ledger's categories.

    Args:
        source: a module, which stays as it is, or a callable that makes one.
        batch: makes one micro-batch, while tensors are fake; None: tokens and targets, and positions where documents
            are separate, as the configuration says.
        loss, units: as for `initialize`.

    Raises LayoutError or ConfigError when the configuration has no such layout.
    """
    layout = config.layout(engines, built_in=False)
    if layout.world_size != layout.dp:
        raise ConfigError(
            f"plan_module: {layout} cuts the model, and a module is traced whole; set tp, pp and cp to 1, or plan the "
            f"built-in GPT by its shape"
        )
    sizes = config.batch.resolve(layout.data_size)
    dtype = compute_dtype(config.precision, torch.device("cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True):  # The blocks that sparse attention sees are real.
        module = _fake(source)
        dtypes = dtypes_of(module, dtype)
        flats = _flats(module, config, units, dtypes, layout.dp)
        for tensor in module.parameters():
            tensor.data = tensor.data.to(dtypes[id(tensor)])
        made = batch() if batch is not None else _tokens(config, sizes.micro_size)
        activations = _peak(module, config, units, dtype, made, loss)
        buffers = sum(buffer.nbytes for buffer in module.buffers())
    return _memory(flats, config, layout.dp, summed=sizes.accumulation > 1, buffers=buffers, activations=activations)


def _fake(source: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    if not isinstance(source, nn.Module):
        with torch.random.fork_rng([]), torch.device("cpu"):
            return source()
    # No value is copied: every tensor has its twin already.
    return copy.deepcopy(source, fake_twins(source, torch.device("cpu")))


def fake_twins(module: nn.Module, device: torch.device) -> dict[int, Any]:
    """By the id of each parameter and buffer, a fake one like it on `device`. Called while tensors are fake."""
    twins: dict[int, Any] = {}
    for parameter in module.parameters():
        fake_one = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        twins[id(parameter)] = nn.Parameter(fake_one, parameter.requires_grad)
    for buffer in module.buffers():
        twins[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
    return twins


def _tokens(config: RunConfig, micro_size: int) -> tuple[Tensor, ...]:
    count = 3 if config.data.documents == "separate" else 2
    return tuple(torch.zeros(micro_size, config.data.sequence_length, dtype=torch.int64) for _ in range(count))


# ---- flats -----------------------------------------------------------------------------------------------------------


class _Flat:
    """Elements of a flat, padded. `unit` is the number of its unit, the root's 0."""

    def __init__(self, unit: int, elements: int, dtype: torch.dtype, *, trainable: bool) -> None:
        self.unit, self.elements, self.dtype, self.trainable = unit, elements, dtype, trainable


def _flats(
    module: nn.Module, config: RunConfig, units: UnitChoice | None, dtypes: Mapping[int, torch.dtype], dp: int
) -> list[_Flat]:
    """As `Zero` makes them of the same units."""
    group_of = Recipe(None, [module], config.optimizer).group_of
    flats = []
    for number, plan in enumerate(plan_units(module, units, bucket_bytes=config.zero.bucket_bytes)):
        sizes: dict[tuple[torch.dtype, bool], list[int]] = defaultdict(list)
        for parameter in sorted(plan.parameters.values(), key=lambda p: group_of.get(id(p), 0)):
            sizes[dtypes[id(parameter)], parameter.requires_grad].append(parameter.numel())
        for (dtype, trainable), each in sizes.items():
            coded = trainable and config.precision.moments == EIGHT_BITS
            elements = flat_elements(each, dtype.itemsize, dp, coded=coded)
            flats.append(_Flat(number, elements, dtype, trainable=trainable))
    return flats


def _memory(
    flats: list[_Flat], config: RunConfig, dp: int, *, summed: bool, buffers: int, activations: int
) -> RankMemory:
    residency, moments = residency_of(config, dp=dp, device="cpu"), config.optimizer.moments
    states: Counter[str] = Counter()
    borrowed: Counter[int] = Counter()
    of_units: defaultdict[int, list[tuple[int, int, bool]]] = defaultdict(list)
    decoded = 0
    for flat in flats:
        low = trainable_in_low_precision(flat.dtype)
        states["parameters"] += residency.parameters.share(flat.elements * flat.dtype.itemsize, dp)
        if residency.secondary_ranks:
            again = Holders.SECONDARY.share(flat.elements, residency.secondary_ranks)
            states["parameters"] += again * flat.dtype.itemsize
        of_units[flat.unit].append((flat.elements, flat.dtype.itemsize, flat.trainable))
        if flat.trainable:
            gradient = flat.elements * (_FLOAT32 if summed and low else flat.dtype.itemsize)
            borrowed[gradient] += 1
            states["gradients"] += 0 if residency.gradients_used else residency.gradients.share(gradient, dp)
            owned = residency.optimizer_states.share(flat.elements, dp)
            rounded = flat.dtype == torch.bfloat16 and config.precision.masters == "none"
            apart = residency.separate_masters or (low and not rounded)
            states["master_weights"] += max(_FLOAT32, flat.dtype.itemsize) * owned if apart else 0
            coded = config.precision.moments == EIGHT_BITS and flat.dtype.itemsize <= _FLOAT32
            width = ITEM_BYTES[EIGHT_BITS] if coded else max(_FLOAT32, flat.dtype.itemsize)
            states["optimizer_moments"] += round(moments * width * owned)
            decoded = max(decoded, padded_numel(_FLOAT32 * owned, PAGE_BYTES) * (moments * coded + rounded))
    communication = borrowed_bytes(borrowed, kept=False) if residency.gradients_go else 0
    root, *blocks = [Passing.of(of_units[unit], residency, dp) for unit in range(max(of_units) + 1)]
    gathered, sent = passing_bytes([(root, blocks)], residency), sent_by_update((root, *blocks), residency)
    communication += gathered + decoded if residency.gradients_used else max(gathered, decoded, sent)
    held: dict[Where, dict[str, int]] = {where: {} for where in Where}
    for state, where in state_places(residency).items():
        held[where][state] = states[state]
    here = held[Where.DEVICE]
    return RankMemory(
        parameters=here.get("parameters", 0) + buffers,
        gradients=here.get("gradients", 0),
        master_weights=here.get("master_weights", 0),
        optimizer_moments=here.get("optimizer_moments", 0),
        host=held[Where.HOST],
        disk=held[Where.DISK],
        ranks=dp,
        activations=activations,
        communication_buffers=communication,
    )


# ---- activations -----------------------------------------------------------------------------------------------------


class _Whole:
    """What `BlockWrapper` uses of a Zero, for a module that is on this rank as a whole."""

    def __init__(self, module: nn.Module, units: list[UnitPlan]) -> None:
        self.module, self.units = module, units

    def checkpointed(self, unit: UnitPlan, module: nn.Module) -> AbstractContextManager[None]:
        """Nothing has to be unsharded."""
        return nullcontext()


def _peak(
    module: nn.Module,
    config: RunConfig,
    units: UnitChoice | None,
    dtype: torch.dtype,
    batch: Any,
    loss: LossFunction | None,
) -> int:
    """The most bytes of a forward and backward in training."""
    whole = _Whole(module, plan_units(module, units, bucket_bytes=config.zero.bucket_bytes))
    BlockWrapper(
        [cast(Zero, whole)],
        checkpointing=config.activation.checkpointing,
        compile=False,
        device=torch.device("cpu"),
    )

    def let_go(parameter: Tensor) -> None:
        parameter.grad = None

    def known() -> set[int]:
        return {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers())}

    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(let_go)
    batch = map_tensors(batch, lambda t: t.to(dtype) if t.dtype == torch.float32 else t)
    module.train()
    with ExitStack() as stack:
        stack.enter_context(packed_if_given(batch))
        trace = stack.enter_context(activation_trace(known))
        result = loss_of(module, batch, loss)
        result.backward()
        del result
    return trace.peak_bytes
