"""Split a kernel's range among threads: as many as torch uses in this process (`torch.set_num_threads`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import Any

import torch

_WORTH_A_THREAD = 1 << 17
"""Minimum elements per piece: below, handing work to another thread (about 30 µs) costs more than it saves."""

_TURNS = 16
"""Maximum pieces per thread."""


def share(
    kernel: Callable[..., Any], count: int, *arguments: Any, multiple: int = 16, worth: int = _WORTH_A_THREAD
) -> list[Any]:
    """Call `kernel(start, stop, *arguments)` on pieces of [0, count), in several threads including the calling one.

    Threads take the next piece when they are free, so that a thread that the system suspends does not delay the others
    much.

    Args:
        kernel: The kernel. Only kernels that release the GIL run in parallel.
        count: Number of elements.
        *arguments: Further arguments of the kernel.
        multiple: Pieces begin at multiples of this.
        worth: Minimum elements per piece.

    Returns:
        The results of the calls, in the order of the pieces.
    """
    threads = max(1, min(torch.get_num_threads(), count // worth))
    if threads == 1:
        return [kernel(0, count, *arguments)]
    step = -(-max(worth, count // (threads * _TURNS)) // multiple) * multiple
    ranges = [(start, min(start + step, count)) for start in range(0, count, step)]
    results: list[Any] = [None] * len(ranges)
    turns, broken = itertools.count(), False

    def work() -> None:
        # `next` of a count is atomic under the GIL, so that each piece goes to one thread.
        while not broken and (turn := next(turns)) < len(ranges):
            results[turn] = kernel(*ranges[turn], *arguments)

    others = [_pool(threads - 1).submit(work) for _ in range(threads - 1)]
    try:
        work()
    except BaseException:  # For example Ctrl-C: stop the other threads, because their output memory may be reused soon.
        broken = True
        raise
    finally:
        # Cancel tasks that have not begun: another caller's kernel may occupy their threads for a while.
        begun = [other for other in others if not other.cancel()]
        wait(begun)
    for other in begun:
        other.result()
    return results


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="cuda_ops")
