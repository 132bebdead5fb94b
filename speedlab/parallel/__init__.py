"""Ways to spread a plain nn.Module over ranks. Models know nothing of them."""

from speedlab.parallel.materialize import Materializer

__all__ = ["Materializer"]
