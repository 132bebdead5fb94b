"""Products of float32 by oneDNN: as exact as torch's, and nothing but products is changed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cuda_ops import products

ON, OFF = "bf16", "none"


class Settings(TorchDispatchMode):
    """By the name of each operation: the settings with which it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[str]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.setdefault(func.overloadpacket.__name__, []).append(products._setting())
        return func(*args, **(kwargs or {}))


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if this processor were one where oneDNN is faster: the setting is tried everywhere, its values only there."""
    monkeypatch.setattr(products, "faster", lambda: True)
    yield
    products.choose("auto")
    torch.backends.mkldnn.matmul.fp32_precision = OFF  # type: ignore[attr-defined]


@pytest.fixture
def layer(faster: None) -> nn.Linear:
    layer = nn.Linear(128, 96)
    products.hook(layer.modules())
    return layer


def rows(count: int = 64) -> torch.Tensor:
    return torch.randn(2, count, 128, generator=torch.Generator().manual_seed(0)).requires_grad_()


def precise() -> str:
    """What torch says of its precision; it raises an error while backends differ."""
    return torch.get_float32_matmul_precision()


@pytest.mark.skipif(not products.faster(), reason="oneDNN's products are not faster on this processor")
@pytest.mark.parametrize("shape", [(64, 128, 96), (512, 384, 1536), (100, 1000, 17), (9, 4096, 3)])
def test_products_are_as_exact_as_torchs(shape):
    m, k, n = shape
    random = torch.Generator().manual_seed(1)
    left, right = torch.randn(m, k, generator=random), torch.randn(k, n, generator=random)
    exact = left.double() @ right.double()
    for a, b in ((left, right), (left.t().contiguous().t(), right.t().contiguous().t())):
        ours = products.mm(a, b, torch.empty(m, n))
        assert (ours - exact).abs().max() <= 4 * (torch.mm(a, b) - exact).abs().max()
        total = torch.ones(m, n)
        assert torch.allclose(products.addmm_(total, a, b), 1 + exact.float(), rtol=1e-5, atol=1e-4)


def test_a_processor_that_rounds_is_found_out(monkeypatch):
    """As those with matrix units for bfloat16 would."""
    real = torch.mm

    def rounding(a, b):
        return real(a, b) if products._setting() == OFF else real(a.bfloat16(), b.bfloat16()).float()

    monkeypatch.setattr(torch, "mm", rounding)
    assert not products._is_exact()
    assert products._setting() == OFF


def test_layers_have_it_forward_and_backward_and_nothing_else_does(layer):
    head = products.Product()
    products.hook(head.modules())
    weight = torch.randn(50, 96, requires_grad=True)
    with Settings() as settings:
        x = layer(rows())
        x = F.scaled_dot_product_attention(x[None], x[None], x[None])[0]
        (head(x, weight) @ torch.ones(50, 3)).sum().backward()
    seen = settings.seen
    assert seen["addmm"] == [ON]
    assert sorted(seen["mm"]) == sorted([ON] * 5 + [OFF] * 2), "five of the layers' seven, and those of the last matrix"
    others = {name: set(found) for name, found in seen.items() if "attention" in name}
    assert others
    assert all(found == {OFF} for found in others.values())
    assert precise() == "highest"


def test_gradients_are_those_of_a_plain_layer(layer):
    plain = nn.Linear(128, 96)
    plain.load_state_dict(layer.state_dict())
    for one in (layer, plain):
        x = rows()
        slope = torch.autograd.grad(one(x).pow(2).sum(), x, create_graph=True)[0]
        slope.pow(2).sum().backward()  # A second time, as a penalty of gradients is.
        one.slopes = [x.grad, *(p.grad for p in one.parameters())]
    for ours, theirs in zip(layer.slopes, plain.slopes, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-3 * float(theirs.abs().max()))
    assert products._setting() == OFF


def test_small_ones_and_other_dtypes_are_torchs(layer):
    with Settings() as settings:
        layer(rows(1)).sum().backward()
        products.mm(torch.ones(2, 4), torch.ones(4, 2), torch.empty(2, 2))
        layer.bfloat16()(rows().bfloat16()).sum().backward()
    assert {each for found in settings.seen.values() for each in found} == {OFF}


def test_an_exception_leaves_it_at_most_until_the_next_product(layer):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(torch.ones(64, 256))
    layer(rows())
    assert products._setting() == OFF
    with pytest.raises(RuntimeError):
        products.mm(torch.ones(64, 256), torch.ones(2, 2), torch.empty(2, 2))
    assert products._setting() == OFF

    def fail(*_):
        raise ZeroDivisionError

    y = layer(x := rows())
    x.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    products.end()
    assert products._setting() == OFF


@pytest.mark.parametrize("theirs", ["tf32", "bf16"])
def test_a_setting_of_the_callers_stays(layer, theirs):
    torch.backends.mkldnn.matmul.fp32_precision = theirs  # type: ignore[attr-defined]
    with Settings() as settings:
        layer(rows()).sum().backward()
    assert {each for found in settings.seen.values() for each in found} == {theirs}
    assert products._setting() == theirs


def test_torchs_may_be_chosen(layer):
    products.choose("torch")
    assert products.in_use(torch.device("cpu"), torch.float32) == "torch"
    with Settings() as settings:
        layer(rows()).sum().backward()
    assert settings.seen["addmm"] == [OFF]
    products.choose("auto")
    assert products.in_use(torch.device("cpu"), torch.float32) == "oneDNN"
    assert products.in_use(torch.device("cpu"), torch.bfloat16) == "torch"
    assert products.in_use(torch.device("cuda"), torch.float32) == "torch"


def test_functional_transforms_go_around(layer):
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def total(parameters, x):
        return torch.func.functional_call(layer, parameters, (x,)).pow(2).sum()

    x = rows().detach()
    found = torch.func.grad(total)(parameters, x)["weight"]
    layer(x).pow(2).sum().backward()
    assert torch.allclose(found, layer.weight.grad, rtol=1e-4, atol=1e-2)
    each = torch.func.vmap(torch.func.grad(total), in_dims=(None, 0))(parameters, x)["weight"]
    assert torch.allclose(each.sum(0), found, rtol=1e-4, atol=1e-2)
    assert products._setting() == OFF
