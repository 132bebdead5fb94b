"""What loops written for plain torch do by habit to a model and its optimizer: it works here as there, or is refused
in words."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

import speedlab
from ranks import models
from ranks.conftest import PoolOf
from ranks.pool import Pool
from speedlab.comm.transports.shared_memory import InPlace

STAGES = [0, 1, 2, 3]
WIDTH = models.WIDTH


class Block(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.up, self.dropout, self.down = nn.Linear(WIDTH, 17), nn.Dropout(p), nn.Linear(17, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(torch.tanh(self.up(x))))


class Net(nn.Module):
    """(B, C) → the loss, with a block that is called twice. `checkpointing`: the model's own, by torch's function."""

    def __init__(self, p: float = 0.0, checkpointing: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block(p) for _ in range(3))
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in (self.blocks[0], *self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return self.last(x).square().mean()


def net(*args: Any) -> Any:
    return models.seeded(Net, *args)


def points(step: int) -> Tensor:
    """This rank's micro-batch of a step, (B, C)."""
    return models.points(step, dist.get_rank())[0]


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def engine_of(
    model: Any, stage: int, *, dtype: str = "float32", optimizer: Any = sgd, clip_norm: float | None = None
) -> Any:
    config = {
        "clip_norm": clip_norm,
        "zero": {"stage": stage, "bucket_bytes": 1},
        "precision": {"dtype": dtype},
        "batch": {"micro_size": 6},
    }
    return speedlab.initialize(model=model, optimizer=optimizer, config=config)[0]


def train(engine: Any, step: int) -> float:
    """A step; returns the norm of its gradient."""
    engine.backward(engine(points(step)))
    engine.step()
    return engine.global_grad_norm


# ---- the model's own checkpointing -----------------------------------------------------------------------------------


def norms_with_dropout(stage: int, checkpointing: bool) -> list[float]:
    engine = engine_of(net(0.5, checkpointing), stage)
    try:
        return [train(engine, step) for step in range(3)]
    finally:
        engine.destroy(keep_parameters=False)


@pytest.mark.parametrize("stage", [0, 3])
def test_own_checkpointing_drops_what_the_forward_dropped(two: Pool, stage: int) -> None:
    """A block that is computed again draws the mask of its forward, also where it is called twice; else its gradients
    would be those of another network."""
    assert two.run(norms_with_dropout, stage, True) == two.run(norms_with_dropout, stage, False)


def generator_after_a_failed_forward(stage: int) -> bool:
    """Whether it is as it was before."""
    engine, before = engine_of(model := net(0.5), stage), torch.get_rng_state()
    hook = model.blocks[2].register_forward_pre_hook(fail)
    try:
        with pytest.raises(ZeroDivisionError):
            engine(points(0))
        hook.remove()
        return before.equal(torch.get_rng_state())
    finally:
        engine.destroy(keep_parameters=False)


def fail(*_: Any) -> None:
    raise ZeroDivisionError


def test_an_exception_in_a_forward_leaves_the_generator(two: Pool) -> None:
    """Blocks draw from seeds of their own; the caller's random numbers go on where they were."""
    assert two.run(generator_after_a_failed_forward, 0) == [True, True]


# ---- the optimizer ---------------------------------------------------------------------------------------------------


def adam(parameters: Any) -> Optimizer:
    """Not one of ours: torch's own step."""
    return torch.optim.Adam(parameters, lr=0.01)


def step_past_the_engine(stage: int, optimizer: Any) -> str:
    engine = engine_of(net(), stage, optimizer=optimizer)
    try:
        engine.backward(engine(points(0)))
        engine.optimizer.step()
    except RuntimeError as error:
        return str(error)
    finally:
        engine.destroy(keep_parameters=False)
    return ""


@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_a_step_of_the_optimizer_past_the_engine_is_refused(two: Pool, optimizer: Any) -> None:
    """It has no gradients and would do nothing, for ever."""
    for reported in two.run(step_past_the_engine, 2, optimizer):
        assert "call engine.step() instead" in reported


def norms_around_a_failed_update(optimizer: Any, folder: Path, fails: bool) -> list[float]:
    """Three steps; before the last one the second is taken back by a load, and before that its update may fail."""
    engine = engine_of(net(), 1, optimizer=optimizer, clip_norm=0.01)
    try:
        norms = [train(engine, 0)]
        engine.save_checkpoint(folder, "one")
        rate = engine.optimizer.param_groups[0]["lr"]
        if fails:
            engine.optimizer.param_groups[0]["lr"] = "fast"
            with pytest.raises((TypeError, ValueError)):
                train(engine, 1)
        engine.optimizer.param_groups[0]["lr"] = rate
        engine.load_checkpoint(folder, "one")
        return [*norms, train(engine, 1), train(engine, 2)]
    finally:
        engine.destroy(keep_parameters=False)


def fused_adam(parameters: Any) -> Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, fused=True)


@pytest.mark.parametrize("optimizer", [sgd, adam, fused_adam])
def test_a_load_after_an_update_that_failed(two: Pool, tmp_path: Path, optimizer: Any) -> None:
    """Nothing that the failed one was given is left."""
    expected = two.run(norms_around_a_failed_update, optimizer, tmp_path / "fine", False)
    assert two.run(norms_around_a_failed_update, optimizer, tmp_path / "failed", True) == expected


def norms_after_a_load(folder: Path, through_the_optimizer: bool) -> list[float]:
    """Of steps after a checkpoint; before it the optimizer may have been given its own state again."""
    engine = engine_of(net(), 1)
    try:
        train(engine, 0)
        if through_the_optimizer:
            engine.optimizer.load_state_dict(copy.deepcopy(engine.optimizer.state_dict()))
        train(engine, 1)
        engine.save_checkpoint(folder, "two")
        engine.load_checkpoint(folder, "two")
        engine.reshape(zero=0)
        return [train(engine, 2), train(engine, 3)]
    finally:
        engine.destroy(keep_parameters=False)


def test_state_that_the_optimizer_is_given(two: Pool, tmp_path: Path) -> None:
    """`optimizer.load_state_dict` makes new tensors: checkpoints and changes of stage see those."""
    expected = two.run(norms_after_a_load, tmp_path / "a", False)
    assert two.run(norms_after_a_load, tmp_path / "b", True) == expected


class Momentum(Optimizer):
    """Gives its state another tensor in each step, instead of writing into the one that is there."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["sum"] = state.get("sum", 0.0) * 0.9 + p.grad
                p -= group["lr"] * state["sum"]


def norms_over_a_load(optimizer: Any, folder: Path, cleared: bool, loaded: bool) -> list[float]:
    """Of steps; between them states may be cleared, and what is saved then loaded and moved."""
    engine = engine_of(net(), 1, optimizer=optimizer)
    try:
        for step in range(3):
            train(engine, step)
            if cleared and step == 1:
                engine.optimizer.state.clear()
        if loaded:
            engine.save_checkpoint(folder, "three")
            train(engine, 3)
            engine.load_checkpoint(folder, "three")
            engine.reshape(zero=3)
        return [train(engine, 3), train(engine, 4)]
    finally:
        engine.destroy(keep_parameters=False)


@pytest.mark.parametrize(("optimizer", "cleared"), [(Momentum, False), (sgd, True), (adam, True)])
def test_states_that_the_optimizer_makes_anew(two: Pool, tmp_path: Path, optimizer: Any, cleared: bool) -> None:
    """Checkpoints and changes of stage have those that it uses, not those that it had at first."""
    expected = two.run(norms_over_a_load, optimizer, tmp_path, cleared, False)
    assert two.run(norms_over_a_load, optimizer, tmp_path, cleared, True) == expected


def halving(parameters: Any) -> Optimizer:
    """With a hook that halves the rate before each step."""
    optimizer = sgd(parameters)

    def halve(stepped: Optimizer, *_: Any) -> None:
        for group in stepped.param_groups:
            group["lr"] /= 2

    optimizer.register_step_pre_hook(halve)
    return optimizer


def scheduled(parameters: Any) -> Optimizer:
    """With a scheduler that a hook steps."""
    optimizer = sgd(parameters)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


def rates(optimizer: Any) -> list[float]:
    engine = engine_of(net(), 1, optimizer=optimizer)
    try:
        return [engine.get_lr()[0] for step in range(3) if train(engine, step)]
    finally:
        engine.destroy(keep_parameters=False)


@pytest.mark.parametrize("optimizer", [halving, scheduled])
def test_what_hangs_on_the_optimizer_of_a_callable(two: Pool, optimizer: Any) -> None:
    """It is not left behind on an object that another one takes the place of."""
    assert two.run(rates, optimizer) == [[0.025, 0.0125, 0.00625]] * 2


# ---- interrupts ------------------------------------------------------------------------------------------------------


def norms_around_an_interrupt(stage: int) -> list[Any]:
    """Of two steps, between them a backward that Ctrl-C breaks off on all ranks; the second may be a refusal."""
    engine = engine_of(model := net(), stage)
    try:
        found: list[Any] = [train(engine, 0)]
        # Gradients of the blocks are there by then.
        hook = model.first.register_forward_hook(lambda module, args, output: output.register_hook(interrupt) and None)
        loss = engine(points(1))
        with pytest.raises(KeyboardInterrupt):
            engine.backward(loss)
        hook.remove()
        try:
            found.append(train(engine, 1))
        except RuntimeError as error:
            found.append(str(error))
        return found
    finally:
        engine.destroy(keep_parameters=False)


def interrupt(_: Tensor) -> None:
    raise KeyboardInterrupt


def two_norms(stage: int) -> list[float]:
    engine = engine_of(net(), stage)
    try:
        return [train(engine, 0), train(engine, 1)]
    finally:
        engine.destroy(keep_parameters=False)


@pytest.mark.parametrize("stage", [0, 2])
def test_an_interrupted_backward_leaves_no_gradients(pool_of: PoolOf, stage: int) -> None:
    """What it had added would count twice when the cell is run again. A rank alone forgets it at once; several, which
    may stand in different places, have to meet again."""
    assert pool_of(1).run(norms_around_an_interrupt, stage) == pool_of(1).run(two_norms, stage)
    for _, reported in pool_of(2).run(norms_around_an_interrupt, stage):
        assert "a backward of step 2 was cut off" in reported
    pool_of(2).new_group()


# ---- the module ------------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """(B, C) and targets, which it does not need → what has a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, targets: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=self.head(self.norm(x)).square().mean())


def modes_after_evaluation() -> list[bool]:
    engine = engine_of(model := models.seeded(Normed), 0)
    try:
        model.norm.eval()  # Statistics that shall stay as they are.
        engine.evaluate([(points(0), points(0))])
        return [model.training, model.norm.training, model.head.training]
    finally:
        engine.destroy(keep_parameters=False)


def test_evaluation_leaves_each_module_in_its_mode(two: Pool) -> None:
    """One that is in evaluation mode by itself, as a frozen BatchNorm, does not begin to train."""
    assert two.run(modes_after_evaluation) == [[True, False, True]] * 2


def norm_with_gradients_from_before(stage: int, dtype: str, earlier: bool) -> float:
    model = net()
    if earlier:
        model(points(9)).backward()
    engine = engine_of(model, stage, dtype=dtype)
    try:
        return train(engine, 0)
    finally:
        engine.destroy(keep_parameters=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_from_before_do_not_count(two: Pool, dtype: str) -> None:
    """Of a look at the model before it is set up; `zero_grad` of the engine's optimizer does not reach them."""
    expected = two.run(norm_with_gradients_from_before, 1, dtype, False)
    assert two.run(norm_with_gradients_from_before, 1, dtype, True) == expected


def write_in_place(parameter: nn.Parameter) -> None:
    parameter.clamp_(-0.1, 0.1)


def put_in_place(parameter: nn.Parameter) -> None:
    parameter.data = parameter.detach().clamp(-0.1, 0.1)


def changed_by_hand(stage: int, dtype: str, way: str, folder: Path) -> dict[str, Any]:
    """Between two steps the weight of `first` is clamped to ±0.1; then `first` is not used any more, and stays."""
    engine = engine_of(model := net(), stage, dtype=dtype)
    try:
        train(engine, 0)
        before, weight = engine.state_dict()["first.weight"].clone(), model.first.weight
        with torch.no_grad():
            if way == "load_state_dict":
                model.first.load_state_dict({"weight": weight.clamp(-0.1, 0.1), "bias": model.first.bias.clone()})
            else:
                {"in place": write_in_place, "data": put_in_place}[way](weight)
        saved = engine.save_checkpoint(folder, "changed")
        model.first.requires_grad_(False)
        train(engine, 1)
        after = engine.state_dict()["first.weight"]
        engine.load_checkpoint(saved.parent, saved.name)
        return {
            "before": before,
            "after": after,
            "seen": weight.detach().float().clone(),
            "saved": engine.state_dict()["first.weight"],
        }
    finally:
        engine.destroy(keep_parameters=False)


@pytest.mark.parametrize("way", ["in place", "data", "load_state_dict"])
@pytest.mark.parametrize(("stage", "dtype"), [(0, "float32"), (0, "bfloat16"), (2, "float32"), (2, "bfloat16")])
def test_parameters_changed_by_hand(two: Pool, tmp_path: Path, stage: int, dtype: str, way: str) -> None:
    """They train, and are saved, with their new values; elements that stayed keep the bits of their masters."""
    for found in two.run(changed_by_hand, stage, dtype, way, tmp_path):
        before, limit = found["before"], torch.tensor(0.1).to(getattr(torch, dtype)).float()
        assert (before.abs() > 0.11).any()
        assert (before.abs() < 0.09).any()
        inside = before.abs() <= limit
        for name in ("after", "saved"):
            assert found[name][inside].equal(before[inside])
            assert found[name][~inside].equal(limit * before[~inside].sign())
        assert found["seen"].equal(found["saved"].to(getattr(torch, dtype)).float())


def written_at_once(stage: int, after: str, folder: Path) -> dict[str, Tensor]:
    """This rank's parameters, into which it wrote as soon as they had changed, where rank 1 was slow to read those of
    rank 0."""
    engine, written, copy_now = engine_of(model := net(), stage), folder / after / "written", InPlace._copy

    def copy_late(transport: InPlace, full: Tensor, number: int) -> None:
        with contextlib.suppress(TimeoutError):
            models.wait_until(written.exists, seconds=0.2)
        copy_now(transport, full, number)

    try:
        train(engine, 0)
        saved = engine.save_checkpoint(folder / after, "one")
        if after == "reshape":
            engine.reshape(zero=3)
        with mock.patch.object(InPlace, "_copy", copy_late if dist.get_rank() else copy_now):
            if after == "step":
                train(engine, 1)
            elif after == "load":
                engine.load_checkpoint(saved)
            else:
                engine.reshape(zero=stage)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
            if dist.get_rank() == 0:
                written.touch()
        return {name: p.detach().clone() for name, p in model.named_parameters()}
    finally:
        engine.destroy(keep_parameters=False)


@pytest.mark.parametrize(("stage", "after"), [(1, "step"), (2, "step"), (2, "load"), (2, "reshape")])
def test_a_rank_that_writes_while_another_still_reads(two: Pool, tmp_path: Path, stage: int, after: str) -> None:
    """What peers take of this rank's parameters is what they were before."""
    ours, theirs = two.run(written_at_once, stage, after, tmp_path)
    assert all(ours[name].equal(theirs[name]) for name in ours)


def change_partitioned(how: str) -> str:
    engine = engine_of(model := net(), 3)
    try:
        weight = model.first.weight
        if how == "of its values":
            put_in_place(weight)
        else:
            weight.data = torch.full_like(weight, 0.1)
        train(engine, 0)
    except RuntimeError as error:
        return str(error)
    finally:
        engine.destroy(keep_parameters=False)
    return ""


def test_partitioned_parameters_changed_by_hand_are_refused(two: Pool) -> None:
    for reported in two.run(change_partitioned, "others"):
        assert "first.weight was changed while it is partitioned" in reported
    for reported in two.run(change_partitioned, "of its values"):
        assert reported.startswith("first.weight: detach needs its values, and they are partitioned (ZeRO stage 3)")


class OwnWeight(nn.Linear):
    """Halves its weight in each forward, in one way or another."""

    way = ""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.way == "in place":
                self.weight.mul_(0.5)
            elif self.way == "data in place":
                self.weight.data.mul_(0.5)
            else:
                self.weight.data = self.weight.data * 0.5
        return super().forward(x)


def trained_writing(stage: int, way: str) -> Tensor | str:
    """The weight of a layer that writes into it after two steps, or the refusal."""
    model = net()
    model.blocks[1].up = own = OwnWeight(WIDTH, 17)
    nn.init.constant_(own.weight, 0.3)
    nn.init.zeros_(own.bias)
    own.way = way
    engine = engine_of(model, stage)
    try:
        for step in range(2):
            train(engine, step)
        return engine.state_dict()["blocks.1.up.weight"].clone()
    except RuntimeError as error:
        return str(error)
    finally:
        engine.destroy(keep_parameters=False)


@pytest.mark.parametrize("way", ["in place", "data in place", "put in its place"])
def test_a_forward_that_writes_into_its_weights(two: Pool, way: str) -> None:
    """At stage 3 what it writes goes with what was gathered: backward would compute with other values."""
    one, other = (two.run(trained_writing, stage, way)[0] for stage in (0, 2))
    assert isinstance(one, Tensor)
    assert one.equal(other)
    assert (one.abs() < 0.1).all()  # Twice the half of 0.3, and small steps.
    for reported in two.run(trained_writing, 3, way):
        assert "blocks.1.up.weight" in reported
        assert "below 3" in reported


def clamped(stage: int, dtype: str, way: str) -> float | str:
    """The largest of all parameters where a loop clamps them behind each update, or the refusal."""
    engine = engine_of(net(), stage, dtype=dtype)
    try:
        for step in range(3):
            engine.backward(engine(points(step).to(engine.dtype)).float())
            engine.step()
            with torch.no_grad():
                for parameter in engine.module.parameters():
                    (parameter.data if way == "data" else parameter).clamp_(-0.0625, 0.0625)
        return max(float(each.abs().max()) for each in engine.state_dict().values())
    except RuntimeError as error:
        return str(error)
    finally:
        engine.destroy(keep_parameters=False)


@pytest.mark.parametrize("stage", [0, 1])
def test_weights_that_a_loop_clamps(two: Pool, stage: int) -> None:
    """As a critic's of Wasserstein's distance."""
    for way, dtype in (("data", "float32"), ("parameter", "float32"), ("parameter", "bfloat16")):
        largest = two.run(clamped, stage, dtype, way)
        assert largest == pytest.approx([0.0625, 0.0625], rel=2**-8)  # Masters that show as the limit stay as they are.
    for reported in two.run(clamped, stage, "bfloat16", "data"):
        assert "step 2: first.weight and" in reported
        assert "through parameter.data" in reported


def changed_in_sight(what: str) -> float:
    """The norm of the last of three steps with bfloat16 parameters, between which something is written that counts."""
    model = net()
    nn.init.zeros_(model.first.bias)
    if what == "NaN":
        model.register_parameter("unused", nn.Parameter(torch.full((4,), torch.nan)))
    elif what == "complex":
        model.register_parameter("unused", nn.Parameter(torch.ones(3, dtype=torch.complex128), requires_grad=False))
    engine = engine_of(model, 3 if what == "complex" else 1, dtype="bfloat16", optimizer=torch.optim.AdamW)
    try:
        for step in range(3):
            engine.backward(engine(points(step).bfloat16()).float())
            engine.step()
            with torch.no_grad():
                if what == "sign of nought":
                    model.first.bias.zero_().neg_()
                    engine.state_dict()
                elif what.startswith("masters"):
                    for group in engine.optimizer.param_groups:
                        for master in group["params"]:
                            master.clamp_(-0.0625, 0.0625)
                    if what == "masters, and a step given up":
                        engine.zero_grad()
        return engine.global_grad_norm
    finally:
        engine.destroy(keep_parameters=False)


@pytest.mark.parametrize("what", ["sign of nought", "NaN", "masters", "masters, and a step given up", "complex"])
def test_what_is_written_in_sight_is_not_refused(two: Pool, what: str) -> None:
    assert all(norm > 0 for norm in two.run(changed_in_sight, what))


def norms_with_frozen(stage: int, everything: bool) -> list[float]:
    """The optimizer is the caller's instance, over all parameters or over those that train."""
    model = net()
    model.first.requires_grad_(False)
    given = model.parameters() if everything else (p for p in model.parameters() if p.requires_grad)
    engine = engine_of(model, stage, optimizer=sgd(given))
    try:
        return [train(engine, step) for step in range(2)]
    finally:
        engine.destroy(keep_parameters=False)


def test_an_optimizer_over_frozen_parameters_too(two: Pool) -> None:
    """As `AdamW(model.parameters())` of a model with adapters."""
    assert two.run(norms_with_frozen, 2, True) == two.run(norms_with_frozen, 2, False)


class Masked(nn.Module):
    """Writes values in __init__ that `reset_parameters` does not: `what` is "mask", a buffer, or "bias"."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        if what == "mask":
            self.register_buffer("mask", torch.ones(WIDTH, WIDTH).tril())
        else:
            self.bias = nn.Parameter(torch.zeros(WIDTH))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


def made_on_meta(what: str) -> str:
    try:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Masked(what))
        engine_of(model, 0).destroy()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("what", ["mask", "bias"])
def test_values_that_a_model_on_meta_would_lose(two: Pool, what: str) -> None:
    """They would be whatever the memory held."""
    for reported in two.run(made_on_meta, what):
        assert reported.startswith(f"1.{what} got no value when its module was made")


# ---- what cannot be trained as it is ---------------------------------------------------------------------------------


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.ones(3, dtype=torch.complex64))


def one_memory() -> nn.Module:
    model = net()
    model.blocks[1].up.weight.data = model.blocks[0].up.weight.data
    return model


def all_frozen() -> nn.Module:
    return net().requires_grad_(False)


def refusals() -> list[str]:
    """What `initialize` says of models and schedulers that it cannot train as they are."""
    said = []
    for model in (Complex(), one_memory(), all_frozen(), nn.Sequential(nn.Embedding(9, WIDTH, max_norm=1.0))):
        with pytest.raises(speedlab.ConfigError) as reported:
            engine_of(model, 1)
        said.append(str(reported.value))
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    model = net()
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(speedlab.ConfigError) as reported:
        speedlab.initialize(model=model, optimizer=sgd, lr_scheduler=plateau, config={"batch": {"micro_size": 6}})
    assert all(p.equal(before[name]) for name, p in model.named_parameters())
    said.append(str(reported.value))
    model = net()
    engine_of(model, 3)  # Dropped without destroy().
    with pytest.raises(speedlab.ConfigError) as reported:
        engine_of(model, 3)
    said.append(str(reported.value))
    model = net()
    other = torch.optim.lr_scheduler.StepLR(sgd(model.parameters()), step_size=1)
    for choice in (sgd, torch.optim.SGD, sgd(model.parameters()), None):
        with pytest.raises(speedlab.ConfigError) as reported:
            speedlab.initialize(model=model, optimizer=choice, lr_scheduler=other, config={"batch": {"micro_size": 6}})
    said.append(str(reported.value))
    for given in ([{"params": model.parameters(), "rate": 0.1}], model.blocks.parameters()):
        with pytest.raises(speedlab.ConfigError) as reported:
            speedlab.initialize(model=model, model_parameters=given, config={"batch": {"micro_size": 6}})
        said.append(str(reported.value))
    for given in (filter(lambda p: p.requires_grad, model.parameters()), model.named_parameters()):
        speedlab.initialize(model=model, model_parameters=given, config={"batch": {"micro_size": 6}})[0].destroy()
    return said


def test_models_that_would_train_wrongly_are_refused(two: Pool) -> None:
    for complex_one, shared, frozen, rescaled, plateau, dropped, others, options, left_out in two.run(
        refusals, timeout=60
    ):
        assert complex_one.startswith("model: turn is torch.complex64")
        assert shared.startswith("model: blocks.0.up.weight and blocks.1.up.weight are two parameters in the same")
        assert frozen.startswith("model: no parameter is to be trained")
        assert rescaled.startswith("model: 0 has max_norm 1.0, by which a forward rescales the rows that it reads")
        assert plateau.startswith("lr_scheduler: ReduceLROnPlateau.step takes a metric")
        assert "an engine that partitioned it was dropped" in dropped
        assert options.startswith("optimizer.rate: AdamW takes no rate; it takes lr, betas")
        assert left_out.startswith("model_parameters: first.weight is not in them (4 in all)")
        assert others.startswith("lr_scheduler: it was made of another optimizer than the one that will train")


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """As scripts for Hugging Face's models give them to DeepSpeed."""
    vectors = [p for name, p in model.named_parameters() if name.endswith("bias")]
    matrices = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    return [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0, "lr": 0.02}]


def trained_in_groups(stage: int, name: str) -> list[float]:
    """The sum of each parameter after some steps, less that of a plain loop."""
    plain, model = net(), net()
    options = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-2}  # Gradients of nearly nothing decide nothing.
    optimizer = torch.optim.AdamW(groups_of(plain), **options)
    ranks = dist.get_world_size()
    config = {"optimizer": {"name": name, **options}, "zero": {"stage": stage}}
    config |= {"precision": "float32", "batch": {"micro_size": 6}}
    engine = speedlab.initialize(model=model, model_parameters=groups_of(model), config=config)[0]
    for step in range(4):
        sum(plain(models.points(step, rank)[0]) / ranks for rank in range(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
        train(engine, step)
    engine.destroy()
    return [float((a - b).detach().abs().max()) for a, b in zip(plain.parameters(), model.parameters(), strict=True)]


@pytest.mark.parametrize(("stage", "name"), [(0, "adamw"), (1, "onebit_adam"), (2, "adamw"), (3, "adamw")])
def test_groups_of_deepspeeds_model_parameters_have_their_options(two: Pool, stage: int, name: str) -> None:
    for far in two.run(trained_in_groups, stage, name):
        assert max(far) < 2e-5


def changes_too_late() -> list[str]:
    """What an engine says of a model and optimizer that were changed after `initialize`; it trains on afterwards."""
    model = net()
    model.first.requires_grad_(False)
    engine, said = engine_of(model, 3), []
    with pytest.raises(RuntimeError) as reported:
        model.state_dict()
    said.append(str(reported.value))
    model.first.requires_grad_(True)
    with pytest.raises(RuntimeError) as reported:
        train(engine, 0)
    said.append(str(reported.value))
    model.first.requires_grad_(False)
    last, model.last = model.last, nn.Linear(WIDTH, 1)
    with pytest.raises(RuntimeError) as reported:
        train(engine, 0)
    said.append(str(reported.value))
    model.last = last
    engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(RuntimeError) as reported:
        train(engine, 0)
    said.append(str(reported.value))
    del engine.optimizer.param_groups[-1]
    engine.zero_grad()
    norm = train(engine, 1)
    assert norm == pytest.approx(first_norm(), rel=1e-5)
    engine.destroy()
    return said


def first_norm() -> float:
    """Of the gradient of step 1 on a new model, over both ranks."""
    model = net()
    model.first.requires_grad_(False)
    torch.stack([model(models.points(1, rank)[0]) for rank in range(2)]).mean().backward()
    return torch.linalg.vector_norm(
        torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])
    ).item()


def test_what_is_changed_too_late_is_refused(two: Pool) -> None:
    for state, unfrozen, replaced, group in two.run(changes_too_late, timeout=60):
        assert "engine.state_dict() or engine.module_state_dict()" in state
        assert unfrozen.startswith("first.weight was frozen at initialize and requires a gradient now")
        assert replaced.startswith("last.weight is another parameter than at initialize, or was added since")
        assert group.startswith("optimizer: it has 2 groups of parameters, and had 1 at initialize")


# ---- models of transformers ------------------------------------------------------------------------------------------


def gemma() -> nn.Module:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    shape = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    config = Gemma2Config(
        **shape, num_key_value_heads=1, head_dim=8, vocab_size=40, sliding_window=8, attn_implementation="eager"
    )
    torch.manual_seed(3)
    return Gemma2ForCausalLM(config)


def norms_of_gemma(checkpointing: str) -> tuple[list[float], list[bool]]:
    """Of three steps, and whether the model's cache is on: during the training, and after it."""
    model = gemma()
    config = {"activation": {"checkpointing": checkpointing}, "batch": {"micro_size": 2}, "zero": {"stage": 2}}
    engine = speedlab.initialize(model=model, optimizer=sgd, config=config)[0]
    tokens, norms = torch.arange(2 * 12).view(2, 12) % 40, []
    for _ in range(3):
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        norms.append(engine.global_grad_norm)
    during = model.config.use_cache
    engine.destroy()
    return norms, [during, model.config.use_cache]


def test_blocks_that_are_computed_again_fill_no_cache(pool_of: PoolOf) -> None:
    """A block adds its keys to the model's cache; computed again, it would attend to them twice."""
    (plain, _), (again, cached) = (pool_of(1).run(norms_of_gemma, how, timeout=60)[0] for how in ("none", "block"))
    assert again == pytest.approx(plain, rel=1e-5)
    assert cached == [False, True]
