"""Module state besides flat parameters and buffers: extra states and quantised parameters.

| entry                                       | from                                        | loaded by           |
|---------------------------------------------|---------------------------------------------|---------------------|
| `<module>._extra_state`                     | `get_extra_state`                           | `set_extra_state`   |
| other keys of `_save_to_state_dict`         | bitsandbytes: scales, codes of a weight     | writing into them   |
| `<parameter>`, `<parameter>.<inner tensor>` | parameters in no flat parameter (quantised) | the same            |

Nothing is pickled. A value is a number, text, list, tuple or dict with text keys, and may contain tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from speedlab.parallel.zero.parameter import stays_whole, tensors_inside

EXTRA = nn.modules.module._EXTRA_STATE_KEY_SUFFIX


class NotEncodable(ValueError):  # noqa: N818  # what was found
    """A value of another type; the text names the type."""


def entries(module: nn.Module) -> dict[str, Any]:
    """Return these entries of all submodules, as `module.state_dict` has them.

    Args:
        module: The model or its pipeline stage.

    Returns:
        Values by full name.
    """
    found: dict[str, Any] = {}
    for prefix, inner in module.named_modules():
        start = f"{prefix}." if prefix else ""
        if _has_extra_state(inner):
            found[start + EXTRA] = inner.get_extra_state()
        found |= _own_keys(inner, start)
    return found | {name: parameter.detach() for name, parameter in module.named_parameters() if stays_whole(parameter)}


def extra_states(module: nn.Module) -> dict[str, Any]:
    """Return the result of `get_extra_state` of all submodules.

    Args:
        module: The model or its pipeline stage.

    Returns:
        Values by full name.
    """
    named = [(prefix, inner) for prefix, inner in module.named_modules() if _has_extra_state(inner)]
    return {(f"{prefix}." if prefix else "") + EXTRA: inner.get_extra_state() for prefix, inner in named}


def frozen_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of quantised parameters, which are in no flat parameter.

    Args:
        module: The model or its pipeline stage.

    Returns:
        The parameters' own tensors by full name, so that writes change the parameters.
    """
    found: dict[str, Tensor] = {}
    for prefix, inner in module.named_modules():
        own = _own_keys(inner, f"{prefix}." if prefix else "")
        found |= {name: value for name, value in own.items() if isinstance(value, Tensor)}
    for name, parameter in module.named_parameters():
        if stays_whole(parameter):
            found |= dict(tensors_inside(name, parameter))
    return found


def check_state(module: nn.Module) -> None:
    """Check that all entries can be saved.

    Args:
        module: The model or its pipeline stage.

    Raises:
        NotEncodable: Names the first value that cannot be saved.
    """
    for name, value in extra_states(module).items():
        encode(name, value)
    for prefix, inner in module.named_modules():
        for name, value in _own_keys(inner, f"{prefix}." if prefix else "").items():
            if not isinstance(value, Tensor):
                raise NotEncodable(f"{name} is a {type(value).__name__}")


def put_back(module: nn.Module, values: Mapping[str, Any]) -> None:
    """Load extra states into submodules.

    Args:
        module: The model or its pipeline stage.
        values: As from `extra_states`.
    """
    for prefix, inner in module.named_modules():
        name = (f"{prefix}." if prefix else "") + EXTRA
        if name in values and _has_extra_state(inner):
            inner.set_extra_state(values[name])


def put_back_frozen(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Write values into the tensors of quantised parameters.

    Args:
        module: The model or its pipeline stage.
        values: As from `frozen_tensors`.
    """
    for name, own in frozen_tensors(module).items():
        if name in values and own.shape == values[name].shape:
            own.copy_(values[name])
    # 4-bit settings of bitsandbytes, which include numbers of the values, are text in a tensor made on demand.
    for prefix, inner in module.named_modules():
        start = f"{prefix}.weight." if prefix else "weight."
        weight: Any = getattr(inner, "weight", None)
        state: Any = getattr(weight, "quant_state", None)
        own_values = {name: value for name, value in values.items() if name.startswith(start + "quant_state.")}
        if own_values and hasattr(state, "from_dict"):
            own_values |= {name: value.clone() for name, value in values.items() if name.startswith(start)}
            weight.quant_state = type(state).from_dict(own_values, device=weight.device)
            if getattr(inner, "quant_state", None) is not None:
                inner.quant_state = weight.quant_state


def is_text_of_settings(name: str) -> bool:
    """Return whether `put_back_frozen` rebuilds settings from this tensor instead of writing into it.

    Args:
        name: Full name of the tensor.
    """
    return ".quant_state." in name


def encode(name: str, value: Any) -> tuple[Any, dict[str, Tensor]]:
    """Encode a value as JSON plus tensors.

    Args:
        name: Name of the value, which prefixes the names of its tensors.
        value: The value.

    Returns:
        (JSON value, tensors by name).

    Raises:
        NotEncodable: Names the first inner value that is neither JSON nor a tensor.
    """
    tensors: dict[str, Tensor] = {}

    def visit(at: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            kind = "complex" if value.is_complex() else "tensor"
            tensors[at] = value.detach()  # Files hold complex tensors as pairs.
            return {kind: at}
        if isinstance(value, Mapping) and all(type(key) is str for key in value):
            return {"dict": {key: visit(f"{at}/{key}", each) for key, each in value.items()}}
        if isinstance(value, list | tuple):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [visit(f"{at}/{number}", each) for number, each in enumerate(value)]}
        if value is None or type(value) in (bool, int, float, str):
            return value
        raise NotEncodable(f"{at} is a {type(value).__name__}")

    return visit(name, value), tensors


def decode(written: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Undo `encode`.

    Args:
        written: The JSON value.
        tensors: The tensors by name.
    """
    if not isinstance(written, dict):
        return written
    ((kind, value),) = written.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "complex":
        found = tensors[value]
        return found if found.is_complex() else torch.view_as_complex(found)
    if kind == "dict":
        return {key: decode(each, tensors) for key, each in value.items()}
    made = [decode(each, tensors) for each in value]
    return made if kind == "list" else tuple(made)


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _own_keys(module: nn.Module, start: str) -> dict[str, Any]:
    """Return entries that a class adds to its state besides parameters, buffers and `_extra_state`."""
    if type(module)._save_to_state_dict is nn.Module._save_to_state_dict:
        return {}
    state: dict[str, Any] = {}
    module._save_to_state_dict(state, start, True)
    known = {*module._parameters, *module._buffers, EXTRA}
    others = {name: value for name, value in state.items() if name[len(start) :] not in known}
    # Another name of a parameter has no own values.
    return {name: value for name, value in others.items() if not isinstance(value, nn.Parameter)}
