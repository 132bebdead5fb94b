"""What a rank really holds: looking at partitioned parameters, setting up twice, and models that are built on meta."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import mmap
import re
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from grids import thinned
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import speedlab
from ranks import models
from ranks.conftest import PoolOf
from ranks.loops import Case, adamw, engine_for, engine_step, sgd
from ranks.pool import Pool
from ranks.test_parity import STAGES
from speedlab.comm.transports import shared_memory
from speedlab.parallel import construction
from speedlab.trainer.fit_check import holdings

# ---- looking at a parameter ------------------------------------------------------------------------------------------


def value_or_refusal(parameter: nn.Parameter) -> Any:
    try:
        return parameter.detach().clone()
    except RuntimeError as error:
        return str(error)


def look(case: Case) -> dict[str, Any]:
    with engine_for(case) as engine:
        engine_step(engine, case, 0)
        parameter = engine.module.blocks[1].up.weight
        whole = speedlab.gather(parameter)
        several = speedlab.gather([parameter, engine.module.norm.bias])
        return {
            "repr": repr(parameter),
            "shape": tuple(parameter.shape),
            "is_parameter": isinstance(parameter, nn.Parameter),
            "held": parameter.untyped_storage().nbytes(),
            "value": value_or_refusal(parameter),
            "whole": whole,
            "several": [tuple(value.shape) for value in several] + [several[0].equal(whole)],
            "master": engine.state_dict()["blocks.1.up.weight"],
            "apart": whole.data_ptr() != parameter.data_ptr(),
        }


@pytest.mark.parametrize("stage", STAGES)
def test_parameter_shows_its_shape_and_owners(two: Pool, stage: int) -> None:
    seen = two.run(look, Case(stage=stage))
    for rank in seen:
        assert rank["shape"] == (21, models.WIDTH)
        assert rank["is_parameter"]
        assert "blocks.1.up.weight" in rank["repr"]
        assert "21×12" in rank["repr"] or "21, 12" in rank["repr"]
        assert "rank 0" in rank["repr"] or "rank 1" in rank["repr"]
        # Between steps the whole is there, except at stage 3, where it is not even readable as something else.
        assert (rank["held"] < 21 * models.WIDTH * 4) == (stage == 3)
        if stage == 3:
            assert rank["value"].startswith("blocks.1.up.weight: detach needs its values, and they are partitioned")
        else:
            assert rank["value"].equal(rank["whole"])
        assert rank["whole"].equal(rank["master"])
        assert rank["several"] == [(21, 12), (12,), True]
        assert rank["apart"]
    assert seen[0]["whole"].equal(seen[1]["whole"])


def owners(case: Case) -> list[str]:
    with engine_for(case) as engine:
        return [repr(parameter) for parameter in engine.module.parameters()]


def test_owners_cover_every_element_once(pool_of: PoolOf) -> None:
    texts = pool_of(4).run(owners, Case(stage=3))
    assert texts.count(texts[0]) == 4, "every rank says the same"
    for text, parameter in zip(texts[0], models.transformer().parameters(), strict=True):
        ranges = sorted((int(low), int(high)) for low, high in re.findall(r"rank \d: \[(\d+):(\d+)\)", text))
        assert ranges[0][0] == 0
        assert ranges[-1][1] == parameter.numel()
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges)), text


def held_here(case: Case) -> dict[str, Any]:
    with engine_for(case) as engine:
        engine_step(engine, case, 0)
        return {
            "held": holdings(engine.zeros, lambda flat: len(engine.partitioned_optimizer.states_of(flat))),
            "ledger": engine.ledger(),
            "padding": sum(flat.padded - sum(slot.numel for slot in flat.slots) for flat in engine.flats),
            "buffers": sum(buffer.nbytes for buffer in engine.buffers),
        }


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_told_of_each_tensor_is_what_the_ledger_measures(two: Pool, stage: int) -> None:
    ranks = two.run(held_here, Case(stage=stage, optimizer=adamw))
    categories = {"parameter": "parameters", "gradient": "gradients", "moments": "optimizer_moments"}
    for rank in ranks:
        for state, category in categories.items():
            reported = sum(row["held"][state][2] for row in rank["held"].values())
            rest = getattr(rank["ledger"], category) - reported - (rank["buffers"] if state == "parameter" else 0)
            assert 0 <= rest <= rank["padding"] * 4 * (2 if state == "moments" else 1), (state, rest)
    for name, parameter in models.transformer().named_parameters():
        pieces = [rank["held"][name]["held"]["moments"][:2] for rank in ranks]
        if stage == 0:
            assert pieces == [[0, parameter.numel()]] * 2
            assert ranks[0]["held"][name]["owners"] == []
            continue
        owners = [number for number, (first, end) in enumerate(pieces) if end > first]
        reported = [len(owners), owners[0], owners[-1]]
        assert ranks[0]["held"][name]["owners"] == ranks[1]["held"][name]["owners"] == reported
        assert sum(end - first for first, end in pieces) == parameter.numel()
        assert pieces[0][1] == pieces[1][0] or len(owners) == 1


def gather_strangers() -> tuple[bool, bool]:
    parameter = nn.Parameter(torch.arange(3.0))
    value = speedlab.gather(parameter)
    return value.equal(parameter), value.data_ptr() != parameter.data_ptr()


def test_gather_of_an_ordinary_tensor_is_a_copy(two: Pool) -> None:
    assert two.run(gather_strangers) == [(True, True)] * 2


# ---- masters ---------------------------------------------------------------------------------------------------------


def first_state(case: Case) -> dict[str, Tensor]:
    with engine_for(case) as engine:
        return engine.state_dict()


@pytest.mark.parametrize(
    ("stage", "dtype"),
    thinned(
        itertools.product(STAGES, ["float32", "bfloat16", "float16"]),
        lambda stage, dtype: (stage + len(dtype)) % 2 == 0,
    ),
)
def test_masters_start_from_the_values_given(two: Pool, stage: int, dtype: str) -> None:
    """float32 masters of a float32 model are its values, not those rounded to the compute dtype and widened again."""
    for state in two.run(first_state, Case(stage=stage, dtype=dtype)):
        for name, parameter in models.transformer().named_parameters():
            assert state[name].dtype == torch.float32, name
            assert state[name].equal(parameter), f"{name}: up to {(state[name] - parameter).abs().max().item():.2g} off"


STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# ---- bytes in use ----------------------------------------------------------------------------------------------------


def bytes_in_use() -> int:
    """Bytes of the storages of all tensors of parameters' dtypes that Python can reach.

    Others are messages (text, lengths, float64 sums), which gloo's own thread lets go a moment after they have arrived.
    """
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and thing.device.type == "cpu" and thing.dtype in STATE_DTYPES:
            storage = thing.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def set_up_repeatedly(case: Case, how: str) -> list[int]:
    """Bytes in use before, after each of three set-ups with a step each, and after everything is given back."""
    used = [bytes_in_use()]
    model = case.build()
    engine = None
    for _ in range(3):
        if how == "destroyed between" and engine is not None:
            engine.destroy()
        if how == "new model":
            model = case.build()
        engine = speedlab.initialize(model=model, optimizer=case.optimizer, config=case.config())[0]
        engine_step(engine, case, 0)
        used.append(bytes_in_use())
    assert engine is not None
    engine.destroy()
    del engine, model
    used.append(bytes_in_use())
    return used


@pytest.mark.parametrize("how", ["same model", "destroyed between", "new model"])
@pytest.mark.parametrize("stage", STAGES)
def test_setting_up_again_uses_the_same_bytes(two: Pool, stage: int, how: str) -> None:
    case = Case(stage=stage, dtype="bfloat16", optimizer=adamw)
    if how == "destroyed between" and stage == 3:
        case = replace(case, dtype="float32")
    for before, first, second, third, after in two.run(set_up_repeatedly, case, how, timeout=30):
        assert first > before
        assert second == first
        assert third == first
        assert after == before


def values_over_set_ups(case: Case) -> list[dict[str, Tensor]]:
    """Whole parameters before, and after a second set-up of a model that has trained two steps, without destroy."""
    model = case.build()
    engine = speedlab.initialize(model=model, optimizer=case.optimizer, config=case.config())[0]
    for step in range(2):
        engine_step(engine, case, step)
    trained = {name: speedlab.gather(p) for name, p in model.named_parameters()}
    other = replace(case, stage=(case.stage + 1) % 4)
    engine = speedlab.initialize(model=model, optimizer=case.optimizer, config=other.config())[0]
    again = {name: speedlab.gather(p) for name, p in model.named_parameters()}
    loss = engine_step(engine, other, 2)
    engine.destroy()
    return [trained, again, {"loss": torch.tensor(loss)}]


@pytest.mark.parametrize("stage", STAGES)
def test_setting_up_again_keeps_what_was_trained(two: Pool, stage: int) -> None:
    for trained, again, end in two.run(values_over_set_ups, Case(stage=stage)):
        assert [name for name in trained if not trained[name].equal(again[name])] == []
        assert torch.isfinite(end["loss"])


def use_after_destroy(case: Case) -> tuple[list[bool], list[str]]:
    """After destroy the module is an ordinary one where its parameters were whole, and its hooks are gone."""
    model = case.build()
    engine = speedlab.initialize(model=model, optimizer=case.optimizer, config=case.config())[0]
    engine_step(engine, case, 0)
    values = engine.state_dict()
    engine.destroy()
    kinds = sorted({type(p).__name__ for p in model.parameters()})
    same = [p.equal(values[name]) for name, p in model.named_parameters()]
    loss = model(*case.batch(0, 0))
    loss.backward()
    same.append(all(p.grad is not None for p in model.parameters()))
    return same, kinds


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_module_is_ordinary_after_destroy(two: Pool, stage: int) -> None:
    for same, kinds in two.run(use_after_destroy, Case(stage=stage)):
        assert all(same)
        assert kinds == ["Parameter"]


# ---- models on meta --------------------------------------------------------------------------------------------------

GLOBAL = 8
"""Micro-batches in a global batch, however many ranks there are."""


class WideBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(48, 48), nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class Deep(nn.Module):
    """Many blocks and little else, so that one block is a small share of the whole, and activations a smaller one."""

    def __init__(self, depth: int = 5) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(models.WIDTH, 48), nn.Linear(48, models.WIDTH)
        self.blocks = nn.ModuleList(WideBlock() for _ in range(depth))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return torch.nn.functional.mse_loss(self.last(x), y)


def very_deep() -> nn.Module:
    return Deep(18)


def point(step: int, index: int) -> tuple[Tensor, Tensor]:
    """A micro-batch of one row."""
    return models.points(step, index, 1)


def meta_case(stage: int, ranks: int, dtype: str = "float32") -> Case:
    return Case(
        stage=stage, build=Deep, batch=models.points, dtype=dtype, accumulation=GLOBAL // ranks, optimizer=sgd, steps=5
    )


def train_on_meta(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """The model is given as a callable; losses are means over the whole global batch."""
    with engine_for(case, model=case.build) as engine:
        start = engine.state_dict()
        losses = []
        for step in range(case.steps):
            engine_step(engine, case, step)
            losses.append(engine.totals.loss)
    return losses, start


def seeds_of_the_caller(case: Case) -> bool:
    """Whether the values are those of the configured seed, whatever the caller did with the random state before."""
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with engine_for(case, model=case.build) as engine:
            states.append(engine.state_dict())
    return all(states[0][name].equal(states[1][name]) for name in states[0])


@pytest.mark.parametrize("ranks", [1, 2, 4], indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_meta_construction_is_the_same_in_every_layout(ranks: Pool, pool_of: PoolOf, dtype: str) -> None:
    expected, start = pool_of(1).run(train_on_meta, meta_case(0, 1, dtype))[0]
    assert any(value.std() > 0.01 for value in start.values()), "the values are initialised, not zeros"
    for stage in STAGES:
        for losses, begun in ranks.run(train_on_meta, meta_case(stage, ranks.size, dtype)):
            assert losses == pytest.approx(expected, rel=2e-6 if dtype == "float32" else 1e-3), f"stage {stage}"
            assert [name for name in start if not start[name].equal(begun[name])] == [], f"stage {stage}"


def test_meta_construction_follows_the_configured_seed(two: Pool) -> None:
    assert all(two.run(seeds_of_the_caller, meta_case(3, 2)))


class LiveBytes(TorchDispatchMode):
    """The most bytes of storages (of one dtype, or of all) that were alive at once since it was entered.

    Storages that exist already are not seen. Every operation looks again, so that resized ones count as what they are,
    and addresses whose pages come and go as what is there.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self._dtype = dtype
        self._alive: dict[int, Any] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu" and self._dtype in (None, leaf.dtype):
                self._follow(leaf.untyped_storage())
        self.peak = max(self.peak, self.live())
        return result

    def live(self) -> int:
        found = [reference() for reference in self._alive.values()]
        return sum(held(storage) for storage in found if storage is not None)

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, lambda _: self._alive.pop(key, None))


def held(storage: torch.UntypedStorage) -> int:
    """Bytes of memory behind a storage: behind one that torch has not allocated, of the pages that were touched."""
    if storage.resizable():
        return storage.nbytes()
    begin = storage.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    pages = -(-(storage.data_ptr() + storage.nbytes() - begin) // mmap.PAGESIZE)
    here = (ctypes.c_ubyte * pages)()
    size = ctypes.c_size_t(pages * mmap.PAGESIZE)
    assert ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(begin), size, here) == 0, ctypes.get_errno()
    return min(storage.nbytes(), sum(page & 1 for page in here) * mmap.PAGESIZE)


@contextlib.contextmanager
def frees_early() -> Iterator[None]:
    """Constructors of these small models free parameters as those of large models do."""
    with mock.patch.multiple(construction, LEAST_BYTES=1024, BUDGET_BYTES=16 << 10):
        yield


def peaks(case: Case) -> dict[str, int]:
    """Peak bytes of float32 storages, and of all, while a model on meta is set up and makes a step."""
    small = mock.patch.object(shared_memory, "LEAST_JOINED_BYTES", 256 << 10)  # As they are outside of these pools.
    with small, frees_early(), LiveBytes(torch.float32) as singles, LiveBytes() as everything:
        engine = speedlab.initialize(model=case.build, optimizer=case.optimizer, config=case.config())[0]
        held = everything.live()
        set_up, set_up_all = singles.peak, everything.peak
        engine_step(engine, case, 0)
    engine.destroy()
    return {"set-up": set_up, "set-up, all": set_up_all, "held": held, "step": singles.peak}


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.nightly)])
def test_no_rank_ever_holds_a_whole_float32_copy(pool_of: PoolOf, dtype: str) -> None:
    """At stage 3 with 4 ranks: partitions of parameters (masters) and gradients, and a few blocks at once."""
    whole = sum(p.nbytes for p in very_deep().parameters())
    block = sum(p.nbytes for p in WideBlock().parameters())
    case = replace(meta_case(3, 4, dtype), accumulation=1, build=very_deep, batch=point)
    for rank, seen in enumerate(pool_of(4).run(peaks, case)):
        # Two partitions in float32 (master and, where it computes in float32, gradient), a block being made and
        # its copy in a flat; paddings are below a block.
        assert seen["set-up"] < 2 * whole / 4 + 3 * block, f"rank {rank}: {seen}, whole {whole}"
        assert seen["step"] < whole, f"rank {rank}: {seen}, whole {whole}"


def test_whole_copies_would_be_seen(pool_of: PoolOf) -> None:
    """The measure itself: at stage 0 every rank does hold a whole copy."""
    whole = sum(p.nbytes for p in very_deep().parameters())
    for seen in pool_of(2).run(peaks, replace(meta_case(0, 2), accumulation=1, build=very_deep, batch=point)):
        assert seen["held"] >= 2 * whole
        assert seen["set-up"] >= whole


def refuse(build: Callable[[], nn.Module]) -> str:
    try:
        speedlab.initialize(model=build, optimizer=sgd, config=Case().config())[0].destroy()
    except ValueError as error:
        return str(error)
    return "not refused"


class CannotReset(nn.Module):
    """Owns a parameter and has no reset_parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum()


class HoldsCannotReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = CannotReset()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return HoldsCannotReset()


def test_module_that_cannot_be_made_on_meta_is_named(two: Pool) -> None:
    assert two.run(refuse, HoldsCannotReset) == ["not refused"] * 2, "a constructor's values count"
    for message in two.run(refuse, on_meta):
        assert "inner" in message
        assert "CannotReset" in message
        assert "reset_parameters" in message


class NormBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(models.WIDTH, models.WIDTH), nn.BatchNorm1d(models.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.linear(x)))


class Normalised(nn.Module):
    """BatchNorm, whose buffers its own reset_parameters fills."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NormBlock() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return torch.nn.functional.mse_loss(x, y)


def buffers_on_meta(stage: int) -> tuple[list[Tensor], float]:
    case = Case(stage=stage, build=Normalised, batch=models.points)
    with engine_for(case, model=case.build) as engine:
        norm = engine.module.blocks[0].norm
        start = [norm.running_mean.clone(), norm.running_var.clone(), norm.num_batches_tracked.clone()]
        return start, engine_step(engine, case, 0)


@pytest.mark.parametrize("stage", [0, 3])
def test_batch_norm_on_meta(two: Pool, stage: int) -> None:
    for (mean, variance, count), loss in two.run(buffers_on_meta, stage):
        assert mean.eq(0).all()
        assert variance.eq(1).all()
        assert count == 0
        assert 0 < loss < 100
