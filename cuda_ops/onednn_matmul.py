"""Products of float32 matrices on CPUs, by oneDNN where that is faster than what torch calls.

torch multiplies float32 with MKL, which takes its AVX2 kernels on processors of AMD: half of what those with AVX-512
can do. oneDNN, which torch brings along, asks the processor what it can. torch calls it where float32 may be multiplied
as bfloat16 (`torch.backends.mkldnn.matmul.fp32_precision`), of which oneDNN makes use where there are matrix units for
it (AMX); without them its products are float32's. `faster` tries whether they are.

That setting is the process's. Here it holds only while a product is under way: small ones, as attention's, are slower
that way, and `torch.get_float32_matmul_precision` raises an error while it differs from other settings. Where a caller
has set it, it stays as it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from threading import Lock
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils.hooks import RemovableHandle

from cuda_ops.cpu_info import has_avx512, is_amd
from cuda_ops.torch_compat import Nothing

Choice = Literal["auto", "torch"]
"""Of the processor's, or what torch calls anyway."""

_UNSET, _OTHER = "none", "bf16"
"""The setting as it is where nobody has set it, and the one with which oneDNN multiplies."""

_PRODUCTS = frozenset({"MmBackward0", "AddmmBackward0", "BmmBackward0"})
_LONGEST_WAY = 8
"""Nodes of the graph between what a layer gives and its product: views, an added bias, exchanges between ranks."""

LEAST_ROWS, LEAST_ELEMENTS = 8, 1 << 13
"""Of what is multiplied by a matrix: with fewer, torch's own products are as fast or faster."""

MOST_SHAPES = 128
"""Of products of one engine that are oneDNN's: it keeps a tenth of a megabyte of machine code for each."""

_TRIED = ((256, 384, 256), (33, 77, 65), (512, 64, 1536), (1, 512, 512))
_EXACT = 2e-5
"""Shapes whose products are tried, and the greatest error in them, as a share of the greatest element. Factors that are
rounded to bfloat16 give some 1e-3."""


class Products:
    """By whom an engine multiplies float32, and the shapes that are oneDNN's, which are counted for each engine: the
    bits of a run must not depend on how many shapes others have multiplied in this process."""

    def __init__(self, choice: Choice = "auto") -> None:
        self.choice = choice
        self.shapes: set[tuple[int, ...]] = set()


class _Process:
    """Whose products kernels make now, and whether torch's setting is changed, by us."""

    def __init__(self) -> None:
        self.products = Products()
        self.changed = False
        self.lock = Lock()


_process = _Process()


@contextmanager
def within(products: Products) -> Iterator[None]:
    """Inside, kernels (`mm`, `addmm_`) multiply float32 as `products` says. Layers that have `hook` do so anyway."""
    before, _process.products = _process.products, products
    try:
        yield
    finally:
        _process.products = before


def in_use(device: torch.device, dtype: torch.dtype, choice: Choice) -> str:
    """Whose products of `dtype` on `device` this `choice` means: "oneDNN", or "torch", what torch calls of itself."""
    float32 = device.type == "cpu" and dtype is torch.float32
    return "oneDNN" if float32 and choice == "auto" and faster() else "torch"


@cache
def faster() -> bool:
    """Whether oneDNN's products of float32 are faster than torch's own on this processor, and as exact."""
    if not (is_amd() and has_avx512() and torch.backends.mkl.is_available() and _can_be_set()):
        return False
    if any(f"{name}_MAX_CPU_ISA" in os.environ for name in ("ONEDNN", "DNNL")):
        return False  # Somebody keeps it from taking AVX-512.
    with unset_fake_temporarily(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        return _is_exact()


def _can_be_set() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.backends.mkldnn, "matmul")


def _is_exact() -> bool:
    random = torch.Generator().manual_seed(0)
    kind: Any = {"generator": random, "dtype": torch.float32, "device": "cpu"}  # Whatever the caller's defaults are.
    before = _setting()
    try:
        for rows, inner, columns in _TRIED:
            left, right = (torch.randn(shape, **kind) for shape in ((rows, inner), (columns, inner)))
            _set(_OTHER)
            product = torch.mm(left, right.t())
            _set(before)
            exact = torch.mm(left.double(), right.double().t())
            if (product - exact).abs().max() > _EXACT * exact.abs().max():
                return False
    finally:
        _set(before)
    return True


def _setting() -> str:
    return torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]  # torch makes it at run time


def _set(value: str) -> None:
    torch.backends.mkldnn.matmul.fp32_precision = value  # type: ignore[attr-defined]  # as above


def begin() -> None:
    """The next products of float32 are oneDNN's, where that is faster and nobody has set anything."""
    if faster():
        with _process.lock:
            if _setting() == _UNSET:
                _set(_OTHER)
                _process.changed = True


def end() -> None:
    """What follows is torch's again. Of no effect where nothing has begun, or somebody has set something since."""
    with _process.lock:
        if _process.changed and _setting() == _OTHER:
            _set(_UNSET)
        _process.changed = False


@contextmanager
def _under_way(left: Tensor, right: Tensor) -> Iterator[None]:
    """While a kernel multiplies these."""
    products = _process.products
    if products.choice == "auto" and _is_wanted(left, right.shape[-1], products):
        begin()
    try:
        yield
    finally:
        end()


def mm(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """`torch.mm`, not differentiable, of matrices of any dtype on any device."""
    with _under_way(left, right):
        return torch.mm(left, right, out=out)


def addmm_(total: Tensor, left: Tensor, right: Tensor, *, beta: float = 1) -> Tensor:
    """`torch.Tensor.addmm_`, likewise."""
    with _under_way(left, right):
        return total.addmm_(left, right, beta=beta)


class Product(nn.Module):
    """x (…, C) times the transpose of a weight (V, C) that is another module's: a place for hooks, as a layer is."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """(…, V)."""
        return nn.functional.linear(x, weight)


# ---- layers ----------------------------------------------------------------------------------------------------------


def hook(modules: Iterable[nn.Module], products: Products | None = None) -> list[RemovableHandle]:
    """Let the linear layers among `modules` multiply float32 by oneDNN, forward and backward, until the handles are
    removed; shapes count among those of `products`. Their graph, and so what may be done with it, stays torch's; copies
    of them are as they were."""
    products = products or Products()
    handles = []
    for layer in filter(_is_linear, modules):
        handles += [
            layer.register_forward_pre_hook(_Hook(partial(_before_forward, products))),
            layer.register_forward_hook(_Hook(partial(_after_forward, products)), always_call=True),
        ]
    return handles


class _Hook:
    """A hook that copies of its module have not."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> None:
        if not torch.compiler.is_compiling():  # Else the compiler makes the products.
            self.function(*args)

    def __reduce__(self) -> Any:
        return Nothing, ()


def _is_linear(module: nn.Module) -> bool:
    # Conv1D is how GPT-2 has its linear layers in transformers, which is not imported for that.
    return isinstance(module, nn.Linear | Product) or type(module).__name__ == "Conv1D"


def _outputs(layer: nn.Module) -> int:
    """Of a layer, as it was made; 0 where it does not say."""
    return getattr(layer, "out_features", 0) or getattr(layer, "nf", 0)


def _before_forward(products: Products, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    if inputs and _is_wanted(inputs[0], _outputs(layer), products):
        begin()


def _after_forward(products: Products, layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    end()
    has_backward = isinstance(output, Tensor) and output.requires_grad
    if not (inputs and has_backward and _is_wanted(inputs[0], _outputs(layer), products)):
        return
    node = output.grad_fn
    for _ in range(_LONGEST_WAY):
        if node is None:
            return
        if node.name() in _PRODUCTS:
            node.register_prehook(_before_backward)
            node.register_hook(_after_backward)
            return
        node = node.next_functions[0][0] if node.next_functions else None


def _is_wanted(x: Any, columns: int, products: Products) -> bool:
    """Whether the product of `x` and a matrix of so many `columns` is oneDNN's, by what it is. Not that of fake tensors
    and the like, nor of a shape that came when there were many of these `products`."""
    if not (
        type(x) in (Tensor, nn.Parameter)
        and x.dtype is torch.float32
        and x.is_cpu
        and not x.is_nested
        and x.dim() > 1
        and x.numel() >= max(LEAST_ELEMENTS, LEAST_ROWS * x.shape[-1])
        and not torch._C._are_functorch_transforms_active()
    ):
        return False
    inner = x.shape[-1]
    shape = (x.numel() // inner, inner, columns)
    if shape not in products.shapes and len(products.shapes) < MOST_SHAPES:
        products.shapes.add(shape)
    return shape in products.shapes


def _before_backward(gradients: tuple[Tensor | None, ...]) -> None:
    if not torch.compiler.is_compiling():
        begin()


def _after_backward(inputs: tuple[Tensor | None, ...], outputs: tuple[Tensor | None, ...]) -> None:
    if not torch.compiler.is_compiling():
        end()
