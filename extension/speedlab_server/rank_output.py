"""The output of ranks, from the files in their cluster's folder: since a cursor, filtered, limited in size.

A full file is renamed to `.log.1`. A cursor contains the inode of a file, so that a renamed file is read to its end
first.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

import speedlab_server.schema as m
from speedlab.cluster.files.cluster_dir import OUTPUT, known_clusters
from speedlab.telemetry.run_folder import open_plain
from speedlab_server.clusters import find
from speedlab_server.errors import GoneError, QuestionError

if TYPE_CHECKING:
    from speedlab_server.run_registry import Registry

MOST_BYTES = 2**16
"""Maximum bytes of one rank in one answer."""
MOST_RANKS = 64
"""Maximum number of ranks in one answer."""
MOST_LINE = 2000
"""Maximum characters of one line."""

_FILE = re.compile(r"rank-(\d{1,6})\.log")


class OutputPosition(NamedTuple):
    """Read position in a rank's output: the inode of its file, and the byte offset."""

    file: int
    byte: int


def folder_of(registry: Registry, kind: str, id: str) -> Path:
    """Return the folder of ranks' output.

    Args:
        registry: The server's runs.
        kind: "clusters" or "runs".
        id: Id of the cluster, or of the run that a cluster holds.

    Raises:
        UnknownError: There is no such cluster or run.
        GoneError: The run's cluster was stopped.
        RunFolderError: The run's status cannot be read.
    """
    if kind == "clusters":
        return find(id)[0] / OUTPUT
    folder = registry.reader(id).folder
    token = folder.read_status().token
    for cluster, state in known_clusters():
        if token and getattr(state, "token", None) == token:
            return cluster / OUTPUT
    raise GoneError(f"the cluster of run {folder.name!r} was stopped, and what its ranks printed went with it")


def files_of(folder: Path) -> dict[int, OutputPosition]:
    """Return the present position at the end of each rank's file. A comparison shows whether there is new output.

    Args:
        folder: Folder of the output.
    """
    found = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if match := _FILE.fullmatch(entry.name):
                with contextlib.suppress(FileNotFoundError):  # Just renamed; the next poll finds the new file.
                    file = entry.stat()
                    found[int(match[1])] = OutputPosition(file.st_ino, file.st_size)
    return found


def output_of(folder: Path, *, after: str = "", ranks: Collection[int] | None = None, match: str = "") -> m.Output:
    """Return the output since a cursor.

    Args:
        folder: Folder of the output.
        after: The cursor of the previous answer; empty to begin near the end.
        ranks: The ranks; None for all.
        match: Return only lines that contain this text, ignoring case.

    Raises:
        QuestionError: The cursor is invalid.
    """
    places = _places_in(after)
    found = []
    for rank in _ranks_in(folder, ranks)[:MOST_RANKS]:
        data, place, skipped = _read(folder / f"rank-{rank}.log", places.get(rank))
        if place is not None:
            places[rank] = place
        lines = [line[:MOST_LINE] for line in data.decode(errors="replace").splitlines()]
        lines = [line for line in lines if match.casefold() in line.casefold()]
        if lines or skipped:
            found.append(m.RankLines(rank=rank, lines=lines, skipped=skipped))
    return m.Output(ranks=found, cursor=msgspec.json.encode(places).decode())


def _places_in(cursor: str) -> dict[int, OutputPosition]:
    if not cursor:
        return {}
    try:
        return msgspec.json.decode(cursor, type=dict[int, OutputPosition])
    except msgspec.DecodeError:
        raise QuestionError("after: is no cursor of an answer; leave it out to get the end of the output") from None


def _ranks_in(folder: Path, wanted: Collection[int] | None) -> list[int]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    there = sorted(int(match[1]) for name in names if (match := _FILE.fullmatch(name)))
    return [rank for rank in there if wanted is None or rank in wanted]


def _read(path: Path, place: OutputPosition | None) -> tuple[bytes, OutputPosition | None, bool]:
    """Return (whole lines, their end position, whether earlier lines are missing)."""
    files = []
    for each in (path.with_name(f"{path.name}.1"), path):
        try:
            files.append(open_plain(each))  # Closed below. A file may be renamed between two opens.
        except FileNotFoundError:
            continue
    try:
        numbers = [os.fstat(file.fileno()).st_ino for file in files]
        known = place is not None and place.file in numbers
        first = numbers.index(place.file) if place is not None and known else 0
        data = b""
        for index, file in enumerate(files[first:]):
            size = os.fstat(file.fileno()).st_size
            start = place.byte if place is not None and known and index == 0 else 0
            file.seek(max(start, size - MOST_BYTES))
            data += file.read(MOST_BYTES)
        if not files:
            return b"", place, False
        whole = data[: data.rfind(b"\n") + 1]
        end = OutputPosition(numbers[-1], max(files[-1].tell() - (len(data) - len(whole)), 0))
        kept = whole[-MOST_BYTES:]
        reported_before = 0 if place is None or not known else place.byte
        total = sum(os.fstat(file.fileno()).st_size for file in files[first:]) - reported_before
        skipped = len(kept) < total - (len(data) - len(whole)) or (place is not None and not known)
        return kept[kept.find(b"\n") + 1 :] if len(kept) < len(whole) else kept, end, skipped
    finally:
        for file in files:
            file.close()
