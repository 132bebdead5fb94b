"""Sharing a kernel's range out to threads: as many as torch uses in this process (`torch.set_num_threads`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import Any

import torch

_WORTH_A_THREAD = 1 << 17
"""Elements below which handing work to another thread (about 30 µs) costs more than it saves."""

_TURNS = 16
"""Pieces for each thread, if they are worth it."""


def share(
    kernel: Callable[..., Any], count: int, *arguments: Any, multiple: int = 16, worth: int = _WORTH_A_THREAD
) -> list[Any]:
    """Call `kernel(start, stop, *arguments)` over [0, count), cut at multiples of `multiple` into pieces of at least
    `worth`, several for each thread. Returns what the calls returned, in order; the calling thread takes part.

    Threads take pieces as they come to them: one that the system keeps from its core then holds nobody up.
    """
    threads = max(1, min(torch.get_num_threads(), count // worth))
    if threads == 1:
        return [kernel(0, count, *arguments)]
    step = -(-max(worth, count // (threads * _TURNS)) // multiple) * multiple
    ranges = [(start, min(start + step, count)) for start in range(0, count, step)]
    results: list[Any] = [None] * len(ranges)
    turns, broken = itertools.count(), False

    def work() -> None:
        while not broken and (turn := next(turns)) < len(ranges):
            results[turn] = kernel(*ranges[turn], *arguments)

    others = [_pool(threads - 1).submit(work) for _ in range(threads - 1)]
    try:
        work()
    except BaseException:  # Ctrl-C, say: what the others write to may serve somebody else soon.
        broken = True
        raise
    finally:
        # What no thread has begun is not needed any more; another caller's kernel may keep them for a while.
        begun = [other for other in others if not other.cancel()]
        wait(begun)
    for other in begun:
        other.result()
    return results


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="cuda_ops")
