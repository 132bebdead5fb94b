"""Step records, memory ledgers and events: what a rank reports.

Plain data without torch, so that any script can read it. A step record is one JSON line in
`runs/<name>/records/rank-<r>.jsonl`. Sizes are in bytes, times in seconds.
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
"""Ledger categories in the order in which plots stack them, bottom to top."""

PHASES = ("data", "forward", "backward", "communication", "offload", "optimizer")
"""Phases of a step. `communication` and `offload` are the time in which a rank waited, for its peers and for the host's
memory or the disk: the part that computation did not hide. The other phases exclude this time.
"""

PLACES = ("device", "host", "disk")
"""Where a state can be between two uses."""


MOST_SPANS = 8192
"""Maximum number of spans written per step: a line of a record file is limited, and no plot shows more."""


class RunState(StrEnum):
    """State of a run."""

    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


RESTING = frozenset({RunState.PAUSED, RunState.FINISHED, RunState.STOPPED, RunState.FAILED})
"""States in which no rank advances until a command requests it."""


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Bytes on one rank at the peak of a step, by category.

    The categories sum to `reported_bytes`, which the allocator (CUDA) or the operating system (CPU) reports. On CPU,
    `host` is included, because it is the same memory there. `other_framework` is the remainder, so it can be negative
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
    """Category -> bytes in the host's memory. Its buffers are those for transfers to and from the disk."""
    disk: dict[str, int] = field(default_factory=dict)
    """Category -> bytes on disk."""
    host_capacity_bytes: int = 0
    """This rank's share of the host's memory; on CPU equal to that of the device."""
    disk_capacity_bytes: int = 0
    """This rank's share of the free disk space, including its own files; 0 if it has none there."""

    @property
    def model_states(self) -> int:
        """Bytes of parameters, gradients, master weights and moments: the model states of the ZeRO paper."""
        return self.parameters + self.gradients + self.master_weights + self.optimizer_moments

    def by_place(self) -> dict[str, dict[str, int]]:
        """Return place (device, host, disk) → category → bytes, in the order of CATEGORIES, without empty places."""
        device = {name: getattr(self, name) for name in CATEGORIES}
        away = {"host": self.host, "disk": self.disk}
        ordered = {place: {name: held[name] for name in CATEGORIES if held.get(name)} for place, held in away.items()}
        return {"device": device} | {place: held for place, held in ordered.items() if held}

    def anywhere(self, category: str) -> int:
        """Return the bytes of a category, summed over all places.

        Args:
            category: One of CATEGORIES.
        """
        return sum(held.get(category, 0) for held in self.by_place().values())

    def capacity_of(self, place: str) -> int:
        """Return the bytes that this rank may use at a place; 0 if unknown.

        Args:
            place: One of PLACES.
        """
        capacities = (self.capacity_bytes, self.host_capacity_bytes, self.disk_capacity_bytes)
        return capacities[PLACES.index(place)]


class Span(NamedTuple):
    """One action of a pipeline rank. `start` is in seconds after the step's `began`."""

    action: str
    """F, B (whole backward), I and W (its halves: gradients of inputs, of weights), wait, send, reduce, optimizer."""
    stage: int
    """-1 if the action belongs to no single stage."""
    micro_batch: int
    """-1 if the action belongs to no single micro-batch."""
    start: float
    seconds: float


class MemoryMark(NamedTuple):
    """Allocated memory at one moment of a step."""

    phase: str
    """The phase that has just ended; `start` before the first one."""
    seconds: float
    """After the step began."""
    bytes: int
    """On a GPU, the bytes of tensors; on CPU, those of the process's heap and shared memory."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step on one rank.

    Attributes:
        loss: Mean over the global batch.
        tokens: Tokens in the global batch.
        counted_tokens: Targets that count in the loss; 0 if the loss is a mean over micro-batches.
        flops: This rank's share of the model's floating-point operations, without recomputation.
        traced: Whether `ledger.activations` was measured exactly in this step, not carried over.
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
    """The same by link: collective → link (shared memory, gloo, nccl, …) → bytes."""
    moved_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes moved to and from host and disk, by kind: 'disk read', 'disk write', 'host copy'."""
    exchange: dict[str, float] = field(default_factory=dict)
    """Values of a step that sends other data than float32 gradients.

    - A compressing optimizer (1-bit Adam and relatives): `compressed` (0 or 1), `steadiness` of the variance if
      measured, `sent_bytes` and the `float32_bytes` that these replace, `error_norm` of this rank's error feedback,
      and the `angle` (degrees) between the actual update and the update without compression, if measured.
    - 0/1 Adam also: `variance_updated` (1) after its warm-up, and `steps_to_exchange` if ranks make local steps.
    - ZeRO++: `compressed`, `sent_bytes`, `float32_bytes`.
    - Islands: `met` (0 or 1), `steps_to_meeting`, `sent_bytes` to other islands, `float32_bytes`, and `error_norm` if
      compressed.
    """
    kernels: dict[str, dict[str, float]] = field(default_factory=dict)
    """By kernel: calls, bytes (the minimum that the kernel reads and writes), seconds on its device."""
    ledger: Ledger = field(default_factory=Ledger)
    heldout_loss: float | None = None
    traced: bool = False
    began: float = 0.0
    """When the step began on this rank, in seconds since 1970: the origin of `timeline`."""
    timeline: list[Span] = field(default_factory=list)
    """Actions of a pipeline rank, in order; empty without a pipeline."""
    memory: list[MemoryMark] = field(default_factory=list)
    """Memory over the time of the step, in order. Recorded in about one step per second; empty in the others."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the global batch per second."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    def to_json(self) -> str:
        """Return the record as one line of JSON."""
        # The fields are plain data, so `__dict__` is enough: `asdict` copies everything and takes five times as long.
        values = {**self.__dict__, "ledger": self.ledger.__dict__}
        if self.timeline:
            values["timeline"] = _lines_of(self.timeline)
        return json.dumps(values, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str | bytes) -> StepRecord:
        """Parse a record. Fields of later versions are ignored.

        Args:
            line: One line of JSON.

        Raises:
            ValueError, TypeError, RecursionError: The line is no record.
        """
        try:
            return RECORDS.decode(line)
        except msgspec.MsgspecError:
            pass  # msgspec takes a sixth of json's time, but refuses NaN and infinity, for example.
        data = _known(json.loads(line), cls)
        data["ledger"] = Ledger(**_known(data.get("ledger", {}), Ledger))
        data["memory"] = [MemoryMark(*mark[: len(MemoryMark._fields)]) for mark in data.get("memory", ())]
        data["timeline"] = [Span(*span[: len(Span._fields)]) for span in data.get("timeline", ())]
        return cls(**data)


RECORDS = msgspec.json.Decoder(StepRecord)
"""Fast decoder. Raises msgspec.MsgspecError if a value has another type than its field."""


def _lines_of(timeline: list[Span]) -> list[tuple[str, int, int, float, float]]:
    """Round spans to a microsecond; above MOST_SPANS, keep the longest."""
    kept = timeline
    if len(timeline) > MOST_SPANS:
        longest = nlargest(MOST_SPANS, range(len(timeline)), key=lambda i: timeline[i].seconds)
        kept = [timeline[i] for i in sorted(longest)]
    return [(*span[:3], round(span.start, 6), round(span.seconds, 6)) for span in kept]


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened to a run at a step: a change of stage, a checkpoint, a pause, a warning, an error.

    Attributes:
        kind: started, paused, resumed, reshaped, compressed, checkpoint, evaluated, proof, interrupted, finished,
            stopped, failed, recovering, warning.
        command: Number of the command that the event answers, if any.
    """

    kind: str
    step: int
    time: float
    text: str = ""
    command: int | None = None
    details: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the event as one line of JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str | bytes) -> Event:
        """Parse an event. Fields of later versions are ignored.

        Args:
            line: One line of JSON.

        Raises:
            ValueError, TypeError, RecursionError: The line is no event.
        """
        event = cls(**_known(json.loads(line), cls))
        right = isinstance(event.kind, str) and isinstance(event.text, str) and isinstance(event.details, dict)
        if not right or type(event.step) is not int or type(event.time) not in (int, float):
            raise TypeError(f"event {event.kind!r} at step {event.step!r} has fields of the wrong kind")
        if event.command is not None and type(event.command) is not int:
            raise TypeError(f"command is {event.command!r}, not a number")
        return event


def _known(data: dict[str, Any], kind: type[Any]) -> dict[str, Any]:
    """Return `data` without the fields that a later version may have written."""
    names = kind.__dataclass_fields__
    if not isinstance(data, dict):
        raise TypeError(f"a {type(data).__name__}, expected an object")
    return data if data.keys() <= names.keys() else {name: data[name] for name in names if name in data}


assert {f.name for f in fields(Ledger)} >= set(CATEGORIES)
