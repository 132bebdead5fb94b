"""Cells in which a rank may stand at a breakpoint: there no collective is late, however long a person thinks."""

from __future__ import annotations

import contextlib

from speedlab.comm.group_timeouts import groups, limit_group, limit_of, limit_store, stores
from speedlab.comm.timeouts import PATIENT_SECONDS, count_patient, limit_seconds, timeout_seconds


def patience() -> contextlib.AbstractContextManager[None]:
    """Inside, collectives on groups that there are, or that SpeedLab makes, wait as long as it takes, and so does the
    store of the world. Peers that leave or die are noticed as ever. Afterwards all have the limits that they had, and
    new ones those of `limits`."""
    return _Patience()


class _Patience(contextlib.AbstractContextManager[None]):
    """No generator: an engine lets no interrupt into these two functions, and would into what calls a generator."""

    def __enter__(self) -> None:
        self._groups = {group: limit_of(group) for group in groups()}
        self._stores = {store: store.timeout.total_seconds() for store in stores()}
        count_patient(1)
        try:
            for group in self._groups:
                limit_group(group, PATIENT_SECONDS)
            for store in self._stores:
                limit_store(store, PATIENT_SECONDS)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exception: object) -> None:
        count_patient(-1)
        with contextlib.ExitStack() as each:  # Though one of them fails.
            usual = limit_seconds(timeout_seconds())
            for group in groups():
                each.callback(limit_group, group, self._groups.get(group) or usual)
            for store in stores():
                each.callback(limit_store, store, self._stores.get(store) or usual)
