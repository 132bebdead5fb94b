"""Merge PEFT adapters into their model, so that an export is a plain transformers model.

1. Build the adapted model again on `meta`, from the configurations in the checkpoint.
2. Load values of modules with adapters, in float32. All others are written directly from the checkpoint.
3. Let PEFT merge. Adapters that PEFT cannot merge (prompts, for example) are refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from speedlab.engine.checkpoint.hf_model import read
from speedlab.engine.checkpoint.model_description import PEFT_PREFIX
from speedlab.engine.checkpoint.safetensors_files import Values
from speedlab.telemetry.checkpoint_index import CheckpointError

_INSTEAD = (
    "write the adapter alone. Call on every rank: state = engine.state_dict(), and "
    "engine.module.save_pretrained(folder, state_dict=state, is_main_process=rank == 0)"
)


def merged(
    base: nn.Module,
    described: Mapping[str, Any],
    tensors: Mapping[str, Values],
    dtype: torch.dtype | None,
) -> dict[str, Values]:
    """Return the tensors of the merged model, by the names of the model without adapters.

    Args:
        base: The transformers model without adapters, on `meta`.
        described: The adapters, from `describe_model`.
        tensors: Tensors of the adapted model, by its names; read one at a time.
        dtype: Dtype of merged weights; None: float32, as the adapters are trained.

    Raises:
        CheckpointError: If PEFT cannot merge the adapters, or is not installed.
    """
    try:
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper
    except ImportError:
        raise CheckpointError(
            "the model has adapters of PEFT, which is not installed here, so that they cannot be merged; install it: "
            "pip install peft"
        ) from None
    adapted = _adapted(base, described)
    # Names with and without PEFT's prefix are accepted.
    own = {PEFT_PREFIX + name.removeprefix(PEFT_PREFIX): values for name, values in tensors.items()}
    source = _sources(adapted, own)
    for module in adapted.modules():
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            _fill(cast(nn.Module, module), source, own)
    try:
        with torch.no_grad():
            whole = adapted.merge_and_unload()
    except Exception as error:
        raise CheckpointError(
            f"adapters: PEFT cannot merge them: {type(error).__name__}: {error}; {_INSTEAD}"
        ) from None
    found: dict[str, Values] = {}
    persistent = whole.state_dict(keep_vars=True)
    seen: set[int] = set()
    for name, tensor in persistent.items():
        if id(tensor) in seen:
            continue  # Tied weights are written under the first name.
        seen.add(id(tensor))
        if id(tensor) in source:
            found[name] = own[source[id(tensor)][0]]
        elif tensor.is_meta:
            raise CheckpointError(f"adapters: the checkpoint has no values for {name}; {_INSTEAD}")
        else:
            made = tensor.detach() if dtype is None or not tensor.is_floating_point() else tensor.detach().to(dtype)
            found[name] = Values.of(made)
    return found


def _adapted(base: nn.Module, described: Mapping[str, Any]) -> Any:
    """Return the adapted model on `meta`."""
    from peft import get_peft_model
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING

    model: Any = None
    for name, values in described["adapters"].items():
        kind: Any = PEFT_TYPE_TO_CONFIG_MAPPING.get(values.get("peft_type"))
        tuner: Any = PEFT_TYPE_TO_TUNER_MAPPING.get(values.get("peft_type"))
        if kind is None or tuner is None or not hasattr(tuner, "merge_and_unload"):
            raise CheckpointError(
                f"adapters: {name} is {values.get('peft_type')}, which cannot be merged into the model; {_INSTEAD}"
            )
        known = inspect.signature(kind).parameters
        options = {key: value for key, value in values.items() if key in known and key != "peft_type"}
        # Values come from the checkpoint, and some initialisations would decompose the weights.
        options |= {key: True for key in ("init_lora_weights", "init_weights") if key in options}
        try:
            with torch.device("meta"):
                if model is None:
                    model = get_peft_model(base, kind(**options), adapter_name=name)  # pyright: ignore[reportArgumentType]  # a PreTrainedModel
                else:
                    model.add_adapter(name, kind(**options))
        except Exception as error:
            raise CheckpointError(f"adapters: {name} cannot be built again: {error}; {_INSTEAD}") from None
    model.base_model.set_adapter(described["active"])
    return model


_Sources = dict[int, tuple[str, Tensor]]
"""By id of a tensor on `meta`: its name in the checkpoint, and the tensor itself, to keep the id in use."""


def _sources(adapted: nn.Module, own: Mapping[str, Values]) -> _Sources:
    state = adapted.state_dict(keep_vars=True)
    same = {name: tensor for name, tensor in state.items() if name in own and tensor.shape == own[name].shape}
    return {id(tensor): (name, tensor) for name, tensor in same.items()}


def _fill(module: nn.Module, source: _Sources, own: Mapping[str, Values]) -> None:
    """Load a module with adapters in float32, so that merging does not round."""
    for part in module.modules():
        held: list[tuple[Callable[[str, Any], None], str, Tensor]] = [
            *(
                (partial(_set_parameter, part), key, value)
                for key, value in part._parameters.items()
                if value is not None
            ),
            *((partial(_set_buffer, part), key, value) for key, value in part._buffers.items() if value is not None),
        ]
        for put, key, tensor in held:
            if tensor.is_meta and id(tensor) in source:
                value = read(own[source[id(tensor)][0]])
                narrow = value.is_floating_point() and value.itemsize < 4
                put(key, value.float() if narrow else value)


def _set_parameter(module: nn.Module, key: str, value: Tensor) -> None:
    module._parameters[key] = nn.Parameter(value, requires_grad=False)


def _set_buffer(module: nn.Module, key: str, value: Tensor) -> None:
    module._buffers[key] = value
