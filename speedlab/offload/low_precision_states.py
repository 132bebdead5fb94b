"""States in fewer bytes between two uses: moments in blocks of 8 bits, and masters that are computed from parameters.

A visit always sees float32. Changes are encoded at the end of the visit. So optimizers, checkpoints and reshapes need
not know about the format, and every store works with each format.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cuda_ops.blockwise8 import BLOCK, blockwise8_decode, blockwise8_encode
from speedlab.comm import BufferMeter, CommStats, HostCopies, Transfer
from speedlab.offload.staging_buffers import BufferPool
from speedlab.offload.store import OffloadedState
from speedlab.placement import MemoryKind

_SCALE_BYTES = 4
_MAGNITUDES = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "acc_delta", "exp_inf"})
"""States of torch's optimizers that are never negative, so all 8 bits encode the magnitude."""


class DecodeBuffer:
    """Float32 buffers for visits of coded states, reused until `trim`."""

    def __init__(self, device: BufferMeter, host: BufferMeter) -> None:
        """Start empty.

        Args:
            device: Meter of device memory.
            host: Meter of host memory; on CPU ranks the same object.
        """
        self._meter, self._buffers = device, BufferPool(host)

    def take(self, numel: int, device: torch.device) -> Tensor:
        """Return a buffer (numel,) float32 with arbitrary values.

        Args:
            numel: Number of elements.
            device: Its device.
        """
        if device.type != "cpu":  # The GPU allocator caches memory itself.
            self._meter.add(4 * numel)
            return torch.empty(numel, device=device)
        return self._buffers.take(numel * 4)[: numel * 4].view(torch.float32)

    def give_back(self, taken: Tensor) -> None:
        """Return a buffer to the pool."""
        if taken.device.type == "cpu":
            self._buffers.give_back(taken)
        else:
            self._meter.add(-taken.nbytes)

    @property
    def tensors(self) -> list[Tensor]:
        """All buffers in host memory."""
        return self._buffers.all

    def trim(self) -> None:
        """Free the idle buffers."""
        self._buffers.trim()


class DeviceState(OffloadedState):
    """Bytes on the device, used in place. A turn transfers nothing."""

    where = MemoryKind.DEVICE

    def __init__(self, numel: int, device: torch.device, traffic: CommStats) -> None:
        self.numel, self.dtype, self.device = numel, torch.uint8, device
        self._values, self._traffic = torch.zeros(numel, dtype=torch.uint8, device=device), traffic

    def fetch(self, *, values: bool = True) -> Transfer:
        """Start a turn; nothing is transferred."""
        return self._done()

    @property
    def tensor(self) -> Tensor:
        return self._values

    def leave(self, *, changed: bool) -> None:
        """Do nothing, because changes are already in place."""

    def read(self, into: Tensor, start: int = 0) -> Transfer:
        """Copy a range to `into`."""
        into.copy_(self._values[start : start + into.numel()])
        return self._done()

    def write(self, source: Tensor, start: int = 0) -> Transfer:
        """Copy `source` to a range."""
        self._values[start : start + source.numel()].copy_(source)
        return self._done()

    def drop(self) -> None:
        """Free the memory."""
        del self._values

    def _done(self) -> Transfer:
        return Transfer(None, self._traffic, torch.device("cpu"))


class EightBitState(OffloadedState):
    """A float32 state as 8-bit codes, with one scale per block of 256 elements. Blocks start at the first element.

    The bytes contain all codes, then all scales. For states on host or disk, the host's kernels encode and decode;
    otherwise the device's.
    """

    dtype = torch.float32

    def __init__(self, name: str, numel: int, keep: Callable[[int], OffloadedState], scratch: DecodeBuffer) -> None:
        """Allocate codes and scales.

        Args:
            name: Name of the state; decides whether codes are signed.
            numel: Number of elements.
            keep: Allocates this many bytes in a store.
            scratch: Buffers for decoded values.
        """
        self.numel, self._scratch = numel, scratch
        self._blocks = -(-numel // BLOCK)
        self._bytes = keep(self._blocks * (BLOCK + _SCALE_BYTES))
        self._signed = name not in _MAGNITUDES
        self.where, self.device = self._bytes.where, self._bytes.device
        self._wanted = True
        """Whether the current turn needs values."""
        self._here: Tensor | None = None
        """Decoded values of the current turn."""

    @property
    def nbytes(self) -> int:
        return self._bytes.nbytes

    # ---- turns -------------------------------------------------------------------------------------------------------

    def fetch(self, *, values: bool = True) -> Transfer:
        """Start a turn: fetch codes and scales. `tensor` decodes them."""
        self._wanted = values
        return self._bytes.fetch(values=values)

    @property
    def tensor(self) -> Tensor:
        if self._here is None:
            kept = self._bytes.tensor
            self._here = self._scratch.take(self.numel, self.device)
            if self._wanted:
                blockwise8_decode(*self._coded(kept, self.numel), self._here, signed=self._signed)
        return self._here

    def leave(self, *, changed: bool) -> None:
        """Encode the values if they `changed`, and end the turn."""
        here, self._here = self._here, None
        whole = False
        try:
            if here is not None and changed:
                blockwise8_encode(here, *self._coded(self._bytes.tensor, self.numel), signed=self._signed)
            whole = True
        finally:  # Ctrl-C must end the turn too, because the next turn waits for its end.
            if here is not None:
                self._scratch.give_back(here)
            self._bytes.leave(changed=changed and whole)

    def _coded(self, kept: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return codes and scales as views of the bytes of `numel` elements."""
        blocks = -(-numel // BLOCK)
        scales = kept[blocks * BLOCK : blocks * (BLOCK + _SCALE_BYTES)].view(torch.float32)
        return kept[:numel], scales

    # ---- stretches ---------------------------------------------------------------------------------------------------

    def read(self, into: Tensor, start: int = 0) -> Transfer:
        """Copy decoded elements to a tensor. The values are complete on return.

        Args:
            into: (m,) float32.
            start: First element.
        """
        first, last = start // BLOCK, -(-(start + into.numel()) // BLOCK)
        numel, blocks = min(last * BLOCK, self.numel) - first * BLOCK, last - first
        codes = torch.empty(blocks * BLOCK, dtype=torch.uint8, device=self.device)
        scales = torch.empty(blocks * _SCALE_BYTES, dtype=torch.uint8, device=self.device)
        coming = self._bytes.read(codes, first * BLOCK)
        self._bytes.read(scales, self._blocks * BLOCK + first * _SCALE_BYTES).wait()
        coming.wait()
        decoded = torch.empty(numel, device=self.device)
        blockwise8_decode(codes[:numel], scales.view(torch.float32), decoded, signed=self._signed)
        into.copy_(decoded[start - first * BLOCK :][: into.numel()])
        return coming

    def write(self, source: Tensor, start: int = 0) -> Transfer:
        """Encode and write the full state, because each block has one scale.

        Args:
            source: (numel,) float32.
            start: Must be 0.

        Raises:
            ValueError: `source` is only a part of the state.
        """
        if start or source.numel() != self.numel:
            raise ValueError(
                f"offload: a state in 8 bits is written whole: {self.numel} elements, not {source.numel()}"
            )
        made = torch.zeros(self._bytes.numel, dtype=torch.uint8, device=self.device)
        blockwise8_encode(source.to(self.device), *self._coded(made, self.numel), signed=self._signed)
        return self._bytes.write(made)

    def drop(self) -> None:
        """Free buffers, codes and scales."""
        if self._here is not None:
            self._scratch.give_back(self._here)
            self._here = None
        self._bytes.drop()


class UpcastMaster(OffloadedState):
    """Masters without memory of their own: float32 in a turn, computed from the low-precision parameters.

    `FlatParam.publish` rounds the changes of a turn and writes them back to the parameters.
    """

    dtype = torch.float32

    def __init__(
        self,
        narrow: Tensor,
        where: MemoryKind,
        device: torch.device,
        *,
        copies: HostCopies,
        traffic: CommStats,
        scratch: DecodeBuffer,
    ) -> None:
        """Allocate nothing yet.

        Args:
            narrow: The parameters, which have values when the turn's transfer is waited for.
            where: Memory of the optimizer states.
            device: Device on which the update is computed.
            copies: Copies between host and device.
            traffic: Counts transfers.
            scratch: Buffers for the float32 values.
        """
        self.numel, self.where, self.device = narrow.numel(), where, device
        self._narrow, self._copies, self._traffic, self._scratch = narrow, copies, traffic, scratch
        self._source: Tensor | None = None
        """Low-precision input of the current turn; None if the turn needs only memory."""
        self._here: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return 0

    def fetch(self, *, values: bool = True) -> Transfer:
        """Start a turn. If the update runs on the host, start to copy the parameters there."""
        self._source = self._narrow if values else None
        if not values or self._narrow.device == self.device:
            return Transfer(None, self._traffic, self.device)
        self._source = torch.empty(self.numel, dtype=self._narrow.dtype, pin_memory=True)
        return self._copies.to_host(self._narrow, self._source)

    @property
    def tensor(self) -> Tensor:
        if self._here is None:
            self._here = self._scratch.take(self.numel, self.device)
            if self._source is not None:
                self._here.copy_(self._source)
        return self._here

    def leave(self, *, changed: bool) -> None:
        """Free the float32 values. `FlatParam.publish` has already written changes to the parameters."""
        if self._here is not None:
            self._scratch.give_back(self._here)
        self._here = self._source = None

    def read(self, into: Tensor, start: int = 0) -> Transfer:
        """Refuse the read: checkpoints read the parameters."""
        raise NotImplementedError("parameters are read where they lie")

    def write(self, source: Tensor, start: int = 0) -> Transfer:
        """Refuse the write: `FlatParam.publish` writes the parameters."""
        raise NotImplementedError("parameters are written by Flat.publish")

    def drop(self) -> None:
        """Free the buffer of an open turn; there is no other memory."""
        self.leave(changed=False)
