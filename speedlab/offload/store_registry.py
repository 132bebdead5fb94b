"""The places of one rank beside its device, made when they are first needed."""

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
    """The host's memory and the disk, as places for states of one rank."""

    def __init__(self, folder: Path, *, rank: int, traffic: CommStats, device: torch.device) -> None:
        """`folder`: where a file of states on disk is made."""
        self.folder = folder
        self._rank, self._traffic, self._device = rank, traffic, device
        self._made: dict[MemoryKind, StateStore] = {}
        self._under_way: list[Transfer] = []
        self._decoded = BufferMeter()
        self.scratch = DecodeBuffer(traffic.buffers, traffic.buffers if device.type == "cpu" else self._decoded)
        """Of the visits of coded states."""
        self.pages = PagePool()
        """Of parameters that come to the device for a while."""

    def of(self, where: MemoryKind) -> StateStore:
        """The store of a place other than the device. Raises OffloadError where there can be none."""
        if where not in self._made:
            self._made[where] = self._make(where)
        return self._made[where]

    def eight_bits(self, name: str, numel: int, where: MemoryKind) -> OffloadedState:
        """Room for the float32 state `name` of an optimizer in blocks of 8 bits, on the device or away from it."""

        def keep(nbytes: int) -> OffloadedState:
            if where is MemoryKind.DEVICE:
                return DeviceState(nbytes, self._device, self._traffic)
            return self.of(where).keep(nbytes, torch.uint8)

        return EightBitState(name, numel, keep, self.scratch)

    def widened(self, narrow: Tensor, where: MemoryKind) -> OffloadedState:
        """Masters that are the parameters themselves, see `UpcastMaster`, for an update where states lie at `where`."""
        device = self._device if where is MemoryKind.DEVICE else torch.device("cpu")
        return UpcastMaster(narrow, where, device, copies=self.copies, traffic=self._traffic, scratch=self.scratch)

    def _make(self, where: MemoryKind) -> StateStore:
        if where is MemoryKind.HOST:
            return HostStore(self._traffic, self._device)
        return DiskStore(self.folder, rank=self._rank, traffic=self._traffic, device=self._device)

    @property
    def made(self) -> Mapping[MemoryKind, StateStore]:
        """Those that something was kept in."""
        return self._made

    @cached_property
    def copies(self) -> HostCopies:
        """Copies between the host's memory and the device's."""
        return HostCopies(self._device, self._traffic)

    def trim(self) -> None:
        """Free what the next step does not begin with."""
        self.scratch.trim()
        self.pages.trim()

    def hold(self, transfer: Transfer) -> None:
        """Keep a transfer that nobody waits for, and with it the memory that it reads, until it is over."""
        self._under_way = [*(each for each in self._under_way if not each.over), transfer]

    @property
    def in_memory(self) -> list[Tensor]:
        """The host's memory in which states are kept, and through which they come and go."""
        return [*self.scratch.tensors, *(tensor for store in self._made.values() for tensor in store.in_memory)]

    def take_staging_peak(self) -> int:
        """The most bytes that it had since the last call."""
        return self._decoded.take_peak() + sum(store.staging_meter.take_peak() for store in self._made.values())

    def flush(self) -> None:
        """Wait until all that was changed is in its place. Raises OffloadError where some of it is not."""
        for store in self._made.values():
            store.flush()

    def close_empty(self) -> None:
        """Give up places in which nothing is kept any more."""
        for where in [where for where, store in self._made.items() if not store.nbytes]:
            self._made.pop(where).close()

    def close(self) -> None:
        """Give everything up; files are gone then."""
        for store in self._made.values():
            store.close()
        self._made.clear()
        self.trim()
