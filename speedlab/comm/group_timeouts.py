"""Read and set the timeouts of existing process groups and of the world's store."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from speedlab.comm.shared.process_group import StagedGroup
from speedlab.comm.timeouts import TIMEOUT_SECONDS


def stores() -> list[Any]:
    """Return the world's store, or []. Stores of other groups are views of it and use its timeout."""
    return [distributed_c10d._get_default_store()] if dist.is_initialized() else []


def limit_store(store: Any, seconds: float) -> None:
    """Set the timeout of a store.

    Args:
        store: A store of torch.distributed.
        seconds: Timeout.
    """
    store.set_timeout(datetime.timedelta(seconds=seconds))


def groups() -> list[Any]:
    """Return all process groups of this process."""
    return list(distributed_c10d._world.pg_map) if dist.is_initialized() else []


def _backends(group: Any) -> list[Any]:
    """Return the backends of a group that have timeouts: gloo and NCCL."""
    found = []
    for kind in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError):  # The group has no backend for this device.
            found.append(group._get_backend(torch.device(kind)))
    return [backend for backend in found if hasattr(backend, "options") and hasattr(backend, "_set_default_timeout")]


def limit_of(group: Any) -> float:
    """Return the shortest timeout of a group's backends, in seconds.

    Args:
        group: A process group.
    """
    limits = [backend.options._timeout.total_seconds() for backend in _backends(group)]
    return min(limits, default=TIMEOUT_SECONDS)


def limit_group(group: Any, seconds: float) -> None:
    """Set the timeout of a group.

    Args:
        group: A process group.
        seconds: Timeout.
    """
    for backend in _backends(group):
        backend._set_default_timeout(datetime.timedelta(seconds=seconds))
    if isinstance(group, StagedGroup):
        group.limit(seconds)


@contextlib.contextmanager
def limited_store(seconds: float) -> Iterator[None]:
    """Set the store's timeout inside this context. torch lets ranks meet in the store to create a group.

    Args:
        seconds: Timeout.
    """
    (store,) = stores()
    before = store.timeout.total_seconds()
    limit_store(store, seconds)
    try:
        yield
    finally:
        limit_store(store, before)
