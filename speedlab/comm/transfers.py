"""What transfers cost: bytes by name and way, bytes of buffers, and the time a rank really waited.

Whatever moves a flat, a piece of one or a message: started, waited for once, and counted.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from speedlab.comm.errors import PeerLost, clear_frames, without_frames

_Waited = tuple[str, bool]
"""Phase of the step in which a rank waited, and whether for a place rather than for peers."""


@dataclass
class BufferMeter:
    """Bytes of communication buffers that are alive, and the most there were since the last `take_peak`. From any
    thread."""

    live_bytes: int = 0
    peak_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.live_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def take_peak(self) -> int:
        with self._lock:
            peak, self.peak_bytes = self.peak_bytes, self.live_bytes
        return peak


class CommCounts(NamedTuple):
    """What was counted of one rank since the counters were last taken."""

    sent_bytes: dict[str, int]
    """By collective."""
    sent_through: dict[str, dict[str, int]]
    """Collective → what it went through → bytes."""
    moved_bytes: dict[str, int]
    """To and from the host's memory and the disk, by the way that it went."""
    peer_seconds: dict[str, float]
    """Waited for peers, by phase of the step."""
    place_seconds: dict[str, float]
    """Waited for the host's memory and the disk, by phase; what happened in no phase is left out."""
    compressed_bytes: int
    """Sent by what sends less than it stands for."""
    float32_bytes: int
    """That would have been sent in its place."""


def leads_to_place(link: str) -> bool:
    """Whether a way leads to the host's memory or to a disk, rather than to peers."""
    return link == "host copy" or link.startswith("disk")


@dataclass
class CommStats:
    """Bytes this rank sent, by collective, or moved between its own places, and the seconds it waited, by phase of the
    step, since the last `take`. From any thread."""

    phase: str = ""
    """The phase of the step that waits are counted in; set by whoever times phases."""
    buffers: BufferMeter = field(default_factory=BufferMeter)
    sent_bytes: Counter[str] = field(default_factory=Counter)
    sent_through: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """By collective, bytes by what they went through."""
    link_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes since this object was made, by what they went through: shared memory, gloo, nccl, host copies."""
    moved_bytes: Counter[str] = field(default_factory=Counter)
    """To and from the host's memory and the disk, by what they went through."""
    wait_seconds: defaultdict[_Waited, float] = field(default_factory=lambda: defaultdict(float))
    _events: list[tuple[_Waited, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    compressed_bytes: int = 0
    float32_bytes: int = 0
    encoding: bool = False
    """Whether what is allocated now are messages and their parts, and nothing of the model's."""
    _beside: set[int] = field(default_factory=set)
    """Threads that wait beside the step."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def beside_the_step(self) -> Iterator[None]:
        """Inside, what this thread waits holds no step up, and is in no phase."""
        thread = threading.get_ident()
        self._beside.add(thread)
        try:
            yield
        finally:
            self._beside.discard(thread)

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """Inside, what the step's thread allocates is no activation: buffers are counted by who makes them."""
        before, self.encoding = self.encoding, True
        try:
            yield
        finally:
            self.encoding = before

    def sent(self, name: str, link: str, nbytes: int) -> None:
        """Count what this rank sends: under the collective's name, and under what it goes through."""
        if not nbytes:
            return
        with self._lock:
            if name:
                self.sent_bytes[name] += nbytes
                self.sent_through[name][link] += nbytes
            self.link_bytes[link] += nbytes
            if leads_to_place(link):
                self.moved_bytes[link] += nbytes

    def compressed(self, nbytes: int, float32_bytes: int) -> None:
        """Of what this rank sends, so many bytes stand for so many of float32."""
        with self._lock:
            self.compressed_bytes += nbytes
            self.float32_bytes += float32_bytes

    def waited(self, wait: Callable[[], Any], device: torch.device, link: str = "") -> None:
        """Run `wait`, for what comes by `link`, and count its time: by the clock on CPUs, by a pair of events on a GPU,
        which nothing waits for."""
        kind = "" if threading.get_ident() in self._beside else self.phase, leads_to_place(link)
        if device.type != "cuda":
            start = time.perf_counter()
            wait()
            with self._lock:
                self.wait_seconds[kind] += time.perf_counter() - start
            return
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        wait()
        after.record()
        with self._lock:
            self._events.append((kind, before, after))

    def take(self) -> CommCounts:
        """What was counted; the counters start again.

        GPU times are added once their events have passed; those that have not are left for the next call.
        """
        with self._lock:
            return self._take()

    def _take(self) -> CommCounts:
        late = []
        for kind, before, after in self._events:
            if after.query():
                self.wait_seconds[kind] += before.elapsed_time(after) / 1e3
            else:
                late.append((kind, before, after))
        self._events = late
        waits = self.wait_seconds.items()
        taken = CommCounts(
            sent_bytes=dict(self.sent_bytes),
            sent_through={name: dict(links) for name, links in self.sent_through.items()},
            moved_bytes=dict(self.moved_bytes),
            peer_seconds={phase: seconds for (phase, at_place), seconds in waits if not at_place},
            place_seconds={phase: seconds for (phase, at_place), seconds in waits if at_place and phase},
            compressed_bytes=self.compressed_bytes,
            float32_bytes=self.float32_bytes,
        )
        self.compressed_bytes = self.float32_bytes = 0
        self.sent_bytes, self.moved_bytes, self.wait_seconds = Counter(), Counter(), defaultdict(float)
        self.sent_through = defaultdict(Counter)
        return taken


class Transfer:
    """Bytes under way. When `wait` has returned, its result is where it was asked for.

    On a GPU `wait` holds back the stream that is current then, not the host.
    """

    def __init__(
        self,
        finish: Callable[[], Any] | None,
        traffic: CommStats,
        device: torch.device,
        *,
        name: str = "",
        link: str = "",
        nbytes: int = 0,
        stream: torch.cuda.Stream | None = None,
        over: Callable[[], bool] = lambda: False,
    ) -> None:
        """It has been started: its bytes are counted now.

        `finish`: what is left of it; None when nothing is. `device`: where the waiting happens, and so how it is timed.
        `name`: of the collective, `link`: what it goes through; `nbytes` this rank sends are counted under both.
        `stream`: the one on which its result is complete before later work; None on CPUs. `over`: whether it has ended
        by itself already, where that can be told without waiting.
        """
        self.name, self.link, self.nbytes, self.stream = name, link, nbytes, stream
        self._finish, self._traffic, self._device, self._over = finish, traffic, device, over
        self._error: BaseException | None = None
        traffic.sent(name, link, nbytes)

    @property
    def over(self) -> bool:
        """Whether there is nothing left to wait for, as far as can be told without waiting."""
        return self._finish is None or self._over()

    def cut(self) -> None:
        """This rank has left the world: nothing comes any more. What is under way holds connections, which close only
        when it is gone. (A GPU's are aborted, and its kernels may write until then.)"""
        if self._device.type != "cpu":
            return
        self._over = _is_over
        if self._finish is not None:
            self._finish = None
            self._error = PeerLost("this rank has left the world of ranks in which the transfer was started")

    def wait(self) -> None:
        """Wait until it is over. A second time there is nothing to wait for; one that failed fails again."""
        if self._error is not None:
            raise without_frames(self._error)
        if self._finish is not None:
            finish, self._finish = self._finish, None
            try:
                self._traffic.waited(finish, self._device, self.link)
            except BaseException as error:
                finish, self._over = None, _is_over
                clear_frames(error)
                self._error = without_frames(error)
                raise


def _is_over() -> bool:
    return True
