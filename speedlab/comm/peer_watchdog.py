"""A thread that detects lost peers in GPU worlds, because a rank that is blocked in an NCCL collective cannot.

1. Every rank publishes its host and process in the world's store.
2. A rank that leaves after a failure sets "left/<rank>", then aborts its own communicators.
3. A thread of every other rank polls these keys, and the processes of its own host. After a rank is lost, the thread
   notes which one, and aborts this rank's communicators. Blocked collectives end, on the device, too.
4. The results of such collectives are invalid. The next collective, or `check`, raises PeerLost with the rank's name.
   Call `check` after a device sync and before results are used.
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
"""Time between two polls. Peers notice a lost rank within about this time."""


class PeerWatchdog:
    """The polling thread of one rank.

    Args:
        store: The world's store; the watchdog opens its own connection.
        rank: This rank.
        size: Number of ranks.
        abort: Ends the collectives in which this rank may be blocked.
        seconds: Time between two polls.
    """

    def __init__(
        self, store: Any, rank: int, size: int, abort: Callable[[], None], *, seconds: float = LOOK_SECONDS
    ) -> None:
        self.lost: str | None = None
        """Description of the lost rank, or None."""
        # Use a separate connection, because another thread may block in the store.
        self._store, self._rank, self._abort, self._seconds = store.clone(), rank, abort, seconds
        self._peers = [peer for peer in range(size) if peer != rank]
        self._processes: dict[int, PeerProcess] = {}
        self._over = threading.Event()
        self._host = host_identity()
        self._store.set(f"process/{rank}", json.dumps([self._host, os.getpid()]))
        self._thread = threading.Thread(target=self._run, name="watch on peers", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise PeerLost if a peer is lost."""
        if self.lost is not None:
            raise PeerLost(f"rank {self._rank} waited for a peer that left: {self.lost}")

    def stop(self, *, failed: bool) -> None:
        """End the thread.

        Args:
            failed: Whether this rank leaves because of a failure; then peers are notified.
        """
        self._over.set()
        if failed:
            with suppress(RuntimeError):  # Without the store, no peer can read the key.
                self._store.set(f"left/{self._rank}", "1")
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._over.wait(self._seconds):
                self.lost = self._look()
                if self.lost is not None:
                    self._abort()
                    return
        except RuntimeError as error:  # The rank that served the store has ended.
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
