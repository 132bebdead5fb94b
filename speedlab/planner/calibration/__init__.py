"""This machine as it was measured, and what runs on it have taught since. No torch.

`speedlab calibrate` measures; this is what it leaves: for each number of engines and each dtype a few constants in the
terms of the planner's formulas, so that `predict_time` gives the time of a step here as it does for described devices.
What the formulas leave out stands beside: factors on parts of a step, measured as well, and the engine's own time.

Predictions on this machine come from `Calibration.predict`:

1. The formulas, with the constants that were measured with as many engines working at once.
2. Measured factors on parts; the engine's own time for what it does around kernels (`engine_events`).
3. Engines that share cores: one that waits lends its core to the others, so that a pipeline's step takes what all
   have to do, or what the slowest takes with a core of its own, whichever is longer.
4. What measured runs have taught, one factor for each class of parts, bounded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from speedlab.planner.hardware.devices import DeviceSpec, Machines
from speedlab.planner.hardware.links import Link
from speedlab.planner.setup import Setup
from speedlab.planner.time.efficiency import Efficiency
from speedlab.planner.time.kernels import Rates
from speedlab.planner.time.step_time import StepTime, balance, blocks_by_rank, predict_time

VERSION = 3
"""Of the file; another one is refused, because constants mean something in the formulas of their time only."""

CLASSES = {
    "computing": ("forward", "backward", "recompute", "logits"),
    "communication": ("tensor parallel", "pipeline messages", "bubble", "data parallel"),
    "updating": ("optimizer", "offload"),
}
"""What a step record tells apart -> parts of a predicted step."""

_SENT = ("tensor parallel", "context parallel", "pipeline messages", "data parallel", "islands")
"""Parts that go over a link."""

_BOUND = 2.0
"""A learned factor stays between 1 / 2 and 2: beyond that something else is wrong, and is shown as a miss."""


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What was measured with `engines` engines at once, in one dtype. Rates are of one engine."""

    engines: int
    dtype: str
    threads: int
    rates: dict[str, Rates] = field(hash=False)
    """By kind of block (`kind_of`; there is always 'rotary') and of logits (`logits_of`). Memory's rate is that of
    elementwise kernels and matrix operands, much of which are in caches."""
    link_bytes_per_second: float
    link_seconds: float
    message_bytes_per_second: float
    event_seconds: dict[str, float] = field(hash=False)
    """The engine's own time, for each event that `engine_events` counts."""
    factors: dict[str, float] = field(hash=False)
    """Part of a step -> measured over what the formulas give with the constants above."""
    block_error: float
    """Median of |fitted / measured - 1| over the blocks that set their rates."""

    def rates_of(self, kind: str) -> Rates:
        """Those of 'rotary' blocks for a kind that was not measured."""
        return self.rates.get(kind, self.rates["rotary"])


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A run of the user's beside what was predicted before anything was learned from it."""

    name: str
    setup: str
    engines: int
    steps: int
    predicted_seconds: float
    measured_seconds: float
    ratios: dict[str, float] = field(hash=False)
    """Class of parts -> measured over predicted without anything learned."""
    process_bytes: int
    """What a rank's process held beside model states, activations and communication buffers."""

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted_seconds / self.measured_seconds - 1


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A machine that was measured."""

    version: int = VERSION
    machine: str
    """Name, processor and cores: constants of another one are refused."""
    device: str
    """'cpu', or a GPU's name."""
    cores: int
    """Processor cores that engines share; 0 where each has a device of its own."""
    memory_bytes: int
    """Of all engines together."""
    created: float
    """Seconds since the epoch."""
    rates: dict[str, float] = field(hash=False)
    """Plain measurements for people, by name with its unit."""
    process_bytes: int
    """What an engine's process holds before it holds a model."""
    constants: tuple[Constants, ...]
    runs: tuple[MeasuredRun, ...] = ()
    """Measured runs, oldest first, misses and all."""

    def of(self, engines: int, dtype: str) -> Constants:
        """The constants of so many engines, or of the nearest number that was measured.

        Raises ValueError for a dtype that was not measured.
        """
        found = [constants for constants in self.constants if constants.dtype == dtype]
        if not found:
            known = ", ".join(sorted({constants.dtype for constants in self.constants}))
            raise ValueError(f"{self.machine} was measured in {known}, not in {dtype}; choose one of these")
        return min(found, key=lambda constants: (abs(math.log(constants.engines / engines)), -constants.engines))

    def machines(self, engines: int, dtype: str = "float32", kind: str = "rotary") -> Machines:
        """This machine as one host of `engines` devices, with the link that was measured in `dtype`, and the rates of
        one kind of block."""
        here = self.of(engines, dtype)
        dtypes = {constants.dtype for constants in self.constants}
        return Machines(
            device=DeviceSpec(
                name=self.device,
                memory_bytes=self.memory_bytes // engines,
                peak_flops={name: self.of(engines, name).rates_of(kind).matmul_flops for name in sorted(dtypes)},
                memory_bytes_per_second=here.rates_of(kind).memory_bytes,
            ),
            per_host=engines,
            in_host=Link(
                name="measured",
                bandwidth_bytes_per_second=here.link_bytes_per_second,
                latency_seconds=here.link_seconds,
            ),
        )

    def efficiency(self, engines: int, dtype: str = "float32") -> Efficiency:
        """What `predict_time` takes with `machines(engines, dtype)`: it then asks `predict`, which knows the constants
        of every dtype."""
        return replace(self.shares(engines, dtype), calibration=self)

    def shares(self, engines: int, dtype: str, kind: str = "rotary") -> Efficiency:
        """Shares of the rates of `machines(engines, dtype, kind)` for the formulas alone: all are 1 but attention's and
        that of messages. Nothing overlaps between engines on processors."""
        here = self.of(engines, dtype)
        rates = here.rates_of(kind)
        return replace(
            Efficiency.measured(kernel_seconds=rates.kernel_seconds, drawn_seconds=rates.drawn_seconds),
            attention=rates.attention_flops / rates.matmul_flops,
            messages=here.message_bytes_per_second / here.link_bytes_per_second,
        )

    def predict(self, setup: Setup, *, learned: bool = True, link: Link | None = None) -> StepTime:
        """The time of one step of `setup` on this machine, with what runs have taught unless `learned` is False, and
        over `link` where engines pretend to have one.

        Raises ValueError for a shape or a dtype that cannot be.
        """
        engines = setup.layout.world_size
        here = self.of(engines, setup.dtype)
        # Halves of a backward cost this engine on processors what they save: zero-bubble takes .96 to 1.14 times as
        # long as 1F1B (pp 2, 4 micro-batches).
        halves = setup.schedule == "zero-bubble" and self.device == "cpu"
        timed = replace(setup, schedule="1f1b") if halves else setup
        time = predict_time(timed, self.machines(engines, setup.dtype), self.shares(engines, setup.dtype))
        parts = corrected(self._with_own_rates(time.parts, setup), setup, here)
        sharing = max(1.0, engines / self.cores) if self.cores else 1.0
        balanced = 1.0
        if setup.layout.pp > 1:
            kind = kind_of(setup)
            balanced = balance(
                setup, self.machines(engines, setup.dtype, kind), self.shares(engines, setup.dtype, kind)
            )
        share_cores(parts, time.parts, setup.layout.pp, sharing, balanced)
        if learned:
            for name, members in CLASSES.items():
                factor, _ = self.learned(name)
                parts.update((part, parts[part] * factor) for part in members)
        if link is not None:
            self._hold_up(parts, timed, link)
        doubts = [time.caution] if time.caution else []
        if here.engines != engines:
            doubts.append(f"{engines} engines were not measured here; rates are those of {here.engines}")
        return replace(time, setup=setup, parts=parts, caution="; ".join(doubts))

    def _hold_up(self, parts: dict[str, float], setup: Setup, link: Link) -> None:
        """Correct `parts`, in place, for a pretended link: what is sent is really sent meanwhile, so that a part takes
        what it takes here or over the link, whichever is longer."""
        engines = setup.layout.world_size
        apart = replace(self.machines(engines, setup.dtype), per_host=1, hosts=engines, between=link)
        over = predict_time(setup, apart, replace(self.shares(engines, setup.dtype), messages=1.0)).parts
        longer = {part: max(0.0, over[part] - parts[part]) for part in _SENT}
        parts.update((part, parts[part] + seconds) for part, seconds in longer.items())
        # A pipeline that fills or drains waits for messages with nothing else to do.
        waited = over["bubble"] / sum(over[part] for part in _TURNS)
        parts["bubble"] += waited * sum(longer[part] for part in _SENT if part in _TURNS)

    def _with_own_rates(self, parts: dict[str, float], setup: Setup) -> dict[str, float]:
        """`parts` with those of the setup's own kind of block and of logits."""
        engines, dtype, found = setup.layout.world_size, setup.dtype, dict(parts)
        computed = as_computed(setup, self.device)
        for kind, names in ((kind_of(setup), ("forward", "backward", "recompute")), (logits_of(setup), ("logits",))):
            own = predict_time(computed, self.machines(engines, dtype, kind), self.shares(engines, dtype, kind))
            found |= {part: own.parts[part] for part in names}
        return found

    def learned(self, name: str) -> tuple[float, int]:
        """(factor, number of runs behind it) of a class of parts. The mean of the runs' logarithms and of one more run
        that was as predicted, so that a single one never counts whole."""
        ratios = [run.ratios[name] for run in self.runs if name in run.ratios]
        mean = sum(math.log(ratio) for ratio in ratios) / (len(ratios) + 1)
        return min(_BOUND, max(1 / _BOUND, math.exp(mean))), len(ratios)

    def process_remainder(self) -> tuple[int, int]:
        """(bytes a rank's process holds beside what the formulas count, number of runs behind it)."""
        found = sorted(run.process_bytes for run in self.runs if run.process_bytes > 0)
        return (found[len(found) // 2], len(found)) if found else (self.process_bytes, 0)


def kind_of(setup: Setup) -> str:
    """What stands between a block's matrix products: 'dropping' masks, else 'rotary' positions or 'learned' ones."""
    if setup.shape.dropout > 0:
        return "dropping"
    return "rotary" if setup.shape.position == "rotary" else "learned"


def logits_of(setup: Setup) -> str:
    """How head and loss are computed."""
    return "logits chunked" if setup.shape.chunked_loss else "logits full"


def as_computed(setup: Setup, device: str) -> Setup:
    """With the attention that torch takes: on processors, probabilities of which some are dropped are made whole."""
    return replace(setup, attention="plain") if device == "cpu" and setup.shape.dropout > 0 else setup


def corrected(parts: Mapping[str, float], setup: Setup, here: Constants) -> dict[str, float]:
    """`parts` of a predicted step with the measured factors, and the engine's own time."""
    found = {part: seconds * here.factors.get(part, 1.0) for part, seconds in parts.items()}
    events = engine_events(setup)
    found["engine"] = sum(events[name] * seconds for name, seconds in here.event_seconds.items() if name in events)
    return found


EVENTS = ("step", "micro-batch", "block", "gather", "sum", "scatter")
"""What the engine does of itself: once a step; for a micro-batch; for a block of a micro-batch; for a unit that is
gathered or reduced; for a sum over tensor-parallel ranks, or in its place a gather and scatter of the sequence.
Messages between pipeline stages are measured by themselves: in whole steps they drown in the waits for them."""


def engine_events(setup: Setup) -> dict[str, float]:
    """How often each of `EVENTS` happens in a step on the rank with most blocks."""
    layout, turns = setup.layout, setup.accumulation
    blocks = max(blocks_by_rank(setup))
    passes = 3 if setup.checkpointing == "block" else 2
    units = blocks + 1
    # Stage 3 gathers each unit for forward and for backward; below, once after the update. From stage 2 on every
    # micro-batch is reduced; a pipeline reduces once a step.
    gathers = {0: 0, 3: 2 * turns}.get(setup.zero_stage, 1)
    reductions = turns if setup.zero_stage >= 2 and layout.pp == 1 else 1
    sums = 2 * passes * blocks * turns if layout.tp > 1 else 0
    # With a cut sequence tensor-parallel ranks have terms of the norms' gradients.
    norms = units * reductions if layout.tp > 1 and setup.sequence_parallel else 0
    return {
        "step": 1,
        "micro-batch": turns,
        "block": blocks * turns,
        "gather": (units * (gathers + reductions) if layout.replicas > 1 else 0) + norms,
        "sum": 0 if setup.sequence_parallel else sums + setup.cuts_inputs * blocks * turns,
        "scatter": sums if setup.sequence_parallel else 0,
    }


_TURNS = ("forward", "backward", "recompute", "logits", "tensor parallel", "context parallel", "pipeline messages")
"""Parts that a micro-batch has on each pipeline rank."""


def share_cores(parts: dict[str, float], before: Mapping[str, float], pp: int, sharing: float, balanced: float) -> None:
    """Correct `parts`, in place, for a pipeline whose engines stand still, when `sharing` engines work on each core.

    The formulas' bubble is a share of what micro-batches take on the slowest rank, in `before`; all rates were measured
    with every engine at work, so an engine alone on its core is `sharing` times as fast. `balanced`: the mean over the
    slowest rank; where cores are shared, parts are those of the mean.
    """
    slowest, predicted = (sum(found[part] for part in _TURNS) for found in (parts, before))
    # It stands still while the first micro-batch is on the other ranks, which take less than itself.
    others = (pp * balanced - 1) / (pp - 1) if pp > 1 else 0.0
    waited = others * before["bubble"] / predicted if predicted else 0.0
    critical = (slowest + parts["engine"]) * (1 + waited) / sharing
    kept = balanced if sharing > 1 else 1.0
    parts.update((part, parts[part] * kept) for part in _TURNS)
    parts["bubble"] = max(0.0, critical - slowest * kept - parts["engine"])
