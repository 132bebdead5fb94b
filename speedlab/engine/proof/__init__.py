"""The proof of the first batch: checks of what a step trains, each in a file of its own, and what runs them."""

from speedlab.engine.proof.on_request import ProofOnRequest
from speedlab.engine.proof.prover import Attempt, CheckFailed, Prover, Tokenizer

__all__ = ["Attempt", "CheckFailed", "ProofOnRequest", "Prover", "Tokenizer"]
