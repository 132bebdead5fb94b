"""`speedlab trace`: a step of a pipeline as a file for chrome://tracing and Perfetto."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from speedlab.cluster.reattach import folder_named
from speedlab.config.cli_options import read_options
from speedlab.telemetry.trace import write_trace


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """Write the timeline of a pipeline's step as a Chrome trace, which chrome://tracing and Perfetto open."""

    run: Annotated[str, tyro.conf.Positional]
    """The run's name in ./runs, or the path of its folder."""
    step: int | None = None
    """Which step; the newest one when left out."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("trace.json")
    """The file to write."""


def trace(argv: list[str]) -> int:
    """Write the trace and print what it shows."""
    options = read_options(TraceOptions, argv, "speedlab trace")
    step = write_trace(folder_named(options.run), options.output, options.step)
    print(f"{options.output}: step {step}; open it in chrome://tracing or Perfetto")
    return 0
