"""`python -m tests.benchmarks steptimes`: predicted step times beside measured ones, over the grid of `bench planner`
on CPU ranks.

The machine is calibrated first, in the same run, unless the user's calibration is asked for; no case of the grid is
among what sets its constants, and nothing is learned from the cases. What is counted was decided with them in sight:
that kinds of blocks differ in a training, and that zero-bubble saves nothing on processors.

A machine that is shared with others changes its speed within minutes, by a quarter and more, which no calibration
foresees. Each case therefore takes turns with a reference training, one of those that `speedlab calibrate` measured:
what the reference takes now over what it is predicted to take is how slow the machine is now, and is told apart from
the planner's error. Both errors are shown, with it and without.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from speedlab.calibrate.rank_processes import RankSet
from speedlab.calibrate.workers import training
from speedlab.config import RunConfig
from speedlab.config.command_line import read_options
from speedlab.planner.calibration import Calibration, store
from speedlab.planner.setup import Setup
from speedlab.planner.time.step_time import StepTime
from tests.benchmarks.planner_cases import GridCase, grid

VALIDATED = Path(__file__).parents[2] / "speedlab" / "planner" / "validated_times.md"
"""Where the table of the last whole run is kept."""

_GOAL = 0.08

_TURN_SECONDS = 0.2
"""Of a case's steps before the reference has its turn again."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Predicted beside measured step time, over the whole grid or some of it. Measure while nothing else runs."""

    only: str = ""
    """Measure only cases whose name holds this text."""
    every: int = 1
    """Measure every n-th case only."""
    rounds: int = 4
    """How often each case and the reference take turns."""
    stored: bool = False
    """Use the user's calibration instead of measuring the machine first."""
    write: bool = False
    """Also write the table to the planner's `validated_times.md`. For a whole run."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Median seconds of a step, and of the reference's between times."""

    step: float
    reference: float
    over_reference: float
    """Median of their ratio, turn by turn."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """One case."""

    case: str
    time: StepTime
    measured: Measured
    reference_seconds: float
    """What the reference's step was predicted to take, like the case's."""

    @property
    def machine(self) -> float:
        """How much longer this machine took for the reference than was predicted: 1 where nothing changed."""
        return self.measured.reference / self.reference_seconds

    @property
    def error(self) -> float:
        """predicted / measured - 1, at the speed that the machine had at the time."""
        return self.time.step_seconds / self.reference_seconds / self.measured.over_reference - 1

    @property
    def plain_error(self) -> float:
        """predicted / measured - 1, with whatever the machine's speed had become."""
        return self.time.step_seconds / self.measured.step - 1


def main(argv: list[str] | None = None) -> None:
    options = read_options(Options, argv, "python -m tests.benchmarks steptimes")
    cases = [case for case in grid() if options.only in case.name][:: options.every]
    engines = sorted({case.ranks for case in cases})
    calibration = store.load() if options.stored else _calibrate(engines)
    if calibration is None:
        sys.exit("there is no calibration of this machine; run `speedlab calibrate`, or leave out --stored")
    found: list[Found] = []
    for ranks in engines:
        with RankSet(ranks) as group:
            group.call(_begin, calibration.of(ranks, "float32").threads)
            for case in cases:
                if case.ranks == ranks:
                    found.append(_found(case, calibration, group.call(measure, case.config, options.rounds)))
                    print(f"  {case.name}: {found[-1].error:+.1%}", file=sys.stderr, flush=True)
    text = render(found)
    print(text)
    if options.write:
        VALIDATED.write_text(text, encoding="utf-8")


def _calibrate(engines: list[int]) -> Calibration:
    from speedlab.calibrate import measure as calibrate

    return calibrate.measure(engines, say=lambda text: print(f"calibrating: {text}", file=sys.stderr, flush=True))


def _found(case: GridCase, calibration: Calibration, measured: Measured) -> Found:
    reference = GridCase(name="reference", ranks=case.ranks, config=reference_of(case.config))
    return Found(
        case=case.name,
        time=calibration.predict(setup_of(case)),
        measured=measured,
        reference_seconds=calibration.predict(setup_of(reference)).step_seconds,
    )


def reference_of(config: RunConfig) -> RunConfig:
    """The training beside which `config` is measured: one of the calibration's, in the same precision."""
    from speedlab.calibrate.cases import ON_PROCESSORS, larger_configs

    return larger_configs(ON_PROCESSORS, config.precision.dtype)[0]


def setup_of(case: GridCase) -> Setup:
    """The case as the planner sees it."""
    return Setup.of_config(case.config, case.ranks, dtype=case.config.precision.dtype)  # type: ignore[arg-type]  # never "auto" here


def render(found: list[Found]) -> str:
    """Markdown: totals, then each case with its parts."""
    errors, plain = ([abs(error) for error in of] for of in ([f.error for f in found], [f.plain_error for f in found]))
    machine = [each.machine for each in found]
    lines = [
        "# Step time: predicted beside measured",
        "",
        "Made by `python -m tests.benchmarks steptimes --write`: this machine calibrated, then medians of steps on CPU",
        "ranks, each in turns with a reference training that the calibration knows. `machine` is what the",
        "reference took over what it was predicted to take; `error` is at that speed, `plain error` is without it.",
        "",
        f"- {len(found)} trainings",
        f"- {statistics.median(errors):.1%} off (median), {max(errors):.1%} (worst); the goal is {_GOAL:.0%} (median)",
        f"- {statistics.median(plain):.1%} (median), {max(plain):.1%} (worst) with whatever the machine's speed had",
        f"  become: the reference took {min(machine):.2f} to {max(machine):.2f} times what was predicted",
        "",
        "| training (micro-batch × accumulation) | predicted ms | measured ms | machine | error | plain error "
        "| of it computing | communication | update | engine |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in found:
        parts = each.time.parts
        computing = sum(parts[name] for name in ("forward", "backward", "recompute", "logits"))
        updating = parts["optimizer"] + parts["offload"]
        waiting = each.time.step_seconds - computing - updating - parts["engine"]
        numbers = [each.time.step_seconds, each.measured.step]
        shares = [computing, waiting, updating, parts["engine"]]
        lines.append(
            f"| {each.case} | {' | '.join(f'{number * 1e3:.2f}' for number in numbers)} | {each.machine:.2f} | "
            f"{each.error:+.1%} | {each.plain_error:+.1%} | "
            f"{' | '.join(f'{share * 1e3:.2f}' for share in shares)} |"
        )
    return "\n".join(lines) + "\n"


# ---- in a rank process -----------------------------------------------------------------------------------------------


def _begin(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


def measure(config: RunConfig, rounds: int) -> Measured:
    """Steps of `config` on random tokens and steps of its reference, in turn; the first of each turn does not count."""
    with training(reference_of(config)) as reference, training(config) as step:
        _turn(reference, 2)
        # All ranks make as many steps: those that rank 0 says.
        count = _agreed(max(2, min(10, int(_TURN_SECONDS / _turn(step, 3)))))
        turns = [(_turn(reference, 2), _turn(step, count)) for _ in range(rounds)]
    return Measured(
        step=statistics.median(own for _, own in turns),
        reference=statistics.median(other for other, _ in turns),
        over_reference=statistics.median(own / other for other, own in turns),
    )


def _turn(step: Callable[[], object], count: int) -> float:
    """Median seconds of `count` steps, after one that brings the caches back."""
    times = []
    for _ in range(1 + count):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def _agreed(count: int) -> int:
    import torch
    import torch.distributed as dist

    reported = torch.tensor([count])
    dist.broadcast(reported, 0)
    return int(reported)
