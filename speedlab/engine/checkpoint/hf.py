"""Export to and import from transformers folders, under any layout.

A transformers model keeps its own parameter names. The built-in GPT uses the names of the architecture that computes
the same (`hf_architectures.py`). Weights are safetensors; pickles are refused.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from speedlab.config import ModelConfig
from speedlab.engine.checkpoint.collective_errors import all_or_none, on_first
from speedlab.engine.checkpoint.hf_architectures import Architecture, Theirs, architecture_of, shapes_of
from speedlab.engine.checkpoint.hf_model import as_in_files, check_loaded_back, on_meta
from speedlab.engine.checkpoint.manifest import read_manifest
from speedlab.engine.checkpoint.peft_adapters import merged
from speedlab.engine.checkpoint.read import take_whole
from speedlab.engine.checkpoint.safetensors_files import Files, Values, to_disk, write_tensors
from speedlab.engine.checkpoint.slices import Stretch
from speedlab.engine.checkpoint.verify import check_file
from speedlab.engine.checkpoint.write import save
from speedlab.engine.entry_points import entry_point
from speedlab.engine.state import TrainingState
from speedlab.telemetry.checkpoint_index import CheckpointError, Place, find_checkpoint
from speedlab.telemetry.run_folder import TOKENIZER

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DECIDING = (
    *("n_head", "activation_function", "layer_norm_epsilon", "num_attention_heads", "num_key_value_heads"),
    *("hidden_act", "rms_norm_eps", "norm_epsilon", "rope_theta", "tie_word_embeddings"),
)
"""Fields of transformers configurations that change the result even if all shapes agree."""


# ---- export ----------------------------------------------------------------------------------------------------------


@entry_point()
def export_hf(
    source: TrainingState | Place,
    folder: Place,
    *,
    tag: str | None = None,
    config: Any = None,
    dtype: torch.dtype | str | None = None,
    shard_bytes: int = 5 * 10**9,
) -> Path:
    """Write a folder that transformers' `from_pretrained` loads.

    For a run's checkpoint the folder also contains the tokenizer, for `AutoTokenizer.from_pretrained`.

    1. PEFT adapters are merged into the model, in float32 unless `dtype` says otherwise.
    2. Tensors get the names and shapes of transformers' files (packed experts are split).
    3. The folder is loaded back and every parameter compared, before the folder gets its name.

    Args:
        source: An engine (collective over all ranks), or the place of a checkpoint as in `find_checkpoint`, for one
            process:
            the checkpoint's folder, a folder of several, or a run's folder.
        folder: The new folder; must not exist.
        tag: Name of the checkpoint in a folder of several; None takes the newest.
        config: Configuration of a transformers model: object, dict, or path of a config.json. Needed only if the saved
            model had none.
        dtype: Dtype of the weights, as torch dtype or name; None keeps the masters' dtype.
        shard_bytes: Largest file size in bytes, unless a single parameter is larger.

    Returns:
        The folder.

    Raises:
        CheckpointError: If transformers has no such model (the error names the fields), or if the folder does not load
            back with equal values.
    """
    folder = Path(folder).expanduser()
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    if isinstance(source, str | os.PathLike):
        _export(find_checkpoint(source, tag), folder, config, wanted, shard_bytes)
        return folder
    if tag is not None:
        raise CheckpointError(f"tag={tag!r} names a checkpoint, and the source is an engine; give its folder instead")
    # A temporary checkpoint, because the export reads checkpoints, of any layout.
    passing = folder.parent / f".{folder.name}.checkpoint"
    engine = source
    on_first(engine.everyone, lambda: shutil.rmtree(passing, ignore_errors=True))
    try:
        path = save(engine, passing, "values", {}, verify=False, moments=False)
        on_first(engine.everyone, lambda: _export(path, folder, config, wanted, shard_bytes))
    finally:
        if engine.everyone.index == 0:
            shutil.rmtree(passing, ignore_errors=True)
    return folder


def _export(path: Path, folder: Path, config: Any, dtype: torch.dtype | None, shard_bytes: int) -> None:
    # Never overwrite a folder of the user.
    if folder.exists():
        raise CheckpointError(f"{folder} exists already and is never overwritten; give another name or move it away")
    manifest = read_manifest(path)
    if not_plain := manifest.get("not_plain"):
        raise CheckpointError(
            f"{folder}: {not_plain[0]} is quantised or complex, and an export has plain weights; "
            "write the adapters alone, by PEFT's save_pretrained(folder, state_dict=state) with the dict that "
            "engine.state_dict() returns, or export a model of plain weights"
        )
    for name, expected in manifest["files"].items():
        # Check hashes first: an export of damaged values would look valid.
        check_file(path / name, expected, hashed=True)
    architecture = _architecture(path, manifest, config)
    hidden = folder.parent / f".{folder.name}.partial"
    shutil.rmtree(hidden, ignore_errors=True)
    try:
        hidden.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error.strerror}; give another folder") from None
    try:
        with Files(path) as files:  # The numbers are the steps of `export_hf`.
            tensors = _tensors(files, manifest, architecture, dtype)
            # Needed now, because `on_meta` reads the configuration from the folder.
            _write_config(hidden, architecture.config)
            if "peft" in manifest:
                tensors = merged(on_meta(hidden, architecture.config), manifest["peft"], tensors, dtype)  # 1
            stored = {str(values.dtype).removeprefix("torch.") for values in tensors.values() if _floats(values.dtype)}
            described = {**architecture.config, "dtype": sorted(stored)[-1]}
            # Again, now with the dtype of the stored weights.
            _write_config(hidden, described)
            _write_shards(hidden, as_in_files(on_meta(hidden, described), tensors), shard_bytes)  # 2
            check_loaded_back(hidden, described, tensors)  # 3
        _copy_tokenizer(path, hidden)
        hidden.rename(folder)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    to_disk(folder / "config.json")


def _copy_tokenizer(path: Path, folder: Path) -> None:
    """Copy the tokenizer of a run's folder, which is next to the checkpoints; other folders have none."""
    for file in (path.parent.parent / TOKENIZER).glob("tokenizer*.json"):
        shutil.copyfile(file, folder / file.name)


def _architecture(path: Path, manifest: dict[str, Any], config: Any) -> Architecture:
    """Return the transformers architecture of a checkpoint's model."""
    theirs = _as_dict(config) if config is not None else manifest.get("huggingface")
    if theirs is not None:
        names = [*manifest["parameters"], *manifest.get("buffers", ())]
        return Architecture(theirs, {name: Theirs((name,)) for name in names}, "")
    model = ModelConfig(**manifest.get("model", manifest["config"]["model"]))
    if model.attention.kind != "dense":
        raise CheckpointError(
            f"{path}: model.attention.kind is {model.attention.kind!r}, and no architecture of transformers attends to "
            "blocks as this model does; train on with 'dense' to export it, or load the checkpoint in SpeedLab"
        )
    own = _built_in(model, {name: tuple(entry["shape"]) for name, entry in manifest["parameters"].items()})
    if own is None:
        raise CheckpointError(
            f"{path}: is neither the built-in GPT nor a model that carries a configuration of transformers; "
            "give that of a model of transformers with config= (`speedlab export --config config.json`)"
        )
    return own


def _built_in(model: ModelConfig, shapes: dict[str, tuple[int, ...]]) -> Architecture | None:
    """Return the architecture of this GPT, if parameters of these shapes belong to it."""
    known = shapes_of(model)
    return architecture_of(model) if all(known.get(name) == shape for name, shape in shapes.items()) else None


def _as_dict(config: Any) -> dict[str, Any]:
    if isinstance(config, str | os.PathLike):
        return _json(Path(config))
    return dict(config) if isinstance(config, Mapping) else json.loads(config.to_json_string(use_diff=False))


def _tensors(
    files: Files, manifest: dict[str, Any], architecture: Architecture, dtype: torch.dtype | None
) -> dict[str, Values]:
    """Return the tensors to write, by transformers' names. Each parameter is assembled when it is written."""
    tensors = {}
    for name, theirs in architecture.parameters.items():
        if name not in manifest["parameters"]:
            read = partial(_buffer, files, manifest, name)
            tensors[name] = Values.of(read())
            continue
        entry = manifest["parameters"][name]
        stored = getattr(torch, entry["states"]["master"])
        wanted = dtype if dtype is not None and _floats(stored) else stored
        shape = list(entry["shape"])
        if theirs.transposed:
            shape.reverse()
        shape[:1] = [size // len(theirs.names) for size in shape[:1]]
        for index, their_name in enumerate(theirs.names):
            read = partial(_part, files, entry, theirs, index, stored, wanted)
            tensors[their_name] = Values(tuple(shape), wanted, [read])
    return tensors


def _part(
    files: Files, entry: dict[str, Any], theirs: Theirs, index: int, stored: torch.dtype, wanted: torch.dtype
) -> Tensor:
    shape = entry["shape"]
    whole = torch.empty(math.prod(shape), dtype=stored)
    files.copy(entry, "master", Stretch(None, 0, whole.numel()), whole)
    return theirs.split(whole.view(shape))[index].to(wanted).view(-1)


def _buffer(files: Files, manifest: dict[str, Any], name: str) -> Tensor:
    for file in manifest["files"]:
        opened = files.file(file)
        if f"buffer/{name}" in set(opened.keys()):
            return opened.get_tensor(f"buffer/{name}").clone()
    raise CheckpointError(f"no file of the checkpoint holds the buffer {name}")


def _write_shards(folder: Path, tensors: dict[str, Values], shard_bytes: int) -> None:
    shards: list[dict[str, Values]] = [{}]
    held = 0
    for name, values in tensors.items():
        if shards[-1] and held + values.nbytes > shard_bytes:
            shards.append({})
            held = 0
        shards[-1][name] = values
        held += values.nbytes
    count = len(shards)
    files = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)] if count > 1 else [_SINGLE]
    for file, shard in zip(files, shards, strict=True):
        write_tensors(folder / file, shard, metadata={"format": "pt"})
    if count > 1:
        total = sum(values.nbytes for values in tensors.values())
        places = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
        to_disk(folder / _INDEX)


def _floats(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point


# ---- import ----------------------------------------------------------------------------------------------------------


def import_hf(folder: Place, engine: TrainingState) -> None:
    """Load the parameters of a transformers folder into an engine of the same model, under any layout. Collective.

    The optimizer state is reset.

    Args:
        folder: The transformers folder.
        engine: The training state.

    Raises:
        CheckpointError: On every rank, before any change, if the folder holds another model or pickles.
    """
    group, path = engine.everyone, Path(folder).expanduser()
    files = all_or_none(group, lambda: _weight_files(path))
    wanted = all_or_none(group, lambda: _wanted(path, files, engine))
    opened: dict[Path, Any] = {}

    def whole(name: str, kind: str) -> Tensor:
        theirs, names = wanted[name]
        for their_name in names:
            opened.setdefault(files[their_name], safe_open(files[their_name], framework="pt"))
        return theirs.join([opened[files[their_name]].get_tensor(their_name) for their_name in names])

    with torch.no_grad():
        take_whole(engine, whole)


def _weight_files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor in the folder."""
    index = folder / _INDEX
    if index.exists():
        places = _json(index).get("weight_map", {})
        # An index from elsewhere must not name files outside its folder.
        outside = [file for file in places.values() if Path(file).name != file]
        if outside:
            raise CheckpointError(f"{index}: names the file {outside[0]}, which is outside its own folder")
        return {name: folder / file for name, file in places.items()}
    single = folder / _SINGLE
    if single.exists():
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    pickles = [path.name for path in (*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth"))]
    if pickles:
        raise CheckpointError(
            f"{folder / pickles[0]}: is a pickle, which could run anything and is never read; convert the model to "
            "safetensors, with save_pretrained of transformers where its origin is trusted"
        )
    raise CheckpointError(f"{folder}: holds no {_SINGLE} and no {_INDEX}; is this a folder of transformers?")


def _wanted(folder: Path, files: dict[str, Path], engine: TrainingState) -> dict[str, tuple[Theirs, list[str]]]:
    """Return the layout and the file names of each parameter on this rank. Checks all shapes."""
    shapes = {row.name: row.whole_shape for row in engine.placement.rows}
    architecture = _of_engine(engine, shapes)
    _check_config(folder / "config.json", architecture.config)
    wanted = {}
    for name, shape in shapes.items():
        theirs = architecture.parameters[name]
        names = [_find(files, their_name, architecture.prefix, folder) for their_name in theirs.names]
        found = [_shape(files[their_name], their_name) for their_name in names]
        turned = [list(reversed(s)) if theirs.transposed else s for s in found]
        joined = [sum(s[0] for s in turned), *turned[0][1:]] if turned[0] else []
        if joined != list(shape):
            raise CheckpointError(
                f"{files[names[0]]}: holds another model: {names[0]} has shape {found[0]} there, and "
                f"{name} has {list(shape)} here"
            )
        wanted[name] = theirs, names
    return wanted


def _of_engine(engine: TrainingState, shapes: dict[str, tuple[int, ...]]) -> Architecture:
    model: Any = getattr(engine.modules[0], "config", None)
    if hasattr(model, "model_type") and hasattr(model, "to_json_string"):
        prefix = getattr(engine.modules[0], "base_model_prefix", "")
        names = {name: Theirs((name,)) for name in shapes}
        return Architecture(_as_dict(model), names, f"{prefix}." if prefix else "")
    own = _built_in(model if isinstance(model, ModelConfig) else engine.config.model, shapes)
    if own is None:
        raise CheckpointError(
            "the engine's model is neither the built-in GPT nor one of transformers; there are no names to look for"
        )
    return own


def _check_config(file: Path, ours: dict[str, Any]) -> None:
    theirs = _json(file)
    for field in ("model_type", *_DECIDING):
        here, there = _field(ours, field), _field(theirs, field)
        if here is not None and there is not None and here != there:
            raise CheckpointError(f"{file}: holds another model: {field} is {there!r} there and {here!r} here")


def _field(config: dict[str, Any], name: str) -> Any:
    """Return a field of a configuration. The rotary base is nested since transformers 5."""
    if name == "rope_theta":
        return (config.get("rope_parameters") or {}).get(name, config.get(name))
    return config.get(name)


def _find(files: Mapping[str, Path], name: str, prefix: str, folder: Path) -> str:
    """Return the tensor's name in the files, which may or may not have the model's prefix."""
    for known in (name, name.removeprefix(prefix), prefix + name):
        if known in files:
            return known
    raise CheckpointError(f"{folder}: holds another model: it has no tensor {name}")


def _shape(file: Path, name: str) -> list[int]:
    with safe_open(file, framework="pt") as opened:
        return list(opened.get_slice(name).get_shape())


def _json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text())
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise CheckpointError(f"{file}: is damaged, not valid JSON ({error})") from None
