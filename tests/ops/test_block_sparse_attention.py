"""block_sparse_attention: dense attention with a mask, over any layout, length and head size; and the layouts."""

from __future__ import annotations

import itertools
import math
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from cuda_ops.block_layout import BlockLayout
from cuda_ops.block_sparse_attention import (
    block_sparse_attention,
    block_sparse_attention_reference,
    documents_of,
    flex_blocks,
    partial_attention,
    partial_gradients,
    token_mask,
)
from cuda_ops.kernel_usage import meter

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}  # of the norm of what is expected


def example(
    length: int, depth: int = 32, *, keys: int | None = None, heads: int = 2, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(length * depth)
    shapes = [(2, heads, length, depth), *[(2, heads, keys or length, depth)] * 2]
    q, k, v = (torch.randn(shape, generator=draw).to(dtype).requires_grad_() for shape in shapes)
    return q, k, v


def window(length: int, *, causal: bool = True, block: int = 64) -> BlockLayout:
    return BlockLayout.local(length, 2, causal=causal, block=block) | BlockLayout.global_(
        length, causal=causal, block=block
    )


def assert_near(actual: Tensor, expected: Tensor, tolerance: float, least: float = 0.0) -> None:
    """`least`: the norm of terms that may cancel out in what is expected."""
    assert actual.shape == expected.shape
    assert (actual.double() - expected.double()).norm() <= tolerance * max(expected.double().norm(), least)


def starts_of(*lengths: list[int]) -> Tensor:
    """(B, T) int32: where the document of each token begins, for sequences of documents of these lengths."""
    rows = [[sum(row[:number]) for number, length in enumerate(row) for _ in range(length)] for row in lengths]
    return torch.tensor(rows, dtype=torch.int32)


def assert_as_defined(
    q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, scale: float | None = None, starts: Tensor | None = None
) -> None:
    """Output and gradients against the reference on float32 copies."""
    out = block_sparse_attention(q, k, v, layout, scale=scale, starts=starts)
    assert out.dtype is q.dtype
    wide = [each.detach().float().requires_grad_() for each in (q, k, v)]
    expected = block_sparse_attention_reference(*wide, layout, scale=scale, starts=starts)
    assert_near(out, expected, TOLERANCE[q.dtype])
    incoming = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(q.dtype)
    gradients = torch.autograd.grad(out, (q, k, v), incoming)
    for mine, other in zip(gradients, torch.autograd.grad(expected, wide, incoming.float()), strict=True):
        assert mine.dtype is q.dtype
        # Scores of a query that sees a single key have no gradient: there, the terms of a sum are all that is known.
        assert_near(mine, other, TOLERANCE[q.dtype], least=0.0 if starts is None else float(incoming.float().norm()))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [1, 15, 63, 64, 65, 127, 128, 129, 300])
def test_lengths(length, causal, dtype) -> None:
    assert_as_defined(*example(length, dtype=dtype), window(length, causal=causal))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("depth", [16, 24, 40, 64, 72, 128, 256])
def test_head_sizes(depth, dtype) -> None:
    assert_as_defined(*example(150, depth, dtype=dtype), window(150))


@pytest.mark.parametrize("block", [16, 32, 64, 80, 128])
def test_block_sizes(block) -> None:
    for length in (block - 1, 2 * block, 3 * block + 1):
        assert_as_defined(*example(length, 64), window(length, block=block))


@pytest.mark.parametrize(
    "layout",
    [
        BlockLayout.strided(200, 2, block=16),
        BlockLayout.bigbird(200, seed=3, causal=True, block=16),
        BlockLayout.bigbird(200, seed=3, block=16),
        BlockLayout.from_mask(torch.rand(13, 13, generator=torch.Generator().manual_seed(5)) < 0.3, block=16),
        BlockLayout.from_mask(torch.eye(13, dtype=torch.bool).flip(0), block=16),
    ],
    ids=["strided", "bigbird-causal", "bigbird", "random", "anti-diagonal"],
)
def test_layouts(layout) -> None:
    assert_as_defined(*example(200), layout)
    assert_as_defined(*example(208), layout, scale=0.7)


@pytest.mark.parametrize("width", [1, 2, 16, 17, 31, 32, 50, 199, 200, 400])
def test_windows_of_tokens(width) -> None:
    """Over the blocks that the window needs, and over all: blocks out of its reach add nothing."""
    for mask in (BlockLayout.local(200, -(-(width - 1) // 16) + 1, block=16).mask, torch.ones(13, 13).bool()):
        layout = BlockLayout.from_mask(mask, causal=True, block=16, window=width)
        q, k, v = example(200)
        assert_as_defined(q, k, v, layout)
        seen = token_mask(layout, 200, 200)
        assert seen.sum(1).tolist() == [min(row + 1, width) for row in range(200)]
        assert bool(seen.diagonal().all())


@pytest.mark.parametrize(("width", "causal"), [(0, True), (5, False)])
def test_windows_that_are_refused(width, causal) -> None:
    with pytest.raises(ValueError, match=f"window: {width}, expected 1 or more, and causal set, which is {causal}"):
        BlockLayout.from_mask(torch.ones(1, 1).bool(), causal=causal, window=width)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "lengths",
    [([200], [1] * 200), ([64, 64, 72], [63, 65, 72]), ([1, 199], [199, 1]), ([16, 16, 168], [5, 90, 3, 102])],
)
def test_documents(lengths, dtype) -> None:
    """Beside the definition; and a document by itself is what it is among others."""
    q, k, v = example(200, dtype=dtype)
    layout = BlockLayout.local(200, 13, causal=True, block=16)
    assert_as_defined(q, k, v, layout, starts=starts_of(*lengths))
    out = block_sparse_attention(q, k, v, layout, starts=starts_of(*lengths))
    for row, each in enumerate(lengths):
        alone = torch.cat([by_itself(q, k, v, row, each, number) for number in range(len(each))], 2)
        assert_near(out[row : row + 1], alone, TOLERANCE[dtype])


def by_itself(q: Tensor, k: Tensor, v: Tensor, row: int, lengths: list[int], number: int) -> Tensor:
    """Causal attention of one document of a sequence."""
    begin = sum(lengths[:number])
    q, k, v = (each[row : row + 1, :, begin : begin + lengths[number]] for each in (q, k, v))
    return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)


@st.composite
def packed(draw: st.DrawFn) -> dict[str, Any]:
    """Two sequences of documents of any lengths, over blocks of any choice."""
    length = draw(st.integers(1, 130))
    rows = []
    for _ in range(2):
        cuts = sorted(draw(st.sets(st.integers(1, max(1, length - 1)), max_size=6)) | {0} - {length})
        rows.append([stop - start for start, stop in itertools.pairwise([*[c for c in cuts if c < length], length])])
    causal = draw(st.booleans())
    blocks = -(-length // 16)
    mask = torch.tensor(draw(st.lists(st.booleans(), min_size=blocks**2, max_size=blocks**2))).view(blocks, blocks)
    window = draw(st.none() | st.integers(1, length)) if causal else None
    return {
        "length": length,
        "starts": starts_of(*rows),
        "layout": BlockLayout.from_mask(mask, causal=causal, block=16, window=window),
        "dtype": draw(st.sampled_from(FLOATS)),
    }


@settings(max_examples=80, deadline=None)
@given(case=packed())
def test_documents_of_any_length_over_any_blocks(case) -> None:
    q, k, v = example(case["length"], 16, dtype=case["dtype"])
    assert_as_defined(q, k, v, case["layout"], starts=case["starts"])


def test_blocks_before_a_document_are_not_computed() -> None:
    """What stands there, be it NaN, reaches no number of another document's."""
    q, k, v = example(256)
    with torch.no_grad():
        for each in (q, k, v):
            each[:, :, :64] = math.nan
    out = block_sparse_attention(q, k, v, window(256), starts=starts_of([64, 192], [64, 100, 92]))
    gradients = torch.autograd.grad(out[:, :, 64:].sum(), (q, k, v))
    assert out[:, :, :64].isnan().all()
    assert out[:, :, 64:].isfinite().all()
    assert all(each[:, :, 64:].isfinite().all() for each in gradients)


def test_bad_starts_are_refused() -> None:
    q, k, v = example(100)
    starts = starts_of([100], [50, 50])
    with pytest.raises(ValueError, match="starts: dtype is int64, expected int32"):
        block_sparse_attention(q, k, v, window(100), starts=starts.long())
    with pytest.raises(ValueError, match=r"starts: shape is \(1, 100\), expected \(2, 100\)"):
        block_sparse_attention(q, k, v, window(100), starts=starts[:1])


def test_a_gradient_of_its_gradients_is_refused() -> None:
    q = torch.randn(1, 2, 64, 16, requires_grad=True)
    out = block_sparse_attention(q, q, q, BlockLayout.local(64, 1, causal=True))
    (slope,) = torch.autograd.grad(out.pow(2).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="block_sparse_attention: differentiable once"):
        slope.pow(2).sum().backward()


def test_all_blocks_are_dense_attention() -> None:
    q, k, v = example(256)
    layout = BlockLayout.from_mask(torch.ones(4, 4, dtype=torch.bool), causal=True)
    out = block_sparse_attention(q, k, v, layout)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


PARTS = [[3, 0, 6], [1], [5, 2, 4]]
"""Blocks of keys, in parts and orders of nobody's making."""


@pytest.mark.parametrize("width", [None, 1, 20, 37, 80])
def test_parts_put_together_are_the_whole(width) -> None:
    """Some queries, to keys part by part: cut at their true distances, and nothing from where no key is seen."""
    mask = torch.ones(7, 7).bool() if width else torch.rand(7, 7, generator=torch.Generator().manual_seed(0)) < 0.6
    mask.diagonal().fill_(True)
    layout = BlockLayout(mask, causal=True, block=16, window=width)
    q, k, v = (each.detach() for each in example(7 * 16))
    rows = [5, 1, 3]
    own, blocks = [each.unflatten(2, (7, 16)) for each in (q, k, v)], lambda x, of: x[:, :, of].flatten(2, 3)
    queries, outs, logarithms = blocks(own[0], rows), [], []
    for part in PARTS:
        keys, values = blocks(own[1], part), blocks(own[2], part)
        assert torch.equal(
            token_mask(layout.part(rows, part), 48, 16 * len(part)),
            token_mask(layout, 112, 112).view(7, 16, 7, 16)[rows][:, :, part].flatten(2, 3).flatten(0, 1),
        )
        out, logarithm = partial_attention(queries, keys, values, layout.part(rows, part), scale=0.2)
        assert bool((out[logarithm == -math.inf] == 0).all())
        outs.append(out)
        logarithms.append(logarithm)
    together = torch.logsumexp(torch.stack(logarithms), 0)
    y = sum(out * (logarithm - together).exp()[..., None] for out, logarithm in zip(outs, logarithms, strict=True))
    wide = [each.requires_grad_() for each in (q, k, v)]
    expected = blocks(block_sparse_attention_reference(*wide, layout, scale=0.2).unflatten(2, (7, 16)), rows)
    assert isinstance(y, Tensor)
    assert_near(y, expected, TOLERANCE[torch.float32])

    incoming = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    of_q, of_k, of_v = torch.autograd.grad(expected, wide, incoming)
    sums = torch.zeros_like(y)
    for part in PARTS:
        both = blocks(own[1], part).detach(), blocks(own[2], part).detach()
        merged = y.detach(), together.detach(), layout.part(rows, part)
        grads = partial_gradients(incoming, queries.detach(), *both, *merged, scale=0.2)
        sums += grads[0]
        assert_near(grads[1], blocks(of_k.unflatten(2, (7, 16)), part), 2 * TOLERANCE[torch.float32])
        assert_near(grads[2], blocks(of_v.unflatten(2, (7, 16)), part), 2 * TOLERANCE[torch.float32])
    assert_near(sums, blocks(of_q.unflatten(2, (7, 16)), rows), 2 * TOLERANCE[torch.float32])


def test_parts_for_flex_attention() -> None:
    layout = BlockLayout(torch.ones(7, 7).bool(), causal=True, block=16, window=37)
    for part in PARTS:
        blocks = flex_blocks(layout.part([5, 1, 3], part), 48, 16 * len(part), torch.device("cpu"))
        mask = token_mask(layout.part([5, 1, 3], part), 48, 16 * len(part))
        places = torch.arange(48)[:, None], torch.arange(16 * len(part))
        seen = blocks.mask_mod(torch.tensor(0), torch.tensor(0), *places)
        within = blocks.to_dense()[0, 0].bool().repeat_interleave(16, 0).repeat_interleave(16, 1)
        assert torch.equal(seen & within, mask)
        assert blocks.full_kv_num_blocks is not None
        assert blocks.full_kv_indices is not None
        for row, count in enumerate(blocks.full_kv_num_blocks[0, 0].tolist()):  # Of those, every score counts.
            for column in blocks.full_kv_indices[0, 0, row, :count].tolist():
                assert mask[16 * row : 16 * row + 16, 16 * column : 16 * column + 16].all()


@pytest.mark.parametrize("keys", [1, 64, 190])
def test_keys_of_another_length(keys) -> None:
    mask = torch.ones(2, -(-keys // 64), dtype=torch.bool)
    mask[1, 0] = False
    assert_as_defined(*example(100, keys=keys), BlockLayout.from_mask(mask))


def test_queries_that_see_no_key_give_zeros() -> None:
    mask = torch.tensor([[True, False], [False, False]])
    q, k, v = example(128)
    layout = BlockLayout.from_mask(mask)
    out = block_sparse_attention(q, k, v, layout)
    assert out[:, :, 64:].count_nonzero() == 0
    grad_q, grad_k, grad_v = torch.autograd.grad(out.sum(), (q, k, v))
    assert grad_q[:, :, 64:].count_nonzero() == 0
    assert grad_k[:, :, 64:].count_nonzero() == 0
    assert grad_v[:, :, 64:].count_nonzero() == 0
    assert_as_defined(q, k, v, layout)


@pytest.mark.parametrize("shape", [(0, 2, 64, 16), (2, 0, 64, 16), (2, 2, 0, 16)])
def test_nothing(shape) -> None:
    q, k, v = (torch.empty(shape, requires_grad=True) for _ in range(3))
    layout = BlockLayout.from_mask(torch.ones(-(-shape[2] // 64), -(-shape[2] // 64), dtype=torch.bool), causal=True)
    out = block_sparse_attention(q, k, v, layout)
    assert out.shape == shape
    assert torch.autograd.grad(out.sum(), q)[0].shape == shape


@pytest.mark.parametrize("size", [1e-3, 30.0, 1000.0])
def test_scores_of_any_size(size) -> None:
    # Softmax of scores in the thousands: only differences may reach the exponential.
    q, k, v = example(130)
    with torch.no_grad():
        q *= size
    layout = window(130)
    out = block_sparse_attention(q, k, v, layout)
    expected = block_sparse_attention_reference(q.double(), k.double(), v.double(), layout)
    assert out.isfinite().all()
    assert_near(out, expected, 1e-5 * max(1, size / 30))


def test_denormals() -> None:
    q, k, v = example(70)
    with torch.no_grad():
        q *= 1e-40
        v *= 1e-3
    out = block_sparse_attention(q, k, v, window(70))
    torch.testing.assert_close(out[:, :, 69], v.mean(2), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_special_values_reach_those_that_see_them_only(value, dtype) -> None:
    q, k, v = example(256, dtype=dtype)
    with torch.no_grad():
        k[0, 1, 130, 0] = value  # block 2 of 0 to 3
    mask = torch.eye(4, dtype=torch.bool)
    mask[3, 2] = True
    out = block_sparse_attention(q, k, v, BlockLayout.from_mask(mask, causal=True))
    assert not out[0, 1, 130:].isfinite().all(-1).any() if math.isnan(value) else not out[0, 1, 192:].isfinite().all()
    assert out[0, 1, :130].isfinite().all()
    assert out[0, 0].isfinite().all()
    assert out[1].isfinite().all()


def test_infinite_values_as_defined() -> None:
    q, k, v = example(64)
    with torch.no_grad():
        v[:, :, 10, 3] = math.inf
    out = block_sparse_attention(q, k, v, window(64))
    assert (out[:, :, 10:, 3] == math.inf).all()  # Earlier queries weigh it with zero, which is NaN in torch too.
    torch.testing.assert_close(out, block_sparse_attention_reference(q, k, v, window(64)), equal_nan=True)


def test_the_same_bits_on_any_number_of_threads(set_threads) -> None:
    q, k, v = example(500, heads=3)
    layout = BlockLayout.bigbird(500, seed=0, causal=True)
    results = []
    for threads in (1, 2, 3):
        set_threads(threads)
        out = block_sparse_attention(q, k, v, layout)
        results.append((out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_an_incoming_gradient_of_any_strides() -> None:
    q, k, v = example(100)
    layout = window(100)
    out = block_sparse_attention(q, k, v, layout)
    (expanded,) = torch.autograd.grad(out.sum(), q, retain_graph=True)
    (dense,) = torch.autograd.grad(out, q, torch.ones_like(out))
    assert torch.equal(expanded, dense)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_order_of_memory(dtype: torch.dtype) -> None:
    """As a projection gives queries, keys and values: the result lies as the queries do, in the same bits."""
    together = torch.randn(2, 100, 3, 2, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    q, k, v = (each.transpose(1, 2).requires_grad_() for each in together.unbind(2))
    layout, slope = window(100), torch.randn(2, 100, 2, 32).to(dtype).transpose(1, 2)
    out = block_sparse_attention(q, k, v, layout)
    found = out, *torch.autograd.grad(out, (q, k, v), slope)
    head_by_head = [each.detach().contiguous().requires_grad_() for each in (q, k, v)]
    other = block_sparse_attention(*head_by_head, layout)
    expected = other, *torch.autograd.grad(other, head_by_head, slope)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.transpose(1, 2).is_contiguous()
        assert theirs.is_contiguous()


def test_bad_input_is_refused_by_name() -> None:
    q, k, v = (each.detach() for each in example(100))
    layout = window(100)
    with pytest.raises(ValueError, match=r"q: dtype is float64, expected float32 or bfloat16 or float16"):
        block_sparse_attention(q.double(), k, v, layout)
    with pytest.raises(ValueError, match=r"k: dtype is bfloat16, expected float32"):
        block_sparse_attention(q, k.bfloat16(), v, layout)
    with pytest.raises(ValueError, match=r"k: shape is \(2, 1, 100, 32\), expected \(2, 2, any, 32\)"):
        block_sparse_attention(q, k[:, :1].contiguous(), v, layout)
    with pytest.raises(ValueError, match=r"v: shape is \(2, 2, 99, 32\), expected \(2, 2, 100, 32\)"):
        block_sparse_attention(q, k, v[:, :, 1:].contiguous(), layout)
    with pytest.raises(ValueError, match=r"layout: \(2, 2\) blocks of 64, expected \(3, 3\) for 129 queries, 129 keys"):
        block_sparse_attention(*(torch.zeros(1, 1, 129, 16) for _ in range(3)), layout)
    for depth in (8, 20, 264):
        with pytest.raises(ValueError, match=rf"q: head size is {depth}, expected a multiple of 8 from 16 to 256"):
            block_sparse_attention(*(torch.zeros(1, 1, 100, depth) for _ in range(3)), layout)


def test_kernels_are_counted() -> None:
    q, k, v = example(100)
    meter.take()
    block_sparse_attention(q, k, v, window(100)).sum().backward()
    uses = meter.take()
    assert uses["block_sparse_attention"].nbytes == 4 * q.nbytes
    assert uses["block_sparse_attention_backward"].nbytes == 7 * q.nbytes


@pytest.mark.parametrize("dtype", FLOATS)
def test_registration(dtype) -> None:
    q, k, v = example(70, 16, dtype=dtype)
    layout = window(70)
    for starts in (None, starts_of([30, 40], [70])):
        lists = layout.offsets, layout.columns, layout.distances, starts, layout.block, layout.causal, 16, 0.25
        torch.library.opcheck(torch.ops.cuda_ops.block_sparse_attention.default, (q, k, v, *lists))
        out, lse = torch.ops.cuda_ops.block_sparse_attention(q, k, v, *lists)
        saved = [each.detach() for each in (torch.ones_like(out), q, k, v, out, lse)]
        torch.library.opcheck(torch.ops.cuda_ops.block_sparse_attention_backward.default, (*saved, *lists))
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = [torch.empty(2, 2, 70, 16, dtype=dtype, requires_grad=True) for _ in range(3)]
        attended = block_sparse_attention(fakes[0], fakes[1], fakes[2], layout)
        attended.sum().backward()
        assert (attended.shape, attended.dtype) == (fakes[0].shape, dtype)
        assert fakes[1].grad is not None


def test_compiled() -> None:
    q, k, v = example(130)
    layout = window(130)

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return block_sparse_attention(torch.tanh(q), k, v, layout) * 2

    out = torch.compile(model, fullgraph=True, backend="aot_eager")(q, k, v)
    expected = model(q, k, v)
    torch.testing.assert_close(out, expected)
    for mine, other in zip(
        torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(expected.sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize(("queries", "keys", "causal"), [(256, 256, True), (200, 200, True), (200, 150, False)])
def test_flex_attention_gets_the_same_blocks(queries, keys, causal) -> None:
    mask = torch.rand(-(-queries // 64), -(-keys // 64), generator=torch.Generator().manual_seed(0)) < 0.6
    layout = BlockLayout.from_mask(mask, causal=causal)
    blocks = flex_blocks(layout, queries, keys, torch.device("cpu"))
    assert torch.equal(blocks.to_dense()[0, 0].bool(), layout.mask)
    query, key = torch.arange(queries)[:, None], torch.arange(keys)
    zero = torch.zeros((), dtype=torch.int64)
    # What it computes: every score of full blocks, and of partial ones those that mask_mod lets pass.
    full = torch.zeros_like(layout.mask)
    assert blocks.full_kv_num_blocks is not None
    assert blocks.full_kv_indices is not None
    for row, count in enumerate(blocks.full_kv_num_blocks[0, 0].tolist()):
        full[row, blocks.full_kv_indices[0, 0, row, :count].long()] = True
    whole = token_mask(BlockLayout.from_mask(full), queries, keys)
    either = token_mask(BlockLayout.from_mask(layout.mask), queries, keys) & blocks.mask_mod(zero, zero, query, key)
    assert torch.equal(whole | either, token_mask(layout, queries, keys))
    if keys % 64:
        assert not full[:, -1].any()


@pytest.mark.parametrize(("length", "causal"), [(256, True), (200, True), (200, False)])
def test_flex_attention_keeps_documents_apart(length, causal) -> None:
    mask = torch.rand(-(-length // 64), -(-length // 64), generator=torch.Generator().manual_seed(3)) < 0.7
    layout = BlockLayout.from_mask(mask, causal=causal)
    starts = starts_of([70, 1, length - 71], [length - 3, 3])
    blocks = documents_of(flex_blocks(layout, length, length, torch.device("cpu")), starts)
    assert blocks.full_kv_num_blocks is None
    batch, query, key = torch.arange(2)[:, None, None], torch.arange(length)[:, None], torch.arange(length)
    listed = blocks.to_dense()[:, 0].bool()
    whole = listed.repeat_interleave(64, 1).repeat_interleave(64, 2)[:, :length, :length]
    computed = whole & blocks.mask_mod(batch, torch.zeros((), dtype=torch.int64), query, key)
    expected = token_mask(layout, length, length) & (key >= starts[:, :, None])
    assert torch.equal(computed, expected)
    assert not listed[0, 2:, 0].any()  # All their queries are of later documents.
    for row in range(length, 64 * len(mask)):  # What pads a block is asked for, too.
        blocks.mask_mod(*map(torch.tensor, (0, 0, row, 0)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("length", [256, 200])
def test_documents_on_a_gpu(length, dtype) -> None:
    layout, starts = window(length), starts_of([70, 1, length - 71], [length - 3, 3])
    inputs = example(length, 64, dtype=dtype)
    on_gpu = [each.detach().cuda().requires_grad_() for each in inputs]
    out = block_sparse_attention(*on_gpu, layout, starts=starts.cuda())
    expected = block_sparse_attention(*inputs, layout, starts=starts)
    tolerance = max(2e-3, 2 * TOLERANCE[dtype])
    assert_near(out.cpu(), expected, tolerance)
    gradients = torch.autograd.grad(out, on_gpu, torch.ones_like(out))
    for mine, other in zip(gradients, torch.autograd.grad(expected, inputs, torch.ones_like(expected)), strict=True):
        assert_near(mine.cpu(), other, tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("length", "causal"), [(256, True), (200, True), (200, False)])
def test_on_a_gpu(length, causal, dtype) -> None:
    layout = BlockLayout.bigbird(length, seed=1, window=1, random_blocks=1, causal=causal)
    inputs = example(length, 64, dtype=dtype)
    on_gpu = [each.detach().cuda().requires_grad_() for each in inputs]
    out, expected = block_sparse_attention(*on_gpu, layout), block_sparse_attention(*inputs, layout)
    # float32 products are TensorFloat-32 there.
    tolerance = max(2e-3, 2 * TOLERANCE[dtype])
    assert_near(out.cpu(), expected, tolerance)
    gradients = torch.autograd.grad(out, on_gpu, torch.ones_like(out))
    for mine, other in zip(gradients, torch.autograd.grad(expected, inputs, torch.ones_like(expected)), strict=True):
        assert_near(mine.cpu(), other, tolerance)


def test_layout_grids() -> None:
    assert str(BlockLayout.local(320, 2)).splitlines() == [
        "two-way, blocks of 64, density 0.520",
        "■■···",
        "■■■··",
        "·■■■·",
        "··■■■",
        "···■■",
    ]
    assert str(BlockLayout.local(257, 2, causal=True) | BlockLayout.global_(257, causal=True)).splitlines() == [
        "causal, blocks of 64, density 0.800",
        "■····",
        "■■···",
        "■■■··",
        "■·■■·",
        "■··■■",
    ]
    assert str(BlockLayout.strided(80, 3, causal=True, block=16)).splitlines()[1:] == [
        "■····",
        "·■···",
        "··■··",
        "■··■·",
        "·■··■",
    ]
    assert str(BlockLayout.global_(48, 2, block=16)).splitlines()[1:] == ["■■■", "■■■", "■■·"]


def test_bigbird_depends_on_its_seed_alone() -> None:
    layouts = [BlockLayout.bigbird(2048, seed=seed, causal=True) for seed in (1, 1, 2)]
    assert torch.equal(layouts[0].mask, layouts[1].mask)
    assert not torch.equal(layouts[0].mask, layouts[2].mask)
    base = (BlockLayout.local(2048, 2, causal=True) | BlockLayout.global_(2048, causal=True)).mask
    assert (layouts[0].mask | base).equal(layouts[0].mask)
    assert ((layouts[0].mask & ~base).sum(1) <= 2).all()
    assert (layouts[0].mask & ~base).sum() > 20
    assert not layouts[0].mask.triu(1).any()


def test_layouts_are_frozen_and_copied() -> None:
    mask = torch.ones(2, 2, dtype=torch.bool)
    layout = BlockLayout.from_mask(mask)
    mask[:] = False
    assert layout.density == 1
    with pytest.raises(FrozenInstanceError):
        layout.causal = True  # pyright: ignore[reportAttributeAccessIssue]  # what is tested
    assert BlockLayout.from_mask(torch.zeros(0, 0, dtype=torch.bool)).density == 0


def test_bad_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"places: \[1, 1\], expected one for each of \(1, 2\)"):
        BlockLayout(torch.ones(1, 2).bool(), places=((0,), (1,)))
    with pytest.raises(ValueError, match=r"mask: torch.float32 of shape \(2, 2\) on cpu, expected torch.bool"):
        BlockLayout.from_mask(torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"block: 24, expected a multiple of 16"):
        BlockLayout.local(100, 1, block=24)
    with pytest.raises(ValueError, match=r"mask: shape is \(2, 3\), expected a square, since causal is set"):
        BlockLayout.from_mask(torch.ones(2, 3, dtype=torch.bool), causal=True)
    with pytest.raises(ValueError, match=r"window: 0, expected 1 or more"):
        BlockLayout.local(100, 0)
    with pytest.raises(ValueError, match=r"length: 0, expected 1 or more"):
        BlockLayout.strided(0, 2)
    with pytest.raises(
        ValueError,
        match=r"layouts of .* \(\(2, 2\), True, .*, None\) and \(\(2, 2\), False, 64, None, None\) cannot be joined",
    ):
        BlockLayout.local(100, 1, causal=True) | BlockLayout.local(100, 1)
