"""Which checkpoints of a run may go."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from speedlab.engine.checkpoint.manifest import FORMAT
from speedlab.telemetry.checkpoint_index import MANIFEST, checkpoints_in

_NUMBERED = re.compile(r"step-\d+(-\d+)?")
"""Names that a run gives by itself; any other is a person's, who alone removes it."""


def prune(folder: Path, keep: int) -> list[Path]:
    """Remove all but the newest `keep` of the checkpoints that a run has numbered by itself; returns the removed ones.

    What the run has left behind goes first; those with missing or cut files do not count as kept. To be called by one
    rank, after a save that went well.
    """
    numbered = [found.path for found in checkpoints_in(folder) if _is_the_runs(found.path)]
    good = [path for path in numbered if _has_its_files(path)]
    if not good:
        return []
    oldest_kept = numbered.index(good[-keep:][0])
    for path in numbered[:oldest_kept]:
        # Without it the folder is no checkpoint any more, should the rest be cut off.
        (path / MANIFEST).unlink()
        shutil.rmtree(path)
    return numbered[:oldest_kept]


def _is_the_runs(path: Path) -> bool:
    """Whether the run has numbered it by itself, and nobody has moved it elsewhere and left a link."""
    return _NUMBERED.fullmatch(path.name) is not None and not path.is_symlink()


def _has_its_files(path: Path) -> bool:
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text())
        return manifest["format"] == FORMAT and all(
            (path / name).stat().st_size == entry["bytes"] for name, entry in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
