"""Small records, events and waiting, shared by the tests of the telemetry room and of the Run handle."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from speedlab.config import RunConfig
from speedlab.telemetry.folder import RunFolder
from speedlab.telemetry.records import Event, Ledger, StepRecord


def make_folder(parent: Path, name: str | None = "sample", **changes: Any) -> RunFolder:
    return RunFolder.create(
        RunConfig(**{"name": name, "folder": parent, "telemetry": {"tensorboard": False}, **changes})
    )


def make_record(step: int, rank: int = 0, **changes: Any) -> StepRecord:
    values: dict[str, Any] = {
        "step": step,
        "rank": rank,
        "time": 1000.0 + step,
        "loss": 8.0 - step / 100,
        "learning_rate": 1e-3,
        "grad_norm": 1.5,
        "loss_scale": 1.0,
        "zero_stage": 2,
        "tokens": 4096,
        "flops": 1e9,
        "seconds": 0.5,
        "phases": {"forward": 0.2, "backward": 0.3},
        "sent_bytes": {"all_gather": 1024},
        "ledger": Ledger(parameters=100, gradients=50, optimizer_moments=200, reported_bytes=350),
    }
    return StepRecord(**{**values, **changes})


def make_event(kind: str, step: int = 0, **changes: Any) -> Event:
    return Event(**{"kind": kind, "step": step, "time": 1000.0 + step, **changes})


def eventually(check: Callable[[], Any], seconds: float = 5.0) -> Any:
    """Poll until `check` returns something true; fails the test after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.005)
    return found
