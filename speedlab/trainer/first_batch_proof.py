"""The proof of a run: checks of its first batch, or of a batch on request, stored in the run folder.

1. The prover watches the first step. After this step it runs some forward passes and writes the proof.
2. The command `prove` proves the next batch with a trial without an update. The prover watches the following step and
   adds the effect of its update to the proof.

If a check fails with an error, all ranks reconnect, the proof contains the error, and the run continues.
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
"""Time limit for the forward passes of the cheap proof. The other parts are short compared to a step, so that the proof
takes less than 5 % of the first minute.
"""


_LATER_STEPS = 16
"""Number of later steps whose batches are searched for documents."""


class FirstBatch:
    """Makes and stores the proofs of a run."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._prover: Prover | None = None
        """The prover that watches the current step."""
        self._waiting: tuple[Prover, Proof] | None = None
        """A proof to which the next update is added, with its prover."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the step inside this context if a proof is due."""
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
        """Prove the watched step. Collective, after a step with an update.

        Args:
            seconds: Duration of the step's forward passes.

        Returns:
            Kind, text and details of an event; None if the step was not watched.
        """
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
        """Make the full proof of the next batch, between two steps. Collective.

        Returns:
            Kind, text and details of an event.
        """
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
        """Whether a step weights micro-batches by their counted tokens."""
        return self._training.config.loss_over != "micro_batches"

    def _new_prover(self, form: str) -> Prover:
        training = self._training
        return training.engine.proofs.prover(form=form, tokenizer=training.corpus.tokenizer, attempt=self._try_together)

    def _batches(self, step: int) -> list[tuple[Tensor, ...]]:
        """Read this rank's micro-batches of a step again. Collective: data that cannot be read fail on all ranks."""
        training = self._training
        return agreed(training.control, lambda: list(training.batches(training.train_rows, step)))

    def _later(self, first: int) -> Iterator[tuple[Tensor, ...]]:
        """Yield micro-batches of the steps from `first` on, which are searched for documents."""
        training = self._training
        for step in range(first, first + _LATER_STEPS):
            yield from training.batches(training.train_rows, step)

    def _try_together(self, work: Callable[[], Any]) -> Any:
        try:
            return together(self._training, work)
        except (RanksDiverged, CommandRefused) as error:
            raise CheckFailed(str(error)) from error

    def _stored(self, proof: Proof) -> tuple[str, str, dict[str, Any]]:
        """Write the proof on rank 0 and return its event."""
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
