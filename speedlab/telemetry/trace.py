"""The timeline of a step: what each pipeline rank did, on one clock, and its export as a Chrome trace.

`chrome_trace` returns the JSON that chrome://tracing and Perfetto open. `PipelineTimeline.bubble` is the measured idle
share of a step.
"""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speedlab.hardware import Device
from speedlab.planner import bubble_share
from speedlab.telemetry.record_store import NO_RECORD, record_of
from speedlab.telemetry.records import Span, StepRecord
from speedlab.telemetry.run_folder import RunFolder, RunFolderError, open_plain, write_atomically
from speedlab.telemetry.stream import LINE_LIMIT_BYTES

_NEWEST_RECORDS = 8
"""Number of newest records per rank among which a step common to all ranks is searched."""

COMPUTING = frozenset({"F", "B", "I", "W"})
"""Actions in which a pipeline rank works on a micro-batch. In all other actions it waits, sends, or has
finished them.
"""


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One rank of a pipeline. Spans start in seconds after the first rank began the step."""

    rank: int
    spans: tuple[Span, ...]

    @property
    def stages(self) -> tuple[int, ...]:
        """The pipeline stages of the rank, in ascending order."""
        return tuple(sorted({span.stage for span in self.spans if span.action in COMPUTING}))

    @property
    def computing(self) -> tuple[Span, ...]:
        """The spans in which the rank works on a micro-batch."""
        return tuple(span for span in self.spans if span.action in COMPUTING)


@dataclass(frozen=True, kw_only=True)
class PipelineTimeline:
    """A step of one pipeline: one lane per place in the pipeline, first pipeline stage first."""

    step: int
    lanes: tuple[Lane, ...]

    @property
    def bubble(self) -> float:
        """Idle share (0 to 1) of the ranks' time between the first forward and the last backward."""
        spans = [span for lane in self.lanes for span in lane.computing]
        begin, end = min(span.start for span in spans), max(span.start + span.seconds for span in spans)
        whole = len(self.lanes) * (end - begin)
        return max(0.0, 1 - sum(span.seconds for span in spans) / whole) if whole > 0 else 0.0

    @property
    def theory(self) -> float:
        """Idle share of the schedule itself, for blocks of equal duration and free communication."""
        chunks = max(len(lane.stages) for lane in self.lanes)
        halves = any(span.action == "W" for lane in self.lanes for span in lane.spans)
        schedule = "zero-bubble" if halves else "interleaved" if chunks > 1 else "1f1b"
        return bubble_share(schedule, pp=len(self.lanes), chunks=chunks, micro_batches=self.micro_batches)

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches in the step."""
        return max(len({span.micro_batch for span in lane.spans if span.action == "F"}) for lane in self.lanes)


def timeline_of(records: Mapping[int, Sequence[StepRecord]], step: int | None = None) -> PipelineTimeline | None:
    """Return the pipeline timeline of a step; None if there is none.

    Args:
        records: Records by rank.
        step: The step; None for the newest one that every rank has recorded.
    """
    found = lanes_of(records, step)
    by_stages = _by_stages(found[1]) if found is not None else {}
    if found is None or len(by_stages) < 2:
        return None
    return PipelineTimeline(step=found[0], lanes=tuple(by_stages[stages] for stages in sorted(by_stages)))


def is_one_stage(records: Mapping[int, Sequence[StepRecord]]) -> bool:
    """Return whether the newest steps have no pipeline: no timeline, or the timeline of one stage.

    Args:
        records: Records by rank.
    """
    found = lanes_of(records)
    if found is not None:
        return len(_by_stages(found[1])) < 2
    return not any(_near(entries, None) for entries in records.values())


def _by_stages(lanes: Sequence[Lane]) -> dict[tuple[int, ...], Lane]:
    """Return one lane per place in the pipeline. Peers at the same place hold other data or other shards of the same
    layers.
    """
    found: dict[tuple[int, ...], Lane] = {}
    for lane in lanes:
        if lane.stages:
            found.setdefault(lane.stages, lane)
    return found


def lanes_of(
    records: Mapping[int, Sequence[StepRecord]], step: int | None = None
) -> tuple[int, tuple[Lane, ...]] | None:
    """Return the step and a lane for each rank, on one clock; None if not all present ranks have recorded the step.

    Args:
        records: Records by rank.
        step: The step; None for the newest one that every rank has recorded.
    """
    newest = max((entries[-1].step for entries in records.values() if entries), default=0)
    # Ranks without recent records have left the run, which continues with fewer engines.
    present = {rank: found for rank, found in records.items() if found and found[-1].step > newest - _NEWEST_RECORDS}
    reported = {rank: _near(entries, step) for rank, entries in present.items()}
    common = set.intersection(*map(set, reported.values())) if reported else set()
    wanted = max(common, default=None) if step is None else step
    if wanted is None or wanted not in common:
        return None
    chosen = [(rank, reported[rank][wanted]) for rank in sorted(reported)]
    origin = min(record.began for _, record in chosen)
    return wanted, tuple(
        Lane(
            rank=rank,
            spans=tuple(span._replace(start=span.start + record.began - origin) for span in record.timeline),
        )
        for rank, record in chosen
    )


def _near(entries: Sequence[StepRecord], step: int | None) -> dict[int, StepRecord]:
    """Return the candidate records with a timeline, by step."""
    if step is None:
        found = entries[-_NEWEST_RECORDS:]
    else:
        first = bisect_left(entries, step, key=lambda record: record.step)
        found = entries[first : first + 1]
    return {record.step: record for record in found if record.timeline}


_NAMES = {"F": "forward", "B": "backward", "I": "backward inputs", "W": "backward weights"}
_COMMUNICATION = frozenset({"wait", "send", "reduce"})
_NEWEST_STEPS = 8


def chrome_trace(lanes: Sequence[Lane], step: int, *, devices: Sequence[Device] = ()) -> dict[str, Any]:
    """Return a Chrome trace: one process per rank, with a thread for computing and one for communication.

    Args:
        lanes: The lanes of a step.
        step: Number of the step.
        devices: Devices by rank, for the names of the processes.
    """
    events: list[dict[str, Any]] = []
    for lane in lanes:
        device = f" · {devices[lane.rank].name}" if lane.rank < len(devices) else ""
        stages = ", ".join(map(str, lane.stages))
        names = [("process_name", 0, f"rank {lane.rank}{device} · pipeline stage {stages}")]
        names += [("thread_name", 0, "computing"), ("thread_name", 1, "communication")]
        events += [
            {"ph": "M", "pid": lane.rank, "tid": tid, "name": kind, "args": {"name": name}} for kind, tid, name in names
        ]
        for span in lane.spans:
            known = {"pipeline stage": span.stage, "micro-batch": span.micro_batch}
            events.append(
                {
                    "ph": "X",
                    "pid": lane.rank,
                    "tid": int(span.action in _COMMUNICATION),
                    "name": _NAMES.get(span.action, span.action),
                    "cat": "step",
                    "ts": round(1e6 * span.start, 3),
                    "dur": round(1e6 * span.seconds, 3),
                    "args": {name: value for name, value in known.items() if value >= 0},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"step": step}}


def write_trace(
    folder: RunFolder | str | os.PathLike[str],
    path: str | os.PathLike[str],
    step: int | None = None,
    *,
    devices: Sequence[Device] = (),
) -> int:
    """Write the Chrome trace of a step and return the step.

    Args:
        folder: The run folder.
        path: The file to write.
        step: The step; None for the newest one that every rank has recorded.
        devices: Devices by rank, for the names of the processes.

    Raises:
        RunFolderError: There is no timeline of this step.
    """
    folder = folder if isinstance(folder, RunFolder) else RunFolder(folder)
    found = lanes_of(_records(folder.path / "records", step), step)
    if found is None:
        which = f"step {step}" if step is not None else "a step"
        raise RunFolderError(
            f"{folder.name}: there is no timeline of {which}; a run records them while it has more than one pipeline "
            f"rank (parallel.pp), and all ranks must have finished the step"
        )
    trace = chrome_trace(found[1], found[0], devices=devices)
    write_atomically(Path(path), json.dumps(trace, separators=(",", ":")), mode=0o644)
    return found[0]


def _records(directory: Path, step: int | None) -> Mapping[int, Sequence[StepRecord]]:
    """Read the records of `step`, or the newest ones, by rank, from the files: a feed keeps no old timelines."""
    found: dict[int, list[StepRecord]] = {}
    for path in directory.glob("rank-*.jsonl"):
        match = re.fullmatch(r"rank-(\d{1,6})\.jsonl", path.name)
        records = _read(path, int(match[1]), step) if match else []
        # A rank at the previous step still works on this one; a rank that stopped earlier has left the run.
        if match and records and (step is None or records[-1].step >= step - 1):
            found[int(match[1])] = records
    return found


def _read(path: Path, rank: int, step: int | None) -> list[StepRecord]:
    """Return the record of `step` if there is one, else the newest ones, in order."""
    # Records begin with their step: compare bytes, and parse only the lines that are needed.
    wanted = None if step is None else b'{"step":%d,' % step
    newest: deque[bytes] = deque(maxlen=_NEWEST_STEPS)
    with open_plain(path) as file:
        for line in file:
            if len(line) > LINE_LIMIT_BYTES or not line.endswith(b"\n"):
                continue  # Not a record, or a line that is still being written.
            if wanted is not None and line.startswith(wanted):
                newest.clear()  # Later lines hold later steps, or this step again after a restart.
                newest.append(line)
                continue
            if wanted is None or not newest or not newest[0].startswith(wanted):
                newest.append(line)
    records: list[StepRecord] = []
    for line in newest:
        try:
            record = record_of(line, rank)
        except NO_RECORD:
            continue
        records = [known for known in records if known.step < record.step] + [record]
    return records
