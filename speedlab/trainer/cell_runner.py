"""What runs a person's cells between two steps, as the process that hosts the engine gives it to a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from speedlab.telemetry.live_cells import CellOutcome


class CellRunner(Protocol):
    """Cells of a person, read and run."""

    def take(self, path: Path) -> str:
        """The code of a cell, which is run once: its file is removed. Raises for one that this user did not write."""
        ...

    def write(self, path: Path, data: bytes) -> None:
        """A new file with what ranks said, of which whoever reads it can tell that this user wrote it."""
        ...

    def run(
        self,
        code: str,
        door: str,
        names: Mapping[str, Any],
        interruptible: Callable[[], AbstractContextManager[object]],
    ) -> CellOutcome:
        """Run it, with `names` before those that it finds, inside `interruptible()`, where an interrupt raises. Nothing
        that is raised comes out. `door`: where a person waits who can be asked; "" where nobody does."""
        ...
