"""Store measured disk speeds of this machine, by file system, in a small file next to the calibration. No torch.

This module only stores: the caller measures, which needs torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from speedlab.planner.calibration import store
from speedlab.planner.hardware.hosts import existing

_MOST_KEPT = 64
_LIMIT_BYTES = 2**16


@dataclass(frozen=True, kw_only=True)
class DiskRates:
    """Measured speed for whole states, in bytes/s."""

    read_bytes_per_second: float
    write_bytes_per_second: float


def path(cache: Path | None = None) -> Path:
    """Return the file of this machine.

    Args:
        cache: folder of the file; None: the user's cache.
    """
    alongside = store.path(cache)
    return alongside.with_name(f"disks{alongside.name.removeprefix('calibration')}")


def known(folder: Path, *, cache: Path | None = None) -> DiskRates | None:
    """Return the measured speed of the file system of `folder`, or None if it was never measured.

    Args:
        folder: a folder, which need not exist yet.
        cache: folder of the file; None: the user's cache.
    """
    found = _load(cache).get(_file_system(folder))
    return None if found is None else DiskRates(read_bytes_per_second=found[0], write_bytes_per_second=found[1])


def keep(folder: Path, rates: DiskRates, *, cache: Path | None = None) -> None:
    """Store a measurement. The newest of a file system counts.

    Args:
        folder: a folder on the measured file system.
        rates: the measured speed.
        cache: folder of the file; None: the user's cache.

    Raises:
        ValueError: a speed is not above 0 and finite.
    """
    if not all(0 < rate < float("inf") for rate in asdict(rates).values()):
        raise ValueError(f"{rates} is no speed of a disk; both have to be above 0")
    disks = _load(cache)
    system = _file_system(folder)
    # Reinsert at the end: the oldest entries are at the start and are dropped first.
    disks.pop(system, None)
    disks[system] = (rates.read_bytes_per_second, rates.write_bytes_per_second)
    file = path(cache)
    file.parent.mkdir(parents=True, exist_ok=True)
    made = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        made.write_text(json.dumps(dict(list(disks.items())[-_MOST_KEPT:])), encoding="utf-8")
        os.replace(made, file)
    finally:
        with contextlib.suppress(FileNotFoundError):
            made.unlink()


def _file_system(folder: Path) -> str:
    there = existing(folder)
    return "" if there is None else str(there.stat().st_dev)


def _load(cache: Path | None) -> dict[str, tuple[float, float]]:
    """Return the valid entries of the file. Damaged entries are dropped, because a new measurement is cheap."""
    try:
        text = path(cache).read_bytes()[:_LIMIT_BYTES]
        found = json.loads(text)
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: (pair[0], pair[1]) for name, pair in found.items() if _sound(pair)}


def _sound(pair: object) -> bool:
    return (
        isinstance(pair, list)
        and len(pair) == 2
        and all(type(rate) in (int, float) and 0 < rate < float("inf") for rate in pair)
    )
