"""The proof of the first batch: one file per check of a training step, and `Prover`, which runs them."""

from speedlab.engine.proof.prover import Attempt, CheckFailed, ProofOnRequest, ProofTokenizer, Prover

__all__ = ["Attempt", "CheckFailed", "ProofOnRequest", "ProofTokenizer", "Prover"]
