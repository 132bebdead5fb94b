"""`speedlab bench steptimes`: predicted step times beside measured ones, over the grid of `bench planner` on CPU ranks.

The machine is calibrated first, in the same run, unless the user's calibration is asked for; no case of the grid is
among what sets its constants, and nothing is learned from the cases.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tyro

from speedlab.bench.planner_cases import GridCase, grid
from speedlab.bench.ranks import RankSet
from speedlab.config import RunConfig
from speedlab.planner import calibration_store
from speedlab.planner.calibration import Calibration
from speedlab.planner.setup import Setup
from speedlab.planner.timing import StepTime

VALIDATED = Path(__file__).parents[1] / "planner" / "validated_times.md"
"""Where the table of the last whole run is kept."""

_GOAL = 0.08


@dataclass(frozen=True, kw_only=True)
class Options:
    """Predicted beside measured step time, over the whole grid or some of it. Measure while nothing else runs."""

    only: str = ""
    """Measure only cases whose name holds this text."""
    every: int = 1
    """Measure every n-th case only."""
    seconds: float = 1.0
    """How long each case is measured."""
    stored: bool = False
    """Use the user's calibration instead of measuring the machine first."""
    write: bool = False
    """Also write the table to the planner's `validated_times.md`. For a whole run."""


@dataclass(frozen=True)
class Found:
    """One case: seconds of a step."""

    case: str
    time: StepTime
    measured: float

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.time.step_seconds / self.measured - 1


def main(argv: list[str] | None = None) -> None:
    options = tyro.cli(Options, args=argv, prog="speedlab bench steptimes")
    cases = [case for case in grid() if options.only in case.name][:: options.every]
    engines = sorted({case.ranks for case in cases})
    calibration = calibration_store.load() if options.stored else _calibrate(engines)
    if calibration is None:
        sys.exit("there is no calibration of this machine; run `speedlab calibrate`, or leave out --stored")
    found: list[Found] = []
    for ranks in engines:
        with RankSet(ranks) as group:
            group.call(_begin, calibration.of(ranks, "float32").threads)
            for case in cases:
                if case.ranks == ranks:
                    setup = setup_of(case)
                    seconds = group.call(measure, case.config, options.seconds)
                    found.append(Found(case.name, calibration.predict(setup), seconds))
                    print(f"  {case.name}: {found[-1].error:+.1%}", file=sys.stderr, flush=True)
    text = render(found)
    print(text)
    if options.write:
        VALIDATED.write_text(text, encoding="utf-8")


def _calibrate(engines: list[int]) -> Calibration:
    from speedlab.bench import calibrate

    return calibrate.measure(engines, say=lambda text: print(f"calibrating: {text}", file=sys.stderr, flush=True))


def setup_of(case: GridCase) -> Setup:
    """The case as the planner sees it."""
    return Setup.of_config(case.config, case.ranks, dtype=case.config.precision.dtype)  # type: ignore[arg-type]  # never "auto" here


def render(found: list[Found]) -> str:
    """Markdown: totals, then each case with its parts."""
    errors = [abs(each.error) for each in found]
    lines = [
        "# Step time: predicted beside measured",
        "",
        "Made by `speedlab bench steptimes --write`: this machine calibrated, then medians of steps on CPU ranks.",
        "",
        f"- {len(found)} trainings",
        f"- {statistics.median(errors):.1%} off (median), {max(errors):.1%} (worst); the goal is {_GOAL:.0%} (median)",
        "",
        "| training (micro-batch × accumulation) | predicted ms | measured ms | error | of it computing "
        "| communication | update | engine |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in found:
        parts = each.time.parts
        computing = sum(parts[name] for name in ("forward", "backward", "recompute", "logits"))
        updating = parts["optimizer"] + parts["offload"]
        waiting = each.time.step_seconds - computing - updating - parts["engine"]
        numbers = [each.time.step_seconds, each.measured]
        shares = [computing, waiting, updating, parts["engine"]]
        lines.append(
            f"| {each.case} | {' | '.join(f'{number * 1e3:.2f}' for number in numbers)} | {each.error:+.1%} | "
            f"{' | '.join(f'{share * 1e3:.2f}' for share in shares)} |"
        )
    return "\n".join(lines) + "\n"


# ---- in a rank process -----------------------------------------------------------------------------------------------


def _begin(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


def measure(config: RunConfig, seconds: float) -> float:
    """Median seconds of a step of `config` on random tokens, over `seconds`; the first steps do not count."""
    with training(config) as step:
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            step()
            times.append(time.perf_counter() - begin)
        # All ranks make as many steps: those that rank 0 says.
        for _ in range(_agreed(max(5, min(200, int(seconds / times[-1]))))):
            begin = time.perf_counter()
            step()
            times.append(time.perf_counter() - begin)
    return statistics.median(times[3:])


@contextmanager
def training(config: RunConfig) -> Iterator[Callable[[], object]]:
    """A step of `config` on this rank, which is taken apart afterwards."""
    import torch
    import torch.distributed as dist

    from speedlab.engine import initialize
    from speedlab.models import GPT

    engine, *_ = initialize(model=lambda: GPT(config.model), config=config)
    shape = (2, config.batch.resolve(engine.layout.dp).micro_size, config.data.sequence_length)
    tokens, targets = torch.randint(0, config.model.vocab_size, shape, device=engine.world.device)
    try:
        yield lambda: engine.train_batch([(tokens, targets)] * engine.accumulation)
    finally:
        engine.destroy(keep_parameters=False)
        dist.barrier()


def _agreed(count: int) -> int:
    import torch
    import torch.distributed as dist

    told = torch.tensor([count])
    dist.broadcast(told, 0)
    return int(told)
