"""Sharing a kernel's range out to threads: as many as torch uses in this process (`torch.set_num_threads`)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch

_WORTH_A_THREAD = 1 << 17
"""Elements below which handing work to another thread (about 30 µs) costs more than it saves."""


def share(
    kernel: Callable[..., Any], count: int, *arguments: Any, multiple: int = 16, worth: int = _WORTH_A_THREAD
) -> list[Any]:
    """Call `kernel(start, stop, *arguments)` over [0, count), cut at multiples of `multiple` so that each thread has a
    piece of at least `worth`. Returns what the calls returned, in order; the calling thread does the first piece."""
    pieces = max(1, min(torch.get_num_threads(), count // worth))
    if pieces == 1:
        return [kernel(0, count, *arguments)]
    step = -(-count // (pieces * multiple)) * multiple
    ranges = [(start, min(start + step, count)) for start in range(0, count, step)]
    others = [_pool(len(ranges) - 1).submit(kernel, low, high, *arguments) for low, high in ranges[1:]]
    first = kernel(*ranges[0], *arguments)
    return [first, *(other.result() for other in others)]


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="cuda_ops")
