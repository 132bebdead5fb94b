"""Checkpoints without a layout: each rank writes what it owns, a manifest says which slice of which parameter is where.

The way of a save:
1. Every rank says how many bytes it will write; without room for all of them nothing is written.
2. Every rank writes `rank-<r>.safetensors` into a hidden folder beside the target, and hashes what the disk gives back.
3. Rank 0 writes `manifest.json` and renames the folder. What has the final name is complete.

The way of a load:
1. Rank 0's manifest is read and checked against the model.
2. Every file is hashed, the work divided over the ranks; any damage is an error on all of them, before anything
changes.
3. Each rank reads the slices that its own residency asks for, whatever layout wrote them.
Nothing is ever pickled.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from speedlab.parallel.zero import Flat, Slot

if TYPE_CHECKING:
    from speedlab.comm import Group
    from speedlab.engine.engine import Engine

FORMAT = "speedlab-checkpoint"
VERSION = 1
_MARGIN_BYTES = 2**20
"""Room that must stay free beside the checkpoint itself: headers, manifest, the file system's own needs."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read; the message names the file and what is wrong with it."""


# ---- saving ----------------------------------------------------------------------------------------------------------


def save(engine: Engine, folder: Path, tag: str, client_state: dict[str, Any]) -> Path:
    """Write the engine's whole state as `folder/tag`. Collective. Raises CheckpointError on every rank alike."""
    group = engine.group
    target, hidden = folder / tag, folder / f".{tag}.partial"
    tensors = _own_tensors(engine)
    needed = sum(report for report in group.collect(sum(t.nbytes for t in tensors.values())))
    _all_or_none(group, lambda: _prepare(target, hidden, needed) if group.index == 0 else None)  # 1

    name = f"rank-{engine.world.rank}.safetensors"
    report: dict[str, Any] = {}

    def write() -> None:
        save_file(tensors, hidden / name)
        report.update(name=name, bytes=(hidden / name).stat().st_size, sha256=_hash(hidden / name))
        _to_disk(hidden / name)

    _all_or_none(group, write)  # 2
    ranks = group.collect({**report, "random": _python_random()})
    manifest = _manifest(engine, ranks, client_state)

    def finish() -> None:
        (hidden / "manifest.json").write_text(json.dumps(manifest, indent=1))
        _to_disk(hidden / "manifest.json")
        hidden.rename(target)
        _to_disk(folder)

    _all_or_none(group, lambda: finish() if group.index == 0 else None)  # 3
    return target


def _prepare(target: Path, hidden: Path, needed: int) -> None:
    if target.exists():
        raise CheckpointError(f"{target} exists already and is never overwritten; give another tag or move it away")
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < needed + _MARGIN_BYTES:
        raise CheckpointError(
            f"{target}: the checkpoint needs {needed / 2**20:,.1f} MiB and {free / 2**20:,.1f} MiB are free; "
            "make room or save to another folder. Nothing was written"
        )
    if hidden.exists():
        shutil.rmtree(hidden)  # Left by a save that was cut off; it never got its name.
    hidden.mkdir(mode=0o700)


def _own_tensors(engine: Engine) -> dict[str, Tensor]:
    """This rank's partition of every state of every flat, its buffers and its random states."""
    tensors: dict[str, Tensor] = {}
    for flat in engine.flats:
        for kind, state in _states(engine, flat).items():
            low = flat.state_range[0]
            tensors[_key(flat, kind)] = state[flat.start - low : flat.end - low].detach().cpu().contiguous().clone()
    for name, buffer in engine.module.named_buffers():
        tensors[f"buffer/{name}"] = buffer.detach().cpu().contiguous().clone()
    tensors["random/torch"] = torch.get_rng_state()
    tensors["random/numpy"] = torch.from_numpy(np.random.get_state()[1].astype(np.int64))  # type: ignore[index]  # the legacy tuple
    if engine.world.device.type == "cuda":
        tensors["random/cuda"] = torch.cuda.get_rng_state(engine.world.device)
    return tensors


def _states(engine: Engine, flat: Flat) -> dict[str, Tensor]:
    optimizer = engine.partitioned_optimizer
    return {"master": flat.master, **(optimizer.states_of(flat) if flat.trainable else {})}


def _key(flat: Flat, kind: str) -> str:
    return f"{flat.name}/{kind}"


def _manifest(engine: Engine, ranks: list[dict[str, Any]], client_state: dict[str, Any]) -> dict[str, Any]:
    parameters = {}
    for flat in engine.flats:
        states = _states(engine, flat)
        scalars = engine.partitioned_optimizer.scalars_of(flat) if flat.trainable else {}
        common = next(iter(scalars.values()), {})
        for slot in flat.slots:
            parameters[slot.name] = {
                "shape": list(slot.shape),
                "trainable": flat.trainable,
                "states": {kind: str(state.dtype).removeprefix("torch.") for kind, state in states.items()},
                "scalars": {
                    key: float(value) for key, value in scalars.get(slot.group, common).items() if value is not None
                },
                "slices": [
                    {"file": ranks[index]["name"], "flat": flat.name, "start": low, "end": high, "offset": offset}
                    for index, low, high, offset in _slices(flat, slot)
                ],
            }
    return {
        "format": FORMAT,
        "version": VERSION,
        "step": engine.global_step,
        "zero_stage": engine.zero_stage,
        "files": {rank["name"]: {"bytes": rank["bytes"], "sha256": rank["sha256"]} for rank in ranks},
        "random": [rank["random"] for rank in ranks],
        "loss_scale": engine.loss_scale.state_dict(),
        "schedule": _plain(engine.scheduler.state_dict()) if hasattr(engine.scheduler, "state_dict") else None,
        "groups": [
            _plain({k: v for k, v in group.items() if k != "params"}) for group in engine.optimizer.param_groups
        ],
        "client_state": client_state,
        "config": json.loads(engine.config.to_json()),
        "parameters": parameters,
    }


def _slices(flat: Flat, slot: Slot) -> list[tuple[int, int, int, int]]:
    """(group index, start and end in the parameter, offset in that rank's partition) for each rank that owns some of
    it."""
    size = flat.padded // flat.gather_group.size
    found = []
    for index in range(flat.gather_group.size):
        low, high = max(slot.offset, index * size), min(slot.offset + slot.numel, (index + 1) * size)
        if low < high:
            found.append((index, low - slot.offset, high - slot.offset, low - index * size))
    return found


# ---- loading ---------------------------------------------------------------------------------------------------------


def newest(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step in `folder`, or None."""
    found = []
    for path in folder.glob("*/manifest.json"):
        try:
            found.append((json.loads(path.read_text())["step"], path.parent.name, path.parent))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # Foreign or damaged: not a candidate; asked for by name it gives an error that says so.
    return max(found)[2] if found else None


def load(engine: Engine, folder: Path, tag: str | None) -> tuple[Path, dict[str, Any]]:
    """Bring the engine to the state of a checkpoint. Collective. Raises CheckpointError on every rank alike."""
    group = engine.group
    path = folder / tag if tag else newest(folder)
    if path is None:
        raise CheckpointError(f"{folder}: holds no complete checkpoint; a complete one has a manifest.json")
    manifest = _all_or_none(group, lambda: _read_manifest(path, engine))  # 1
    _all_or_none(group, lambda: _verify(path, manifest, group))  # 2
    _load_flats(engine, path, manifest)  # 3
    _load_rest(engine, path, manifest)
    return path, manifest["client_state"]


def _read_manifest(path: Path, engine: Engine) -> dict[str, Any]:
    file = path / "manifest.json"
    try:
        manifest = json.loads(file.read_text())
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror}); is this a checkpoint folder?") from None
    except ValueError as error:
        raise CheckpointError(f"{file}: is damaged, not valid JSON ({error})") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{file}: is not the manifest of a SpeedLab checkpoint")
    if manifest.get("version") != VERSION:
        raise CheckpointError(f"{file}: has version {manifest.get('version')}; this SpeedLab reads version {VERSION}")
    expected = {"step", "files", "parameters", "loss_scale", "groups", "client_state", "random"}
    if expected - manifest.keys():
        raise CheckpointError(f"{file}: is damaged, it lacks {', '.join(sorted(expected - manifest.keys()))}")
    try:
        _check_shape(manifest)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: is damaged: {error}") from None
    own = {slot.name: list(slot.shape) for flat in engine.flats for slot in flat.slots}
    theirs = {name: entry["shape"] for name, entry in manifest["parameters"].items()}
    for name in {**own, **theirs}:
        if name not in theirs:
            raise CheckpointError(f"{file}: holds another model: it has no parameter {name}")
        if name not in own:
            raise CheckpointError(f"{file}: holds another model: its parameter {name} is not in this one")
        if own[name] != theirs[name]:
            raise CheckpointError(
                f"{file}: holds another model: {name} has shape {theirs[name]} there and {own[name]} here"
            )
    return manifest


def _check_shape(manifest: dict[str, Any]) -> None:
    """Raises ValueError, or what a wrong type raises, unless the slices cover every parameter exactly once."""
    for name, entry in manifest["files"].items():
        if Path(name).name != name:
            raise ValueError(f"it names the file {name}, which is outside its own folder")
        if not isinstance(entry["bytes"], int) or not isinstance(entry["sha256"], str):
            raise ValueError(f"size and hash of {name} are {entry['bytes']!r} and {entry['sha256']!r}")
    for name, entry in manifest["parameters"].items():
        covered = 0
        for piece in sorted(entry["slices"], key=lambda piece: piece["start"]):
            if piece["start"] != covered or piece["end"] <= piece["start"] or piece["offset"] < 0:
                raise ValueError(f"the slices of {name} have a gap or overlap at element {covered}")
            if piece["file"] not in manifest["files"]:
                raise ValueError(f"{name} is in {piece['file']}, which is not among its files")
            covered = piece["end"]
        if covered != math.prod(entry["shape"]):
            raise ValueError(f"the slices of {name} hold {covered} of its {math.prod(entry['shape'])} elements")
        for part in ("states", "scalars"):
            dict(entry[part])


def _check_slices(file: Path, manifest: dict[str, Any]) -> None:
    """Raises CheckpointError when a slice that the manifest tells of is not in `file`."""
    with safe_open(file, framework="pt") as tensors:
        shapes = {key: tensors.get_slice(key).get_shape() for key in tensors.keys()}  # noqa: SIM118  # not a mapping
    lengths = {key: shape[0] for key, shape in shapes.items() if shape}
    for name, entry in manifest["parameters"].items():
        for piece in entry["slices"]:
            end = piece["offset"] + piece["end"] - piece["start"]
            for kind in entry["states"] if piece["file"] == file.name else ():
                if end > lengths.get(f"{piece['flat']}/{kind}", 0):
                    raise CheckpointError(
                        f"{file.with_name('manifest.json')}: is damaged: it says that {file.name} holds the {kind} "
                        f"of {name}, which it does not"
                    )


def _verify(path: Path, manifest: dict[str, Any], group: Group) -> None:
    for index, (name, expected) in enumerate(manifest["files"].items()):
        if index % group.size != group.index:
            continue
        file = path / name
        if not file.exists():
            raise CheckpointError(f"{file}: is missing; the checkpoint is not complete")
        size = file.stat().st_size
        if size != expected["bytes"]:
            raise CheckpointError(f"{file}: has {size} bytes, {expected['bytes']} were written; it was cut or changed")
        if _hash(file) != expected["sha256"]:
            raise CheckpointError(f"{file}: its content has changed since it was written (sha256 differs)")
        _check_slices(file, manifest)


def _load_flats(engine: Engine, path: Path, manifest: dict[str, Any]) -> None:
    optimizer = engine.partitioned_optimizer
    states: dict[str, dict[str, Tensor]] = {flat.name: {} for flat in optimizer.flats}
    scalars: dict[str, dict[int, dict[str, Any]]] = {}
    with _Files(path, manifest) as files:
        for flat in engine.flats:
            entries = manifest["parameters"]
            files.fill(flat, "master", flat.master)
            low, high = flat.state_range
            if flat.trainable:
                for kind in entries[flat.slots[0].name]["states"]:
                    if kind != "master":
                        state = torch.zeros(high - low, dtype=flat.master.dtype, device=flat.full.device)
                        files.fill(flat, kind, state)
                        states[flat.name][kind] = state
                scalars[flat.name] = {
                    slot.group: {key: torch.tensor(value) for key, value in entries[slot.name]["scalars"].items()}
                    for slot in flat.slots
                }
            published = flat.publish()
            if published is not None:
                published.wait()
    optimizer.rebuild(states, scalars)
    for own, saved in zip(engine.optimizer.param_groups, manifest["groups"], strict=False):
        own.update(
            {
                key: tuple(value) if isinstance(own.get(key), tuple) else value
                for key, value in saved.items()
                if key in own
            }
        )


class _Files:
    """Open rank files, from which slices are copied without reading the rest."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self._path, self._parameters = path, manifest["parameters"]
        self._open: dict[str, Any] = {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.clear()

    @torch.no_grad()
    def fill(self, flat: Flat, kind: str, target: Tensor) -> None:
        """Copy state `kind` of the flat's parameters into `target`, which spans the flat's state range."""
        low, high = flat.state_range
        for slot in flat.slots:
            for piece in self._parameters[slot.name]["slices"]:
                first = max(slot.offset + piece["start"], low)
                last = min(slot.offset + piece["end"], high)
                if first >= last:
                    continue
                skip = piece["offset"] + first - slot.offset - piece["start"]
                values = self._slice(piece["file"], f"{piece['flat']}/{kind}", skip, last - first)
                target[first - low : last - low].copy_(values)

    def _slice(self, file: str, key: str, start: int, length: int) -> Tensor:
        try:
            if file not in self._open:
                self._open[file] = safe_open(self._path / file, framework="pt")
            return self._open[file].get_slice(key)[start : start + length]
        except SafetensorError as error:
            raise CheckpointError(f"{self._path / file}: {key} cannot be read: {error}") from None


def _load_rest(engine: Engine, path: Path, manifest: dict[str, Any]) -> None:
    """Buffers, random states, scaler, schedule and the step."""
    names = list(manifest["files"])
    same_ranks = len(names) == engine.group.size
    own = names[engine.group.index] if same_ranks else names[0]
    with safe_open(path / own, framework="pt") as file:
        keys = set(file.keys())
        for name, buffer in engine.module.named_buffers():
            if f"buffer/{name}" in keys:
                buffer.copy_(file.get_tensor(f"buffer/{name}"))
        if same_ranks:
            torch.set_rng_state(file.get_tensor("random/torch"))
            _set_python_random(manifest["random"][engine.group.index], file.get_tensor("random/numpy"))
            if "random/cuda" in keys and engine.world.device.type == "cuda":
                torch.cuda.set_rng_state(file.get_tensor("random/cuda"), engine.world.device)
    engine.loss_scale.load_state_dict(manifest["loss_scale"])
    if manifest.get("schedule") and hasattr(engine.scheduler, "load_state_dict"):
        engine.scheduler.load_state_dict({**engine.scheduler.state_dict(), **manifest["schedule"]})
    engine.global_step = manifest["step"]
    engine.updating = False


# ---- small things ----------------------------------------------------------------------------------------------------


def _all_or_none(group: Group, work: Any) -> Any:
    """Run `work` on every rank; if it fails on one, every rank raises CheckpointError with that rank's reason."""
    result, problem = None, None
    try:
        result = work()
    except CheckpointError as error:
        problem = str(error)
    except OSError as error:
        problem = f"{error.filename or ''}: {error.strerror or error}"
    for report in group.collect(problem):
        if report is not None:
            raise CheckpointError(report)
    return result


def _hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """The entries that JSON can hold."""
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


def _python_random() -> dict[str, Any]:
    version, state, gauss = random.getstate()
    _, _, position, has_gauss, cached = np.random.get_state()
    return {"python": [version, list(state), gauss], "numpy": [int(position), int(has_gauss), float(cached)]}


def _set_python_random(saved: dict[str, Any], numpy_keys: Tensor) -> None:
    version, state, gauss = saved["python"]
    random.setstate((version, tuple(state), gauss))
    position, has_gauss, cached = saved["numpy"]
    np.random.set_state(("MT19937", numpy_keys.numpy().astype(np.uint32), position, has_gauss, cached))
