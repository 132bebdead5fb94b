"""`python -m tests.benchmarks recording`: what the step records, the ledger and the stream cost of a step of a real
run."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from speedlab.calibrate.rank_processes import run_on_ranks
from speedlab.calibrate.table import BenchRow, report
from speedlab.config import RunConfig
from speedlab.config.command_line import read_options
from speedlab.telemetry.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class Options:
    """The share of a step that recording takes, in a run of the smallest preset (the worst case: its steps are
    short)."""

    ranks: int = 2
    """Rank processes, one thread each."""
    steps: int = 30
    """Steps to measure, after five that are not."""
    json: Path | None = None
    """Also write one JSON record for each row to this file."""


def main(argv: list[str] | None = None) -> None:
    options = read_options(Options, argv, "python -m tests.benchmarks recording")
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig(
            name="recording",
            folder=Path(folder),
            steps=options.steps + 5,
            batch={"micro_size": 4},
            eval={"every_steps": 0},
        )
        run = RunFolder.create(config)
        recording, total = run_on_ranks(_measure, options.ranks, str(run.path))
    shares = [own / whole for own, whole in zip(recording[5:], total[5:], strict=True)]
    milliseconds = [own * 1e3 for own in recording[5:]]
    row = BenchRow(
        case=f"recording a step, {options.ranks} ranks",
        ours=statistics.median(milliseconds),
        unit="ms",
        limit_share=statistics.median(shares),
        n=len(shares),
        spread=(max(milliseconds) - min(milliseconds)) / statistics.median(milliseconds),
    )
    report([row], options.json)
    print(
        f"recording takes {100 * statistics.median(shares):.2f} % of a step of "
        f"{1e3 * statistics.median(total[5:]):.0f} ms"
    )


def _measure(folder: str) -> tuple[list[float], list[float]]:
    """(seconds of recording, seconds of the whole step), one of each for every step."""
    from speedlab.engine.phase_timer import StepCosts
    from speedlab.trainer.reporting import Reporter
    from speedlab.trainer.trainer import Trainer

    recording: list[float] = []
    total: list[float] = []

    write = Reporter.record

    def timed(reporter: Reporter, costs: StepCosts, **more: Any) -> None:
        start = time.perf_counter()
        write(reporter, costs, **more)
        recording.append(time.perf_counter() - start)
        total.append(costs.seconds + recording[-1])

    with patch.object(Reporter, "record", timed):
        Trainer(RunFolder(folder), None).advance()
    return recording, total
