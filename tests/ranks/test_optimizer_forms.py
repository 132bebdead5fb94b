"""Optimizers of several packages on two ranks: each trains as the plain loop does, or all ranks refuse it.

`print(table())` in nightly's test: what becomes of each at each stage."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import speedlab
from ranks.pool import Pool
from speedlab.config import ConfigError

STEPS, STAGES = 4, (0, 1, 2, 3)
MOST_SEPARATE = 2e-5
"""Between a parameter and the plain loop's, after `STEPS`."""

Outcome = dict[str, Tensor] | str
"""Parameters, or what is against it."""


class Model(nn.Module):
    """A matrix that optimizers of 8 bits treat as large, and vectors between matrices; `forward` gives the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(64, 71), nn.Linear(71, 13)])
        self.scale = nn.Parameter(torch.ones(13))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.blocks[1](torch.tanh(self.blocks[0](x))) * self.scale - y).square().mean()


def small_model() -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Model()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The same on all ranks: the mean gradient then has the plain loop's bits, and no sign of it is rounding's."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 64, generator=generator), 3 * torch.randn(8, 13, generator=generator)


def of_torch() -> dict[str, Any]:
    kinds = {name: getattr(torch.optim, name) for name in dir(torch.optim)}
    return {
        f"torch {name}": kind
        for name, kind in kinds.items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    }


def of_packages() -> dict[str, Any]:
    """Those that are installed here."""
    found: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import bitsandbytes
        import prodigyopt
        import pytorch_optimizer
        from transformers.optimization import Adafactor

        for name in pytorch_optimizer.get_supported_optimizers():
            found[f"pytorch_optimizer {name}"] = pytorch_optimizer.load_optimizer(name)
        for name in ("AdamW", "AdamW8bit", "Lion", "Lion8bit", "LAMB", "RMSprop8bit"):
            found[f"bitsandbytes {name}"] = getattr(bitsandbytes.optim, name)
        found["bitsandbytes SGD8bit"] = partial(bitsandbytes.optim.SGD8bit, lr=1e-3, momentum=0.9)
    found["prodigyopt Prodigy"] = prodigyopt.Prodigy
    found["transformers Adafactor"] = Adafactor
    found["transformers Adafactor, a rate"] = partial(Adafactor, lr=1e-3, relative_step=False)
    return found


def handful() -> dict[str, Any]:
    found = of_torch() | of_packages()
    names = ["torch RAdam", "torch Adafactor", "pytorch_optimizer lion", "pytorch_optimizer stableadamw"]
    return {name: found[name] for name in [*names, "bitsandbytes AdamW8bit", "prodigyopt Prodigy"]}


def every() -> dict[str, Any]:
    return of_torch() | of_packages()


@contextmanager
def one_engine(optimizer: Any, stage: int, **config: Any) -> Iterator[Any]:
    # Of one unit each, so that flats hold several parameters.
    settings = {"zero": {"stage": stage, "bucket_bytes": 1}, "batch": {"micro_size": 8}, "precision": "float32"}
    engine = speedlab.initialize(model=small_model(), optimizer=optimizer, config=settings | config)[0]
    try:
        yield engine
    finally:
        engine.destroy()


def train_one(optimizer: Any, stage: int) -> Outcome:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with one_engine(optimizer, stage) as engine:
                for step in range(STEPS):
                    engine.backward(engine(*batch(step)))
                    assert engine.step()
                return engine.state_dict()
    except ConfigError as error:
        return str(error)


def train_each(choices: Callable[[], dict[str, Any]]) -> dict[tuple[str, int], Outcome]:
    return {(name, stage): train_one(kind, stage) for name, kind in choices().items() for stage in STAGES}


def plainly(kind: Any) -> Outcome:
    model = small_model()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = kind(list(model.parameters()))
            for step in range(STEPS):
                model(*batch(step)).backward()
                optimizer.step()
                optimizer.zero_grad()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def plain_each(choices: Callable[[], dict[str, Any]]) -> dict[str, Outcome]:
    return {name: plainly(kind) for name, kind in choices().items()}


def separate(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> float:
    return max(float((ours[name] - value).abs().nan_to_num(float("inf")).max()) for name, value in plain.items())


def compared(two: Pool, choices: Callable[[], dict[str, Any]]) -> tuple[dict[str, list[str]], list[str]]:
    """What became of each optimizer by stage, and what is wrong."""
    plain = two.run(plain_each, choices, timeout=600)[0]
    first, second = two.run(train_each, choices, timeout=1500)
    table, wrong = dict[str, list[str]](), list[str]()
    for (name, stage), ours in first.items():
        theirs, expected = second[name, stage], plain[name]
        if isinstance(ours, str) or isinstance(theirs, str):
            table.setdefault(name, []).append("refused")
            if ours != theirs:
                wrong.append(f"{name} at stage {stage}: rank 0 has {str(ours)[:80]}, rank 1 {str(theirs)[:80]}")
        elif isinstance(expected, str):
            table.setdefault(name, []).append("trains")
            wrong.append(f"{name} at stage {stage}: trains, and in a plain loop it raises {expected}")
        else:
            distance = separate(ours, expected)
            table.setdefault(name, []).append(f"{distance:.0e}")
            if not distance <= MOST_SEPARATE:
                wrong.append(f"{name} at stage {stage}: {distance:.1e} from the plain loop")
            if separate(ours, theirs):
                wrong.append(f"{name} at stage {stage}: ranks differ")
    return table, wrong


def test_a_handful_trains_as_plain_or_is_refused(two: Pool) -> None:
    table, wrong = compared(two, handful)
    assert not wrong, "\n".join(wrong)
    trained = {name: [outcome != "refused" for outcome in outcomes] for name, outcomes in table.items()}
    assert trained == {
        "torch RAdam": [True] * 4,
        "torch Adafactor": [False] * 4,
        "pytorch_optimizer lion": [True] * 4,
        "pytorch_optimizer stableadamw": [True, False, False, False],
        "bitsandbytes AdamW8bit": [False] * 4,
        "prodigyopt Prodigy": [True, False, False, False],
    }


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_every_optimizer_trains_as_plain_or_is_refused(two: Pool) -> None:
    table, wrong = compared(two, every)
    print(f"{'stage':>40} 0       1       2       3")
    for name, outcomes in table.items():
        print(f"{name:>40} " + " ".join(f"{outcome:7}" for outcome in outcomes))
    assert not wrong, "\n".join(wrong)
