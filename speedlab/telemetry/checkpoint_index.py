"""Which checkpoints there are, and which one is meant: asked by whatever takes a checkpoint, a function or a command.

A place is a folder of checkpoints, the folder of a run, or one checkpoint, as text or path. A folder is a checkpoint
when it holds a manifest: that is written last.
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
"""Where the folder of a run has them."""
_LEFT_BEHIND = "left-behind.json"
_LEFT_BEHIND_BYTES = 2**20
_MOST_SHOWN = 8
_WRITES_ONE = "run.save() writes one while engines hold the run, as save_checkpoint() does"

Place = str | os.PathLike[str]


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, read, or used here; the message names the file and says what is wrong."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the frames that found it out say nothing more."""
        return [f"{type(self).__name__}: {with_more(self)}"]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint, as far as its folder tells."""

    path: Path
    step: int


def find_checkpoint(place: Place, tag: str | None = None, *, step: int | None = None) -> Path:
    """The checkpoint that is meant: `place` itself, or in it the one of this tag or step, else the newest.

    Raises CheckpointError when there is none, naming those that there are.
    """
    path = Path(place).expanduser()
    if (path / MANIFEST).is_file():
        if tag not in (None, path.name) or step is not None:
            raise CheckpointError(f"{path} is one checkpoint; to choose by tag or step, give its folder {path.parent}")
        return path
    folder = path / _CHECKPOINTS if (path / _CHECKPOINTS).is_dir() else path
    if tag is not None and (folder / tag).is_dir():
        return folder / tag  # Whether it is whole, its reader says.
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
    """All complete checkpoints in `folder`, the newest last: those that a run has left behind, then by step."""
    left = _left_behind(folder)
    found = []
    for manifest in folder.glob("*/" + MANIFEST):
        path = manifest.parent
        if path.name.startswith("."):
            continue  # Still being written.
        try:
            step = step_of(path)
        except CheckpointError:
            continue  # Not a candidate; asked for by name it gives an error that says so.
        found.append((path.name not in left, step, path.name, Checkpoint(path=path, step=step)))
    return [checkpoint for *_, checkpoint in sorted(found, key=lambda entry: entry[:3])]


def step_of(path: Path) -> int:
    """The step of the checkpoint `path`. Raises CheckpointError for one that is foreign or damaged."""
    try:
        with open_plain(path / MANIFEST) as file:
            return int(json.loads(file.read())["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / MANIFEST}: is damaged: {error}") from None


def newest(folder: Path) -> Checkpoint | None:
    """The complete checkpoint from which a run goes on, or None."""
    found = checkpoints_in(folder)
    return found[-1] if found else None


def go_back_to(path: Path) -> None:
    """A run goes on from this checkpoint, which need not be its newest: what is beyond is left behind. It can be asked
    for by name, but is no longer what the run goes on from, and makes room first."""
    known = sorted(checkpoints_in(path.parent), key=lambda found: (found.step, found.path.name))
    beyond = known[[found.path for found in known].index(path) + 1 :]
    if beyond or (path.parent / _LEFT_BEHIND).exists():
        text = json.dumps({"names": [found.path.name for found in beyond]})
        write_atomically(path.parent / _LEFT_BEHIND, text)


def numbered_name(folder: Path, step: int) -> str:
    """What a run calls its checkpoint of a step: 'step-000200'; 'step-000200-2' where it has left one behind."""
    name, number = f"step-{step:06d}", 1
    left = _left_behind(folder)
    while name in left and (folder / name).exists():
        number += 1
        name = f"step-{step:06d}-{number}"
    return name


def _left_behind(folder: Path) -> frozenset[str]:
    try:
        names = read_object(folder / _LEFT_BEHIND, _LEFT_BEHIND_BYTES, missing={}).get("names", [])
    except RunFolderError:
        return frozenset()  # Damaged: the order of steps is what is left to go by.
    return frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list) else frozenset()


def _named(known: list[Checkpoint]) -> str:
    names = [found.path.name for found in reversed(known)]
    return ", ".join(names[:_MOST_SHOWN]) + (", …" if len(names) > _MOST_SHOWN else "")
