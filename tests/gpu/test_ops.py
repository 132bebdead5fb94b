"""Operations on a real GPU: the same numbers as on a CPU, on torch's current stream, without a copy or a wait."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cuda_ops import gpu
from cuda_ops.adam_frozen_variance import adam_frozen
from cuda_ops.adamw import adamw
from cuda_ops.blockquant import block_dequantize_sum, block_quantize
from cuda_ops.blockwise8 import blockwise8_decode, blockwise8_encode
from cuda_ops.grad_stats import grad_stats
from cuda_ops.kernel_usage import meter
from cuda_ops.lamb import lamb_moments
from cuda_ops.onebit import CHUNK, onebit_average, onebit_pack, onebit_take
from cuda_ops.sgd_momentum import sgd_momentum
from cuda_ops.stochastic import round_stochastically

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not gpu.available(), reason="numba-cuda is not installed"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this torch has no CUDA device"),
]

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [0, 1, 255, 256, 257, 1_000_003]
ADAMW = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 3, "factor": 0.5}
SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True, "factor": 0.5}


def both(
    function: Callable[..., object], tensors: list[Tensor], **numbers: object
) -> tuple[list[Tensor], list[Tensor]]:
    """What `function` leaves in these tensors and returns, on a CPU and on a GPU."""
    results = []
    for device in ("cpu", "cuda"):
        moved = [tensor.to(device, copy=True) for tensor in tensors]
        returned = function(*moved, **numbers)
        outputs = [returned] if isinstance(returned, Tensor) else list(returned or ())
        results.append([tensor.cpu() for tensor in (*moved, *outputs)])
    return results[0], results[1]


def close(results: tuple[list[Tensor], list[Tensor]], tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance, equal_nan=True)


def values_of(size: int, dtype: torch.dtype) -> Tensor:
    values = torch.randn(size, generator=torch.Generator().manual_seed(size))
    if size > 100:
        values[:7] = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, 3e38])
    return values.to(dtype)


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", SIZES)
def test_updates(size, dtype, copy) -> None:
    states = [torch.randn(size), values_of(size, dtype), torch.randn(size), torch.rand(size)]
    copied = [torch.zeros(size, dtype=torch.bfloat16)] if copy else []
    close(both(adamw, [*states, *copied], **ADAMW), 1e-5 if not copy else 1e-2)
    close(both(sgd_momentum, [*states[:3], *copied], **SGD), 1e-5 if not copy else 1e-2)
    numbers = {name: value for name, value in ADAMW.items() if name != "lr"}
    close(both(lamb_moments, states, **numbers), 1e-4)
    frozen = {"size": 1e-2, "decay": 1e-3, "eps": 1e-8}
    close(both(adam_frozen, [*states[:3], states[3] + 0.1, *copied], **frozen), 1e-5 if not copy else 1e-2)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [*SIZES, 20_000_003])
def test_grad_stats(size, dtype) -> None:
    grad = torch.randn(size).to(dtype)
    on_cpu, on_gpu = (result[1] for result in both(grad_stats, [grad]))
    torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-6, atol=0)
    if size:
        grad[size // 2] = math.nan
        squares, not_finite = grad_stats(grad.cuda()).tolist()
        assert math.isnan(squares)
        assert not_finite == 1


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [*SIZES, CHUNK - 1, CHUNK, CHUNK + 1])
def test_onebit(size, dtype) -> None:
    values = torch.randn(size).to(dtype)
    close(both(onebit_pack, [values, torch.randn(size)]), 1e-5)
    packed, scales = onebit_pack(values, torch.randn(size))
    rows, weights = torch.stack([packed, ~packed, packed]), torch.stack([scales, 2 * scales, 4 * scales])
    close(both(onebit_average, [rows, weights, torch.zeros(size, dtype=dtype)]), 1e-6 if dtype.itemsize == 4 else 1e-2)
    close(both(onebit_take, [rows, weights, torch.randn(3 * size), torch.zeros(3 * size)], share=0.9), 1e-4)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", SIZES)
def test_blockwise8(size, dtype, signed) -> None:
    values = values_of(size, dtype) if signed else values_of(size, dtype).abs()
    codes, scales = torch.zeros(size, dtype=torch.uint8), torch.zeros(-(-size // 256))
    on_cpu, on_gpu = both(blockwise8_encode, [values, codes, scales], signed=signed)
    close((on_cpu, on_gpu), 0)
    close(both(blockwise8_decode, [*on_cpu[1:], torch.zeros(size, dtype=dtype)], signed=signed), 0)


@pytest.mark.parametrize("offset", [0, 2**32 - 100])
@pytest.mark.parametrize("size", SIZES)
def test_rounding(size, offset) -> None:
    target = torch.zeros(size, dtype=torch.bfloat16)
    close(both(round_stochastically, [values_of(size, torch.float32), target], seed=3, step=5, offset=offset), 0)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("block", [32, 256, 2048])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", SIZES)
def test_blockquant(size, dtype, block, bits) -> None:
    values = values_of(size, dtype)
    results = both(block_quantize, [values], bits=bits, block=block)
    close(results, 0)
    quantized, scales = results[0][1:]
    rows, weights = torch.stack([quantized, quantized]), torch.stack([scales, 3 * scales])
    out = torch.zeros(size, dtype=dtype)
    close(
        both(block_dequantize_sum, [rows, weights, out], block=block, average=True), 1e-6 if out.itemsize == 4 else 1e-2
    )


def test_on_torchs_current_stream_without_waiting() -> None:
    states = [torch.ones(1 << 20, device="cuda") for _ in range(4)]
    adamw(*states, **ADAMW)  # Compiled here, not below.
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2_000_000_000)  # About a second.
        states[1].fill_(3.0)
        for tensor in (states[0], states[2], states[3]):
            tensor.fill_(1.0)
        torch.cuda.set_sync_debug_mode("error")
        try:
            adamw(*states, **ADAMW)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not stream.query(), "the launch waited for the stream"
    stream.synchronize()
    expected = [torch.full((1,), value) for value in (1.0, 3.0, 1.0, 1.0)]
    adamw(*expected, **ADAMW)
    torch.testing.assert_close(states[0].cpu(), expected[0].expand(1 << 20))


def test_the_meter_takes_times_from_the_device() -> None:
    grad = torch.ones(1 << 24, device="cuda")
    grad_stats(grad)
    torch.cuda.synchronize()
    meter.take()
    grad_stats(grad)
    torch.cuda.synchronize()
    use = meter.take()["grad_stats"]
    assert (use.calls, use.nbytes) == (1, grad.nbytes)
    assert 0 < use.seconds < 1


def test_bad_input_is_refused_before_a_launch() -> None:
    states = [torch.ones(8, device="cuda") for _ in range(4)]
    with pytest.raises(ValueError, match=r"grad: device is cpu, expected cuda:0"):
        adamw(states[0], torch.ones(8), *states[2:], **ADAMW)
    with pytest.raises(ValueError, match=r"grad: strides are \(2,\)"):
        adamw(states[0], torch.ones(16, device="cuda")[::2], *states[2:], **ADAMW)
