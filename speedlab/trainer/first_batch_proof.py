"""The proof of a run: made at its first step, or when a person asks for it, and stored in its folder.

1. Before the first step the prover begins to watch it; after the step it makes some forwards and writes the proof.
2. `prove`, a control word, makes the full proof of the next batch from a trial without an update. The step after it is
   watched, and what its update has changed is added.

Whatever fails in a check, the run goes on: all ranks meet again, and the proof says what failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from speedlab.engine.proof import CheckFailed, Prover
from speedlab.telemetry.proof import Proof, write_proof
from speedlab.telemetry.run_folder import RunFolderError
from speedlab.trainer.collective_errors import CommandRefused, RanksDiverged, agreed, together

if TYPE_CHECKING:
    from speedlab.trainer.training_run import Training

_FORWARDS_SECONDS = 2.0
"""What forwards of the cheap form may take. Its other parts are small next to a step, so that it stays below 5 % of the
first minute."""


_LATER_STEPS = 16


class FirstBatch:
    """The proof of the run that `training` is."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._prover: Prover | None = None
        """What watches the present step."""
        self._waiting: tuple[Prover, Proof] | None = None
        """A proof that the next update is to be added to, and its prover."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """To be entered around a step."""
        training = self._training
        self._prover = None
        if self._waiting is not None:
            self._prover = self._waiting[0]
            self._prover.watch(passes=False)
        elif training.config.proof != "none" and training.engine.global_step == 0:
            self._prover = self._new_prover(training.config.proof)
            self._prover.watch(passes=True)
        try:
            yield
        finally:
            if self._prover is not None:
                self._prover.stop_watching()

    def after_step(self, seconds: float) -> tuple[str, str, dict[str, Any]] | None:
        """What a watched step has shown: an event's kind, text and details; None if none was watched. Collective, after
        a step with an update whose forwards took `seconds`."""
        prover, self._prover = self._prover, None
        if prover is None:
            return None
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            return self._stored(prover.prove_update(waiting[1]))
        full = self._training.config.proof == "full"
        return self._stored(
            prover.prove(
                self._batches(self._training.engine.global_step - 1),
                weighted_by_tokens=self._weighted,
                budget_seconds=None if full else _FORWARDS_SECONDS,
                forward_seconds=seconds,
                with_update=True,
                later=self._later(self._training.engine.global_step),
            )
        )

    def prove(self) -> tuple[str, str, dict[str, Any]]:
        """The full proof of the batch that comes next, between two steps: an event's kind, text and details.
        Collective."""
        training = self._training
        prover = self._new_prover("full")
        batches = self._batches(training.engine.global_step)
        prover.trial(batches[0])
        later = self._later(training.engine.global_step + 1)
        proof = prover.prove(batches, weighted_by_tokens=self._weighted, later=later)
        self._waiting = prover, proof
        return self._stored(proof)

    @property
    def _weighted(self) -> bool:
        """Whether a step of the run weights micro-batches by their counted tokens."""
        return self._training.config.loss_over != "micro_batches"

    def _new_prover(self, form: str) -> Prover:
        training = self._training
        return training.engine.proofs.prover(form=form, tokenizer=training.corpus.tokenizer, attempt=self._try_together)

    def _batches(self, step: int) -> list[tuple[Tensor, ...]]:
        """This rank's micro-batches of a step, once more. Collective: data that cannot be read fail on all ranks."""
        training = self._training
        return agreed(training.control, lambda: list(training.batches(training.train_rows, step)))

    def _later(self, first: int) -> Iterator[tuple[Tensor, ...]]:
        """Micro-batches of steps from `first` on, to look for documents in."""
        training = self._training
        for step in range(first, first + _LATER_STEPS):
            yield from training.batches(training.train_rows, step)

    def _try_together(self, work: Callable[[], Any]) -> Any:
        try:
            return together(self._training, work)
        except (RanksDiverged, CommandRefused) as error:
            raise CheckFailed(str(error)) from error

    def _stored(self, proof: Proof) -> tuple[str, str, dict[str, Any]]:
        """Write the proof, on the first rank, and return the event that says so."""
        problem = ""
        if self._training.world.rank == 0:
            try:
                write_proof(self._training.folder.path, proof)
            except (OSError, RunFolderError) as error:
                problem = f"the proof could not be written: {error}"
        looks = [f"{finding.kind}: {finding.text}" for finding in proof.needs_a_look]
        text = "; ".join([f"{proof.counts} ({proof.cost})", *looks, *([problem] if problem else [])])
        details: dict[str, Any] = {"proof_seconds": proof.seconds, "to_look_at": len(looks)}
        if proof.failed:
            details["failed"] = [f"{finding.kind}: {finding.text}" for finding in proof.failed]
        if problem:
            details["problem"] = problem
        return "proof", text, details
