"""What `python -m tests.benchmarks network` measures, as data: another way to train over slow links is a row of
`CASES`.

Plain rows come before those that stand beside them. Goals are those of one run of a GPT of about 10M parameters over 2
hosts: bytes between the hosts, speed at 100 Mbit/s, held-out loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from speedlab.config import RunConfig

VOCABULARY, SEQUENCE = 4096, 64

SETTINGS: Mapping[str, Any] = {
    "model": {
        "layers": 5,
        "hidden": 384,
        "heads": 6,
        "ffn_hidden": 1536,
        "vocab_size": VOCABULARY,
        "context": 256,
    },
    "data": {"sequence_length": SEQUENCE, "vocab_size": VOCABULARY},
    "precision": "float32",
    "batch": {"micro_size": 2},
    "schedule": {"warmup_steps": 0, "kind": "constant"},
    "clip_norm": None,
}
"""Of every case: 10.4M parameters, 42 MB of gradients in float32, and few tokens a step, so that the link is what is
measured."""

ENTERING = 2
"""Steps that every engine makes before it is timed."""

WARM_UP = 0.15
"""Share of a whole run, in times and in held-out losses."""

SEED_NOISE = 0.0
"""As `Goal.loss_within`: no further from plain than plain with other seeds is."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What a case is to reach; None where nothing is asked."""

    bytes_share: float | None = None
    """Bytes between hosts in the compressed phase, of plain's, at most."""
    run_bytes_share: float | None = None
    """The same over a whole run, with the warm-up."""
    step_speed: float | None = None
    """Of a step in the compressed phase, times plain's, at 100 Mbit/s."""
    run_speed: float | None = None
    """End to end, with the warm-up, times plain's, at 100 Mbit/s."""
    gigabit_share: float | None = None
    """Speed of a step at 1 Gbit/s, of that over links that are not shaped."""
    loss_within: float | None = None
    """Held-out loss above plain's, as a share of it."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train. `settings` are laid over SETTINGS, part by part."""

    name: str
    settings: Mapping[str, Any]
    alongside: str = ""
    """The name of the plain case that it is compared with; "" of a plain one itself."""
    warm_up: tuple[str, ...] = ()
    """Fields, as 'optimizer.freeze_step', that say after which step compression begins; none where it always does."""
    period: int = 1
    """Steps after which traffic repeats itself, as of local steps between two meetings."""
    goal: Goal = Goal()

    def config(self, *, warm_up_steps: int = 1, **more: Any) -> RunConfig:
        """The configuration whose compression begins after so many steps. `more`: further fields. Raises ConfigError
        where this version does not know what the case asks for."""
        begun: dict[str, Any] = {}
        for path in self.warm_up:
            part, _, field = path.partition(".")
            begun.setdefault(part, {})[field] = warm_up_steps
        return RunConfig(**_laid({**SETTINGS, **more}, self.settings, begun))


def _laid(fields: Mapping[str, Any], *layers: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(fields)
    for layer in layers:
        for name, value in layer.items():
            before = found.get(name)
            both = isinstance(before, Mapping) and isinstance(value, Mapping)
            found[name] = {**before, **value} if both else value  # type: ignore[dict-item]  # both are mappings then
    return found


def _plain(stage: int, **settings: Any) -> Case:
    return Case(name=f"plain ZeRO-{stage}", settings={"zero": {"stage": stage}, **settings})


def _onebit(stage: int) -> Case:
    return Case(
        name=f"1-bit Adam, ZeRO-{stage}",
        alongside=f"plain ZeRO-{stage}",
        settings={"zero": {"stage": stage}, "optimizer": {"name": "onebit_adam"}},
        warm_up=("optimizer.freeze_step",),
        goal=Goal(bytes_share=1 / 28, step_speed=8.0, run_speed=3.5, loss_within=SEED_NOISE),
    )


_SLOW_VARIANCE: Mapping[str, Any] = {"optimizer": {"betas": (0.9, 0.99)}}
"""For islands, whose gradients are of a share of the batch alone: with .95 their variance, of twenty steps, is so noisy
that as much is lost where they meet in every step, in float32. The plain case beside them has it, too."""

CASES: tuple[Case, ...] = (
    _plain(0),
    _onebit(0),
    Case(
        name="1-bit LAMB, ZeRO-0",
        alongside="plain ZeRO-0",
        settings={"zero": {"stage": 0}, "optimizer": {"name": "onebit_lamb"}},
        warm_up=("optimizer.freeze_step",),
        goal=Goal(bytes_share=1 / 28),
    ),
    Case(
        name="0/1 Adam, ZeRO-0",
        alongside="plain ZeRO-0",
        settings={
            "zero": {"stage": 0},
            "optimizer": {"name": "zero_one_adam", "max_local_steps": 4},
        },
        # A variance of few updates makes so short a training diverge, and so do steps of each rank's own right behind
        # the freeze: all of a warm-up is whole, and exchanges grow apart as slowly.
        warm_up=("optimizer.freeze_step", "optimizer.variance_doubling", "optimizer.local_doubling"),
        period=4,
        goal=Goal(run_bytes_share=1 / 60, run_speed=5.0, loss_within=SEED_NOISE),
    ),
    _plain(1),
    _onebit(1),
    _plain(2, **_SLOW_VARIANCE),
    Case(
        name="islands, signs, ZeRO-2",
        alongside="plain ZeRO-2",
        settings={
            "zero": {"stage": 2},
            "parallel": {"islands": 2},
            **_SLOW_VARIANCE,
            # Of a short training: an outer momentum, and meetings far apart, are for ones that have long begun.
            "outer": {"every_steps": 5, "compression": "signs", "lr": 0.7, "momentum": 0.0},
        },
        period=5,
        goal=Goal(bytes_share=1 / 100, run_speed=10.0, gigabit_share=0.9, loss_within=0.01),
    ),
    _plain(3),
    Case(
        name="ZeRO++, ZeRO-3",
        alongside="plain ZeRO-3",
        settings={"zero": {"stage": 3, "quantized_weights": True, "quantized_gradients": True}},
        goal=Goal(bytes_share=0.26, step_speed=3.0, loss_within=0.005),
    ),
)

_SAME_TOKENS = {"data": {"sequence_length": 256}, "zero": {"stage": 1}}
_TENSOR = "tensor parallelism"


def _layout(name: str, batch: Mapping[str, int], parallel: Mapping[str, Any], alongside: str, goal: Goal) -> Case:
    return Case(
        name=name, alongside=alongside, settings={**_SAME_TOKENS, "batch": batch, "parallel": parallel}, goal=goal
    )


LAYOUTS: tuple[Case, ...] = (
    _layout(_TENSOR, {"micro_size": 8, "global_size": 32}, {"tp": 2}, "", Goal()),
    _layout("ZeRO data parallelism", {"micro_size": 8, "global_size": 32}, {}, _TENSOR, Goal(step_speed=3.75)),
    _layout("a pipeline", {"micro_size": 4, "global_size": 32}, {"pp": 2}, _TENSOR, Goal()),
)
"""The announcement's comparison, for two ranks: one model, 8,192 tokens a step. With more tokens tensor parallelism
sends more, and data parallelism, which accumulates gradients, as much as before: what counts is tokens beside the
model's width. Here they are 21 to 1; GPT-2 of 1.5B, whose width is 1,600, is trained with 512 sequences of 1,024, 330
to 1."""


def check_names(names: tuple[str, ...]) -> None:
    """Raise ValueError, with the names there are, for one with which no case begins."""
    known = [case.name for case in (*CASES, *LAYOUTS)]
    for name in names:
        if not any(each.startswith(name) for each in known):
            raise ValueError(f"--cases: no case begins with {name!r}; there are {'; '.join(known)}")


def chosen(cases: tuple[Case, ...], names: tuple[str, ...]) -> list[list[Case]]:
    """The cases whose names begin so (all without names), in groups: each plain one with those that stand beside it."""
    wanted = [case for case in cases if not names or case.name.startswith(names)]
    plain = [case for case in cases if not case.alongside]
    groups = [[first, *(case for case in wanted if case.alongside == first.name)] for first in plain]
    return [group for group in groups if group[0] in wanted or len(group) > 1]
