"""The proof of the first batch: checks of what a step trains, each in a file of its own, and what runs them."""

from speedlab.engine.proof.prover import Attempt, CheckFailed, ProofOnRequest, ProofTokenizer, Prover

__all__ = ["Attempt", "CheckFailed", "ProofOnRequest", "ProofTokenizer", "Prover"]
