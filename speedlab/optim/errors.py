"""Errors of a training step, with the rank, the step and the module they belong to."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from types import FrameType

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class NonFiniteError(FloatingPointError):
    """A loss or a gradient that is not a finite number. No update was made; parameters are as before the step.

    `ranks`: ranks whose loss was not finite. `tensors`: names of parameters with non-finite gradients.
    """

    def __init__(self, message: str, *, step: int, ranks: list[int], tensors: list[str]) -> None:
        super().__init__(message)
        self.speedlab_step = step
        self.ranks, self.tensors = ranks, tensors


def name_module(error: BaseException, models: Iterable[nn.Module], *, step: int, rank: int) -> None:
    """Add the rank, the step and the innermost module on the traceback to an error.

    Args:
        error: The error, which gets attributes and a note.
        models: The model parts of this rank.
        step: Number of the step.
        rank: This rank.
    """
    names = {id(module): name for model in models for name, module in model.named_modules()}
    found = None
    trace = error.__traceback__
    while trace is not None:
        owner = _owner(trace.tb_frame)
        if isinstance(owner, nn.Module) and names.get(id(owner)):
            found = names[id(owner)]
        trace = trace.tb_next
    error.speedlab_step = step  # type: ignore[attr-defined]  # read by the cluster's error transport
    error.speedlab_module = found  # type: ignore[attr-defined]  # likewise
    error.add_note(f"rank {rank}, step {step}" + (f", in {found}" if found else ""))
    if words := words_on_dtypes(error, models) or _words_on_transforms(error):
        error.add_note(words)


def _owner(frame: FrameType) -> object:
    """Return what a frame calls `self`."""
    values = frame.f_locals
    owner = values.get("self")
    code = frame.f_code
    if code.co_flags & inspect.CO_OPTIMIZED and type(values) is dict and not {"locals", "vars"} & set(code.co_names):
        # Before Python 3.13 this is a copy that the frame keeps even after a clear, with all its tensors. (The same
        # copy is the result of `locals()` in user code.)
        values.clear()
    return owner


def _words_on_transforms(error: BaseException) -> str:
    """Return advice if torch.func met hooks on saved tensors; "" for other errors."""
    if "yet support saved tensor hooks" not in str(error):
        return ""
    return (
        "torch.func.grad, vjp and jacrev cannot run in a forward whose parameters are partitioned (ZeRO stage 3) or "
        "offloaded, or inside torch.utils.checkpoint. Use torch.autograd.grad inside the block, or a stage below 3 "
        "without checkpointing"
    )


_NARROW, _WIDE = re.compile(r"BFloat16\b|\bHalf\b|\bb?float16\b"), re.compile(r"\b(Float|float|float32)\b")


def words_on_dtypes(error: BaseException, models: Iterable[nn.Module]) -> str:
    """Return advice if low-precision parameters met float32 buffers, which the engine does not cast.

    Args:
        error: The error.
        models: The model parts of this rank.

    Returns:
        The advice; "" for other errors.
    """
    text = str(error)
    if not isinstance(error, RuntimeError) or not (
        "mixed dtype" in text or (_NARROW.search(text) and _WIDE.search(text))
    ):
        return ""
    models = list(models)
    norms = [layer for model in models for layer in model.modules() if isinstance(layer, _BatchNorm)]
    fit = {id(each) for layer in norms for each in layer.buffers()}  # Batch norms keep float32 parameters.
    named = [item for model in models for item in model.named_buffers()]
    buffers = [name for name, each in named if each.dtype == torch.float32 and id(each) not in fit]
    narrow = {each.dtype for model in models for each in model.parameters()} & {torch.bfloat16, torch.float16}
    if not buffers or not narrow:
        return ""
    dtype = str(narrow.pop()).removeprefix("torch.")
    return (
        f"parameters compute in {dtype} (precision.dtype) and buffers stay as they are, in float32 "
        f"{', '.join(buffers[:3])}{' and more' if len(buffers) > 3 else ''}: bring those that meet parameters into "
        f"{dtype} before initialize (layer.buffer = layer.buffer.to(torch.{dtype})), or set precision.dtype to "
        "'float32'"
    )
