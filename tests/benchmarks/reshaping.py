"""`python -m tests.benchmarks reshaping`: seconds that a run which is on takes to move to another layout on the same
ranks.

What is timed is the whole move: the state to memory, the old engine's end, the new one's building, and the state from
memory, of the slowest rank.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speedlab.calibrate.interleave import row
from speedlab.calibrate.rank_processes import run_on_ranks
from speedlab.calibrate.table import report
from speedlab.config.command_line import read_options

_WAY: tuple[dict[str, Any], ...] = (
    {"tp": 2, "pp": 2, "zero": 1},
    {"tp": 1, "pp": 4},
    {"tp": 2, "pp": 1},
    {"tp": 1, "zero": 3},
    {"pp": 2, "schedule": "zero-bubble"},
    {"pp": 1, "zero": 2, "schedule": "1f1b"},
)
"""From dp 4 at ZeRO stage 2 and back."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Move the 17M-parameter GPT under AdamW from layout to layout on four ranks."""

    ranks: int = 4
    """Rank processes, one thread each."""
    rounds: int = 5
    """Times that the way is gone."""
    json: Path | None = None
    """Also write one JSON record for each row to this file."""


def main(argv: list[str] | None = None) -> None:
    options = read_options(Options, argv, "python -m tests.benchmarks reshaping")
    print(f"{options.ranks} ranks ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        times = run_on_ranks(_measure, options.ranks, folder, options.rounds)
    rows = [
        row(f"{name}, {options.ranks} ranks", times, own=name, unit="s", value=lambda second: second) for name in times
    ]
    report(rows, options.json)


def _measure(folder: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of each move, of the slowest rank."""
    import torch

    import speedlab
    from speedlab.comm import CommStats, Group
    from speedlab.config import RunConfig
    from speedlab.engine import Engine
    from speedlab.models import GPT
    from speedlab.planner.formulas import parameter_count
    from speedlab.telemetry.current_config import changed_config
    from speedlab.trainer.reshape import rebuild

    config = RunConfig(model="gpt-mini", zero=2, precision="float32", batch={"global_size": 16, "micro_size": 1})

    def build(wanted: RunConfig) -> Engine:
        return speedlab.initialize(model=lambda: GPT(wanted.model), config=wanted)[0]

    def step(engine: Engine) -> None:
        rows = torch.randint(0, 8192, (1, 65), generator=torch.Generator().manual_seed(engine.global_step))
        engine.train_batch([(rows[:, :-1], rows[:, 1:])] * engine.accumulation)

    engine = build(config)
    step(engine)  # Moments exist from the first step on.
    world = engine.world
    control = Group(range(world.size), CommStats(), world.device, channel="control")
    times: dict[str, list[float]] = {}
    for round_ in range(-1, rounds):  # The first one is for warming up.
        for change in _WAY:
            before = engine.layout
            config = changed_config(config, world.size, **change)
            control.barrier()
            start = time.perf_counter()
            states = 16 * parameter_count(config.model) * world.size
            engine, _ = rebuild(engine, config, states=states, build=build, control=control, folder=Path(folder))
            slowest = max(control.collect(time.perf_counter() - start))
            if round_ >= 0:
                times.setdefault(f"{before} → {engine.layout}, zero {engine.zero_stage}", []).append(slowest)
            step(engine)
    engine.destroy(keep_parameters=False)
    return times
