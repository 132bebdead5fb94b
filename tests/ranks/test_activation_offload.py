"""Inputs of checkpointed blocks that are cut over tensor ranks: the same training, to the bit, in less memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import speedlab
from ranks.conftest import PoolOf
from ranks.layout_cases import LayoutCase, gpt, gpt_loss, labels_loss, llama, long_tokens, sparse_gpt, untied_gpt2
from ranks.loops import Trajectory
from ranks.test_context import by_tokens, in_ring, long_gpt, many, ring_gpt
from ranks.test_layouts import FLOAT32, PlainOf, check
from ranks.test_selective import train
from speedlab.comm import CommStats, Group
from speedlab.config import ConfigError
from speedlab.engine.activation_checkpointing import KeptInputs
from speedlab.layout import Layout

CUT: dict[str, Any] = {"checkpointing": "block", "partition_inputs": True, "steps": 3}


EACH_KIND: list[dict[str, Any]] = [
    {"layout": Layout(tp=2, dp=2), "stage": 3, "build": untied_gpt2},
    {"layout": Layout(tp=2, dp=2), "stage": 1, "build": llama, "loss": labels_loss, "accumulation": 1},
    {"layout": Layout(tp=2, pp=2), "stage": 1, "schedule": "zero-bubble", "checkpointing": "selective"},
    {"layout": Layout(tp=2, cp=2), "stage": 3, "cp_heads": 1, "build": long_gpt, "batch": many},
]
MORE: list[dict[str, Any]] = [
    {"layout": Layout(tp=2, dp=2), "stage": 0, "checkpointing": "selective"},
    {"layout": Layout(tp=2, pp=2), "stage": 2, "schedule": "interleaved"},
    {"layout": Layout(tp=4), "stage": 0},
]


@pytest.mark.parametrize(
    "options", [EACH_KIND, pytest.param(MORE, marks=pytest.mark.nightly)], ids=["each kind", "more"]
)
def test_as_the_plain_loop(pool_of: PoolOf, plain: PlainOf, options: list[dict[str, Any]]) -> None:
    check(pool_of, plain, [LayoutCase(**{**CUT, **each}) for each in options], FLOAT32, timeout=120)


def test_rings_are_as_the_plain_loop(pool_of: PoolOf, plain: PlainOf) -> None:
    ring = LayoutCase(layout=Layout(tp=2, cp=2), stage=1, cp_heads=1, build=ring_gpt, batch=in_ring, **CUT)
    check(pool_of, plain, [ring], FLOAT32, timeout=120, build=by_tokens)


AWAY = (("optimizer", "host"), ("activations", "host"))

BITS: list[dict[str, Any]] = [
    {"build": partial(gpt, dropout=0.2), "stage": 1},
    {"build": gpt, "stage": 2, "checkpointing": "selective"},
    {"build": sparse_gpt, "batch": long_tokens, "stage": 3, "dtype": "bfloat16", "offload": AWAY},
]


def whole_and_cut(cases: list[LayoutCase]) -> list[list[tuple[Trajectory, dict[str, int], int]]]:
    return [[train(replace(case, partition_inputs=cut)) for cut in (False, True)] for case in cases]


def test_to_the_bit_in_fewer_bytes(pool_of: PoolOf) -> None:
    cases = [LayoutCase(**{**CUT, "layout": Layout(tp=2), "accumulation": 2, **each}) for each in BITS]
    for of_rank in pool_of(2).run(whole_and_cut, cases, timeout=120):
        for case, ((whole, sent, most), (cut, more, fewer)) in zip(cases, of_rank, strict=True):
            assert (cut.losses, cut.norms) == (whole.losses, whole.norms), case
            for name, expected in whole.parameters.items():
                assert torch.equal(cut.parameters[name], expected), (str(case), name)
            # Of each block the half of what the peer gathers, in each of two micro-batches.
            config = case.build().config
            tokens = 2 * (41 if case.batch is long_tokens else 7)
            part = tokens * config.hidden * (2 if case.dtype == "bfloat16" else 4) // 2
            assert more["all_gather"] - sent.get("all_gather", 0) == 2 * config.layers * part, case
            # At the peak one of them is whole.
            assert most - fewer >= (config.layers - 2) * part, case


# ---- by themselves ---------------------------------------------------------------------------------------------------


def odd_inputs() -> list[bool]:
    """Of a block whose inputs the ranks do not divide: whether everything is as it is without."""
    ranks = Group(range(dist.get_world_size()), CommStats(), torch.device("cpu"))
    layer = nn.Tanh()
    found = []
    for shape in ((3, 5), (1,), (0, 4), (2, 3, 4)):
        grown = torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape).requires_grad_()
        table = torch.full(shape, 2.0)

        def block(x: Tensor, factor: Tensor, *, layer: nn.Module = layer) -> Tensor:
            return layer(x * factor).exp()

        again = partial(checkpoint, block, use_reentrant=False)
        results = []
        for forward in (block, KeptInputs(ranks=ranks, stores=None).around(again, layer, "tanh")):
            y = forward(grown.mT.sin() if len(shape) > 1 else grown.sin(), table.mT if len(shape) > 1 else table)
            results.append((y.detach(), torch.autograd.grad(y.sum(), grown)[0]))
        found.append(all(torch.equal(a, b) for a, b in zip(*results, strict=True)))
    return found


def test_inputs_of_any_size(pool_of: PoolOf) -> None:
    assert pool_of(2).run(odd_inputs, timeout=60) == [[True] * 4] * 2


# ---- what is refused -------------------------------------------------------------------------------------------------


def refused(case: LayoutCase) -> str:
    """Units inside a layer that is cut have inputs of their own on every rank."""
    engine: Any = speedlab.initialize(
        model=case.build(),
        optimizer=case.optimizer,
        config=case.config(),
        units=lambda name, module: name.endswith("mlp.down"),
    )[0]
    try:
        with pytest.raises(ConfigError) as reported:
            engine.train_batch([case.batch(0, 0)])
        return str(reported.value)
    finally:
        engine.destroy(keep_parameters=False)


def test_inputs_that_differ_are_refused_on_all_ranks(pool_of: PoolOf) -> None:
    case = LayoutCase(layout=Layout(tp=2), stage=0, loss=gpt_loss, accumulation=1, **CUT)
    reported = pool_of(2).run(refused, case, timeout=60)
    assert reported[0] == reported[1]
    assert reported[0].startswith(
        "activation.partition_inputs: the input of blocks.0.mlp.down is not the same on all 2 tensor ranks, so that"
    )
