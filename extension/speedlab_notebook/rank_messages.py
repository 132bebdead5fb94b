"""The messages that engines publish about given tasks: what they print and display, and that they are through with it.

The cluster's OutputHub passes on text only, of all tasks alike. A cell's display shows what that cell did, pictures
too; so it listens itself, and tells its tasks' messages from others' by the task they name as their parent.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import zmq
from jupyter_client.session import Session

if TYPE_CHECKING:
    from speedlab.cluster import Cluster

log = logging.getLogger("speedlab.notebook")

_CONNECT_MS = 2000


class RankMessages:
    """A subscription to the engines' output channel, complete from the moment the constructor returns."""

    def __init__(self, connection: Mapping[str, Any]) -> None:
        """`connection`: what ipyparallel's client connection file holds."""
        self._session = Session(
            key=connection["key"].encode(),
            signature_scheme=connection["signature_scheme"],
            packer=connection["pack"],
            unpacker=connection["unpack"],
        )
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.linger = 0
        self._socket.rcvhwm = 0  # Nothing is dropped while other work keeps this process busy.
        self._socket.subscribe(b"")
        connected = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._socket.connect(f"{connection['interface']}:{connection['iopub']}")
        if not connected.poll(_CONNECT_MS):
            log.warning("the engines' output channel does not answer; what this cell prints may not be shown")
        self._socket.disable_monitor()
        connected.close(linger=0)

    @classmethod
    def of(cls, cluster: Cluster) -> RankMessages:
        from speedlab.cluster.home import Home

        return cls(json.loads(Home(cluster.name).connection_file("client").read_text()))

    def take(self, timeout_seconds: float) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        """(task, kind, content) of each message that has come or comes within `timeout_seconds`.

        `task` is the id of the message that submitted it. The kind 'status' with the execution state 'idle' is the last
        one of a task.
        """
        wait_ms = round(timeout_seconds * 1000)
        while self._socket.poll(wait_ms):
            wait_ms = 0
            try:
                _, parts = self._session.feed_identities(self._socket.recv_multipart())
                message = self._session.deserialize(parts)
            except ValueError as error:
                log.warning("a message of an engine was refused: %s", error)  # A wrong signature: none of our engines.
                continue
            task = message["parent_header"].get("msg_id")
            if task is not None:
                yield task, message["header"]["msg_type"], message["content"]

    def close(self) -> None:
        self._socket.close()
