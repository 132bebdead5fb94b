"""The model of transformers that an export is for: built on `meta`, to say which tensors its files have, and loaded
back from the files, to prove that they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from speedlab.engine.checkpoint.safetensors_files import Values
from speedlab.hardware import memory_bytes
from speedlab.telemetry.checkpoint_index import CheckpointError

_NAMED = 3
"""So many names an error lists."""

_ROOM = 1.25
"""Loading takes the files' bytes in memory, and this factor for what is converted on the way."""


def class_of(config: Mapping[str, Any]) -> Any:
    """The class of transformers that loads a model of this configuration. Raises CheckpointError."""
    try:
        import transformers
    except ImportError:
        raise CheckpointError(
            "transformers is not installed, so that an export cannot be loaded back and checked; install it: "
            "pip install transformers"
        ) from None
    names = config.get("architectures") or ()
    for name in names:
        if hasattr(transformers, name):
            return getattr(transformers, name)
    if names:
        raise CheckpointError(
            f"{names[0]} is no class of this version of transformers ({transformers.__version__}), which could load "
            "the export back; give the configuration of one with config="
        )
    return transformers.AutoModelForCausalLM


def on_meta(folder: Path, config: Mapping[str, Any]) -> nn.Module:
    """A model of this configuration, which is in the folder's config.json, without values. Raises CheckpointError."""
    kind = class_of(config)
    import transformers

    try:
        made = transformers.AutoConfig.from_pretrained(folder)
        with torch.device("meta"), _quiet():
            return kind(made) if hasattr(kind, "_from_config") else kind.from_config(made)
    except Exception as error:
        raise CheckpointError(
            f"transformers cannot build a model of the configuration ({config.get('model_type')!r}): "
            f"{type(error).__name__}: {error}"
        ) from None


def as_in_files(model: nn.Module, tensors: dict[str, Values]) -> dict[str, Values]:
    """The tensors under the names and in the shapes of transformers' files: it joins some when it loads them (experts),
    and other programs read them one by one. A tensor is read when it is written."""
    from transformers.core_model_loading import revert_weight_conversion

    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]] = partial(revert_weight_conversion, model)  # pyright: ignore[reportArgumentType]  # a PreTrainedModel
    like = {name: torch.empty(values.shape, dtype=values.dtype, device="meta") for name, values in tensors.items()}
    together = convert(dict(like))
    alone = {name: convert({name: value}) for name, value in like.items()}
    if {key for each in alone.values() for key in each} != set(together):
        # Some are made of several of ours: they are converted at once.
        whole = convert({name: read(values) for name, values in tensors.items()})
        return {name: Values.of(value) for name, value in whole.items()}

    @lru_cache(maxsize=2)  # Files are written by names, by which the parts of two packed tensors alternate.
    def parts(name: str) -> dict[str, Tensor]:
        return convert({name: read(tensors[name])})

    found: dict[str, Values] = {}
    for name, values in tensors.items():
        made = alone[name]
        if list(made) == [name] and made[name].shape == values.shape:
            found[name] = values
            continue
        for key, value in made.items():
            found[key] = Values(tuple(value.shape), value.dtype, [partial(_part_of, parts, name, key)])
    return found


def _part_of(parts: Callable[[str], dict[str, Tensor]], name: str, key: str) -> Tensor:
    return parts(name)[key].contiguous().view(-1)


def read(values: Values) -> Tensor:
    """The whole tensor."""
    pieces = [piece if isinstance(piece, Tensor) else piece() for piece in values.pieces]
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).view(values.shape)


def check_loaded_back(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Values]) -> None:
    """Load the folder as its reader will, and compare every parameter with `tensors`, by the model's own names.

    If memory does not suffice for the values, they are loaded to `meta`: then the names and shapes are compared.
    Raises CheckpointError naming what is missing, unexpected or different.
    """
    kind = class_of(config)
    needed = _ROOM * sum(values.nbytes for values in tensors.values())
    with_values = needed < memory_bytes()[1]
    place = {} if with_values else {"device_map": {"": "meta"}}
    try:
        with _quiet():
            model, told = kind.from_pretrained(folder, output_loading_info=True, dtype=config["dtype"], **place)
    except Exception as error:
        raise CheckpointError(
            f"{folder}: transformers' {kind.__name__} cannot load the export: {type(error).__name__}: {error}"
        ) from None
    problems = {
        "would be initialised at random, because no tensor is loaded into them": told["missing_keys"],
        "would be ignored": told["unexpected_keys"],
        "have another shape": [each[0] for each in told["mismatched_keys"]],
        "come back with other values": _different(model, tensors) if with_values else (),
    }
    for what, names in problems.items():
        if names:
            some = sorted(names)
            more = f" and {len(some) - _NAMED} more" if len(some) > _NAMED else ""
            raise CheckpointError(
                f"loaded back by transformers' {kind.__name__}, {', '.join(some[:_NAMED])}{more} {what}; the export is "
                "not kept. The model is another than its configuration says; give that configuration with config="
            )


def _different(model: nn.Module, tensors: Mapping[str, Values]) -> list[str]:
    """Names of the parameters and buffers that are not equal to what was exported."""
    loaded = model.state_dict()
    wrong = []
    for name, values in tensors.items():
        # A model may leave out what it computes itself: missing and unexpected tensors are told elsewhere.
        if name in loaded:
            ours, theirs = read(values), loaded[name]
            if ours.shape != theirs.shape or not _equal(ours.to(theirs.dtype), theirs.cpu()):
                wrong.append(name)
    return wrong


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' reports, which are for models that somebody wants to use."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _equal(ours: Tensor, theirs: Tensor) -> bool:
    """Whether all values are equal; NaN equals itself."""
    return bool(((ours == theirs) | ((ours != ours) & (theirs != theirs))).all())  # only NaN differs from itself
