"""Held-out losses of the cases of `python -m tests.benchmarks network`: runs of a cluster on one host, as a user starts
them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from speedlab.cluster import Cluster
from tests.benchmarks.network_cases import WARM_UP, Case

_ENGINES = 2
_HELD_OUT_BATCHES = 16


def heldout_losses(
    groups: Sequence[Sequence[Case]], seeds: Sequence[int], steps: int, say: Callable[[str], object]
) -> dict[str, list[float]]:
    """Held-out losses after `steps` steps by case, one for each seed: values, order of data and all else from it."""
    losses: dict[str, list[float]] = {}
    cluster = Cluster(_ENGINES, name=f"bench-network-{os.getpid()}", device="cpu")
    try:
        with tempfile.TemporaryDirectory(prefix="speedlab-network-") as folder:
            for seed in seeds:
                for case in (case for group in groups for case in group):
                    losses.setdefault(case.name, []).append(_loss(cluster, case, seed, steps, Path(folder)))
                    say(f"seed {seed}, {case.name}: held-out loss {losses[case.name][-1]:.4f}")
    finally:
        cluster.stop()
    return losses


def _loss(cluster: Cluster, case: Case, seed: int, steps: int, folder: Path) -> float:
    config = case.config(
        warm_up_steps=max(1, round(WARM_UP * steps)),
        steps=steps,
        seed=seed,
        folder=folder,
        schedule={"warmup_steps": max(1, steps // 20)},
        eval={"every_steps": steps, "batches": _HELD_OUT_BATCHES},
        telemetry={"tensorboard": False},
        batch={"micro_size": 4},
    )
    run = cluster.train(config)
    run.wait()
    loss = run.records()[-1].heldout_loss
    assert loss is not None  # Its last step is one that is evaluated.
    return loss
