"""Cross-entropy of a linear layer whose outputs, the vocabulary, are cut over ranks, without the whole logits.

As `cuda_ops.linear_cross_entropy`, a chunk of n tokens at a time, gradients made in the forward pass, and

1. each rank makes the exponentials of its own rows' logits, e = exp(logit - base), and sums them for each token.
2. One all-gather of two numbers a token, the rank's logarithm of its sum and the target's logit where it has it: from
   these every rank has the same logarithm of the whole sum, and the loss (arXiv:1909.08053, section 3, where it is
   three reductions).
3. The probabilities are e · exp(base - logarithm): the factor is multiplied into vectors of length C. Where it would
   leave float32, because another rank has the great logits, the chunk is done again with the logarithm as base; where
   torch's operations do the work of the kernel, they are always multiplied into e.
4. grad_hidden is this rank's part of a sum, which the caller takes; grad_weight is that of its own rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from cuda_ops.linear_cross_entropy import (
    check_range,
    default_chunk,
    exponentials,
    replace_targets,
    rows_from,
    uncounted,
)
from speedlab.comm import Group
from speedlab.parallel.tensor.parts import share_of

IGNORED = -100
"""A target that does not count."""

_LARGEST_EXPONENT = 57.0
"""exp of it, times a sum within the limits of step 1, is far from the ends of float32."""

_BLOCK_ROWS = 4096
"""Rows of logits at a time where no gradients are wanted."""


def vocabulary_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, group: Group, vocabulary: int) -> Tensor:
    """The mean cross-entropy of the logits of all ranks, the same float32 scalar on each of them. Collective.

    Args:
        hidden: (N, C) floats, the same on all ranks; its gradients are to be summed over them.
        weight: (V / tp, C), the rank's share of the rows; of the same dtype.
        targets: (N,) int64 in [0, V), or -100, which does not count; where none counts the loss is NaN. On CPUs
            others are refused; on CUDA, where a look would wait for the device, they do not count either.
        vocabulary: V.

    Raises ValueError for targets out of range (on CPUs).
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
        # In float16 most gradients of a mean over many tokens would be zero: there it is a sum until the backward pass.
        count = len(targets) - ignored.sum()
        ctx.left = 1 / count.clamp(min=1) if hidden.dtype is torch.float16 else None
        share_of_token = 1.0 if hidden.dtype is torch.float16 else 1 / count
        grads = [torch.zeros_like(each) if need else None for each, need in zip((hidden, weight), needed, strict=True)]
        rows = targets - share_of(vocabulary, group.size, group.index)[0]
        # The widest share, so that all ranks have the same chunks.
        chunk = default_chunk(len(hidden), -(-vocabulary // group.size), hidden.dtype)
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
            if not _by_kernel(hidden):  # 3
                e, base = (e * (base - logarithm).exp().float()).to(hidden.dtype), logarithm
            elif ((logarithm - base) > _LARGEST_EXPONENT).any():
                e, base, sums, picked = _exponentials(inputs, weight, labels, keep=True, base=logarithm)
            replace_targets(e, labels, (picked - base).exp() - (logarithm - base).exp())
            factors = ((base - logarithm).exp() * share_of_token).masked_fill(left_out, 0).float().unsqueeze(1)
            grad_hidden, grad_weight = grads  # 4
            if grad_hidden is not None:
                torch.mm(e.t(), weight, out=rows_from(grad_hidden, low, chunk)).mul_(factors)
            if grad_weight is not None:
                grad_weight.addmm_(e, (inputs * factors).to(e.dtype))
        ctx.save_for_backward(*grads)
        return (loss / count).float()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        factor = grad_loss if ctx.left is None else grad_loss * ctx.left
        unscaled = factor.is_cpu and factor.item() == 1  # On a GPU a look would cost more than the pass.
        grads = [each if each is None or unscaled else (each * factor).to(each.dtype) for each in ctx.saved_tensors]
        return *grads, None, None, None, None


def _exponentials(
    hidden: Tensor, weight: Tensor, rows: Tensor, *, keep: bool, base: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(e (V / tp, n), base (n,) float64, sums of e (n,), targets' logits (n,), 0 where the target is elsewhere)."""
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


def _by_kernel(hidden: Tensor) -> bool:
    return hidden.is_cpu and hidden.dtype is not torch.float16
