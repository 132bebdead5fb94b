"""The sides of `python -m tests.benchmarks long`, each in a rank process of its own: the built-in GPT on any length."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from typing import Any

_VOCABULARY = 512
_LONGEST = 1 << 24
"""Tokens; positions are rotary, so that nothing is kept for them."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """What all sides train."""

    layers: int
    hidden: int
    window: int
    """Tokens that a query of sparse attention sees."""
    tile: int
    """Tokens of a tile of feed-forward layers."""
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Side:
    """How one side trains. All have the chunked loss."""

    name: str
    sparse: bool = False
    checkpointing: bool = False
    tiles: bool = False
    keeps_freed: bool = False
    """Whether the allocator keeps what is freed, as the engine asks for: quicker, and holes between blocks take memory.
    Without it every block of 256 KiB or more is a mapping of its own, as the blocks of a large model always are."""
    cp: int = 1
    """Ranks over which a sequence is cut."""
    cp_heads: int | None = None
    """Of these, how many share heads."""
    threads: int = 1
    """Of each rank."""

    def keeping(self) -> Side:
        """The same with `keeps_freed`."""
        return replace(self, keeps_freed=True)


@dataclass
class _Training:
    engine: Any
    peak: Any
    before: int
    """Resident bytes of a process in which everything is imported and compiled, and that trains nothing."""


_ON: list[_Training] = []
"""The one of this process."""


def warm(model: Model, side: Side) -> int:
    """Train a little, so that everything is imported and compiled, and leave nothing; returns the process."""
    begin(model, side)
    step(256)
    end()
    return os.getpid()


def begin(model: Model, side: Side) -> None:
    """Set up the engine of `side`; one step has been made, so that all states are there."""
    import torch

    import speedlab
    from speedlab.engine.memory_ledger import PeakMemory, give_freed_memory_back, release_freed_memory
    from speedlab.models import GPT

    torch.set_num_threads(side.threads)
    release_freed_memory(torch.device("cpu"))
    before = PeakMemory.resident()
    config = _config(model, side)
    engine = speedlab.initialize(model=lambda: GPT(config.model), config=config)[0]
    if not side.keeps_freed:
        give_freed_memory_back()  # After initialize, which asks for the opposite.
    _ON.append(_Training(engine, PeakMemory(engine.world.device), before))
    step(256)


def step(length: int) -> tuple[float, int]:
    """(seconds, the most bytes that were taken beyond those of a process that trains nothing) of one step on a sequence
    of `length` tokens."""
    import torch

    training = _ON[0]
    rows = torch.randint(_VOCABULARY, (1, length + 1), generator=torch.Generator().manual_seed(length))
    training.peak.take()
    start = time.perf_counter()
    training.engine.train_batch([(rows[:, :-1], rows[:, 1:])])
    seconds = time.perf_counter() - start
    return seconds, training.peak.take()[0] - training.before


def end() -> None:
    """The training is gone."""
    _ON.pop().engine.destroy(keep_parameters=False)


def _config(model: Model, side: Side) -> Any:
    import speedlab

    sparse = {"kind": "block_sparse", "pattern": "sliding", "window": model.window}
    return speedlab.RunConfig(
        model={
            "layers": model.layers,
            "hidden": model.hidden,
            "heads": max(1, model.hidden // 64),
            "ffn_hidden": 4 * model.hidden,
            "vocab_size": _VOCABULARY,
            "context": _LONGEST,
            "attention": sparse if side.sparse else {},
            "ffn_tile": model.tile if side.tiles else None,
        },
        data={"sequence_length": model.window, "tokenizer": "bytes"},
        precision=model.dtype,
        batch={"micro_size": 1, "accumulation": 1},
        parallel={"cp": side.cp, "cp_heads": side.cp_heads},
        zero={"stage": 3} if side.cp > 1 else {},
        activation={"checkpointing": "block" if side.checkpointing else "none"},
        clip_norm=None,
    )
