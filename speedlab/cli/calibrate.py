"""Measure this machine, so that plans predict the time of a step here: `speedlab calibrate`."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

import tyro

from speedlab.cluster.learn_from_run import learn_from
from speedlab.cluster.reattach import folder_named
from speedlab.config import ConfigError
from speedlab.config.command_line import read_options
from speedlab.planner.calibration import CLASSES, Calibration, store


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """Measure this machine: products of matrices, blocks of a model, memory, collectives, the engine's own time.

    It takes about a minute; measure while nothing else runs. `speedlab plan` and the panel use it from then on.
    """

    engines: tuple[int, ...] = ()
    """Numbers of engines to measure with; by default 1, 2 and 4 on CPUs, or powers of two up to the number of GPUs."""
    learn: str = ""
    """Do not measure: learn from a measured run, by its name in ./runs or the path of its folder."""
    show: bool = False
    """Do not measure: print the current calibration."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """Folder of the file; the user's cache when left out."""


def calibrate(argv: list[str]) -> int:
    """Measure, learn or show, then print the calibration.

    Args:
        argv: arguments of the command.

    Returns:
        The exit status.

    Raises:
        ConfigError: an option is invalid, or there is no usable calibration to show.
    """
    options = read_options(CalibrateOptions, argv, "speedlab calibrate")
    try:
        if options.learn:
            print(learn_from(folder_named(options.learn), folder=options.output))
        elif not options.show:
            _measure(options)
        found = store.load(options.output)
    except store.CalibrationError as error:
        raise ConfigError(str(error)) from None
    if found is None:
        raise ConfigError(
            f"{store.path(options.output)}: there is no calibration of this machine; run `speedlab calibrate` first"
        )
    print(calibration_text(found))
    return 0


def _measure(options: CalibrateOptions) -> None:
    # Imported here, because only measuring needs torch.
    from speedlab.calibrate.measure import measure

    begin = time.monotonic()
    live = sys.stderr.isatty()

    def say(text: str) -> None:
        line = f"calibrating: {text} ({time.monotonic() - begin:.0f} s)"
        sys.stderr.write(f"\r\x1b[K{line}" if live else f"{line}\n")
        sys.stderr.flush()

    engines = options.engines or _usual_engines()
    if any(number < 1 for number in engines):
        raise ConfigError(f"engines {engines}: each number must be at least 1")
    found = measure(engines, say=say)
    path = store.save(found, options.output)
    say(f"done: {path}")
    if live:
        sys.stderr.write("\n")


def _usual_engines() -> tuple[int, ...]:
    from speedlab.hardware import cuda_devices

    count = len(cuda_devices()) or 4
    return tuple(2**power for power in range(count.bit_length()))


def calibration_text(found: Calibration) -> str:
    """Return a calibration as text: plain rates, constants, learned factors and runs.

    Args:
        found: the calibration.
    """
    when = datetime.fromtimestamp(found.created).strftime("%Y-%m-%d %H:%M")
    lines = [f"{found.machine}: measured {when}", ""]
    lines += [f"  {name}: {value:,.1f}" for name, value in found.rates.items()]
    header = ("engines", "dtype", "threads", "matmul GFLOP/s", "attention GFLOP/s", "GB/s", "link GB/s", "kernel µs")
    rows = []
    for each in found.constants:
        rates = each.rates_of("rotary")
        giga = (rates.matmul_flops / 1e9, rates.attention_flops / 1e9, rates.memory_bytes / 1e9)
        link = f"{each.link_bytes_per_second / 1e9:.1f}" if each.engines > 1 else "–"
        numbers = (*(f"{rate:.1f}" for rate in giga), link, f"{rates.kernel_seconds * 1e6:.1f}")
        rows.append((str(each.engines), each.dtype, str(each.threads), *numbers))
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines += ["", *("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in (header, *rows))]
    remainder, following = found.process_remainder()
    lines += ["", f"an engine's process holds {remainder / 2**20:,.0f} MiB of its own ({_runs(following)})"]
    for name in CLASSES:
        factor, following = found.learned(name)
        lines.append(f"{name}: factor {factor:.3f} ({_runs(following)})")
    for run in found.runs:
        lines.append(
            f"  {run.name}: {run.setup}: predicted {run.predicted_seconds * 1e3:.1f} ms, measured "
            f"{run.measured_seconds * 1e3:.1f} ms, {run.error:+.1%}"
        )
    return "\n".join(lines)


def _runs(count: int) -> str:
    return f"{count} run{'' if count == 1 else 's'} were used"
