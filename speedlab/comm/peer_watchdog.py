"""Peers that leave a world of GPUs: a rank that is blocked in a collective of NCCL cannot see it, so a thread looks.

1. Every rank says in the world's store which process of which host it is.
2. A rank that leaves after a failure says so under "left/<rank>", then aborts its own communicators.
3. A thread of every other rank looks for these words, and at the processes of its own host. When a rank has gone it
   notes which, and aborts this rank's communicators: what is blocked in them ends, on the device too.
4. What was being computed is garbage from then on. The next collective, or `check`, raises PeerLost with the rank's
   name; `check` is for whoever has waited for the device and is about to use what came.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from speedlab.comm.errors import PeerLost, reason_of
from speedlab.comm.shared.memfd import host_identity
from speedlab.comm.shared.shared_tensors import PeerProcess

LOOK_SECONDS = 0.5
"""Between two looks. A rank that has gone is known to its peers within about this time."""


class PeerWatchdog:
    """One rank's look-out. `store`: the world's, of which it takes a connection of its own; `abort`: what ends the
    collectives in which this rank may be blocked."""

    def __init__(
        self, store: Any, rank: int, size: int, abort: Callable[[], None], *, seconds: float = LOOK_SECONDS
    ) -> None:
        self.lost: str | None = None
        """Which rank has gone and how, in words."""
        self._store, self._rank, self._abort, self._seconds = store.clone(), rank, abort, seconds
        self._peers = [peer for peer in range(size) if peer != rank]
        self._processes: dict[int, PeerProcess] = {}
        self._over = threading.Event()
        self._host = host_identity()
        self._store.set(f"process/{rank}", json.dumps([self._host, os.getpid()]))
        self._thread = threading.Thread(target=self._run, name="watch on peers", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise PeerLost when a peer has gone."""
        if self.lost is not None:
            raise PeerLost(f"rank {self._rank} waited for a peer that left: {self.lost}")

    def stop(self, *, failed: bool) -> None:
        """End the thread. `failed`: tell the peers that this rank leaves in the middle of something."""
        self._over.set()
        if failed:
            with suppress(RuntimeError):  # Where the store is gone, so is everybody who would look there.
                self._store.set(f"left/{self._rank}", "1")
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._over.wait(self._seconds):
                self.lost = self._look()
                if self.lost is not None:
                    self._abort()
                    return
        except RuntimeError as error:  # The store went with the rank that served it.
            if not self._over.is_set():
                self.lost = f"the store of the world is gone ({reason_of(error)})"
                self._abort()

    def _look(self) -> str | None:
        for peer in self._peers:
            if self._store.check([f"left/{peer}"]):
                return f"rank {peer} left"
            process = self._processes.get(peer)
            if process is None and self._store.check([f"process/{peer}"]):
                host, pid = json.loads(self._store.get(f"process/{peer}"))
                if host == self._host:
                    try:
                        process = self._processes[peer] = PeerProcess(pid)
                    except ProcessLookupError:
                        return f"the process of rank {peer} has ended"
            if process is not None and process.ended:
                return f"the process of rank {peer} has ended"
        return None
