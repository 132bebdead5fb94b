"""Check a user's model before its run starts, and predict its memory, both with fake tensors.

`validate_model` tries one micro-batch:

1. Make the model with fake tensors (shapes without values). If that fails, make it with real tensors, so that errors of
   the constructor reach the user.
2. Check the layout without ranks: pipeline stages and the tensor-parallel plan.
3. Run a micro-batch with fake tensors: `loss_of` must find a loss that depends on parameters.

Fake tensors cannot follow control flow on values, or code outside torch. The model is not refused for that; the result
says what was not tried. After other failures a small model is tried with real tensors first.

`plan_module` predicts memory: forward and backward run on fake tensors, and storages are counted as in
`Engine.trace_activations`:

1. Units are planned as in a run (`plan_units`), and flat parameters laid out as in `planner.memory`.
2. The module becomes fake, in the compute dtype, with blocks wrapped as in a run (`BlockWrapper`).
3. A micro-batch runs; gradients are freed on arrival, as in a run.

Memory is predicted for data parallelism only, because tensor and pipeline parallel layers communicate in forward.
"""

from __future__ import annotations

import copy
import logging
import os
import re
import sysconfig
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from speedlab.comm import Group
from speedlab.config import ConfigError, RunConfig
from speedlab.engine.activation_checkpointing import BlockWrapper
from speedlab.engine.loss import CONTRACT, LossFunction, check_loss, loss_of
from speedlab.engine.memory_ledger import activation_trace
from speedlab.engine.model_construction import ModelSource, make_whole, name_of
from speedlab.engine.placement_builder import zero_policy_of
from speedlab.engine.precision import compute_dtype, dtypes_of
from speedlab.engine.sparse_attention import BlockSparse
from speedlab.layout import Layout, layer_counts, padded_numel
from speedlab.models import GPT
from speedlab.models.hf_attention import packed_if_given
from speedlab.optim.errors import words_on_dtypes
from speedlab.optim.factory import OptimizerFactory
from speedlab.parallel import Materializer
from speedlab.parallel.context import check_model
from speedlab.parallel.pipeline import block_costs
from speedlab.parallel.tensor import TensorParallel
from speedlab.parallel.zero import UnitChoice, UnitPlan, Zero, map_tensors, plan_units
from speedlab.parallel.zero.flat_param import trainable_in_low_precision
from speedlab.placement import EIGHT_BITS, ITEM_BYTES, MemoryKind, Replication
from speedlab.planner.memory.buffers import Passing, sent_by_update
from speedlab.planner.memory.offload import PAGE_BYTES, state_places
from speedlab.planner.memory.predict import borrowed_bytes, flat_elements, passing_bytes
from speedlab.planner.memory.rank_memory import RankMemory

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
    """Predict the memory of each rank at the peak of a step, by the ledger's categories.

    Args:
        source: A module, which is not changed, or a callable that makes one.
        config: The configuration of the run.
        engines: Number of ranks.
        batch: Makes one micro-batch under fake tensors. None: tokens and targets, and positions if documents are
            separate.
        loss: As for `initialize`.
        units: As for `initialize`.

    Raises:
        LayoutError: If the number of ranks does not fit the layout.
        ConfigError: If the layout shards the model.
    """
    layout = config.layout(engines, built_in=False)
    if layout.world_size != layout.dp:
        raise ConfigError(
            f"plan_module: {layout} cuts the model, and a module is traced whole; set tp, pp and cp to 1, or plan the "
            f"built-in GPT by its shape"
        )
    sizes = config.batch.resolve(layout.data_size)
    dtype = compute_dtype(config.precision, torch.device("cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True):  # The block masks of sparse attention are real tensors.
        module = _fake(source)
        dtypes = dtypes_of(module, dtype)
        flats = _flats(module, config, units, dtypes, layout.dp)
        for tensor in module.parameters():
            # In place, so that shared parameters stay shared.
            tensor.data = tensor.data.to(dtypes[id(tensor)])
        made = batch() if batch is not None else _tokens(config, sizes.micro_size)
        activations = _peak(module, config, units, dtype, made, loss)
        buffers = sum(buffer.nbytes for buffer in module.buffers())
    return _memory(flats, config, layout.dp, summed=sizes.accumulation > 1, buffers=buffers, activations=activations)


def _fake(source: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    if not isinstance(source, nn.Module):
        with torch.random.fork_rng([]), torch.device("cpu"):
            return source()
    # No value is copied, because every tensor already has its fake twin.
    return copy.deepcopy(source, fake_twins(source, torch.device("cpu")))


def fake_twins(module: nn.Module, device: torch.device) -> dict[int, Any]:
    """Return a fake tensor for each parameter and buffer, by id of the original. Call this under a fake tensor mode.

    Args:
        module: The module.
        device: Device of the fake tensors.
    """
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
    """The padded size of a flat parameter. `unit` is the number of its unit, 0 for the root."""

    def __init__(self, unit: int, elements: int, dtype: torch.dtype, *, trainable: bool) -> None:
        self.unit, self.elements, self.dtype, self.trainable = unit, elements, dtype, trainable


def _flats(
    module: nn.Module, config: RunConfig, units: UnitChoice | None, dtypes: Mapping[int, torch.dtype], dp: int
) -> list[_Flat]:
    """Return the flat parameters as `Zero` makes them."""
    group_of = OptimizerFactory(None, [module], config.optimizer).group_of
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
    zero_policy, moments = zero_policy_of(config, dp=dp, device="cpu"), config.optimizer.moments
    states: Counter[str] = Counter()
    borrowed: Counter[int] = Counter()
    of_units: defaultdict[int, list[tuple[int, int, bool]]] = defaultdict(list)
    decoded = 0
    for flat in flats:
        low = trainable_in_low_precision(flat.dtype)
        states["parameters"] += zero_policy.parameters.share(flat.elements * flat.dtype.itemsize, dp)
        if zero_policy.secondary_ranks:
            again = Replication.SECONDARY.share(flat.elements, zero_policy.secondary_ranks)
            states["parameters"] += again * flat.dtype.itemsize
        of_units[flat.unit].append((flat.elements, flat.dtype.itemsize, flat.trainable))
        if flat.trainable:
            gradient = flat.elements * (_FLOAT32 if summed and low else flat.dtype.itemsize)
            borrowed[gradient] += 1
            states["gradients"] += 0 if zero_policy.update_in_backward else zero_policy.gradients.share(gradient, dp)
            # Elements whose optimizer states this rank holds.
            owned = zero_policy.optimizer_states.share(flat.elements, dp)
            rounded = flat.dtype == torch.bfloat16 and config.precision.masters == "none"
            separate = zero_policy.separate_masters or (low and not rounded)
            states["master_weights"] += max(_FLOAT32, flat.dtype.itemsize) * owned if separate else 0
            coded = config.precision.moments == EIGHT_BITS and flat.dtype.itemsize <= _FLOAT32
            width = ITEM_BYTES[EIGHT_BITS] if coded else max(_FLOAT32, flat.dtype.itemsize)
            states["optimizer_moments"] += round(moments * width * owned)
            decoded = max(decoded, padded_numel(_FLOAT32 * owned, PAGE_BYTES) * (moments * coded + rounded))
    communication = borrowed_bytes(borrowed, kept=False) if zero_policy.grads_sharded else 0
    root, *blocks = [Passing.of(of_units[unit], zero_policy, dp) for unit in range(max(of_units) + 1)]
    gathered, sent = passing_bytes([(root, blocks)], zero_policy), sent_by_update((root, *blocks), zero_policy)
    communication += gathered + decoded if zero_policy.update_in_backward else max(gathered, decoded, sent)
    held: dict[MemoryKind, dict[str, int]] = {where: {} for where in MemoryKind}
    for state, where in state_places(zero_policy).items():
        held[where][state] = states[state]
    here = held[MemoryKind.DEVICE]
    return RankMemory(
        parameters=here.get("parameters", 0) + buffers,
        gradients=here.get("gradients", 0),
        master_weights=here.get("master_weights", 0),
        optimizer_moments=here.get("optimizer_moments", 0),
        host=held[MemoryKind.HOST],
        disk=held[MemoryKind.DISK],
        ranks=dp,
        activations=activations,
        communication_buffers=communication,
    )


# ---- activations -----------------------------------------------------------------------------------------------------


class _Whole:
    """A stand-in for Zero in `BlockWrapper`, for a module that is whole on this rank."""

    def __init__(self, module: nn.Module, units: list[UnitPlan]) -> None:
        self.module, self.units = module, units

    def checkpointed(self, unit: UnitPlan, module: nn.Module) -> AbstractContextManager[None]:
        """Return a context that does nothing, because no parameter is sharded.

        Args:
            unit: Ignored.
            module: Ignored.
        """
        return nullcontext()


def _peak(
    module: nn.Module,
    config: RunConfig,
    units: UnitChoice | None,
    dtype: torch.dtype,
    batch: Any,
    loss: LossFunction | None,
) -> int:
    """Return the peak bytes of activations in one forward and backward."""
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
        # The trace must include the backward, whose gradients add to the peak.
        result.backward()
        del result
    return trace.peak_bytes


_UNTRIABLE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    NotImplementedError,
)
_UNTRIABLE_MODULES = ("torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes")
"""Modules whose errors say nothing about the model. By name, because their import is slower than a small model."""
_UNTRIABLE_TEXT = re.compile(r"fake ?tensor|fake impl|meta|data pointer|tensor subclass|triton", re.IGNORECASE)
"""Texts of torch's errors for fake tensors in code that needs values, if the exception class does not show this."""

_MOST_REAL_BYTES = 1 << 30
"""Largest model that is tried with real tensors after fake ones failed."""

_BYTES_TOKENS = 256


def validate_model(
    config: RunConfig,
    engines: int,
    *,
    model: ModelSource | None = None,
    loss: LossFunction | None = None,
    tp_plan: Mapping[str, str] | None = None,
    device: torch.device,
) -> dict[str, Any]:
    """Try one micro-batch on the model of a run.

    Args:
        config: The configuration of the run.
        engines: Number of ranks.
        model: A module, which is used up, or a callable that makes one. None: the configuration's GPT.
        loss: As for `initialize`.
        tp_plan: As for `initialize`.
        device: The kind of device that ranks use.

    Returns:
        `parameters` (number of elements), `nbytes` (bytes as made, 0 on meta), `dtype` (compute dtype), and `untried`
        (why no micro-batch was tried, "" if one was).

    Raises:
        ConfigError: If the model cannot be trained.
    """
    layout, dtype = config.layout(engines, built_in=model is None), compute_dtype(config.precision, device)
    check_loss(loss, layout)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    source: ModelSource = model or (lambda: GPT(config.model))
    module = _made(source, config.seed, mode)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigError(f"model: {type(module).__name__} has no parameter that can be trained")
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}.values()
    # Shared tensors count once.
    nbytes = sum(tensor.nbytes for tensor in tensors if tensor.device.type != "meta")
    _check_layout(module, config, layout, tp_plan, device)
    BlockSparse(config.model.attention).within(module)
    given = [(layer, key, tensor) for layer in module.modules() for key, tensor in _tensors_of(layer)]
    try:
        with mode, _without_traces_of_torch():
            _make_fake(module, device, dtype)
            _forward(module, config, layout, loss, device)
        untried = ""
    except ConfigError:
        raise
    except Exception as error:
        # Fake kernels are sometimes stricter than real ones, so a small model gets a real try.
        if 0 < nbytes <= _MOST_REAL_BYTES and not _is_fakes(error):
            for layer, key, tensor in given:
                setattr(layer, key, tensor)
            # A given module got its real tensors back above; a callable makes a new module.
            real = module if isinstance(model, nn.Module) else make_whole(source, config.seed)
            if _works(real, config, layout, loss, device, dtype):
                return {**_described(real, nbytes, dtype), "untried": ""}
        is_fakes = _is_fakes(error) or (nbytes > _MOST_REAL_BYTES and _is_of_meta_kernel(error))
        untried = _reported(error) if is_fakes else _refused(error, module, config, layout)
    return {**_described(module, nbytes, dtype), "untried": untried}


def _described(module: nn.Module, nbytes: int, dtype: torch.dtype) -> dict[str, Any]:
    count = sum(parameter.numel() for parameter in module.parameters())
    return {"parameters": count, "nbytes": nbytes, "dtype": str(dtype).removeprefix("torch.")}


def _made(model: ModelSource, seed: int, mode: FakeTensorMode) -> nn.Module:
    try:
        with mode:
            return make_whole(model, seed)
    except Exception:  # An error of fake tensors, or of the user's code: the real try below shows which.
        pass
    try:
        return make_whole(model, seed)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"model: {name_of(model)}() raised {_reported(error)}") from error


def _check_layout(
    module: nn.Module, config: RunConfig, layout: Layout, tp_plan: Mapping[str, str] | None, device: torch.device
) -> None:
    """Raise ConfigError if the engine could not shard the module, or could not compute its values."""
    stages = layout.pp * config.parallel.stages_per_rank
    try:
        Materializer(module, device=torch.device("cpu"), seed=config.seed).check()
    except ValueError as error:
        raise ConfigError(f"model: {error}") from None
    try:
        if layout.pp > 1 and config.parallel.cut is None:
            costs, first, last = block_costs(module)
            layer_counts(costs, stages, first=first, last=last)
    except ValueError as error:
        raise ConfigError(f"parallel.pp {layout.pp}: {error}") from None
    try:
        peers = cast(Group, _Peers(size=layout.tp, index=0))  # Planning needs only these two attributes.
        TensorParallel(module, peers, plan=tp_plan, sequence=config.parallel.sequence)
    except ValueError as error:
        raise ConfigError(f"parallel.tp {layout.tp}: {error}") from None
    try:
        if layout.cp > 1:
            check_model(module, layout, config.parallel, device.type)
    except ValueError as error:
        raise ConfigError(str(error)) from None


@contextmanager
def _without_traces_of_torch() -> Iterator[None]:
    """Silence torch's own traceback log for shape errors; the exception has the information."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


class _Peers:
    def __init__(self, *, size: int, index: int) -> None:
        self.size, self.index = size, index


def _forward(
    module: nn.Module, config: RunConfig, layout: Layout, loss: LossFunction | None, device: torch.device
) -> None:
    """Run one micro-batch through the module as the engine does."""
    micro_size = config.batch.resolve(layout.data_size).micro_size
    shape = (micro_size, config.data.sequence_length)
    count = 3 if config.data.documents == "separate" else 2
    batch = tuple(torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(count))
    hooks = [
        layer.register_forward_pre_hook(_check_vocabulary(name, batch[0], config))
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Embedding)
    ]
    module.train()
    with packed_if_given(batch):
        found = loss_of(module, batch, loss)
    for hook in hooks:
        hook.remove()
    if not found.requires_grad:
        raise ConfigError(
            f"model: the loss of {type(module).__name__} depends on none of its parameters: nothing would be learnt; "
            f"look for detach(), no_grad() or item() on the way to it"
        )


def _make_fake(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Replace every parameter and buffer by its fake twin, parameters in the compute dtype.

    Needs a fake tensor mode.
    """
    twins = fake_twins(module, device)
    for layer in module.modules():
        for key, tensor in _tensors_of(layer):
            setattr(layer, key, twins[id(tensor)])
    dtypes = dtypes_of(module, dtype)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtypes[id(parameter)])


def _tensors_of(layer: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the layer's own parameters and buffers."""
    named = (*layer._parameters.items(), *layer._buffers.items())
    return [(key, tensor) for key, tensor in named if tensor is not None]


def _works(
    module: nn.Module,
    config: RunConfig,
    layout: Layout,
    loss: LossFunction | None,
    device: torch.device,
    dtype: torch.dtype,
) -> bool:
    """Return whether a micro-batch runs with real tensors.

    Sometimes only fake tensors fail: torch's fake grouped matmul, which transformers' experts call, takes bfloat16
    only.
    """
    try:
        with torch.random.fork_rng([]):
            dtypes = dtypes_of(module, dtype)
            for parameter in module.parameters():
                parameter.data = parameter.data.to(device, dtypes[id(parameter)])
            for layer in module.modules():
                for key, buffer in layer._buffers.items():
                    layer._buffers[key] = None if buffer is None else buffer.to(device)
            _forward(module, config, layout, loss, device)
    except Exception:  # The caller reports the error of the fake tensors.
        return False
    return True


def _check_vocabulary(name: str, tokens: Tensor, config: RunConfig) -> Callable[[nn.Module, Any], None]:
    known = {"bpe": config.data.vocab_size, "bytes": _BYTES_TOKENS}
    count = known.get(config.data.tokenizer, 0)

    def check(layer: nn.Module, args: Any) -> None:
        assert isinstance(layer, nn.Embedding)
        if args and args[0] is tokens and layer.num_embeddings < count:
            smaller = layer.num_embeddings > _BYTES_TOKENS and config.data.tokenizer == "bpe"
            instead = f", or set data.vocab_size to {layer.num_embeddings}" if smaller else ""
            raise ConfigError(
                f"model: {name} has {layer.num_embeddings:,} tokens and the data have {count:,}; make it "
                f"larger{instead}"
            )

    return check


def _is_fakes(error: Exception) -> bool:
    """Return whether the error comes from fake tensors alone."""
    theirs = type(error).__module__.startswith(_UNTRIABLE_MODULES)
    return isinstance(error, _UNTRIABLE) or theirs or _UNTRIABLE_TEXT.search(str(error)) is not None


def _is_of_meta_kernel(error: Exception) -> bool:
    """Return whether torch's meta kernel raised the error for a dtype that real kernels may support."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = any(frame.filename.endswith("torch/_meta_registrations.py") for frame in frames)
    return inside and re.search(r"dtype|bfloat16|float32|bf16", str(error), re.IGNORECASE) is not None


def _refused(error: Exception, module: nn.Module, config: RunConfig, layout: Layout) -> NoReturn:
    """Raise ConfigError for an error of the model itself."""
    micro_size = config.batch.resolve(layout.data_size).micro_size
    shape = f"({micro_size}, {config.data.sequence_length})"
    more = CONTRACT if isinstance(error, TypeError) else words_on_dtypes(error, [module])
    raise ConfigError(
        f"model: it was tried on one micro-batch of tokens and targets, {shape} int64 each, "
        f"and raised {_reported(error)}" + (f"\n{more}" if more else "")
    ) from error


def _reported(error: Exception) -> str:
    """Return the error and its line in the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    installed = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    own = [frame for frame in frames if not frame.filename.startswith((*installed, here, "<frozen"))]
    where = f", in {own[-1].name}, line {own[-1].lineno}" if own else ""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}{where}"
