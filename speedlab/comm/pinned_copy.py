"""Copies between device and host memory through reusable pinned buffers."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from speedlab.comm.transfers import CommStats, Transfer

LINK = "host copy"


class HostCopies:
    """Copies of one device that overlap with its computation.

    On a GPU, copies use their own stream. Memory that is not pinned is copied through a pinned staging buffer, so that
    the device copy blocks nothing:

    1. To the device: the host fills the staging buffer, and the stream copies it. The buffer is free after an event
       that follows the copy.
    2. To the host: the stream copies into the staging buffer. `wait` blocks the host, then copies from there.

    On a CPU, host and device are the same memory: one immediate copy.
    """

    def __init__(self, device: torch.device, traffic: CommStats) -> None:
        self._device, self._traffic = device, traffic
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._staging: defaultdict[int, deque[tuple[Tensor, torch.cuda.Event | None]]] = defaultdict(deque)
        """Pinned memory by size: (bytes, event after which it is free), oldest use first."""

    def to_device(self, source: Tensor, into: Tensor) -> Transfer:
        """Start to copy from the host to the device. Later device work sees the values after `wait`.

        Args:
            source: Contiguous host tensor. It may change after this call; if it is pinned, only after the transfer has
                ended.
            into: Contiguous device tensor of the same shape and dtype.
        """
        _check(source, into)
        if self._stream is None:
            into.copy_(source)
            return self._done(source.nbytes)
        staged = source if source.is_pinned() else self._take(source.nbytes).view(source.dtype).view(source.shape)
        if staged is not source:
            staged.copy_(source)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            into.copy_(staged, non_blocking=True)
        copied = self._passed(self._stream)
        if staged is not source:
            self._give_back(staged, copied)

        def finish() -> tuple[Tensor, Tensor]:
            torch.cuda.current_stream(self._device).wait_event(copied)
            return source, into  # Keep both memories alive until the copy has ended.

        return self._under_way(finish, source.nbytes, self._device, copied.query)

    def to_host(self, source: Tensor, into: Tensor) -> Transfer:
        """Start to copy from the device to the host. `wait` blocks the host until `into` may be read.

        Args:
            source: Contiguous device tensor; must not change before the transfer has ended.
            into: Contiguous host tensor of the same shape and dtype.
        """
        _check(source, into)
        if self._stream is None:
            into.copy_(source)
            return self._done(source.nbytes)
        staged = into if into.is_pinned() else self._take(source.nbytes).view(source.dtype).view(source.shape)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            staged.copy_(source, non_blocking=True)
        copied = self._passed(self._stream)

        def finish() -> Tensor:
            copied.synchronize()
            if staged is not into:
                into.copy_(staged)
                self._give_back(staged, None)
            return source  # Keep the source alive until the copy has ended.

        # Values in the staging buffer have not reached `into` yet.
        over = copied.query if staged is into else lambda: False
        return self._under_way(finish, source.nbytes, torch.device("cpu"), over)

    @staticmethod
    def _passed(stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def _under_way(
        self, finish: Callable[[], Any], nbytes: int, waits: torch.device, over: Callable[[], bool]
    ) -> Transfer:
        return Transfer(
            finish,
            self._traffic,
            waits,
            link=LINK,
            nbytes=nbytes,
            stream=self._stream,
            over=over,
        )

    def _done(self, nbytes: int) -> Transfer:
        return Transfer(None, self._traffic, self._device, link=LINK, nbytes=nbytes)

    def _take(self, nbytes: int) -> Tensor:
        """Return unused pinned memory (nbytes,) uint8."""
        idle = self._staging[nbytes]
        if idle and (idle[0][1] is None or idle[0][1].query()):
            return idle.popleft()[0]
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def _give_back(self, staged: Tensor, free: torch.cuda.Event | None) -> None:
        self._staging[staged.nbytes].append((staged.view(-1).view(torch.uint8), free))


def _check(source: Tensor, into: Tensor) -> None:
    alike = source.dtype == into.dtype and source.shape == into.shape
    if not (alike and source.is_contiguous() and into.is_contiguous()):
        raise ValueError(
            f"host copy: from {tuple(source.shape)} {source.dtype} to {tuple(into.shape)} {into.dtype}; expected "
            f"contiguous tensors of the same shape and dtype"
        )
