"""What the ranks of a pipeline did in a step, on one clock; and how much of the time they stood still."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from speedlab.planner import bubble_share
from speedlab.telemetry.records import Span, StepRecord

_NEWEST = 8
"""Records of a rank, from its newest back, among which a step is looked for that all ranks have told of."""

COMPUTING = frozenset({"F", "B", "I", "W"})
"""Actions in which a pipeline rank works on a micro-batch; in all others it waits, sends, or is done with them."""


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One rank of a pipeline; spans start in seconds after the step's first beginning on any rank."""

    rank: int
    spans: tuple[Span, ...]

    @property
    def stages(self) -> tuple[int, ...]:
        """The pipeline stages that the rank holds, first one first."""
        return tuple(sorted({span.stage for span in self.spans if span.action in COMPUTING}))

    @property
    def computing(self) -> tuple[Span, ...]:
        return tuple(span for span in self.spans if span.action in COMPUTING)


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A step of one pipeline: the ranks with data index 0 and tensor index 0, first pipeline stage first."""

    step: int
    lanes: tuple[Lane, ...]

    @property
    def bubble(self) -> float:
        """Share (0 to 1) of the ranks' time, from the first forward to the last backward, in which none computed."""
        spans = [span for lane in self.lanes for span in lane.computing]
        begin, end = min(span.start for span in spans), max(span.start + span.seconds for span in spans)
        whole = len(self.lanes) * (end - begin)
        return max(0.0, 1 - sum(span.seconds for span in spans) / whole) if whole > 0 else 0.0

    @property
    def theory(self) -> float:
        """The share that the schedule costs by itself: blocks equally long, messages for nothing."""
        chunks = max(len(lane.stages) for lane in self.lanes)
        halves = any(span.action == "W" for lane in self.lanes for span in lane.spans)
        schedule = "zero-bubble" if halves else "interleaved" if chunks > 1 else "1f1b"
        return bubble_share(schedule, pp=len(self.lanes), chunks=chunks, micro_batches=self.micro_batches)

    @property
    def micro_batches(self) -> int:
        return max(len({span.micro_batch for span in lane.spans if span.action == "F"}) for lane in self.lanes)


def timeline_of(records: Mapping[int, Sequence[StepRecord]], step: int | None = None) -> Timeline | None:
    """The pipeline of a step, or of the newest one that every rank has told of; None when there is no such timeline."""
    found = lanes_of(records, step)
    by_stages = _by_stages(found[1]) if found is not None else {}
    if found is None or len(by_stages) < 2:
        return None
    return Timeline(step=found[0], lanes=tuple(by_stages[stages] for stages in sorted(by_stages)))


def is_one_stage(records: Mapping[int, Sequence[StepRecord]]) -> bool:
    """Whether the newest steps have no pipeline: they tell of no timeline, or of that of one stage."""
    found = lanes_of(records)
    if found is not None:
        return len(_by_stages(found[1])) < 2
    return not any(_near(entries, None) for entries in records.values())


def _by_stages(lanes: Sequence[Lane]) -> dict[tuple[int, ...], Lane]:
    """One lane for each place in the pipeline: its peers hold other data, or other parts of the same layers."""
    found: dict[tuple[int, ...], Lane] = {}
    for lane in lanes:
        if lane.stages:
            found.setdefault(lane.stages, lane)
    return found


def lanes_of(
    records: Mapping[int, Sequence[StepRecord]], step: int | None = None
) -> tuple[int, tuple[Lane, ...]] | None:
    """The step and a lane for each rank, by rank, on one clock."""
    newest = max((entries[-1].step for entries in records.values() if entries), default=0)
    # Ranks that are silent for long have left the run: it goes on with fewer engines.
    present = {rank: found for rank, found in records.items() if found and found[-1].step > newest - _NEWEST}
    told = {rank: _near(entries, step) for rank, entries in present.items()}
    common = set.intersection(*map(set, told.values())) if told else set()
    wanted = max(common, default=None) if step is None else step
    if wanted is None or wanted not in common:
        return None
    chosen = [(rank, told[rank][wanted]) for rank in sorted(told)]
    origin = min(record.began for _, record in chosen)
    return wanted, tuple(
        Lane(
            rank=rank,
            spans=tuple(span._replace(start=span.start + record.began - origin) for span in record.timeline),
        )
        for rank, record in chosen
    )


def _near(entries: Sequence[StepRecord], step: int | None) -> dict[int, StepRecord]:
    """By step, the records with a timeline that come into question."""
    if step is None:
        found = entries[-_NEWEST:]
    else:
        first = bisect_left(entries, step, key=lambda record: record.step)
        found = entries[first : first + 1]
    return {record.step: record for record in found if record.timeline}
