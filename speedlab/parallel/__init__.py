"""Parallelism of a plain nn.Module over ranks: ZeRO, tensor, pipeline and context. Models know nothing about it."""

from speedlab.parallel.construction import Construction, construct, seed_generators, seeded
from speedlab.parallel.meta_init import Materializer

__all__ = ["Construction", "Materializer", "construct", "seed_generators", "seeded"]
