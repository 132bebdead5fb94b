"""Which checkpoints a folder holds, and which of them may go."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from speedlab.engine.checkpoint.manifest import FORMAT, MANIFEST

_NUMBERED = re.compile(r"step-\d+")
"""Names that a run gives by itself; any other is a person's, who alone removes it."""


def newest(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step in `folder`, or None."""
    found = complete_ones(folder)
    return found[-1] if found else None


def complete_ones(folder: Path) -> list[Path]:
    """All complete checkpoints in `folder`, the newest last."""
    found = []
    for path in folder.glob("*/" + MANIFEST):
        try:
            manifest = json.loads(path.read_text())
            found.append((int(manifest["step"]), path.parent.name, path.parent))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # Foreign or damaged: not a candidate; asked for by name it gives an error that says so.
    return [path for _, _, path in sorted(found)]


def prune(folder: Path, keep: int) -> list[Path]:
    """Remove all but the newest `keep` of the checkpoints that a run has numbered by itself; returns the removed ones.

    Those with missing or cut files do not count as kept. To be called by one rank, after a save that went well.
    """
    numbered = [path for path in complete_ones(folder) if _NUMBERED.fullmatch(path.name)]
    good = [path for path in numbered if _has_its_files(path)]
    if not good:
        return []
    oldest_kept = numbered.index(good[-keep:][0])
    for path in numbered[:oldest_kept]:
        # Without it the folder is no checkpoint any more, should the rest be cut off.
        (path / MANIFEST).unlink()
        shutil.rmtree(path)
    return numbered[:oldest_kept]


def _has_its_files(path: Path) -> bool:
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text())
        return manifest["format"] == FORMAT and all(
            (path / name).stat().st_size == entry["bytes"] for name, entry in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
