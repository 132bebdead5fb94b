"""Whether a model of the user's can be trained as asked, found out before its run has a name.

1. It is made: under fake tensors, which have shapes and no values, and where that fails for real, so that what its
   constructor raises is the user's to mend.
2. What can be known of a layout without ranks: whether it can be cut into stages, or as its plan says.
3. A micro-batch goes through it under fake tensors: `losses.loss_of` finds a loss, which depends on its parameters.

Fake tensors cannot follow what depends on values, nor code outside of torch. A model is not refused for that: the
answer says what could not be tried. If they fail otherwise, a small model is tried with real tensors before any blame.
"""

from __future__ import annotations

import logging
import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
from speedlab.engine.build.attention import BlockSparse
from speedlab.engine.build.making import ModelSource, make_whole, name_of
from speedlab.engine.build.plan_module import fake_twins
from speedlab.engine.step.errors import words_on_dtypes
from speedlab.engine.step.losses import CONTRACT, LossFunction, check_loss, loss_of
from speedlab.engine.step.precision import compute_dtype, dtypes_of
from speedlab.layout import Layout, layer_counts
from speedlab.models import GPT
from speedlab.models.packed import packed_if_given
from speedlab.parallel import Materializer
from speedlab.parallel.context import check_model
from speedlab.parallel.pipeline import block_costs
from speedlab.parallel.tensor import TensorParallel

_UNTRIABLE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    NotImplementedError,
)
_UNTRIABLE_MODULES = ("torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes")
"""Whose errors are none of the model's. By name: importing them takes every rank longer than building a small model."""
_UNTRIABLE_TEXT = re.compile(r"fake ?tensor|fake impl|meta|data pointer|tensor subclass|triton", re.IGNORECASE)
"""What torch says where a fake tensor comes to code that needs values, and no class of exception tells."""

_MOST_REAL_BYTES = 1 << 30
"""A model of at most this size is tried with real tensors if fake ones fail."""

_BYTES_TOKENS = 256


def try_model(
    config: RunConfig,
    engines: int,
    *,
    model: ModelSource | None = None,
    loss: LossFunction | None = None,
    tp_plan: Mapping[str, str] | None = None,
    device: torch.device,
) -> dict[str, Any]:
    """Try one micro-batch on the model of a run, the configuration's GPT when `model` is None.

    Returns the number of its `parameters`, its `nbytes` as it is made (0 on meta), the `dtype` it computes in, and why
    it could not be tried, `untried`, '' when it was. A given module is used up. Raises ConfigError for what cannot be
    trained: what came, where, and what is expected.
    """
    layout, dtype = config.layout(engines, built_in=model is None), compute_dtype(config.precision, device)
    check_loss(loss, layout)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    source: ModelSource = model or (lambda: GPT(config.model))
    module = _made(source, config.seed, mode)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigError(f"model: {type(module).__name__} has no parameter that can be trained")
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}.values()
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
        if 0 < nbytes <= _MOST_REAL_BYTES and not _is_fakes(error):
            for layer, key, tensor in given:
                setattr(layer, key, tensor)
            real = module if isinstance(model, nn.Module) else make_whole(source, config.seed)
            if _works(real, config, layout, loss, device, dtype):
                return {**_described(real, nbytes, dtype), "untried": ""}
        is_fakes = _is_fakes(error) or (nbytes > _MOST_REAL_BYTES and _is_of_meta_kernel(error))
        untried = _told(error) if is_fakes else _refused(error, module, config, layout)
    return {**_described(module, nbytes, dtype), "untried": untried}


def _described(module: nn.Module, nbytes: int, dtype: torch.dtype) -> dict[str, Any]:
    count = sum(parameter.numel() for parameter in module.parameters())
    return {"parameters": count, "nbytes": nbytes, "dtype": str(dtype).removeprefix("torch.")}


def _made(model: ModelSource, seed: int, mode: FakeTensorMode) -> nn.Module:
    try:
        with mode:
            return make_whole(model, seed)
    except Exception:  # Of fake tensors, or the user's own: a real try tells.
        pass
    try:
        return make_whole(model, seed)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"model: {name_of(model)}() raised {_told(error)}") from error


def _check_layout(
    module: nn.Module, config: RunConfig, layout: Layout, tp_plan: Mapping[str, str] | None, device: torch.device
) -> None:
    """Raise ConfigError where the engine would refuse to cut the module, or to give it values."""
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
        peers = cast(Group, _Peers(size=layout.tp, index=0))  # Planning asks for no more of them.
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
    """torch logs a traceback of its own for every shape that does not fit; the error says it."""
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
    """One micro-batch through the module, as the engine would do it."""
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
    """Every parameter and buffer by its fake twin, parameters in the compute dtype. Called while tensors are fake."""
    twins = fake_twins(module, device)
    for layer in module.modules():
        for key, tensor in _tensors_of(layer):
            setattr(layer, key, twins[id(tensor)])
    dtypes = dtypes_of(module, dtype)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtypes[id(parameter)])


def _tensors_of(layer: nn.Module) -> list[tuple[str, Tensor]]:
    """The layer's own parameters and buffers."""
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
    """Whether a micro-batch goes through the module with real tensors. Fake ones sometimes fail alone: torch's fake
    grouped product, which transformers' experts call, takes bfloat16 only."""
    try:
        with torch.random.fork_rng([]):
            dtypes = dtypes_of(module, dtype)
            for parameter in module.parameters():
                parameter.data = parameter.data.to(device, dtypes[id(parameter)])
            for layer in module.modules():
                for key, buffer in layer._buffers.items():
                    layer._buffers[key] = None if buffer is None else buffer.to(device)
            _forward(module, config, layout, loss, device)
    except Exception:  # What fake tensors said is the reason that is told.
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
    """Whether the error is known to be of fake tensors alone."""
    theirs = type(error).__module__.startswith(_UNTRIABLE_MODULES)
    return isinstance(error, _UNTRIABLE) or theirs or _UNTRIABLE_TEXT.search(str(error)) is not None


def _is_of_meta_kernel(error: Exception) -> bool:
    """Whether torch's description of an operation raised it over a dtype, which kernels may well take."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = any(frame.filename.endswith("torch/_meta_registrations.py") for frame in frames)
    return inside and re.search(r"dtype|bfloat16|float32|bf16", str(error), re.IGNORECASE) is not None


def _refused(error: Exception, module: nn.Module, config: RunConfig, layout: Layout) -> NoReturn:
    """Raise ConfigError for an error that is the model's own."""
    micro_size = config.batch.resolve(layout.data_size).micro_size
    shape = f"({micro_size}, {config.data.sequence_length})"
    more = CONTRACT if isinstance(error, TypeError) else words_on_dtypes(error, [module])
    raise ConfigError(
        f"model: it was tried on one micro-batch of tokens and targets, {shape} int64 each, and raised {_told(error)}"
        + (f"\n{more}" if more else "")
    ) from error


def _told(error: Exception) -> str:
    """The error, and where in the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    installed = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
    here = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    own = [frame for frame in frames if not frame.filename.startswith((*installed, here, "<frozen"))]
    where = f", in {own[-1].name}, line {own[-1].lineno}" if own else ""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}{where}"
