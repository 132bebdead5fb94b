"""A training on this rank, step by step: what benchmarks and the calibration time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from speedlab.config import RunConfig


@contextmanager
def training(config: RunConfig) -> Iterator[Callable[[], object]]:
    """A step of `config` on this rank, which is taken apart afterwards."""
    import torch
    import torch.distributed as dist

    from speedlab.engine import initialize
    from speedlab.models import GPT

    engine, *_ = initialize(model=lambda: GPT(config.model), config=config)
    shape = (2, config.batch.resolve(engine.layout.data_size).micro_size, config.data.sequence_length)
    generator = torch.Generator().manual_seed(engine.mesh.data_index)
    drawn = torch.randint(0, config.model.vocab_size, shape, generator=generator)
    tokens, targets = drawn.to(engine.world.device)
    try:
        yield lambda: engine.train_batch([(tokens, targets)] * engine.accumulation)
    finally:
        engine.destroy(keep_parameters=False)
        dist.barrier()
