"""`python -m tests.benchmarks states`: what smaller optimizer states cost in held-out loss, over several seeds.

Of each seed all trainings begin from the same values, see the same batches and compute in float32 with weights that
bfloat16 holds, as a run in bfloat16 does; nothing but the states differs. One process, no engine.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cuda_ops.adamw import adamw
from cuda_ops.blockwise8 import BLOCK, blockwise8_decode, blockwise8_encode
from cuda_ops.grad_stats import grad_stats
from cuda_ops.stochastic import round_stochastically
from speedlab.config import DataConfig, ModelConfig
from speedlab.config.command_line import read_options
from speedlab.data import Sampler, prepare
from speedlab.models import GPT

_VOCABULARY, _SEQUENCE, _BATCH = 1024, 128, 8
_MODEL = ModelConfig(
    layers=4, hidden=128, heads=4, ffn_hidden=512, vocab_size=_VOCABULARY, context=_SEQUENCE, loss="full"
)
_LEARNING_RATE, _WARM_UP, _FLOOR = 2e-3, 20, 0.1
_NUMBERS: dict[str, Any] = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
_CLIP_NORM = 1.0
_HELD_OUT_BATCHES = 16


@dataclass(frozen=True, kw_only=True)
class Options:
    """Bytes a parameter between two steps, and held-out loss, of AdamW with states of several sizes."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Each gives initial values, an order of the data, and the random bits of rounding."""
    steps: int = 200
    """Optimizer steps of each training, eight sequences of 128 tokens each."""
    json: Path | None = None
    """Also write one JSON record for each row to this file."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Which states a training has, beside bfloat16 parameters."""

    name: str
    master: bool
    """A float32 master of each parameter; without one the parameter itself is updated."""
    coded: bool
    """Moments in blockwise 8 bits, else in float32."""
    stochastic: bool = False
    """Without a master: rounded at random, else to nearest."""


KINDS = (
    Kind(name="float32 masters and moments", master=True, coded=False),
    Kind(name="float32 masters, 8-bit moments", master=True, coded=True),
    Kind(name="no masters, stochastic rounding", master=False, coded=False, stochastic=True),
    Kind(name="no masters, rounding to nearest", master=False, coded=False),
    Kind(name="no masters, stochastic rounding, 8-bit moments", master=False, coded=True, stochastic=True),
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A row: `loss` is the mean over seeds, `worse` by how much that is more than with the first kind of states."""

    states: str
    bytes_a_parameter: float
    loss: float
    loss_range: tuple[float, float]
    worse: float
    worse_range: tuple[float, float]
    """Of the differences between trainings of one seed."""
    n: int


class States:
    """The states of all parameters, in one flat of n elements."""

    def __init__(self, values: Tensor, kind: Kind, seed: int) -> None:
        self.kind, self.seed, self.step = kind, seed, 0
        self.param = values.bfloat16()
        self.master = values.clone() if kind.master else None
        self.moments = torch.zeros(2, len(values), dtype=torch.uint8 if kind.coded else torch.float32)
        self.scales = torch.zeros(2, -(-len(values) // BLOCK)) if kind.coded else None

    @property
    def bytes_a_parameter(self) -> float:
        """What lies in memory between two steps, over the number of parameters."""
        held = [self.param, self.master, self.moments, self.scales]
        return sum(each.nbytes for each in held if each is not None) / len(self.param)

    def update(self, grad: Tensor, lr: float, factor: float) -> None:
        """One step with the gradient (n,) float32 times `factor`."""
        self.step += 1
        numbers = {**_NUMBERS, "lr": lr, "step": self.step, "factor": factor}
        value = self.param.float() if self.master is None else self.master
        first, second = self._decoded()
        adamw(value, grad, first, second, None if self.kind.stochastic else self.param, **numbers)
        if self.scales is not None:
            blockwise8_encode(first, self.moments[0], self.scales[0], signed=True)
            blockwise8_encode(second, self.moments[1], self.scales[1], signed=False)
        if self.kind.stochastic:
            round_stochastically(value, self.param, seed=self.seed, step=self.step)

    def _decoded(self) -> tuple[Tensor, Tensor]:
        """Both moments in float32; those in codes are encoded after the update."""
        if self.scales is None:
            return self.moments[0], self.moments[1]
        first, second = torch.empty(self.moments.shape)
        blockwise8_decode(self.moments[0], self.scales[0], first, signed=True)
        blockwise8_decode(self.moments[1], self.scales[1], second, signed=False)
        return first, second


def main(argv: list[str] | None = None) -> None:
    options = read_options(Options, argv, "python -m tests.benchmarks states")
    corpus = prepare(DataConfig(vocab_size=_VOCABULARY, sequence_length=_SEQUENCE), progress=_say)
    losses: dict[str, list[float]] = {kind.name: [] for kind in KINDS}
    sizes: dict[str, float] = {}
    for seed in options.seeds:
        train, heldout = (Sampler(part, _SEQUENCE, seed) for part in (corpus.train, corpus.heldout))
        for kind in KINDS:
            began = time.monotonic()
            loss, sizes[kind.name] = _train(kind, seed, options.steps, train, heldout)
            losses[kind.name].append(loss)
            _say(f"seed {seed}, {kind.name}: held-out loss {loss:.4f} ({time.monotonic() - began:.0f} s)")
    outcomes = _outcomes(losses, sizes)
    print(_render(outcomes))
    if options.json is not None:
        options.json.write_text("".join(json.dumps(asdict(each)) + "\n" for each in outcomes))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _train(kind: Kind, seed: int, steps: int, train: Sampler, heldout: Sampler) -> tuple[float, float]:
    """Held-out loss after training, and bytes a parameter."""
    torch.manual_seed(seed)
    model = GPT(_MODEL)
    weights, gradients = _flatten(model)
    states = States(weights, kind, seed)
    for step in range(steps):
        weights.copy_(states.param)
        gradients.zero_()
        _loss(model, train, step).backward()
        norm = math.sqrt(float(grad_stats(gradients)[0]))
        states.update(gradients, _rate(step, steps), min(1.0, _CLIP_NORM / norm))
    weights.copy_(states.param)
    with torch.no_grad():
        found = [float(_loss(model, heldout, batch)) for batch in range(_HELD_OUT_BATCHES)]
    return statistics.mean(found), states.bytes_a_parameter


def _flatten(model: GPT) -> tuple[Tensor, Tensor]:
    """The model's parameters and gradients, (n,) float32 each, which it has as views from now on."""
    parameters = list(model.parameters())
    weights = torch.cat([parameter.detach().flatten() for parameter in parameters])
    gradients = torch.zeros_like(weights)
    sizes = [parameter.numel() for parameter in parameters]
    for parameter, own, grad in zip(parameters, weights.split(sizes), gradients.split(sizes), strict=True):
        parameter.data, parameter.grad = own.view_as(parameter), grad.view_as(parameter)
    return weights, gradients


def _loss(model: GPT, sampler: Sampler, step: int) -> Tensor:
    rows = torch.from_numpy(sampler.rows(step, _BATCH, 0, _BATCH))
    loss = model(rows[:, :-1], rows[:, 1:]).loss
    assert loss is not None  # There are targets.
    return loss


def _rate(step: int, steps: int) -> float:
    """A linear warm-up, then a cosine down to a tenth."""
    if step < _WARM_UP:
        return _LEARNING_RATE * (step + 1) / _WARM_UP
    share = (step - _WARM_UP) / max(1, steps - _WARM_UP)
    return _LEARNING_RATE * (_FLOOR + (1 - _FLOOR) * (1 + math.cos(math.pi * share)) / 2)


def _outcomes(losses: Mapping[str, list[float]], sizes: Mapping[str, float]) -> list[Outcome]:
    """A row for each kind of states, by name; the first one is what the others are compared with, seed by seed."""
    first = next(iter(losses.values()))
    outcomes = []
    for name, found in losses.items():
        worse = [own - other for own, other in zip(found, first, strict=True)]
        outcomes.append(
            Outcome(
                states=name,
                bytes_a_parameter=sizes[name],
                loss=statistics.mean(found),
                loss_range=(min(found), max(found)),
                worse=statistics.mean(worse),
                worse_range=(min(worse), max(worse)),
                n=len(found),
            )
        )
    return outcomes


def _render(outcomes: list[Outcome]) -> str:
    lines = [("states between two steps", "bytes a parameter", "held-out loss (range)", "more than the first (range)")]
    for each in outcomes:
        loss = f"{each.loss:.4f} ({each.loss_range[0]:.4f}..{each.loss_range[1]:.4f})"
        worse = f"{each.worse:+.4f} ({each.worse_range[0]:+.4f}..{each.worse_range[1]:+.4f})"
        lines.append((each.states, f"{each.bytes_a_parameter:.2f}", loss, worse))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)) for line in lines)
    spread = outcomes[0].loss_range[1] - outcomes[0].loss_range[0]
    return f"{table}\nof {outcomes[0].n} seeds; between seeds the first one's loss differs by {spread:.4f}"
