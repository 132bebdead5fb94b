"""Run a notebook cell on ranks between two steps, after which the run continues.

1. The chosen ranks run the cell. Its outputs and exceptions are collected, not raised. The cell cannot call what would
   advance the engine, such as a step.
2. Side effects are undone: gradients and losses of its passes, random number generators, training mode. Deliberate
   changes, such as a learning rate or a parameter, stay.
3. Each rank posts how the cell ended, and waits until all ranks have posted. The ranks use a store, not a group,
   because the user may think longer than the timeout of a group. A rank on which the cell failed leaves the world
   first, so that no peer waits for it in a collective. All ranks read all posts and take the same path.
4. If the cell failed on a rank, all ranks reconnect. If it was interrupted on a rank, no rank reconnects, because the
   interrupt also breaks the connections. The ranks leave the world, and the run pauses between two steps with a
   complete state.
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
from speedlab.telemetry.cell_outcomes import CellOutcome, write_said
from speedlab.trainer.training_run import Training

_POLL_SECONDS = 0.002
_MOST_POLL_SECONDS = 0.05
_LATE_SECONDS = 1.0
"""How long an interrupted rank waits for the posts of its peers. After this time a peer has died or executes native
code.
"""


class _End(StrEnum):
    """How a cell ended on a rank."""

    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


class CutOff(BaseException):
    """An interrupt ended a cell. No rank reconnects until the run continues.

    This is not an Exception, because handlers of collective work would reconnect the ranks.
    """

    def __init__(self, failed: list[int]) -> None:
        super().__init__("in a cell between two steps; the state is whole")
        self.failed = failed
        """Ranks on which the cell failed, as far as this rank knows."""


def run_between_steps(training: Training, code: str, name: str, ranks: Collection[int], *, asks: bool) -> list[int]:
    """Run a cell on `ranks` and write their outputs to the run folder. Collective.

    Args:
        training: The run of this rank.
        code: Source code of the cell.
        name: Name of the cell.
        ranks: Ranks that run the cell.
        asks: Whether a user waits for the cell and can answer prompts.

    Returns:
        Ranks on which the cell failed.

    Raises:
        CutOff: On all ranks, if the cell was interrupted.
    """
    rank = training.world.rank
    training.engine.finish_update()  # The cell sees the parameters after the last step, even if updates are delayed.
    board = StoreMailbox(f"cell/{name}")
    with training.interruption.held():
        # 1 and 2: run the cell and undo side effects.
        said = _look(training, code, name if asks else "") if rank in ranks else None
        end = _end_of(said, interrupted=training.interruption.asked)
        # 3: all ranks learn all ends.
        ends = _exchanged(training, board, end)
        # 4: interrupted ranks pause without another collective.
        if _End.INTERRUPTED in ends:
            raise _cut_off(training, name, said, alone=_End.FAILED in ends)
        if _End.FAILED in ends:
            # Ranks on which the cell failed have left in `_exchanged` already.
            if end is not _End.FAILED:
                training.disconnect()
            try:
                training.reconnect()
            except RuntimeError:  # The interrupt broke the store while the ranks reconnected.
                if not training.interruption.asked:
                    raise
                raise _cut_off(training, name, said, alone=True) from None
        return _tell(training, name, said)


def _cut_off(training: Training, name: str, said: CellOutcome | None, *, alone: bool) -> CutOff:
    failed: list[int] = []
    with suppress(Exception):  # The ranks pause even if the report fails.
        failed = _tell(training, name, said, alone=alone)
    return CutOff(failed)


def _look(training: Training, code: str, door: str) -> CellOutcome:
    """Run the cell on this rank. Its exceptions become part of the outcome."""
    assert training.cells is not None
    try:
        with _left_as_it_was(training):
            with training.interruption.at_once():  # Loading the batch may be slow, so this can be interrupted, too.
                names = _names(training)
            return training.cells.run(code, door, names, training.interruption.at_once)
    except (Exception, KeyboardInterrupt) as error:  # The batch could not be loaded, or the state not restored.
        return CellOutcome([], None, {"kind": type(error).__name__, "message": str(error)})


def _end_of(said: CellOutcome | None, *, interrupted: bool) -> _End:
    if interrupted:
        return _End.INTERRUPTED
    return _End.FAILED if said is not None and said.failure is not None else _End.DONE


def _exchanged(training: Training, board: StoreMailbox, end: _End) -> set[_End]:
    """Post how the cell ended on this rank and wait for all ranks (step 3)."""
    try:
        board.leave(end)
        if end is _End.FAILED:
            training.disconnect()
        return _await_all(training, board)
    except RuntimeError:  # An interrupt finally breaks the store, even if this rank was slow to post.
        if not training.interruption.asked:
            raise
        return set(_End)


def _await_all(training: Training, board: StoreMailbox) -> set[_End]:
    """Return how the cell ended on all ranks.

    If this rank was interrupted and a peer does not post in time, its end is unknown. Then all ends are returned.
    """
    began, asked_at = time.monotonic(), None
    while True:
        words = board.read()
        if words is not None:
            return set(map(_End, words))
        if training.interruption.asked:
            asked_at = asked_at or time.monotonic()
            if time.monotonic() - asked_at > _LATE_SECONDS:
                return set(_End)
        # Poll less often over time: a breakpoint may last long, and every rank polls the store.
        time.sleep(min(_MOST_POLL_SECONDS, max(_POLL_SECONDS, (time.monotonic() - began) / 20)))


def _tell(training: Training, name: str, said: CellOutcome | None, *, alone: bool = False) -> list[int]:
    """Write the outputs of all ranks, or only of this rank if `alone`, on rank 0. Return the failed ranks."""
    rank, size = training.world.rank, training.world.size
    if alone:
        answers = [said if number == rank else None for number in range(size)]
    else:
        answers = [None if reported is None else CellOutcome(*reported) for reported in training.control.collect(said)]
    if rank == 0:
        assert training.cells is not None
        write_said(training.folder.path, name, answers, training.cells.write)
    return [number for number, answer in enumerate(answers) if answer is not None and answer.failure is not None]


def _names(training: Training) -> dict[str, Any]:
    """Return the names that a cell sees: the engine, its module, and this rank's first micro-batch of the next step."""
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
            # An interrupt inside no_grad may have left gradients disabled.
            torch.set_grad_enabled(True)
            engine.abandon_step()
            engine.train()
