"""A person's cell between two steps of a run: on ranks, beside their engine, and afterwards the run goes on.

1. The ranks of the cell run it. What it prints and raises is taken, not raised; what would take the engine on, as a
   step, is refused to it.
2. What a look takes along is put back: gradients and losses of its passes, the generators of random numbers, whether
   the module trains. What the cell changes on purpose, such as a learning rate or a parameter, stays.
3. Each rank leaves a word of how the cell has ended there, and waits until all have: on no group, whose limit of time a
   person who thinks would pass. A rank on which it failed leaves the world first, so that nobody waits in a collective
   for it. All know all words, so all take the same way.
4. It has failed somewhere: all meet anew. It was interrupted somewhere: nobody meets, because whoever interrupts ranks
   breaks what they wait for; they leave, and the run pauses. It stands between two steps, and its state is whole.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from typing import Any

import torch

from speedlab.comm import StoreMailbox
from speedlab.engine.rng import random_tensors, random_words, restore_random
from speedlab.telemetry.live_cells import CellOutcome, write_said
from speedlab.trainer.training_run import Training

_POLL_SECONDS = 0.002
_MOST_POLL_SECONDS = 0.05
_LATE_SECONDS = 1.0
"""How long a rank that was interrupted waits for the others to say so, too. Then one has died, or is in native code."""


class _End(StrEnum):
    """How a cell has ended on a rank."""

    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


class CutOff(BaseException):
    """An interrupt has ended a cell. This rank, and every other, meets nobody until the run goes on.

    No Exception: whoever has work on all ranks would let them meet anew.
    """

    def __init__(self, failed: list[int]) -> None:
        super().__init__("in a cell between two steps; the state is whole")
        self.failed = failed
        """Ranks on which the cell has failed, as far as this one knows."""


def run_between_steps(training: Training, code: str, name: str, ranks: Collection[int], *, asks: bool) -> list[int]:
    """Run a cell on `ranks` and write what they said beside it; returns the ranks on which it failed. Collective.
    `asks`: whether a person waits for it, whom it can ask.

    Raises CutOff, on all ranks, when it was interrupted.
    """
    rank = training.world.rank
    training.engine.finish_update()  # Parameters are those of the step that was done.
    board = StoreMailbox(f"cell/{name}")
    with training.interruption.held():
        said = _look(training, code, name if asks else "") if rank in ranks else None
        end = _end_of(said, interrupted=training.interruption.asked)
        ends = _exchanged(training, board, end)
        if _End.INTERRUPTED in ends:
            raise _cut_off(training, name, said, alone=_End.FAILED in ends)
        if _End.FAILED in ends:
            if end is not _End.FAILED:
                training.disconnect()
            try:
                training.reconnect()
            except RuntimeError:  # The meeting was broken by who interrupts.
                if not training.interruption.asked:
                    raise
                raise _cut_off(training, name, said, alone=True) from None
        return _tell(training, name, said)


def _cut_off(training: Training, name: str, said: CellOutcome | None, *, alone: bool) -> CutOff:
    failed: list[int] = []
    with suppress(Exception):  # The ranks pause, whatever becomes of telling.
        failed = _tell(training, name, said, alone=alone)
    return CutOff(failed)


def _look(training: Training, code: str, door: str) -> CellOutcome:
    """Run the cell on this rank. Nothing comes out of it."""
    assert training.cells is not None
    try:
        with _left_as_it_was(training):
            with training.interruption.at_once():  # Its batch may be long in coming.
                names = _names(training)
            return training.cells.run(code, door, names, training.interruption.at_once)
    except (Exception, KeyboardInterrupt) as error:  # What it finds was not there in time, or not to be put back.
        return CellOutcome([], None, {"kind": type(error).__name__, "message": str(error)})


def _end_of(said: CellOutcome | None, *, interrupted: bool) -> _End:
    if interrupted:
        return _End.INTERRUPTED
    return _End.FAILED if said is not None and said.failure is not None else _End.DONE


def _exchanged(training: Training, board: StoreMailbox, end: _End) -> set[_End]:
    """Leave this rank's word, and wait for all (3)."""
    try:
        board.leave(end)
        if end is _End.FAILED:
            training.disconnect()
        return _await_all(training, board)
    except RuntimeError:  # Whoever interrupts ranks breaks their store in the end, also of one that was long in coming.
        if not training.interruption.asked:
            raise
        return set(_End)


def _await_all(training: Training, board: StoreMailbox) -> set[_End]:
    """How the cell has ended on all ranks. Of one that does not come, though this one was interrupted, nothing is known
    but that it can be asked no more."""
    began, asked_at = time.monotonic(), None
    while True:
        words = board.read()
        if words is not None:
            return set(map(_End, words))
        if training.interruption.asked:
            asked_at = asked_at or time.monotonic()
            if time.monotonic() - asked_at > _LATE_SECONDS:
                return set(_End)
        # A person may sit at a breakpoint for long, and the store is asked by every rank.
        time.sleep(min(_MOST_POLL_SECONDS, max(_POLL_SECONDS, (time.monotonic() - began) / 20)))


def _tell(training: Training, name: str, said: CellOutcome | None, *, alone: bool = False) -> list[int]:
    """Write what the ranks said, or this one `alone`, on the first; returns those that have failed."""
    rank, size = training.world.rank, training.world.size
    if alone:
        answers = [said if number == rank else None for number in range(size)]
    else:
        answers = [None if told is None else CellOutcome(*told) for told in training.control.collect(said)]
    if rank == 0:
        assert training.cells is not None
        write_said(training.folder.path, name, answers, training.cells.write)
    return [number for number, answer in enumerate(answers) if answer is not None and answer.failure is not None]


def _names(training: Training) -> dict[str, Any]:
    """What a cell finds: the engine, its module, and the first micro-batch that this rank would train on next."""
    engine = training.engine
    batch = next(iter(training.batches(training.train_rows, engine.global_step)))
    return {"engine": engine, "model": engine.module, "batch": batch}


@contextmanager
def _left_as_it_was(training: Training) -> Iterator[None]:
    engine = training.engine
    device = training.world.device
    words, tensors, dtype = random_words(), random_tensors(device), torch.get_default_dtype()
    with engine.only_looked_at():
        try:
            yield
        finally:
            restore_random(words, tensors, device)
            torch.set_default_dtype(dtype)
            torch.set_grad_enabled(True)
            engine.abandon_step()
            engine.train()
