"""The stores of one rank, created on first use."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from speedlab.comm import BufferMeter, CommStats, HostCopies, Transfer
from speedlab.offload.disk_store import DiskStore
from speedlab.offload.host_store import HostStore
from speedlab.offload.low_precision_states import DecodeBuffer, DeviceState, EightBitState, UpcastMaster
from speedlab.offload.page_pool import PagePool
from speedlab.offload.store import OffloadedState, StateStore
from speedlab.placement import MemoryKind


class StoreRegistry:
    """The host store and the disk store of one rank, and the buffers that they share."""

    def __init__(self, folder: Path, *, rank: int, traffic: CommStats, device: torch.device) -> None:
        """Create no store yet.

        Args:
            folder: Folder for the file of states on disk.
            rank: Global rank, for the file's name.
            traffic: Counts transfers and buffers.
            device: The device of this rank.
        """
        self.folder = folder
        self._rank, self._traffic, self._device = rank, traffic, device
        self._made: dict[MemoryKind, StateStore] = {}
        self._under_way: list[Transfer] = []
        self._decoded = BufferMeter()
        self.scratch = DecodeBuffer(traffic.buffers, traffic.buffers if device.type == "cpu" else self._decoded)
        """Buffers for visits of coded states."""
        self.pages = PagePool()
        """Memory for parameters that are gathered on demand."""

    def of(self, where: MemoryKind) -> StateStore:
        """Return the store of a memory, created on the first call.

        Args:
            where: HOST or DISK.

        Raises:
            OffloadError: The store cannot be created.
        """
        if where not in self._made:
            self._made[where] = self._make(where)
        return self._made[where]

    def eight_bits(self, name: str, numel: int, where: MemoryKind) -> OffloadedState:
        """Allocate a float32 optimizer state in blocks of 8 bits.

        Args:
            name: Name of the state; decides whether its codes are signed.
            numel: Number of elements.
            where: The memory, also the device.
        """

        def keep(nbytes: int) -> OffloadedState:
            if where is MemoryKind.DEVICE:
                return DeviceState(nbytes, self._device, self._traffic)
            return self.of(where).keep(nbytes, torch.uint8)

        return EightBitState(name, numel, keep, self.scratch)

    def widened(self, narrow: Tensor, where: MemoryKind) -> OffloadedState:
        """Return masters that are computed from low-precision parameters during each visit; see `UpcastMaster`.

        Args:
            narrow: The parameters, in the compute dtype.
            where: Memory of the optimizer states. Decides on which device the update is computed.
        """
        device = self._device if where is MemoryKind.DEVICE else torch.device("cpu")
        return UpcastMaster(narrow, where, device, copies=self.copies, traffic=self._traffic, scratch=self.scratch)

    def _make(self, where: MemoryKind) -> StateStore:
        if where is MemoryKind.HOST:
            return HostStore(self._traffic, self._device)
        return DiskStore(self.folder, rank=self._rank, traffic=self._traffic, device=self._device)

    @property
    def made(self) -> Mapping[MemoryKind, StateStore]:
        """The stores that have been created."""
        return self._made

    @cached_property
    def copies(self) -> HostCopies:
        """Copies between host memory and the device."""
        return HostCopies(self._device, self._traffic)

    def trim(self) -> None:
        """Free buffers that the next step does not need at its start."""
        self.scratch.trim()
        self.pages.trim()

    def hold(self, transfer: Transfer) -> None:
        """Keep a transfer, and the memory that it reads, until its end. For transfers that no code waits for.

        Args:
            transfer: The pending transfer.
        """
        self._under_way = [*(each for each in self._under_way if not each.over), transfer]

    @property
    def in_memory(self) -> list[Tensor]:
        """Host memory of the states and of the buffers."""
        return [*self.scratch.tensors, *(tensor for store in self._made.values() for tensor in store.in_memory)]

    def take_staging_peak(self) -> int:
        """Return the largest number of buffer bytes since the last call."""
        return self._decoded.take_peak() + sum(store.staging_meter.take_peak() for store in self._made.values())

    def flush(self) -> None:
        """Wait until all changes are written. Raises OffloadError if a write failed."""
        for store in self._made.values():
            store.flush()

    def close_empty(self) -> None:
        """Close the stores that hold no states any more."""
        for where in [where for where, store in self._made.items() if not store.nbytes]:
            self._made.pop(where).close()

    def close(self) -> None:
        """Close all stores and delete their files."""
        for store in self._made.values():
            store.close()
        self._made.clear()
        self.trim()
