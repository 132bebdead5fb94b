"""What runs a person's cells between two steps, as the process that hosts the engine gives it to a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from speedlab.telemetry.live import Said


class Cells(Protocol):
    """Cells of a person, read and run."""

    def read(self, path: Path) -> str:
        """The code of a cell. Raises for one that this user did not write."""
        ...

    def run(self, code: str, names: Mapping[str, Any]) -> Said:
        """Run it, with `names` before those that it finds. Nothing that it raises comes out."""
        ...
