"""float32 matrix products on AMD CPUs with oneDNN, if oneDNN is faster than torch's default.

torch multiplies float32 with MKL. On AMD processors MKL uses its AVX2 kernels, with half the speed of AVX-512. oneDNN,
which is part of torch, chooses its kernels by the processor's features.

torch calls oneDNN if float32 may be multiplied as bfloat16 (`torch.backends.mkldnn.matmul.fp32_precision`). oneDNN
rounds to bfloat16 only if the processor has matrix units for it (AMX); otherwise its products are full float32.
`faster` checks this by a trial.

The setting is global for the process. It is set only during a product, for two reasons: small products, as in
attention, are slower with oneDNN, and `torch.get_float32_matmul_precision` raises an error while the setting differs
from other settings. A setting made by the caller is never changed.
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
""""auto" chooses by the processor; "torch" keeps torch's default."""

_UNSET, _OTHER = "none", "bf16"
"""The default of the setting, and the value with which torch calls oneDNN."""

_PRODUCTS = frozenset({"MmBackward0", "AddmmBackward0", "BmmBackward0"})
_LONGEST_WAY = 8
"""Maximum number of graph nodes between a layer's output and its product: views, an added bias, exchanges
between ranks.
"""

LEAST_ROWS, LEAST_ELEMENTS = 8, 1 << 13
"""Minimum size of the left matrix: below it, torch's own products are as fast or faster."""

MOST_SHAPES = 128
"""Maximum number of oneDNN shapes per engine: oneDNN keeps a tenth of a megabyte of machine code for each."""

_TRIED = ((256, 384, 256), (33, 77, 65), (512, 64, 1536), (1, 512, 512))
_EXACT = 2e-5
"""Shapes of the trial products, and the maximum error as a share of the greatest element. Factors rounded to bfloat16
would give about 1e-3.
"""


class Products:
    """The choice of an engine, and the shapes that it multiplies with oneDNN.

    Shapes are counted per engine: the bits of a run must not depend on how many shapes other engines in this process
    have used.

    Args:
        choice: "auto" or "torch".
    """

    def __init__(self, choice: Choice = "auto") -> None:
        self.choice = choice
        self.shapes: set[tuple[int, ...]] = set()


class _Process:
    """The current `Products` of the kernels, and whether this module has changed torch's setting."""

    def __init__(self) -> None:
        self.products = Products()
        self.changed = False
        self.lock = Lock()


_process = _Process()


@contextmanager
def within(products: Products) -> Iterator[None]:
    """Use `products` for the kernels `mm` and `addmm_` inside the context. Layers with `hook` use theirs anyway.

    Args:
        products: The engine's products.
    """
    before, _process.products = _process.products, products
    try:
        yield
    finally:
        _process.products = before


def in_use(device: torch.device, dtype: torch.dtype, choice: Choice) -> str:
    """Return the library that multiplies: "oneDNN" or "torch".

    Args:
        device: Device of the matrices.
        dtype: dtype of the matrices.
        choice: The engine's choice.
    """
    float32 = device.type == "cpu" and dtype is torch.float32
    return "oneDNN" if float32 and choice == "auto" and faster() else "torch"


@cache
def faster() -> bool:
    """Return whether oneDNN's float32 products are faster than torch's own on this processor, and as exact."""
    if not (is_amd() and has_avx512() and torch.backends.mkl.is_available() and _can_be_set()):
        return False
    if any(f"{name}_MAX_CPU_ISA" in os.environ for name in ("ONEDNN", "DNNL")):
        return False  # The user may have disabled AVX-512 for oneDNN.
    with unset_fake_temporarily(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        return _is_exact()


def _can_be_set() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.backends.mkldnn, "matmul")


def _is_exact() -> bool:
    random = torch.Generator().manual_seed(0)
    kind: Any = {"generator": random, "dtype": torch.float32, "device": "cpu"}  # Ignore the caller's defaults.
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
    """Switch the following float32 products to oneDNN, if that is faster and the setting has its default."""
    if faster():
        with _process.lock:
            if _setting() == _UNSET:
                _set(_OTHER)
                _process.changed = True


def end() -> None:
    """Switch back to torch's default. Does nothing without a `begin`, or if other code has changed the setting
    since.
    """
    with _process.lock:
        if _process.changed and _setting() == _OTHER:
            _set(_UNSET)
        _process.changed = False


@contextmanager
def _under_way(left: Tensor, right: Tensor) -> Iterator[None]:
    """Use oneDNN for the product of these matrices, if it is chosen."""
    products = _process.products
    if products.choice == "auto" and _is_wanted(left, right.shape[-1], products):
        begin()
    try:
        yield
    finally:
        end()


def mm(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """Compute `torch.mm` into `out`. Not differentiable.

    Args:
        left: (m, k), any dtype and device.
        right: (k, n).
        out: (m, n); overwritten.
    """
    with _under_way(left, right):
        return torch.mm(left, right, out=out)


def addmm_(total: Tensor, left: Tensor, right: Tensor, *, beta: float = 1) -> Tensor:
    """Add the product of `left` and `right` to `total` times `beta`, in place. Not differentiable.

    Args:
        total: (m, n); updated in place.
        left: (m, k), any dtype and device.
        right: (k, n).
        beta: Factor of `total`.
    """
    with _under_way(left, right):
        return total.addmm_(left, right, beta=beta)


class Product(nn.Module):
    """The product of x (…, C) and the transpose of another module's weight (V, C), as a module, so that it can have
    hooks.
    """

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return (…, V).

        Args:
            x: (…, C).
            weight: (V, C).
        """
        return nn.functional.linear(x, weight)


# ---- layers ----------------------------------------------------------------------------------------------------------


def hook(modules: Iterable[nn.Module], products: Products | None = None) -> list[RemovableHandle]:
    """Let linear layers multiply float32 with oneDNN, forward and backward.

    The autograd graph stays torch's. Copies of the modules do not get the hooks.

    Args:
        modules: Modules; only linear layers are used.
        products: Counts the shapes; a new object if None.

    Returns:
        Handles that remove the hooks.
    """
    products = products or Products()
    handles = []
    for layer in filter(_is_linear, modules):
        handles += [
            layer.register_forward_pre_hook(_Hook(partial(_before_forward, products))),
            layer.register_forward_hook(_Hook(partial(_after_forward, products)), always_call=True),
        ]
    return handles


class _Hook:
    """A hook that copies of its module do not get."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> None:
        if not torch.compiler.is_compiling():  # While compiling, the compiler chooses the product.
            self.function(*args)

    def __reduce__(self) -> Any:
        return Nothing, ()


def _is_linear(module: nn.Module) -> bool:
    # Conv1D is the linear layer of GPT-2 in transformers. Compare the name, to avoid the import.
    return isinstance(module, nn.Linear | Product) or type(module).__name__ == "Conv1D"


def _outputs(layer: nn.Module) -> int:
    """Return the number of outputs of a layer; 0 if unknown."""
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
    """Return whether to multiply `x` by a matrix with this number of `columns` with oneDNN.

    Not for fake tensors and the like, and not for a new shape after MOST_SHAPES shapes.
    """
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
