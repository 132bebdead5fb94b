"""What benchmarks and the calibration time (`speedlab/calibrate/workers.py`): a step on every layout."""

import pytest
import torch
import torch.distributed as dist

from ranks.conftest import PoolOf
from speedlab.calibrate.workers import training
from speedlab.config import RunConfig


def trained(parallel: dict[str, int]) -> None:
    model = {"layers": 2, "hidden": 32, "heads": 2, "vocab_size": 300, "context": 16}
    data = {"sequence_length": 16, "tokenizer": "bytes"}
    config = RunConfig(model=model, data=data, parallel=parallel, batch={"micro_size": 1, "accumulation": 2})
    torch.manual_seed(dist.get_rank())  # What came before has left each rank with a generator of its own.
    with training(config) as step:
        for _ in range(2):
            step()


@pytest.mark.parametrize("parallel", [{}, {"tp": 2}, {"pp": 2}], ids=str)
def test_ranks_that_share_a_batch_are_given_the_same(pool_of: PoolOf, parallel: dict[str, int]) -> None:
    pool_of(2).run(trained, parallel)  # Else the engine refuses the step.
