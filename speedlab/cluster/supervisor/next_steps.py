"""What a person can do next with a run that has failed, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from speedlab.cluster.errors import DIED, RankError
from speedlab.telemetry.checkpoints import newest
from speedlab.telemetry.folder import RunFolder

if TYPE_CHECKING:
    from speedlab.cluster.supervisor.ranks import Ranks


def advice(error: RankError, folder: RunFolder, ranks: Ranks) -> str | None:
    """Look at the ranks, go back to the last checkpoint, read the whole trace; None where the error's own words do."""
    if any(failure.kind == DIED for failure in error.by_rank.values()):
        return without_hosts(folder, ranks)
    kept = newest(folder.path / "checkpoints")
    back = f" · go back: run.resume(step={kept.step})" if kept is not None else ""
    return f"The engines are idle and keep their state. {error.way_to_look}{back} · full trace: run.errors[-1]"


def without_hosts(folder: RunFolder, ranks: Ranks) -> str | None:
    """How the run can go on without the hosts that are lost, or once they are back; None where none is lost."""
    lost = sorted(ranks.lost_ranks)
    if not lost:
        return None
    kept, left = newest(folder.path / "checkpoints"), len(ranks.devices) - len(lost)
    if kept is None:
        return f"{ranks.way_back(lost)}; the run has no checkpoint, and can only be started again"
    without = f"run.reshape(engines={left})"
    try:
        from speedlab.cluster.shapes import shapes_on

        had = len(folder.read_status().rank_pids) or len(ranks.devices)
        layout = shapes_on(folder, had, left)[1].layout(left, built_in=False)
        way = f"{without} goes on from step {kept.step} as {layout}"
    except ValueError as error:
        way = f"{without} needs another layout: {error}" if left else "no host is left"
    return f"{ranks.way_back(lost)} and run.resume() goes on from step {kept.step}; without: {way}"
