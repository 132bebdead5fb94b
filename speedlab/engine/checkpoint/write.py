"""Write a checkpoint: each rank writes its part, then rank 0 writes the manifest and renames the folder.

1. Every rank reports how many bytes it will write. Without room for all of them nothing is written.
2. Every rank writes `rank-<r>.safetensors` into a hidden folder next to the target, hashed and synced to disk, and a
   report of its contents.
3. Rank 0 makes `manifest.json` from the reports and renames the folder. A folder with the final name is complete.

For a background save, 2 and 3 use copies of the tensors, in a thread without collectives.
"""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speedlab.engine.checkpoint.async_save import (
    Saving,
    await_outcome,
    await_reports,
    given_up,
    peers_of,
    report_file,
    take_reports,
    tell_failed,
    whose,
    write_report,
)
from speedlab.engine.checkpoint.collective_errors import all_or_none, on_first
from speedlab.engine.checkpoint.manifest import common_of, describe_part, manifest_of
from speedlab.engine.checkpoint.safetensors_files import Values, real, to_disk, write_tensors
from speedlab.engine.module_state import NotEncodable, encode, extra_states, frozen_tensors
from speedlab.engine.rng import random_tensors, random_words
from speedlab.engine.state import TrainingState
from speedlab.offload import OffloadedState
from speedlab.parallel.zero import FlatParam, ParamSlot
from speedlab.placement import MemoryKind, Replication
from speedlab.telemetry.checkpoint_index import MANIFEST, CheckpointError

_MARGIN_BYTES = 2**20
"""Space that must stay free besides the checkpoint: headers, manifest, the file system's own needs."""

_READ_BYTES = 16 * 2**20
"""Bytes of an offloaded state that are read into memory at once during a write."""

_pinned: weakref.WeakKeyDictionary[TrainingState, dict[str, Tensor]] = weakref.WeakKeyDictionary()
"""Per engine on a GPU: pinned host memory for copies of its tensors, reused in every save."""

_savings: weakref.WeakKeyDictionary[TrainingState, Saving] = weakref.WeakKeyDictionary()
"""The last background save of each engine."""


def save(
    engine: TrainingState,
    folder: Path,
    tag: str,
    client_state: dict[str, Any],
    *,
    wait: bool = True,
    verify: bool = True,
    moments: bool = True,
) -> Path:
    """Write the engine's whole state as `folder/tag`. Collective.

    States on disk are written from there, and such a save is always waited for: a copy would need the memory that the
    offload saves. A pending save is waited for first.

    Args:
        engine: The training state.
        folder: The folder of all checkpoints.
        tag: Name of the checkpoint.
        client_state: Values of the caller that JSON can hold.
        wait: False returns after the tensors are copied; `saving_of` reports the rest.
        verify: False skips hashes and the sync to disk, for folders in memory.
        moments: False writes only the values of the parameters.

    Returns:
        The path of the checkpoint.

    Raises:
        CheckpointError: On every rank.
    """
    finish_saving(engine)
    engine.finish_update()
    engine.average_replicas()
    group = engine.everyone
    target, hidden = folder / tag, folder / f".{tag}.partial"
    part = _own_part(engine, hidden, verify=verify, moments=moments)
    common = common_of(engine, client_state)
    # A copy of states on disk would need the memory that the offload saves.
    wait = wait or any(zero.zero_policy.states_at is MemoryKind.DISK for zero in engine.zeros)
    reported = group.collect([part.nbytes, whose()])
    needed = sum(nbytes for nbytes, _ in reported)
    if not wait:
        peers = {rank: process for rank, (_, process) in enumerate(reported)}
        _savings[engine] = _begin(engine, part, target, common, needed, peers)
        return target
    on_first(group, lambda: _prepare(target, hidden, needed, client_state))  # 1
    try:
        all_or_none(group, part.write)  # 2
        on_first(group, lambda: _finish(part, target, common))  # 3
    except CheckpointError:
        # The first rank made the hidden folder.
        if group.index == 0:
            shutil.rmtree(hidden, ignore_errors=True)
        raise
    return target


def saving_of(engine: TrainingState) -> Saving | None:
    """Return the engine's last background save, pending or ended; None before the first.

    Args:
        engine: The training state.
    """
    return _savings.get(engine)


def finish_saving(engine: TrainingState) -> None:
    """Wait for the pending save of this engine on this rank.

    Args:
        engine: The training state.
    """
    saving = _savings.get(engine)
    if saving is not None:
        saving.join()


def _prepare(target: Path, hidden: Path, needed: int, client_state: dict[str, Any]) -> None:
    if target.exists():
        raise CheckpointError(f"{target} exists already and is never overwritten; give another tag or move it away")
    try:
        json.dumps(client_state)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{target}: the client state has to be what JSON can hold: {error}") from None
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < needed + _MARGIN_BYTES:
        raise CheckpointError(
            f"{target}: the checkpoint needs {needed / 2**20:,.1f} MiB and {free / 2**20:,.1f} MiB are free; "
            "make room or save to another folder. Nothing was written"
        )
    # Remains of interrupted or failed saves, which never got the final name.
    for left in [hidden, *(other for other in target.parent.glob(".*.partial") if given_up(other))]:
        if left.exists():
            shutil.rmtree(left)
    hidden.mkdir(mode=0o700)


# ---- the part of a rank ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """The part of one rank: its tensors, and its report of them."""

    hidden: Path
    rank: int
    size: int
    tensors: dict[str, Values]
    report: dict[str, Any]
    verify: bool

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors of this part."""
        return sum(values.nbytes for values in self.tensors.values())

    def write(self) -> None:
        """Write the tensors, then the report."""
        name = self.report["name"]
        nbytes, digest = write_tensors(self.hidden / name, self.tensors, verify=self.verify)
        write_report(report_file(self.hidden, self.rank), {**self.report, "bytes": nbytes, "sha256": digest})

    def copied(self, pinned: dict[str, Tensor]) -> RankPart:
        """Return the same part over copies in host memory.

        Copies from a GPU are asynchronous; the write waits for them.

        Args:
            pinned: Pinned memory by tensor name, reused and extended: new pinned memory would stall the device.
        """
        copies = {}
        for key, values in self.tensors.items():
            pieces = [piece if isinstance(piece, Tensor) else piece() for piece in values.pieces]
            numel, on_device = sum(piece.numel() for piece in pieces), any(piece.is_cuda for piece in pieces)
            copy = pinned.get(key)
            if copy is None or copy.numel() != numel or copy.dtype != values.dtype:
                copy = torch.empty(numel, dtype=values.dtype, pin_memory=on_device)
            if on_device:
                pinned[key] = copy
            _fetch(pieces, copy)
            copies[key] = Values(values.shape, values.dtype, [_when_here(copy)])
        return RankPart(**{**self.__dict__, "tensors": copies})


def _fetch(pieces: list[Tensor], copy: Tensor) -> None:
    place = 0
    for piece in pieces:
        copy[place : place + piece.numel()].copy_(piece, non_blocking=True)
        place += piece.numel()


def _when_here(copy: Tensor) -> Any:
    """Return a function that returns `copy` after the device has filled it."""
    if not copy.is_pinned():
        return lambda: copy
    event = torch.cuda.Event()
    # The writer waits for this event, not for the whole device.
    event.record()

    def arrived() -> Tensor:
        event.synchronize()
        return copy

    return arrived


def _own_part(engine: TrainingState, hidden: Path, *, verify: bool, moments: bool) -> RankPart:
    """Return this rank's partition of every state, except parameters that other ranks write, plus buffers and
    random states.
    """
    rank = engine.everyone.index
    name = f"rank-{rank}.safetensors"
    tensors: dict[str, Values] = {}
    parameters: dict[str, Any] = {}
    for flat in engine.flats:
        states = {"master": flat.lasting_master}
        if moments and flat.trainable:
            states |= engine.partitioned_optimizer.states_of(flat)
        stretches = list(_own_stretches(engine, flat))
        for kind, state in states.items():
            base = flat.state_range[0]
            tensors[f"{flat.name}/{kind}"] = _values(state.detach(), base, stretches, flat.kept(kind))
        described = {kind: str(state.dtype).removeprefix("torch.") for kind, state in states.items()}
        histories = engine.partitioned_optimizer.scalars_of(flat) if moments and flat.trainable else {}
        offset = 0
        for slot, low, high in stretches:
            row, history = engine.placement[slot.name], histories.get(slot.name)
            parameters[slot.name] = {
                "shape": list(row.whole_shape),
                "trainable": flat.trainable,
                # A parameter that was never updated has no moments, even if its neighbours have some.
                "states": described if history is not None else {"master": described["master"]},
                "scalars": history or {},
                "slices": [
                    {"file": name, "flat": flat.name, "start": low, "end": high, "offset": offset}
                    | describe_part(row.part)
                ],
            }
            offset += high - low
    reported_kept: dict[str, Any] = {}
    if moments and engine.keeper is not None:
        reported_kept = _add_kept(engine, name, tensors)
    buffers = {key: buffer for module in engine.modules for key, buffer in module.named_buffers()}
    tensors |= {f"buffer/{key}": Values.of(buffer) for key, buffer in buffers.items()}
    tensors |= {key: Values.of(state) for key, state in random_tensors(engine.world.device).items()}
    own, own_tensors = _module_states(engine)
    tensors |= {f"own/{key}": Values.of(tensor) for key, tensor in own_tensors.items()}
    report = {"name": name, "random": random_words(), "parameters": parameters, "buffers": _persistent(engine)}
    report |= {"kept": reported_kept, "own": own, "not_plain": _not_plain(engine)}
    return RankPart(hidden=hidden, rank=rank, size=engine.everyone.size, tensors=tensors, report=report, verify=verify)


def _module_states(engine: TrainingState) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the JSON part of extra states, and the tensors of extra states and of quantised parameters.

    All dp ranks hold equal quantised parameters, so the first one writes them.
    """
    own: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for module in engine.modules:
        for name, value in extra_states(module).items():
            try:
                own[name], inside = encode(name, value)
            except NotEncodable as error:
                raise CheckpointError(
                    f"the extra state of a module cannot be saved, because nothing is pickled: {error}; let "
                    "get_extra_state return numbers, texts, tensors, and lists and dicts of them"
                ) from None
            tensors |= inside
        if engine.group.index == 0:
            tensors |= frozen_tensors(module)
    return own, tensors


def _not_plain(engine: TrainingState) -> list[str]:
    """Return names of states with other names or shapes in files than in the module. Exports refuse these."""
    own = [name for module in engine.modules for name in frozen_tensors(module)]
    named = [each for module in engine.modules for each in (*module.named_parameters(), *module.named_buffers())]
    complex_ones = {name for name, tensor in named if tensor.is_complex()}
    return own + sorted(complex_ones & {*_persistent(engine), *(row.name for row in engine.placement.rows)})


def _own_stretches(engine: TrainingState, flat: FlatParam) -> Iterator[tuple[ParamSlot, int, int]]:
    """Yield the ranges that this rank writes of `_stretches`; only the first island writes."""
    return _stretches(engine, flat) if engine.islands.index == 0 else iter(())


def _stretches(engine: TrainingState, flat: FlatParam) -> Iterator[tuple[ParamSlot, int, int]]:
    """Yield (slot, start, end) of the ranges in a flat parameter that this rank owns and writes in its island.

    Start and end count from the start of the parameter. The first rank writes empty parameters.
    """
    placement = engine.placement
    for slot in flat.slots:
        low, high = max(slot.offset, flat.start), min(slot.offset + slot.numel, flat.end)
        if slot.numel == 0 and flat.start == 0:
            low = high = slot.offset
        elif low >= high:
            continue
        if placement[slot.name].answers:
            yield slot, low - slot.offset, high - slot.offset


def _add_kept(engine: TrainingState, file: str, tensors: dict[str, Values]) -> dict[str, Any]:
    """Add this rank's extra tensors (error feedback, anchors) to `tensors`.

    Returns name → parameter → its pieces, as the manifest has them.
    """
    reported: dict[str, Any] = {}
    placement = engine.placement
    for flat in engine.flats:
        for kind, state in ({} if flat.gradient is None else flat.gradient.kept).items():
            home = placement.flats[flat.name][0].states[kind]
            stretches, base, holder = list(_own_stretches(engine, flat)), flat.start, 0
            if home.holders is Replication.OWN:
                stretches, base = [(slot, 0, slot.numel) for slot in flat.slots if placement[slot.name].answers], 0
                holder = flat.gather_group.index
            elif home.holders is Replication.ISLANDS_PART:
                stretches, holder = list(_stretches(engine, flat)), engine.islands.index
            tensors[f"{flat.name}/{kind}"] = _values(state, base, stretches, None)
            offset = 0
            for slot, low, high in stretches:
                piece = {"file": file, "flat": flat.name, "start": low, "end": high, "offset": offset}
                piece |= {"holder": holder}
                reported.setdefault(kind, {}).setdefault(slot.name, []).append(
                    piece | describe_part(placement[slot.name].part)
                )
                offset += high - low
    return reported


def _values(
    state: Tensor, base: int, stretches: list[tuple[ParamSlot, int, int]], kept: OffloadedState | None
) -> Values:
    """Join ranges of a state, whose first element is element `base` of its flat parameter.

    Adjacent ranges are one piece. A state that is `kept` off the device is read during the write, in small pieces.
    """
    runs: list[list[int]] = []
    for slot, low, high in stretches:
        start, end = slot.offset + low - base, slot.offset + high - base
        # Adjacent in memory: extend the last piece.
        if runs and runs[-1][1] == start:
            runs[-1][1] = end
        else:
            runs.append([start, end])
    numel, dtype = sum(end - start for start, end in runs), state.dtype
    # Files hold complex values as pairs of real ones.
    if dtype.is_complex:
        numel, dtype = 2 * numel, dtype.to_real()
    if kept is None:
        return Values((numel,), dtype, [real(state[start:end]).view(-1) for start, end in runs])
    step = _READ_BYTES // state.dtype.itemsize
    pieces = [(low, min(low + step, end)) for start, end in runs for low in range(start, end, step)]
    return Values((numel,), dtype, [partial(_read, kept, low, high) for low, high in pieces])


def _read(kept: OffloadedState, low: int, high: int) -> Tensor:
    values = torch.empty(high - low, dtype=kept.dtype, device=kept.device)
    kept.read(values, low).wait()
    return real(values).view(-1)


def _persistent(engine: TrainingState) -> list[str]:
    """Return names of the buffers that belong to the module's state."""
    return [
        f"{prefix}.{key}" if prefix else key
        for stage in engine.modules
        for prefix, module in stage.named_modules()
        for key, _ in module.named_buffers(recurse=False)
        if key not in module._non_persistent_buffers_set
    ]


# ---- the end of a save -----------------------------------------------------------------------------------------------


def _finish(part: RankPart, target: Path, common: dict[str, Any]) -> None:
    """Write the manifest after all ranks have reported, then rename the folder."""
    hidden = part.hidden
    try:
        manifest = manifest_of(common, take_reports(hidden, part.size))
    except ValueError as error:
        raise CheckpointError(f"{target}: the ranks' parts do not make a whole: {error}") from None
    (hidden / MANIFEST).write_text(json.dumps(manifest, indent=1))
    if part.verify:
        # The manifest and the folder must be on disk before the final name is.
        to_disk(hidden / MANIFEST)
        to_disk(hidden)
    hidden.rename(target)
    if part.verify:
        to_disk(target.parent)


def _begin(
    engine: TrainingState,
    part: RankPart,
    target: Path,
    common: dict[str, Any],
    needed: int,
    processes: dict[int, list[Any]],
) -> Saving:
    """Start a background save.

    Collective. A rank that fails here leaves a note, because other ranks' threads wait for it.
    """
    try:
        on_first(engine.everyone, lambda: _prepare(target, part.hidden, needed, common["client_state"]))  # 1
        copies = part.copied(_pinned.setdefault(engine, {}))
        # A copy, because the caller may change the state after this call returns.
        common = json.loads(json.dumps(common)) if part.rank == 0 else {}
        return _in_background(copies, target, common, needed, processes)
    except CheckpointError:
        raise  # Raised on all ranks.
    except BaseException as error:
        if part.hidden.exists():
            problem = f"{target}: rank {part.rank} did not begin its part: {type(error).__name__}: {error}"
            tell_failed(part.hidden, part.rank, problem)
        raise


def _in_background(
    part: RankPart, target: Path, common: dict[str, Any], nbytes: int, processes: dict[int, list[Any]]
) -> Saving:
    def work() -> None:
        try:
            peers = peers_of(processes)
            part.write()
            if part.rank == 0:
                await_reports(part.hidden, part.size, peers)
                _finish(part, target, common)
            else:
                await_outcome(part.hidden, target, peers)
        except Exception as error:  # Any error: the other ranks wait for this rank's report.
            known = isinstance(error, CheckpointError | OSError)
            problem = str(error) if known else f"{target}: was not saved: {type(error).__name__}: {error}"
            tell_failed(part.hidden, part.rank, problem)
            raise CheckpointError(problem) from None

    return Saving(target, nbytes, work)
