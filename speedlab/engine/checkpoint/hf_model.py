"""The transformers model that an export is for.

It is built on `meta` to learn the tensors of its files, and loaded back from the files to verify them.
"""

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
"""Largest number of names in an error."""

_ROOM = 1.25
"""Memory for loading, relative to the bytes of the files, including tensors under conversion."""


def class_of(config: Mapping[str, Any]) -> Any:
    """Return the transformers class that loads a model.

    Args:
        config: The content of its config.json.

    Raises:
        CheckpointError: If transformers is missing or does not know the class.
    """
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
    """Build a model on `meta`.

    Args:
        folder: Folder with the config.json.
        config: The content of this config.json.

    Raises:
        CheckpointError: If transformers cannot build the model.
    """
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
    """Convert tensors to the names and shapes of transformers' files.

    transformers joins some tensors on load (experts), while other programs read them one by one.

    Args:
        model: The transformers model on `meta`.
        tensors: Tensors by the model's names.

    Returns:
        Tensors by file name; values are read when they are written.
    """
    from transformers.core_model_loading import revert_weight_conversion

    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]] = partial(revert_weight_conversion, model)  # pyright: ignore[reportArgumentType]  # a PreTrainedModel
    like = {name: torch.empty(values.shape, dtype=values.dtype, device="meta") for name, values in tensors.items()}
    # Names and shapes only, on meta.
    together = convert(dict(like))
    # If tensors convert one by one to the same names, each can be read when it is written.
    alone = {name: convert({name: value}) for name, value in like.items()}
    if {key for each in alone.values() for key in each} != set(together):
        # Some file tensors are made of several of the model's, so convert all at once.
        whole = convert({name: read(values) for name, values in tensors.items()})
        return {name: Values.of(value) for name, value in whole.items()}

    @lru_cache(maxsize=2)  # Files are written in order of names, so the parts of two packed tensors alternate.
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
    """Return the whole tensor.

    Args:
        values: A tensor in pieces.
    """
    pieces = [piece if isinstance(piece, Tensor) else piece() for piece in values.pieces]
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).view(values.shape)


def check_loaded_back(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Values]) -> None:
    """Load a folder as its reader will, and compare every parameter.

    If memory is too small for the values, the model is loaded on `meta`, and only names and shapes are compared.

    Args:
        folder: The exported folder.
        config: The content of its config.json.
        tensors: Expected tensors by the model's names.

    Raises:
        CheckpointError: Names what is missing, unexpected or different.
    """
    kind = class_of(config)
    needed = _ROOM * sum(values.nbytes for values in tensors.values())
    with_values = needed < memory_bytes()[1]
    place = {} if with_values else {"device_map": {"": "meta"}}
    try:
        with _quiet():
            model, reported = kind.from_pretrained(folder, output_loading_info=True, dtype=config["dtype"], **place)
    except Exception as error:
        raise CheckpointError(
            f"{folder}: transformers' {kind.__name__} cannot load the export: {type(error).__name__}: {error}"
        ) from None
    problems = {
        "would be initialised at random, because no tensor is loaded into them": reported["missing_keys"],
        "would be ignored": reported["unexpected_keys"],
        "have another shape": [each[0] for each in reported["mismatched_keys"]],
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
    """Return names of parameters and buffers that differ from the exported ones."""
    loaded = model.state_dict()
    wrong = []
    for name, values in tensors.items():
        # A model may skip tensors that it computes itself. The caller reports missing and unexpected tensors.
        if name in loaded:
            ours, theirs = read(values), loaded[name]
            if ours.shape != theirs.shape or not _equal(ours.to(theirs.dtype), theirs.cpu()):
                wrong.append(name)
    return wrong


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' reports, which are for users of a model."""
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
    """Return whether all values are equal; NaN equals NaN."""
    return bool(((ours == theirs) | ((ours != ours) & (theirs != theirs))).all())  # only NaN differs from itself
