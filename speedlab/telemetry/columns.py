"""Step records of one rank in columns: some 400 bytes a record instead of the five thousand of Python's objects.

The numbers of a record stand in a row of float64, in an order that its shape says: which phases, collectives, kernels
and places it names. A run has few shapes.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Mapping
from itertools import chain, islice
from typing import Any, NamedTuple

from speedlab.telemetry.records import Ledger, MemoryMark, Span, StepRecord

TIMELINES = 256
"""Steps whose timelines, and whose marks of memory, are kept in memory; those of earlier ones are in the files."""

_WHOLE = ("step", "zero_stage", "tokens")
_REAL = ("time", "loss", "learning_rate", "grad_norm", "loss_scale", "flops", "seconds", "began")
_LEDGER = tuple(name for name in Ledger.__dataclass_fields__ if name not in ("host", "disk"))


class _Shape(NamedTuple):
    """What a record names, in the order of its row."""

    heldout: bool
    traced: bool
    phases: tuple[str, ...]
    sent_bytes: tuple[str, ...]
    moved_bytes: tuple[str, ...]
    exchange: tuple[str, ...]
    host: tuple[str, ...]
    disk: tuple[str, ...]
    sent_through: tuple[tuple[str, tuple[str, ...]], ...]
    kernels: tuple[tuple[str, tuple[str, ...]], ...]


class Columns:
    """Records of one rank in the order of their steps."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._values, self._starts = array("d"), array("q")
        self._steps, self._kinds = array("q"), array("i")
        self._shapes: dict[_Shape, int] = {}
        self._by_kind: list[_Shape] = []
        self._timelines: dict[int, list[Span]] = {}
        self._memory: dict[int, list[MemoryMark]] = {}
        self.heldout: list[tuple[int, float]] = []
        """(step, held-out loss), in order."""

    def __len__(self) -> int:
        return len(self._steps)

    def append(self, record: StepRecord) -> None:
        """Take in a record. Those of its step and of later ones go: the run went back to a checkpoint, and computes
        them again."""
        row = array("d", _row_of(record))  # What cannot be in it changes nothing.
        self._cut(record.step)
        if (kind := self._shapes.get(shape := _shape_of(record))) is None:
            kind = self._shapes[shape] = len(self._by_kind)
            self._by_kind.append(shape)
        self._starts.append(len(self._values))
        self._values.extend(row)
        self._kinds.append(kind)
        self._steps.append(record.step)
        if record.heldout_loss is not None:
            self.heldout.append((record.step, record.heldout_loss))
        if record.timeline:
            _keep(self._timelines, record.step, record.timeline)
        if record.memory:
            _keep(self._memory, record.step, record.memory)

    def __getitem__(self, index: int) -> StepRecord:
        """The record at `index`, 0 or more, made anew."""
        shape, step = self._by_kind[self._kinds[index]], self._steps[index]
        stop = self._starts[index + 1] if index + 1 < len(self._starts) else len(self._values)
        numbers = iter(self._values[self._starts[index] : stop])
        values: dict[str, Any] = {name: int(next(numbers)) for name in _WHOLE}
        values |= zip(_REAL, numbers)  # noqa: B905 - zip asks names first: it takes no number too many.
        if shape.heldout:
            values["heldout_loss"] = next(numbers)
        ledger: dict[str, Any] = {name: int(next(numbers)) for name in _LEDGER}
        ledger |= {place: _whole(getattr(shape, place), numbers) for place in ("host", "disk")}
        return StepRecord(
            **values,
            rank=self._rank,
            traced=shape.traced,
            phases=dict(zip(shape.phases, numbers)),  # noqa: B905
            sent_bytes=_whole(shape.sent_bytes, numbers),
            moved_bytes=_whole(shape.moved_bytes, numbers),
            exchange=dict(zip(shape.exchange, numbers)),  # noqa: B905
            sent_through={name: _whole(links, numbers) for name, links in shape.sent_through},
            kernels={name: dict(zip(uses, numbers)) for name, uses in shape.kernels},  # noqa: B905
            ledger=Ledger(**ledger),
            timeline=self._timelines.get(step, []),
            memory=self._memory.get(step, []),
        )

    def place_of(self, step: int) -> int:
        """The index of the first record of `step` or a later one."""
        return bisect_left(self._steps, step)

    def _cut(self, step: int) -> None:
        if not self._steps or self._steps[-1] < step:
            return
        first = self.place_of(step)
        del self._values[self._starts[first] :]
        for column in (self._starts, self._steps, self._kinds):
            del column[first:]
        self.heldout = [point for point in self.heldout if point[0] < step]
        self._timelines = {known: spans for known, spans in self._timelines.items() if known < step}
        self._memory = {known: marks for known, marks in self._memory.items() if known < step}


def _keep(found: dict[int, Any], step: int, value: Any) -> None:
    found[step] = value
    if len(found) > TIMELINES:
        del found[next(iter(found))]


def _shape_of(record: StepRecord) -> _Shape:
    return _Shape(
        record.heldout_loss is not None,
        record.traced,
        tuple(record.phases),
        tuple(record.sent_bytes),
        tuple(record.moved_bytes),
        tuple(record.exchange),
        tuple(record.ledger.host),
        tuple(record.ledger.disk),
        _names_of(record.sent_through),
        _names_of(record.kernels),
    )


def _row_of(record: StepRecord) -> chain[float]:
    values, ledger = record.__dict__, record.ledger
    return chain(
        [values[name] for name in _WHOLE],
        [values[name] for name in _REAL],
        () if record.heldout_loss is None else (record.heldout_loss,),
        [ledger.__dict__[name] for name in _LEDGER],
        ledger.host.values(),
        ledger.disk.values(),
        record.phases.values(),
        record.sent_bytes.values(),
        record.moved_bytes.values(),
        record.exchange.values(),
        *(links.values() for links in record.sent_through.values()),
        *(use.values() for use in record.kernels.values()),
    )


def _names_of(costs: Mapping[str, Mapping[str, float]]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return tuple((name, tuple(parts)) for name, parts in costs.items()) if costs else ()


def _whole(names: tuple[str, ...], numbers: Any) -> dict[str, int]:
    return {name: int(number) for name, number in zip(names, islice(numbers, len(names)), strict=True)}
