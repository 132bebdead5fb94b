"""Context parallelism: each rank has some positions of every sequence, and attention looks across the ranks."""

from speedlab.parallel.context.context_parallel import ContextParallel, check_model

__all__ = ["ContextParallel", "check_model"]
