"""The engine: initialize, the step, precision, optimizer, checkpoints, and the loop of a run."""

from speedlab.engine.build.initialize import initialize
from speedlab.engine.checkpoint import CheckpointError
from speedlab.engine.engine import Engine
from speedlab.engine.step.errors import NonFiniteError
from speedlab.engine.step.totals import Totals
from speedlab.engine.step.whole import gather

__all__ = ["CheckpointError", "Engine", "NonFiniteError", "Totals", "gather", "initialize"]
