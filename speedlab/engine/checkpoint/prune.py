"""Prune old checkpoints of a run."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from speedlab.engine.checkpoint.manifest import FORMAT
from speedlab.telemetry.checkpoint_index import MANIFEST, checkpoints_in

_NUMBERED = re.compile(r"step-\d+(-\d+)?")
"""Names that a run generates. Other names belong to users, and only users remove them."""


def prune(folder: Path, keep: int) -> list[Path]:
    """Remove all but the newest checkpoints that a run has numbered itself.

    Checkpoints with missing or truncated files do not count as kept. Call this on one rank, after a successful save.

    Args:
        folder: The folder of all checkpoints.
        keep: Number of checkpoints to keep.

    Returns:
        The removed folders.
    """
    numbered = [found.path for found in checkpoints_in(folder) if _is_the_runs(found.path)]
    good = [path for path in numbered if _has_its_files(path)]
    if not good:
        return []
    # Damaged checkpoints that are newer than this one stay, too.
    oldest_kept = numbered.index(good[-keep:][0])
    for path in numbered[:oldest_kept]:
        # Without a manifest the folder is no checkpoint, even if the removal is interrupted.
        (path / MANIFEST).unlink()
        shutil.rmtree(path)
    return numbered[:oldest_kept]


def _is_the_runs(path: Path) -> bool:
    """Return whether the run has numbered the folder itself, and no user has replaced it by a link."""
    return _NUMBERED.fullmatch(path.name) is not None and not path.is_symlink()


def _has_its_files(path: Path) -> bool:
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text())
        return manifest["format"] == FORMAT and all(
            (path / name).stat().st_size == entry["bytes"] for name, entry in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
