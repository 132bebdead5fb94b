"""`speedlab bench offload`: a training whose states are many times the memory that it may use, beside one that has all
of it.

1. A process that has trained a tiny model, so that everything is imported and compiled, is put under a limit on the
   memory that it takes from then on: the states' bytes divided by `--times`. Cache of files counts inside it.
2. It trains with parameters, gradients and optimizer states on disk. Losses must be those of the other, to the bit.
3. A step should take little more than the longer of computing alone and the disk's own time for the bytes moved.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speedlab.bench.memory_limit import NoLimitError, memory_limit
from speedlab.bench.ranks import RankSet
from speedlab.config.options import read_options

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Options:
    """A training with its states on disk under a limit on memory, beside the same one with all of it."""

    layers: int = 64
    """Blocks of the GPT; each is a unit that is read and used."""
    hidden: int = 512
    """Its width."""
    tokens: int = 128
    """Of the one sequence of a step."""
    steps: int = 3
    """Steps of each side; the first is not timed."""
    times: float = 10.0
    """States, in parts of the memory that may be used."""
    in_backward: bool = True
    """Update each unit in backward, so that the disk has work while it computes; else all of them after it."""
    dtype: str = "float32"
    """Precision: float32 or bfloat16."""
    folder: Path = Path(tempfile.gettempdir())
    """On the disk that has the states."""


def main(argv: list[str] | None = None) -> None:
    options = read_options(Options, argv, "speedlab bench offload")
    disk = _disk(options.folder)
    with RankSet(1) as here:
        print("with all of the memory", file=sys.stderr, flush=True)
        plain = here.call(_train, options, {})
    limit = int(plain["states"] / options.times)
    places = {"optimizer": "disk", "parameters": "disk", "folder": str(options.folder)}
    try:
        with memory_limit("speedlab-bench") as group, RankSet(1) as there:
            pid = there.call(_warm, options, places)
            group.set(limit)
            group.take_in([pid])
            print(f"with {limit / _GIB:.2f} GiB", file=sys.stderr, flush=True)
            away = there.call(_train, options, places)
            peak = group.peak_bytes
    except NoLimitError as error:
        sys.exit(f"bench offload: {error}")
    print("\n".join(_told(plain, away, disk, limit, peak)))


def _told(plain: dict[str, Any], away: dict[str, Any], disk: Any, limit: int, peak: int) -> list[str]:
    same = plain["losses"] == away["losses"]
    moving = away["read"] / disk.read_bytes_per_second + away["written"] / disk.write_bytes_per_second
    longer = max(plain["seconds"], moving)
    return [
        f"parameters              {plain['parameters']:,}",
        f"states                  {plain['states'] / _GIB:.2f} GiB, {plain['states'] / limit:.1f} times the limit",
        f"memory taken at most    {peak / _GIB:.3f} GiB of {limit / _GIB:.3f}",
        f"losses                  {'the same bits' if same else 'DIFFERENT'}: "
        f"{', '.join(f'{loss:.7f}' for loss in away['losses'])}",
        f"a step in memory        {plain['seconds']:.2f} s",
        f"the disk, for its bytes {moving:.2f} s: {away['read'] / _GIB:.2f} GiB read at "
        f"{disk.read_bytes_per_second / 1e9:.2f} GB/s, {away['written'] / _GIB:.2f} GiB written at "
        f"{disk.write_bytes_per_second / 1e9:.2f} GB/s",
        f"a step from disk        {away['seconds']:.2f} s, {away['seconds'] / longer:.2f} times the longer of both",
    ]


def _disk(folder: Path) -> Any:
    from speedlab.offload import measure_disk

    return measure_disk(folder)


# ---- on the rank -----------------------------------------------------------------------------------------------------


def _warm(options: Options, places: dict[str, str]) -> int:
    """Everything that a training needs is imported and compiled; returns the process."""
    import os

    small = Options(layers=2, hidden=64, tokens=16, steps=2, dtype=options.dtype, folder=options.folder)
    _train(small, places)
    return os.getpid()


def _train(options: Options, places: dict[str, str]) -> dict[str, Any]:
    import torch

    import speedlab
    from speedlab.models import GPT

    heads = max(1, options.hidden // 64)
    config = speedlab.RunConfig(
        model={
            "layers": options.layers,
            "hidden": options.hidden,
            "heads": heads,
            "ffn_hidden": 4 * options.hidden,
            "vocab_size": 512,
            "context": options.tokens,
        },
        data={"sequence_length": options.tokens, "tokenizer": "bytes"},
        zero={"stage": 3, "bucket_bytes": 1},
        precision=options.dtype,
        batch={"micro_size": 1, "accumulation": 1},
        activation={"checkpointing": "block"},
        offload=places,
        optimizer={"in_backward": options.in_backward},
        clip_norm=None,
    )
    engine = speedlab.initialize(model=lambda: GPT(config.model), config=config)[0]
    generator = torch.Generator().manual_seed(0)
    losses, times, moved = [], [], {}
    try:
        for _ in range(options.steps):
            rows = torch.randint(512, (1, options.tokens + 1), generator=generator)
            engine.traffic.take()
            start = time.perf_counter()
            losses.append(engine.train_batch([(rows[:, :-1], rows[:, 1:])]))
            times.append(time.perf_counter() - start)
            moved = engine.traffic.take().moved_bytes
        ledger = engine.ledger()
        states = [sum(held.values()) for held in (ledger.host, ledger.disk)]
        return {
            "losses": losses,
            "seconds": sorted(times[1:])[len(times[1:]) // 2],
            "read": moved.get("disk read", 0),
            "written": moved.get("disk write", 0),
            "parameters": sum(flat.numel for flat in engine.flats),
            "states": ledger.model_states + sum(states),
        }
    finally:
        engine.destroy(keep_parameters=False)
