"""Cross-entropy of a linear layer without storing all logits: one chunk of tokens at a time.

Gradients are computed in the forward pass, so that logits are computed once (the idea of Liger Kernel,
arXiv:2410.10989). N tokens, C hidden size, V vocabulary. On CPUs, for each chunk of n tokens:

1. Compute logits = weight hiddenᵀ, (V, n), one block of the vocabulary at a time. With the vocabulary first, all three
   matrix products are faster, and a kernel works on all tokens of a chunk at once, without sums across a vector
   register.
2. One kernel replaces a block, while the block is in the cache, by e = exp(logit - reference) and sums it per token.
   The reference need not be the greatest logit. The greatest of the first block is enough, unless a later logit is
   greater by more than 57; then the chunk is computed again with the greatest.
3. loss = reference + log(sum) - target's logit. Subtract the sum from the target's e.
4. The result is the gradient except for a factor 1 / (sum · count) per token. Multiplying vectors of length C by the
   factor is cheaper than multiplying V logits: grad_hidden = factor · (eᵀ weight), grad_weight += e (factor · hidden).
5. With 16-bit floats and more than two chunks, sum grad_weight in float32 (V · C · 4 bytes) and round once. torch
   rounds each chunk's product. In return, the contributions of the targets, by far the greatest, are added exactly.
   The error is that of full logits, or a few percent more. (With one or two chunks it is up to 1.9 times that: e is
   rounded to 16 bits at the targets, and the sum of two adds a tenth.)

On CUDA, and for float16, which CPUs do not multiply fast, torch operations compute the same chunks. On CUDA the host
never waits: no shape and no branch depends on values. Products enter the float32 sums unrounded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cuda_ops import onednn_matmul
from cuda_ops.compile import kernel
from cuda_ops.kernel_math import LOG2_E, exp2, load, store
from cuda_ops.kernel_usage import meter
from cuda_ops.library import register, register_autograd
from cuda_ops.parallel_for import share
from cuda_ops.reduce import sum_at
from cuda_ops.tensor_checks import FLOATS, array, check

_BLOCK = 4096
"""Rows of the vocabulary whose logits and exponentials are computed while they are in the cache."""

_GROUP = 128
"""Rows of the vocabulary that are summed together. Fixed, so that the sums do not depend on the number of threads."""

_SUM_LIMIT = 1e25
"""Greatest sum of exponentials for which all products stay in the range of float32 and bfloat16."""


def linear_cross_entropy_reference(hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
    """Return the loss, computed with torch. This defines `linear_cross_entropy`.

    Args:
        hidden: (N, C).
        weight: (V, C).
        targets: (N,) int64.
        ignore_index: Targets with this value do not count.
    """
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, ignore_index=ignore_index)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int = -100, chunk: int | None = None
) -> Tensor:
    """Return the mean cross-entropy of the logits `hidden weightᵀ`: a float32 scalar, differentiable once, in one
    backward pass.

    Memory: the logits of a chunk and the gradients. In addition V · C · 4 bytes while the function runs, if `weight`
    has 16 bits and needs a gradient, and there are more than two chunks.

    Args:
        hidden: (N, C) float32, bfloat16 or float16.
        weight: (V, C), of the same dtype.
        targets: (N,) int64 in [0, V), or `ignore_index`. On CPUs, other values are refused. On CUDA they do not count,
            because a check would wait for the device. If no target counts, the loss is NaN.
        ignore_index: Targets with this value do not count.
        chunk: Tokens at a time; None for a tenth of N, or more if that is little.

    Raises:
        ValueError: Wrong dtypes, shapes, strides, devices, or (on CPUs) targets out of range.
        RuntimeError: A second backward pass through the same loss.
    """
    grad = torch.is_grad_enabled()
    tokens = default_chunk(len(hidden), weight.shape[0], hidden.dtype) if chunk is None else chunk
    return _loss(
        hidden, weight, targets, ignore_index, tokens, grad and hidden.requires_grad, grad and weight.requires_grad
    )[0]


def default_chunk(tokens: int, vocabulary: int, dtype: torch.dtype) -> int:
    """Return the default number of tokens per chunk.

    A tenth of the tokens, so that a tenth of the logits is in memory. More if the logits take less than 16 MiB. At
    most 1,024, because products gain nothing from more.

    Args:
        tokens: Number of tokens.
        vocabulary: Number of rows of the weight.
        dtype: dtype of the logits.
    """
    cheap = min(256, (16 << 20) // max(1, vocabulary * dtype.itemsize))
    return min(1024, max(tokens // 10, cheap, 16)) // 16 * 16


@kernel()
def _exponentials(start: int, stop: int, logits: Any, reference: Any, rows: Any, sums: Any, picked: Any) -> None:
    """Replace `logits` (rows, n) of the groups [start, stop) by 2 to the power of (logits · log2 e - reference).

    Write the sum over each group to `sums` (groups, n). Before that, write the logit in row `rows`[j] of column j to
    `picked` (n), if these groups contain the row.
    """
    for group in range(start, stop):
        low = group * _GROUP
        block = logits[low : min(low + _GROUP, logits.shape[0])]
        for j in range(rows.shape[0]):
            row = rows[j] - low
            if row >= 0 and row < block.shape[0]:
                picked[j] = load(block[row], j)
        total = sums[group]
        for j in range(total.shape[0]):
            total[j] = 0
        for i in range(block.shape[0]):
            line = block[i]
            for j in range(line.shape[0]):
                value = exp2(load(line, j) * LOG2_E - reference[j])
                total[j] += value
                store(line, j, value)


def _chunk_exponentials(
    hidden: Tensor, weight: Tensor, targets: Tensor, reference: Tensor | None, buffer: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Do steps 1 and 2 for n tokens. Return references (n,) in powers of two, sums (n,) and targets' logits (n,),
    float32.

    The exponentials stay in `buffer` (V, n), or only those of the last block if `buffer` has fewer rows.
    """
    vocabulary, n = weight.shape[0], hidden.shape[0]
    sums = torch.empty(-(-vocabulary // _GROUP), n)
    picked = torch.zeros(n)
    kept = buffer.shape[0] == vocabulary
    for low in range(0, vocabulary, _BLOCK):
        high = min(low + _BLOCK, vocabulary)
        logits = buffer[low:high] if kept else buffer[: high - low]
        onednn_matmul.mm(weight[low:high], hidden.t(), out=logits)
        if reference is None:
            reference = _greatest(logits)
        groups = sums[low // _GROUP : -(-high // _GROUP)]
        with meter.record("linear_cross_entropy", 2 * logits.nbytes, logits.device):
            arguments = (logits, reference, targets - low, groups, picked)
            worth = max(1, (1 << 17) // (_GROUP * n))  # 131,072 elements, counted in groups
            share(_exponentials, groups.shape[0], *(array(each) for each in arguments), multiple=1, worth=worth)
    assert reference is not None
    return reference, sums.sum(0, dtype=torch.float64).float(), picked


def exponentials(
    hidden: Tensor, weight: Tensor, targets: Tensor, buffer: Tensor, base: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Do steps 1 and 2 for a chunk, for callers that do step 3 themselves. CPU, float32 or bfloat16.

    Args:
        hidden: (n, C).
        weight: (V, C), or some of its rows.
        targets: (n,) int64, each a row of `weight`, or any other number for no target.
        buffer: (V, n), filled with e = exp(logit - base); or fewer rows (one block), if only the sums are needed.
        base: (n,) float64; None to choose one for which all products stay in range.

    Returns:
        (base (n,) float64, sums of e (n,) float32, targets' logits (n,) float32, 0 without a target).
    """
    reference = None if base is None else (base * float(LOG2_E)).float()
    reference, sums, picked = _chunk_exponentials(hidden, weight, targets, reference, buffer)
    if base is None and not (sums <= _SUM_LIMIT).all():
        reference = _chunk_greatest(hidden, weight)
        reference, sums, picked = _chunk_exponentials(hidden, weight, targets, reference, buffer)
    return reference.double() / float(LOG2_E), sums, picked  # Exactly what the kernel subtracted.


def _greatest(logits: Tensor) -> Tensor:
    """Return the greatest logit of each token times log2 e: (n,) float32, finite even if all are -inf."""
    return logits.amax(0).float().clamp_(min=-1e30).mul_(float(LOG2_E))


def _chunk_greatest(hidden: Tensor, weight: Tensor) -> Tensor:
    blocks = [_greatest(weight[low : low + _BLOCK] @ hidden.t()) for low in range(0, weight.shape[0], _BLOCK)]
    return torch.stack(blocks).amax(0)


def _cpu(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    chunk: int,
    need_hidden: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(hidden, weight, targets, chunk)
    check_range(targets, weight.shape[0], ignore_index)
    if hidden.dtype is torch.float16:
        return _by_torch(hidden, weight, targets, ignore_index, chunk, need_hidden, need_weight)
    ignored = uncounted(targets, weight.shape[0], ignore_index)
    count = len(targets) - ignored.sum()
    grad_hidden, total = _new_gradients(hidden, weight, need_hidden, need_weight, chunk)
    rows = weight.shape[0] if need_hidden or need_weight else min(weight.shape[0], _BLOCK)
    memory = hidden.new_empty(rows * min(chunk, len(targets)))
    loss = torch.zeros((), dtype=torch.float64)
    for low in range(0, len(targets), chunk):
        inputs, labels, left_out = (rows_from(each, low, chunk) for each in (hidden, targets, ignored))
        e = memory[: rows * len(labels)].view(rows, len(labels))  # (V, n), or one block of it
        # Steps 1 and 2: logits, exponentials and their sums.
        base, sums, picked = exponentials(inputs, weight, labels, e)
        # Step 3: the loss, and the exponential at the target minus the sum.
        loss += (base + sums.log() - picked).masked_fill(left_out, 0).sum()
        at_targets = (picked - base).float().exp()
        if need_hidden or need_weight:
            replace_targets(e, labels, at_targets - sums)
        # Steps 4 and 5: gradients, with the factor of each token.
        factors = (1 / (sums * count)).masked_fill(left_out, 0).unsqueeze(1)
        if need_hidden:
            onednn_matmul.mm(e.t(), weight, out=rows_from(grad_hidden, low, chunk)).mul_(factors)
        if need_weight:
            add_chunk(total, e, inputs, factors, labels, at_targets, sums, first=low == 0)
    return (loss / count).float(), grad_hidden, total.to(weight.dtype), torch.ones(())


def _by_torch(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    chunk: int,
    need_hidden: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(hidden, weight, targets, chunk)
    ignored = uncounted(targets, weight.shape[0], ignore_index)
    count = len(targets) - ignored.sum()
    one = torch.ones((), device=hidden.device)
    # In float16, most gradients of a mean over many tokens would be zero: keep the sum until the backward pass.
    share_of_token, left = (one, 1 / count.clamp(min=1)) if hidden.dtype is torch.float16 else (1 / count, one)
    grad_hidden, total = _new_gradients(hidden, weight, need_hidden, need_weight, chunk)
    loss = torch.zeros((), device=hidden.device)
    for low in range(0, len(targets), chunk):
        inputs, labels, left_out = (rows_from(each, low, chunk) for each in (hidden, targets, ignored))
        labels = labels.masked_fill(left_out, 0).unsqueeze(1)
        log_p = torch.log_softmax(inputs @ weight.t(), dim=1, dtype=torch.float32)  # (n, V)
        loss -= log_p.gather(1, labels).squeeze(1).masked_fill(left_out, 0).sum()
        if not (need_hidden or need_weight):
            continue
        factors = share_of_token.expand(len(inputs)).masked_fill(left_out, 0).unsqueeze(1)
        gradient = log_p.exp_().scatter_add_(1, labels, -torch.ones_like(factors)).mul_(factors).to(hidden.dtype)
        if need_hidden:
            torch.mm(gradient, weight, out=rows_from(grad_hidden, low, chunk))
        if need_weight:
            add_product(total, gradient.t(), inputs, first=low == 0)
    return loss / count, grad_hidden, total.to(weight.dtype), left


def uncounted(targets: Tensor, vocabulary: int, ignore_index: int) -> Tensor:
    """Return (N,) bool: the targets that do not count, because they are `ignore_index` or no row of the vocabulary.

    Args:
        targets: (N,) int64.
        vocabulary: Number of rows.
        ignore_index: Targets with this value do not count.
    """
    return (targets == ignore_index) | (targets < 0) | (targets >= vocabulary)


def replace_targets(e: Tensor, rows: Tensor, values: Tensor) -> None:
    """Set e[rows[j], j] = values[j] for each column j whose row is in `e`.

    Writes to every column, and keeps the old value if there is nothing to replace: a search for the affected columns
    would make the host wait for a GPU.

    Args:
        e: (V, n); changed in place.
        rows: (n,) int64.
        values: (n,).
    """
    # Use indices: on a CPU, scatter_ copies all of `e` first.
    nearest, columns = rows.clamp(0, e.shape[0] - 1), torch.arange(rows.shape[0], device=e.device)
    present = e.gather(0, nearest.unsqueeze(0)).squeeze(0)
    e.index_put_((nearest, columns), torch.where(nearest == rows, values.to(e.dtype), present))


def sum_dtype(weight: Tensor, tokens: int, chunk: int) -> torch.dtype:
    """Return the dtype in which the gradient of `weight` is summed over chunks.

    Float32 for 16-bit floats with more than two chunks. The sum of two chunks has one more rounding than a single
    product, and float32 would cost a tenth of a small model's step.

    Args:
        weight: (V, C).
        tokens: Number of tokens.
        chunk: Tokens per chunk.
    """
    return torch.float32 if tokens > 2 * chunk and weight.dtype in FLOATS else weight.dtype


def add_product(total: Tensor, left: Tensor, right: Tensor, *, first: bool) -> None:
    """Add left right to `total`.

    Args:
        total: (V, C) float32, or of the factors' dtype; updated in place.
        left: (V, n).
        right: (n, C).
        first: Overwrite `total` instead.
    """
    beta = 0 if first else 1
    if total.dtype is left.dtype:
        onednn_matmul.addmm_(total, left, right, beta=beta)
        return
    if total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, beta=beta, out=total)
        return
    for low in range(0, len(total), _BLOCK):  # torch has no such product on CPUs. A block stays in the cache.
        target, rows = rows_from(total, low, _BLOCK), rows_from(left, low, _BLOCK)
        if left.dtype is torch.float16:  # which CPUs do not multiply fast in any way
            onednn_matmul.addmm_(target, rows.float(), right.float(), beta=beta)
            continue
        product = (rows @ right).view(-1)
        address = np.array([product.data_ptr()])
        sum_at(address, array(product[:0]), array(target.view(-1)), divisor=1, accumulate=not first, floating=True)


def add_chunk(
    total: Tensor, e: Tensor, hidden: Tensor, factors: Tensor, rows: Tensor, at: Tensor, sums: Tensor, *, first: bool
) -> None:
    """Add e (factors · hidden) to `total`: step 5, for a chunk of n tokens on a CPU. Changes `e`.

    Args:
        total: (V, C); updated in place.
        e: (V, n), with `at` - `sums` at the targets (`replace_targets`).
        hidden: (n, C).
        factors: (n, 1).
        rows: (n,) int64, rows of the targets.
        at: (n,) exponentials at the targets.
        sums: (n,) sums of all exponentials.
        first: Overwrite `total` instead.
    """
    scaled = (hidden * factors).to(e.dtype)
    if total.dtype is e.dtype:
        add_product(total, e, scaled, first=first)
        return
    # For a token that is rarer than one in a chunk, almost all of the product comes from the targets.
    rare = at * len(hidden) < sums
    replace_targets(e, rows, torch.where(rare, at, at - sums))
    add_product(total, e, scaled, first=first)
    columns = ((rows >= 0) & (rows < len(e))).nonzero().flatten()
    exact = (at - sums)[columns].unsqueeze(1) * factors[columns] * hidden[columns]
    entered = e[rows[columns], columns].float().unsqueeze(1) * scaled[columns]
    total.index_add_(0, rows[columns], (exact - entered).float())


def rows_from(tensor: Tensor, low: int, count: int) -> Tensor:
    """Return up to `count` rows from row `low` on, as a view.

    Args:
        tensor: A tensor.
        low: First row.
        count: Number of rows.
    """
    return tensor.narrow(0, low, min(count, tensor.shape[0] - low))


def _new_gradients(
    hidden: Tensor, weight: Tensor, need_hidden: bool, need_weight: bool, chunk: int
) -> tuple[Tensor, Tensor]:
    """Allocate the gradient of `hidden`, and the sum for that of `weight`."""
    grad_hidden = torch.empty_like(hidden) if need_hidden else hidden.new_empty(0)
    if not need_weight:
        return grad_hidden, weight.new_empty(0)
    # Without tokens, no chunk writes the sum: start with zeros.
    new = torch.empty_like if len(hidden) else torch.zeros_like
    return grad_hidden, new(weight, dtype=sum_dtype(weight, len(hidden), chunk))


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> None:
    check("hidden", hidden, dtypes=FLOATS, shape=[None, None])
    check("weight", weight, dtypes=[hidden.dtype], shape=[None, hidden.shape[1]], like=hidden)
    check("targets", targets, dtypes=[torch.int64], shape=[hidden.shape[0]], like=hidden)
    if chunk < 1:
        raise ValueError(f"chunk: {chunk}, expected 1 or more tokens at a time")


def check_range(targets: Tensor, vocabulary: int, ignore_index: int) -> None:
    """Raise ValueError if a target is neither a row of the vocabulary nor `ignore_index`. Waits for the device.

    Args:
        targets: (N,) int64.
        vocabulary: Number of rows.
        ignore_index: Targets with this value do not count.
    """
    wrong = (targets != ignore_index) & ((targets < 0) | (targets >= vocabulary))
    if wrong.any():
        first = int(wrong.nonzero()[0])
        raise ValueError(
            f"targets: {int(targets[first])} at position {first}, expected 0 to {vocabulary - 1}, the rows of weight, "
            f"or ignore_index, {ignore_index}"
        )


def _fake(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    chunk: int,
    need_hidden: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(hidden, weight, targets, chunk)
    scalar = hidden.new_empty((), dtype=torch.float32)
    grad_hidden, total = _new_gradients(hidden, weight, need_hidden, need_weight, chunk)
    return scalar, grad_hidden, total.to(weight.dtype), torch.empty_like(scalar)


_loss = register(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor targets, int ignore_index, SymInt chunk, "
    "bool need_hidden, bool need_weight) -> (Tensor, Tensor, Tensor, Tensor)",
    cpu=_cpu,
    cuda=_by_torch,
    fake=_fake,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, grad_hidden, grad_weight, factor = output
    ctx.needed = inputs[5:7]
    ctx.spent = False
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(grad_hidden, grad_weight, factor)
    ctx.save_for_backward(grad_hidden, grad_weight, factor)


def _backward(ctx: Any, grad_loss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad_loss is None:
        return (None,) * 7
    if ctx.spent:
        raise RuntimeError(
            "linear_cross_entropy: its gradients were handed over by an earlier backward pass; call it again, not "
            "with retain_graph=True"
        )
    ctx.spent = True
    *gradients, factor = ctx.saved_tensors
    grad_hidden, grad_weight = (
        _scaled(gradient, grad_loss * factor) if needed else None
        for gradient, needed in zip(gradients, ctx.needed, strict=True)
    )
    return grad_hidden, grad_weight, None, None, None, None, None


def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    if type(gradient) is not Tensor:  # While tracing, the compiler decides about in-place updates.
        return (gradient * factor).to(gradient.dtype)
    if gradient.is_cpu and factor.item() == 1:  # On a GPU, `item` would wait for longer than `mul_` takes.
        return gradient
    return gradient.mul_(factor)


register_autograd("linear_cross_entropy", _backward, _setup_context)


def warm(dtype: torch.dtype) -> None:
    """Compile the kernels for a run that computes in `dtype`.

    Args:
        dtype: The dtype of the run's activations.
    """
    hidden, weight = torch.zeros(1, 1, dtype=dtype), torch.zeros(1, 1, dtype=dtype)
    linear_cross_entropy(hidden, weight, torch.zeros(1, dtype=torch.int64))
