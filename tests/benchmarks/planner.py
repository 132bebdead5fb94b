"""`python -m tests.benchmarks planner`: predicted memory beside the engine's own ledger, over a grid of trainings on
CPU ranks.

Each case makes three steps; the last one is traced, so that activations are exact. Model states must agree to the byte.
The peak is what torch's tensors take together: model states, activations and communication buffers.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from speedlab.calibrate.rank_processes import RankSet
from speedlab.config import RunConfig
from speedlab.config.command_line import read_options
from speedlab.planner.memory.predict import memory_by_rank, predict_memory
from speedlab.planner.memory.rank_memory import RankMemory
from speedlab.planner.setup import Setup
from speedlab.telemetry.records import Ledger
from tests.benchmarks.planner_cases import GridCase, grid

VALIDATED = Path(__file__).parents[2] / "speedlab" / "planner" / "validated.md"
"""Where the table of the last whole run is kept."""

_STATES = ("parameters", "gradients", "master_weights", "optimizer_moments")
_OTHERS = ("activations", "communication_buffers")
_ALONGSIDE = ("other_framework", "outside_framework")
_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Options:
    """Predicted memory beside measured memory, over the whole grid or some of it."""

    only: str = ""
    """Measure only cases whose name holds this text."""
    write: bool = False
    """Also write the table to the planner's `validated.md`. For a whole run."""


@dataclass(frozen=True)
class Found:
    """One rank of a case: bytes by category, predicted and measured."""

    case: str
    rank: int
    predicted: dict[str, int]
    measured: dict[str, int]

    @property
    def states_agree(self) -> bool:
        """To the byte."""
        names = (self.predicted.keys() | self.measured.keys()) - {*_OTHERS, *_ALONGSIDE}
        return all(self.predicted.get(name) == self.measured.get(name) for name in names)

    @property
    def error(self) -> float:
        """Of the peak, as a share of what was measured."""
        return _peak(self.predicted) / _peak(self.measured) - 1


def main(argv: list[str] | None = None) -> None:
    options = read_options(Options, argv, "python -m tests.benchmarks planner")
    found: list[Found] = []
    cases = [case for case in grid() if options.only in case.name]
    for ranks in sorted({case.ranks for case in cases}):
        with RankSet(ranks) as group:
            for case in cases:
                if case.ranks == ranks:
                    print(f"  {case.name}", file=sys.stderr, flush=True)
                    found += compare(case, group.call(measure, case.config))
    text = render(found)
    print(text)
    if options.write:
        VALIDATED.write_text(text, encoding="utf-8")


def compare(case: GridCase, ledgers: list[dict[str, int]]) -> list[Found]:
    """Each rank's measured ledger beside what is predicted for its place in the layout."""
    setup = Setup.of_config(case.config, case.ranks, dtype=case.config.precision.dtype)  # type: ignore[arg-type]  # never "auto" here
    predicted = memory_by_rank(setup, predict_memory(setup, device="cpu"))
    return [
        Found(case.name, rank, memory.by_category() | _away(memory), ledger)
        for rank, (memory, ledger) in enumerate(zip(predicted, ledgers, strict=True))
    ]


def measure(config: RunConfig) -> list[dict[str, int]]:
    """On a rank: train some steps on random tokens; every rank's ledger, by rank."""
    import torch

    import speedlab
    from speedlab.models import GPT

    engine = speedlab.initialize(model=lambda: GPT(config.model), config=config)[0]
    generator = torch.Generator().manual_seed(0)
    shape = (config.batch.resolve(engine.layout.data_size).micro_size, config.data.sequence_length)

    def batch() -> list[Any]:
        made = [torch.randint(config.model.vocab_size, shape, generator=generator) for _ in range(engine.accumulation)]
        return [(tokens, tokens) for tokens in made]

    try:
        for _ in range(_STEPS - 1):
            engine.train_batch(batch())
        last = batch()
        with engine.trace_activations():
            engine.train_batch(last)
        ledger = engine.ledger()
        own = asdict(ledger)
        return engine.everyone.collect({name: own[name] for name in (*_STATES, *_OTHERS)} | _away(ledger))
    finally:
        engine.destroy(keep_parameters=False)


def _away(memory: RankMemory | Ledger) -> dict[str, int]:
    """What lies on the host and on disk of model states, by place and category."""
    held = {"host": memory.host, "disk": memory.disk}
    return {f"{place} {name}": count for place, own in held.items() for name, count in own.items() if name in _STATES}


# ---- the table -------------------------------------------------------------------------------------------------------


def render(found: list[Found]) -> str:
    """Markdown: totals, then for each case the rank whose peak is furthest off."""
    worst = {each.case: each for each in sorted(found, key=lambda each: abs(each.error))}
    errors = [abs(each.error) for each in found]
    exact = sum(each.states_agree for each in found)
    lines = [
        "# Memory: predicted beside measured",
        "",
        "Made by `python -m tests.benchmarks planner --write`: ledgers of the engine on CPU ranks, in a traced step.",
        "The peak is model states, activations and communication buffers. Of each training, the rank that is",
        "furthest off. ",
        f"- {len(worst)} trainings, {len(found)} ranks",
        f"- model states agree to the byte on {exact} of {len(found)} ranks",
        f"- peak: {statistics.median(errors):.2%} off (median), {max(errors):.2%} (worst)",
        "",
        "| training (micro-batch × accumulation) | rank | states | measured | activations, predicted | measured "
        "| buffers, predicted | measured | peak, predicted | measured | error |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case in dict.fromkeys(each.case for each in found):
        each = worst[case]
        numbers = [_states(each.predicted), _states(each.measured)]
        numbers += [side[name] for name in _OTHERS for side in (each.predicted, each.measured)]
        numbers += [_peak(each.predicted), _peak(each.measured)]
        cells = " | ".join(f"{number:,}" for number in numbers)
        lines.append(f"| {case} | {each.rank} | {cells} | {each.error:+.2%} |")
    return "\n".join(lines) + "\n"


def _states(side: dict[str, int]) -> int:
    return sum(side[name] for name in _STATES)


def _peak(side: dict[str, int]) -> int:
    return sum(side[name] for name in (*_STATES, *_OTHERS))
