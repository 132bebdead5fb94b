"""Signed files for code, and for output that a notebook shows. A file is refused unless this user has signed it.

A run folder may come from anywhere, so nothing in it is trusted. What engines execute, and what they print in cells
between two steps, is signed with a key that only this user can read.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
from pathlib import Path

import speedlab.cluster.files.cluster_dir as home
from speedlab.cluster.errors import ClusterError
from speedlab.telemetry.run_folder import place

_SIGNATURE_BYTES = 32


def write_signed(path: Path, data: bytes) -> None:
    """Write a new file, mode 0600, of a signature and `data`, atomically.

    Args:
        path: File.
        data: Contents.

    Raises:
        FileExistsError: If the file exists.
    """
    _write_new(path, _sign(data) + data)


def _write_new(path: Path, data: bytes) -> None:
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        place(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def read_signed(path: Path, what_to_do: str) -> bytes:
    """Return the data of a signed file.

    Args:
        path: File.
        what_to_do: Advice for the error message.

    Raises:
        ClusterError: If this user did not sign the file.
    """
    found = path.read_bytes()
    signature, data = found[:_SIGNATURE_BYTES], found[_SIGNATURE_BYTES:]
    if not hmac.compare_digest(signature, _sign(data)):
        raise ClusterError(
            f"{path} was not written by you on this machine, or was changed: it is not opened. {what_to_do}"
        )
    return data


def _sign(data: bytes) -> bytes:
    return hmac.digest(_key(), data, "sha256")


def _key() -> bytes:
    """Return the key of this user; make it at the first use."""
    path = home.root() / "model-key"
    with contextlib.suppress(FileNotFoundError):
        return bytes.fromhex(path.read_text())
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):  # Another process made the key at the same moment: use that one.
        _write_new(path, secrets.token_hex(_SIGNATURE_BYTES).encode())
    return bytes.fromhex(path.read_text())
