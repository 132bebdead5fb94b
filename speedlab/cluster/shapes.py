"""A run on another number of engines: the configuration that fits them, and the note of the change in its folder."""

from __future__ import annotations

import time
from collections.abc import Sequence

from speedlab.cluster.own_model import OWN_MODEL
from speedlab.config import RunConfig
from speedlab.planner import parameter_count
from speedlab.telemetry.folder import RunFolder
from speedlab.telemetry.records import Event
from speedlab.telemetry.shape import changed_config, present_config, shape_of
from speedlab.telemetry.writer import note


def is_built_in(folder: RunFolder, events: Sequence[Event]) -> bool:
    """Whether the model is the GPT of the configuration, so that its shape says which layouts there are."""
    said = next((event.details for event in events if event.kind == "started"), {})
    count = parameter_count(folder.config.model)
    return not (folder.path / OWN_MODEL).exists() and said.get("parameters", count) == count


def shapes_on(folder: RunFolder, had: int, engines: int) -> tuple[RunConfig, RunConfig]:
    """The configuration as the run has it on `had` engines, and as it would go on, on `engines`: the same but for dp,
    with the same global batch. Raises ConfigError or LayoutError, with the nearest layouts, where it cannot."""
    events = folder.read_events()
    before = present_config(folder.config, events, had)
    return before, changed_config(before, engines, before=had, built_in=is_built_in(folder, events))


def change_shape(
    folder: RunFolder, before: RunConfig, had: int, after: RunConfig, engines: int, *, step: int, started: float
) -> None:
    """Write down that the run goes on as `after` on another number of engines. Only while no rank advances it.

    `started`: when the change began, of `time.perf_counter`."""
    folder.update_config(after)
    shapes = {"before": shape_of(before, had), "after": shape_of(after, engines)}
    text = f"{had} → {engines} engines, {before.layout(had, built_in=False)} → {after.layout(engines, built_in=False)}"
    details = {**shapes, "through": "run folder", "seconds": time.perf_counter() - started}
    note(folder, Event(kind="reshaped", step=step, time=time.time(), text=text, details=details))
