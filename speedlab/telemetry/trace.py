"""A step's timeline as a Chrome trace: the JSON that chrome://tracing and Perfetto open."""

from __future__ import annotations

import json
import os
import re
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speedlab.hardware import Device
from speedlab.telemetry.folder import RunFolder, RunFolderError, write_atomically
from speedlab.telemetry.plain_file import open_plain
from speedlab.telemetry.rank_records import NO_RECORD, record_of
from speedlab.telemetry.records import StepRecord
from speedlab.telemetry.stream import LINE_LIMIT_BYTES
from speedlab.telemetry.timeline import Lane, lanes_of

_NAMES = {"F": "forward", "B": "backward", "I": "backward inputs", "W": "backward weights"}
_COMMUNICATION = frozenset({"wait", "send", "reduce"})
_NEWEST = 8


def chrome_trace(lanes: Sequence[Lane], step: int, *, devices: Sequence[Device] = ()) -> dict[str, Any]:
    """The trace of some ranks: a process for each rank, in it a lane for computing and one for communication."""
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
    """Write the trace of `step`, or of the newest step that every rank has told of, to `path`; returns the step.

    Raises RunFolderError when there is no timeline of it.
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
    """The record of `step` by rank, or each rank's newest ones, straight from the files: a feed keeps no old ones."""
    found: dict[int, list[StepRecord]] = {}
    for path in directory.glob("rank-*.jsonl"):
        match = re.fullmatch(r"rank-(\d{1,6})\.jsonl", path.name)
        records = _read(path, int(match[1]), step) if match else []
        # A rank that is one step behind is still at work on it; one that stopped earlier has left the run.
        if match and records and (step is None or records[-1].step >= step - 1):
            found[int(match[1])] = records
    return found


def _read(path: Path, rank: int, step: int | None) -> list[StepRecord]:
    """The record of `step` where there is one, else the newest ones, in their order."""
    wanted = None if step is None else b'{"step":%d,' % step
    newest: deque[bytes] = deque(maxlen=_NEWEST)
    with open_plain(path) as file:
        for line in file:
            if len(line) > LINE_LIMIT_BYTES or not line.endswith(b"\n"):
                continue  # No record, or one that is still being written.
            if wanted is not None and line.startswith(wanted):
                newest.clear()  # What follows is of later steps, or this one again after a return to a checkpoint.
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
