"""Sequences that are cut over ranks (`speedlab/parallel/context`): parity with one process, and what is refused."""

from __future__ import annotations

import itertools
import re
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
from ranks.layout_cases import LayoutCase, gpt, masked_gpt, rounded_gpt, sparse_gpt, train_layout, train_layouts
from ranks.loops import Trajectory, adamw, problems
from ranks.test_layouts import BFLOAT16, FLOAT32, SCHEDULES, PlainOf, check
from speedlab.comm import CommStats, Group
from speedlab.config import AttentionConfig, ConfigError, ModelConfig, ParallelConfig, RunConfig
from speedlab.config.attention import seen_blocks
from speedlab.config.layout_rules import ring_needs
from speedlab.layout import Layout, LayoutError, own_positions
from speedlab.models import GPT
from speedlab.parallel.context import check_model
from speedlab.parallel.context.sparse_ring_attention import sparse_ring_attention

LOW: dict[str, Any] = {"dtype": "bfloat16", "whole": False}


def rows_of(length: int, step: int, index: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets (2, length), of which some do not count: all that some ranks have, among them."""
    generator = torch.Generator().manual_seed(1_000_003 * step + index)
    rows = torch.randint(models.VOCABULARY, (2, length + 1), generator=generator)
    targets = (rows[:, 1:] + rows[:, :-1]) % models.VOCABULARY
    targets[:, : length // 4] = -100
    return rows[:, :-1], targets


eight, sixteen, many = partial(rows_of, 8), partial(rows_of, 16), partial(rows_of, 48)


def long_gpt(**changes: Any) -> nn.Module:
    shape: dict[str, Any] = {
        "layers": 4,
        "hidden": 24,
        "heads": 4,
        "ffn_hidden": 32,
        "vocab_size": models.VOCABULARY,
        "context": 48,
    }
    return models.seeded(GPT, ModelConfig(**(shape | changes)))


def learned() -> nn.Module:
    return long_gpt(tied=False, position="learned", norm="layer", bias=True)


@pytest.mark.parametrize(
    ("cp_heads", "stages"),
    thinned(itertools.product((1, 2, 4), ((0, 2), (1, 3))), lambda heads, stages: (heads == 2) == (0 in stages)),
)
def test_ring_heads_and_both(pool_of: PoolOf, plain: PlainOf, cp_heads: int, stages: tuple[int, ...]) -> None:
    cases = [
        LayoutCase(layout=Layout(cp=4), stage=stage, cp_heads=cp_heads, batch=batch, build=build)
        for stage, batch, build in ((0, eight, gpt), (1, many, long_gpt), (2, sixteen, learned), (3, many, learned))
        if stage in stages
    ]
    check(pool_of, plain, cases, FLOAT32, timeout=120)


@pytest.mark.parametrize(
    ("layout", "stages"),
    thinned(
        itertools.product((Layout(cp=2, dp=2), Layout(cp=2, tp=2), Layout(cp=2, pp=2)), ((0, 3), (1, 2))),
        lambda layout, stages: layout.pp > 1 or (layout.tp > 1) == (0 in stages),
    ),
    ids=str,
)
def test_with_every_other_axis(pool_of: PoolOf, plain: PlainOf, layout: Layout, stages: tuple[int, ...]) -> None:
    cases = [
        LayoutCase(
            layout=layout,
            stage=stage,
            cp_heads=1 + stage % 2,
            build=learned if stage > 1 else long_gpt,
            batch=many,
            checkpointing="block" if stage in (0, 3) else "none",
            sequence=layout.tp > 1 and stage > 1,
            schedule=SCHEDULES[stage] if layout.pp > 1 else "1f1b",
            optimizer=adamw,
        )
        for stage in stages
    ]
    check(pool_of, plain, cases, FLOAT32, timeout=120)


@pytest.mark.parametrize(
    ("layout", "stage", "cp_heads"),
    [
        (Layout(cp=4), 3, 1),
        (Layout(cp=2, tp=2), 2, 2),
        pytest.param(Layout(cp=4), 1, 2, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_bfloat16(pool_of: PoolOf, plain: PlainOf, layout: Layout, stage: int, cp_heads: int) -> None:
    case = LayoutCase(layout=layout, stage=stage, cp_heads=cp_heads, build=rounded_gpt, batch=eight, **LOW)
    check(pool_of, plain, [case], BFLOAT16, timeout=120)


def test_sparse_attention(pool_of: PoolOf, plain: PlainOf) -> None:
    """All ranks share heads."""
    cases = [
        LayoutCase(layout=layout, stage=stage, build=sparse_gpt, batch=many, accumulation=2)
        for layout, stage in ((Layout(cp=4), 3), (Layout(cp=2, dp=2), 1), (Layout(cp=2, tp=2), 2))
    ]
    check(pool_of, plain, cases, FLOAT32, timeout=120, build=masked_gpt)


PATTERNS: dict[str, dict[str, Any]] = {
    "sliding": {"window": 21},
    "wide": {"window": 45},
    "fixed": {"pattern": "fixed", "window": 32},
    "longformer": {"pattern": "longformer", "window": 16},
    "bigbird": {"pattern": "bigbird", "window": 16, "random_blocks": 1, "seed": 3},
    "strided": {"pattern": "strided", "window": 16, "stride": 48},
    # Rows of which some see nothing of their own rank; block 5 is seen by nobody behind it.
    "custom": {
        "pattern": "custom",
        "mask": tuple(row.ljust(8, ".") for row in ["x", "x", ".xx", "x", "..x.x", "x....x", "xx", "...x"]),
    },
}


def ring_gpt(pattern: str = "sliding") -> nn.Module:
    attention = AttentionConfig(kind="block_sparse", block=16, **PATTERNS[pattern])
    shape: dict[str, Any] = {
        "layers": 4,
        "hidden": 64,
        "heads": 4,
        "ffn_hidden": 32,
        "vocab_size": models.VOCABULARY,
        "context": 128,
    }
    return models.seeded(GPT, ModelConfig(**shape, attention=attention))


class MaskedByTokens(nn.Module):
    def __init__(self, attention: AttentionConfig) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """From the pattern's definition: blocks, then the causal mask and the window in tokens."""
        place = torch.arange(q.shape[2])
        rows = seen_blocks(self.attention, q.shape[2])
        seen = torch.tensor([[key in row for key in range(len(rows))] for row in rows])
        seen = seen[place // 16][:, place // 16] & (place[:, None] >= place)
        if self.attention.pattern == "sliding":
            seen &= place[:, None] - place < self.attention.window
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def by_tokens(pattern: str = "sliding") -> nn.Module:
    """`ring_gpt` as dense attention with a mask."""
    model: Any = ring_gpt(pattern)
    for block in model.blocks:
        block.attention.attend = MaskedByTokens(model.config.attention)
    return model


in_ring = partial(rows_of, 128)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_pattern_in_a_ring(pool_of: PoolOf, plain: PlainOf, pattern: str) -> None:
    """Of four, of two, and of two of which each shares heads."""
    number = list(PATTERNS).index(pattern)
    build, masked = partial(ring_gpt, pattern), partial(by_tokens, pattern)
    options = {"build": build, "batch": in_ring, "accumulation": 1, "steps": 2}
    cases = [
        LayoutCase(layout=Layout(cp=4), stage=number % 4, cp_heads=1, **options),
        LayoutCase(layout=Layout(cp=4), stage=(number + 2) % 4, cp_heads=2, **options),
    ]
    check(pool_of, plain, cases, FLOAT32, timeout=120, build=masked)


def test_a_sparse_ring_with_every_other_axis(pool_of: PoolOf, plain: PlainOf) -> None:
    options: list[dict[str, Any]] = [
        {"layout": Layout(cp=2, dp=2), "stage": 3, "build": partial(ring_gpt, "bigbird"), "checkpointing": "block"},
        {"layout": Layout(cp=2, tp=2), "stage": 1, "build": partial(ring_gpt, "wide")},
        {"layout": Layout(cp=2, tp=2), "stage": 2, "sequence": True, "build": partial(ring_gpt, "fixed")},
        {"layout": Layout(cp=2, pp=2), "stage": 1, "schedule": "zero-bubble", "build": partial(ring_gpt, "strided")},
        {"layout": Layout(cp=2, pp=2), "stage": 2, "checkpointing": "block", "build": partial(ring_gpt, "custom")},
    ]
    for each in options:
        case = LayoutCase(cp_heads=1, batch=in_ring, accumulation=2, steps=2, **each)
        check(pool_of, plain, [case], FLOAT32, timeout=120, build=partial(by_tokens, *each["build"].args))


def attend_in_ring(attention: AttentionConfig, lengths: tuple[int, ...], dtype: torch.dtype) -> list[tuple[Any, ...]]:
    """For each length: this rank's output and gradients, beside those of one process; bytes sent in each pass."""
    size, found = dist.get_world_size(), []
    traffic = CommStats()
    ring = Group(range(size), traffic, torch.device("cpu"), channel="cp ring")
    for length in lengths:
        draw = torch.Generator().manual_seed(length)
        q, k, v, incoming = (torch.randn(2, 2, length, 16, generator=draw).to(dtype) for _ in range(4))
        wide = [each.double().requires_grad_() for each in (q, k, v)]
        y = MaskedByTokens(attention)(*wide)
        expected = [y.detach(), *torch.autograd.grad(y, wide, incoming.double())]
        places = torch.cat([torch.tensor(part) for part in own_positions(length, size, 1, ring.index)])
        own = [each[:, :, places].requires_grad_() for each in (q, k, v)]
        traffic.take()
        mine = sparse_ring_attention(own[0], own[1], own[2], attention, ring)
        forward = traffic.take().sent_bytes.get("send", 0)
        got = [mine.detach(), *torch.autograd.grad(mine, own, incoming[:, :, places])]
        backward = traffic.take().sent_bytes.get("send", 0)
        pairs = [(a, b[:, :, places]) for a, b in zip(got, expected, strict=True)]
        found.append((pairs, forward, backward))
    return found


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_sparse_ring_by_itself(pool_of: PoolOf, pattern: str, dtype: torch.dtype, allowed: float) -> None:
    attention = AttentionConfig(kind="block_sparse", block=16, **PATTERNS[pattern])
    lengths = (128,) if pattern == "custom" else (128, 256)
    for size in (2, 4):
        for index, found in enumerate(pool_of(size).run(attend_in_ring, attention, lengths, dtype, timeout=60)):
            for length, (pairs, forward, backward) in zip(lengths, found, strict=True):
                for mine, expected in pairs:
                    torch.testing.assert_close(mine.double(), expected, rtol=allowed, atol=allowed)
                needed = ring_needs(attention, length, size).needed
                sent = sum(len(needed[rank][index]) for rank in range(size) if rank != index)
                asked = sum(len(needed[index][rank]) for rank in range(size) if rank != index)
                block_bytes = 2 * 2 * 2 * 16 * 16 * dtype.itemsize  # Keys and values of two heads of two sequences.
                assert (forward, backward) == (sent * block_bytes, (sent + asked) * block_bytes)


def test_a_window_does_not_send_everything_round() -> None:
    """Of one chunk: from each end of a rank's chunks what is one before, rather than all that three others have."""
    attention = AttentionConfig(kind="block_sparse", block=16, window=64)
    needs = ring_needs(attention, 8 * 64, 4)
    assert needs.turns == (1, 3)
    assert [sum(map(len, needs.needed[rank])) - len(needs.needed[rank][rank]) for rank in range(4)] == [4, 8, 8, 4]


def test_dropout_drops_what_one_process_drops(pool_of: PoolOf) -> None:
    """Beside an engine on one rank, whose random streams are the same."""
    build = partial(long_gpt, dropout=0.2)
    cases = [
        LayoutCase(layout=layout, stage=1, build=build, batch=many, accumulation=1, sequence=sequence, whole=False)
        for layout, sequence in ((Layout(cp=4), False), (Layout(cp=2, tp=2), False), (Layout(cp=2, tp=2), True))
    ]
    cases += [replace(cases[0], cp_heads=1), replace(cases[0], cp_heads=2, checkpointing="block")]
    cases += [replace(cases[2], cp_heads=1), replace(cases[0], cp_heads=1, checkpointing="selective")]
    # Stages of one rank share the dropout behind the embedding.
    cases.append(replace(cases[0], layout=Layout(cp=2, pp=2), schedule="interleaved"))
    (alone,) = pool_of(1).run(train_layouts, [replace(cases[0], layout=Layout())], timeout=60)[0]
    alone.start = {name: parameter.detach() for name, parameter in build().named_parameters()}
    for paths in pool_of(4).run(train_layouts, cases, timeout=120):
        for path in paths:
            assert problems([path], alone, FLOAT32) == []


def test_padded_sequences_train_as_whole_ones(pool_of: PoolOf, plain: PlainOf) -> None:
    """Of 45 tokens, up to 48; positions end at 48, the last block of sparse attention has 13 tokens, and what counts
    of a sequence lies on some ranks only. A user's loss sees logits of 45."""
    options: dict[str, Any] = {"build": learned, "batch": partial(rows_of, 45), "cp_pad": True}
    cases = [
        LayoutCase(layout=Layout(cp=4), stage=3, cp_heads=1, checkpointing="block", **options),
        LayoutCase(layout=Layout(cp=4), stage=1, cp_heads=4, **options),
        LayoutCase(layout=Layout(cp=2, tp=2), stage=2, sequence=True, **options),
        LayoutCase(layout=Layout(cp=2, pp=2), stage=1, schedule="interleaved", **options),
        LayoutCase(layout=Layout(cp=4), stage=0, **{**options, "batch": partial(rows_of, 2)}),
    ]
    check(pool_of, plain, cases, FLOAT32, timeout=120)
    check(pool_of, plain, [replace(cases[1], build=sparse_gpt)], FLOAT32, timeout=120, build=masked_gpt)
    own = LayoutCase(layout=Layout(cp=2), stage=1, cp_heads=1, loss=penalised, accumulation=2, **options)
    for path in pool_of(2).run(train_layout, own, own_loss=True, timeout=120):
        assert problems([path], plain(own.plain(), 1), FLOAT32) == []


def padding_refusals(case: LayoutCase) -> list[str]:
    """What a step of 45 tokens says, and that one of 48 works."""
    reported = []
    for changes in ({}, {"cp_pad": True, "build": partial(long_gpt, dropout=0.2)}):
        own = replace(case, **changes)
        engine: Any = speedlab.initialize(model=own.build(), optimizer=own.optimizer, config=own.config())[0]
        try:
            with pytest.raises(LayoutError) as error:
                engine.train_batch([rows_of(45, 0, 0)] * own.accumulation)
            reported.append(str(error.value))
            engine.train_batch([rows_of(48, 0, 0)] * own.accumulation)
        finally:
            engine.destroy(keep_parameters=False)
    return reported


@pytest.mark.parametrize("layout", [Layout(cp=2), Layout(cp=2, pp=2)], ids=str)
def test_a_length_that_cp_does_not_divide_is_refused_in_ones_own_loop(pool_of: PoolOf, layout: Layout) -> None:
    case = LayoutCase(layout=layout, build=long_gpt, batch=many, stage=0)
    rule = "parallel.cp 2: a sequence of 45 tokens does not divide by 2"
    for reported in pool_of(layout.world_size).run(padding_refusals, case, timeout=90):
        assert reported == [
            f"{rule}; 44 or 46 would, or set parallel.cp_pad to true, which pads them to 46",
            f"{rule}, and dropout 0.2 would drop other elements of a longer sequence; set model.dropout to 0, or use "
            "lengths that cp divides",
        ]


def penalised(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A term that every rank computes whole, beside the loss of its own tokens and one of the logits."""
    logits = model(batch[0]).logits
    square = sum(parameter.square().sum() for parameter in model.parameters())
    return model(*batch).loss + 0.05 * square + 0.1 * logits.float().logsumexp(-1).square().mean()


@pytest.mark.parametrize("cp_heads", [1, 2])
def test_terms_of_a_loss_of_the_users_count_once(pool_of: PoolOf, plain: PlainOf, cp_heads: int) -> None:
    options: dict[str, Any] = {"build": long_gpt, "batch": many, "loss": penalised, "accumulation": 2}
    case = LayoutCase(layout=Layout(cp=2), stage=1, cp_heads=cp_heads, **options)
    for path in pool_of(2).run(train_layout, case, own_loss=True, timeout=120):
        assert problems([path], plain(case.plain(), 1), FLOAT32) == []


def break_the_ring(case: LayoutCase, turn: int) -> Trajectory:
    """Before step 1 a pass in which attention raises on every rank, in the forward or (from 6 on) the backward."""
    from speedlab.parallel.context import ring_attention

    path, attend = Trajectory(), (ring_attention._attend, ring_attention._attend_backward)
    calls = [-1]

    def fail(which: int) -> Any:
        def kernel(*args: Any, **named: Any) -> Any:
            calls[0] -= 1
            if calls[0] == -1:
                raise ZeroDivisionError("in this turn")
            return attend[which](*args, **named)

        return kernel

    engine: Any = speedlab.initialize(model=case.build(), optimizer=case.optimizer, config=case.config())[0]
    try:
        ring_attention._attend, ring_attention._attend_backward = fail(0), fail(1)
        for step in range(case.steps):
            if step == 1:
                calls[0] = turn
                with pytest.raises(ZeroDivisionError):
                    engine.train_batch([rows_of(48, 99, 0)])
                calls[0] = -1
            path.losses.append(engine.train_batch([rows_of(48, step, 0)]))
            path.norms.append(engine.global_grad_norm)
        path.parameters = engine.state_dict()
    finally:
        ring_attention._attend, ring_attention._attend_backward = attend
        engine.destroy(keep_parameters=False)
    return path


@pytest.mark.parametrize("backend", ["shared", "gloo"])
def test_a_step_after_a_broken_ring(pool_of: PoolOf, plain: PlainOf, backend: str) -> None:
    """What was under way when attention raised is never taken for something else, and holds nobody up."""
    case = LayoutCase(layout=Layout(cp=2), stage=0, cp_heads=1, build=long_gpt, batch=many, accumulation=1, steps=4)
    for turn in (0, 3, 9):
        for path in pool_of(2, backend).run(break_the_ring, case, turn, timeout=60):
            assert problems([path], plain(case.plain(), 1), FLOAT32) == []


def uncounted(layout: Layout) -> tuple[float, float, float]:
    """(loss, norm) of a micro-batch in which no target counts beside one in which some do; and what a step leaves."""
    config = {"parallel": {"cp": layout.cp, "cp_heads": 1}, "precision": "float32", "batch": {"accumulation": 2}}
    engine: Any = speedlab.initialize(model=long_gpt(), config={**config, "zero": {"stage": 0}})[0]
    try:
        tokens, targets = rows_of(48, 0, 0)
        losses = engine.train_batch([(tokens, torch.full_like(targets, -100)), (tokens, targets)])
        return losses, engine.global_grad_norm, float(engine.state_dict()["norm.weight"].sum())
    finally:
        engine.destroy(keep_parameters=False)


def test_a_micro_batch_without_a_counted_target_has_no_gradient(pool_of: PoolOf) -> None:
    """It adds nothing to the loss either: loss and gradient are those of the other micro-batch."""
    model, (tokens, targets) = long_gpt(), rows_of(48, 0, 0)
    plain = torch.nn.functional.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten())
    plain.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    (alone,) = pool_of(1).run(uncounted, Layout(), timeout=60)
    assert alone[0] == pytest.approx(plain.item(), rel=1e-5)
    assert alone[1] == pytest.approx(float(torch.nn.utils.get_total_norm(gradients)), rel=1e-5)
    for loss, norm, left in pool_of(2).run(uncounted, Layout(cp=2), timeout=60):
        assert loss == pytest.approx(alone[0], rel=1e-5)
        assert norm == pytest.approx(alone[1], rel=1e-5)
        assert left == pytest.approx(alone[2], rel=1e-6)


class Windowed(nn.Module):
    """Somebody's own attention."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril().triu(-4)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def windowed() -> nn.Module:
    model: Any = long_gpt()
    for block in model.blocks:
        block.attention.attend = Windowed()
    return model


def test_an_attention_of_the_users_is_kept_or_refused(pool_of: PoolOf, plain: PlainOf) -> None:
    case = LayoutCase(layout=Layout(cp=2), stage=1, build=windowed, batch=many, accumulation=1)
    check(pool_of, plain, [case], FLOAT32, timeout=60)
    reported = pool_of(2).run(refused, windowed(), {"cp_heads": 1}, timeout=30)
    assert all("the attention of this model is a Windowed of its own" in each for each in reported)


def test_on_other_devices_a_sparse_ring_is_refused() -> None:
    layout, model = Layout(cp=2), ring_gpt()
    assert check_model(model, layout, ParallelConfig(cp=2, cp_heads=1), "cpu") is model
    assert check_model(model, layout, ParallelConfig(cp=2, cp_heads=2), "cuda") is model
    with pytest.raises(LayoutError, match="goes round a ring of CPU ranks only, not on cuda; choose a cp that divides"):
        check_model(model, layout, ParallelConfig(cp=2, cp_heads=1), "cuda")
    dropping: Any = long_gpt(dropout=0.1)
    assert check_model(dropping, layout, ParallelConfig(cp=2, cp_heads=1), "cpu") is dropping
    with pytest.raises(LayoutError, match=r"that drops 0\.1 goes round a ring of CPU ranks only, not on cuda"):
        check_model(dropping, layout, ParallelConfig(cp=2, cp_heads=1), "cuda")
    other: Any = ring_gpt()
    other.blocks[1].attention.attend.attention = AttentionConfig(kind="block_sparse", block=32)
    with pytest.raises(LayoutError, match="the attention of this model is a SparseAttend of its own"):
        check_model(other, layout, ParallelConfig(cp=2, cp_heads=1), "cpu")


def look(case: LayoutCase) -> dict[str, Any]:
    engine: Any = speedlab.initialize(model=case.build(), optimizer=case.optimizer, config=case.config())[0]
    try:
        tokens, targets = rows_of(45, 0, 0)
        with torch.no_grad():
            found = {"logits": engine.eval()(tokens).logits, "loss": engine.evaluate([(tokens, targets)])}
        engine.train()
        steps = case.accumulation
        with pytest.raises(ValueError, match=r"a sequence of 45 tokens does not divide by .; 44 or 4[68] would"):
            engine.train_batch([(tokens, targets)] * steps)
        if case.layout.pp == 1:  # Else it is known on the last stage only.
            tokens, targets = rows_of(48, 0, 0)
            with pytest.raises(ValueError, match="targets: 46 of a sequence, expected one for each token"):
                engine.train_batch([(tokens, targets[:, 2:])] * steps)
            with pytest.raises(ValueError, match="targets: 999 at position 47"):
                engine.train_batch([(tokens, targets.index_fill(1, torch.tensor(47), 999))] * steps)
            with pytest.raises(IndexError, match=r"tokens: \d+ to 999, expected 0 to"):
                engine.train_batch([(tokens.index_fill(1, torch.tensor(3), 999), targets)] * steps)
        engine.train_batch([rows_of(48, 0, 0)] * steps)
        found["placement"] = str(engine.placement)
        return found
    finally:
        engine.destroy(keep_parameters=False)


def test_what_is_looked_at_is_of_whole_sequences(pool_of: PoolOf) -> None:
    """Of any length: logits in their order on every rank, and the loss of all tokens."""
    model = learned()
    tokens, targets = rows_of(45, 0, 0)
    layouts = Layout(cp=2), Layout(cp=2, pp=2), Layout(cp=2, tp=2, pp=1)
    for cp_heads, layout in itertools.product((1, 2), layouts):
        options: dict[str, Any] = {
            "accumulation": layout.pp,
            "sequence": layout.tp > 1,
            "stage": 3 if layout.pp == 1 else 1,
        }
        case = LayoutCase(layout=layout, build=learned, cp_heads=cp_heads, **options)
        for found in pool_of(layout.world_size).run(look, case, timeout=60):
            torch.testing.assert_close(found["logits"], model(tokens).logits)
            assert found["loss"] == pytest.approx(model(tokens, targets=targets).loss.item(), rel=1e-6)
            assert "dp × cp" in found["placement"]


def look_at_padded(case: LayoutCase, length: int) -> tuple[Tensor, float]:
    engine: Any = speedlab.initialize(model=case.build(), config=case.config())[0]
    try:
        tokens, targets = rows_of(length, 0, 0)
        with torch.no_grad():
            return engine.eval()(tokens).logits, engine.evaluate([(tokens, targets)])
    finally:
        engine.destroy(keep_parameters=False)


def short_custom() -> nn.Module:
    """A mask whose rows end before the padding does."""
    attention = {"kind": "block_sparse", "block": 16, "pattern": "custom", "mask": ("x..", "xx.", "x.x")}
    return long_gpt(attention=attention, hidden=64)


@pytest.mark.parametrize(("build", "length"), [(ring_gpt, 101), (ring_gpt, 3), (short_custom, 45)])
def test_what_is_padded_to_whole_blocks_changes_nothing(pool_of: PoolOf, build: Any, length: int) -> None:
    model = build()
    tokens, targets = rows_of(length, 0, 0)
    case = LayoutCase(layout=Layout(cp=2), build=build, cp_heads=1, accumulation=1)
    for logits, loss in pool_of(2).run(look_at_padded, case, length, timeout=60):
        torch.testing.assert_close(logits, model(tokens).logits, rtol=1e-5, atol=1e-5)
        assert loss == pytest.approx(model(tokens, targets=targets).loss.item(), rel=1e-5)


def save_and_go_on(case: LayoutCase, folder: str) -> Trajectory:
    """Two steps, a checkpoint, and the others from it; under another layout in between."""
    path = Trajectory()
    layouts = [case, replace(case, layout=Layout(dp=2), accumulation=1), replace(case, stage=1, cp_heads=1)]
    for number, each in enumerate(layouts):
        engine: Any = speedlab.initialize(model=each.build(), optimizer=each.optimizer, config=each.config())[0]
        try:
            if number:
                engine.load_checkpoint(folder, str(number - 1))
            for step in range(2 * number, 2 * number + 2):
                # One micro-batch of all under cp, one for each rank under dp: the same global batch.
                sizes = [rows_of(48, step, micro) for micro in range(2)]
                given = sizes if each.layout.dp == 1 else [sizes[engine.mesh.data_index]]
                path.losses.append(engine.train_batch(given))
                path.norms.append(engine.global_grad_norm)
            engine.save_checkpoint(folder, str(number))
            path.parameters = engine.state_dict()
        finally:
            engine.destroy(keep_parameters=False)
    return path


def test_checkpoints_know_nothing_of_cp(pool_of: PoolOf, plain: PlainOf, tmp_path: Path) -> None:
    case = LayoutCase(layout=Layout(cp=2), stage=3, build=learned, batch=many, accumulation=2, optimizer=adamw, steps=6)
    for path in pool_of(2).run(save_and_go_on, case, str(tmp_path), timeout=90):
        assert problems([path], plain(case.plain(), 1), FLOAT32) == []


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"length": 42},
            "cp 4: sequences of 42 tokens do not divide by 4; 40 or 44 would, or set parallel.cp_pad to true, which "
            "pads them to 44",
        ),
        ({"length": 44, "cp_heads": 1}, "cp 4: sequences of 44 tokens do not divide by 8; 40 or 48 would, or set "),
        (
            {"length": 42, "cp_pad": True, "dropout": 0.1, "heads": 8},
            "cp 4: sequences of 42 tokens would be padded to 44, and dropout 0.1 would drop other elements of a longer "
            "sequence; set model.dropout to 0, or use lengths that cp divides",
        ),
        ({"cp_heads": 3}, "cp_heads 3 does not divide cp 4; 1, 2, 4 do"),
        ({"cp_heads": 4}, "cp_heads 4: the 6 heads of a tp rank do not divide by it; 1, 2 would"),
        (
            {
                "attention": {"kind": "block_sparse", "block": 16, "window": 16},
                "length": 96,
                "context": 96,
                "cp_heads": 2,
            },
            "96 tokens do not divide by 64, for 4 chunks of whole blocks of 16 in a ring of 2; 64 or 128 would",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused_with_what_would_work(changes: dict[str, Any], message: str) -> None:
    model = {"hidden": 96, "heads": 6, "context": 64, "layers": 2} | changes
    data = {"sequence_length": model.pop("length", 48)}
    parallel = {"cp": 4} | {name: model.pop(name) for name in ("cp_heads", "cp_pad") if name in model}
    config = RunConfig(parallel=parallel, data=data, model=model)
    with pytest.raises(LayoutError, match=re.escape(message)):
        config.layout(4)


def test_padding_reaches_no_further_than_a_mask() -> None:
    mask = {"kind": "block_sparse", "block": 16, "pattern": "custom", "mask": ["x.", "xx"]}
    model = {"hidden": 96, "heads": 6, "context": 32, "attention": mask}

    def config(length: int) -> RunConfig:
        return RunConfig(parallel={"cp": 3, "cp_pad": True}, data={"sequence_length": length}, model=model)

    with pytest.raises(LayoutError, match=re.escape("padded to 33, and the 2 rows of model.attention.mask are for 32")):
        config(32).layout(3)
    assert config(29).layout(3).cp == 3


def refused(model: Any, how: dict[str, Any]) -> str:
    with pytest.raises((ConfigError, LayoutError)) as reported:
        speedlab.initialize(model=model, config={"parallel": {"cp": 2} | how})
    return str(reported.value)


def test_other_models_are_refused(pool_of: PoolOf) -> None:
    expected = "parallel.cp 2: sequences are cut for this package's GPT as it is, not for Linear; set parallel.cp to 1"
    assert all(reported.startswith(expected) for reported in pool_of(2).run(refused, nn.Linear(2, 2), {}, timeout=30))


# ---- very long -------------------------------------------------------------------------------------------------------

LONG = 65_536


def very_long_gpt() -> GPT:
    shape: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 4, "ffn_hidden": 128, "vocab_size": 64}
    return models.seeded(GPT, ModelConfig(**shape, context=LONG))


def very_long_gradients(layout: Layout, cp_heads: int | None) -> tuple[float, dict[str, Tensor]]:
    """(loss, gradient of every parameter) of one sequence, by a step of plain SGD at a high rate."""
    config = {
        "parallel": {"cp": layout.cp, "cp_heads": cp_heads},
        "precision": {"dtype": "float32"},
        "zero": {"stage": 3},
        "batch": {"micro_size": 1},
        "activation": {"checkpointing": "block"},
    }
    model = very_long_gpt()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    engine: Any = speedlab.initialize(model=model, optimizer=partial(torch.optim.SGD, lr=1024.0), config=config)[0]
    try:
        tokens = torch.randint(64, (1, LONG + 1), generator=torch.Generator().manual_seed(1))
        loss = engine.train_batch([(tokens[:, :-1], tokens[:, 1:])])
        return loss, {name: before[name] - value for name, value in engine.state_dict().items()}
    finally:
        engine.destroy(keep_parameters=False)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_sixty_four_thousand_tokens(pool_of: PoolOf) -> None:
    """A ring, heads and both are the dense attention of one rank, in the loss and every gradient."""
    (alone,) = pool_of(1).run(very_long_gradients, Layout(), None, timeout=300)
    for cp_heads in (1, 2, 4):
        for loss, gradients in pool_of(4).run(very_long_gradients, Layout(cp=4), cp_heads, timeout=300):
            assert loss == pytest.approx(alone[0], rel=1e-6)
            for name, expected in alone[1].items():
                torch.testing.assert_close(
                    gradients[name], expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item()
                )
