"""`python -m tests.benchmarks reading`: a long run of many ranks, as a dashboard opens it and follows it."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speedlab.calibrate.table import BenchRow, report
from speedlab.config import RunConfig
from speedlab.config.command_line import read_options
from speedlab.telemetry.records import PHASES, Event, Ledger, StepRecord
from speedlab.telemetry.run_folder import RunFolder

GOALS = {"open": 2.0, "memory": 150.0, "tick": 2.0}
"""At most: seconds until everything is drawn from, MB that this takes, milliseconds for a new step of every rank."""

_PHASES = dict.fromkeys(PHASES, 0.0123456)
_HELD: dict[str, Any] = {"parameters": 10**9, "gradients": 10**9, "optimizer_moments": 8 * 10**9, "activations": 10**9}
_CAPACITY = 80 * 2**30
_KERNELS = {name: {"calls": 12, "bytes": 123456789, "seconds": 0.0123456} for name in ("adamw", "sum", "loss")}
_SENT = {"all_gather": 123456789, "reduce_scatter": 123456789, "all_reduce": 1234}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What it takes to look at a run that is there, and to go on looking while its ranks report."""

    ranks: int = 64
    """Whose records are in the folder."""
    steps: int = 10_000
    """Of each."""
    ticks: int = 20
    """Steps that are reported while somebody looks."""
    json: Path | None = None
    """Also write one JSON record for each row to this file."""


def main(argv: list[str] | None = None) -> None:
    options = read_options(Options, argv, "python -m tests.benchmarks reading")
    with tempfile.TemporaryDirectory() as parent:
        folder = write_run(Path(parent), options.ranks, options.steps)
        arguments = [str(folder.path), str(options.ranks), str(options.steps), str(options.ticks)]
        command = [sys.executable, "-m", "tests.benchmarks.reading", *arguments]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout)
    rows = [
        BenchRow(case=f"{what}: {options.ranks} ranks × {options.steps:,} steps", ours=value, unit=unit, n=count)
        for what, unit, value, count in (
            ("open", "s", found["open"], 1),
            ("memory", "MB", found["memory"], 1),
            ("tick", "ms", statistics.median(found["ticks"]), options.ticks),
        )
    ]
    report(rows, options.json)
    for row, (what, goal) in zip(rows, GOALS.items(), strict=True):
        print(f"{what}: {row.ours:.2f} {row.unit}, goal {goal:g}: {'met' if row.ours <= goal else 'MISSED'}")


def write_run(parent: Path, ranks: int, steps: int) -> RunFolder:
    """A run with records of so many ranks and steps."""
    folder = RunFolder.create(RunConfig(name="long", folder=parent, steps=2 * steps))
    began = time.time() - steps / 10
    details = {"peak_flops": 1e14 * ranks, "hosts": [f"node-{rank // 8}" for rank in range(ranks)]}
    events = [Event(kind="started", step=0, time=began, details=details)]
    events += [Event(kind="checkpoint", step=step, time=began + step / 10) for step in range(1000, steps + 1, 1000)]
    (folder.path / "events.jsonl").write_text("".join(f"{event.to_json()}\n" for event in events))
    for rank in range(ranks):
        with _file(folder.path, rank).open("w") as file:
            file.writelines(f"{_record(step, rank, began + step / 10).to_json()}\n" for step in range(1, steps + 1))
    return folder


def add_step(folder: Path, ranks: int, step: int) -> None:
    """Every rank reports one more."""
    for rank in range(ranks):
        with _file(folder, rank).open("a") as file:
            file.write(f"{_record(step, rank, time.time()).to_json()}\n")


def _file(folder: Path, rank: int) -> Path:
    return folder / "records" / f"rank-{rank}.jsonl"


def _record(step: int, rank: int, at: float) -> StepRecord:
    values: dict[str, Any] = {"time": at, "loss": 8 - step / 1e4, "learning_rate": 1e-3, "grad_norm": 1.23456}
    values |= {"loss_scale": 1.0, "zero_stage": 3, "tokens": 4096, "flops": 1e15, "seconds": 0.123456}
    # Ranks differ by their place, and what a process holds is never twice the same.
    other = 2**28 + 2**23 * (13 * rank % 64) + 2**12 * (7 * step % 1000)
    reported = sum(_HELD.values()) + other
    ledger = Ledger(**_HELD, other_framework=other, reported_bytes=reported, capacity_bytes=_CAPACITY)
    parts: dict[str, Any] = {"phases": _PHASES, "sent_bytes": _SENT, "kernels": _KERNELS, "ledger": ledger}
    return StepRecord(step=step, rank=rank, **values, **parts)


def _look(folder: Path, ranks: int, steps: int, ticks: int) -> dict[str, Any]:
    """In a process of its own: what a dashboard does, but for the drawing."""
    import psutil

    from speedlab.telemetry.feed import Feed
    from speedlab.telemetry.history import History

    process = psutil.Process()
    before, began = process.memory_info().rss, time.perf_counter()
    feed, history = Feed(folder), History()
    feed.poll(files=True)
    history.update(feed.records, feed.events)
    found: dict[str, Any] = {"open": time.perf_counter() - began, "ticks": []}
    for step in range(steps + 1, steps + 1 + ticks):
        add_step(folder, ranks, step)
        began = time.perf_counter()
        feed.poll(files=True)
        history.update(feed.records, feed.events)
        found["ticks"].append((time.perf_counter() - began) * 1e3)
    assert history.lead.length == steps + ticks
    assert {record.step for record in history.latest.values()} == {steps + ticks}
    return {**found, "memory": (process.memory_info().rss - before) / 1e6}


if __name__ == "__main__":
    place, *numbers = sys.argv[1:]
    print(json.dumps(_look(Path(place), *map(int, numbers))))
