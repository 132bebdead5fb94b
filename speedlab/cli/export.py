"""`speedlab export`: a run's checkpoint as a folder that transformers loads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from speedlab.cluster.reattach import folder_named
from speedlab.config import ConfigError


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Write the weights of a run's checkpoint as a folder that `AutoModelForCausalLM.from_pretrained` loads."""

    run: Annotated[str, tyro.conf.Positional]
    """The run's name in ./runs, or the path of its folder."""
    folder: Annotated[Path, tyro.conf.Positional]
    """The folder to write; it must not exist."""
    tag: str | None = None
    """Which checkpoint; the newest one when left out."""


def export(argv: list[str]) -> int:
    """Write the folder and print what is in it."""
    options = tyro.cli(ExportOptions, args=argv, prog="speedlab export")
    checkpoints = folder_named(options.run).path / "checkpoints"
    # The one command whose own process needs torch; imported here, so that the others start without it.
    from speedlab.engine.checkpoint import CheckpointError, export_hf, newest

    path = checkpoints / options.tag if options.tag else newest(checkpoints)
    if path is None:
        raise ConfigError(f"{checkpoints}: holds no complete checkpoint; save one with run.save(), then export it")
    try:
        export_hf(path, options.folder)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    size = sum(file.stat().st_size for file in options.folder.iterdir())
    print(f"{options.folder}: {path.name} of {options.run}, {size / 2**20:,.1f} MiB")
    return 0
