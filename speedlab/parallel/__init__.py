"""Ways to spread a plain nn.Module over ranks. Models know nothing of them."""

from speedlab.parallel.construction import Construction, construct, seed_generators, seeded
from speedlab.parallel.meta_init import Materializer

__all__ = ["Construction", "Materializer", "construct", "seed_generators", "seeded"]
