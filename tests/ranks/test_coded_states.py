"""Moments in 8 bits and no masters: as defined, the same bits wherever they lie, and as few bytes as they should be."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import speedlab
from cuda_ops.adamw import adamw_reference
from cuda_ops.blockwise8 import blockwise8_decode_reference, blockwise8_encode_reference
from cuda_ops.stochastic import round_stochastically_reference
from ranks import models
from ranks.conftest import PoolOf
from ranks.loops import Case, adamw, sgd, train_cases
from ranks.test_offload import travel
from speedlab.config import ConfigError
from speedlab.models import GPT

EIGHT = (("moments", "8bit"),)
NONE = (("masters", "none"),)
KINDS = {"8bit": EIGHT, "none": NONE, "both": EIGHT + NONE}
PLACES = [(), (("optimizer", "host"),), (("optimizer", "disk"),), (("optimizer", "disk"), ("parameters", "disk"))]
DISK_ONLY = [(("optimizer", "disk"), ("parameters", "host"))]


def case(kind: str, **fields: Any) -> Case:
    dtype = "float32" if kind == "8bit" else "bfloat16"
    build = models.transformer if dtype == "float32" else models.rounded_transformer
    return Case(**{"dtype": dtype, "build": build, "precision": KINDS[kind], "optimizer": adamw, "steps": 5, **fields})


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_wherever_states_lie(pool_of: PoolOf, size: int, kind: str) -> None:
    """At every stage, too: blocks of codes and what is rounded at random are counted from where the flat begins."""
    clips = {0: 0.3, 1: None, 2: 0.3, 3: None}
    cases = []
    for stage, clip in clips.items():
        of_stage = case(kind, stage=stage, clip_norm=clip, accumulation=1 + stage % 2)
        places = PLACES + DISK_ONLY if stage == 3 else PLACES[:3]
        cases += [(stage, replace(of_stage, offload=place)) for place in places]
    for rank, paths in enumerate(pool_of(size).run(train_cases, [each for _, each in cases])):
        here = {stage: path for (stage, each), path in zip(cases, paths, strict=True) if not each.offload}
        for (stage, each), path in zip(cases, paths, strict=True):
            assert path.losses == here[stage].losses, f"rank {rank}, {each}"
            different = [n for n, p in path.parameters.items() if not p.equal(here[stage].parameters[n])]
            assert not different, f"rank {rank}, {each}: {different}"
        assert here[0].losses[0] == here[2].losses[0]


ROUTE = [
    {"zero": 3, "offload": {"optimizer": "disk", "parameters": "disk"}},
    {"zero": 1, "offload": {"optimizer": "host", "parameters": "none"}},
    {"zero": 0, "offload": {"optimizer": "none"}},
    {"zero": 3, "offload": {"optimizer": "disk", "parameters": "host"}},
    {"zero": 2, "offload": {"optimizer": "none", "parameters": "none"}},
]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_they_travel_and_lose_no_bit(pool_of: PoolOf, tmp_path: Path, size: int, kind: str) -> None:
    """Reshapes, saves and loads: codes that are decoded and encoded again are the same codes."""
    moving, pool = case(kind, stage=2, accumulation=3 - size, clip_norm=0.3), pool_of(size)
    stays = pool.run(travel, moving, [{} for _ in ROUTE], None)[0]
    for folder in (None, str(tmp_path / "checkpoints")):
        for losses, state in pool.run(travel, moving, ROUTE, folder):
            assert losses == stays[0]
            assert not [name for name, value in state.items() if not value.equal(stays[1][name])]


@pytest.mark.parametrize("optimizer", [sgd, torch.optim.Adam, torch.optim.RMSprop])
def test_any_elementwise_optimizer(pool_of: PoolOf, optimizer: Any) -> None:
    """What torch has no kernel of ours for is updated in a visit as well."""
    whole = case("8bit", optimizer=optimizer, stage=1)
    coarse, fine = pool_of(2).run(train_cases, [whole, replace(whole, precision=())])[0]
    assert coarse.losses[0] == fine.losses[0]
    assert coarse.losses[2:] != fine.losses[2:], "nothing was coded"
    torch.testing.assert_close(coarse.losses, fine.losses, rtol=0.02, atol=0)


def linear() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(40, 25, bias=False)


def reference(steps: int) -> torch.Tensor:
    """Both codecs written out for the one flat of `linear`, padded to whole blocks."""
    weight: torch.Tensor = linear().weight.detach().to(torch.bfloat16)
    states = [blockwise8_encode_reference(torch.zeros(1024), signed=signed) for signed in (True, False)]
    for step in range(steps):
        own = weight.clone().requires_grad_()
        loss = (torch.arange(40, dtype=torch.bfloat16).sin() @ own.T).float().square().mean() * (step + 1)
        loss.backward()
        moments = [torch.empty(1024), torch.empty(1024)]
        for (codes, scales), moment, signed in zip(states, moments, (True, False), strict=True):
            blockwise8_decode_reference(codes, scales, moment, signed=signed)
        master, gradient = torch.zeros(1024), torch.zeros(1024)
        assert own.grad is not None
        master[:1000], gradient[:1000] = weight.float().flatten(), own.grad.float().flatten()
        numbers = {"lr": 0.003, "beta1": 0.9, "beta2": 0.999, "eps": 1e-5, "weight_decay": 0.05}
        adamw_reference(master, gradient, *moments, **numbers, step=step + 1)
        states = [blockwise8_encode_reference(m, signed=s) for m, s in zip(moments, (True, False), strict=True)]
        seed = zlib.crc32(b"weight")
        weight = round_stochastically_reference(master, seed, step, 0)[:1000].view(25, 40)
    return weight


def train_linear(steps: int) -> tuple[torch.Tensor, str, dict[str, int]]:
    config = {"zero": 0, "precision": {"dtype": "bfloat16", "masters": "none", "moments": "8bit"}, "batch": {}}
    engine, *_ = speedlab.initialize(model=linear(), optimizer=adamw, config=config)
    for step in range(steps):
        made = engine(torch.arange(40, dtype=torch.bfloat16).sin())
        engine.backward(made.float().square().mean() * (step + 1))
        engine.step()
    weight = engine.module.get_parameter("weight").detach().clone()
    name, ledger = engine.flats[0].name, engine.ledger()
    engine.destroy()
    keys = ("parameters", "gradients", "master_weights", "optimizer_moments")
    return weight, name, {key: getattr(ledger, key) for key in keys}


def test_as_defined(pool_of: PoolOf) -> None:
    weight, name, held = pool_of(1).run(train_linear, 6)[0]
    assert name == "root/bfloat16"
    # The kernel fuses products and sums, so that one element in a thousand may be rounded to its neighbour.
    different = (weight != reference(6)).float().mean().item()
    assert different < 0.01
    # 1,000 elements, 1,024 with padding: two bytes of a parameter, two of moments, 16 more a block.
    assert held["parameters"] == 2048
    assert held["master_weights"] == 0
    assert held["optimizer_moments"] == 2 * (1024 + 16)


def refused(precision: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as reported:
        speedlab.initialize(model=linear(), config={"precision": precision})
    return str(reported.value)


def test_masters_are_left_out_in_bfloat16_only(pool_of: PoolOf) -> None:
    text = pool_of(1).run(refused, {"dtype": "float32", "masters": "none"})[0]
    assert text == (
        "precision.masters 'none' needs precision.dtype bfloat16, whose updates are rounded stochastically, and it is "
        "float32; set precision.dtype to 'bfloat16', or precision.masters to 'float32'"
    )


def whole_ones(precision: dict[str, str]) -> dict[str, torch.Tensor]:
    """What this rank has, after a few steps, of parameters that every tensor rank holds whole."""
    model = {"layers": 2, "hidden": 48, "heads": 4, "ffn_hidden": 80, "vocab_size": 37, "context": 16}
    shape = {**model, "position": "learned", "norm": "layer", "bias": True}
    config = speedlab.RunConfig(
        model=shape,
        data={"sequence_length": 16, "tokenizer": "bytes"},
        parallel={"tp": 2},
        zero={"stage": 0, "bucket_bytes": 1},
        precision=precision,
        batch={"micro_size": 2},
    )
    engine, *_ = speedlab.initialize(model=lambda: GPT(config.model), config=config)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        rows = torch.randint(37, (2, 17), generator=generator)
        engine.train_batch([(rows[:, :-1], rows[:, 1:])])
    named = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
    found = {row.name: named[row.name] for row in engine.placement.rows if not row.cut_over}
    engine.destroy()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_copies_on_tensor_ranks_stay_copies(pool_of: PoolOf, kind: str) -> None:
    """They lie at the same places of flats of their own, whatever else a rank has."""
    precision = {"dtype": "float32" if kind == "8bit" else "bfloat16", **dict(KINDS[kind])}
    first, second = pool_of(2).run(whole_ones, precision)
    assert "positions.weight" in first
    assert len(first) > 8
    assert not [name for name, value in first.items() if not value.equal(second[name])]
