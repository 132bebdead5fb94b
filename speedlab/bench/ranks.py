"""Rank processes for a measurement: one thread each, meeting in a file store."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONWARNINGS": "ignore::FutureWarning",  # Peers call torch's functions by names of yesterday.
}


def run_on_ranks(work: Callable[..., Any], ranks: int, *arguments: Any) -> Any:
    """Run `work(*arguments)` on `ranks` new processes that have joined one world; returns rank 0's result."""
    from torch import multiprocessing

    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)  # Inherited: threads must be set before a process loads torch.
    try:
        with tempfile.TemporaryDirectory() as folder:
            queue = multiprocessing.get_context("spawn").SimpleQueue()
            context: Any = multiprocessing.spawn(
                _enter, (ranks, folder, queue, work, arguments), nprocs=ranks, join=False
            )
            while not context.join(timeout=1.0):
                pass
            return queue.get()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _enter(
    rank: int, ranks: int, folder: str, queue: Any, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch

    from speedlab.comm import join, leave

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        SPEEDLAB_RENDEZVOUS=str(Path(folder)),
    )
    join()
    try:
        result = work(*arguments)
        if rank == 0:
            queue.put(result)
    finally:
        leave()
