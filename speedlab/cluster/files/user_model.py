"""The user's own model: what `cluster.train` got in addition to the configuration, stored in the run folder.

`model`, `loss` and `tp_plan` are pickled by value, because classes of a notebook cannot be imported. Reading a pickle
can run any code, so the file is signed.
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
"""File in the run folder, if the user gave a model or loss."""


def read_own_model(path: Path) -> dict[str, Any]:
    """Return the stored `model`, `loss` and `tp_plan`; every call makes new objects.

    Args:
        path: File.

    Raises:
        ClusterError: If this user did not write the file.
    """
    again = "Start a run with the same model by cluster.train(config, model=...), and load the checkpoint that you want"
    return unpack(read_signed(path, again))


@contextlib.contextmanager
def packed_model(cluster: Cluster, given: Mapping[str, Any]) -> Iterator[Path | None]:
    """Yield a file with what the user gave, outside of any run folder; None if nothing was given.

    Args:
        cluster: Cluster that will train.
        given: `model`, `loss` and `tp_plan`.

    Raises:
        ClusterError: If something cannot be pickled.
    """
    if not given:
        yield None
        return
    with tempfile.TemporaryDirectory(dir=cluster.directory, prefix="model-") as folder:
        path = Path(folder) / OWN_MODEL
        write_signed(path, pack(dict(given), given))
        yield path


def keep(path: Path | None, folder: Path) -> None:
    """Move the file into the run folder.

    Args:
        path: File; None for none.
        folder: Folder of the run.
    """
    if path is not None:
        shutil.move(path, folder / OWN_MODEL)
