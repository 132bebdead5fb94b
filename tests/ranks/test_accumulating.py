"""Loops that count micro-batches otherwise than the engine, and what they do to gradients: as in torch, or refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ranks import models
from ranks.loops import Case, Trajectory, engine_for, finish
from ranks.pool import Pool
from ranks.test_step import assert_same

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def loss_of(engine: Any, case: Case, step: int, micro: int) -> Tensor:
    return case.loss(engine, case.batch(step, micro * engine.world.size + engine.world.rank))


def refused(function: Callable[[], Any], kind: type[Exception] = RuntimeError) -> str:
    try:
        function()
    except kind as error:
        return str(error)
    return "not refused"


# ---- as under DistributedDataParallel --------------------------------------------------------------------------------


def step_after_two_backwards(stage: int) -> tuple[str, str, Trajectory]:
    """One `step` for two backwards: what the first step says; then the form that it names."""
    case = Case(stage=stage, accumulation=2, steps=3)
    path = Trajectory()
    with engine_for(case) as engine:
        engine.backward(loss_of(engine, case, 0, 0))
        said = refused(lambda: engine.backward(loss_of(engine, case, 0, 1)))
        first, second = (loss_of(engine, case, 0, micro) for micro in range(2))  # Both forwards first.
        engine.backward(first)
        both = refused(lambda: engine.backward(second))
        for step in range(case.steps):
            losses = []
            for micro in range(2):
                with engine.no_sync() if micro == 0 else contextlib.nullcontext():
                    losses.append(loss_of(engine, case, step, micro))
                    engine.backward(losses[-1])
            assert engine.step()
            path.losses.append(float(sum(losses)) / 2)
            path.norms.append(engine.global_grad_norm)
        finish(path, engine)
    return said, both, path


@STAGES
def test_a_step_for_several_backwards_is_refused_and_works_inside_no_sync(two: Pool, plain: Any, stage: int) -> None:
    reported = two.run(step_after_two_backwards, stage, timeout=60)
    for said, both, _ in reported:
        assert said.startswith("backward: a second forward and backward came without engine.step()")
        assert "batch.accumulation 2" in said
        assert "engine.no_sync()" in said
        assert both == said
    assert_same([path for *_, path in reported], plain(Case(accumulation=2, steps=3), 2))


def own_boundary(stage: int, steps_of: str) -> Trajectory:
    """DeepSpeed's `set_gradient_accumulation_boundary`, with a `step` at the end or after each backward."""
    case = Case(stage=stage, accumulation=2, steps=3)
    path = Trajectory()
    with engine_for(case) as engine:
        for step in range(case.steps):
            losses = []
            for micro in range(2):
                engine.set_gradient_accumulation_boundary(micro == 1)
                losses.append(loss_of(engine, case, step, micro))
                engine.backward(losses[-1])
                if steps_of == "each" or micro == 1:
                    assert engine.step() == (micro == 1)
            path.losses.append(float(sum(losses)) / 2)
            path.norms.append(engine.global_grad_norm)
        finish(path, engine)
    return path


@pytest.mark.parametrize(("stage", "steps_of"), [(0, "each"), (1, "last"), (2, "each"), (3, "last")])
def test_a_loop_that_names_the_boundary_itself(two: Pool, plain: Any, stage: int, steps_of: str) -> None:
    assert_same(two.run(own_boundary, stage, steps_of, timeout=60), plain(Case(accumulation=2, steps=3), 2))


def other_counts(stage: int) -> list[str]:
    """A loop's own number of micro-batches that is not the configuration's; the engine trains on afterwards."""
    case = Case(stage=stage, accumulation=3)
    said = []
    with engine_for(case) as engine:
        with engine.no_sync():
            engine.backward(loss_of(engine, case, 0, 0))
        engine.backward(loss_of(engine, case, 0, 1))
        said.append(refused(engine.step))
        with engine.no_sync():
            for micro in range(3):
                engine.backward(loss_of(engine, case, 0, micro))
            said.append(refused(lambda: engine.backward(loss_of(engine, case, 0, 3))))
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(loss_of(engine, case, 0, 0))
        said.append(refused(engine.step))
        batches = [case.batch(0, micro * engine.world.size + engine.world.rank) for micro in range(3)]
        engine.train_batch(batches)
        said.append(str(engine.global_step))
    return said


@pytest.mark.parametrize("stage", [1, 3])
def test_another_number_of_micro_batches_than_gradients_are_divided_by(two: Pool, stage: int) -> None:
    for two_of, four_of, one_of, steps in two.run(other_counts, stage):
        assert two_of.startswith("step: the loop ends a step after 2 micro-batches, and batch.accumulation is 3")
        assert four_of.startswith("backward: micro-batch 4 of a step, and batch.accumulation is 3")
        assert one_of.startswith("step: the loop ends a step after 1 micro-batch, and batch.accumulation is 3")
        assert steps == "1"


class TwoHeads(models.Transformer):
    """Gives a loss for each of two heads."""

    def forward(self, inputs: Tensor, targets: Tensor) -> Any:
        logits = self.logits(inputs)
        return models.cross_entropy(logits, targets), logits.float().square().mean()


def two_heads() -> nn.Module:
    return models.seeded(TwoHeads)


def sum_of_heads(model: Any, batch: Any) -> Tensor:
    first, second = model(*batch)
    return first + second


def each_head(stage: int) -> Trajectory:
    """Two losses of one forward, each with a backward of its own, in two micro-batches."""
    case = Case(stage=stage, accumulation=2, steps=3, build=two_heads)
    path = Trajectory()
    with engine_for(case) as engine:
        for step in range(case.steps):
            losses = []
            for micro in range(2):
                first, second = engine(*case.batch(step, micro * engine.world.size + engine.world.rank))
                engine.backward(first, retain_graph=True)
                engine.backward(second)
                engine.step()
                losses += [float(first), float(second)]
            path.losses.append(sum(losses) / 2)
            path.norms.append(engine.global_grad_norm)
        finish(path, engine)
    return path


@STAGES
def test_several_losses_of_one_forward_are_one_micro_batch(two: Pool, plain: Any, stage: int) -> None:
    assert_same(
        two.run(each_head, stage, timeout=60),
        plain(Case(accumulation=2, steps=3, build=two_heads, loss=sum_of_heads), 2),
    )


# ---- what is done to gradients between backward and step -------------------------------------------------------------


def clearing(stage: int) -> list[Any]:
    """`zero_grad` at its usual places, and in the middle."""
    case = Case(stage=stage, accumulation=2)
    said: list[Any] = []
    with engine_for(case) as engine:
        for micro in range(4):
            loss = loss_of(engine, case, 0, micro)
            if micro % 2 == 0:
                engine.zero_grad(set_to_none=True)
            engine.optimizer.zero_grad()
            engine.backward(loss)
            said.append(engine.step())
        engine.module.zero_grad()
        engine.backward(loss_of(engine, case, 1, 0))
        said += [refused(engine.zero_grad), refused(engine.optimizer.zero_grad), refused(engine.module.zero_grad)]
        engine.step()
        said.append(refused(engine.zero_grad))
        engine.abandon_step()
        engine.zero_grad()
    assert "zero_grad" not in vars(engine.optimizer)
    return said


@pytest.mark.parametrize("stage", [0, 3])
def test_clearing_gradients_inside_an_accumulation_is_refused(two: Pool, stage: int) -> None:
    for *steps, engines, optimizers, modules, later in two.run(clearing, stage):
        assert steps == [False, True, False, True]
        assert engines.startswith(
            "zero_grad: micro-batch 1 of 2 of a step is under way, and its gradients so far would"
        )
        assert optimizers.startswith("optimizer.zero_grad: micro-batch 1 of 2")
        assert ".grad was used between engine.backward and engine.step" in modules
        assert later.startswith("zero_grad: micro-batch 2 of 2")


def cleared_once(stage: int) -> Trajectory:
    """A gradient that `optimizer.zero_grad()` throws away before the step's own."""
    case = Case(stage=stage, steps=3)
    path = Trajectory()
    with engine_for(case) as engine:
        for step in range(case.steps):
            engine.backward(loss_of(engine, case, step + 50, 0))
            engine.optimizer.zero_grad()
            loss = loss_of(engine, case, step, 0)
            engine.backward(loss)
            assert engine.step()
            path.losses.append(float(loss))
            path.norms.append(engine.global_grad_norm)
        finish(path, engine)
    return path


@pytest.mark.parametrize("stage", [1, 3])
def test_a_gradient_that_the_optimizer_clears_is_not_trained(two: Pool, plain: Any, stage: int) -> None:
    assert_same(two.run(cleared_once, stage), plain(Case(steps=3), 2))


def looking_at_gradients(stage: int) -> list[Any]:
    """Reads and writes of `.grad`: between two steps they are plain; inside one, where it would be None, refused."""
    case = Case(stage=stage)
    with engine_for(case) as engine:
        parameters = list(engine.module.parameters())
        between = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        by_hand = refused(lambda: setattr(parameters[0], "grad", torch.ones_like(parameters[0])))
        engine.backward(loss_of(engine, case, 0, 0))
        said = [
            refused(lambda: nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0)),
            refused(lambda: nn.utils.clip_grad_value_(engine.module.parameters(), 1.0)),
            refused(lambda: [p.grad.norm() for p in parameters if p.grad is not None]),
            refused(lambda: setattr(parameters[0], "grad", None)),
        ]
        stepped = engine.step()
        norm = float(nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0))
    plain = all(type(p) is nn.Parameter for p in parameters)
    return [between == [None] * len(between), by_hand, *said, stepped, norm, plain]


@STAGES
def test_clipping_the_modules_gradients_is_refused(two: Pool, stage: int) -> None:
    for between, by_hand, *said, stepped, norm, plain in two.run(looking_at_gradients, stage):
        assert between
        assert ".grad was set by hand" in by_hand
        for text in said:
            assert ".grad was used between engine.backward and engine.step" in text
            assert "clip_norm" in text
        assert (stepped, norm, plain) == (True, 0.0, True)


def looking_at_masters(stage: int, form: str) -> list[Any]:
    """The same for the tensors of the optimizer's groups, some of which are empty on a rank of a stage above 0."""
    case, model = Case(stage=stage, accumulation=2), models.transformer()
    of_matrices = {"params": [model.get_parameter("blocks.0.up.weight")]}
    others = {"params": [p for p in model.parameters() if p is not of_matrices["params"][0]], "lr": 0.01}
    optimizer: Any = {
        "config": None,
        "instance": torch.optim.AdamW([of_matrices, others]),
        "callable": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        "delayed": torch.optim.AdamW,
    }[form]
    config = case.config()
    if form == "delayed":
        config |= {"offload": {"optimizer": "host", "delayed_update": 1}, "precision": {"dtype": "bfloat16"}}
    said: list[str] = []
    with engine_for(case, model=model, optimizer=optimizer, config=config) as engine:
        groups = engine.optimizer.param_groups
        if form == "instance":
            assert optimizer.param_groups is groups
        for step in range(3):
            sizes = [len(group["params"]) for group in groups]
            assert all(p.grad is None for group in groups for p in group["params"])
            for micro in range(2):
                engine.backward(loss_of(engine, case, step, micro))
                for group in groups:
                    said += clip_in_every_way(group["params"])
                assert engine.step() == bool(micro)
                engine.optimizer.zero_grad()  # Finds nothing, as in loops that clear before each backward.
            assert sizes == [len(group["params"]) for group in groups]
        assert all(type(p) is Tensor for group in groups for p in group["params"])
    return said


def clip_in_every_way(masters: list[Tensor]) -> list[str]:
    return [
        refused(lambda: nn.utils.clip_grad_norm_(masters, 1.0)),
        refused(lambda: nn.utils.clip_grad_value_(masters, 1.0)),
        refused(lambda: torch._foreach_norm([p.grad for p in masters if p.grad is not None])),
        refused(lambda: [p.grad.mul_(0.5) for p in masters if p.grad is not None]),
        refused(lambda: [setattr(p, "grad", None) for p in masters]),
    ]


@pytest.mark.parametrize(
    ("form", "stage"),
    [*(("config", stage) for stage in range(4)), ("instance", 3), ("callable", 1), ("delayed", 2)],
)
def test_clipping_the_optimizers_gradients_is_refused(two: Pool, stage: int, form: str) -> None:
    ours, theirs = two.run(looking_at_masters, stage, form)
    assert ours == theirs
    for text in ours:
        assert text.startswith("optimizer.param_groups: .grad was used between engine.backward and engine.step")
        assert "clip_norm" in text


def clipped_by_value(stage: int) -> dict[str, Tensor]:
    """Through the hook that the refusal names."""
    case = Case(stage=stage, steps=3)
    with engine_for(case, optimizer=torch.optim.SGD) as engine:
        engine.optimizer.register_step_pre_hook(clip_values)
        for step in range(case.steps):
            engine.backward(loss_of(engine, case, step, 0))
            engine.step()
        return engine.state_dict()


def clip_values(optimizer: Any, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad.clamp_(-0.01, 0.01)


def plainly_clipped() -> dict[str, Tensor]:
    model, case = models.transformer(), Case()
    optimizer = torch.optim.SGD(model.parameters())
    for step in range(3):
        sum(case.loss(model, case.batch(step, index)) / 2 for index in range(2)).backward()  # type: ignore[union-attr]
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@STAGES
def test_clip_by_value_through_the_optimizers_hook(two: Pool, stage: int) -> None:
    expected = two.run(plainly_clipped)[0]
    for state in two.run(clipped_by_value, stage):
        for name, value in state.items():
            assert (value - expected[name]).abs().max() < 2e-6, name


def hooked(stage: int) -> dict[str, Any]:
    """Hooks on a parameter after `initialize`: one that is refused, one that doubles its gradient."""
    case, reported, seen = Case(stage=stage), {}, []
    with engine_for(case) as engine:
        weight = engine.module.blocks[1].up.weight

        def double(gradient: Tensor) -> Tensor:
            seen.append(gradient.clone())
            return 2 * gradient

        reported["refused"] = refused(lambda: weight.register_post_accumulate_grad_hook(lambda p: None))
        weight.register_hook(double)
        before = engine.state_dict()["blocks.1.up.weight"].clone()
        engine.backward(loss_of(engine, case, 0, 0))
        engine.step()
        reported["change"] = engine.state_dict()["blocks.1.up.weight"] - before
    plain: Any = models.transformer()
    case.loss(plain, case.batch(0, engine.world.rank)).backward()
    reported["seen"] = float((seen[0] - plain.blocks[1].up.weight.grad / 2).abs().max())
    reported["gradient"] = plain.blocks[1].up.weight.grad
    return reported


@STAGES
def test_hooks_on_parameters_after_initialize(two: Pool, stage: int) -> None:
    ours, theirs = two.run(hooked, stage)
    mean = (ours["gradient"] + theirs["gradient"]) / 2
    for reported in (ours, theirs):
        assert reported["refused"].startswith("blocks.1.up.weight: a post-accumulate hook reads .grad")
        assert reported["seen"] < 1e-7
        assert (reported["change"] + 0.05 * 2 * mean).abs().max() < 1e-6


def take_gradient(parameter: Tensor) -> None:
    """As an optimizer's step in backward does."""
    parameter.grad = None


def hooked_before(stage: int) -> str:
    case, model = Case(stage=stage), models.transformer()
    handle = model.get_parameter("blocks.1.up.weight").register_post_accumulate_grad_hook(take_gradient)
    with engine_for(case, model=model) as engine:
        said = refused(lambda: engine.backward(loss_of(engine, case, 0, 0)))
        handle.remove()
        engine.backward(loss_of(engine, case, 0, 0))
        assert engine.step()
    return said


@pytest.mark.parametrize("stage", [1, 3])
def test_a_hook_of_before_that_takes_the_gradient_is_refused(two: Pool, stage: int) -> None:
    for reported in two.run(hooked_before, stage):
        assert reported.startswith(
            "blocks.1.up.weight: a post-accumulate hook of before initialize has taken its gradient"
        )
