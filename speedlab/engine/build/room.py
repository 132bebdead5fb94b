"""Whether states that go to a disk have room there: known by all ranks before anything is made or moved."""

from __future__ import annotations

import os
from pathlib import Path

from speedlab.comm import Group
from speedlab.config import ConfigError, RunConfig
from speedlab.offload import OffloadError, Stores
from speedlab.placement import Placement, Residency, Where


def away_folder(config: RunConfig) -> Path:
    """Where states on disk have their files: beside the runs, unless the caller says. They have no names."""
    if config.offload.folder is not None:
        return config.offload.folder.expanduser()
    return config.folder if config.folder.is_dir() else Path.cwd()


def more_on_disk(placement: Placement, wanted: Residency, *, dp: int, moments: int) -> int:
    """Bytes that this rank will have on disk, where states are placed as `wanted`, beyond what it has there.
    `moments`: how many an element has."""
    needed, had = (table.bytes_at(Where.DISK, dp=dp, moments=moments) for table in (placement.moved(wanted), placement))
    return max(0, needed - had)


def refuse_without_room(needed: int, stores: Stores, everyone: Group) -> None:
    """Raises ConfigError, on all ranks alike, where so many bytes more of this rank's states find no room on its disk,
    or the folder is of no use. Collective."""
    if not any(everyone.collect(needed)):
        return
    told = everyone.collect(_own(stores, needed))
    problems = {problem for *_, problem in told if problem}
    if problems:
        raise ConfigError("\n".join(sorted(problems)))
    for host, disk, folder, _, free, _ in told:
        total = sum(each[3] for each in told if each[:2] == [host, disk])
        if total > free:
            raise ConfigError(
                f"offload: the states of the ranks on {host} need {total / 2**30:,.2f} GiB in {folder}, where "
                f"{free / 2**30:,.2f} GiB are free; make room, give offload.folder on another disk, or keep some of "
                "them on the host"
            )


def _own(stores: Stores, needed: int) -> list[object]:
    """[host, disk, folder, bytes needed, bytes free, what is wrong] of this rank."""
    host = os.uname().nodename
    if not needed:
        return [host, -1, "", 0, 0, ""]
    try:
        store = stores.of(Where.DISK)
    except OffloadError as error:
        return [host, -1, "", 0, 0, str(error)]
    folder = stores.folder
    return [host, folder.stat().st_dev, str(folder), needed, store.capacity_bytes - store.nbytes, ""]
