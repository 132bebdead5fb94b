"""Export checkpoints for transformers (`speedlab export`) and pipelines as Chrome traces (`speedlab trace`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from speedlab.cluster.reattach import folder_named
from speedlab.config import ConfigError
from speedlab.config.command_line import read_options
from speedlab.display.formatting import bytes_text
from speedlab.telemetry.checkpoint_index import MANIFEST, checkpoints_in, find_checkpoint, step_of
from speedlab.telemetry.trace import write_trace


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Write a run's checkpoint as a folder that transformers loads.

    `AutoModelForCausalLM.from_pretrained` loads the weights, `AutoTokenizer.from_pretrained` the tokenizer next to
    them.
    """

    run: Annotated[str, tyro.conf.Positional]
    """The run's name in ./runs, or a path: of its folder, of one checkpoint, or of a folder of checkpoints."""
    folder: Annotated[Path, tyro.conf.Positional]
    """The folder to write; it must not exist."""
    step: int | None = None
    """The checkpoint of this step; the newest one when left out."""
    tag: str | None = None
    """The checkpoint of this name."""
    config: Path | None = None
    """config.json of a model of transformers, for a model of your own that was saved without one."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the weights; that of the run when left out."""


def export(argv: list[str]) -> int:
    """Write the folder and print its contents.

    Args:
        argv: arguments of the command.

    Returns:
        The exit status.

    Raises:
        ConfigError: options contradict each other.
        CheckpointError: there is no such checkpoint.
    """
    options = read_options(ExportOptions, argv, "speedlab export")
    if options.step is not None and options.tag is not None:
        raise ConfigError(f"--step {options.step} and --tag {options.tag} both name a checkpoint; give one of them")
    path = find_checkpoint(_place(options.run), options.tag, step=options.step)
    # Imported here, so that the other commands start without torch.
    from speedlab.engine.checkpoint import export_hf

    export_hf(path, options.folder, config=options.config, dtype=options.dtype)
    size = sum(file.stat().st_size for file in options.folder.iterdir())
    without = "" if (options.folder / "tokenizer.json").exists() else ", without a tokenizer: the run's folder has none"
    print(f"{options.folder}: step {step_of(path):,}, from {path}, {bytes_text(size)}{without}")
    return 0


def _place(run: str) -> Path:
    """Return the path of a checkpoint, of a folder of checkpoints, or of a run."""
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
    """Write the trace and print its step.

    Args:
        argv: arguments of the command.

    Returns:
        The exit status.
    """
    options = read_options(TraceOptions, argv, "speedlab trace")
    step = write_trace(folder_named(options.run), options.output, options.step)
    print(f"{options.output}: step {step}; open it in chrome://tracing or Perfetto")
    return 0
