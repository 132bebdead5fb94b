"""The cost of transfers: bytes by name and link, bytes of buffers, and the time that a rank really waits.

- `BufferMeter` counts buffers, `CommStats` bytes and waits.
- `Transfer` is any data in flight: started, awaited once, and counted.
- `Rotation` is one step of a ring exchange: send a tensor to one rank while another one arrives from the other side.
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
import torch.distributed as dist
from torch import Tensor

from speedlab.comm.errors import PeerLost, clear_frames, without_frames

_Waited = tuple[str, bool]
"""Phase of the step in which a rank waited, and whether for host memory or disk and not for peers."""


@dataclass
class BufferMeter:
    """Current bytes of communication buffers, and their peak since the last `take_peak`. Thread-safe."""

    live_bytes: int = 0
    peak_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, nbytes: int) -> None:
        """Count new bytes.

        Args:
            nbytes: Bytes; negative for freed ones.
        """
        with self._lock:
            self.live_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def take_peak(self) -> int:
        """Return the peak bytes and start a new peak."""
        with self._lock:
            peak, self.peak_bytes = self.peak_bytes, self.live_bytes
        return peak


class CommCounts(NamedTuple):
    """Counts of one rank since the last `take`."""

    sent_bytes: dict[str, int]
    """Bytes by collective."""
    sent_through: dict[str, dict[str, int]]
    """Collective → link → bytes."""
    moved_bytes: dict[str, int]
    """Bytes to and from host memory and disk, by link."""
    peer_seconds: dict[str, float]
    """Waits for peers, by phase of the step."""
    place_seconds: dict[str, float]
    """Waits for host memory and disk, by phase; waits outside of phases are left out."""
    compressed_bytes: int
    """Sent bytes of compressed transfers."""
    float32_bytes: int
    """Bytes of the same transfers in float32."""


def leads_to_place(link: str) -> bool:
    """Return whether a link leads to host memory or a disk and not to peers.

    Args:
        link: Name of a link.
    """
    return link == "host copy" or link.startswith("disk")


@dataclass
class CommStats:
    """Bytes that this rank sent or moved, and seconds that it waited, since the last `take`. Thread-safe."""

    phase: str = ""
    """Current phase of the step, set by the phase timer."""
    buffers: BufferMeter = field(default_factory=BufferMeter)
    sent_bytes: Counter[str] = field(default_factory=Counter)
    sent_through: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Collective → link → bytes."""
    link_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes by link since this object was made: shared memory, gloo, nccl, host copies."""
    moved_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes to and from host memory and disk, by link."""
    wait_seconds: defaultdict[_Waited, float] = field(default_factory=lambda: defaultdict(float))
    _events: list[tuple[_Waited, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    compressed_bytes: int = 0
    float32_bytes: int = 0
    encoding: bool = False
    """Whether current allocations are messages and not activations of the model."""
    _alongside: set[int] = field(default_factory=set)
    """Threads whose waits do not delay the step."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def alongside_the_step(self) -> Iterator[None]:
        """Do not count waits of this thread in a phase, because they do not delay the step."""
        thread = threading.get_ident()
        self._alongside.add(thread)
        try:
            yield
        finally:
            self._alongside.discard(thread)

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """Do not count allocations in this context as activations; buffers are counted by their owners."""
        before, self.encoding = self.encoding, True
        try:
            yield
        finally:
            self.encoding = before

    def sent(self, name: str, link: str, nbytes: int) -> None:
        """Count bytes that this rank sends.

        Args:
            name: Name of the collective, or "".
            link: Name of the link.
            nbytes: Bytes.
        """
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
        """Count a compressed transfer.

        Args:
            nbytes: Bytes that are sent.
            float32_bytes: Bytes of the same values in float32.
        """
        with self._lock:
            self.compressed_bytes += nbytes
            self.float32_bytes += float32_bytes

    def waited(self, wait: Callable[[], Any], device: torch.device, link: str = "") -> None:
        """Run `wait` and count its time: by clock on CPUs, by two events on a GPU, without a sync.

        Args:
            wait: Waits for a transfer.
            device: Device that waits.
            link: Name of the link.
        """
        kind = "" if threading.get_ident() in self._alongside else self.phase, leads_to_place(link)
        if device.type != "cuda":
            start = time.perf_counter()
            wait()
            with self._lock:
                self.wait_seconds[kind] += time.perf_counter() - start
            return
        # Events on the current stream measure how long the stream is blocked, without a sync.
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        wait()
        after.record()
        with self._lock:
            self._events.append((kind, before, after))

    def take(self) -> CommCounts:
        """Return the counts and reset them.

        GPU times are added after their events have passed; pending ones are left for the next call.
        """
        with self._lock:
            return self._take()

    def _take(self) -> CommCounts:
        late = []
        for kind, before, after in self._events:
            if after.query():
                self.wait_seconds[kind] += before.elapsed_time(after) / 1e3
            else:
                # Do not wait for pending events: that would be a device sync.
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
    """Data in flight. After `wait` the result is in its target.

    On a GPU, `wait` blocks the current stream, not the host.
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
        """Count the bytes of a started transfer.

        Args:
            finish: Remaining work; None if there is none.
            traffic: Counts bytes and waits.
            device: Device that waits, which decides how waits are timed.
            name: Name of the collective.
            link: Name of the link.
            nbytes: Bytes that this rank sends.
            stream: Stream on which the result is complete; None on CPUs.
            over: Returns without waiting whether the transfer has ended by itself.
        """
        self.name, self.link, self.nbytes, self.stream = name, link, nbytes, stream
        self._finish, self._traffic, self._device, self._over = finish, traffic, device, over
        self._error: BaseException | None = None
        traffic.sent(name, link, nbytes)

    @property
    def over(self) -> bool:
        """Whether the transfer has ended, as far as known without waiting."""
        return self._finish is None or self._over()

    def cut(self) -> None:
        """Cancel a CPU transfer, because this rank has left the world. Its connections close only after it is released.

        GPU transfers are aborted elsewhere, and kernels may write until then.
        """
        if self._device.type != "cpu":
            return
        self._over = _is_over
        if self._finish is not None:
            self._finish = None
            self._error = PeerLost("this rank has left the world of ranks in which the transfer was started")

    def wait(self) -> None:
        """Wait until the transfer has ended. A second call returns at once, or raises the same error again."""
        if self._error is not None:
            raise without_frames(self._error)
        if self._finish is not None:
            finish, self._finish = self._finish, None
            try:
                self._traffic.waited(finish, self._device, self.link)
            except BaseException as error:
                # Drop this frame's references to connections, because the error keeps the frame.
                finish, self._over = None, _is_over
                clear_frames(error)
                self._error = without_frames(error)
                raise


def _is_over() -> bool:
    return True


class Rotation:
    """A ring step in flight."""

    def __init__(self, received: Tensor, transfer: Transfer, open_ones: dict[Rotation, int]) -> None:
        """Hold the transfer.

        `open_ones`: ring steps without `wait`, each with the number of others that it must outlive.
        """
        self._received, self._transfer, self._open = received, transfer, open_ones

    def wait(self) -> Tensor:
        """Wait and return the received tensor."""
        self._transfer.wait()
        del self._open[self]
        for other in list(self._open):
            self._open[other] -= 1
            if self._open[other] < 0:
                del self._open[other]
        return self._received


def begin(out: Tensor, to: int, received: Tensor, source: int, tag: int, group: Any) -> list[Any]:
    """Start a message to one rank and one from another; empty tensors are skipped.

    Args:
        out: Tensor to send.
        to: Index of the receiver in the group.
        received: Tensor to fill.
        source: Index of the sender in the group.
        tag: Tag of both messages; ignored on GPUs.
        group: Process group.

    Returns:
        Works to wait for.
    """
    if out.device.type == "cpu":
        works = [group.recv([received], source, tag)] if received.numel() else []
        return [*works, group.send([out], to, tag)] if out.numel() else works
    # Start both in one batch; otherwise a ring of ranks would deadlock.
    both = (dist.isend, out, to), (dist.irecv, received, source)
    operations = [dist.P2POp(op, each, group=group, group_peer=peer) for op, each, peer in both if each.numel()]
    return dist.batch_isend_irecv(operations) if operations else []
