"""What the ranks of a cluster print, as a handle of it hears it from the supervisor."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from speedlab.cluster.supervisor import messages as m

if TYPE_CHECKING:
    from speedlab.cluster.handle import Handle

log = logging.getLogger("speedlab.cluster")

Printed = Callable[[list[int], str, str], None]
"""printed(ranks, stream, text): `stream` is 'stdout' or 'stderr'; `text` is one or more lines with their ends."""


class RanksOutput:
    """What the ranks of a cluster print. `subscribe(callback)`; callbacks come on the thread that hears of the
    supervisor, and must not wait for any answer of it."""

    def __init__(self, cluster: Handle) -> None:
        self._cluster = weakref.ref(cluster)
        self._callbacks: list[Printed] = []

    def subscribe(self, callback: Printed) -> Callable[[], None]:
        """Call `callback(ranks, stream, text)` for all output from now on; returns a function that ends it."""
        self._callbacks.append(callback)
        cluster = self._cluster()
        if cluster is not None:
            cluster._ask(m.Listen(on=True))

        def unsubscribe() -> None:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

        return unsubscribe

    def text(self, rank: int, most_bytes: int = 2**20) -> str:
        """The end of what `rank` has printed since the cluster was started, as it is kept in the cluster's folder."""
        cluster = self._cluster()
        if cluster is None:
            return ""
        data = b""
        for name in (f"rank-{rank}.log.1", f"rank-{rank}.log"):
            with contextlib.suppress(FileNotFoundError):
                data += (cluster._home.output / name).read_bytes()
        return data[-most_bytes:].decode(errors="replace")

    def printed(self, ranks: list[int], stream: str, text: str) -> None:
        """What the supervisor tells."""
        for callback in list(self._callbacks):
            try:
                callback(ranks, stream, text)
            except Exception:
                log.exception("a subscriber of the ranks' output failed and hears no more of it")
                self._callbacks.remove(callback)

    def connected(self) -> None:
        """There is a new connection to the supervisor."""
        cluster = self._cluster()
        if self._callbacks and cluster is not None and cluster._client is not None:
            cluster._client.ask(m.Listen(on=True))
