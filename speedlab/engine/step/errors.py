"""Errors of a training step, with the rank, the step and the module they belong to."""

from __future__ import annotations

from collections.abc import Iterable

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
