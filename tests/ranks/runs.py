"""Runs in rank processes: a small run's folder, and its advance on each rank as the cluster would call it."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from speedlab.config import RunConfig
from speedlab.telemetry.run_folder import RunFolder
from speedlab.trainer import run_registry
from speedlab.trainer.trainer import Trainer

_generations = itertools.count(os.getpid() << 16)


def new_run(folder: Path, **changes: Any) -> str:
    """The folder of a run of a small GPT on a text of its own; its engines meet in `folder`, too."""
    text = folder / "text"
    text.mkdir()
    for number in range(8):
        (text / f"{number}.txt").write_text("".join(chr(97 + (7 * k + number) % 26) for k in range(600)))
    (folder / "meeting").mkdir()
    # Ranks count how often they have met in a generation; one that no test had before begins at none.
    (folder / "meeting" / "generation").write_text(str(next(_generations)))
    settings: dict[str, Any] = {
        "name": "run",
        "folder": folder,
        "steps": 20,
        "model": {"layers": 2, "hidden": 32, "heads": 2, "ffn_hidden": 64, "context": 16},
        "data": {"source": str(text), "tokenizer": "bytes", "sequence_length": 16},
        "precision": "float32",
        "batch": {"global_size": 4, "micro_size": 1},
        "eval": {"every_steps": 0},
        "telemetry": {"tensorboard": False},
    }
    return str(RunFolder.create(RunConfig(**{**settings, **changes})).path)


@contextlib.contextmanager
def as_engine(run: str) -> Iterator[None]:
    """This rank is an engine's: it can leave the world and meet the others anew, and gives the run up at the end."""
    from ranks.pool import _place

    rank, size, _ = _place
    before = dict(os.environ)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), SPEEDLAB_RENDEZVOUS=str(Path(run).parent / "meeting"))
    try:
        yield
    finally:
        run_registry._trainers.clear()
        os.environ.clear()
        os.environ.update(before)


def trainer_of(run: str) -> Trainer:
    """What this rank holds of the run, after its first advance."""
    return run_registry._trainers[Path(run)]


def own_rank() -> int:
    """Of this process, inside `as_engine`."""
    return int(os.environ["RANK"])
