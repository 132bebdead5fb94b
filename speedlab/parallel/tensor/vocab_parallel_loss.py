"""Cross-entropy of a linear layer whose vocabulary is cut over ranks, without materializing all logits.

As `cuda_ops.linear_cross_entropy`, this works on chunks of n tokens, and computes gradients in the forward:

1. Each rank computes the exponentials of its own rows' logits, e = exp(logit - base), and sums them per token.
2. One all-gather of two numbers per token: the logarithm of the rank's sum, and the target's logit if this rank has
   its row. From these, every rank computes the logarithm of the total sum and the loss. (arXiv:1909.08053, section 3,
   uses three reductions.)
3. The probabilities are e · exp(base - logarithm). The factor is multiplied into vectors of length C. If the factor
   leaves the range of float32, because another rank has much larger logits, the chunk is computed again with the
   logarithm as base. Without the kernel, torch operations multiply the factor into e.
4. grad_hidden is this rank's term of a sum, which the caller computes. grad_weight belongs to the rank's own rows.
   Over more than two chunks, 16-bit gradients are summed in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from cuda_ops import onednn_matmul
from cuda_ops.linear_cross_entropy import (
    add_chunk,
    add_product,
    check_range,
    default_chunk,
    exponentials,
    replace_targets,
    rows_from,
    sum_dtype,
    uncounted,
)
from speedlab.comm import Group
from speedlab.layout import share_of

IGNORED = -100
"""Targets with this value do not count."""

_LARGEST_EXPONENT = 57.0
"""The exponential of this, times a sum within the limits of step 1, stays far inside float32."""

_BLOCK_ROWS = 4096
"""Rows of logits per block if no gradients are needed."""


def vocabulary_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, group: Group, vocabulary: int) -> Tensor:
    """Return the mean cross-entropy over the logits of all ranks, as the same float32 scalar on each rank. Collective.

    Args:
        hidden: (N, C) floats, the same on all ranks. The caller sums its gradients over the ranks.
        weight: (V / tp, C), this rank's rows, same dtype.
        targets: (N,) int64 in [0, V), or -100, which does not count. If no target counts, the loss is NaN. On CUDA,
            invalid targets do not count either, because a check would synchronize with the device.
        group: The tensor-parallel ranks.
        vocabulary: V.

    Raises:
        ValueError: A target is out of range (on CPUs).
    """
    if targets.is_cpu:
        check_range(targets, vocabulary, IGNORED)
    grad = torch.is_grad_enabled()
    needed = grad and hidden.requires_grad, grad and weight.requires_grad
    return _Loss.apply(hidden, weight, targets, group, vocabulary, needed)


class _Loss(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        group: Group,
        vocabulary: int,
        needed: tuple[bool, bool],
    ) -> Tensor:
        ignored = uncounted(targets, vocabulary, IGNORED)
        # In float16, most gradients of a mean over many tokens would underflow to zero. So there the loss is a sum
        # until the backward.
        count = len(targets) - ignored.sum()
        ctx.left = 1 / count.clamp(min=1) if hidden.dtype is torch.float16 else None
        share_of_token = torch.ones_like(count) if hidden.dtype is torch.float16 else 1 / count
        rows = targets - share_of(vocabulary, group.size, group.index)[0]
        # Use the largest share, so that all ranks have the same chunks.
        chunk = default_chunk(len(hidden), -(-vocabulary // group.size), hidden.dtype)
        grad_hidden = torch.zeros_like(hidden) if needed[0] else None
        total = torch.zeros_like(weight, dtype=sum_dtype(weight, len(hidden), chunk)) if needed[1] else None
        loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for low in range(0, len(hidden), chunk):
            inputs, labels, left_out = (rows_from(each, low, chunk) for each in (hidden, rows, ignored))
            e, base, sums, picked = _exponentials(inputs, weight, labels, keep=any(needed))  # 1
            own = torch.stack((base + sums.double().log(), picked.double()))
            logarithms, logits = group.gather_along(own.unsqueeze(1), 1).unbind()  # (tp, n) each  # 2
            logarithm = logarithms.logsumexp(0)
            loss += (logarithm - logits.sum(0)).masked_fill(left_out, 0).sum()
            if not any(needed):
                continue
            if _by_kernel(hidden) and ((logarithm - base) > _LARGEST_EXPONENT).any():  # 3
                e, base, sums, picked = _exponentials(inputs, weight, labels, keep=True, base=logarithm)
            shares = share_of_token.expand(len(inputs)).masked_fill(left_out, 0)
            into = None if grad_hidden is None else rows_from(grad_hidden, low, chunk)
            add = _gradients_by_kernel if _by_kernel(hidden) else _gradients_by_torch
            add(inputs, weight, labels, e, base, logarithm, picked, shares, into, total, low == 0)  # 4
        ctx.save_for_backward(grad_hidden, None if total is None else total.to(weight.dtype))
        return (loss / count).float()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        factor = grad_loss if ctx.left is None else grad_loss * ctx.left
        # On a GPU, reading the factor would cost more than the multiplication.
        unscaled = factor.is_cpu and factor.item() == 1
        grads = [each if each is None or unscaled else (each * factor).to(each.dtype) for each in ctx.saved_tensors]
        return *grads, None, None, None, None


def _exponentials(
    hidden: Tensor, weight: Tensor, rows: Tensor, *, keep: bool, base: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (e (V / tp, n), base (n,) float64, sums of e (n,), targets' logits (n,)). A target's logit is 0 if
    another rank has its row.
    """
    if _by_kernel(hidden):
        height = len(weight) if keep else min(len(weight), _BLOCK_ROWS)
        e = hidden.new_empty(height, len(hidden))
        return e, *exponentials(hidden, weight, rows, e, base)
    logits = (weight @ hidden.t()).float()
    greatest = logits.amax(0)
    e = (logits - greatest).exp()
    nearest = rows.clamp(0, len(weight) - 1)
    picked = logits.gather(0, nearest.unsqueeze(0)).squeeze(0)
    return e, greatest.double(), e.sum(0), picked.masked_fill(nearest != rows, 0)


def _gradients_by_kernel(
    hidden: Tensor,
    weight: Tensor,
    rows: Tensor,
    e: Tensor,
    base: Tensor,
    logarithm: Tensor,
    picked: Tensor,
    shares: Tensor,
    into: Tensor | None,
    total: Tensor | None,
    first: bool,
) -> None:
    """Compute step 4 for a chunk: write the gradient of `hidden` to `into` (n, C), and add that of `weight` to `total`
    (V / tp, C). `shares` (n,) are the weights of the tokens in the mean.
    """
    at_targets, sums = (picked - base).exp(), (logarithm - base).exp()
    replace_targets(e, rows, at_targets - sums)
    factors = ((base - logarithm).exp() * shares).float().unsqueeze(1)
    if into is not None:
        onednn_matmul.mm(e.t(), weight, out=into).mul_(factors)
    if total is not None:
        add_chunk(total, e, hidden, factors, rows, at_targets, sums, first=first)


def _gradients_by_torch(
    hidden: Tensor,
    weight: Tensor,
    rows: Tensor,
    e: Tensor,
    base: Tensor,
    logarithm: Tensor,
    picked: Tensor,
    shares: Tensor,
    into: Tensor | None,
    total: Tensor | None,
    first: bool,
) -> None:
    """Compute step 4 without the kernel. Factors are multiplied into `e` before it is rounded."""
    gradient = (e * ((base - logarithm).exp() * shares).float()).to(hidden.dtype)
    replace_targets(gradient, rows, ((picked - logarithm).exp() - 1) * shares)
    if into is not None:
        torch.mm(gradient.t(), weight, out=into)
    if total is not None:
        add_product(total, gradient, hidden, first=first)


def _by_kernel(hidden: Tensor) -> bool:
    return hidden.is_cpu and hidden.dtype is not torch.float16
