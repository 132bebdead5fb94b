"""Which rank stands where in a layout: its pipeline stages and their blocks, its indices, its device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from speedlab.display.formatting import Table
from speedlab.hardware import Device
from speedlab.layout import ALWAYS_NAMED, AXES, Layout

_INDEXED = tuple(axis for axis in AXES if axis != "pp")  # Along pp, the stages and their blocks say more.


class LayoutTable(Table):
    """Rows as `layout_table` gives them."""

    def head(self) -> list[str]:
        device = ["device"] if any(row["device"] for row in self) else []
        return [
            "rank",
            "pipeline stage",
            *(f"{axis} index" for axis in _INDEXED if axis in ALWAYS_NAMED or any(row[axis] for row in self)),
            *device,
            *(["host"] if self._hosts else []),
        ]

    def cells(self) -> list[tuple[str, ...]]:
        shown = self.head()
        return [
            tuple(
                text
                for name, text in {
                    "rank": f"{row['rank']}",
                    "pipeline stage": _stages_text(row["stages"], row["blocks"]),
                    **{f"{axis} index": f"{row[axis]}" for axis in _INDEXED},
                    "device": row["device"],
                    "host": row["host"],
                }.items()
                if name in shown
            )
            for row in self
        ]

    @property
    def _hosts(self) -> bool:
        return any(row["host"] for row in self)


def layout_table(
    layout: Layout,
    counts: Sequence[int] = (),
    *,
    chunks: int = 1,
    devices: Sequence[Device] = (),
    hosts: Sequence[str] = (),
) -> LayoutTable:
    """A row for each rank: rank, stages (pipeline stages it holds), blocks (of each, first and last), its index along
    every other axis, device, host.

    `counts`: blocks of each pipeline stage, left out where they are not known. Stage s is on pipeline rank s mod pp,
    which holds `chunks` of them.
    """
    ends = list(accumulate(counts))
    rows = []
    for rank in range(layout.world_size):
        indices = layout.coordinates(rank)
        stages = tuple(range(indices["pp"], layout.pp * chunks, layout.pp))
        rows.append(
            {
                "rank": rank,
                "stages": stages,
                "blocks": tuple((ends[stage] - counts[stage], ends[stage] - 1) for stage in stages) if counts else (),
                **{axis: indices[axis] for axis in _INDEXED},
                "device": devices[rank].name if rank < len(devices) else "",
                "host": hosts[rank] if rank < len(hosts) else "",
            }
        )
    return LayoutTable(rows)


def _stages_text(stages: Sequence[int], blocks: Sequence[tuple[int, int]]) -> str:
    """'0 (blocks 0–2), 2 (block 6)'."""
    if not blocks:
        return ", ".join(map(str, stages))
    spans = [f"block {a}" if a == b else f"blocks {a}–{b}" for a, b in blocks]
    return ", ".join(f"{stage} ({span})" for stage, span in zip(stages, spans, strict=True))
