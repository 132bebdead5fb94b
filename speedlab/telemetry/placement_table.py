"""The placement table of a rank, as it stands in the run folder: who holds each state of each parameter, and where."""

from __future__ import annotations

from speedlab.display.formatting import Table
from speedlab.placement import HEAD, cells
from speedlab.telemetry.folder import RunFolder


class PlacementTable(Table):
    """Rows as `speedlab.placement.Row.described` gives them. `rank`: whose they are."""

    def __init__(self, rows: list[dict[str, object]], rank: int) -> None:
        super().__init__(rows)
        self.rank = rank

    def head(self) -> tuple[str, ...]:
        return HEAD

    def cells(self) -> list[tuple[str, ...]]:
        return [cells(row, self.rank) for row in self]


def placement_of(folder: RunFolder, rank: int) -> PlacementTable:
    """What `rank` of a run holds, as it was last told. Raises RunFolderError for a rank that told of nothing."""
    return PlacementTable(folder.read_placement(rank), rank)
