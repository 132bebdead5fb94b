"""Cells in which a rank may stand at a breakpoint: there no collective is late, however long a person thinks."""

from __future__ import annotations

import contextlib
import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from speedlab.comm.limits import (
    GROUP_TIMEOUT_SECONDS,
    PATIENT_SECONDS,
    TIMEOUT_SECONDS,
    count_patient,
    limit_seconds,
)
from speedlab.comm.shared.process_group import StagedGroup


def patience() -> contextlib.AbstractContextManager[None]:
    """Inside, collectives on groups that there are, or that SpeedLab makes, wait as long as it takes, and so does the
    store of the world. Peers that leave or die are noticed as ever. Afterwards all have the limits that they had, and
    new ones those of `limits`."""
    return _Patience()


class _Patience(contextlib.AbstractContextManager[None]):
    """No generator: an engine lets no interrupt into these two functions, and would into what calls a generator."""

    def __enter__(self) -> None:
        self._groups = {group: _limit_of(group) for group in _groups()}
        self._stores = {store: store.timeout.total_seconds() for store in _stores()}
        count_patient(1)
        try:
            for group in self._groups:
                _limit(group, PATIENT_SECONDS)
            for store in self._stores:
                _limit_store(store, PATIENT_SECONDS)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exception: object) -> None:
        count_patient(-1)
        with contextlib.ExitStack() as each:  # Though one of them fails.
            for group in _groups():
                each.callback(_limit, group, self._groups.get(group) or _usual(group))
            for store in _stores():
                each.callback(_limit_store, store, self._stores.get(store) or limit_seconds(TIMEOUT_SECONDS))


def _usual(group: Any) -> float:
    return limit_seconds(TIMEOUT_SECONDS if group is dist.group.WORLD else GROUP_TIMEOUT_SECONDS)


def _stores() -> list[Any]:
    """The world's: those of other groups are parts of it, and it decides how long they wait."""
    return [distributed_c10d._get_default_store()] if dist.is_initialized() else []


def _limit_store(store: Any, seconds: float) -> None:
    store.set_timeout(datetime.timedelta(seconds=seconds))


def _groups() -> list[Any]:
    return list(distributed_c10d._world.pg_map) if dist.is_initialized() else []


def _backends(group: Any) -> list[Any]:
    """Those of a group that have limits: gloo's and NCCL's."""
    found = []
    for kind in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError):  # It has none for these.
            found.append(group._get_backend(torch.device(kind)))
    return [backend for backend in found if hasattr(backend, "options") and hasattr(backend, "_set_default_timeout")]


def _limit_of(group: Any) -> float:
    limits = [backend.options._timeout.total_seconds() for backend in _backends(group)]
    return min(limits, default=TIMEOUT_SECONDS)


def _limit(group: Any, seconds: float) -> None:
    for backend in _backends(group):
        backend._set_default_timeout(datetime.timedelta(seconds=seconds))
    if isinstance(group, StagedGroup):
        group.limit(seconds)
