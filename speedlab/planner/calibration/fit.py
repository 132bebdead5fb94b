"""Fit the constants of the planner's formulas to measured times. No torch.

The formulas are linear in five constants: seconds per FLOP of matrix products, per FLOP of attention, per byte, per
kernel, and per random number.

1. Evaluate the formulas with one constant at 1 and the others at 0; this gives the counts of a case.
2. Solve least squares of relative errors over all cases, with the rates of a bare product and a bare copy as bounds.
   Each kind of block has its own constants; heads have their own bytes and kernels.
3. Turn updates and sums of tensor-parallel ranks into factors.
4. Fit the engine's own time to whole steps of small models.
5. Scale the rates by whole steps of larger models, to what kernels reach in a training.

No run, and no case of `bench steptimes`, is part of the fit.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from speedlab.planner.calibration import (
    EVENTS,
    Calibration,
    Constants,
    as_computed,
    engine_events,
    kind_of,
    logits_of,
)
from speedlab.planner.hardware.devices import Machines
from speedlab.planner.setup import Setup
from speedlab.planner.time.communication import Ring
from speedlab.planner.time.efficiency import Efficiency
from speedlab.planner.time.kernels import Rates, block_pass, head_pass
from speedlab.planner.time.step_time import predict_time, rank_parameters

_FREE = 1e18
"""A rate that costs practically nothing, if least squares assign it no time."""


@dataclass(frozen=True, kw_only=True)
class BlockTime:
    """Measured seconds of one block, in a sequence of several."""

    setup: Setup
    forward: float
    backward: float


@dataclass(frozen=True, kw_only=True)
class SetupTime:
    """Measured seconds of head and loss (forward and backward), or of a whole step."""

    setup: Setup
    seconds: float


@dataclass(frozen=True, kw_only=True)
class CollectiveTime:
    """Measured seconds of one of the engine's collectives; `nbytes` is the whole tensor, or the message."""

    name: str
    """all_reduce, reduce_scatter, all_gather (flats), sum (activations) or send."""
    nbytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Measurements with `engines` concurrent engines in one dtype."""

    engines: int
    threads: int
    dtype: str
    blocks: Sequence[BlockTime]
    """The first one is a block of the models of `steps`."""
    heads: Sequence[SetupTime]
    update_seconds: float
    """Seconds for one parameter: the gradient's norm, AdamW, the narrow copy."""
    byte_seconds: float
    """Seconds for a byte copied within the caches: a lower bound for every kernel."""
    flop_seconds: float
    """Seconds for a FLOP of a bare matrix product: a lower bound for every kernel."""
    collectives: Sequence[CollectiveTime]
    steps: Sequence[SetupTime]
    """Whole steps of models so small that the engine's own time is visible, with different depths and layouts."""
    larger_steps: Sequence[SetupTime]
    """Whole steps of models whose time is mostly in kernels."""

    def shared(self, sharing: float) -> Samples:
        """Return the samples for engines that share each core.

        Args:
            sharing: engines for each core; every kernel takes this many times as long.
        """
        return replace(
            self,
            blocks=[
                replace(each, forward=each.forward * sharing, backward=each.backward * sharing) for each in self.blocks
            ],
            heads=[replace(each, seconds=each.seconds * sharing) for each in self.heads],
            update_seconds=self.update_seconds * sharing,
            byte_seconds=self.byte_seconds * sharing,
            flop_seconds=self.flop_seconds * sharing,
        )


def fit_all(samples: Sequence[Samples], calibration: Calibration) -> list[Constants]:
    """Return the constants for each of `samples`.

    The engine's own time, which only one dtype's whole steps determine, applies to all dtypes.

    Args:
        samples: measurements, one for each number of engines and dtype.
        calibration: describes the machine.
    """
    found = [fit_constants(each, calibration) for each in samples]
    own = {each.engines: each.event_seconds for each in found if each.event_seconds}
    found = [replace(each, event_seconds=own.get(each.engines, {})) for each in found]
    return [_in_training(s, constants, calibration) for s, constants in zip(samples, found, strict=True)]


def _in_training(samples: Samples, found: Constants, calibration: Calibration) -> Constants:
    """Scale the rates to those in a training, where kernels are slower than alone.

    Each kind of block has its own factor; logits use the mean of all.
    """
    here = replace(calibration, constants=(found,), runs=())
    predicted = [here.predict(step.setup).parts for step in samples.larger_steps]
    if not predicted:
        return found
    blocks = [sum(parts[part] for part in ("forward", "backward", "recompute")) for parts in predicted]
    logits = [parts["logits"] for parts in predicted]
    computed = [
        step.seconds - (sum(parts.values()) - block - logit)
        for step, parts, block, logit in zip(samples.larger_steps, predicted, blocks, logits, strict=True)
    ]
    mean = statistics.geometric_mean(
        _bounded(seconds / (block + logit)) for seconds, block, logit in zip(computed, blocks, logits, strict=True)
    )
    factors = {
        kind_of(step.setup): _bounded((seconds - mean * logit) / block)
        for step, seconds, block, logit in zip(samples.larger_steps, computed, blocks, logits, strict=True)
    }
    rates = {**{kind: found.rates_of(kind) for kind in factors}, **found.rates}
    return replace(
        found,
        rates={kind: _slower(each, factors.get(kind, mean)) for kind, each in rates.items()},
        # The update was measured alone, but is predicted with the (now slower) rates of 'rotary'.
        factors={**found.factors, "optimizer": found.factors["optimizer"] / factors.get("rotary", mean)},
    )


def _bounded(ratio: float) -> float:
    return max(0.5, ratio)


def _slower(rates: Rates, factor: float) -> Rates:
    """Return the rates of kernels that take `factor` times as long."""
    return replace(
        rates,
        matmul_flops=rates.matmul_flops / factor,
        attention_flops=rates.attention_flops / factor,
        memory_bytes=rates.memory_bytes / factor,
        kernel_seconds=rates.kernel_seconds * factor,
        drawn_seconds=rates.drawn_seconds * factor,
    )


def fit_constants(samples: Samples, calibration: Calibration) -> Constants:
    """Return the constants that fit `samples`.

    Args:
        samples: measurements for one number of engines and dtype.
        calibration: describes the machine.
    """
    link = _fit_link(samples)
    rates, misses = _all_rates(samples, calibration.device)
    found = Constants(
        engines=samples.engines,
        dtype=samples.dtype,
        threads=samples.threads,
        rates=rates,
        link_bytes_per_second=link.bytes_per_second,
        link_seconds=link.latency_seconds,
        message_bytes_per_second=_message_rate(samples, link),
        event_seconds={},
        factors={},
        block_error=statistics.median(misses),
    )
    found = replace(found, factors=_factors(samples, found, link, calibration))
    return _with_own_time(samples, found, calibration)


def _all_rates(samples: Samples, device: str) -> tuple[dict[str, Rates], list[float]]:
    """Return (rates by kind of block and logits, |fitted / measured - 1| of all blocks)."""
    least = (samples.flop_seconds, samples.flop_seconds, samples.byte_seconds, 0.0, 0.0)
    rates: dict[str, Rates] = {}
    misses: list[float] = []
    for kind in sorted({kind_of(block.setup) for block in samples.blocks}):
        cases = _block_cases([block for block in samples.blocks if kind_of(block.setup) == kind], device)
        each = fit([count for count, _ in cases], [seconds for _, seconds in cases], least=least)
        rates[kind] = _rates(each, samples.dtype)
        misses += [abs(sum(a * b for a, b in zip(count, each, strict=True)) / s - 1) for count, s in cases]
    return rates | _logit_rates(samples, rates["rotary"]), misses


def _rates(seconds: Sequence[float], dtype: str) -> Rates:
    """Return rates from seconds per FLOP of products and attention, per byte, per kernel, and per random number."""
    flop, attention, byte, kernel, drawn = seconds
    return Rates(
        matmul_flops=_rate(flop),
        attention_flops=_rate(attention),
        memory_bytes=_rate(byte),
        element_bytes=_width(dtype),
        kernel_seconds=kernel,
        drawn_seconds=drawn,
    )


def _width(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def _block_cases(blocks: Sequence[BlockTime], device: str) -> list[tuple[tuple[float, ...], float]]:
    """Return (counts of the formulas, seconds) of each block's forward and backward."""
    found = []
    for block in blocks:
        setup = as_computed(block.setup, device)
        for direction, seconds in (("forward", block.forward), ("backward", block.backward)):
            found.append((counts(lambda rates, s=setup, d=direction: getattr(block_pass(s, rates), d), setup), seconds))
    return found


def _logit_rates(samples: Samples, blocks: Rates) -> dict[str, Rates]:
    """Return the rates of each kind of logits: own bytes and kernels, matrix products as in `blocks`."""
    cases: dict[str, list[tuple[tuple[float, ...], float]]] = {}
    for head in samples.heads:

        def both(rates: Rates, setup: Setup = head.setup) -> float:
            return head_pass(setup, rates).forward + head_pass(setup, rates).backward

        cases.setdefault(logits_of(head.setup), []).append((counts(both, head.setup), head.seconds))
    found = {}
    for kind, own in cases.items():
        known = [count[0] / blocks.matmul_flops for count, _ in own]
        byte, kernel = fit([count[2:4] for count, _ in own], [s for _, s in own], known, (samples.byte_seconds, 0.0))
        found[kind] = replace(blocks, memory_bytes=_rate(byte), kernel_seconds=kernel)
    return found


def counts(seconds_of: Callable[[Rates], float], setup: Setup) -> tuple[float, ...]:
    """Return what a formula counts: FLOPs of products and attention, bytes, kernels, random numbers.

    Args:
        seconds_of: the formula, linear in the inverse rates.
        setup: the training, for its dtype.
    """
    free = {"matmul_flops": math.inf, "attention_flops": math.inf, "memory_bytes": math.inf}
    free |= {"kernel_seconds": 0.0, "drawn_seconds": 0.0}
    return tuple(seconds_of(Rates(element_bytes=_width(setup.dtype), **{**free, name: 1.0})) for name in free)


def fit(
    rows: Sequence[Sequence[float]],
    seconds: Sequence[float],
    known: Sequence[float] | None = None,
    least: Sequence[float] | None = None,
) -> list[float]:
    """Return the x >= `least` that minimises the squares of (known + row · x) / seconds - 1.

    Args:
        rows: counts of each case.
        seconds: measured seconds of each case.
        known: known seconds of each case; None: 0.
        least: lower bounds of x; None: 0.
    """
    relative = np.array([[value / time for value in row] for row, time in zip(rows, seconds, strict=True)])
    low = np.zeros(relative.shape[1]) if least is None else np.array(least)
    wanted = 1 - np.array(np.zeros(len(rows)) if known is None else known) / np.array(seconds)
    return [float(value) for value in low + _above_zero(relative, wanted - relative @ low)]


def _above_zero(relative: np.ndarray, wanted: np.ndarray) -> list[float]:
    """Return the x >= 0 that minimises the squares of relative · x - wanted.

    The function tries every subset of positive elements; there are only a few.
    """
    # Columns differ by many orders of magnitude (FLOPs, bytes, kernels); scale them for lstsq.
    scale = np.abs(relative).max(axis=0)
    scale[scale == 0] = 1
    width = relative.shape[1]
    # Start with x = 0, the empty subset.
    best, fewest = np.zeros(width), float((wanted**2).sum())
    for size in range(1, width + 1):
        for chosen in itertools.combinations(range(width), size):
            columns = list(chosen)
            scaled = relative[:, columns] / scale[columns]
            found = np.linalg.lstsq(scaled, wanted, rcond=None)[0]
            missed = float(((scaled @ found - wanted) ** 2).sum())
            if (found >= 0).all() and missed < fewest:
                best, fewest = np.zeros(width), missed
                best[columns] = found / scale[columns]
    return [float(value) for value in best]


def _rate(seconds: float) -> float:
    return min(_FREE, 1 / seconds) if seconds > 0 else _FREE


def _fit_link(samples: Samples) -> Ring:
    """Return the link that fits all collectives of flats best; without measurements, an infinitely fast one."""
    measured = [time for time in samples.collectives if time.name in ("all_reduce", "reduce_scatter", "all_gather")]
    if not measured:
        return Ring(ranks=1, bytes_per_second=_FREE, latency_seconds=0.0, crosses_hosts=False)
    rows = [
        (_collective(_ring(samples.engines, 1.0, 0.0), time), _collective(_ring(samples.engines, math.inf, 1.0), time))
        for time in measured
    ]
    byte, message = fit(rows, [time.seconds for time in measured])
    return _ring(samples.engines, _rate(byte), message)


def _ring(ranks: int, bytes_per_second: float, latency: float) -> Ring:
    return Ring(ranks=ranks, bytes_per_second=bytes_per_second, latency_seconds=latency, crosses_hosts=False)


def _collective(ring: Ring, time: CollectiveTime) -> float:
    # Flats are large, so the formulas use the ring for their all-reduce.
    ways = {"all_reduce": 2 * ring.gather(time.nbytes), "sum": ring.all_reduce(time.nbytes)}
    return ways.get(time.name, ring.gather(time.nbytes))


def _message_rate(samples: Samples, link: Ring) -> float:
    """Return bytes/s of messages, after subtracting the link's latency."""
    rates = [
        time.nbytes / max(time.seconds - link.latency_seconds, time.seconds / 10)
        for time in samples.collectives
        if time.name == "send"
    ]
    return statistics.median(rates) if rates else link.bytes_per_second


def _factors(samples: Samples, found: Constants, link: Ring, calibration: Calibration) -> dict[str, float]:
    """Return measured over predicted time (median over cases) of the parts that blocks and flats do not cover."""
    machines, efficiency = _described(found, calibration)
    factors = {}
    setup = samples.blocks[0].setup
    update = predict_time(setup, machines, efficiency).parts["optimizer"] / rank_parameters(setup)
    factors["optimizer"] = samples.update_seconds / update
    sums = [time.seconds / link.all_reduce(time.nbytes) for time in samples.collectives if time.name == "sum"]
    if sums:
        factors["tensor parallel"] = statistics.median(sums)
    return factors


def _described(found: Constants, calibration: Calibration) -> tuple[Machines, Efficiency]:
    """Return machines and efficiency with these constants."""
    here = replace(calibration, constants=(found,), runs=())
    return here.machines(found.engines, found.dtype), here.shares(found.engines, found.dtype)


def _with_own_time(samples: Samples, found: Constants, calibration: Calibration) -> Constants:
    """Return the constants with the engine's own time.

    That is the excess of whole small steps over all predicted parts, split over the engine's events.
    """
    here = replace(calibration, constants=(found,), runs=())
    # The general rates may miss a small block; here its own time was measured, so use it.
    first = samples.blocks[0]
    fitted = block_pass(first.setup, found.rates_of(kind_of(first.setup)))
    known = {"forward": first.forward / fitted.forward, "backward": first.backward / fitted.backward}
    rows, rest = [], []
    for step in samples.steps:
        parts = {part: s * known.get(part, 1.0) for part, s in here.predict(step.setup).parts.items()}
        events = engine_events(step.setup)
        rows.append([events[name] / step.seconds for name in EVENTS])
        rest.append(1 - sum(parts.values()) / step.seconds)
    if not rows:
        return found
    seconds = _above_zero(np.array(rows), np.array(rest))
    return replace(found, event_seconds=dict(zip(EVENTS, seconds, strict=True)))
