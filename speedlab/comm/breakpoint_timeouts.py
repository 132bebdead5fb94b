"""Suspend the timeouts of collectives while a rank may be at a breakpoint."""

from __future__ import annotations

import contextlib

from speedlab.comm.group_timeouts import groups, limit_group, limit_of, limit_store, stores
from speedlab.comm.timeouts import PATIENT_SECONDS, count_patient, limit_seconds, timeout_seconds


def patience() -> contextlib.AbstractContextManager[None]:
    """Let collectives and the world's store wait without a practical limit inside this context.

    This covers existing groups and groups that SpeedLab makes inside. Peers that leave or die are still detected.
    Afterwards existing groups get their old limits, and new groups the usual one.
    """
    return _Patience()


class _Patience(contextlib.AbstractContextManager[None]):
    """A class and not a generator: an engine blocks interrupts in these two methods, which it cannot do in a
    generator's caller.
    """

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
        with contextlib.ExitStack() as each:  # Run all callbacks, even if one of them fails.
            usual = limit_seconds(timeout_seconds())
            for group in groups():
                each.callback(limit_group, group, self._groups.get(group) or usual)
            for store in stores():
                each.callback(limit_store, store, self._stores.get(store) or usual)
