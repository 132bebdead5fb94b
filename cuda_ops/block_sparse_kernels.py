"""The CPU kernels of block-sparse attention, after FlashAttention-2 (arXiv:2307.08691).

They work on transposed scores, (keys, queries), of one block of each: then the softmax runs along rows, all queries at
once in vector registers, and every product has the form c += a b, whose innermost loop vectorises. Arithmetic is
float32 for all dtypes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload, register_jitable

from cuda_ops.compile import kernel
from cuda_ops.elements import load, store
from cuda_ops.exponential import LOG2_E, exp2

_LOWEST = np.float32(-1e30)
"""Less than any score, but finite: its difference from a masked score is still -inf, not NaN."""

_UNSEEN = np.float32(-np.inf)
"""The score of a key that is masked, of the scores' own type: a wider constant would widen the loop."""


def _rows(source: Any, low: int, scratch: Any) -> Any:
    """Rows from `low` on of `source` (T, D), as many as `scratch` (block, D) float32 has, zeros after the last: a part
    of `source` where that will do, else written to `scratch`."""
    raise NotImplementedError("only inside kernels")


@overload(_rows, strict=False)
def _rows_of(source: Any, low: Any, scratch: Any) -> Any:
    def copied(source: Any, low: Any, scratch: Any) -> Any:
        rows = source[low : low + scratch.shape[0]]
        for i in range(rows.shape[0]):
            line, target = rows[i], scratch[i]
            for d in range(line.shape[0]):
                target[d] = load(line, d)
        scratch[rows.shape[0] :] = 0
        return scratch

    def in_place(source: Any, low: Any, scratch: Any) -> Any:
        if low + scratch.shape[0] <= source.shape[0]:
            return source[low : low + scratch.shape[0]]
        rows = source[low:]
        scratch[: rows.shape[0]] = rows
        scratch[rows.shape[0] :] = 0
        return scratch

    return in_place if source.dtype == types.float32 else copied


@kernel()
def _transposed(rows: Any, factor: float, out: Any) -> None:
    """out (D, block) = rows (block, D)ᵀ · factor."""
    for d in range(out.shape[0]):
        line = out[d]
        for i in range(line.shape[0]):
            line[i] = rows[i, d] * factor


@register_jitable(inline="always")  # Else LLVM calls it, and does not know a width that is constant.
def _add_tile(a: Any, b: Any, c: Any, width: int) -> None:
    """c (4, width) += a (4, 4) b (4, width): `a` in registers, and a vector of `b` or `c` that is read serves 4
    multiplications. The rows of `b` are parts of one array, and so those of `c`: of single rows, LLVM would check at
    run time that none overlaps another, which takes as long as the loop."""
    w0, w1, w2, w3 = a[0, 0], a[0, 1], a[0, 2], a[0, 3]
    x0, x1, x2, x3 = a[1, 0], a[1, 1], a[1, 2], a[1, 3]
    y0, y1, y2, y3 = a[2, 0], a[2, 1], a[2, 2], a[2, 3]
    z0, z1, z2, z3 = a[3, 0], a[3, 1], a[3, 2], a[3, 3]
    for i in range(width):
        b0, b1, b2, b3 = b[0, i], b[1, i], b[2, i], b[3, i]
        c[0, i] = c[0, i] + w0 * b0 + w1 * b1 + w2 * b2 + w3 * b3
        c[1, i] = c[1, i] + x0 * b0 + x1 * b1 + x2 * b2 + x3 * b3
        c[2, i] = c[2, i] + y0 * b0 + y1 * b1 + y2 * b2 + y3 * b3
        c[3, i] = c[3, i] + z0 * b0 + z1 * b1 + z2 * b2 + z3 * b3


@kernel()
def _add_product(a: Any, b: Any, c: Any) -> None:
    """c (m, n) += a (m, k) b (k, n), for m and k that are multiples of 4."""
    for r in range(0, c.shape[0], 4):
        rows, target = a[r : r + 4], c[r : r + 4]
        for k in range(0, b.shape[0], 4):
            if c.shape[1] == 64:  # The usual size: a sixth faster where the compiler knows it.
                _add_tile(rows[:, k : k + 4], b[k : k + 4], target, 64)
            else:
                _add_tile(rows[:, k : k + 4], b[k : k + 4], target, c.shape[1])


@kernel()
def _scores(
    keys: Any, queries: Any, count: int, diagonal: bool, reach: int, first: int, starts: Any, latest: int, out: Any
) -> None:
    """out (block, block) = keys (block, D) queries (D, block), -inf for keys from `count` on, where the key is later
    than the query if this is a block on the `diagonal`, where the query's place in its block is `reach` or more after
    the key's, and for keys, of which these are the `first` and its followers, before their query's `starts` (block),
    of which none is after `latest`."""
    out[:] = 0
    _add_product(keys, queries, out)
    out[count:] = -np.inf
    if diagonal:
        for j in range(out.shape[0]):
            out[j, :j] = -np.inf
    for j in range(min(out.shape[0], out.shape[0] - reach)):
        out[j, max(0, j + reach) :] = -np.inf
    for j in range(min(out.shape[0], latest - first)):
        line = out[j]
        for i in range(line.shape[0]):
            line[i] = line[i] if first + j >= starts[i] else _UNSEEN


@kernel()
def _starts_of(starts: Any, low: int, out: Any) -> tuple[int, int]:
    """`out` (block) = what `starts` (T) has from `low` on, and no start behind its end. Returns (earliest, latest)."""
    count = min(out.shape[0], starts.shape[0] - low)
    out[:] = 0
    out[:count] = starts[low : low + count]
    earliest, latest = out[0], out[0]
    for i in range(1, count):
        earliest, latest = min(earliest, out[i]), max(latest, out[i])
    return earliest, latest


@kernel()
def _softmax_step(scores: Any, greatest: Any, total: Any, out: Any) -> None:
    """One step of the online softmax: `scores` (block, block) become exponentials; the `greatest` score (block), the
    `total` (block) of exponentials and the sums `out` (D, block) so far are brought up to date."""
    before = np.empty_like(greatest)
    before[:] = greatest
    for j in range(scores.shape[0]):
        line = scores[j]
        for i in range(line.shape[0]):
            greatest[i] = line[i] if line[i] > greatest[i] else greatest[i]
    for i in range(before.shape[0]):
        before[i] = exp2(before[i] - greatest[i])
        total[i] *= before[i]
    for d in range(out.shape[0]):
        line = out[d]
        for i in range(line.shape[0]):
            line[i] *= before[i]
    for j in range(scores.shape[0]):
        line = scores[j]
        for i in range(line.shape[0]):
            line[i] = exp2(line[i] - greatest[i])
            total[i] += line[i]


@kernel()
def forward(
    start: int,
    stop: int,
    q: Any,
    k: Any,
    v: Any,
    offsets: Any,
    columns: Any,
    distances: Any,
    starts: Any,
    block: int,
    causal: bool,
    window: int,
    scale: float,
    out: Any,
    lse: Any,
) -> None:
    """Blocks of queries [start, stop), counted over all heads: `out` (heads, T, D), and `lse` (heads, T) float32, the
    logarithm to base 2 of the sum of exponentials, +inf where there is none. `starts` (B, T): of each sequence's heads.
    """
    length, depth = q.shape[1], q.shape[2]
    heads = q.shape[0] // max(1, starts.shape[0])
    begins = np.empty(block, np.int32)
    blocks = offsets.shape[0] - 1
    queries, sums = np.empty((depth, block), np.float32), np.empty((depth, block), np.float32)
    scores = np.empty((block, block), np.float32)
    scratch = np.empty((2, block, depth), np.float32)
    greatest, total = np.empty(block, np.float32), np.empty(block, np.float32)
    for item in range(start, stop):
        head, row = item // blocks, item % blocks
        _transposed(_rows(q[head], row * block, scratch[0]), np.float32(scale) * LOG2_E, queries)
        sums[:] = 0
        total[:] = 0
        greatest[:] = _LOWEST
        earliest, latest = _starts_of(starts[head // heads], row * block, begins)
        for place in range(offsets[row], offsets[row + 1]):
            column = columns[place]
            if (column + 1) * block <= earliest:
                continue
            keys = _rows(k[head], column * block, scratch[0])
            values = _rows(v[head], column * block, scratch[1])
            distance = distances[place]
            count, diagonal = k.shape[1] - column * block, causal and distance == 0
            _scores(keys, queries, count, diagonal, window - distance, column * block, begins, latest, scores)
            _softmax_step(scores, greatest, total, sums)
            _add_product(values.T, scores, sums)
        for i in range(min(block, length - row * block)):
            seen = total[i] != 0
            lse[head, row * block + i] = greatest[i] + np.log2(total[i]) if seen else np.inf
            line, factor = out[head, row * block + i], np.float32(1) / total[i] if seen else np.float32(0)
            for d in range(depth):
                store(line, d, sums[d, i] * factor)


@kernel()
def _gradient_of_scores(scores: Any, products: Any, lse: Any, delta: Any) -> None:
    """`scores` (block, block) become probabilities p, `products` become p · (products - delta)."""
    for j in range(scores.shape[0]):
        p, line = scores[j], products[j]
        for i in range(p.shape[0]):
            p[i] = exp2(p[i] - lse[i])
        for i in range(p.shape[0]):
            line[i] = p[i] * (line[i] - delta[i])


@kernel()
def _store_rows(sums: Any, factor: Any, out: Any) -> None:
    """The first rows of `sums` times `factor` are those of `out`."""
    for j in range(out.shape[0]):
        line = out[j]
        for d in range(out.shape[1]):
            store(line, d, sums[j, d] * factor)


@kernel()
def backward(
    start: int,
    stop: int,
    grad: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    offsets: Any,
    columns: Any,
    distances: Any,
    starts: Any,
    block: int,
    causal: bool,
    window: int,
    scale: float,
    grad_q: Any,
    grad_k: Any,
    grad_v: Any,
) -> None:
    """Heads [start, stop). A head is one thread's, which adds up its gradients of keys and values in a fixed order."""
    length, depth = q.shape[1], q.shape[2]
    blocks = offsets.shape[0] - 1
    heads = q.shape[0] // max(1, starts.shape[0])
    begins = np.empty(block, np.int32)
    padded = -(-k.shape[1] // block) * block
    sums_k, sums_v = np.empty((padded, depth), np.float32), np.empty((padded, depth), np.float32)
    queries, grads = np.empty((depth, block), np.float32), np.empty((depth, block), np.float32)
    sums_q = np.empty((depth, block), np.float32)
    scores, products = np.empty((block, block), np.float32), np.empty((block, block), np.float32)
    scratch = np.empty((4, block, depth), np.float32)
    sums_lse, delta = np.empty(block, np.float32), np.empty(block, np.float32)
    for head in range(start, stop):
        sums_k[:] = 0
        sums_v[:] = 0
        for row in range(blocks):
            low, count = row * block, min(block, length - row * block)
            own = _rows(q[head], low, scratch[0])
            incoming = _rows(grad[head], low, scratch[1])
            _transposed(own, np.float32(scale) * LOG2_E, queries)
            _transposed(incoming, np.float32(1), grads)
            sums_lse[:count] = lse[head, low : low + count]
            sums_lse[count:] = np.inf
            delta[:] = 0
            for i in range(count):
                for d in range(depth):
                    delta[i] += incoming[i, d] * load(out[head, low + i], d)
            sums_q[:] = 0
            earliest, latest = _starts_of(starts[head // heads], low, begins)
            for place in range(offsets[row], offsets[row + 1]):
                first, distance = columns[place] * block, distances[place]
                if first + block <= earliest:
                    continue
                keys, values = _rows(k[head], first, scratch[2]), _rows(v[head], first, scratch[3])
                left, diagonal, reach = k.shape[1] - first, causal and distance == 0, window - distance
                _scores(keys, queries, left, diagonal, reach, first, begins, latest, scores)
                products[:] = 0
                _add_product(values, grads, products)
                _gradient_of_scores(scores, products, sums_lse, delta)
                _add_product(scores, incoming, sums_v[first : first + block])
                _add_product(products, own, sums_k[first : first + block])
                _add_product(keys.T, products, sums_q)
            for i in range(count):
                line = grad_q[head, low + i]
                for d in range(depth):
                    store(line, d, sums_q[d, i] * np.float32(scale))
        _store_rows(sums_k, np.float32(scale), grad_k[head])
        _store_rows(sums_v, np.float32(1), grad_v[head])
