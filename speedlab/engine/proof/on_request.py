"""`engine.proof`: a proof that a loop of one's own asks for, and of the update that follows it."""

from __future__ import annotations

from collections.abc import Callable

from speedlab.engine.proof.prover import Attempt, Prover, Tokenizer
from speedlab.engine.step.drivers import Batch, Driver
from speedlab.engine.step.losses import LossFunction
from speedlab.engine.step.state import TrainingState
from speedlab.engine.step.step import Step
from speedlab.telemetry.proof import Proof

DriverOf = Callable[[LossFunction | None], Driver]
"""The engine's driver, or one with a loss function of its own."""


class ProofOnRequest:
    """The proofs of one engine."""

    def __init__(self, state: TrainingState, step: Step, driver_of: DriverOf) -> None:
        self._state, self._step, self._driver_of = state, step, driver_of
        self._prover: Prover | None = None
        """Watches the update that follows the last proof; None after it was told."""
        self._last: Proof | None = None

    def prover(self, *, form: str, tokenizer: Tokenizer | None, attempt: Attempt) -> Prover:
        """For a run, which knows its steps."""
        return Prover(self._state, self._step, self._driver_of(None), form=form, tokenizer=tokenizer, attempt=attempt)

    def of(self, batch: Batch | None, loss: LossFunction | None, tokenizer: Tokenizer | None) -> Proof:
        """As of `Engine.proof`."""
        self._step.refuse_after_cut()
        if batch is None:
            return self._with_update()
        self._step.refuse_inside("proof")
        if self._prover is not None:
            self._prover.stop_watching()
        driver = self._driver_of(loss)
        prover = Prover(self._state, self._step, driver, form="full", tokenizer=tokenizer)
        prover.trial(batch)
        weighted = self._state.config.loss_over == "tokens"
        self._last = prover.prove([batch], weighted_by_tokens=weighted)
        prover.watch(passes=False)
        self._prover = prover
        return self._last

    def _with_update(self) -> Proof:
        if self._last is None:
            raise ValueError("proof: there is none yet; give it a batch: engine.proof(batch)")
        prover = self._prover
        if prover is not None and any(self._state.everyone.collect(prover.saw_an_update)):
            prover.stop_watching()
            self._last, self._prover = prover.prove_update(self._last), None
        return self._last
