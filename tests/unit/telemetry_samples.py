"""Small records, events and waiting, shared by the tests of the telemetry room and of the Run handle."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from speedlab.config import RunConfig
from speedlab.telemetry.records import Event, Ledger, Span, StepRecord
from speedlab.telemetry.run_folder import RunFolder


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


def pipeline_records(step: int, pp: int = 2, micro_batches: int = 4, **changes: Any) -> dict[int, StepRecord]:
    """A step of a GPipe pipeline by rank: forwards of 10 ms, backwards of 20, and clocks that began 5 ms apart."""
    forward, backward, micro = 0.010, 0.020, range(micro_batches)
    turned = (micro_batches + pp - 1) * forward
    found = {}
    for rank in range(pp):
        spans = [Span("wait", -1, -1, 0.0, rank * forward)] if rank else []
        spans += [Span("F", rank, i, (rank + i) * forward, forward) for i in micro]
        spans += [Span("B", rank, i, turned + (pp - 1 - rank + i) * backward, backward) for i in micro]
        end = turned + (micro_batches + pp - 1) * backward
        spans += [Span("reduce", rank, -1, end, 0.003), Span("optimizer", -1, -1, end + 0.003, 0.002)]
        late = 0.005 * rank
        own = [span._replace(start=span.start - late) for span in spans]
        found[rank] = make_record(step, rank, began=100.0 * step + late, timeline=own, **changes)
    return found


def eventually(check: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Poll until `check` returns something true; fails the test after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.005)
    return found
