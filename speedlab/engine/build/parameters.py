"""What a module's parameters have to be before flats take them over."""

from __future__ import annotations

from torch import nn

from speedlab.config import ConfigError


def check_parameters(module: nn.Module, data_size: int) -> None:
    """Raises ConfigError for parameters that this engine would train wrongly. `data_size`: of how many shares of the
    batch each rank sees one."""
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
        if parameter.is_meta or not parameter.numel():
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
