"""Messages between two ranks of a host. Receives match by tag, first come, first served.

A send waits for its receiver only if many messages are in flight. While it waits, it takes incoming messages, so that
any number may cross.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from ctypes import memmove
from functools import partial

import torch
from torch import Tensor

from speedlab.comm.errors import PeerLost
from speedlab.comm.shared.call_descriptions import dtype_code, dtype_name
from speedlab.comm.shared.shared_tensors import arena
from speedlab.comm.shared.staged_collectives import tensor_at
from speedlab.comm.shared.sync_page import SyncPage

_SMALLEST_BUFFER = 4096
_POLL_SECONDS = 2e-4


class Receive:
    """An expected message: its tag and target."""

    def __init__(self, tensor: Tensor, tag: int) -> None:
        self.tensor, self.tag = tensor, tag
        self.dtype = dtype_code(tensor.dtype)
        self.source: int | None = None
        """The peer that sent it, after arrival."""
        self.unfit: tuple[int, int] | None = None
        """(bytes, code of the dtype) of an arrived message that does not fit."""


class P2PMailbox:
    """Sends and receives of one rank in its group."""

    def __init__(self, meeting: SyncPage) -> None:
        self._meeting = meeting
        self._free: list[Tensor] = []
        """Reusable buffers of delivered messages."""
        self._next = dict.fromkeys(meeting.peers, 0)
        """Number of the next message to take from each peer."""
        self._expected: dict[int, list[Receive]] = {peer: [] for peer in meeting.peers}
        self._early: dict[int, list[tuple[int, Tensor, int]]] = {peer: [] for peer in meeting.peers}
        """Messages that arrived before a receive with their tag: (tag, bytes, code of the dtype)."""

    def send(self, tensor: Tensor, peer: int, tag: int) -> None:
        """Copy a tensor and notify the receiver. The tensor may change after this call.

        Args:
            tensor: Contiguous.
            peer: Index of the receiver in the group.
            tag: Tag of the matching receive.
        """
        self._meeting.faults.check()
        dtype = dtype_code(tensor.dtype)
        self._make_room(peer, lambda: f"send of {_described(tensor.nbytes, dtype)} to {self._name(peer)}, tag {tag}")
        self._collect()
        buffer = self._buffer(tensor.nbytes)
        memmove(buffer.data_ptr(), tensor.data_ptr(), tensor.nbytes)
        self._meeting.send(peer, buffer, tensor.nbytes, tag, dtype)

    def expect(self, tensor: Tensor, peer: int | None, tag: int) -> Receive:
        """Register a receive. Pass the result to `finish`.

        Args:
            tensor: Contiguous target.
            peer: Index of the sender; None for any sender.
            tag: Tag of the matching send.
        """
        self._meeting.faults.check()
        receive = Receive(tensor, tag)
        for k in self._meeting.peers if peer is None else [peer]:
            self._expected[k].append(receive)
        return receive

    def finish(self, receive: Receive) -> None:
        """Wait until the message has arrived.

        Args:
            receive: Result of `expect`.

        Raises:
            PeerLost: If the message does not arrive; names the sender.
            CollectiveMismatch: If the message has another size or dtype.
        """
        deadline = time.monotonic() + self._meeting.timeout_seconds
        while not self.poll(receive):
            waiting = [peer for peer, expected in self._expected.items() if receive in expected]
            asked = partial(self._asked, receive, waiting)
            if len(waiting) == 1:
                self._meeting.wait_message(waiting[0], self._next[waiting[0]], asked)
            else:
                time.sleep(_POLL_SECONDS)  # With any sender, there is no single flag to wait for.
                for peer in waiting:
                    self._meeting.look(peer, lambda: self.poll(receive), deadline, asked)
        if receive.unfit is not None:
            raise self._mismatch(receive, *receive.unfit)

    def _asked(self, receive: Receive, sources: Sequence[int]) -> str:
        names = " or ".join(self._name(peer) for peer in sources)
        return f"recv of {_described(receive.tensor.nbytes, receive.dtype)} from {names}, tag {receive.tag}"

    def _mismatch(self, receive: Receive, nbytes: int, dtype: int) -> PeerLost:
        assert receive.source is not None  # The message has arrived.
        asked, sent, source = self._asked(receive, [receive.source]), _described(nbytes, dtype), receive.source
        own = self._name(self._meeting.index)
        return self._meeting.faults.mismatch(
            f"{own[0].upper()}{own[1:]} expected {_described(receive.tensor.nbytes, receive.dtype)} from "
            f"{self._name(source)} with tag {receive.tag}, which sent {sent}.",
            asked,
            {source: f"send of {sent} to {own}, tag {receive.tag}"},
            together=False,
        )

    def _name(self, peer: int) -> str:
        return f"rank {self._meeting.ranks[peer]}"

    def is_over(self, receive: Receive) -> bool:
        """Return whether `finish` would not wait: the message has arrived, or the group is closed.

        Args:
            receive: Result of `expect`.
        """
        return self.poll(receive) or self._meeting.faults.is_open

    def poll(self, receive: Receive) -> bool:
        """Take arrived messages and return whether `receive` is complete.

        Args:
            receive: Result of `expect`.
        """
        for peer in [peer for peer, expected in self._expected.items() if receive in expected]:
            if receive.source is None:
                self._take_from(peer)
        return receive.source is not None

    def _make_room(self, peer: int, asked: Callable[[], str]) -> None:
        """Wait until one more message to `peer` fits.

        The peer may itself wait, directly or indirectly, for this rank to take messages. So this takes all incoming
        messages.
        """
        deadline = time.monotonic() + self._meeting.timeout_seconds
        while not self._meeting.has_room(peer):
            for other in self._meeting.peers:
                self._take_from(other, also_early=True)
            time.sleep(_POLL_SECONDS)
            self._meeting.look(peer, lambda: self._meeting.has_room(peer), deadline, asked)

    def _take_from(self, peer: int, *, also_early: bool = False) -> None:
        """Take expected messages of `peer` or, with `also_early`, all its messages."""
        for receive in list(self._expected[peer]):
            for place, (tag, data, dtype) in enumerate(self._early[peer]):
                if tag == receive.tag:
                    del self._early[peer][place]
                    self._deliver(receive, peer, data.data_ptr(), data.nbytes, dtype)
                    break
        while also_early or self._expected[peer]:
            message = self._meeting.message(peer, self._next[peer])
            if message is None:
                return
            address, nbytes, tag, dtype = message
            receive = next((r for r in self._expected[peer] if r.tag == tag), None)
            if receive is None:
                # Copy the message, because its buffer is reused after `fetched`.
                self._early[peer].append((tag, tensor_at(address, nbytes, torch.uint8).clone(), dtype))
            else:
                self._deliver(receive, peer, address, nbytes, dtype)
            self._meeting.fetched(peer, self._next[peer])
            self._next[peer] += 1

    def _deliver(self, receive: Receive, peer: int, address: int, nbytes: int, dtype: int) -> None:
        for expected in self._expected.values():
            if receive in expected:
                expected.remove(receive)
        receive.source = peer
        if nbytes == receive.tensor.nbytes and dtype == receive.dtype:
            memmove(receive.tensor.data_ptr(), address, nbytes)
        else:
            # Keep the error for this receive: the caller may be waiting for another message.
            receive.unfit = nbytes, dtype

    def _collect(self) -> None:
        """Reuse the buffers of messages that peers have fetched."""
        for peer, buffers in self._meeting.under_way.items():
            fetched = self._meeting.fetched_by(peer)
            while buffers and buffers[0][0] < fetched:
                self._free.append(buffers.popleft()[1])

    def _buffer(self, nbytes: int) -> Tensor:
        size = max(_SMALLEST_BUFFER, 1 << (nbytes - 1).bit_length()) if nbytes else _SMALLEST_BUFFER
        for place, buffer in enumerate(self._free):
            if buffer.nbytes == size:
                return self._free.pop(place)
        return arena().empty(size, torch.uint8)


def _described(nbytes: int, dtype: int) -> str:
    """Return '4 float32'. `dtype`: see `call_descriptions.dtype_code`."""
    name = dtype_name(dtype)
    return f"{nbytes // getattr(torch, name).itemsize:,} {name}"
