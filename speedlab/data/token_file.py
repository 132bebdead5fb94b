"""Memory-mapped token files: our own `.tokens`, and nanoGPT's headerless uint16 `.bin`.

A `.tokens` file has a header of 64 bytes, then the ids, little-endian:

    offset  0   8 bytes   magic "SLTOKENS"
            8   u32       version (1)
           12   u32       bytes of one id: 2 (uint16) or 4 (uint32)
           16   u64       vocabulary: every id is below it
           24   u64       count of ids
           32   32 bytes  SHA-256 of the ids
"""

from __future__ import annotations

import hashlib
import os
import secrets
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from speedlab.config import ConfigError

MAGIC = b"SLTOKENS"
VERSION = 1
SUFFIXES = (".bin", ".tokens")
_HEADER = struct.Struct("<8sIIQQ32s")
_DTYPES = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_LLMC_MAGIC = struct.pack("<i", 20240520)  # llm.c's files have the suffix .bin, too, but a header of 1,024 bytes
_SCAN_TOKENS = 1 << 22


@dataclass(frozen=True, kw_only=True)
class TokenHeader:
    """Header of a token file. `vocabulary` and `sha256` are None if the format does not store them."""

    path: Path
    offset: int
    dtype: np.dtype
    count: int
    vocabulary: int | None
    sha256: bytes | None


def token_dtype(vocabulary: int) -> np.dtype:
    """Return the smaller of uint16 and uint32 that holds every id.

    Args:
        vocabulary: Every id is below it.
    """
    return _DTYPES[2] if vocabulary <= 1 << 16 else _DTYPES[4]


def write_tokens(path: str | Path, chunks: Iterable[np.ndarray], vocabulary: int) -> int:
    """Write a `.tokens` file. The file gets its name only after it is complete.

    Args:
        path: File to write.
        chunks: Arrays of ids, (N,) of any integer dtype.
        vocabulary: Every id must be below it.

    Returns:
        Number of ids.

    Raises:
        ConfigError: If an id is outside [0, vocabulary).
    """
    path = Path(path)
    dtype = token_dtype(vocabulary)
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    digest, count = hashlib.sha256(), 0
    try:
        with part.open("wb") as file:
            # Reserve the header, which needs the count and the hash and is written last.
            file.write(bytes(_HEADER.size))
            for chunk in chunks:
                if chunk.size and not 0 <= int(chunk.min()) <= int(chunk.max()) < vocabulary:
                    raise ConfigError(
                        f"{path}: ids run from {chunk.min()} to {chunk.max()}, outside the vocabulary of {vocabulary:,}"
                    )
                data = np.ascontiguousarray(chunk, dtype=dtype).tobytes()
                digest.update(data)
                file.write(data)
                count += chunk.size
            file.seek(0)
            file.write(_HEADER.pack(MAGIC, VERSION, dtype.itemsize, vocabulary, count, digest.digest()))
            file.flush()
            # The data must be on disk before the rename makes the file visible.
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return count


def read_header(path: str | Path) -> TokenHeader:
    """Read a header and check all that can be checked without reading the ids.

    Args:
        path: A `.tokens` or `.bin` file.

    Raises:
        ConfigError: If the file is unreadable, of another format, truncated or empty.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(_HEADER.size)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; give a token file you may read") from None
    if size == 0:
        raise ConfigError(f"{path}: is empty; a token file needs at least one id")
    return _own_header(path, size, head) if path.suffix == ".tokens" else _headerless(path, size, head)


def _own_header(path: Path, size: int, head: bytes) -> TokenHeader:
    if not head.startswith(MAGIC[: len(head)]):
        raise ConfigError(
            f"{path}: is foreign: it starts with {head[:8]!r}, a .tokens file with {MAGIC!r}; "
            f"write it with speedlab.data.write_tokens, or name it .bin if it is headerless uint16"
        )
    if len(head) < _HEADER.size:
        raise ConfigError(f"{path}: is cut: {size} bytes, the header alone has {_HEADER.size}; copy or write it again")
    _, version, item, vocabulary, count, sha256 = _HEADER.unpack(head)
    if version != VERSION or item not in _DTYPES:
        raise ConfigError(
            f"{path}: is of version {version} with ids of {item} bytes; this SpeedLab reads version {VERSION} "
            f"with ids of 2 or 4 bytes; write it again with speedlab.data.write_tokens"
        )
    expected = _HEADER.size + count * item
    if size != expected:
        kind = "is cut" if size < expected else "has bytes after its end"
        raise ConfigError(
            f"{path}: {kind}: {count:,} ids of {item} bytes make {expected:,} bytes, the file has {size:,}; "
            f"copy or write it again"
        )
    return TokenHeader(
        path=path, offset=_HEADER.size, dtype=_DTYPES[item], count=count, vocabulary=vocabulary, sha256=sha256
    )


def _headerless(path: Path, size: int, head: bytes) -> TokenHeader:
    if head.startswith(MAGIC):
        raise ConfigError(f"{path}: is a .tokens file (it starts with {MAGIC!r}); rename it to end in .tokens")
    if head.startswith(_LLMC_MAGIC):
        raise ConfigError(
            f"{path}: is foreign: it has llm.c's header, a .bin here is headerless uint16; "
            f"drop its first 1,024 bytes, or write it with speedlab.data.write_tokens"
        )
    if size % 2:
        raise ConfigError(f"{path}: is cut: uint16 ids need an even number of bytes, it has {size:,}; copy it again")
    return TokenHeader(path=path, offset=0, dtype=_DTYPES[2], count=size // 2, vocabulary=None, sha256=None)


def map_tokens(header: TokenHeader) -> np.ndarray:
    """Return the ids, (count,), read-only and memory-mapped.

    Args:
        header: Header of the file.
    """
    if header.count == 0:  # the operating system refuses an empty mapping
        return np.empty(0, dtype=header.dtype)
    return np.memmap(header.path, dtype=header.dtype, mode="r", offset=header.offset, shape=(header.count,))


def verify(header: TokenHeader) -> int:
    """Read every id once and return the largest.

    Args:
        header: Header of the file.

    Raises:
        ConfigError: If the hash or an id contradicts the header.
    """
    tokens, digest, largest = map_tokens(header), hashlib.sha256(), 0
    for start in range(0, header.count, _SCAN_TOKENS):
        chunk = np.ascontiguousarray(tokens[start : start + _SCAN_TOKENS])
        largest = max(largest, int(chunk.max()))
        if header.sha256 is not None:
            digest.update(chunk.data)
    if header.sha256 is not None and digest.digest() != header.sha256:
        raise ConfigError(
            f"{header.path}: is damaged: its SHA-256 is {digest.hexdigest()[:12]}…, its header says "
            f"{header.sha256.hex()[:12]}…; copy or write it again"
        )
    if header.vocabulary is not None and largest >= header.vocabulary:
        raise ConfigError(
            f"{header.path}: id {largest:,} is outside the vocabulary of {header.vocabulary:,} that its header states; "
            f"write it again"
        )
    return largest
