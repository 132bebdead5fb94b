"""Products of float32 by oneDNN: as exact as torch's, and nothing but products is changed."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from cuda_ops import onednn_matmul

ON, OFF = "bf16", "none"


class Settings(TorchDispatchMode):
    """By the name of each operation: the settings with which it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[str]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.setdefault(func.overloadpacket.__name__, []).append(onednn_matmul._setting())
        return func(*args, **(kwargs or {}))


REALLY = onednn_matmul.faster()


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if this processor were one where oneDNN is faster: the setting is tried everywhere, its values only there."""
    monkeypatch.setattr(onednn_matmul, "faster", lambda: True)
    monkeypatch.setattr(onednn_matmul._process, "products", onednn_matmul.Products())
    before = onednn_matmul._setting()
    onednn_matmul._set(OFF)
    yield
    onednn_matmul._set(before)


@pytest.fixture
def layer(faster: None) -> nn.Linear:
    layer = nn.Linear(128, 96)
    onednn_matmul.hook(layer.modules())
    return layer


def rows(count: int = 64) -> torch.Tensor:
    return torch.randn(2, count, 128, generator=torch.Generator().manual_seed(0)).requires_grad_()


def precise() -> str:
    """What torch says of its precision; it raises an error while backends differ."""
    return torch.get_float32_matmul_precision()


only_where_it_is = pytest.mark.skipif(not REALLY, reason="oneDNN's products are not faster on this processor")


@only_where_it_is
@pytest.mark.parametrize("shape", [(64, 128, 96), (512, 384, 1536), (100, 1000, 17), (9, 4096, 3)])
def test_products_are_as_exact_as_torchs(shape):
    m, k, n = shape
    random = torch.Generator().manual_seed(1)
    left, right = torch.randn(m, k, generator=random), torch.randn(k, n, generator=random)
    exact = left.double() @ right.double()
    for a, b in ((left, right), (left.t().contiguous().t(), right.t().contiguous().t())):
        ours = onednn_matmul.mm(a, b, torch.empty(m, n))
        assert (ours - exact).abs().max() <= 4 * (torch.mm(a, b) - exact).abs().max()
        total = torch.ones(m, n)
        assert torch.allclose(onednn_matmul.addmm_(total, a, b), 1 + exact.float(), rtol=1e-5, atol=1e-4)


def test_a_processor_that_rounds_is_found_out(monkeypatch):
    """As those with matrix units for bfloat16 would."""
    real = torch.mm

    def rounding(a, b):
        return real(a, b) if onednn_matmul._setting() == OFF else real(a.bfloat16(), b.bfloat16()).float()

    monkeypatch.setattr(torch, "mm", rounding)
    assert not onednn_matmul._is_exact()
    assert onednn_matmul._setting() == OFF


def test_layers_have_it_forward_and_backward_and_nothing_else_does(layer):
    head = onednn_matmul.Product()
    onednn_matmul.hook(head.modules())
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


@only_where_it_is
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
    assert onednn_matmul._setting() == OFF


def test_small_ones_and_other_dtypes_are_torchs(layer):
    with Settings() as settings:
        layer(rows(1)).sum().backward()
        onednn_matmul.mm(torch.ones(2, 4), torch.ones(4, 2), torch.empty(2, 2))
        layer.bfloat16()(rows().bfloat16()).sum().backward()
    assert {each for found in settings.seen.values() for each in found} == {OFF}


def test_an_exception_leaves_nothing(layer):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(torch.ones(64, 256))
    assert onednn_matmul._setting() == OFF
    with pytest.raises(RuntimeError):
        onednn_matmul.mm(torch.ones(64, 256), torch.ones(2, 2), torch.empty(2, 2))
    assert onednn_matmul._setting() == OFF


def test_one_within_backward_leaves_it_until_the_next_product(layer):
    """And what the caller sets meanwhile stays."""
    for theirs in (None, "tf32"):
        y = layer(layer(rows()) @ torch.ones(96, 128))
        with torch.no_grad():
            layer.weight.mul_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        assert onednn_matmul._setting() == ON
        if theirs:
            onednn_matmul._set(theirs)
        layer(rows())
        assert onednn_matmul._setting() == (theirs or OFF)
        onednn_matmul._set(OFF)


def test_with_many_shapes_further_ones_are_torchs(layer, monkeypatch):
    """oneDNN keeps machine code for each."""
    monkeypatch.setattr(onednn_matmul, "MOST_SHAPES", 2)
    with Settings() as settings, torch.no_grad():
        for count in (64, 65, 66, 64, 66):
            layer(rows(count))
    assert settings.seen["addmm"] == [ON, ON, OFF, ON, OFF]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_is_no_matrix_is_left_alone(layer):
    nested = torch.nested.nested_tensor([torch.randn(300, 128), torch.randn(200, 128)])
    assert [each.shape[1] for each in layer(nested).unbind()] == [96, 96]

    class Scaled(nn.Linear):
        def forward(self, factor, x):
            return super().forward(x) * factor

    scaled = Scaled(128, 4)
    onednn_matmul.hook(scaled.modules())
    assert scaled(torch.tensor(2.0), rows()).shape == (2, 64, 4)


def test_a_copy_has_no_hooks_of_ours(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    assert b"products" not in file.getvalue()
    read = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    with Settings() as settings:
        for twin in (copy.deepcopy(layer), read):
            twin(rows()).sum().backward()
    assert {each for found in settings.seen.values() for each in found} == {OFF}


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # The compiler asks its inputs for theirs.
def test_compiled_parts_within_a_checkpoint(layer):
    """What they save is the same when they are computed again, in the midst of a product."""
    inner = nn.Sequential(nn.Linear(96, 128), nn.GELU(approximate="tanh"), nn.LayerNorm(128), nn.Linear(128, 128))
    onednn_matmul.hook(inner.modules())
    compiled = torch.compile(inner, backend="aot_eager")
    x = rows()
    checkpoint(lambda x: layer(compiled(layer(x))), x, use_reentrant=False).sum().backward()
    assert x.grad is not None
    assert onednn_matmul._setting() == OFF


@pytest.mark.parametrize("theirs", ["tf32", "bf16", "ieee"])
def test_a_setting_of_the_callers_stays(layer, theirs):
    torch.backends.mkldnn.matmul.fp32_precision = theirs  # type: ignore[attr-defined]
    with Settings() as settings:
        layer(rows()).sum().backward()
    assert {each for found in settings.seen.values() for each in found} == {theirs}
    assert onednn_matmul._setting() == theirs


def test_torchs_may_be_chosen(layer):
    a, b, out = torch.ones(128, 128), torch.ones(128, 64), torch.empty(128, 64)
    for choice, setting in (("auto", ON), ("torch", OFF)):
        with onednn_matmul.within(onednn_matmul.Products(choice)), Settings() as settings:
            onednn_matmul.addmm_(onednn_matmul.mm(a, b, out), a, b)
        assert settings.seen == {"mm": [setting], "addmm_": [setting]}
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert onednn_matmul.in_use(cpu, torch.float32, "torch") == "torch"
    assert onednn_matmul.in_use(cpu, torch.float32, "auto") == "oneDNN"
    assert onednn_matmul.in_use(cpu, torch.bfloat16, "auto") == "torch"
    assert onednn_matmul.in_use(cuda, torch.float32, "auto") == "torch"


@only_where_it_is
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
    assert onednn_matmul._setting() == OFF
