"""`speedlab export`: a run's checkpoint as a folder that transformers loads.

`speedlab trace`: a step of a pipeline as a file for chrome://tracing and Perfetto.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from speedlab.cluster.reattach import folder_named
from speedlab.config import ConfigError
from speedlab.config.cli_options import read_options
from speedlab.display.formatting import bytes_text
from speedlab.telemetry.checkpoint_index import MANIFEST, checkpoints_in, find_checkpoint, step_of
from speedlab.telemetry.trace import write_trace


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Write a run's checkpoint as a folder that transformers loads: `AutoModelForCausalLM.from_pretrained` the weights,
    `AutoTokenizer.from_pretrained` the tokenizer beside them."""

    run: Annotated[str, tyro.conf.Positional]
    """The run's name in ./runs, or a path: of its folder, of one checkpoint, or of a folder of checkpoints."""
    folder: Annotated[Path, tyro.conf.Positional]
    """The folder to write; it must not exist."""
    step: int | None = None
    """The checkpoint of this step; the newest one when left out."""
    tag: str | None = None
    """The checkpoint of this name."""
    config: Path | None = None
    """config.json of a model of transformers, for a model of your own that carried none when it was saved."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of the weights; as the run keeps them when left out."""


def export(argv: list[str]) -> int:
    """Write the folder and print what is in it."""
    options = read_options(ExportOptions, argv, "speedlab export")
    if options.step is not None and options.tag is not None:
        raise ConfigError(f"--step {options.step} and --tag {options.tag} both name a checkpoint; give one of them")
    path = find_checkpoint(_place(options.run), options.tag, step=options.step)
    # The one command whose own process needs torch; imported here, so that the others start without it.
    from speedlab.engine.checkpoint import export_hf

    export_hf(path, options.folder, config=options.config, dtype=options.dtype)
    size = sum(file.stat().st_size for file in options.folder.iterdir())
    without = "" if (options.folder / "tokenizer.json").exists() else ", without a tokenizer: the run's folder has none"
    print(f"{options.folder}: step {step_of(path):,}, from {path}, {bytes_text(size)}{without}")
    return 0


def _place(run: str) -> Path:
    """One checkpoint, a folder of some, or that of a run."""
    path = Path(run).expanduser()
    return path if (path / MANIFEST).is_file() or checkpoints_in(path) else folder_named(run).path


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
