"""Optimizers that sum gradients over the data-parallel ranks themselves, and what they keep beside each gradient."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import ge
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import speedlab
from ranks.pool import Pool
from ranks.small_steps import batch
from ranks.tensor_models import gpt
from speedlab.comm import Group
from speedlab.optim.communicating_protocols import ExchangedState
from speedlab.placement import Replication, StatePlacement

STEPS = 6
RATES = {"lr": 0.05, "momentum": 0.9}
SENT = 0.01


class Unfused(torch.optim.SGD):
    """torch's own kernels, which round otherwise than ours; the engine sums for it."""


class PlainSums(Unfused):
    """SGD that sums plainly, from the third step on. It must do what the engine does."""

    kept: ClassVar[Mapping[str, StatePlacement]] = {}

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.exchanges = self.updates = self.prepared = 0

    @property
    def communicates(self) -> bool:
        return self.updates >= 2

    def prepare(self, flats: Sequence[ExchangedState]) -> None:
        assert flats
        self.prepared += 1

    def exchange(self, flats: Sequence[ExchangedState], factor: float) -> None:
        self.exchanges += 1
        for gradient in (each.gradient for each in flats):
            assert gradient.own is not None
            gradient.group.all_reduce(gradient.own).wait()
            gradient.update.mul_(factor)

    def updated(self, flats: Sequence[ExchangedState], everyone: Group) -> None:
        self.updates += 1

    def begin_again(self) -> None:
        self.updates = 0

    def reported(self) -> dict[str, float]:
        return {"exchanges": self.exchanges}


class SignSums(PlainSums):
    """Each rank sends signs only; what that loses is kept, and sent in later steps."""

    kept: ClassVar[Mapping[str, StatePlacement]] = {"error": StatePlacement(holders=Replication.OWN, form="float32")}

    @property
    def communicates(self) -> bool:
        return True

    def exchange(self, flats: Sequence[ExchangedState], factor: float) -> None:
        for gradient in (each.gradient for each in flats):
            assert gradient.own is not None
            gradient.own.copy_(signs(gradient.own * factor, gradient.kept["error"]))
        super().exchange(flats, 1.0)


def signs(values: Tensor, error: Tensor) -> Tensor:
    error += values
    sent = error.sign() * SENT
    error -= sent
    return sent


def configuration(stage: int, **more: Any) -> dict[str, Any]:
    # In bfloat16, which the best dtype of some processors is, an optimizer's own sums are of float32, the engine's not.
    precision = {"dtype": "float32"}
    return {"zero": {"stage": stage}, "optimizer": RATES, "batch": {"micro_size": 2}, "precision": precision, **more}


@contextmanager
def engine_with(kind: type[torch.optim.Optimizer], config: dict[str, Any]) -> Iterator[Any]:
    engine = speedlab.initialize(model=gpt(tied=True), optimizer=kind, config=config)[0]
    try:
        yield engine
    finally:
        engine.destroy()


def train(kind: type[torch.optim.Optimizer], config: dict[str, Any]) -> Any:
    """Losses, norms, the state afterwards, and how often gradients were exchanged."""
    with engine_with(kind, config) as engine:
        assert getattr(engine.optimizer, "prepared", 1) == 1
        losses, norms = [], []
        for step in range(STEPS):
            own, ranks = engine.mesh.data_index, engine.layout.data_size
            losses.append(
                engine.train_batch([batch(step, micro * ranks + own) for micro in range(engine.accumulation)])
            )
            norms.append(engine.global_grad_norm)
        return losses, norms, engine.state_dict(), getattr(engine.optimizer, "exchanges", 0)


@pytest.mark.parametrize(
    ("stage", "parallel", "accumulation"),
    [(0, {}, 1), (0, {}, 2), (1, {}, 2), (1, {"pp": 2}, 2), (1, {"tp": 2}, 1)],
)
def test_an_optimizer_that_sums_plainly_is_the_engine_to_the_bit(
    two: Pool, stage: int, parallel: dict[str, int], accumulation: int
) -> None:
    config = configuration(stage, parallel=parallel) | {"batch": {"micro_size": 2, "accumulation": accumulation}}
    ours = two.run(train, Unfused, config, timeout=60)
    theirs = two.run(train, PlainSums, config, timeout=60)
    for own, other in zip(ours, theirs, strict=True):
        assert other[0] == own[0], "losses"
        assert all(own[2][name].equal(other[2][name]) for name in own[2])
        assert other[1][:2] == own[1][:2], "norms, while the engine sums"
        if parallel:  # Nothing is summed over one dp rank.
            assert other[1] == pytest.approx(own[1])
        else:
            assert all(map(ge, other[1][2:], own[1][2:])), "the norm of unsummed terms is an upper bound"
        assert own[3] == 0
        assert other[3] == STEPS - 2, "only in steps whose gradients are its own to sum"


def by_hand() -> dict[str, Tensor]:
    """Two replicas' gradients and errors in one process."""
    model = gpt(tied=True)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(parameters.values(), lr=RATES["lr"], momentum=RATES["momentum"])
    errors = [{name: torch.zeros_like(p) for name, p in parameters.items()} for _ in range(2)]
    for step in range(STEPS):
        sums = {name: torch.zeros_like(p) for name, p in parameters.items()}
        for place, kept in enumerate(errors):
            model.zero_grad()
            inputs, targets = batch(step, place)
            (model(inputs, targets=targets).loss * 0.5).backward()
            for name, parameter in parameters.items():
                assert parameter.grad is not None
                sums[name] += signs(parameter.grad, kept[name])
        for name, parameter in parameters.items():
            parameter.grad = sums[name]
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def look(folder: str) -> dict[str, Any]:
    """What an engine tells of an optimizer that keeps something, and what a load leaves of it."""
    with engine_with(SignSums, configuration(0)) as engine:
        before = engine.ledger().gradients
        engine.train_batch([batch(0, engine.mesh.data_index)])
        kept = [gradient.kept["error"] for gradient in engine.partitioned_optimizer.gradients]
        used = all(bool(error.any()) for error in kept)
        engine.reshape(zero=1)
        unmoved = all(bool(error.any()) for error in kept)
        row = engine.placement.rows[0]
        with pytest.raises(ValueError, match="SignSums sums gradients itself and needs all of them on every rank"):
            engine.reshape(zero=2)
        engine.train_batch([batch(1, engine.mesh.data_index)])
        engine.save_checkpoint(folder, "one")
        saved = [error.clone() for error in kept]
        engine.train_batch([batch(2, engine.mesh.data_index)])
        engine.load_checkpoint(folder, "one")
        return {
            "bytes": before,
            "padded": sum(flat.padded for flat in engine.flats),
            "used": used,
            "unmoved": unmoved,
            "row": row.described(),
            "text": str(engine.placement),
            "loaded": all(error.equal(before) for error, before in zip(kept, saved, strict=True)),
        }


def test_what_is_kept_beside_a_gradient_is_each_ranks_own(two: Pool, tmp_path: Path) -> None:
    expected = two.run(by_hand)[0]
    for stage in (0, 1):
        for _, _, state, _ in two.run(train, SignSums, configuration(stage), timeout=60):
            for name, parameter in expected.items():
                torch.testing.assert_close(state[name], parameter, rtol=0, atol=2e-6, msg=name)
    for reported in two.run(look, str(tmp_path), timeout=60):
        assert reported["bytes"] == 2 * 4 * reported["padded"], "the gradient and the error, each whole"
        assert reported["used"]
        assert reported["unmoved"], "a change of stage leaves it where it is"
        assert reported["row"]["states"]["error"] == {"holders": "each its own", "where": "device", "form": "float32"}
        assert "dp by the optimizer, × 0.5" in reported["text"]
        assert "float32 replicated + error: float32 each its own" in reported["text"]
        assert reported["loaded"], "each rank has its own again"


def refuse(stage: int, clip_norm: float | None) -> tuple[str, list[str]]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("speedlab.engine")
    logger.addHandler(handler)
    try:
        with engine_with(PlainSums, configuration(stage, clip_norm=clip_norm)):
            return "", records
    except speedlab.ConfigError as error:
        return str(error), records
    finally:
        logger.removeHandler(handler)


def test_partitioned_gradients_are_refused_and_no_clipping_is_said(two: Pool) -> None:
    for stage in (2, 3):
        for error, _ in two.run(refuse, stage, None):
            assert error.startswith(f"zero.stage {stage}: PlainSums sums gradients itself")
    (_, reported), (_, silent) = two.run(refuse, 1, 0.5)
    assert reported == ["clip_norm 0.5: not in steps whose gradients PlainSums sums itself"]
    assert silent == []
