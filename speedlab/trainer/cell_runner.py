"""The interface through which a run executes the user's notebook cells between two steps.

The process that hosts the engine implements this protocol and passes an instance to the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from speedlab.telemetry.cell_outcomes import CellOutcome


class CellRunner(Protocol):
    """Reads, runs and signs notebook cells."""

    def take(self, path: Path) -> str:
        """Return the code of a cell and remove its file, so that the cell runs only once.

        Args:
            path: File with the code of the cell.

        Raises:
            Exception: If this user did not write the file. The implementation chooses the class.
        """
        ...

    def write(self, path: Path, data: bytes) -> None:
        """Write a new file with the outputs of the ranks.

        Readers of the file can verify that this user wrote it.

        Args:
            path: File to create.
            data: Content of the file.
        """
        ...

    def run(
        self,
        code: str,
        door: str,
        names: Mapping[str, Any],
        interruptible: Callable[[], AbstractContextManager[object]],
    ) -> CellOutcome:
        """Run a cell and return its outcome. Exceptions of the cell are part of the outcome and are not raised.

        Args:
            code: Source code of the cell.
            door: Name of the cell if a user waits and can answer prompts; "" otherwise.
            names: Names that the cell sees before all others.
            interruptible: Returns a context manager; inside it an interrupt raises KeyboardInterrupt.
        """
        ...
