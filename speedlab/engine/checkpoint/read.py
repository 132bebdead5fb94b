"""Read a checkpoint: each rank reads the slices that its own layout needs, from any layout's files.

1. The manifest is read and checked against the model.
2. Every file is hashed, divided over the ranks. Damage raises on all ranks, before any change.
3. Each rank copies its slices of each parameter from the mapped files directly to their place.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speedlab.engine.checkpoint.collective_errors import all_or_none
from speedlab.engine.checkpoint.optimizer_feedback import begin_at_zero, load_kept
from speedlab.engine.checkpoint.safetensors_files import Files, real
from speedlab.engine.checkpoint.slices import Stretch, blocks, copy_blocks
from speedlab.engine.checkpoint.verify import newest_good, sound_manifest
from speedlab.engine.checkpoint.write import finish_saving
from speedlab.engine.module_state import (
    decode,
    extra_states,
    frozen_tensors,
    is_text_of_settings,
    put_back,
    put_back_frozen,
)
from speedlab.engine.rng import restore_random
from speedlab.engine.state import TrainingState
from speedlab.optim.communicating_protocols import CommunicatingOptimizer
from speedlab.optim.optimizer_state import Scalars
from speedlab.parallel.zero import FlatParam, ParamSlot
from speedlab.telemetry.checkpoint_index import CheckpointError, Place, find_checkpoint


def load(engine: TrainingState, place: Place, tag: str | None, *, verify: bool = True) -> tuple[Path, dict[str, Any]]:
    """Load a checkpoint into the engine. Collective.

    Args:
        engine: The training state.
        place: The place of the checkpoint, as for `find_checkpoint`.
        tag: Name of the checkpoint; None takes the newest.
        verify: Check the hashes of the files.

    Returns:
        (path of the checkpoint, client state).

    Raises:
        CheckpointError: On every rank, before any change. It names the file, the damage, and the newest good
            checkpoint.
    """
    finish_saving(engine)
    path = all_or_none(engine.everyone, lambda: find_checkpoint(place, tag))
    try:
        manifest = sound_manifest(engine, path, verify=verify)  # 1, 2
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {newest_good(engine, path.parent, path)}") from None
    _refuse_other_optimizer(engine, manifest)
    # No thread may update states during the load.
    engine.partitioned_optimizer.settle()
    engine.replace_what_is_lost()
    with Files(path) as files:  # 3
        all_or_none(engine.everyone, lambda: _check_frozen(engine, files, manifest["files"]))
        _load_flats(engine, files, manifest)
        load_kept(engine, files, manifest)
        _load_rest(engine, files, manifest)
    return path, manifest["client_state"]


def held(engine: TrainingState, flat: FlatParam) -> Iterator[tuple[ParamSlot, Stretch, slice]]:
    """Yield the slices of a flat parameter on this rank.

    Args:
        engine: The training state.
        flat: The flat parameter.

    Yields:
        (slot, stretch of the parameter, range in the flat parameter's states).
    """
    low, high = flat.state_range
    placement = engine.placement
    for slot in flat.slots:
        first, last = max(slot.offset, low), min(slot.offset + slot.numel, high)
        if first < last:
            stretch = Stretch(placement[slot.name].part, first - slot.offset, last - slot.offset)
            yield slot, stretch, slice(first - low, last - low)


def take_whole(
    engine: TrainingState,
    whole: Callable[[str, str], Tensor],
    moments: Collection[str] = (),
    scalars: Mapping[str, float] | None = None,
) -> None:
    """Load values from whole parameters, and reset or set the optimizer state. Collective.

    Args:
        engine: The training state.
        whole: Returns a state ("master" or one of `moments`) of a whole parameter. Called only for parameters on this
            rank; each result is freed after its copy.
        moments: Names of moments to load; without any the optimizer state is reset.
        scalars: States that are numbers, equal for all parameters.
    """
    engine.before_change()
    states: dict[str, dict[str, Tensor]] = {}
    counts: dict[str, Scalars] = {}
    placement = engine.placement
    for flat in engine.flats:
        with _replacing(engine, flat):
            own = empty_states(engine, flat, sorted(moments)) if flat.trainable else {}
            for slot, stretch, place in held(engine, flat):
                shape = placement[slot.name].whole_shape
                everything = Stretch(None, 0, math.prod(shape))
                for kind, state in {"master": flat.master, **own}.items():
                    values = whole(slot.name, kind).reshape(-1)
                    copy_blocks(blocks(shape, everything, stretch), values, state[place])
        if flat.trainable:
            states[flat.name] = own
            counts[flat.name] = {slot.name: dict(scalars or {}) if moments else None for slot in flat.slots}
    engine.partitioned_optimizer.rebuild(states, counts)
    engine.begin_again()
    engine.wait_until_read()


@contextmanager
def _replacing(engine: TrainingState, flat: FlatParam) -> Iterator[None]:
    """Allow writes to masters and moments of `flat` inside; then gather its parameters on all ranks."""
    with engine.partitioned_optimizer.visit(flat, changed=True):
        yield
        published = flat.publish()
        if published is not None:
            published.wait()
    if flat.gradient is not None:
        flat.gradient.forget_kept()


def empty_states(engine: TrainingState, flat: FlatParam, kinds: list[str]) -> dict[str, Tensor]:
    """Return a tensor over the state range for each state of a visited flat parameter; present tensors are reused.

    Args:
        engine: The training state.
        flat: The flat parameter, inside a visit.
        kinds: Names of the states.
    """
    optimizer = engine.partitioned_optimizer
    present = optimizer.states_of(flat)
    return {
        kind: present[kind] if kind in present else optimizer.new_state(flat, kind, flat.master.dtype) for kind in kinds
    }


@torch.no_grad()
def _load_flats(engine: TrainingState, files: Files, manifest: dict[str, Any]) -> None:
    engine.before_change()
    states: dict[str, dict[str, Tensor]] = {}
    scalars: dict[str, Scalars] = {}
    entries = manifest["parameters"]
    may_freeze = isinstance(engine.optimizer, CommunicatingOptimizer)  # `load_kept` decides about frozen variances.
    for flat in engine.flats:
        kinds = sorted({kind for slot in flat.slots for kind in entries[slot.name]["states"]} - {"master"})
        with _replacing(engine, flat):
            own = empty_states(engine, flat, kinds) if flat.trainable else {}
            for slot, stretch, place in held(engine, flat):
                entry = entries[slot.name]
                files.copy(entry, "master", stretch, flat.master[place])
                for kind, state in own.items():
                    if kind in entry["states"]:
                        files.copy(entry, kind, stretch, state[place])
                    else:
                        state[place].zero_()  # The parameter had no history when the checkpoint was written.
            if not may_freeze:
                begin_at_zero(own)
        if flat.trainable:
            states[flat.name] = own
            # A parameter without moments was never updated.
            scalars[flat.name] = {
                slot.name: entries[slot.name]["scalars"] if entries[slot.name]["states"].keys() - {"master"} else None
                for slot in flat.slots
            }
    engine.partitioned_optimizer.rebuild(states, scalars)
    engine.begin_again()
    engine.wait_until_read()
    if not _same_groups(engine, manifest):
        warnings.warn(
            f"the checkpoint's optimizer has {len(manifest['groups'])} groups of parameters and this one has "
            f"{len(engine.optimizer.param_groups)}: the options of groups (lr, weight_decay) stay as they are here",
            UserWarning,
            stacklevel=2,
        )
        return
    for own_group, saved in zip(engine.optimizer.param_groups, manifest["groups"], strict=True):
        own_group.update(
            {
                key: tuple(value) if isinstance(own_group.get(key), tuple) else value
                for key, value in saved.items()
                if key in own_group
            }
        )


def _same_groups(engine: TrainingState, manifest: dict[str, Any]) -> bool:
    return len(manifest["groups"]) == len(engine.optimizer.param_groups)


def _refuse_other_optimizer(engine: TrainingState, manifest: dict[str, Any]) -> None:
    """Raise CheckpointError if the optimizer cannot continue from the states of the checkpoint's optimizer."""
    needed = getattr(engine.optimizer, "needs", frozenset())
    for name, entry in manifest["parameters"].items():
        has = entry["states"].keys() - {"master"}
        lacks = needed - has - entry["scalars"].keys()
        if has and lacks:
            raise CheckpointError(
                f"{name} has {', '.join(sorted(has))} in this checkpoint, and {type(engine.optimizer).__name__} cannot "
                f"begin in the middle without {', '.join(sorted(lacks))}: set optimizer.name to the one with which the "
                "checkpoint was written"
            )


@torch.no_grad()
def _load_rest(engine: TrainingState, files: Files, manifest: dict[str, Any]) -> None:
    """Load buffers, random states, loss scale, schedule and counters."""
    names = list(manifest["files"])
    same_ranks = len(names) == engine.everyone.size
    # With another number of ranks, the first file serves all.
    own = names[engine.everyone.index] if same_ranks else names[0]
    _load_buffers(engine, files, [own, *names])
    _load_module_states(engine, files, manifest, [own, *names])
    # Random states belong to ranks, so another number of ranks cannot use them.
    if same_ranks:
        file = files.file(own)
        tensors = {key: file.get_tensor(key) for key in file.keys() if key.startswith("random/")}  # noqa: SIM118  # not a mapping
        restore_random(manifest["random"][engine.everyone.index], tensors, engine.world.device)
    engine.loss_scale.load_state_dict(manifest["loss_scale"])
    if manifest.get("schedule") and hasattr(engine.scheduler, "load_state_dict"):
        engine.scheduler.load_state_dict({**engine.scheduler.state_dict(), **manifest["schedule"]})
    engine.global_step = manifest["step"]
    # Older checkpoints lack these.
    engine.counted_per_micro_batch = manifest.get("counted_per_micro_batch")
    engine.skipped_steps = manifest.get("skipped_steps", 0)
    engine.global_samples = manifest.get("samples", engine.global_step * engine.batch.global_size)
    if engine.epochs is not None:
        engine.epochs.go_to(manifest.get("data"), trained=engine.global_samples)
    engine.updating = False


def _load_buffers(engine: TrainingState, files: Files, names: list[str]) -> None:
    """Load each buffer from the first file that has it. Every rank wrote the buffers of its pipeline stages."""
    missing = {key: buffer for module in engine.modules for key, buffer in module.named_buffers()}
    for name in names:
        if not missing:
            return
        file = files.file(name)
        for key in [key for key in missing if f"buffer/{key}" in set(file.keys())]:
            real(missing.pop(key)).copy_(file.get_tensor(f"buffer/{key}"))


def _load_module_states(engine: TrainingState, files: Files, manifest: dict[str, Any], names: list[str]) -> None:
    """Load extra states of modules, each from the first of these ranks that has it, and quantised parameters."""
    ranks = [list(manifest["files"]).index(name) for name in names]
    written = manifest.get("own") or [{} for _ in names]  # Older checkpoints have none.
    for module in engine.modules:
        values: dict[str, Any] = {}
        for name in extra_states(module):
            rank = next((rank for rank in ranks if name in written[rank]), None)
            if rank is None:
                warnings.warn(f"{name} is not in the checkpoint and stays as it is", UserWarning, stacklevel=2)
                continue
            values[name] = decode(written[rank][name], _Read(files.file(list(manifest["files"])[rank])))
        put_back(module, values)
        put_back_frozen(module, dict(_saved_frozen(frozen_tensors(module), files, names)))


def _check_frozen(engine: TrainingState, files: Files, names: Iterable[str]) -> None:
    """Raise CheckpointError if parameters outside flat parameters are quantised differently from the checkpoint."""
    for module in engine.modules:
        own, made = frozen_tensors(module), frozen_tensors(module)
        for key, saved in _saved_frozen(own, files, names):
            # The tensor is made on demand, so a write would be lost.
            is_made = own[key].data_ptr() != made[key].data_ptr()
            same = (own[key].shape, own[key].dtype) == (saved.shape, saved.dtype)
            if is_text_of_settings(key) or (same and not (is_made and not own[key].to(saved.device).equal(saved))):
                continue
            raise CheckpointError(
                f"{key}: this model's base is quantised otherwise than the checkpoint's ({own[key].dtype} "
                f"{tuple(own[key].shape)} here, {saved.dtype} {tuple(saved.shape)} there); quantise it alike"
            )


def _saved_frozen(own: Collection[str], files: Files, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield each of these tensors that the checkpoint has, from the first file that has it."""
    missing = set(own)
    for name in names if missing else ():
        file = files.file(name)
        for key in missing & {key.removeprefix("own/") for key in file.keys() if key.startswith("own/")}:  # noqa: SIM118  # not a mapping
            missing.discard(key)
            yield key, file.get_tensor(f"own/{key}")


class _Read(Mapping[str, Tensor]):
    """A mapping of tensors of modules' states in one file."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getitem__(self, key: str) -> Tensor:
        found: Tensor = self._file.get_tensor(f"own/{key}").clone()  # A copy, because the file may be removed.
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(key.removeprefix("own/") for key in self._file.keys() if key.startswith("own/"))  # noqa: SIM118  # not a mapping

    def __len__(self) -> int:
        return sum(1 for _ in self)
