"""The mapped files of a checkpoint that is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from speedlab.engine.checkpoint.manifest import Source, sources_of
from speedlab.engine.checkpoint.pieces import Stretch, blocks, copy_blocks
from speedlab.telemetry.checkpoints import CheckpointError


class Files:
    """The mapped files of a checkpoint. What is copied out of them needs no memory on the way."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open: dict[str, Any] = {}

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.clear()

    def file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(self._path / name, framework="pt")
        return self._open[name]

    def values(self, source: Source, kind: str, *, is_complex: bool = False) -> Tensor:
        """The elements (1-D) of a state of the source's stretch, in the mapped file."""
        key, twice = f"{source.flat}/{kind}", 2 if is_complex else 1
        start, end = source.offset, source.offset + source.stretch.end - source.stretch.start
        try:
            found: Tensor = self.file(source.file).get_slice(key)[twice * start : twice * end]
            return torch.view_as_complex(found.view(-1, 2)) if is_complex else found
        except SafetensorError as error:
            raise CheckpointError(f"{self._path / source.file}: {key} cannot be read: {error}") from None

    def copy(self, entry: dict[str, Any], kind: str, stretch: Stretch, into: Tensor) -> None:
        """Copy a stretch of state `kind` of a parameter, whose `entry` the manifest has."""
        sources = sources_of(entry)
        # What an optimizer keeps beside gradients has no dtypes in the manifest, and is real.
        is_complex = "complex" in entry.get("states", {}).get(kind, "")
        same = [source for source in sources if source.stretch.part == stretch.part]
        for source in same or sources:
            found = list(blocks(entry["shape"], source.stretch, stretch))
            if found:
                copy_blocks(found, self.values(source, kind, is_complex=is_complex), into)
