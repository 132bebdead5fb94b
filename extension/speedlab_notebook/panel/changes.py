"""Texts for changes: differences to the active run, the effect of the last change, notes next to fields, the summary.

1. `changes` compares a panel's configuration with the active run: each difference is live or needs a restart.
2. `effect_text` describes how a change moved memory, speed and placement.
3. `show_notes` and `summary_parts` give the notes next to the fields and the line below the tabs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from speedlab.config import RunConfig
from speedlab.display.figure_style import LABELS
from speedlab.display.formatting import bytes_text, count_text
from speedlab.hardware import Device
from speedlab.placement import MemoryKind, Replication
from speedlab.planner.memory.offload import state_places, state_widths, zero_policy_of
from speedlab.telemetry.current_config import CHANGES, differences, present_config, shape_of
from speedlab_notebook.panel.disabled_reasons import bubble_text, greyed_fields, greyed_options, remarks, sizes
from speedlab_notebook.panel.fields import Field, FormValues
from speedlab_notebook.panel.prediction import PanelPrediction, fit_text, speed_text

if TYPE_CHECKING:
    from speedlab.cluster import Cluster, Run


_NAMES = {"zero": "stage", "micro_batches": "micro-batches"}
_FIELDS = {"zero": "zero.stage", "micro_batches": "batch.accumulation"}
"""Argument of `run.reshape` -> path of its field, if that path is not `parallel.` plus the argument."""
_PLACES = {"offload.optimizer", "offload.parameters"}
_SHAPE = {"zero.stage", *_PLACES, *(f"parallel.{name}" for name in CHANGES)}
_MOST_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class PendingChange:
    """One field in which the panel differs from the active run."""

    path: str
    before: Any
    after: Any
    live: bool = False
    """Whether the change can be applied between two steps; `path` is then an argument of `run.reshape`."""

    def __str__(self) -> str:
        reported = [f"{path} {_shown(before)} → {_shown(after)}" for path, before, after in self._parts()]
        return f"{', '.join(reported)} ({self.when})"

    @property
    def when(self) -> str:
        """'live', or 'needs a restart'."""
        return ("live, under 1 s" if self.path == "zero" else "live") if self.live else "needs a restart"

    @property
    def marks(self) -> dict[str, str]:
        """Path of a field -> the mark next to its control, for example 'the run has 2 · live'."""
        if self.path == "offload":
            return {f"offload.{name}": self._mark(self.before[name]) for name in self._moved}
        field = _FIELDS.get(self.path, f"parallel.{self.path}" if self.live else self.path)
        return {field: self._mark(self.before)}

    def _mark(self, before: Any) -> str:
        return f"the run has {_shown(before)} · {self.when}"

    @property
    def _moved(self) -> list[str]:
        return [name for name in self.before if self.before[name] != self.after[name]]

    def _parts(self) -> list[tuple[str, Any, Any]]:
        if self.path == "offload":
            return [(f"offload {name}", self.before[name], self.after[name]) for name in self._moved]
        return [(_NAMES.get(self.path, self.path).replace("_", " "), self.before, self.after)]


def changes(running: RunConfig, wanted: RunConfig, engines: int) -> list[PendingChange]:
    """Return the differences between a run and a configuration, live changes first.

    The run's name and folder are not compared, because they belong to the next run.

    Args:
        running: The run's present configuration.
        wanted: The configuration of the panel.
        engines: The number of engines of the run.
    """
    shape = shape_of(running, engines)
    live = differences(running, wanted, engines)
    if live.keys() & {"islands", "tp", "pp", "cp"}:
        live.pop("dp", None)  # dp follows from the other axes.
    found = [PendingChange(path=name, before=shape[name], after=value, live=True) for name, value in live.items()]
    before, after = _flat(running, engines), _flat(wanted, engines)
    return found + [
        PendingChange(path=path, before=before[path], after=after[path])
        for path in after
        if before[path] != after[path]
    ]


def reshaping(found: Sequence[PendingChange]) -> dict[str, Any]:
    """Return the keyword arguments of `run.reshape` that apply the live changes.

    Args:
        found: The result of `changes`.
    """
    return {change.path: change.after for change in found if change.live}


def changes_line(found: Sequence[PendingChange]) -> str:
    """Return the differences as one line, at most 4 of them.

    Args:
        found: The result of `changes`.

    Returns:
        For example 'changed: stage 2 → 3 (live, under 1 s) · steps 200 → 400 (needs a restart)'; '' if there are none.
    """
    if not found:
        return ""
    more = [f"{len(found) - _MOST_SHOWN} more"] if len(found) > _MOST_SHOWN else []
    hint = "; Stop, then Train takes what needs a restart" if not all(change.live for change in found) else ""
    return f"changed: {' · '.join([*map(str, found[:_MOST_SHOWN]), *more])}{hint}"


def live_config(run: Run, began_as: RunConfig, engines: int) -> RunConfig:
    """Return the run's first configuration with the present ZeRO stage and layout.

    The newest `reshaped` event gives the shape; a newer step record gives the stage.

    Args:
        run: The run, for its events and its last record.
        began_as: The configuration with which the run began.
        engines: The number of engines of the run.
    """
    config, last = present_config(began_as, run.feed.events, engines), run.feed.last
    changed = next((event.time for event in reversed(run.feed.events) if event.kind == "reshaped"), float("-inf"))
    return config.replace(zero={"stage": last.zero_stage}) if last is not None and last.time > changed else config


def live_batch(running: RunConfig, engines: int) -> dict[str, Any]:
    """Return the batch fields of a form that shows a run.

    The global batch stays when the layout changes, and the number of micro-batches follows.

    Args:
        running: The run's present configuration.
        engines: The number of engines of the run.

    Returns:
        Path of a field -> its value; the accumulation is None, because it follows.
    """
    batch = running.batch.resolve(running.layout(engines, built_in=False).data_size)
    return {
        "batch.global_size": batch.global_size,
        "batch.micro_size": batch.micro_size,
        "batch.accumulation": None,
    }


def marks(found: Sequence[PendingChange]) -> dict[str, str]:
    """Return the marks of all changes: path of a field -> how the field differs from the run.

    Args:
        found: The result of `changes`.
    """
    reported: dict[str, str] = {}
    for change in found:
        reported |= change.marks
    return reported


def _flat(config: RunConfig, engines: int) -> dict[str, Any]:
    """Return every field by path, without the fields of the shape; of the batch, only the global size."""
    flat = _by_path(config.model_dump(exclude={"name", "folder", "batch"}))
    kept = {path: value for path, value in flat.items() if path not in _SHAPE}
    shares = config.layout(engines, built_in=False).data_size
    return kept | {"batch.global_size": config.batch.resolve(shares).global_size}


def _by_path(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _by_path(value, f"{before}{name}.") if isinstance(value, dict) else {f"{before}{name}": value}
    return flat


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


_SAME = 5e-4
"""Relative change below which a number counts as unchanged."""
_HALF = 0.5
"""Below this ratio (and above its inverse) the change is shown as a factor instead of a percentage."""
_STATES = {"parameters": "parameter", "gradients": "gradient", "optimizer_moments": "optimizer_state"}


def effect_text(before: PanelPrediction, after: PanelPrediction) -> str:
    """Describe how a change moved memory, speed, layout and placement.

    Args:
        before: The prediction before the change.
        after: The prediction after the change.

    Returns:
        For example 'a rank holds 19.9 MiB → 13.7 MiB (-31.2%) · parameters: whole on every rank → 1/4 a rank'.
    """
    held = _held(before), _held(after)
    speed = before.plan.time.tokens_per_second, after.plan.time.tokens_per_second
    parts = []
    if share := _share(*held):
        parts.append(f"a rank holds {bytes_text(held[0])} → {bytes_text(held[1])} ({share})")
    if share := _share(*speed):
        parts.append(f"{count_text(speed[0])} → {count_text(speed[1])} tokens/s ({share})")
    was, now = before.plan.setup.layout, after.plan.setup.layout
    if was != now:
        parts.append(f"layout {was} → {now}")
    old, new = _placed(before), _placed(after)
    parts += [f"{LABELS[name]}: {old[name]} → {new[name]}" for name in old if old[name] != new[name]]
    return " · ".join(parts) or "memory, speed and placement stay as they are"


def _held(prediction: PanelPrediction) -> int:
    """Return the bytes of the rank that holds most."""
    return prediction.heaviest[prediction.stage].total


def _share(before: float, after: float) -> str:
    """Return '+12.0%' or '3.1 times as much'; '' if the number is unchanged."""
    ratio = after / before
    if abs(ratio - 1) <= _SAME:
        return ""
    return f"{ratio - 1:+.1%}" if _HALF <= ratio < 1 / _HALF else f"{ratio:.2g} times as much"


def _placed(prediction: PanelPrediction) -> dict[str, str]:
    """Return state -> the share that each rank holds, and the place: '1/4 a rank, disk'."""
    setup, device = prediction.plan.setup, "cpu" if prediction.plan.machines.device.on_host else "cuda"
    zero_policy, ranks = zero_policy_of(setup, device), setup.layout.replicas
    widths, places = state_widths(setup, device), state_places(zero_policy)
    found = {}
    for name, state in _STATES.items():
        part = f"1/{ranks} a rank" if zero_policy.of(state) is Replication.PARTITIONED else "whole on every rank"
        where = "" if places[name] is MemoryKind.DEVICE else f", {places[name].value}"
        found[name] = f"{part}{where}" if widths[name] else "none"
    return found


_AXES = ("parallel.islands", "parallel.tp", "parallel.pp", "parallel.cp")


def show_notes(
    fields: Mapping[str, Field],
    reading: FormValues,
    devices: Sequence[Device],
    prediction: PanelPrediction | None,
    marks: Mapping[str, str],
) -> dict[str, str]:
    """Update the note next to each field.

    A note shows the problem, the reason for being disabled, the meaning of the value, or the difference to the run.

    Args:
        fields: The form's fields by path; their notes are changed.
        reading: The values of the controls with their problems.
        devices: One device for each rank.
        prediction: The prediction of the last valid configuration.
        marks: Path of a field -> how the field differs from the run.

    Returns:
        Path of a field -> its problem.
    """
    problems: dict[str, str] = {}
    for path, text in reading.problems:
        problems[path] = f"{problems[path]}; {text}" if path in problems else text
    values = {path: field.get() for path, field in fields.items()}
    sound = reading.config if not reading.problems else None
    for axis in _AXES:
        fields[axis].offer(sizes(len(devices)))
    if reading.batch is not None:
        for name in ("global_size", "micro_size", "accumulation"):
            fields[f"batch.{name}"].placeholder = f"follows: {getattr(reading.batch, name)}"
    reasons, options = greyed_fields(values, devices), greyed_options(values, reading.config, devices)
    more = remarks(values, devices, sound, options, prediction.plan if prediction and sound else None)
    for path, field in fields.items():
        field.show(
            reason=reasons.get(path, ""),
            problem=problems.get(path, ""),
            more=more.get(path, ""),
            mark=marks.get(path, ""),
            greyed=options.get(path),
        )
    return problems


def engines_text(cluster: Cluster | None, devices: Sequence[Device], hosts: str) -> str:
    """Return the number of engines and their devices as text.

    Args:
        cluster: The cluster; None if the engines have not started.
        devices: One device for each rank.
        hosts: The line that names hosts; '' for this machine.

    Returns:
        For example '4 engines (not started) on cpu'. Devices of other hosts are unknown before the start.
    """
    names = ", ".join(dict.fromkeys(device.name for device in devices))
    if cluster is None and hosts.strip():
        names = f"{hosts.strip()}: whether it fits is known once they have started"
    state = "" if cluster is not None else " (not started)"
    return f"{len(devices)} engine{'s' if len(devices) > 1 else ''}{state} on {names}"


def summary_parts(
    config: RunConfig, prediction: PanelPrediction, devices: Sequence[Device], batch: str, advice: str, *, known: bool
) -> tuple[str, list[str]]:
    """Return the parts of the line below the tabs.

    Args:
        config: A valid configuration.
        prediction: Its memory and speed.
        devices: One device for each rank.
        batch: The batch equation.
        advice: Changes that make the model fit; '' if it fits.
        known: Whether `devices` are the real devices; if not, fit and speed are left out.

    Returns:
        The text about fit, which is '' for unknown devices; and all parts: fit, advice, speed, layout, batch, bubble.
    """
    layout = config.layout(len(devices))
    fits = fit_text(prediction, devices) if known else ""
    parts = [fits, advice, speed_text(prediction)] if known else []
    parts += ["" if layout.world_size == layout.dp else str(layout), batch, bubble_text(config, layout)]
    return fits, [part for part in parts if part]
