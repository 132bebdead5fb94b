"""What a module's parameters have to be before flats take them over."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from speedlab.config import ConfigError
from speedlab.engine.step.module_state import NotEncodable, check_state
from speedlab.layout import Layout
from speedlab.parallel.zero.parameter import stays_whole


def check_parameters(module: nn.Module, layout: Layout, compute: torch.dtype) -> None:
    """Raises ConfigError for parameters that this engine would train wrongly, and for what it could not save.
    `compute`: what float32 parameters compute in."""
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
                "engine.destroy() before, which gives them back, or build the model anew"
            )
        other = at.setdefault(parameter.data_ptr(), name)
        if other != name:
            raise ConfigError(
                f"model: {other} and {name} are two parameters in the same memory, which would part here; make them "
                "one parameter: b.weight = a.weight"
            )


def _check_quantized(module: nn.Module, layout: Layout, compute: torch.dtype) -> None:
    """Of parameters that are in no flat."""
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
    """Of what modules have in their state besides parameters and buffers."""
    try:
        check_state(module)
    except NotEncodable as error:
        raise ConfigError(
            f"model: {error}, in a module's state, and a checkpoint pickles nothing; let get_extra_state return "
            "numbers, texts, tensors, and lists and dicts of them"
        ) from None
