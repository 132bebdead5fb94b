"""What the tests with real engines share: functions that run on ranks, and waiting without sleeping blindly."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from speedlab.cluster import Cluster, RankError
from speedlab.config import RunConfig


def wait_for(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Poll until `condition` is true; AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"not true after {seconds} s: {condition}"
        time.sleep(0.02)
    return answer


def is_gone(pid: int) -> bool:
    """Whether the process has ended; a zombie that nobody has taken off the list yet has."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def sum_over_ranks(value: float) -> float:
    import torch
    import torch.distributed as dist

    from speedlab import comm

    comm.join()
    tensor = torch.full((4,), value)
    dist.all_reduce(tensor)
    return float(tensor[0])


def sleep_in(folder: str) -> None:
    """For long; each rank says in `folder` that it has begun."""
    (Path(folder) / os.environ["RANK"]).touch()
    time.sleep(60)


def sum_for_ever() -> None:
    import torch
    import torch.distributed as dist

    from speedlab import comm

    comm.join()
    tensor = torch.zeros(1024)
    while True:
        dist.all_reduce(tensor)


def wait_for_each_other() -> None:
    """A deadlock: every rank waits to receive what none sends."""
    import torch
    import torch.distributed as dist

    from speedlab import comm

    world = comm.join()
    print("waiting", flush=True)
    dist.recv(torch.zeros(4), (world.rank + 1) % world.size)


def look_around() -> dict[str, Any]:
    import sys

    torch_was_there = "torch" in sys.modules
    import torch

    return {
        "rank": int(os.environ["RANK"]),
        "pid": os.getpid(),
        "torch": torch_was_there,
        "threads": torch.get_num_threads(),
        "cores": sorted(os.sched_getaffinity(0)),
        "environment": {
            name: os.environ.get(name)
            for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "OMP_WAIT_POLICY")
        },
        "gpus": os.environ["CUDA_VISIBLE_DEVICES"],
    }


def backend() -> str:
    import torch.distributed as dist

    from speedlab import comm

    comm.join()
    return dist.get_backend()


def break_a_deadlock(cluster: Cluster) -> None:
    """Ranks that wait for each other, in gloo or on shared memory, stop when interrupted, and meet again."""
    cluster.submit(sum_over_ranks, 1.0).result(60)
    waiting = threading.Event()
    unsubscribe = cluster.output.subscribe(lambda ranks, stream, text: waiting.set())
    results = cluster.submit(wait_for_each_other)
    assert waiting.wait(30)
    unsubscribe()
    assert cluster.interrupt(20.0) == list(range(cluster.size))
    with pytest.raises(RankError):
        results.result(30)
    assert cluster.submit(sum_over_ranks, 2.0).result(60) == [2.0 * cluster.size] * cluster.size


def small_run(folder: Path, name: str, steps: int, **changes: Any) -> RunConfig:
    """A training of milliseconds a step, on a text of its own."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text("the quick brown fox jumps over the lazy dog\n" * 500)
    return RunConfig(
        name=name,
        folder=folder / "runs",
        steps=steps,
        model={"layers": 2, "hidden": 32, "heads": 2, "ffn_hidden": 64, "context": 32},
        data={"source": str(text), "tokenizer": "bytes", "sequence_length": 32, "heldout_share": 0.2},
        precision="float32",
        zero=2,
        eval={"every_steps": 0},
        **changes,
    )
