"""torch's attention by our kernels: as exact, in the same order of memory, and nowhere but where it was asked for."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from cuda_ops import cpu_sdpa
from cuda_ops.cpu_sdpa import install, under_way


class Calls:
    """What our kernels were asked for."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def __call__(self, monkeypatch: pytest.MonkeyPatch) -> Calls:
        for name in ("partial_attention", "partial_gradients"):
            kernel = getattr(cpu_sdpa, name)

            def counted(*args, name=name, kernel=kernel, **rest):
                self.made.append(name)
                return kernel(*args, **rest)

            monkeypatch.setattr(cpu_sdpa, name, counted)
        return self


FORWARD, BACKWARD = "partial_attention", "partial_gradients"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """With our kernels in torch's places, on any processor."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        install()
    return Calls()(monkeypatch)


def heads(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """(B, H, T, D) from (B, T, H, D), as a projection gives them."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=random).to(dtype).transpose(1, 2).requires_grad_()


def attend(q: Tensor, k: Tensor, v: Tensor, **how) -> list[Tensor]:
    """The output, and gradients of q, k and v."""
    out = F.scaled_dot_product_attention(q, k, v, **how)
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float32).to(out.dtype)
    return [out, *torch.autograd.grad(out, (q, k, v), slope)]


def strides(tensor: Tensor) -> list[int]:
    """Those that count."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def exact(q: Tensor, k: Tensor, v: Tensor, **how) -> list[Tensor]:
    return attend(*(each.detach().double().requires_grad_() for each in (q, k, v)), **how)


def check_alike(ours: list[Tensor], theirs: list[Tensor], right: list[Tensor], close: float) -> None:
    """`ours` are as `right` as that, and laid as `theirs`."""
    for found, other, expected in zip(ours, theirs, right, strict=True):
        assert (found.double() - expected).abs().max() <= close * expected.abs().max()
        assert (found.dtype, found.shape, strides(found)) == (other.dtype, other.shape, strides(other))


@pytest.mark.parametrize(
    ("queries", "keys", "how"),
    [
        ((2, 128, 3, 16), (2, 128, 3, 16), {"is_causal": True}),
        ((1, 190, 2, 80), (1, 190, 2, 80), {"is_causal": True, "scale": 0.3}),
        ((2, 192, 2, 64), (2, 128, 2, 64), {}),
        ((1, 250, 2, 24), (1, 190, 2, 24), {"scale": 1.0}),
    ],
)
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 5e-6), (torch.bfloat16, 0.01), (torch.float16, 0.002)])
def test_it_is_torchs_attention(calls: Calls, queries, keys, how, dtype, close) -> None:
    q, k, v = heads(*queries, dtype=dtype), heads(*keys, dtype=dtype, seed=1), heads(*keys, dtype=dtype, seed=2)
    theirs = attend(q, k, v, **how)
    assert calls.made == []
    with under_way():
        ours = attend(q, k, v, **how)
    assert calls.made == [FORWARD, BACKWARD]
    check_alike(ours, theirs, exact(q, k, v, **how), close)


@pytest.mark.parametrize("ours_first", [True, False])
def test_a_backward_takes_what_the_others_forward_has_saved(calls: Calls, ours_first: bool) -> None:
    q, k, v = (heads(1, 128, 2, 32, seed=seed) for seed in range(3))
    slope = torch.randn_like(q)
    with under_way(ours_first):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    with under_way(not ours_first):
        found = torch.autograd.grad(out, (q, k, v), slope)
    assert calls.made == ([FORWARD] if ours_first else [BACKWARD])
    again = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    for one, other in zip(found, torch.autograd.grad(again, (q, k, v), slope), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("memory", ["contiguous", "shared heads", "one head"])
def test_any_order_of_memory(calls: Calls, memory: str) -> None:
    q, k, v = (heads(2, 128, 4, 16, seed=seed).detach() for seed in range(3))
    if memory == "contiguous":
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    if memory == "shared heads":
        k, v = k[:, :1].expand_as(q), v[:, :1].expand_as(q)
    if memory == "one head":
        q, k, v = q[:1, :1], k[:1, :1], v[:1, :1]
    leaves = [each.detach().requires_grad_() for each in (q, k, v)]
    with under_way():
        found = attend(*leaves, is_causal=True)
    assert calls.made
    for one, other in zip(found, exact(*leaves, is_causal=True), strict=True):
        assert torch.allclose(one.double(), other, atol=1e-5)


@pytest.mark.parametrize(
    ("queries", "keys", "how"),
    [
        ((1, 127, 2, 16), (1, 127, 2, 16), {}),
        ((1, 150, 2, 16), (1, 150, 2, 16), {}),  # Whole blocks would have 1.6 times as many scores.
        ((1, 128, 2, 20), (1, 128, 2, 20), {}),
        ((1, 128, 2, 8), (1, 128, 2, 8), {}),
        ((1, 128, 2, 16), (1, 192, 2, 16), {"is_causal": True}),
        ((1, 128, 2, 16), (1, 128, 2, 16), {"attn_mask": torch.ones(128, 128).tril().bool()}),
        ((1, 128, 2, 16), (1, 128, 2, 16), {"dropout_p": 0.5}),
        ((0, 128, 2, 16), (0, 128, 2, 16), {}),
    ],
)
def test_what_is_slower_or_unknown_is_torchs(calls: Calls, queries, keys, how) -> None:
    def seeded() -> list[Tensor]:
        torch.manual_seed(0)
        return attend(heads(*queries), heads(*keys, seed=1), heads(*keys, seed=2), **how)

    expected = seeded()
    with under_way():
        found = seeded()
        attend(*(heads(1, 128, 2, 16).detach().double().requires_grad_() for _ in range(3)))
    assert calls.made == []
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_short_sequences_of_bfloat16_fill_their_blocks_less(calls: Calls) -> None:
    with under_way():
        attend(*(heads(1, 100, 2, 16, dtype=torch.bfloat16) for _ in range(3)))
    assert calls.made == [FORWARD, BACKWARD]


def test_it_is_for_one_thread_and_ends_with_an_exception(calls: Calls) -> None:
    q = heads(1, 128, 2, 16)
    with under_way():
        other = threading.Thread(target=lambda: F.scaled_dot_product_attention(q, q, q))
        other.start()
        other.join(30)
    assert calls.made == []
    with pytest.raises(RuntimeError, match="of the model"), under_way(), under_way():
        raise RuntimeError("of the model")
    F.scaled_dot_product_attention(q, q, q)
    assert calls.made == []


def test_who_asks_for_torchs_has_it_within_another(calls: Calls) -> None:
    q = heads(1, 128, 2, 16)
    with under_way():
        with under_way(False):
            F.scaled_dot_product_attention(q, q, q)
        assert calls.made == []
        F.scaled_dot_product_attention(q, q, q)
    assert calls.made == [FORWARD]


@pytest.mark.parametrize(("groups", "dtype", "close"), [(2, torch.float32, 5e-6), (1, torch.bfloat16, 0.01)])
def test_heads_of_keys_that_queries_share(calls: Calls, groups: int, dtype: torch.dtype, close: float) -> None:
    q = heads(2, 128, 4, 16, dtype=dtype)
    k, v = (heads(2, 128, groups, 16, dtype=dtype, seed=seed) for seed in (1, 2))
    how = {"is_causal": True, "enable_gqa": True}
    theirs = attend(q, k, v, **how)
    with under_way():
        ours = attend(q, k, v, **how)
    assert calls.made == [FORWARD, BACKWARD]
    check_alike(ours, theirs, exact(q, k, v, **how), close)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_whatever_torchs_default_is(calls: Calls, default: torch.dtype) -> None:
    leaves = [heads(1, 128, 2, 16, seed=seed) for seed in range(3)]
    torch.set_default_dtype(default)
    try:
        with under_way():
            found = attend(*leaves, is_causal=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert calls.made == [FORWARD, BACKWARD]
    for one, other in zip(found, exact(*leaves, is_causal=True), strict=True):
        assert torch.allclose(one.double(), other, atol=1e-2 if default is torch.bfloat16 else 1e-5)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's own vmap of this operation.
def test_the_graph_stays_torchs(calls: Calls) -> None:
    """What is computed again, cast, transformed, looked at in inference mode, or has no values."""
    q, k, v = (heads(1, 192, 2, 16, seed=seed) for seed in range(3))
    expected = attend(q, k, v, is_causal=True)
    with under_way():
        out = checkpoint(F.scaled_dot_product_attention, q, k, v, is_causal=True, use_reentrant=False)
        out.sum().backward()
        assert calls.made == [FORWARD, FORWARD, BACKWARD]
        with torch.autocast("cpu", torch.bfloat16):
            assert F.scaled_dot_product_attention(q, k, v, is_causal=True).dtype == torch.bfloat16
        found = torch.func.grad(lambda q: F.scaled_dot_product_attention(q, k, v, is_causal=True).pow(2).sum())(q)
        (theirs,) = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True).pow(2).sum(), q)
        assert torch.allclose(found, theirs, atol=1e-5)
        many = torch.func.vmap(lambda q: F.scaled_dot_product_attention(q, k, v, is_causal=True))(torch.stack([q, q]))
        assert torch.allclose(many[1], expected[0], atol=1e-5)
        with FakeTensorMode() as mode:
            assert F.scaled_dot_product_attention(*(mode.from_tensor(q) for _ in range(3))).shape == q.shape
        compiled = torch.compile(F.scaled_dot_product_attention, backend="aot_eager")
        before = len(calls.made)
        assert torch.allclose(compiled(q, k, v, is_causal=True), expected[0], atol=1e-5)
        assert len(calls.made) > before
        length = 448  # Which no other test has: the blocks of a length are kept.
        with torch.inference_mode():
            F.scaled_dot_product_attention(*(torch.randn(1, 1, length, 16) for _ in range(3)), is_causal=True)
        attend(*(heads(1, length, 1, 16) for _ in range(3)), is_causal=True)


def test_it_is_for_processors_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for avx512, tiles, ours in ((True, False, "blocks"), (True, True, "torch"), (False, False, "torch")):
        monkeypatch.setattr(cpu_sdpa, "has_avx512", lambda avx512=avx512: avx512)
        monkeypatch.setattr(cpu_sdpa, "has_matrix_units", lambda tiles=tiles: tiles)
        assert cpu_sdpa.in_use(cpu, "auto") == ours
        assert cpu_sdpa.in_use(cpu, "torch") == "torch"
        assert cpu_sdpa.in_use(torch.device("cuda"), "auto") == "torch"
