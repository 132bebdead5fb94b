"""A person's cell between two steps of a run: on ranks, beside their engine, and afterwards the run goes on.

1. The ranks of the cell run it, the others wait for them. What it prints and raises is taken, not raised.
2. A rank whose cell fails leaves, so that nobody waits in a collective for it; then all meet anew.
3. What a look takes along is put back: gradients and losses of its passes, the generators of random numbers, whether
   the module trains. What the cell changes on purpose, such as a learning rate or a parameter, stays.
4. An interrupt ends the cell, and the run pauses: it stands between two steps, and its state is whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from speedlab.engine.run.agreement import Parted, together
from speedlab.engine.run.training import Training
from speedlab.telemetry.live import Said, write_said
from speedlab.telemetry.records import RunState


class _CellFailedError(RuntimeError):
    pass


def run_between_steps(training: Training, code: str, name: str, ranks: Collection[int]) -> list[int]:
    """Run a cell on `ranks` and write what they said beside it; returns the ranks on which it failed. Collective."""
    said: list[Said] = []

    def look() -> None:
        assert training.cells is not None
        training.engine.finish_update()  # Parameters are those of the step that was done.
        if training.world.rank in ranks:
            with _left_as_it_was(training):
                said.append(training.cells.run(code, _names(training)))
            if said[0].failure is not None:
                raise _CellFailedError
        with training.interruption.held():  # It ends the cell of a peer, not the wait for it.
            training.control.barrier()

    with suppress(Parted):  # The cell's own failure is told below.
        together(training, look)
    answers = [None if told is None else Said(*told) for told in training.control.collect(said[0] if said else None)]
    if any(training.control.collect(training.interruption.asked)):
        training.interruption.heard()
        training.state = RunState.PAUSED
    if training.world.rank == 0:
        write_said(training.folder.path, name, answers)
    return [rank for rank, answer in enumerate(answers) if answer is not None and answer.failure is not None]


def _names(training: Training) -> dict[str, Any]:
    """What a cell finds: the engine, its module, and the first micro-batch that this rank would train on next."""
    engine = training.engine
    batch = next(iter(training.batches(training.train_rows, engine.global_step)))
    return {"engine": engine, "model": engine.module, "batch": batch}


@contextmanager
def _left_as_it_was(training: Training) -> Iterator[None]:
    engine = training.engine
    devices = [training.world.device] if training.world.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            engine.zero_grad()
            engine.train()
