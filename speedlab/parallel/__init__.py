"""Ways to spread a plain nn.Module over ranks. Models know nothing of them."""

from speedlab.parallel.materialize import Materializer
from speedlab.parallel.zero import gather

__all__ = ["Materializer", "gather"]
