"""The limits that process groups and the store of the world have now, and how they get others."""

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
    """The world's: those of other groups are parts of it, and it decides how long they wait."""
    return [distributed_c10d._get_default_store()] if dist.is_initialized() else []


def limit_store(store: Any, seconds: float) -> None:
    store.set_timeout(datetime.timedelta(seconds=seconds))


def groups() -> list[Any]:
    return list(distributed_c10d._world.pg_map) if dist.is_initialized() else []


def _backends(group: Any) -> list[Any]:
    """Those of a group that have limits: gloo's and NCCL's."""
    found = []
    for kind in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError):  # It has none for these.
            found.append(group._get_backend(torch.device(kind)))
    return [backend for backend in found if hasattr(backend, "options") and hasattr(backend, "_set_default_timeout")]


def limit_of(group: Any) -> float:
    limits = [backend.options._timeout.total_seconds() for backend in _backends(group)]
    return min(limits, default=TIMEOUT_SECONDS)


def limit_group(group: Any, seconds: float) -> None:
    for backend in _backends(group):
        backend._set_default_timeout(datetime.timedelta(seconds=seconds))
    if isinstance(group, StagedGroup):
        group.limit(seconds)


@contextlib.contextmanager
def limited_store(seconds: float) -> Iterator[None]:
    """Inside, the store of the world waits for so long: torch lets ranks meet there for a new group."""
    (store,) = stores()
    before = store.timeout.total_seconds()
    limit_store(store, seconds)
    try:
        yield
    finally:
        limit_store(store, before)
