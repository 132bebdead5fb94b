"""A checkpoint as a folder of transformers, written by a process of its own: the kernel's has no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from speedlab.cluster.known_runs import RunError


def export_checkpoint(path: Path, folder: Path, **options: object) -> Path:
    """Write the checkpoint `path` to `folder` as `speedlab export` does, whose `options` these are; None is left out.
    Prints its line: which step was written, from where, how much.

    Raises RunError with what the command says is wrong.
    """
    command = [sys.executable, "-m", "speedlab.cli", "export", str(path), str(folder)]
    for name, value in options.items():
        command += [f"--{name}", str(value)] if value is not None else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(done.stderr.strip().removeprefix("speedlab export: ") or f"{folder}: was not written")
    print(done.stdout.strip())
    return folder
