"""What ranks print, as it comes: stdout and stderr of all of them, equal lines of several ranks folded into one.

OutputHub listens to the engines' output channel itself: a client of ipyparallel hears only the tasks it submitted, so
after a restart of the kernel the output of a run that goes on would be lost.
"""

from __future__ import annotations

import logging
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import zmq
from jupyter_client.session import Session

log = logging.getLogger("speedlab.cluster")

Callback = Callable[[list[int], str, str], None]
"""callback(ranks, stream, text): `stream` is 'stdout' or 'stderr'; `text` is one or more lines with their ends."""

FOLD_SECONDS = 0.3
"""How long a line waits for the same line of other ranks. Engines send what they print every 0.2 s."""
PARTIAL_SECONDS = 1.0
"""How long an unfinished line waits for its end."""
MOST_LINES = 2000
"""Lines of one rank that may wait; beyond that the oldest are left out, and a line says how many."""

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r(?!\n|$)|\n)")
_TOPIC = re.compile(rb"engine\.(\d+)\.")
_POLL_MS = 50


@dataclass
class _Line:
    stream: str
    text: str
    time: float


class LineFolder:
    """Folds equal lines of several ranks; pure: the clock is an argument.

    1. Text is cut into lines; each rank has one queue, so the order of a rank's lines is kept, over both streams.
    2. A line is due when every rank has it at the head of its queue, or when it has waited for FOLD_SECONDS.
    3. A due line leaves together with the equal heads of other ranks. Among due lines, one that another rank still has
       further down its queue goes later, so that it is folded when it comes up there; else the lowest rank goes first.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._queues: dict[int, deque[_Line]] = {rank: deque() for rank in ranks}
        self._partial: dict[tuple[int, str], _Line] = {}
        self._left_out: dict[int, int] = {}

    def expect(self, size: int) -> None:
        """Fold the lines of ranks 0 to `size` - 1 from now on; what other ranks wrote still comes out."""
        for rank in range(size):
            self._queues.setdefault(rank, deque())
        for rank in [rank for rank, queue in self._queues.items() if rank >= size and not queue]:
            del self._queues[rank]

    @property
    def waiting(self) -> bool:
        return bool(self._partial) or any(self._queues.values())

    def feed(self, rank: int, stream: str, text: str, now: float) -> None:
        """Add what `rank` wrote to `stream`; it need not end at the end of a line."""
        queue = self._queues.setdefault(rank, deque())
        held = self._partial.pop((rank, stream), None)
        text = held.text + text if held else text
        end = 0
        for match in _LINE.finditer(text):
            queue.append(_Line(stream, match.group(), now))
            end = match.end()
        if end < len(text):
            self._partial[rank, stream] = _Line(stream, text[end:], held.time if held and not end else now)
        while len(queue) > MOST_LINES:
            queue.popleft()
            self._left_out[rank] = self._left_out.get(rank, 0) + 1

    def drain(self, now: float, *, everything: bool = False) -> list[tuple[list[int], str, str]]:
        """What is due, as (ranks, stream, text) in order; neighbours of the same ranks and stream are one entry."""
        self._give_up_on_partial_lines(now, everything)
        out: list[tuple[list[int], str, str]] = []
        for rank in list(self._left_out):
            out.append(([rank], "stderr", f"… {self._left_out.pop(rank)} lines of output left out\n"))
        while (due := self._due(now, everything)) is not None:
            ranks = [rank for rank, queue in self._queues.items() if queue and _same(queue[0], due)]
            for rank in ranks:
                self._queues[rank].popleft()
            if out and out[-1][0] == ranks and out[-1][1] == due.stream:
                out[-1] = (ranks, due.stream, out[-1][2] + due.text)
            else:
                out.append((ranks, due.stream, due.text))
        return out

    def _due(self, now: float, everything: bool) -> _Line | None:
        heads = [queue[0] for _, queue in sorted(self._queues.items()) if queue]
        if len(heads) == len(self._queues) and all(_same(head, heads[0]) for head in heads):
            return heads[0]
        late = [head for head in heads if everything or now - head.time >= FOLD_SECONDS]
        return min(late, key=self._comes_again, default=None)

    def _comes_again(self, line: _Line) -> bool:
        """Whether a rank that has something else at its head has `line` further down."""
        return any(
            queue and not _same(queue[0], line) and any(_same(other, line) for other in queue)
            for queue in self._queues.values()
        )

    def _give_up_on_partial_lines(self, now: float, everything: bool) -> None:
        for (rank, stream), line in list(self._partial.items()):
            if everything or now - line.time >= PARTIAL_SECONDS:
                del self._partial[rank, stream]
                self._queues.setdefault(rank, deque()).append(line)


def _same(a: _Line, b: _Line) -> bool:
    return a.stream == b.stream and a.text == b.text


class OutputHub:
    """Output of all ranks of a cluster. `subscribe(callback)`; callbacks come on the hub's own thread."""

    def __init__(self, connection: Mapping[str, Any], rank_of: Callable[[int], int | None], size: int) -> None:
        """`connection`: what ipyparallel's client connection file holds; `rank_of`: the rank of an engine id."""
        self.size = size
        """Number of ranks whose lines are folded; whoever adds or removes engines sets it."""
        self._rank_of = rank_of
        self._folder = LineFolder(range(size))
        self._callbacks: list[Callback] = []
        self._finished: deque[str] = deque(maxlen=4096)
        self._idle = threading.Condition()
        self._hurry = False
        self._closed = threading.Event()
        self._session = Session(
            key=connection["key"].encode(),
            signature_scheme=connection["signature_scheme"],
            packer=connection["pack"],
            unpacker=connection["unpack"],
        )
        address = f"{connection['interface']}:{connection['iopub']}"
        # The thread must not keep the hub alive, or a handle that was dropped would listen for ever.
        self._thread = threading.Thread(
            target=_listen, args=(weakref.ref(self), address, self._closed), name="speedlab-output", daemon=True
        )
        self._thread.start()

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """Call `callback(ranks, stream, text)` for all output from now on; returns a function that ends it."""
        self._callbacks.append(callback)

        def unsubscribe() -> None:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

        return unsubscribe

    def settle(self, tasks: Iterable[str], timeout: float = 0.5) -> bool:
        """Wait until all output of these tasks (message ids) has been passed on. False when `timeout` came first."""
        if self._closed.is_set() or threading.current_thread() is self._thread:
            return False  # Nothing comes any more, or not while this callback of the hub's own thread waits.
        missing = set(tasks)
        deadline = time.monotonic() + timeout
        with self._idle:
            if not self._idle.wait_for(lambda: missing.issubset(self._finished), timeout):
                return False
            # Nothing more comes from these tasks, so no line has to wait for its like.
            self._hurry = True
            return self._idle.wait_for(lambda: not self._hurry, deadline - time.monotonic())

    def close(self) -> None:
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2.0)

    def _receive(self, frames: list[bytes]) -> None:
        try:
            topics, parts = self._session.feed_identities(frames)
            message = self._session.deserialize(parts)
        except ValueError as error:
            log.warning("output of an engine was refused: %s", error)  # A wrong signature: not one of our engines.
            return
        kind, content = message["header"]["msg_type"], message["content"]
        if kind == "stream":
            topic = _TOPIC.match(topics[0]) if topics else None
            rank = self._rank_of(int(topic.group(1))) if topic else None
            if rank is not None:
                self._folder.feed(rank, content["name"], content["text"], time.monotonic())
        elif kind == "status" and content["execution_state"] == "idle" and message["parent_header"]:
            with self._idle:  # The last message of a task: all its output has come.
                self._finished.append(message["parent_header"]["msg_id"])
                self._idle.notify_all()

    def _pass_on(self) -> None:
        hurry = self._hurry
        self._folder.expect(self.size)
        for ranks, stream, text in self._folder.drain(time.monotonic(), everything=hurry):
            for callback in list(self._callbacks):
                try:
                    callback(ranks, stream, text)
                except Exception:
                    log.exception("a subscriber of the ranks' output failed and hears no more of it")
                    self._callbacks.remove(callback)
        if hurry:
            with self._idle:
                self._hurry = False
                self._idle.notify_all()


def _listen(hub_of: weakref.ref[OutputHub], address: str, closed: threading.Event) -> None:
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.linger = 0
    socket.subscribe(b"")
    socket.connect(address)
    try:
        while not closed.is_set():
            ready = socket.poll(_POLL_MS)
            hub = hub_of()
            if hub is None:
                return
            while ready:
                hub._receive(socket.recv_multipart())
                ready = socket.poll(0)
            hub._pass_on()
            del hub
    finally:
        socket.close()
