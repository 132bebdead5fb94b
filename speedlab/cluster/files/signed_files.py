"""Files that hold code, or what a notebook shows: signed with a key that only this user can read, and never opened when
somebody else wrote them.

A run folder may come from anywhere, and nothing in it is trusted. What this user's engines are to execute lies there
sealed, and what they said in a cell between two steps.
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
    """A new file, 0600, of `data` and its signature: whole, or not there. Raises FileExistsError."""
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
    """The data of a file. Raises ClusterError, with `what_to_do`, for one that this user did not write."""
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
    """This user's key, made when it is asked for first."""
    path = home.root() / "model-key"
    with contextlib.suppress(FileNotFoundError):
        return bytes.fromhex(path.read_text())
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):  # Another process was faster: its key counts.
        _write_new(path, secrets.token_hex(_SIGNATURE_BYTES).encode())
    return bytes.fromhex(path.read_text())
