"""A run's own model: what the user gave to `cluster.train` beside the configuration, kept in the run folder.

`model`, `loss` and `tp_plan` travel by value, as a pickle, because a notebook's classes are nowhere else. A pickle can
run any code when it is read. So it is sealed.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speedlab.cluster.files.signed_files import read_signed, write_signed
from speedlab.cluster.worker.serialization import pack, unpack

if TYPE_CHECKING:
    from speedlab.cluster.cluster import Cluster

OWN_MODEL = "model.pickle"
"""In the run folder, where the user gave something of their own."""


def read_own_model(path: Path) -> dict[str, Any]:
    """The `model`, `loss` and `tp_plan` that were given, made anew at every call. Raises ClusterError for a file that
    this user did not write."""
    again = "Start a run with the same model by cluster.train(config, model=...), and load the checkpoint that you want"
    return unpack(read_signed(path, again))


@contextlib.contextmanager
def packed_model(cluster: Cluster, given: Mapping[str, Any]) -> Iterator[Path | None]:
    """A file, outside of any run, of what was given; None when nothing was. Raises ClusterError for what cannot
    travel."""
    if not given:
        yield None
        return
    with tempfile.TemporaryDirectory(dir=cluster.directory, prefix="model-") as folder:
        path = Path(folder) / OWN_MODEL
        write_signed(path, pack(dict(given), given))
        yield path


def keep(path: Path | None, folder: Path) -> None:
    """Move the file into the run folder."""
    if path is not None:
        shutil.move(path, folder / OWN_MODEL)
