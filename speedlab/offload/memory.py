"""The memory that a disk reads into or writes from, on the host or on the device, as the bytes of a state."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from speedlab.offload.buffers import PAGE_BYTES


class Memory(ABC):
    """Bytes [start, start + n) of a state. Everything is told in bytes of the state, [low, high) among these."""

    def straight(self, low: int, high: int, *, direct: bool) -> memoryview | None:
        """Where the file can transfer by itself, only whole pages if `direct`; None where staging has to help."""
        return None

    @abstractmethod
    def take(self, low: int, high: int, into: Tensor) -> None:
        """Copy to `into` (high - low,) uint8 on the host."""

    @abstractmethod
    def put(self, low: int, high: int, source: Tensor) -> None:
        """Copy from `source` (high - low,) uint8 on the host."""


class HostMemory(Memory):
    """A contiguous tensor on the host."""

    def __init__(self, tensor: Tensor, start: int = 0) -> None:
        self._tensor, self._start = tensor.detach(), start
        # NumPy copies on the thread that asks; torch would start a team of threads for each of ours. By its address,
        # because a storage that NumPy was shown can never be emptied again.
        self._bytes = np.ctypeslib.as_array((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))

    def straight(self, low: int, high: int, *, direct: bool) -> memoryview | None:
        view = self._bytes[low - self._start : high - self._start]
        if direct and (low % PAGE_BYTES or high % PAGE_BYTES or view.ctypes.data % PAGE_BYTES):
            return None
        return view.data

    def take(self, low: int, high: int, into: Tensor) -> None:
        np.copyto(into.numpy(), self._bytes[low - self._start : high - self._start])

    def put(self, low: int, high: int, source: Tensor) -> None:
        np.copyto(self._bytes[low - self._start : high - self._start], source.numpy())


class DeviceMemory(Memory):
    """A contiguous tensor on a GPU: copied on a stream of the store, after what was enqueued when this was made."""

    def __init__(self, tensor: Tensor, start: int, stream: torch.cuda.Stream) -> None:
        self._bytes, self._start, self._stream = _bytes_of(tensor), start, stream
        self._ready = torch.cuda.Event()
        self._ready.record(torch.cuda.current_stream(tensor.device))

    def take(self, low: int, high: int, into: Tensor) -> None:
        self._copy(self._bytes[low - self._start : high - self._start], into)

    def put(self, low: int, high: int, source: Tensor) -> None:
        self._copy(source, self._bytes[low - self._start : high - self._start])

    def _copy(self, source: Tensor, into: Tensor) -> None:
        copied = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._ready)
            into.copy_(source, non_blocking=True)
            copied.record(self._stream)
        copied.synchronize()  # On a thread of the store: staging is used again at once.


class Zeros(Memory):
    """Zeros, as many as are asked for."""

    def take(self, low: int, high: int, into: Tensor) -> None:
        into.numpy().fill(0)

    def put(self, low: int, high: int, source: Tensor) -> None:
        raise AssertionError("zeros are read only")


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
