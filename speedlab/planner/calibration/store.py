"""Load and save a calibration in the user's cache, atomically and with validation of every field. No torch.

A file may come from another machine or version. The size is bounded. Unknown fields, impossible numbers and files of
another machine or version are refused with the reason and the remedy.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import secrets
from dataclasses import asdict
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError

from speedlab.hardware import available_cores
from speedlab.planner.calibration import VERSION, Calibration, Constants
from speedlab.planner.time.kernels import Rates

_LIMIT_BYTES = 2**20
_AGAIN = "run `speedlab calibrate` to measure this machine again"

_SAME_MACHINE_FIELDS = ("model name", "Hardware", "CPU part")


class CalibrationError(ValueError):
    """A calibration file is damaged, or belongs to another machine or version."""


def this_machine() -> str:
    """Return name, processor and cores of this machine: 'host, AMD EPYC, 2 cores'."""
    cores = len(available_cores())
    return f"{platform.node() or 'unnamed'}, {_processor()}, {cores} core{'s' if cores > 1 else ''}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in _SAME_MACHINE_FIELDS and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()


def path(folder: Path | None = None) -> Path:
    """Return the calibration file of this machine. The name includes the host, because machines may share a home.

    Args:
        folder: folder of the file; None: the user's cache.
    """
    if folder is None:
        # The folder of data.cache, which the planner must not import.
        base = os.environ.get("XDG_CACHE_HOME")
        folder = (Path(base) if base and os.path.isabs(base) else Path.home() / ".cache") / "speedlab"
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", platform.node()) or "unnamed"
    return folder / f"calibration-{name}.json"


def save(calibration: Calibration, folder: Path | None = None) -> Path:
    """Write a calibration atomically.

    Args:
        calibration: the calibration to save.
        folder: folder of the file; None: the user's cache.

    Returns:
        The path of the file.

    Raises:
        CalibrationError: the file cannot be written.
    """
    target = path(folder)
    # Write to a temporary file and rename, so that a reader never sees half a calibration.
    part = target.with_suffix(f".{secrets.token_hex(4)}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(_adapter().dump_json(calibration, indent=1))
        part.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):  # The part may not exist; the first error has the reason.
            part.unlink()
        raise CalibrationError(
            f"{target}: cannot be written: {error.strerror}; set XDG_CACHE_HOME to a folder you may write to"
        ) from None
    return target


def load(folder: Path | None = None) -> Calibration | None:
    """Return the calibration of this machine, or None if it was never measured.

    Args:
        folder: folder of the file; None: the user's cache.

    Raises:
        CalibrationError: the file is damaged, or belongs to another machine or version.
    """
    source = path(folder)
    try:
        if source.stat().st_size > _LIMIT_BYTES:
            raise CalibrationError(f"{source}: {source.stat().st_size} bytes are more than a calibration has; {_AGAIN}")
        text = source.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CalibrationError(f"{source}: cannot be read: {error.strerror}; {_AGAIN}") from None
    try:
        found = _adapter().validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise CalibrationError(f"{source}: {where}: {first['msg']}; {_AGAIN}") from None
    _check(found, source)
    return found


def _check(found: Calibration, source: Path) -> None:
    if found.version != VERSION:
        raise CalibrationError(f"{source}: version {found.version}, but this SpeedLab reads {VERSION}; {_AGAIN}")
    if found.machine != this_machine():
        raise CalibrationError(f"{source}: measured on {found.machine!r}, but this is {this_machine()!r}; {_AGAIN}")
    if not found.constants:
        raise CalibrationError(f"{source}: it has no constants; {_AGAIN}")
    for constants in found.constants:
        if "rotary" not in constants.rates:
            raise CalibrationError(
                f"{source}: rates of rotary blocks of {constants.engines} engines in {constants.dtype} are missing; "
                f"{_AGAIN}"
            )
        wrong = [(name, value) for name, value in _numbers(constants) if not 0 < value < 1e21]
        if wrong:
            name, value = wrong[0]
            raise CalibrationError(
                f"{source}: {name} of {constants.engines} engines in {constants.dtype} is {value}; it must be above 0; "
                f"{_AGAIN}"
            )
    for run in found.runs:
        if run.predicted_seconds <= 0 or run.measured_seconds <= 0 or any(r <= 0 for r in run.ratios.values()):
            raise CalibrationError(f"{source}: run {run.name!r} has times that are not above 0; {_AGAIN}")


_MAY_BE_ZERO = ("link_seconds", "block_error")
_RATE_MAY_BE_ZERO = ("kernel_seconds", "drawn_seconds")


def _numbers(constants: Constants) -> list[tuple[str, float]]:
    """Return names and values of numbers that must be positive, and of negative ones among those that may be zero."""
    values = {**asdict(constants), **constants.factors}
    zero = {name: values[name] for name in _MAY_BE_ZERO} | constants.event_seconds
    for kind, rates in constants.rates.items():
        for name, value in asdict(rates).items():
            (zero if name in _RATE_MAY_BE_ZERO else values)[f"{name} of {kind}"] = value
    return [
        (name, value)
        for name, value in {**values, **zero}.items()
        if isinstance(value, int | float) and (name not in zero or value < 0)
    ]


def _adapter() -> TypeAdapter[Calibration]:
    return TypeAdapter(Calibration)


for _part in (Calibration, Constants, Rates):
    # pydantic reads its configuration of standard dataclasses from this attribute.
    _part.__pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False, strict=False)  # type: ignore[attr-defined]
