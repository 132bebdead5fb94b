"""The manifest of a checkpoint: the shape of each parameter, and which file holds which slice of it.

| key of a parameter | value                                                                                   |
|--------------------|-----------------------------------------------------------------------------------------|
| `shape`            | of the whole parameter                                                                  |
| `states`           | state name → dtype ("master", "exp_avg", …)                                             |
| `scalars`          | the optimizer's states that are numbers ("step")                                        |
| `slices`           | `file`; tensor `<flat>/<state>` in it; `offset` in that tensor; [`start`, `end`) in the |
|                    | tensor of its `part` (`dim`, `ranges`; absent if a rank held the parameter whole)       |

`kept` has extra tensors of communicating optimizers and islands: name → parameter → slices as above. Each slice has its
`holder`, if several ranks have their own tensor (a worker's error). It is present while the optimizer communicates.

`own` has the extra states of modules for each rank: name → value, as `module_state.encode` writes it. `not_plain` names
quantised and complex parameters, whose files hold other tensors.

Version 1 had no parts; it is read as version 2 without parts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from speedlab.engine.checkpoint.model_description import describe_model
from speedlab.engine.checkpoint.slices import Stretch
from speedlab.engine.state import TrainingState
from speedlab.layout import ShardRange
from speedlab.telemetry.checkpoint_index import MANIFEST, CheckpointError

FORMAT = "speedlab-checkpoint"
VERSION = 2
_READABLE = (1, 2)
_EXPECTED = {"step", "files", "parameters", "loss_scale", "groups", "client_state", "random"}


@dataclass(frozen=True)
class Source:
    """A stretch of a parameter in a file: tensor `<flat>/<state>`, from element `offset`."""

    file: str
    flat: str
    offset: int
    stretch: Stretch


def sources_of(entry: Mapping[str, Any]) -> list[Source]:
    """Return the slices of one parameter.

    Args:
        entry: The parameter's entry in the manifest.
    """
    return [
        Source(
            piece["file"],
            piece["flat"],
            piece["offset"],
            Stretch(_part_of(entry["shape"], piece.get("part")), piece["start"], piece["end"]),
        )
        for piece in entry["slices"]
    ]


def _part_of(shape: list[int], written: Mapping[str, Any] | None) -> ShardRange | None:
    if written is None:
        return None
    return ShardRange(
        shape=tuple(shape), dim=written["dim"], ranges=tuple((low, high) for low, high in written["ranges"])
    )


def describe_part(part: ShardRange | None) -> dict[str, Any]:
    """Return the manifest's description of a shard.

    Args:
        part: The shard; None for the whole parameter.
    """
    return {} if part is None else {"part": {"dim": part.dim, "ranges": [list(pair) for pair in part.ranges]}}


# ---- writing ---------------------------------------------------------------------------------------------------------


def common_of(engine: TrainingState, client_state: dict[str, Any]) -> dict[str, Any]:
    """Return the content of the manifest that is equal on all ranks.

    Args:
        engine: The training state.
        client_state: Values of the caller.
    """
    layout = engine.layout
    common = {
        "format": FORMAT,
        "version": VERSION,
        "step": engine.global_step,
        "skipped_steps": engine.skipped_steps,
        "samples": engine.global_samples,
        "counted_per_micro_batch": engine.counted_per_micro_batch,
        "data": engine.epochs.position() if engine.epochs is not None else None,
        "zero_stage": engine.zero_stage,
        "layout": layout.sizes,
        "loss_scale": engine.loss_scale.state_dict(),
        "schedule": _plain(engine.scheduler.state_dict()) if hasattr(engine.scheduler, "state_dict") else None,
        "groups": [
            _plain({k: v for k, v in group.items() if k != "params"}) for group in engine.optimizer.param_groups
        ],
        "client_state": client_state,
        "config": json.loads(engine.config.to_json()),
    }
    return common | describe_model(engine.modules[0])


def manifest_of(common: dict[str, Any], reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine the ranks' reports in a manifest.

    Args:
        common: From `common_of`.
        reports: The report of each rank.

    Raises:
        ValueError: If the slices do not cover all parameters.
    """
    parameters: dict[str, Any] = {}
    for report in reports:
        for name, own in report["parameters"].items():
            entry = parameters.setdefault(name, {**own, "states": {}, "scalars": {}, "slices": []})
            entry["states"].update(own["states"])
            # All parts of a parameter have the same step count, so any rank's numbers do.
            entry["scalars"] = entry["scalars"] or own["scalars"]
            entry["slices"] += own["slices"]
    kept: dict[str, dict[str, Any]] = {}
    for report in reports:
        for kind, named in report["kept"].items():
            for name, pieces in named.items():
                kept.setdefault(kind, {}).setdefault(name, []).extend(pieces)
    manifest = {
        **common,
        "files": {report["name"]: {"bytes": report["bytes"], "sha256": report["sha256"]} for report in reports},
        "random": [report["random"] for report in reports],
        "buffers": sorted({name for report in reports for name in report["buffers"]}),
        "parameters": parameters,
        "kept": kept,
        "own": [report["own"] for report in reports],
        "not_plain": sorted({name for report in reports for name in report["not_plain"]}),
    }
    check_content(manifest)
    return manifest


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return the entries that JSON can hold."""
    kept = {}
    for key, value in values.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            value = float(value)
        try:
            json.dumps(value)
        except TypeError:
            continue
        kept[key] = value
    return kept


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint folder.

    Args:
        path: The folder.

    Raises:
        CheckpointError: If it is missing, of another format, or damaged.
    """
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_text())
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror}); is this a checkpoint folder?") from None
    except ValueError as error:
        raise CheckpointError(f"{file}: is damaged, not valid JSON ({error})") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{file}: is not the manifest of a SpeedLab checkpoint")
    if manifest.get("version") not in _READABLE:
        raise CheckpointError(
            f"{file}: has version {manifest.get('version')}; this SpeedLab reads versions up to {VERSION}"
        )
    if _EXPECTED - manifest.keys():
        raise CheckpointError(f"{file}: is damaged, it lacks {', '.join(sorted(_EXPECTED - manifest.keys()))}")
    try:
        check_content(manifest)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise CheckpointError(f"{file}: is damaged: {error}") from None
    return manifest


def check_content(manifest: dict[str, Any]) -> None:
    """Check that slices cover every shard once, and shards every parameter.

    Args:
        manifest: The manifest.

    Raises:
        ValueError: If they do not. Entries of a wrong type raise other errors (TypeError, KeyError, …).
    """
    for name, entry in manifest["files"].items():
        # A manifest from elsewhere must not name files outside its folder.
        if Path(name).name != name:
            raise ValueError(f"it names the file {name}, which is outside its own folder")
        if not isinstance(entry["bytes"], int) or not isinstance(entry["sha256"], str | None):
            raise ValueError(f"size and hash of {name} are {entry['bytes']!r} and {entry['sha256']!r}")
    for name, entry in manifest["parameters"].items():
        parts: dict[ShardRange | None, list[Stretch]] = {}
        for source in sources_of(entry):
            if source.file not in manifest["files"]:
                raise ValueError(f"{name} is in {source.file}, which is not among its files")
            if source.offset < 0:
                raise ValueError(f"a slice of {name} begins at element {source.offset} of {source.file}")
            parts.setdefault(source.stretch.part, []).append(source.stretch)
        for part, stretches in parts.items():
            _check_cover(name, math.prod(part.own_shape if part else entry["shape"]), stretches)
        _check_parts(name, entry["shape"], list(parts))
        for mapping in ("states", "scalars"):
            dict(entry[mapping])
    for kind, named in manifest.get("kept", {}).items():
        for name, pieces in named.items():
            _check_kept(kind, name, manifest, pieces)


def _check_kept(kind: str, name: str, manifest: dict[str, Any], pieces: list[dict[str, Any]]) -> None:
    """Check that every holder has each element of each shard once, and that all holders have equal shards."""
    shape, held = manifest["parameters"][name]["shape"], dict[int, set[ShardRange | None]]()
    for holder in sorted({int(piece["holder"]) for piece in pieces}):
        parts: dict[ShardRange | None, list[Stretch]] = {}
        for source in sources_of({"shape": shape, "slices": [p for p in pieces if p["holder"] == holder]}):
            if source.file not in manifest["files"]:
                raise ValueError(f"{kind} of {name} is in {source.file}, which is not among its files")
            parts.setdefault(source.stretch.part, []).append(source.stretch)
        for part, stretches in parts.items():
            _check_cover(f"{kind} of {name}", math.prod(part.own_shape if part else shape), stretches)
        held[holder] = set(parts)
    if list(held) != list(range(len(held))) or len({frozenset(parts) for parts in held.values()}) != 1:
        raise ValueError(f"{kind} of {name} is of ranks {sorted(held)} with different parts")


def _check_cover(name: str, numel: int, stretches: list[Stretch]) -> None:
    covered = 0
    for stretch in sorted(stretches, key=lambda stretch: stretch.start):
        if stretch.start != covered or stretch.end - stretch.start < min(1, numel):
            raise ValueError(f"the slices of {name} have a gap or overlap at element {covered}")
        covered = stretch.end
    if covered != numel:
        raise ValueError(f"the slices of {name} hold {covered} of its {numel} elements")


def _check_parts(name: str, shape: list[int], parts: list[ShardRange | None]) -> None:
    """Check that no index is missing. Shards may overlap, for example if ranks share a key head."""
    if None in parts or not math.prod(shape):
        return
    if not parts:
        raise ValueError(f"{name} has no slices")
    dims = {part.dim for part in parts if part is not None}
    if len(dims) != 1:
        raise ValueError(f"{name} is cut along dimensions {sorted(dims)}")
    size = shape[dims.pop()]
    covered = 0
    for low, high in sorted(pair for part in parts if part is not None for pair in part.ranges):
        if low < 0 or high > size or low >= high:
            raise ValueError(f"a part of {name} is [{low}, {high}) of {size}")
        if low > covered:
            break
        covered = max(covered, high)
    if covered != size:
        raise ValueError(f"no part of {name} holds index {covered} of its {size}")
