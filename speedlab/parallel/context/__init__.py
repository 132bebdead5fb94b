"""Context parallelism: each rank holds some positions of every sequence, and attention works across ranks."""

from speedlab.parallel.context.context_parallel import ContextParallel, check_model

__all__ = ["ContextParallel", "check_model"]
