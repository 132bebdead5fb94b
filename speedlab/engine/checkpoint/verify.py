"""Verify a checkpoint: files unchanged after the write, and parameters of this engine's model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from speedlab.comm import Group
from speedlab.engine.checkpoint.collective_errors import all_or_none
from speedlab.engine.checkpoint.manifest import read_manifest, sources_of
from speedlab.engine.checkpoint.safetensors_files import hash_of
from speedlab.engine.state import TrainingState
from speedlab.telemetry.checkpoint_index import MANIFEST, CheckpointError, checkpoints_in


def sound_manifest(engine: TrainingState, path: Path, *, verify: bool = True) -> dict[str, Any]:
    """Return the manifest after all checks. Collective; ranks divide the files.

    Args:
        engine: The training state.
        path: The checkpoint.
        verify: False checks sizes instead of hashes.

    Raises:
        CheckpointError: On every rank; it names the file and the problem.
    """
    group = engine.everyone
    manifest = all_or_none(group, lambda: read_manifest(path))
    all_or_none(group, lambda: _check_model(engine, path / MANIFEST, manifest))
    all_or_none(group, lambda: _check_files(path, manifest, group, hashed=verify))
    return manifest


def newest_good(engine: TrainingState, folder: Path, damaged: Path) -> str:
    """Return advice for a damaged checkpoint: the newest good one. Collective.

    Args:
        engine: The training state.
        folder: The folder of all checkpoints.
        damaged: The damaged checkpoint.
    """
    names = [found.path.name for found in checkpoints_in(folder)] if engine.everyone.index == 0 else None
    for name in reversed(engine.everyone.share(names)):
        if name == damaged.name:
            continue
        try:
            sound_manifest(engine, folder / name)
        except CheckpointError:
            continue
        return f"The newest good one is {name}; load it with tag={name!r}"
    return f"{folder} holds no other that is good"


def _check_model(engine: TrainingState, file: Path, manifest: dict[str, Any]) -> None:
    own = {row.name: list(row.whole_shape) for row in engine.placement.rows}
    known = own.keys()
    if engine.layout.pp > 1:
        # Other pipeline ranks hold other parameters.
        known = {name for names in engine.everyone.collect(sorted(own)) for name in names}
    for name, shape in own.items():
        if not math.prod(shape):  # Earlier versions skipped empty parameters.
            empty = {"shape": shape, "trainable": True, "states": {}, "scalars": {}, "slices": []}
            manifest["parameters"].setdefault(name, empty)
    theirs = {name: entry["shape"] for name, entry in manifest["parameters"].items()}
    for name in (*own, *theirs):
        if name not in theirs:
            raise CheckpointError(f"{file}: holds another model: it has no parameter {name}")
        if name not in known:
            raise CheckpointError(f"{file}: holds another model: its parameter {name} is not in this one")
        if name in own and own[name] != theirs[name]:
            raise CheckpointError(
                f"{file}: holds another model: {name} has shape {theirs[name]} there and {own[name]} here"
            )


def _check_files(path: Path, manifest: dict[str, Any], group: Group, *, hashed: bool) -> None:
    for index, (name, expected) in enumerate(manifest["files"].items()):
        if index % group.size == group.index:
            check_file(path / name, expected, hashed=hashed)
            _check_slices(path / name, manifest)


def check_file(file: Path, expected: dict[str, Any], *, hashed: bool) -> None:
    """Check one file of a checkpoint.

    Args:
        file: The path.
        expected: Its entry in the manifest.
        hashed: False checks only the size.

    Raises:
        CheckpointError: If the file is missing or has changed.
    """
    if not file.exists():
        raise CheckpointError(f"{file}: is missing; the checkpoint is not complete")
    size = file.stat().st_size
    if size != expected["bytes"]:
        raise CheckpointError(f"{file}: has {size} bytes, {expected['bytes']} were written; it was cut or changed")
    # Saves without hashes, for folders in memory, allow no further check.
    if hashed and expected["sha256"] is not None and hash_of(file) != expected["sha256"]:
        raise CheckpointError(f"{file}: its content has changed since it was written (sha256 differs)")


def _check_slices(file: Path, manifest: dict[str, Any]) -> None:
    """Raise CheckpointError if a slice of the manifest is not in `file`."""
    try:
        with safe_open(file, framework="pt") as tensors:
            shapes = {key: tensors.get_slice(key).get_shape() for key in tensors.keys()}  # noqa: SIM118  # not a mapping
    except SafetensorError as error:
        raise CheckpointError(f"{file}: is no safetensors file: {error}") from None
    lengths = {key: shape[0] for key, shape in shapes.items() if shape}
    for name, entry in manifest["parameters"].items():
        for source in sources_of(entry):
            end = source.offset + source.stretch.end - source.stretch.start
            for kind in entry["states"] if source.file == file.name else ():
                if end > lengths.get(f"{source.flat}/{kind}", 0):
                    raise CheckpointError(
                        f"{file.with_name(MANIFEST)}: is damaged: it says that {file.name} holds the {kind} "
                        f"of {name}, which it does not"
                    )
