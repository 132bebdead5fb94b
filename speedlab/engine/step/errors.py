"""Errors of a training step, with the rank, the step and the module they belong to."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import nn


class NonFiniteError(FloatingPointError):
    """A loss or a gradient that is not a finite number. The update was not made; parameters are as before the step.

    `ranks`: where the loss itself was not finite; `tensors`: names of parameters with non-finite gradients.
    """

    def __init__(self, message: str, *, step: int, ranks: list[int], tensors: list[str]) -> None:
        super().__init__(message)
        self.speedlab_step = step
        self.ranks, self.tensors = ranks, tensors


def name_module(error: BaseException, models: Iterable[nn.Module], *, step: int, rank: int) -> None:
    """Note on `error` in which module of `models` it was raised (the innermost on its traceback), at which step and
    rank."""
    names = {id(module): name for model in models for name, module in model.named_modules()}
    found = None
    trace = error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and names.get(id(owner)):
            found = names[id(owner)]
        trace = trace.tb_next
    error.speedlab_step = step  # type: ignore[attr-defined]  # read by the cluster's error transport
    error.speedlab_module = found  # type: ignore[attr-defined]  # likewise
    error.add_note(f"rank {rank}, step {step}" + (f", in {found}" if found else ""))
    if isinstance(error, RuntimeError) and re.search(r"dtype|scalar type", str(error)):
        _note_dtypes(error, models)


def _note_dtypes(error: BaseException, models: Iterable[nn.Module]) -> None:
    """Where parameters were brought into another dtype and buffers, as always, were not."""
    buffers = {
        name: each.dtype
        for model in models
        for name, each in model.named_buffers()
        if name.rpartition(".")[2] not in ("running_mean", "running_var")  # Beside parameters in the same dtype.
    }
    narrow = {each.dtype for model in models for each in model.parameters()} & {torch.bfloat16, torch.float16}
    wide = next((name for name, dtype in buffers.items() if dtype == torch.float32), None)
    if wide is not None and narrow:
        dtype = str(narrow.pop()).removeprefix("torch.")
        error.add_note(
            f"parameters compute in {dtype} (precision.dtype) and buffers stay as they are, {wide} in float32: bring "
            f"the model into {dtype} before initialize, by model.to(torch.{dtype}), or set precision.dtype to 'float32'"
        )
