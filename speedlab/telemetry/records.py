"""What a rank reports of a step. Plain data: no torch, so that kernels, scripts and reports can read it.

One step record is one JSON line in `runs/<name>/records/rank-<r>.jsonl`. Bytes are bytes, times are seconds.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from heapq import nlargest
from typing import Any, NamedTuple

import msgspec

CATEGORIES = (
    "parameters",
    "gradients",
    "master_weights",
    "optimizer_moments",
    "activations",
    "communication_buffers",
    "other_framework",
    "outside_framework",
)
"""Ledger categories in the order in which they are stacked, bottom to top."""

PHASES = ("data", "forward", "backward", "communication", "offload", "optimizer")
"""Phases of a step. `communication` and `offload` are time in which a rank waited, for its peers and for the host's
memory or the disk: what was not hidden. The others exclude it."""

PLACES = ("device", "host", "disk")
"""Where something may lie between two uses."""


MOST_SPANS = 8192
"""Spans of one step that are written: a line of a record file has a limit, and no picture shows more."""


class RunState(StrEnum):
    """What a run is doing."""

    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


RESTING = frozenset({RunState.PAUSED, RunState.FINISHED, RunState.STOPPED, RunState.FAILED})
"""States in which no rank advances until a control word asks for it."""


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Bytes on one rank at the peak of a step, by category.

    The categories sum to `reported_bytes`, what the allocator (CUDA) or the operating system (CPU) says; on CPU cores
    together with `host`, which is the same memory there. `other_framework` is the remainder, so it may be negative
    while pages are allocated but not yet touched.
    """

    parameters: int = 0
    gradients: int = 0
    master_weights: int = 0
    optimizer_moments: int = 0
    activations: int = 0
    communication_buffers: int = 0
    other_framework: int = 0
    outside_framework: int = 0
    reported_bytes: int = 0
    capacity_bytes: int = 0
    host: dict[str, int] = field(default_factory=dict)
    """Category -> bytes that lie in the host's memory; buffers there are those through which states on disk pass."""
    disk: dict[str, int] = field(default_factory=dict)
    """Category -> bytes that lie on disk."""
    host_capacity_bytes: int = 0
    """This rank's share of the host's memory; on CPU cores that is the device's."""
    disk_capacity_bytes: int = 0
    """This rank's share of what is free on the disk, with what it has there; 0 where nothing lies there."""

    @property
    def model_states(self) -> int:
        """Parameters, gradients, master weights and moments: what ZeRO's formula speaks of."""
        return self.parameters + self.gradients + self.master_weights + self.optimizer_moments

    def by_place(self) -> dict[str, dict[str, int]]:
        """Place (device, host, disk) → category → bytes, in the order of CATEGORIES; places where something lies."""
        device = {name: getattr(self, name) for name in CATEGORIES}
        away = {"host": self.host, "disk": self.disk}
        ordered = {place: {name: held[name] for name in CATEGORIES if held.get(name)} for place, held in away.items()}
        return {"device": device} | {place: held for place, held in ordered.items() if held}

    def anywhere(self, category: str) -> int:
        """Bytes of a category in all places together: what a rank holds, wherever that lies."""
        return sum(held.get(category, 0) for held in self.by_place().values())

    def capacity_of(self, place: str) -> int:
        """Bytes that this rank may fill in a place; 0 where nobody knows."""
        capacities = (self.capacity_bytes, self.host_capacity_bytes, self.disk_capacity_bytes)
        return capacities[PLACES.index(place)]


class Span(NamedTuple):
    """Something that a pipeline rank did: `start` in seconds after the step's `began`."""

    action: str
    """F, B (whole backward), I and W (its halves: gradients of inputs, of weights), wait, send, reduce, optimizer."""
    stage: int
    """-1 where it belongs to no single stage."""
    micro_batch: int
    """-1 where it belongs to no single micro-batch."""
    start: float
    seconds: float


class MemoryMark(NamedTuple):
    """What was allocated at a moment of a step."""

    phase: str
    """Which has just ended; `start` where none has."""
    seconds: float
    """After the step began."""
    bytes: int
    """On a GPU those of tensors, else of the process's heap and shared memory."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step on one rank.

    `loss` is the mean over the global batch; `tokens` counts the global batch, `counted_tokens` the targets in it that
    count in the loss (0 if the loss is a mean over micro-batches); `flops` is this rank's share of the
    model's floating-point operations in the step (the convention without recomputation); `traced` says that
    `ledger.activations` was measured exactly in this very step, not carried over.
    """

    step: int
    rank: int
    time: float
    loss: float
    learning_rate: float
    grad_norm: float
    loss_scale: float
    zero_stage: int
    tokens: int
    flops: float
    seconds: float
    counted_tokens: int = 0
    phases: dict[str, float] = field(default_factory=dict)
    sent_bytes: dict[str, int] = field(default_factory=dict)
    """By collective."""
    sent_through: dict[str, dict[str, int]] = field(default_factory=dict)
    """The same by what it went through: collective → link (shared memory, gloo, nccl, …) → bytes."""
    moved_bytes: dict[str, int] = field(default_factory=dict)
    """To and from places beside the device, by way: 'disk read', 'disk write', 'host copy'."""
    exchange: dict[str, float] = field(default_factory=dict)
    """Of an optimizer that sums gradients itself after a warm-up: `compressed` (0 or 1), `steadiness` of the variance
    where it was looked at, `sent_bytes` in the place of `float32_bytes`, `error_norm` of this rank's feedback, and
    where it was looked at the `angle` (degrees) between the update and the one of what was compressed; of 0/1 Adam
    also `variance_updated` (1) behind its warm-up, and `steps_to_exchange` where ranks make steps of their own. Of
    ZeRO++ `compressed`, and both bytes. Of islands: `met` (0 or 1), `steps_to_meeting`, `sent_bytes` to other islands
    in the place of `float32_bytes`, and where these are compressed `error_norm`."""
    kernels: dict[str, dict[str, float]] = field(default_factory=dict)
    """By name of the kernel: calls, bytes (what it must at least read and write), seconds on its device."""
    ledger: Ledger = field(default_factory=Ledger)
    heldout_loss: float | None = None
    traced: bool = False
    began: float = 0.0
    """When the step began on this rank, seconds since the epoch: the origin of `timeline`."""
    timeline: list[Span] = field(default_factory=list)
    """What a pipeline rank did, in order; empty where there is no pipeline."""
    memory: list[MemoryMark] = field(default_factory=list)
    """Over the time of the step, in order; of about one step in a second, empty in the others."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    def to_json(self) -> str:
        # The fields are plain data, so the instances' own dicts do: asdict would copy them all, at five times the cost.
        values = {**self.__dict__, "ledger": self.ledger.__dict__}
        if self.timeline:
            values["timeline"] = _lines_of(self.timeline)
        return json.dumps(values, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str | bytes) -> StepRecord:
        """Raises ValueError, TypeError or RecursionError for what is no record."""
        try:
            return RECORDS.decode(line)
        except msgspec.MsgspecError:
            pass  # NaN and infinity, for example, are no JSON to it; a sixth of the time where it can.
        data = _known(json.loads(line), cls)
        data["ledger"] = Ledger(**_known(data.get("ledger", {}), Ledger))
        data["memory"] = [MemoryMark(*mark[: len(MemoryMark._fields)]) for mark in data.get("memory", ())]
        data["timeline"] = [Span(*span[: len(Span._fields)]) for span in data.get("timeline", ())]
        return cls(**data)


RECORDS = msgspec.json.Decoder(StepRecord)
"""Of lines whose values are of the kinds that a record's fields have; raises msgspec.MsgspecError for others."""


def _lines_of(timeline: list[Span]) -> list[tuple[str, int, int, float, float]]:
    """Spans to a microsecond; of very many, the longest."""
    kept = timeline
    if len(timeline) > MOST_SPANS:
        longest = nlargest(MOST_SPANS, range(len(timeline)), key=lambda i: timeline[i].seconds)
        kept = [timeline[i] for i in sorted(longest)]
    return [(*span[:3], round(span.start, 6), round(span.seconds, 6)) for span in kept]


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened to a run at a step: a change of stage, a checkpoint, a pause, a warning, an error.

    kind: started, paused, resumed, reshaped, compressed, checkpoint, evaluated, proof, interrupted, finished, stopped,
    failed, recovering, warning.
    `command` is the number of the control word it answers, when it answers one.
    """

    kind: str
    step: int
    time: float
    text: str = ""
    command: int | None = None
    details: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str | bytes) -> Event:
        """Raises ValueError, TypeError or RecursionError for what is no event."""
        event = cls(**_known(json.loads(line), cls))
        right = isinstance(event.kind, str) and isinstance(event.text, str) and isinstance(event.details, dict)
        if not right or type(event.step) is not int or type(event.time) not in (int, float):
            raise TypeError(f"event {event.kind!r} at step {event.step!r} has fields of the wrong kind")
        if event.command is not None and type(event.command) is not int:
            raise TypeError(f"command is {event.command!r}, not a number")
        return event


def _known(data: dict[str, Any], kind: type[Any]) -> dict[str, Any]:
    """Without the fields that a later version may have written."""
    names = kind.__dataclass_fields__
    if not isinstance(data, dict):
        raise TypeError(f"a {type(data).__name__}, expected an object")
    return data if data.keys() <= names.keys() else {name: data[name] for name in names if name in data}


assert {f.name for f in fields(Ledger)} >= set(CATEGORIES)
