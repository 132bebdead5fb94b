"""Find checkpoints: list them, choose one by tag or step, and record which ones a run has abandoned.

A place is a folder of checkpoints, a run folder, or one checkpoint. A folder is a complete checkpoint if it holds a
manifest, because the manifest is written last.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from speedlab.config.errors import with_more
from speedlab.telemetry.run_folder import RunFolderError, open_plain, read_object, write_atomically

MANIFEST = "manifest.json"
_CHECKPOINTS = "checkpoints"
"""Subfolder of a run folder with its checkpoints."""
_LEFT_OVER = "left-behind.json"
_LEFT_OVER_BYTES = 2**20
_MOST_SHOWN = 8
_WRITES_ONE = "run.save() writes one while engines hold the run, as save_checkpoint() does"

Place = str | os.PathLike[str]


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, read or used here. The message names the file and the reason."""

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows: the message alone, because the stack frames add nothing."""
        return [f"{type(self).__name__}: {with_more(self)}"]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    step: int


def find_checkpoint(place: Place, tag: str | None = None, *, step: int | None = None) -> Path:
    """Return the path of a checkpoint: `place` itself, or in it the one of the tag or step, else the newest.

    Args:
        place: A folder of checkpoints, a run folder, or one checkpoint.
        tag: Name of the checkpoint.
        step: Step of the checkpoint.

    Raises:
        CheckpointError: There is none. The message lists the existing ones.
    """
    path = Path(place).expanduser()
    if (path / MANIFEST).is_file():
        if tag not in (None, path.name) or step is not None:
            raise CheckpointError(f"{path} is one checkpoint; to choose by tag or step, give its folder {path.parent}")
        return path
    folder = path / _CHECKPOINTS if (path / _CHECKPOINTS).is_dir() else path
    if tag is not None and (folder / tag).is_dir():
        return folder / tag  # The reader checks whether it is complete.
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder")
    known = checkpoints_in(folder)
    fitting = [found for found in known if tag is None and step in (None, found.step)]
    if not fitting:
        named = f"checkpoint {tag!r}" if tag is not None else f"checkpoint of step {step}" if step is not None else ""
        there = f"it holds {_named(known)}" if known else _WRITES_ONE
        raise CheckpointError(f"{folder}: holds no {named or 'complete checkpoint'}; {there}")
    return fitting[-1].path


def checkpoints_in(folder: Path) -> list[Checkpoint]:
    """Return all complete checkpoints, the newest last. Checkpoints that a run has abandoned come first, then by step.

    Args:
        folder: A folder of checkpoints.
    """
    left = _left_over(folder)
    found = []
    for manifest in folder.glob("*/" + MANIFEST):
        path = manifest.parent
        if path.name.startswith("."):
            continue  # Not complete yet.
        try:
            step = step_of(path)
        except CheckpointError:
            continue  # Skip damaged ones; a request by name raises an error.
        found.append((path.name not in left, step, path.name, Checkpoint(path=path, step=step)))
    return [checkpoint for *_, checkpoint in sorted(found, key=lambda entry: entry[:3])]


def step_of(path: Path) -> int:
    """Return the step of a checkpoint.

    Args:
        path: The checkpoint's folder.

    Raises:
        CheckpointError: The manifest is damaged or of another kind.
    """
    try:
        with open_plain(path / MANIFEST) as file:
            return int(json.loads(file.read())["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / MANIFEST}: is damaged: {error}") from None


def newest(folder: Path) -> Checkpoint | None:
    """Return the complete checkpoint from which a run resumes; None if there is none.

    Args:
        folder: A folder of checkpoints.
    """
    found = checkpoints_in(folder)
    return found[-1] if found else None


def go_back_to(path: Path) -> None:
    """Resume a run from an older checkpoint: mark the later ones as abandoned.

    An abandoned checkpoint can still be loaded by name. But the run no longer resumes from it, and it is deleted first
    when space is needed.

    Args:
        path: The checkpoint to resume from.
    """
    known = sorted(checkpoints_in(path.parent), key=lambda found: (found.step, found.path.name))
    beyond = known[[found.path for found in known].index(path) + 1 :]
    if beyond or (path.parent / _LEFT_OVER).exists():
        text = json.dumps({"names": [found.path.name for found in beyond]})
        write_atomically(path.parent / _LEFT_OVER, text)


def numbered_name(folder: Path, step: int) -> str:
    """Return the name for a checkpoint of `step`: 'step-000200', or 'step-000200-2' if an abandoned one has this name.

    Args:
        folder: A folder of checkpoints.
        step: The step.
    """
    name, number = f"step-{step:06d}", 1
    left = _left_over(folder)
    while name in left and (folder / name).exists():
        number += 1
        name = f"step-{step:06d}-{number}"
    return name


def _left_over(folder: Path) -> frozenset[str]:
    try:
        names = read_object(folder / _LEFT_OVER, _LEFT_OVER_BYTES, missing={}).get("names", [])
    except RunFolderError:
        return frozenset()  # Damaged: fall back to the order of steps.
    return frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list) else frozenset()


def _named(known: list[Checkpoint]) -> str:
    names = [found.path.name for found in reversed(known)]
    return ", ".join(names[:_MOST_SHOWN]) + (", …" if len(names) > _MOST_SHOWN else "")
