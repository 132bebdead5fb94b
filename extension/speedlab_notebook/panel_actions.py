"""What the panel can do with a run, and how it follows one: words, differences, answers, and a thread that looks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from speedlab.cluster.going_on import unsaved_text
from speedlab.config import RunConfig
from speedlab.display.text import bytes_text, count_text, seconds_text
from speedlab.telemetry.marks import STATE_MARKS
from speedlab.telemetry.records import Event, RunState
from speedlab.telemetry.shape import CHANGES, differences, present_config, shape_of

if TYPE_CHECKING:
    from speedlab.cluster import Run

BUSY_LOOK_SECONDS = 0.2
RESTING_LOOK_SECONDS = 1.0
"""A paused run may be resumed from a cell or another kernel."""

_NAMES = {"zero": "stage", "micro_batches": "micro-batches"}
_SHAPE = {"zero.stage", *(f"parallel.{name}" for name in CHANGES)}
_MOST_SHOWN = 4
_WORTH_TELLING = 1e-3
"""Seconds; a pause, which only sets a flag, took less."""
ENDED = frozenset({RunState.FINISHED, RunState.STOPPED, RunState.FAILED})
_UNDER_WAY = frozenset({RunState.STARTING, RunState.RUNNING, RunState.PAUSED})

WORDS: dict[str, tuple[frozenset[RunState], str]] = {
    "pause": (frozenset({RunState.STARTING, RunState.RUNNING}), "Stop after the step that is being computed"),
    "resume": (frozenset({RunState.PAUSED, RunState.STOPPED}), "Go on from where the run stands"),
    "step": (frozenset({RunState.PAUSED}), "Compute so many more steps, then pause"),
    "save": (
        frozenset({RunState.RUNNING, RunState.PAUSED, RunState.FINISHED, RunState.STOPPED}),
        "Write a checkpoint after the step that is being computed",
    ),
    "stop": (_UNDER_WAY, "End the run after the step that is being computed"),
    "reshape": (_UNDER_WAY - {RunState.STARTING}, "Change the stage or layout of the run between two steps"),
}
"""Control word -> the states of a run in which it is offered, and what it does."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One field in which the panel differs from the run that is under way."""

    path: str
    before: Any
    after: Any
    live: bool = False
    """Whether it can be applied between two steps; `path` is then one of `run.reshape`'s words."""

    def __str__(self) -> str:
        kind = ("live, under 1 s" if self.path == "zero" else "live") if self.live else "needs a restart"
        name = _NAMES.get(self.path, self.path).replace("_", " ")
        return f"{name} {_shown(self.before)} → {_shown(self.after)} ({kind})"


def changes(running: RunConfig, wanted: RunConfig, engines: int) -> list[Change]:
    """Where `wanted` differs from a run on `engines` engines that is of `running` now; what is live first. Its name and
    folder are not part of the comparison: they are the next run's."""
    shape = shape_of(running, engines)
    live = differences(running, wanted, engines)
    if live.keys() & {"islands", "tp", "pp", "cp"}:
        live.pop("dp", None)  # It follows.
    found = [Change(path=name, before=shape[name], after=value, live=True) for name, value in live.items()]
    before, after = _flat(running, engines), _flat(wanted, engines)
    return found + [
        Change(path=path, before=before[path], after=after[path]) for path in after if before[path] != after[path]
    ]


def reshaping(found: Sequence[Change]) -> dict[str, Any]:
    """What `run.reshape` is to be given for the changes that are live."""
    return {change.path: change.after for change in found if change.live}


def changes_line(found: Sequence[Change]) -> str:
    """'changed: stage 2 → 3 (live, under 1 s) · steps 200 → 400 (needs a restart)'; '' when nothing differs."""
    if not found:
        return ""
    more = [f"{len(found) - _MOST_SHOWN} more"] if len(found) > _MOST_SHOWN else []
    hint = "; Stop, then Train takes what needs a restart" if not all(change.live for change in found) else ""
    return f"changed: {' · '.join([*map(str, found[:_MOST_SHOWN]), *more])}{hint}"


def live_config(run: Run, began_as: RunConfig, engines: int) -> RunConfig:
    """What `run` began as, with the shape that it has now: by its newest change, or a newer record's stage."""
    config, last = present_config(began_as, run.feed.events, engines), run.feed.last
    changed = next((event.time for event in reversed(run.feed.events) if event.kind == "reshaped"), float("-inf"))
    return config.replace(zero={"stage": last.zero_stage}) if last is not None and last.time > changed else config


def live_batch(running: RunConfig, engines: int) -> dict[str, Any]:
    """The batch fields of a form that shows a run: the global batch stays when the layout changes, and the number of
    micro-batches follows."""
    batch = running.batch.resolve(running.layout(engines, built_in=False).data_size)
    return {
        "batch.global_size": batch.global_size,
        "batch.micro_size": batch.micro_size,
        "batch.accumulation": None,
    }


def run_line(run: Run) -> str:
    """'● running: step 120 of 2,000 · loss 5.91 · 41.2 k tokens/s', and what of a run that has ended is not saved."""
    state, last = run.state, run.feed.last
    figures = f" · loss {last.loss:.3f} · {count_text(last.tokens_per_second)} tokens/s" if last is not None else ""
    line = f"{STATE_MARKS[state]} {run.name} {state}: step {run.step:,} of {run.feed.status.steps:,}{figures}"
    return " · ".join(filter(None, [line, unsaved_text(run)]))


def answer_line(event: Event) -> str:
    """What the ranks answered to a control word: 'checkpoint step-000120, 36.1 MiB, at step 120 in 0.2 s'."""
    size, seconds = event.details.get("bytes"), event.details.get("seconds")
    parts = [f"{event.kind} {event.text}".strip()]
    if isinstance(size, int | float):
        parts.append(bytes_text(size))
    where = f"at step {event.step:,}" if "step" not in event.text else ""
    took = f"in {seconds_text(seconds)}" if isinstance(seconds, int | float) and seconds >= _WORTH_TELLING else ""
    return ", ".join(parts) + "".join(f" {part}" for part in (where, took) if part)


class Watch:
    """Calls `look` in a thread of its own, again after the seconds that it returns, until it returns None."""

    def __init__(self, look: Callable[[], float | None]) -> None:
        self._look = look
        self._wake = threading.Event()
        self._closed = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        """Whether the thread is at work."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Look at once, and go on; also after it had ended."""
        with self._lock:
            self._wake.set()
            if not self._closed and self._thread is None:
                self._thread = threading.Thread(target=self._work, name="speedlab-panel", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the thread, for good."""
        with self._lock:
            self._closed = True
            self._wake.set()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=2.0)

    def _work(self) -> None:
        while True:
            self._wake.clear()
            seconds = self._look()
            with self._lock:
                # One decision: whoever starts it later finds no thread, whoever did before has set the event.
                if self._closed or (seconds is None and not self._wake.is_set()):
                    self._thread = None
                    return
            self._wake.wait(seconds)


def _flat(config: RunConfig, engines: int) -> dict[str, Any]:
    """Every field by path, but those of the shape; of the batch, the global one."""
    flat: dict[str, Any] = {}
    for name, value in config.model_dump().items():
        if name in ("name", "folder", "batch"):
            continue
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}": item for inner, item in value.items()}
        else:
            flat[name] = value
    kept = {path: value for path, value in flat.items() if path not in _SHAPE}
    shares = config.layout(engines, built_in=False).data_size
    return kept | {"batch.global_size": config.batch.resolve(shares).global_size}


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
