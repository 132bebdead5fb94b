"""The engine: initialize, the step, precision, optimizer, checkpoints, and the loop of a run."""

from speedlab.engine.checkpoint import CheckpointError
from speedlab.engine.engine import Engine
from speedlab.engine.errors import NonFiniteError
from speedlab.engine.initialize import initialize
from speedlab.engine.totals import Totals
from speedlab.engine.whole import gather

__all__ = ["CheckpointError", "Engine", "NonFiniteError", "Totals", "gather", "initialize"]
