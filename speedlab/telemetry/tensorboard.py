"""Scalars of a run as a TensorBoard event file, where tensorboard is installed. Neither TensorFlow nor torch."""

from __future__ import annotations

import importlib.util
import os
import socket
import time
from pathlib import Path

from speedlab.telemetry.records import CATEGORIES, StepRecord

_INTERVAL_SECONDS = 0.1
_FLUSH_SECONDS = 2.0


def installed() -> bool:
    """Whether tensorboard is there; looks, but does not import it."""
    return importlib.util.find_spec("tensorboard") is not None


class TensorBoardFile:
    """One event file in `directory`: loss, learning rate, gradient norm, tokens/s and memory by category of rank 0.

    tensorboard computes its checksums in Python, 0.1 ms a step, so quick steps are sampled at 10 Hz; steps with a
    held-out loss are always written. The file is flushed every 2 s, at events and at the end.
    """

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue] - generated
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue] - generated
        from tensorboard.summary.writer.record_writer import RecordWriter

        directory.mkdir(mode=0o700, exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._Event, self._Summary = Event, Summary
        # tensorboard's EventFileWriter would import TensorFlow where that is installed; the framing alone does not.
        self._file = RecordWriter(open(directory / name, "xb"))  # noqa: SIM115 - closed in close(), lives as long as the run
        self._file.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
        self._due = self._flush_due = 0.0

    def add(self, record: StepRecord) -> None:
        """Write a record's scalars, unless the last ones were written less than 0.1 s ago."""
        now = time.monotonic()
        if now < self._due and record.heldout_loss is None:
            return
        self._due = now + _INTERVAL_SECONDS
        summary = self._Summary()
        for tag, value in _scalars(record).items():
            summary.value.add(tag=tag, simple_value=value)
        self._file.write(self._Event(wall_time=record.time, step=record.step, summary=summary).SerializeToString())
        if now >= self._flush_due:
            self._flush_due = now + _FLUSH_SECONDS
            self._file.flush()

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _scalars(record: StepRecord) -> dict[str, float]:
    """Tag -> value; units are in the tags."""
    scalars = {
        "train/loss": record.loss,
        "train/learning_rate": record.learning_rate,
        "train/grad_norm": record.grad_norm,
        "speed/tokens_per_second": record.tokens_per_second,
    }
    if record.heldout_loss is not None:
        scalars["train/heldout_loss"] = record.heldout_loss
    for category in CATEGORIES:
        scalars[f"memory_gib/{category}"] = getattr(record.ledger, category) / 2**30
    for place, held in record.ledger.by_place().items():
        if place != "device":
            scalars[f"memory_gib/on_{place}"] = sum(held.values()) / 2**30
    return scalars
