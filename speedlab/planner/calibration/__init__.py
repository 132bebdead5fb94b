"""Predict this machine from its calibration, and from what earlier runs have taught. No torch.

`speedlab calibrate` measures a few constants of the planner's formulas, for each number of engines and each dtype.
`predict_time` then works for this machine as for described devices. The calibration also has measured factors for
effects that the formulas omit, and the engine's own time.

`Calibration.predict` has these steps:

1. Apply the formulas with the constants that were measured with the same number of concurrent engines.
2. Apply measured factors to parts, and add the engine's own time around kernels (`engine_events`).
3. Correct for engines that share cores: a waiting engine leaves its core to the others. A pipeline's step takes the
   total work of all engines, or the slowest engine's time on a core of its own, whichever is longer.
4. Apply one learned, bounded factor for each class of parts.
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
"""Version of the file. Other versions are refused, because constants are valid only for the formulas of their version.
"""

CLASSES = {
    "computing": ("forward", "backward", "recompute", "logits"),
    "communication": ("tensor parallel", "pipeline messages", "bubble", "data parallel"),
    "updating": ("optimizer", "offload"),
}
"""Class of times in a step record -> parts of a predicted step."""

_SENT = ("tensor parallel", "context parallel", "pipeline messages", "data parallel", "islands")
"""Parts that use a link."""

_BOUND = 2.0
"""A learned factor stays between 1 / 2 and 2. A larger deviation has another cause, and is shown as a miss."""


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Measurements with `engines` concurrent engines in one dtype. Rates are those of one engine."""

    engines: int
    dtype: str
    threads: int
    rates: dict[str, Rates] = field(hash=False)
    """Rates by kind of block (`kind_of`; 'rotary' always exists) and of logits (`logits_of`).

    The memory rate is that of elementwise kernels and matrix operands, which are partly in caches.
    """
    link_bytes_per_second: float
    link_seconds: float
    message_bytes_per_second: float
    event_seconds: dict[str, float] = field(hash=False)
    """The engine's own time for each event of `engine_events`."""
    factors: dict[str, float] = field(hash=False)
    """Part of a step -> measured time over the formula's time with these constants."""
    block_error: float
    """Median of |fitted / measured - 1| over the blocks used in the fit."""

    def rates_of(self, kind: str) -> Rates:
        """Return the rates of a kind of block; those of 'rotary' for a kind that was not measured."""
        return self.rates.get(kind, self.rates["rotary"])


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A run of the user, with the prediction before anything was learned from it."""

    name: str
    setup: str
    engines: int
    steps: int
    predicted_seconds: float
    measured_seconds: float
    ratios: dict[str, float] = field(hash=False)
    """Class of parts -> measured over predicted time, without learned factors."""
    process_bytes: int
    """Bytes of a rank's process besides model states, activations and communication buffers."""

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted_seconds / self.measured_seconds - 1


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The measurements of one machine."""

    version: int = VERSION
    machine: str
    """Name, processor and cores. Constants of another machine are refused."""
    device: str
    """'cpu', or the name of a GPU."""
    cores: int
    """Processor cores that engines share; 0 if each engine has its own device."""
    memory_bytes: int
    """Memory of all engines together."""
    created: float
    """Time of the measurement, seconds since the epoch."""
    rates: dict[str, float] = field(hash=False)
    """Plain measurements for display, by name with unit."""
    process_bytes: int
    """Bytes of an engine's process before a model is loaded."""
    constants: tuple[Constants, ...]
    runs: tuple[MeasuredRun, ...] = ()
    """Measured runs, oldest first, including misses."""

    def of(self, engines: int, dtype: str) -> Constants:
        """Return the constants for a number of engines, or for the nearest measured number.

        Args:
            engines: number of concurrent engines.
            dtype: the compute dtype.

        Raises:
            ValueError: the dtype was not measured.
        """
        found = [constants for constants in self.constants if constants.dtype == dtype]
        if not found:
            known = ", ".join(sorted({constants.dtype for constants in self.constants}))
            raise ValueError(f"{self.machine} was measured in {known}, not in {dtype}; choose one of these")
        # Nearest by ratio; on a tie the larger number of engines.
        return min(found, key=lambda constants: (abs(math.log(constants.engines / engines)), -constants.engines))

    def machines(self, engines: int, dtype: str = "float32", kind: str = "rotary") -> Machines:
        """Return this machine as one host of `engines` devices, with the measured link.

        Args:
            engines: number of devices.
            dtype: dtype whose link and memory rate are used.
            kind: kind of block whose rates are used.

        Raises:
            ValueError: the dtype was not measured.
        """
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
        """Return the efficiency to use with `machines(engines, dtype)`.

        `predict_time` then calls `predict`, which has the constants of every dtype.

        Args:
            engines: number of devices.
            dtype: the compute dtype.
        """
        return replace(self.shares(engines, dtype), calibration=self)

    def shares(self, engines: int, dtype: str, kind: str = "rotary") -> Efficiency:
        """Return the shares of the rates of `machines(engines, dtype, kind)`, for the formulas alone.

        All are 1 except those of attention and messages. On CPUs nothing overlaps between engines.

        Args:
            engines: number of devices.
            dtype: the compute dtype.
            kind: kind of block whose rates are used.
        """
        here = self.of(engines, dtype)
        rates = here.rates_of(kind)
        return replace(
            Efficiency.measured(kernel_seconds=rates.kernel_seconds, drawn_seconds=rates.drawn_seconds),
            attention=rates.attention_flops / rates.matmul_flops,
            messages=here.message_bytes_per_second / here.link_bytes_per_second,
        )

    def predict(self, setup: Setup, *, learned: bool = True, link: Link | None = None) -> StepTime:
        """Predict the time of one step on this machine.

        Args:
            setup: the training.
            learned: whether to apply the factors learned from runs.
            link: a simulated link between engines; None: the real one.

        Raises:
            ValueError: the shape is invalid, or the dtype was not measured.
        """
        engines = setup.layout.world_size
        here = self.of(engines, setup.dtype)
        # On CPUs the split of backward costs this engine as much as it saves: zero-bubble takes .96 to 1.14 times as
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
        """Correct `parts`, in place, for a simulated link.

        The real transfer takes place at the same time, so a part takes the longer of both times.
        """
        engines = setup.layout.world_size
        separate = replace(self.machines(engines, setup.dtype), per_host=1, hosts=engines, between=link)
        over = predict_time(setup, separate, replace(self.shares(engines, setup.dtype), messages=1.0)).parts
        longer = {part: max(0.0, over[part] - parts[part]) for part in _SENT}
        parts.update((part, parts[part] + seconds) for part, seconds in longer.items())
        # While a pipeline fills or drains, it waits for messages without other work.
        waited = over["bubble"] / sum(over[part] for part in _TURNS)
        parts["bubble"] += waited * sum(longer[part] for part in _SENT if part in _TURNS)

    def _with_own_rates(self, parts: dict[str, float], setup: Setup) -> dict[str, float]:
        """Return `parts` with the times of the set-up's own kind of block and of logits."""
        engines, dtype, found = setup.layout.world_size, setup.dtype, dict(parts)
        computed = as_computed(setup, self.device)
        for kind, names in ((kind_of(setup), ("forward", "backward", "recompute")), (logits_of(setup), ("logits",))):
            own = predict_time(computed, self.machines(engines, dtype, kind), self.shares(engines, dtype, kind))
            found |= {part: own.parts[part] for part in names}
        return found

    def learned(self, name: str) -> tuple[float, int]:
        """Return the learned factor of a class of parts.

        The factor is the geometric mean of the runs and of one additional exact prediction, so a single run never
        counts fully.

        Args:
            name: a key of `CLASSES`.

        Returns:
            (factor, between 1/2 and 2; number of runs).
        """
        ratios = [run.ratios[name] for run in self.runs if name in run.ratios]
        # The + 1 is the additional exact prediction, with a logarithm of 0.
        mean = sum(math.log(ratio) for ratio in ratios) / (len(ratios) + 1)
        return min(_BOUND, max(1 / _BOUND, math.exp(mean))), len(ratios)

    def process_remainder(self) -> tuple[int, int]:
        """Return (bytes of a rank's process outside the formulas, number of runs that measured it)."""
        found = sorted(run.process_bytes for run in self.runs if run.process_bytes > 0)
        return (found[len(found) // 2], len(found)) if found else (self.process_bytes, 0)


def kind_of(setup: Setup) -> str:
    """Return the kind of a block, by the work between its matrix products.

    Args:
        setup: the training.

    Returns:
        'dropping' with dropout, otherwise 'rotary' or 'learned' by its positions.
    """
    if setup.shape.dropout > 0:
        return "dropping"
    return "rotary" if setup.shape.position == "rotary" else "learned"


def logits_of(setup: Setup) -> str:
    """Return how head and loss are computed, as a key of the rates.

    Args:
        setup: the training.

    Returns:
        'logits chunked' or 'logits full'.
    """
    return "logits chunked" if setup.shape.chunked_loss else "logits full"


def as_computed(setup: Setup, device: str) -> Setup:
    """Return the set-up with torch's real attention: on CPUs, attention with dropout materialises probabilities.

    Args:
        setup: the training.
        device: "cpu" or the name of a GPU.
    """
    return replace(setup, attention="plain") if device == "cpu" and setup.shape.dropout > 0 else setup


def corrected(parts: Mapping[str, float], setup: Setup, here: Constants) -> dict[str, float]:
    """Return `parts` with the measured factors and the engine's own time.

    Args:
        parts: seconds by part, from the formulas.
        setup: the training.
        here: constants of this machine.
    """
    found = {part: seconds * here.factors.get(part, 1.0) for part, seconds in parts.items()}
    events = engine_events(setup)
    found["engine"] = sum(events[name] * seconds for name, seconds in here.event_seconds.items() if name in events)
    return found


EVENTS = ("step", "micro-batch", "block", "gather", "sum", "scatter")
"""Events of the engine's own work.

- step: once a step.
- micro-batch: each micro-batch.
- block: each block of a micro-batch.
- gather: each unit that is gathered or reduced.
- sum: each sum over tensor-parallel ranks.
- scatter: instead of a sum, a gather and scatter of the sequence.

Messages between pipeline stages are measured separately: in whole steps they are hidden by the waits for them.
"""


def engine_events(setup: Setup) -> dict[str, float]:
    """Return how often the engine's events happen in a step, on the rank with most blocks.

    Args:
        setup: the training.

    Returns:
        Event of `EVENTS` -> count.
    """
    layout, turns = setup.layout, setup.accumulation
    blocks = max(blocks_by_rank(setup))
    passes = 3 if setup.checkpointing == "block" else 2
    units = blocks + 1
    # Stage 3 gathers each unit for forward and for backward; lower stages gather once after the update. From stage
    # 2 on every micro-batch is reduced; a pipeline reduces once a step.
    gathers = {0: 0, 3: 2 * turns}.get(setup.zero_stage, 1)
    reductions = turns if setup.zero_stage >= 2 and layout.pp == 1 else 1
    sums = 2 * passes * blocks * turns if layout.tp > 1 else 0
    # With sequence parallelism, the norms' gradients are partial sums on tensor-parallel ranks.
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
"""Parts of a micro-batch on each pipeline rank."""


def share_cores(parts: dict[str, float], before: Mapping[str, float], pp: int, sharing: float, balanced: float) -> None:
    """Correct `parts`, in place, for pipeline engines that idle while `sharing` engines compete for each core.

    The formulas' bubble is a share of the slowest rank's time, in `before`. All rates were measured with every engine
    busy, so an engine alone on its core is `sharing` times as fast.

    Args:
        parts: seconds by part; changed in place.
        before: seconds by part, before factors were applied.
        pp: pipeline ranks.
        sharing: engines for each core.
        balanced: mean over slowest rank; if cores are shared, parts are those of the mean rank.
    """
    slowest, predicted = (sum(found[part] for part in _TURNS) for found in (parts, before))
    # The slowest rank idles while the first micro-batch is on the other ranks, which are faster.
    others = (pp * balanced - 1) / (pp - 1) if pp > 1 else 0.0
    waited = others * before["bubble"] / predicted if predicted else 0.0
    critical = (slowest + parts["engine"]) * (1 + waited) / sharing
    kept = balanced if sharing > 1 else 1.0
    parts.update((part, parts[part] * kept) for part in _TURNS)
    parts["bubble"] = max(0.0, critical - slowest * kept - parts["engine"])
