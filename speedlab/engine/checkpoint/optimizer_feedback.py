"""Load extra state of communicating optimizers and of islands: error feedback, anchors, outer momentum.

- Per-rank tensors (`Replication.OWN`: a worker's error) return to their rank if the number of ranks is the same.
  Otherwise every rank gets the mean. Then the mean over ranks, which is all that the next reduction uses, is unchanged.
- Per-island tensors (`Replication.ISLANDS_PART`: errors of meetings) follow the same rule.
- Partitioned tensors (`Replication.OWN_PART`: a server's error, an anchor) move with their elements.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from speedlab.engine.checkpoint.safetensors_files import Files
from speedlab.engine.checkpoint.slices import Stretch
from speedlab.engine.state import TrainingState
from speedlab.optim.communicating_protocols import CommunicatingOptimizer, keeps_now
from speedlab.optim.diloco import DiLoCo
from speedlab.parallel.zero import FlatParam, ParamSlot
from speedlab.placement import Replication


@torch.no_grad()
def load_kept(engine: TrainingState, files: Files, manifest: dict[str, Any]) -> None:
    """Load extra state, if the loaded optimizer groups say that the optimizer communicates, or with islands.

    Collective.

    State that is missing in the checkpoint is reset, with a warning.

    Args:
        engine: The training state; its optimizer groups are loaded already.
        files: The files of the checkpoint.
        manifest: Its manifest.
    """
    keeper = engine.keeper
    if keeper is not None:
        if missing := _missing(engine, keeper, manifest):
            warnings.warn(f"{missing}, which begins as on the first step", UserWarning, stacklevel=2)
            engine.begin_again()
        else:
            _load(engine, keeper, files, manifest)
    if isinstance(engine.optimizer, CommunicatingOptimizer) and not keeps_now(engine.optimizer):
        for flat in engine.partitioned_optimizer.flats:
            begin_at_zero(engine.partitioned_optimizer.states_of(flat))


def begin_at_zero(states: Mapping[str, Tensor]) -> None:
    """Replace infinite variances by 0, because an updated variance would stay infinite.

    A frozen variance is infinite for elements without a gradient.

    Args:
        states: Optimizer states by name.
    """
    for name, state in states.items():
        if name.startswith("exp_avg_sq"):  # 1-bit LAMB has two.
            state.masked_fill_(state.isinf(), 0.0)


def _missing(engine: TrainingState, keeper: DiLoCo | CommunicatingOptimizer, manifest: dict[str, Any]) -> str:
    """Return which state of `keeper` the checkpoint lacks, "" if none; equal on all ranks. Collective."""
    stored, entries, name = manifest.get("kept", {}), manifest["parameters"], type(keeper).__name__
    trained = {name for name, entry in entries.items() if entry["trainable"]}
    if any(stored.get(kind, {}).keys() != trained for kind in keeper.kept):
        has = ", ".join(stored) or "nothing of it"
        return f"the checkpoint has not all of {name} ({', '.join(keeper.kept)}; it has {has})"
    own = [slot.name for flat in engine.partitioned_optimizer.flats for slot in flat.slots if slot.name not in trained]
    new = sorted({name for each in engine.everyone.collect(own) for name in each})
    if not new:
        return ""
    more = f" and {len(new) - 1} more were" if len(new) > 1 else " was"
    return f"{new[0]}{more} not trained when the checkpoint was written, so that it has not all of {name}"


def _load(
    engine: TrainingState, keeper: DiLoCo | CommunicatingOptimizer, files: Files, manifest: dict[str, Any]
) -> None:
    stored, entries = manifest["kept"], manifest["parameters"]
    for flat in engine.flats:
        for kind, state in ({} if flat.gradient is None else flat.gradient.kept).items():
            holders = engine.placement.flats[flat.name][0].states[kind].holders
            own = holders is Replication.OWN
            among = {Replication.OWN: flat.gather_group, Replication.ISLANDS_PART: engine.islands.group}.get(holders)
            for slot, low, high in _held(flat, whole=own):
                pieces = stored[kind][slot.name]
                stretch = Stretch(
                    engine.placement[slot.name].part, max(0, low - slot.offset), min(slot.numel, high - slot.offset)
                )
                base = 0 if own else flat.start
                into = state[slot.offset + stretch.start - base : slot.offset + stretch.end - base]
                reported = {piece["holder"] for piece in pieces}
                as_before = among is not None and len(reported) == among.size
                # With the same number of holders each takes its own; otherwise all take the mean over the holders.
                wanted = {among.index} if among is not None and as_before else reported
                shape = entries[slot.name]["shape"]
                _mean(files, kind, stretch, into, [
                    {"shape": shape, "slices": [piece for piece in pieces if piece["holder"] == holder]}
                    for holder in sorted(wanted)
                ])  # fmt: skip  # one entry for each holder
    if keeper is engine.islands:
        engine.islands.anchored()


def _held(flat: FlatParam, *, whole: bool) -> Iterator[tuple[ParamSlot, int, int]]:
    """Yield (slot, range of the flat parameter) of parameters with a part on this rank."""
    low, high = (0, flat.padded) if whole else (flat.start, flat.end)
    for slot in flat.slots:
        if max(slot.offset, low) < min(slot.offset + slot.numel, high):
            yield slot, low, high


def _mean(files: Files, kind: str, stretch: Stretch, into: Tensor, entries: list[dict[str, Any]]) -> None:
    """Load the mean of these manifest entries."""
    if len(entries) == 1:
        files.copy(entries[0], kind, stretch, into)
        return
    one = torch.zeros_like(into)
    into.zero_()
    for entry in entries:
        files.copy(entry, kind, stretch, one)
        into.add_(one)
    into.div_(len(entries))
