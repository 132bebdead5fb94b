"""Safetensors files: write in pieces with a hash, and read through maps.

The library writes whole tensors from one process's memory and returns no hash. A rank would need a copy of its
partitions, and would read the file again. The format is a header and then bytes (github.com/huggingface/safetensors):

1. Eight bytes with the header's length, then the header (JSON: dtype, shape and offsets of each tensor), padded to 8
   bytes.
2. The tensors in sequence, widest elements first, so that each is aligned for its dtype.

One thread writes while another hashes the same memory, so the hash is that of the intended bytes. The library reads the
files.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from speedlab.engine.checkpoint.manifest import Source, sources_of
from speedlab.engine.checkpoint.slices import Stretch, blocks, copy_blocks
from speedlab.telemetry.checkpoint_index import CheckpointError

_CHUNK_BYTES = 8 * 2**20
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def real(tensor: Tensor) -> Tensor:
    """Return the tensor itself; for a complex tensor a view of (real, imaginary) pairs, as in files.

    Args:
        tensor: Any tensor.
    """
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


@dataclass(frozen=True)
class Values:
    """A tensor of `shape` in pieces: 1-D, contiguous, of one dtype.

    A piece may be a function, called during the write; its result is freed afterwards.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Sequence[Tensor | Callable[[], Tensor]]

    @classmethod
    def of(cls, tensor: Tensor) -> Values:
        """Return a whole tensor as values.

        Args:
            tensor: Any tensor; its memory is shared if it is contiguous.
        """
        tensor = real(tensor.detach())
        return cls(tuple(tensor.shape), tensor.dtype, [tensor.contiguous().view(-1)])

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tensor in a file."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(
    file: Path, tensors: Mapping[str, Values], *, verify: bool = True, metadata: Mapping[str, str] | None = None
) -> tuple[int, str | None]:
    """Write a new file.

    Args:
        file: The path, which must not exist.
        tensors: Tensors by name.
        verify: False skips the hash and the sync to disk.
        metadata: Text for the header.

    Returns:
        (size in bytes, sha256 or None).

    Raises:
        CheckpointError: Names the file, for example if the disk is full.
    """
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))
    hasher = _Hasher() if verify else None
    size = 0
    try:
        with file.open("xb", buffering=0) as stream:
            for chunk in _chunks(ordered, metadata):
                if hasher is not None:
                    hasher.add(chunk)
                while len(chunk):
                    written = stream.write(chunk)
                    size, chunk = size + written, chunk[written:]
            if verify:
                os.fsync(stream.fileno())
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be written: {error.strerror or error}") from None
    finally:
        digest = hasher.finish() if hasher is not None else None
    return size, digest


def _chunks(tensors: Mapping[str, Values], metadata: Mapping[str, str] | None) -> Iterator[memoryview]:
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    place = 0
    for name, values in tensors.items():
        if values.dtype not in _DTYPES:
            raise CheckpointError(f"{name} is of {values.dtype}, which a safetensors file cannot hold")
        header[name] = {
            "dtype": _DTYPES[values.dtype],
            "shape": list(values.shape),
            "data_offsets": [place, place + values.nbytes],
        }
        place += values.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)  # 1
    for values in tensors.values():  # 2
        for piece in values.pieces:
            tensor = piece if isinstance(piece, Tensor) else piece()
            step = max(1, _CHUNK_BYTES // values.dtype.itemsize)
            for start in range(0, tensor.numel(), step):
                chunk = tensor[start : start + step].cpu()  # Device memory is copied chunk by chunk.
                yield chunk.view(torch.uint8).numpy().data


class _Hasher:
    """SHA-256 on its own thread, with a short queue to bound memory."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._queue: Queue[memoryview | None] = Queue(maxsize=4)
        self._thread = Thread(target=self._work, name="speedlab-hash", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (chunk := self._queue.get()) is not None:
            self._digest.update(chunk)

    def add(self, chunk: memoryview) -> None:
        self._queue.put(chunk)

    def finish(self) -> str:
        self._queue.put(None)
        self._thread.join()
        return self._digest.hexdigest()


def hash_of(file: Path) -> str:
    """Return the SHA-256 of a file.

    Args:
        file: The path.
    """
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def to_disk(path: Path) -> None:
    """Wait until a file or folder is synced to disk.

    Args:
        path: The path.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Files:
    """The mapped files of a checkpoint. Copies from them need no extra memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open: dict[str, Any] = {}

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.clear()

    def file(self, name: str) -> Any:
        """Return an open file.

        Args:
            name: Its name in the checkpoint.
        """
        if name not in self._open:
            self._open[name] = safe_open(self._path / name, framework="pt")
        return self._open[name]

    def values(self, source: Source, kind: str, *, is_complex: bool = False) -> Tensor:
        """Return a stretch of a state from its mapped file.

        Args:
            source: The stretch.
            kind: Name of the state.
            is_complex: Whether the file holds (real, imaginary) pairs.

        Returns:
            (n,) elements.

        Raises:
            CheckpointError: If the tensor cannot be read.
        """
        key, twice = f"{source.flat}/{kind}", 2 if is_complex else 1
        start, end = source.offset, source.offset + source.stretch.end - source.stretch.start
        try:
            found: Tensor = self.file(source.file).get_slice(key)[twice * start : twice * end]
            return torch.view_as_complex(found.view(-1, 2)) if is_complex else found
        except SafetensorError as error:
            raise CheckpointError(f"{self._path / source.file}: {key} cannot be read: {error}") from None

    def copy(self, entry: dict[str, Any], kind: str, stretch: Stretch, into: Tensor) -> None:
        """Copy a stretch of a parameter's state.

        Args:
            entry: The parameter's entry in the manifest.
            kind: Name of the state.
            stretch: The wanted elements.
            into: (n,) tensor for these elements.
        """
        sources = sources_of(entry)
        # Extra tensors of optimizers have no dtype in the manifest, and are real.
        is_complex = "complex" in entry.get("states", {}).get(kind, "")
        same = [source for source in sources if source.stretch.part == stretch.part]
        for source in same or sources:
            found = list(blocks(entry["shape"], source.stretch, stretch))
            if found:
                copy_blocks(found, self.values(source, kind, is_complex=is_complex), into)
