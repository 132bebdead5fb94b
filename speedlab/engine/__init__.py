"""The engine: `initialize`, the training step, precision, the memory ledger and checkpoints."""

from speedlab.engine.checkpoint import CheckpointError
from speedlab.engine.engine import Engine
from speedlab.engine.full_state_dict import gather
from speedlab.engine.initialize import initialize
from speedlab.engine.step_reduction import StepReduction
from speedlab.optim.errors import NonFiniteError

__all__ = ["CheckpointError", "Engine", "NonFiniteError", "StepReduction", "gather", "initialize"]
