"""The state of a step is exact: what looks changes nothing, what breaks leaves nothing, what nobody used stays.

Each rule is a sequence of calls beside the plain loop of `ranks.sequences`, compared after every call, on two ranks at
every stage of ZeRO.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from grids import thinned
from torch import Tensor, nn

import speedlab
from ranks import models
from ranks.conftest import PoolOf
from ranks.layout_cases import LayoutCase, batches
from ranks.loops import Trajectory, problems
from ranks.pool import Pool
from ranks.probe import EVERYBODY, NOBODY, ONLY_RANK_0, ONLY_RANK_1, branching, mixture, probe, straight, turned_round
from ranks.sequences import Call, Sequence, carry_out
from ranks.test_layouts import FLOAT32
from speedlab.config import RunConfig
from speedlab.layout import Layout

PLACES = [(0, "shared"), (1, "shared"), (2, "shared"), (3, "shared"), (3, "gloo")]

at_every_stage = pytest.mark.parametrize(("stage", "backend"), PLACES, ids=str)


@pytest.fixture
def exact(pool_of: PoolOf, stage: int, backend: str, tmp_path: Path):
    """`exact(sequence)`: carry it out at this stage; no rank may see a difference from the plain loop."""

    def run(sequence: Sequence) -> None:
        wrong = pool_of(2, backend).run(carry_out, replace(sequence, stage=stage), tmp_path, timeout=90)
        assert wrong == [[], []], "\n".join(line for lines in wrong for line in lines)

    return run


def trained(first: int, count: int) -> list[Call]:
    """So many micro-batches, in which everybody uses everything."""
    return [Call("micro_batch", EVERYBODY + 16 * number) for number in range(first, first + count)]


# ---- looking ---------------------------------------------------------------------------------------------------------

DROPPED = Call("look", 5, "gradients")
"""A forward with gradients on that no backward follows."""

CHANGES = {
    "step": [*trained(0, 1), Call("backward", 31), DROPPED, Call("step"), Call("look", 3, "no_grad")],
    "load": [*trained(0, 1), Call("save"), *trained(1, 1), DROPPED, Call("load"), Call("look", 3, "no_grad")],
    "load, then backward": [*trained(0, 1), Call("save"), *trained(1, 1), DROPPED, Call("load"), *trained(2, 2)],
    "reshape": [
        *[*trained(0, 1), DROPPED, Call("reshape", 1), Call("look", 3, "no_grad")],
        *[*trained(1, 1), DROPPED, Call("reshape", 3), *trained(2, 1)],
        *[DROPPED, Call("reshape", 2), Call("look", 7, "gradients"), *trained(3, 1)],
    ],
}


@at_every_stage
@pytest.mark.parametrize("change", CHANGES)
def test_forward_after_a_change_sees_the_new_weights(exact, change: str) -> None:
    """Whatever a forward that no backward followed has left gathered: a step, a load and a change of stage make new
    values, and the next forward computes with them."""
    exact(Sequence(build=straight, calls=[*CHANGES[change], Call("gather"), Call("evaluate", 9), *trained(5, 2)]))


@at_every_stage
@pytest.mark.parametrize("accumulation", [1, 2])
def test_looking_changes_no_step(exact, accumulation: int) -> None:
    """Evaluation, looks of every kind, `gather` and `state_dict` (after each call) come before and after every forward,
    backward and step of two steps."""
    ways = ("no_grad", "inference_mode", "gradients")
    looks = [Call("evaluate", 3), *(Call("look", 20 + i, way) for i, way in enumerate(ways)), Call("gather")]
    calls = []
    for number in range(2 * accumulation):
        calls += [Call("forward", 16 * number + 15), *looks, Call("backward"), *looks, Call("step"), *looks]
    exact(Sequence(build=straight, accumulation=accumulation, optimizer="adamw", calls=calls))


@at_every_stage
def test_save_and_reshape_inside_a_step_are_refused(exact) -> None:
    """From the first backward to the update both raise a RuntimeError that names the micro-batch, and the step goes
    on as if nothing had been asked."""
    refused = [Call("save"), Call("reshape", 1), Call("reshape", 3)]
    micro_batch = [Call("forward", 1), Call("backward"), *refused, Call("step")]
    calls = [*micro_batch, *refused, *micro_batch, Call("save"), *trained(0, 2), Call("load"), *trained(0, 2)]
    exact(Sequence(build=straight, accumulation=2, calls=calls))


# ---- what breaks -----------------------------------------------------------------------------------------------------


@at_every_stage
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("who", [None, 1], ids=["all ranks", "one rank, then all reconnect"])
def test_exception_in_a_micro_batch(exact, where: str, who: int | None) -> None:
    """An exception in a forward leaves the step as it was: the micro-batch can be run again. One in a backward, and one
    of a single rank, takes the step back to its beginning: the next three make one update, with nothing of the two
    before."""
    calls = [*trained(0, 5), Call("fail", 3, (where, who, False)), *trained(6, 3), *trained(9, 3)]
    exact(Sequence(build=straight, accumulation=3, clip_norm=0.3, calls=calls))


@at_every_stage
@pytest.mark.parametrize("who", [0, 1])
def test_exception_of_one_rank_before_the_first_step(exact, who: int) -> None:
    """The other rank may have come to the end of its forward: after `reconnect` both hold the same gathered."""
    exact(
        Sequence(build=straight, calls=[Call("fail", 0, ("forward", who, False)), Call("forward", 1), *trained(0, 2)])
    )


@at_every_stage
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_exception_in_train_batch_abandons_the_step(exact, where: str) -> None:
    calls = [Call("train_batch", 15), Call("fail", 3, (where, None, True)), Call("train_batch", 31), *trained(0, 4)]
    exact(Sequence(build=straight, accumulation=2, optimizer="adamw", calls=calls))


@at_every_stage
@pytest.mark.parametrize("accumulation", [1, 3])
def test_wrong_number_of_micro_batches_does_nothing(exact, accumulation: int) -> None:
    """`train_batch` with too few or too many, from a generator, is a ValueError before anything is done."""
    wrong = [Call("train_batch", 7, -1), Call("train_batch", 9, 1)]
    calls = [*wrong, Call("train_batch", 15), *wrong, Call("train_batch", 31), *wrong, *trained(0, accumulation)]
    exact(Sequence(build=straight, accumulation=accumulation, calls=calls))


def break_the_pipeline(case: LayoutCase, fails_in: tuple[int, int], meeting: str) -> Trajectory:
    """Before step 1 a pass in which each pipeline rank raises in the forward of one of its micro-batches.

    Where rank 0 needs nothing of rank 1 before that, rank 1 begins the pass when rank 0 has left it."""
    path, fails, store = Trajectory(), [-1], dist.FileStore(meeting, 2)

    def fail(module: nn.Module, args: Any) -> None:
        fails[0] -= 1
        if fails[0] == -1:
            raise ZeroDivisionError("in this micro-batch")

    engine: Any = speedlab.initialize(model=case.build(), optimizer=case.optimizer, config=case.config())[0]
    try:
        hook = engine.module.register_forward_pre_hook(fail)
        for step in range(case.steps):
            if step == 1:
                fails[0] = fails_in[engine.world.rank]
                if engine.world.rank == 1 and fails_in[0] == 1:
                    store.wait(["rank 0 is out"])
                with pytest.raises(ZeroDivisionError):
                    engine.train_batch(batches(case, 99, 0))
                store.set(f"rank {engine.world.rank} is out", "")
                fails[0] = -1
            path.losses.append(engine.train_batch(batches(case, step, 0)))
            path.norms.append(engine.global_grad_norm)
        hook.remove()
        path.parameters = engine.state_dict()
    finally:
        engine.destroy(keep_parameters=False)
    return path


@pytest.mark.parametrize("backend", ["shared", "gloo"])
@pytest.mark.parametrize("fails_in", [(1, 0), (2, 1)], ids=["first micro-batches", "later ones"])
def test_pipeline_step_after_a_broken_one(
    pool_of: PoolOf, plain, tmp_path: Path, backend: str, fails_in: tuple[int, int]
) -> None:
    """A step after one that raised on every pipeline rank, with no `reconnect` between, is as if that had not been.

    The rank behind fails one micro-batch earlier than the one before it, so that none waits for what never comes."""
    case = LayoutCase(layout=Layout(pp=2), steps=4)
    for path in pool_of(2, backend).run(break_the_pipeline, case, fails_in, str(tmp_path / "store"), timeout=40):
        assert problems([path], plain(case.plain(), 1), FLOAT32) == []


# ---- what nobody used ------------------------------------------------------------------------------------------------

USES = [EVERYBODY, NOBODY, ONLY_RANK_0, NOBODY, NOBODY, NOBODY, NOBODY, ONLY_RANK_1, EVERYBODY, NOBODY, NOBODY, NOBODY]
"""Who uses the branches in which micro-batch. By twos: some of them, nobody, and one rank in the second only."""


@pytest.mark.parametrize(
    ("stage", "backend", "optimizer", "instance", "accumulation"),
    thinned(
        ((*place, *rest) for place in PLACES for rest in itertools.product(["sgd", "adamw"], [False, True], [1, 2])),
        lambda stage, backend, optimizer, instance, accumulation: (
            (stage + (optimizer == "sgd") + instance + accumulation) % 2 == 0 and backend == "shared"
        ),
    ),
)
def test_parameters_that_no_rank_used(exact, optimizer: str, instance: bool, accumulation: int) -> None:
    """Value, moments and count of steps stay as they are, with momentum and with decay. What one rank used in one
    micro-batch is updated on all, with the mean over ranks."""
    calls = [Call("micro_batch", use + 16 * number) for number, use in enumerate(USES)]
    exact(Sequence(build=branching, optimizer=optimizer, instance=instance, accumulation=accumulation, calls=calls))


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        x = self.a(x).tanh()
        return x + self.b(x) if both else x


class Halves(nn.Module):
    """Blocks whose second weight only some of them use: on two ranks one has nothing to update of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Half() for _ in range(4))

    def forward(self, x: Tensor, step: int) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x, number % 2 == step % 2)
        return x.square().mean()


def train_halves(stage: int) -> list[float]:
    """How far each parameter is from that of the plain loop after each of four steps."""
    model, plain = models.seeded(Halves), models.seeded(Halves)
    rank, config = dist.get_rank(), {"zero": {"stage": stage, "bucket_bytes": 1}, "precision": "float32"}
    engine = speedlab.initialize(
        model=model, optimizer=partial(torch.optim.AdamW, lr=0.1), config=config | {"batch": {"micro_size": 2}}
    )[0]
    optimizer, separate = torch.optim.AdamW(plain.parameters(), lr=0.1), []
    for number in range(4):
        inputs = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(number))
        engine.backward(engine(inputs[rank], number))
        engine.step()
        optimizer.zero_grad()
        (sum(plain(one, number) for one in inputs) / 2).backward()
        optimizer.step()
        own = engine.state_dict()
        separate.append(max(float((own[name] - p).abs().max()) for name, p in plain.named_parameters()))
    engine.destroy(keep_parameters=False)
    return separate


@at_every_stage
def test_what_one_rank_has_nothing_to_update_of(pool_of: PoolOf, stage: int, backend: str) -> None:
    """Ranks bring updated parameters together in one order, also where one of them has updated nothing of a flat."""
    for separate in pool_of(2, backend).run(train_halves, stage, timeout=40):
        assert max(separate) < 2e-5


@pytest.mark.parametrize(
    ("stage", "backend", "optimizer", "accumulation"),
    thinned(
        ((*place, *rest) for place in PLACES for rest in itertools.product(["sgd", "adamw"], [1, 2])),
        lambda stage, backend, optimizer, accumulation: (
            ((stage // 2 + (optimizer == "sgd") + accumulation) % 2 == 0) ^ (backend == "gloo")
        ),
    ),
)
def test_experts_that_saw_no_token(exact, optimizer: str, accumulation: int) -> None:
    exact(Sequence(build=mixture, optimizer=optimizer, accumulation=accumulation, calls=trained(0, 6)))


@at_every_stage
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_what_nobody_used_over_a_checkpoint_and_a_change_of_stage(exact, optimizer: str) -> None:
    """Each parameter has its own count of steps, also after a load and at another stage; one that was never used has
    none."""
    unused = [Call("micro_batch", NOBODY + 16 * number) for number in range(3)]
    calls = [*unused, Call("save"), *trained(0, 2), Call("save"), *unused, Call("load", 1), *trained(2, 2)]
    calls += [Call("load", 0), *unused, Call("load", 0), *trained(4, 1), Call("reshape", 3), *unused]
    calls += [Call("reshape", 0), *trained(5, 2)]
    calls += [Call("reshape", 2), *unused, *trained(6, 2)]
    exact(Sequence(build=branching, optimizer=optimizer, calls=calls))


# ---- scalars ---------------------------------------------------------------------------------------------------------


@at_every_stage
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_parameters_without_dimensions(exact, optimizer: str) -> None:
    """They train, are gathered and saved with shape (), at every stage and over a change of stage."""
    calls = [Call("gather"), *trained(0, 2), Call("gather"), Call("save"), *trained(2, 1), Call("load"), Call("gather")]
    calls += [Call("reshape", 3), *trained(3, 1), Call("gather"), Call("save"), Call("reshape", 0), Call("load", 1)]
    exact(Sequence(build=probe, optimizer=optimizer, calls=[*calls, *trained(4, 2)]))


@at_every_stage
def test_parameters_without_dimensions_under_tensor_parallelism(exact) -> None:
    calls = [Call("gather"), *trained(0, 2), Call("save"), *trained(2, 1), Call("load"), *trained(3, 2), Call("gather")]
    exact(Sequence(build=probe, tensor=True, clip_norm=0.3, calls=calls))


# ---- all of it -------------------------------------------------------------------------------------------------------

TEN_STEPS = [
    *[Call("micro_batch", 16 * number + use) for number, use in enumerate([15, 15, NOBODY, NOBODY])],  # 2 steps
    DROPPED,
    *[Call("micro_batch", 16 * number + use) for number, use in enumerate([ONLY_RANK_1, NOBODY])],  # 3
    Call("save"),
    Call("micro_batch", 31),
    Call("fail", 47, ("backward", None, False)),
    *[Call("micro_batch", 31), Call("micro_batch", 47)],  # 4, in which a micro-batch is tried again
    *[Call("forward", 63), Call("load")],
    *[Call("micro_batch", 16 * number + use) for number, use in enumerate([NOBODY, NOBODY, 15, ONLY_RANK_0])],  # 5
    Call("look", 7, "gradients"),
    *[Call("train_batch", 16 * number + use) for number, use in enumerate([NOBODY, 15, 12, NOBODY, 3])],  # 10
]
"""Some parameters used in some steps only, looks with gradients, a step tried again, a load after a forward."""


@at_every_stage
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_ten_steps_with_everything_that_happens(exact, optimizer: str) -> None:
    exact(Sequence(build=probe, optimizer=optimizer, accumulation=2, clip_norm=0.5, calls=TEN_STEPS))


# ---- what is gathered at once ----------------------------------------------------------------------------------------


def gathered_at_once(stage: int, folder: Path) -> tuple[int, int]:
    """The most blocks gathered at once inside a block's forward, in the step after the first one that follows a resume,
    and after a change from stage `stage` to 3."""
    first = Sequence(build=turned_round, stage=stage, calls=[]).engine(model := turned_round())
    step(first, 0)
    first.save_checkpoint(folder, "one")
    first.reshape(zero=3)
    step(first, 1)
    reshaped = most_gathered(first, model)
    first.destroy()
    resumed = Sequence(build=turned_round, stage=3, calls=[]).engine(model := turned_round())
    resumed.load_checkpoint(folder, "one")
    step(resumed, 1)
    after = most_gathered(resumed, model)
    resumed.destroy()
    return after, reshaped


def step(engine: Any, number: int) -> None:
    engine.backward(engine(*models.tokens(number, engine.world.rank)).loss)
    assert engine.step()


def most_gathered(engine: Any, model: Any) -> int:
    seen: list[int] = []

    def count(module: nn.Module, *arguments: Any) -> None:
        names = {flat.name.split("/")[0] for flat in engine.flats if flat.gathered}
        seen.append(sum(name.startswith("blocks.") for name in names))

    hooks = [block.register_forward_pre_hook(count) for block in model.blocks]
    step(engine, 2)
    for hook in hooks:
        hook.remove()
    assert len(seen) == len(model.blocks)
    return max(seen)


@pytest.mark.parametrize(("stage", "backend"), PLACES)
def test_a_resumed_engine_learns_the_order_of_calls(pool_of: PoolOf, tmp_path: Path, stage: int, backend: str) -> None:
    """Where blocks are called in another order than they are registered: the block that computes and the next one are
    gathered, and no other."""
    assert pool_of(2, backend).run(gathered_at_once, stage, tmp_path, timeout=40) == [(2, 2)] * 2


# ---- what was not asked for ------------------------------------------------------------------------------------------


def given(config: Any, kind: str) -> dict[str, Any]:
    """A step with an optimizer of the caller's: (how far the bias of the head went, the gradient, what is set up)."""
    model: Any = models.seeded(nn.Linear, 3, 2)
    make: dict[str, Any] = {
        "instance": lambda: torch.optim.SGD(model.parameters(), lr=1.0),
        "callable": lambda: lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        "class": lambda: torch.optim.SGD,
    }
    before = model.bias.detach().clone()
    engine, optimizer, _, scheduler = speedlab.initialize(model=model, optimizer=make[kind](), config=config)
    try:
        engine.backward(1000 * engine(torch.ones(1, 3)).sum())  # The bias has the gradient (1000, 1000).
        engine.step()
        moved: Tensor = before - engine.state_dict()["bias"]
        return {
            "moved": moved.tolist(),
            "norm": engine.global_grad_norm,
            "rate": optimizer.param_groups[0]["lr"],
            "decay": Counter(group["weight_decay"] for group in optimizer.param_groups),
            "scheduler": scheduler,
        }
    finally:
        engine.destroy()


LARGE = [1000.0, 1000.0]
NORM = (8 * 1000.0**2) ** 0.5
"""Of the gradient of 6 weights and 2 biases."""


@pytest.mark.parametrize("kind", ["instance", "callable"])
@pytest.mark.parametrize("config", [{"zero": 2}, {"zero_optimization": {"stage": 2}}, None], ids=str)
def test_nothing_is_done_that_nobody_asked_for(two: Pool, config: Any, kind: str) -> None:
    """With the caller's own optimizer no clipping, schedule or decay, where the configuration does not name them."""
    for seen in two.run(given, config, kind):
        assert seen["norm"] == pytest.approx(NORM, rel=1e-6)
        assert seen["moved"] == pytest.approx(LARGE, rel=1e-6)
        assert seen["decay"] == {0: 1}
        assert seen["rate"] == 1.0
        assert seen["scheduler"] is None


def test_a_class_of_optimizer_keeps_its_own_decay(two: Pool) -> None:
    """SGD decays nothing unless the caller or the configuration says so."""
    for seen in two.run(given, {"zero": 2, "optimizer": {"lr": 1.0}}, "class"):
        assert seen["decay"] == {0: 1}
        assert seen["rate"] == 1.0
        assert seen["moved"] == pytest.approx(LARGE, rel=1e-6)


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"zero": 2, "clip_norm": 0.5}, 0.5),
        ({"zero_optimization": {"stage": 2}, "gradient_clipping": 0.25}, 0.25),
        (RunConfig(zero=2), 1.0),  # type: ignore[arg-type]  # a short form
    ],
    ids=["dict", "DeepSpeed", "RunConfig"],
)
def test_clipping_that_was_asked_for(two: Pool, config: Any, limit: float) -> None:
    """What a dict or DeepSpeed's JSON names; a RunConfig is taken with all its fields, its defaults too."""
    for seen in two.run(given, config, "instance"):
        assert seen["moved"] == pytest.approx([limit * 1000.0 / NORM] * 2, rel=1e-5)


# ---- what goes past the engine ---------------------------------------------------------------------------------------


def backward_past_the_engine(stage: int) -> str:
    model: Any = straight()
    engine = Sequence(build=straight, stage=stage, calls=[]).engine(model)
    step(engine, 0)
    try:
        engine(*models.tokens(1, engine.world.rank)).loss.backward()
    except RuntimeError as error:
        return str(error)
    finally:
        engine.destroy(keep_parameters=False)
    return ""


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_backward_past_the_engine_is_refused(two: Pool, stage: int) -> None:
    """Its gradients would be neither scaled nor summed."""
    for reported in two.run(backward_past_the_engine, stage, timeout=40):
        assert "call engine.backward(loss) instead of loss.backward()" in reported


def step_without_a_backward(stage: int) -> tuple[float | None, bool]:
    model: Any = straight()
    engine = Sequence(build=straight, stage=stage, optimizer="adamw", calls=[]).engine(model)
    step(engine, 0)
    before = engine.state_dict()
    engine.step()
    after = engine.state_dict()
    engine.destroy(keep_parameters=False)
    return engine.global_grad_norm, all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_without_a_backward_changes_nothing(two: Pool, stage: int) -> None:
    """As torch's optimizers without gradients; what the step before has left in the flats does not count."""
    assert two.run(step_without_a_backward, stage, timeout=40) == [(0.0, True)] * 2


# ---- what stays behind -----------------------------------------------------------------------------------------------


def left_over() -> list[bool]:
    """Whether what partitioned a model with frozen parts is still there after the engine's end."""
    model: Any = turned_round()
    engine = Sequence(build=turned_round, stage=3, calls=[]).engine(model)
    step(engine, 0)
    engine(*models.tokens(1, engine.world.rank))  # A look that no backward follows.
    found = [weakref.ref(engine), *map(weakref.ref, engine.zeros)]
    engine.destroy()
    del engine
    gc.collect()
    return [reference() is not None for reference in found]


def test_nothing_of_an_engine_stays_behind(two: Pool) -> None:
    """Hooks on the inputs of blocks with frozen parameters hold the graph that holds them."""
    assert two.run(left_over, timeout=40) == [[False, False]] * 2
