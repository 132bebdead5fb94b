"""A run's own model: what the user gave to `cluster.train` beside the configuration, kept in the run folder.

`model`, `loss` and `tp_plan` travel by value, as a pickle, because a notebook's classes are nowhere else. A pickle can
run any code when it is read. So it is signed with a key that only its user can read, beside that user's clusters, and
one that somebody else wrote is never opened.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import speedlab.cluster.home as home
from speedlab.cluster.errors import ClusterError
from speedlab.cluster.shipping import pack, unpack
from speedlab.telemetry.exclusive import place

if TYPE_CHECKING:
    from speedlab.cluster.cluster import Cluster

OWN_MODEL = "model.pickle"
"""In the run folder, where the user gave something of their own."""

_SIGNATURE_BYTES = 32


def read_own_model(path: Path) -> dict[str, Any]:
    """The `model`, `loss` and `tp_plan` that were given, made anew at every call. Raises ClusterError for a file that
    this user did not write."""
    data = path.read_bytes()
    signature, packed = data[:_SIGNATURE_BYTES], data[_SIGNATURE_BYTES:]
    if not hmac.compare_digest(signature, _sign(packed)):
        raise ClusterError(
            f"{path} was not written by you on this machine, or was changed: it holds code and is not opened. Start a "
            f"run with the same model by cluster.train(config, model=...), and load the checkpoint that you want"
        )
    return unpack(packed)


@contextlib.contextmanager
def packed_model(cluster: Cluster, given: Mapping[str, Any]) -> Iterator[Path | None]:
    """A file, outside of any run, of what was given; None when nothing was. Raises ClusterError for what cannot
    travel."""
    if not given:
        yield None
        return
    with tempfile.TemporaryDirectory(dir=cluster.directory, prefix="model-") as folder:
        path = Path(folder) / OWN_MODEL
        packed = pack(dict(given), given)
        path.touch(mode=0o600)
        path.write_bytes(_sign(packed) + packed)
        yield path


def keep(path: Path | None, folder: Path) -> None:
    """Move the file into the run folder."""
    if path is not None:
        shutil.move(path, folder / OWN_MODEL)


def _sign(packed: bytes) -> bytes:
    return hmac.digest(_key(), packed, "sha256")


def _key() -> bytes:
    """This user's key, made when it is asked for first."""
    path = home.root() / "model-key"
    with contextlib.suppress(FileNotFoundError):
        return bytes.fromhex(path.read_text())
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".model-key-{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(_SIGNATURE_BYTES))
    with contextlib.suppress(FileExistsError):  # Another process was faster: its key counts.
        place(draft, path)
    draft.unlink(missing_ok=True)
    return bytes.fromhex(path.read_text())
