"""Models, and parts of them, in which nothing trains: a frozen teacher beside its student, a frozen pipeline stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import speedlab
from ranks import models
from ranks.layout_cases import LayoutCase, batches, untied_gpt2
from ranks.loops import engine_for
from ranks.pool import Pool
from speedlab.layout import Layout

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Logits(models.Transformer):
    """Gives logits of the inputs, as a dict's value."""

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"logits": self.logits(inputs)}


def student() -> Any:
    return models.seeded(Logits)


def teacher() -> Any:
    return models.seeded(Logits, seed=9).requires_grad_(False)


def config_of(stage: int) -> dict[str, Any]:
    return {"zero": {"stage": stage, "bucket_bytes": 1}, "precision": "float32", "batch": {"micro_size": 2}}


def divergence(student: Any, teacher: Any, inputs: Tensor, how: str = "first") -> Tensor:
    """`how`: when the teacher computes, before the student or "between" its forward and backward, or "with gradients"
    enabled."""
    made = student(inputs=inputs)["logits"].log_softmax(-1) if how == "between" else None
    with torch.set_grad_enabled(how == "with gradients"):
        expected = teacher(inputs=inputs)["logits"].softmax(-1)
    made = student(inputs=inputs)["logits"].log_softmax(-1) if made is None else made
    return -(expected * made).sum(-1).mean()


def distilled(stage: int, how: str) -> dict[str, Tensor]:
    """The student after four steps; both are engines, and they take turns."""
    own = speedlab.initialize(model=student(), optimizer=sgd, config=config_of(stage))[0]
    frozen = speedlab.initialize(model=teacher(), config=config_of(stage))[0]
    try:
        for step in range(4):
            own.backward(divergence(own, frozen, models.tokens(step, dist.get_rank())[0], how))
            assert own.step()
        return own.state_dict()
    finally:
        frozen.destroy()
        own.destroy()


def plainly_distilled() -> dict[str, Tensor]:
    own, frozen = student(), teacher()
    optimizer = sgd(own.parameters())
    for step in range(4):
        torch.stack([divergence(own, frozen, models.tokens(step, rank)[0]) for rank in range(2)]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return own.state_dict()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


@pytest.mark.parametrize(
    ("stage", "how"), [*((stage, "first") for stage in range(4)), (2, "between"), (3, "between"), (3, "with gradients")]
)
def test_a_student_and_its_frozen_teacher(two: Pool, stage: int, how: str) -> None:
    expected = two.run(plainly_distilled)[0]
    for state in two.run(distilled, stage, how):
        for name, value in state.items():
            assert (value - expected[name]).abs().max() < 2e-5, name


def through_teacher(stage: int) -> float:
    """The farthest parameter of a student whose loss goes through the frozen teacher, as of perceptual losses."""
    own, frozen = nn.Linear(12, 12), models.seeded(nn.Sequential, nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1))
    torch.manual_seed(3)
    for parameter in own.parameters():
        nn.init.normal_(parameter)
    plain = nn.Linear(12, 12)
    plain.load_state_dict(own.state_dict())
    judge = nn.Sequential(*(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1)))
    judge.load_state_dict(frozen.state_dict())
    optimizer = sgd(plain.parameters())
    engine = speedlab.initialize(model=own, optimizer=sgd, config=config_of(stage))[0]
    arguments = {"config": config_of(stage), "units": is_linear}
    other = speedlab.initialize(model=frozen.requires_grad_(False), **arguments)[0]
    for step in range(3):
        loss = sum(judge(plain(models.points(step, rank)[0])).square().mean() for rank in range(2)) / 2
        loss.backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        engine.backward(other(engine(models.points(step, dist.get_rank())[0])).square().mean())
        engine.step()
    state = engine.state_dict()
    other.destroy()
    engine.destroy()
    return max(float((state[name] - value).abs().max()) for name, value in plain.state_dict().items())


def is_linear(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_loss_through_the_frozen_teacher(two: Pool, stage: int) -> None:
    assert max(two.run(through_teacher, stage)) < 2e-5


def reported_of_two_engines(stage: int, freeze: bool) -> str:
    """Of one loss through modules of two engines, of which one may be frozen."""
    first, second = models.seeded(nn.Linear, 12, 12, seed=1), Both().second.requires_grad_(True)
    one = speedlab.initialize(model=first, optimizer=sgd, config=config_of(stage))[0]
    given = {} if freeze else {"optimizer": sgd}
    arguments = {"config": config_of(stage), "units": is_linear, **given}
    other = speedlab.initialize(model=second.requires_grad_(not freeze), **arguments)[0]
    try:
        one.backward(other(one(models.points(0, 0)[0])).square().mean())
    except RuntimeError as error:
        return str(error)
    finally:
        for engine in (one, other):
            engine.destroy(keep_parameters=False)
    return ""


@pytest.mark.parametrize(("stage", "freeze"), [(0, False), (2, False), (3, False), (3, True)])
def test_one_loss_of_two_engines_is_refused(two: Pool, stage: int, freeze: bool) -> None:
    for reported in two.run(reported_of_two_engines, stage, freeze):
        assert "one engine over a module that holds both" in reported


class Both(nn.Module):
    """A trained module and a frozen one that its loss goes through, in one engine."""

    def __init__(self) -> None:
        super().__init__()
        self.first = models.seeded(nn.Linear, 12, 12, seed=1)
        self.second = nn.Sequential(*(models.seeded(nn.Linear, 12, 12, seed=seed) for seed in (2, 3)))
        self.second.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).square().mean()


def one_engine_over_both(stage: int) -> float:
    plain, model = Both(), Both()
    optimizer = sgd(plain.first.parameters())
    engine = speedlab.initialize(model=model, optimizer=sgd, config=config_of(stage))[0]
    for step in range(3):
        torch.stack([plain(models.points(step, rank)[0]) for rank in range(2)]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.backward(engine(models.points(step, dist.get_rank())[0]))
        engine.step()
    state = engine.state_dict()
    engine.destroy()
    return max(float((state[name] - value).abs().max()) for name, value in plain.state_dict().items())


def test_one_engine_over_both(two: Pool) -> None:
    assert max(two.run(one_engine_over_both, 3)) < 2e-5


def only_computing(stage: int, folder: Path) -> dict[str, Any]:
    """What a frozen engine does, and what it refuses."""
    model, plain = teacher(), teacher()
    inputs = models.tokens(0, dist.get_rank())[0]
    engine, optimizer, *_ = speedlab.initialize(model=model, config=config_of(stage), loss=loss_of)
    reported: dict[str, Any] = {"trains": engine.trains, "options": len(optimizer.param_groups)}
    expected = plain(inputs)["logits"]
    reported["same"] = (engine(inputs)["logits"] - expected).abs().max().item() < 1e-6
    reported["evaluated"] = engine.evaluate([inputs])
    path = engine.save_checkpoint(folder / str(stage), "one")
    engine.reshape(zero=(stage + 2) % 4)
    engine.load_checkpoint(path)
    reported["reshaped"] = (engine(inputs)["logits"] - expected).abs().max().item() < 1e-6
    reported["state"] = all(value.equal(plain.state_dict()[name]) for name, value in engine.state_dict().items())
    reported["refused"] = []
    for call in (engine.step, lambda: engine.backward(engine(inputs)["logits"].sum()), lambda: engine.train_batch([1])):
        try:
            call()
        except RuntimeError as error:
            reported["refused"].append(str(error))
    engine.destroy()
    reported["given back"] = model(inputs)["logits"].equal(expected)
    return reported


def loss_of(model: Any, inputs: Tensor) -> Tensor:
    return F.softplus(model(inputs)["logits"]).mean()


@STAGES
def test_an_engine_that_is_never_stepped(two: Pool, tmp_path: Path, stage: int) -> None:
    ours, theirs = two.run(only_computing, stage, tmp_path, timeout=60)
    for reported in (ours, theirs):
        assert reported["trains"] is False
        assert reported["options"] > 0
        assert all(reported[key] for key in ("same", "reshaped", "state", "given back"))
        for name, text in zip(("step", "backward", "train_batch"), reported["refused"], strict=True):
            assert text.startswith(f"{name}: no parameter of this engine's model requires a gradient")
    assert ours["evaluated"] == theirs["evaluated"]


# ---- a pipeline stage ------------------------------------------------------------------------------------------------


def frozen_stage(stage: int, schedule: str, which: str, optimizer: Any, folder: Path) -> dict[str, Any]:
    """A pipeline of two stages of which one is frozen as a whole: losses and parameters, and those of a plain loop."""
    build = first_frozen if which == "first" else last_frozen
    case = LayoutCase(layout=Layout(pp=2), stage=stage, build=build, accumulation=3, schedule=schedule, clip_norm=None)
    plain = build()
    trains = sgd([p for p in plain.parameters() if p.requires_grad])
    reported: dict[str, Any] = {"losses": [], "plain": []}
    given = sgd if optimizer == "callable" else torch.optim.SGD
    config = case.config() | {"optimizer": {"name": "sgd", "lr": 0.5, "momentum": 0.9}}
    with engine_for(case, optimizer=given, config=config) as engine:
        for step in range(case.steps):
            micro = batches(case, step, 0)
            loss = sum(plain(*each).loss / len(micro) for each in micro)
            loss.backward()  # type: ignore[union-attr]
            trains.step()
            trains.zero_grad()
            reported["plain"].append(float(loss))
            reported["losses"].append(engine.train_batch(micro))
        engine.save_checkpoint(folder, "one")
        engine.load_checkpoint(folder, "one")
        state = engine.state_dict()
    reported["far"] = max(float((state[name] - value).abs().max()) for name, value in plain.state_dict().items())
    return reported


def first_frozen() -> nn.Module:
    return part_frozen(range(4), "embedding", "positions")


def last_frozen() -> nn.Module:
    return part_frozen(range(4, 8), "norm", "head")


def part_frozen(blocks: range, *others: str) -> nn.Module:
    model = untied_gpt2()
    for name, parameter in model.named_parameters():
        if name.startswith((*(f"blocks.{block}." for block in blocks), *others)):
            parameter.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("stage", "schedule", "which", "optimizer"),
    [(0, "1f1b", "first", "callable"), (1, "zero-bubble", "first", "class"), (3, "1f1b", "last", "class")],
)
def test_a_pipeline_stage_that_is_frozen_as_a_whole(
    two: Pool, tmp_path: Path, stage: int, schedule: str, which: str, optimizer: str
) -> None:
    for reported in two.run(frozen_stage, stage, schedule, which, optimizer, tmp_path, timeout=60):
        assert reported["losses"] == pytest.approx(reported["plain"], rel=1e-5)
        assert reported["far"] < 2e-5


def all_frozen() -> list[str]:
    """Of a pipeline without anything to train, and an optimizer."""
    reported = []
    case = LayoutCase(layout=Layout(pp=2))
    for given in (sgd, torch.optim.SGD):
        with pytest.raises(speedlab.ConfigError) as error:
            speedlab.initialize(model=untied_gpt2().requires_grad_(False), optimizer=given, config=case.config())
        reported.append(str(error.value))
    return reported


def test_a_frozen_pipeline_with_an_optimizer_is_refused_on_all_ranks(two: Pool) -> None:
    for reported in two.run(all_frozen):
        assert all(text.startswith("model: no parameter is to be trained") for text in reported)


def frozen_pipeline() -> tuple[float, float]:
    """The loss of an evaluation under a pipeline in which nothing trains, and the plain one."""
    case = LayoutCase(layout=Layout(pp=2), stage=1)
    plain = untied_gpt2()
    given = batches(case, 0, 0)
    with engine_for(case, model=untied_gpt2().requires_grad_(False), optimizer=None) as engine:
        assert not engine.trains
        loss = engine.evaluate(given)
    return loss, float(sum(plain(*each).loss for each in given) / len(given))


def test_a_pipeline_in_which_nothing_trains_computes(two: Pool) -> None:
    for ours, plain in two.run(frozen_pipeline):
        assert ours == pytest.approx(plain, rel=1e-6)
