"""Tensor parallelism beside the whole model in one process: losses, every gradient, and the random state.

Tolerances: sums over parts are taken in another order, a few times 2^-24 of the greatest gradient of each parameter.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from grids import thinned

from ranks import tensor_models as run
from ranks.conftest import PoolOf
from ranks.pool import Pool

GPT2_LIKE = {"position": "learned", "norm": "layer", "tied": True, "bias": True}
GPTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gpt2": GPT2_LIKE,
    "untied": {"tied": False, "bias": True},
    "full loss": {"loss": "full", "norm": "layer"},
    "dropout": {**GPT2_LIKE, "dropout": 0.2},
    "rotary with dropout": {"tied": False, "dropout": 0.2},
    "tiles": {"ffn_tile": 5, "bias": True},
}

SIZES = [2, 3, 4]


def check(pool: Pool, *args: Any, **options: Any) -> None:
    by_rank = pool.run(run.compare, *args, **options)
    wrong = [f"rank {rank}: {line}" for rank, (_, lines) in enumerate(by_rank) for line in lines]
    assert not wrong, "\n".join(wrong)
    assert all(losses == by_rank[0][0] for losses, _ in by_rank), "ranks have different losses"


@pytest.mark.parametrize(
    ("kind", "sequence", "size"),
    thinned(
        itertools.product(GPTS, [False, True], SIZES),
        lambda kind, sequence, size: (list(GPTS).index(kind) + sequence + size) % 2 == 0,
    ),
)
def test_gpt(pool_of: PoolOf, size: int, kind: str, sequence: bool) -> None:
    check(pool_of(size), run.gpt, fields=GPTS[kind], sequence=sequence, steps=2)


@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence"])
def test_checkpointed_blocks(pool_of: PoolOf, sequence: bool) -> None:
    """Recomputation repeats the collectives and the dropout masks of the forward pass."""
    fields = {**GPTS["dropout"], "ffn_tile": 5}
    check(pool_of(2), run.gpt, fields=fields, sequence=sequence, recompute=True)


HUGGING_FACE: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2 with cross-attention": ("gpt2", {"add_cross_attention": True}),
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama tied": ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
    "llama, heads that several ranks share": ("llama", {"num_key_value_heads": 1, "attention_bias": True}),
    "llama, two such heads": ("llama", {"num_key_value_heads": 2}),
    "llama, eager": ("llama", {"attn_implementation": "eager"}),
    "apertus, whose activation learns": ("apertus", {}),
    "t5": ("t5", {}),
    "t5, gated and untied": ("t5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "bert": ("bert", {}),
}


@pytest.mark.parametrize(
    ("kind", "size"),
    thinned(
        itertools.product(HUGGING_FACE, [2, 4]),
        lambda kind, size: list(HUGGING_FACE).index(kind) % 2 == (size == 4),
    ),
)
def test_hugging_face(pool_of: PoolOf, size: int, kind: str) -> None:
    name, fields = HUGGING_FACE[kind]
    check(pool_of(size), run.hugging_face, (name,), fields, steps=2)


@pytest.mark.parametrize("size", [2, 3])
def test_plan_of_a_user(pool_of: PoolOf, size: int) -> None:
    """Layers of 21 outputs, on 2 and 3 ranks; an embedding and a head that are tied, of which the plan names one."""
    plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise", "embedding": "embedding_rowwise"}
    check(pool_of(size), run.transformer, plan=plan)


@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence"])
@pytest.mark.parametrize("kind", ["plain", "gpt2", "dropout"])
def test_evaluation_and_generation_of_any_length(pool_of: PoolOf, kind: str, sequence: bool) -> None:
    for error, wrong in pool_of(4).run(run.generate_and_evaluate, GPTS[kind], sequence=sequence):
        assert error < 2e-5
        assert not wrong


def test_training_on_a_length_that_does_not_divide_is_refused(two: Pool) -> None:
    (message,) = set(two.run(run.indivisible, 11))
    assert message == (
        "sequence parallelism: a sequence of 11 tokens does not divide by tp 2; use 10 tokens, or sequence: false"
    )


@pytest.mark.parametrize(
    ("size", "dtype", "scale"),
    thinned(
        itertools.product(SIZES, ["float32", "bfloat16", "float16"], [0.1, 8.0]),
        lambda size, dtype, scale: (size + len(dtype) + (scale > 1)) % 2 == 0,
    ),
)
def test_loss_over_parts_of_the_vocabulary(pool_of: PoolOf, size: int, dtype: str, scale: float) -> None:
    """Great logits too, of which one rank has those of a token and the other ranks none that counts."""
    for wrong in pool_of(size).run(run.losses_over_parts, getattr(torch, dtype), scale):
        assert not wrong


def test_loss_where_no_target_counts(two: Pool) -> None:
    assert two.run(run.losses_over_parts, torch.float32, 1.0, counted=False) == [[], []]


def test_gradients_of_inputs_first_and_of_weights_later(two: Pool) -> None:
    assert two.run(run.inputs_then_weights) == [[], []]


@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence"])
def test_gloo(pool_of: PoolOf, sequence: bool) -> None:
    check(pool_of(2, "gloo"), run.gpt, fields=GPTS["gpt2"], sequence=sequence)


@pytest.mark.parametrize("backend", ["shared", "gloo"])
def test_bfloat16(pool_of: PoolOf, backend: str) -> None:
    """Within the rounding of 2^-8 that every layer adds; all ranks have the same bits."""
    check(pool_of(4, backend), run.gpt, fields=GPTS["gpt2"], dtype=torch.bfloat16, tolerance=0.06)


def test_bytes_of_a_step(two: Pool) -> None:
    """A sum of (B, T, C) for each half of a block, one for the embedding, one before the head; queries, keys and values
    of one input are one. Under sequence parallelism each sum is a reduce-scatter and a gather."""
    whole, sums = 3 * 12 * 48 * 4, 2 * 2 + 2 * 2 + 2
    loss = 2 * 3 * 12 * 8
    (sent,) = {tuple(each.items()) for each in two.run(run.traffic_of_a_step, run.gpt)}
    assert dict(sent) == {"all_reduce": sums * whole, "all_gather": loss}
    (sent,) = {tuple(sorted(each.items())) for each in two.run(run.traffic_of_a_step, run.gpt, sequence=True)}
    # Forward: 4 gathers for the cut layers, 1 for the head; backward: 4 for the others, 1 for the embedding.
    assert dict(sent) == {
        "all_gather": 10 * whole // 2 + loss,
        "all_reduce": whole,
        "reduce_scatter": 9 * whole // 2,
    }
    (sent,) = {each["all_reduce"] for each in two.run(run.traffic_of_a_step, run.hugging_face, "llama")}
    assert sent == sums * 3 * 12 * 32 * 4
