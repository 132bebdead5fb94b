"""Where a panel differs from the run that is on: what can be applied live, and what needs a restart.

What a control has changed in memory, speed and placement, in a line: before → after.

What stands beside each field of a panel, and the line below its tabs.
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
from speedlab.telemetry.run_shape import CHANGES, differences, present_config, shape_of
from speedlab_notebook.panel.disabled_reasons import bubble_text, greyed_fields, greyed_options, remarks, sizes
from speedlab_notebook.panel.fields import Field, FormValues
from speedlab_notebook.panel.prediction import PanelPrediction, fit_text, speed_text

if TYPE_CHECKING:
    from speedlab.cluster import Cluster, Run


_NAMES = {"zero": "stage", "micro_batches": "micro-batches"}
_FIELDS = {"zero": "zero.stage", "micro_batches": "batch.accumulation"}
"""Word of `run.reshape` -> the field that says it, where that is not the layout's of this name."""
_PLACES = {"offload.optimizer", "offload.parameters"}
_SHAPE = {"zero.stage", *_PLACES, *(f"parallel.{name}" for name in CHANGES)}
_MOST_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class PendingChange:
    """One field in which the panel differs from the run that is under way."""

    path: str
    before: Any
    after: Any
    live: bool = False
    """Whether it can be applied between two steps; `path` is then one of `run.reshape`'s words."""

    def __str__(self) -> str:
        told = [f"{path} {_shown(before)} → {_shown(after)}" for path, before, after in self._parts()]
        return f"{', '.join(told)} ({self.when})"

    @property
    def when(self) -> str:
        """'live', or that it needs a restart."""
        return ("live, under 1 s" if self.path == "zero" else "live") if self.live else "needs a restart"

    @property
    def marks(self) -> dict[str, str]:
        """Path of a field -> what stands beside it: 'the run has 2 · live'."""
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
    """Where `wanted` differs from a run on `engines` engines that is of `running` now; what is live first. Its name and
    folder are not part of the comparison: they are the next run's."""
    shape = shape_of(running, engines)
    live = differences(running, wanted, engines)
    if live.keys() & {"islands", "tp", "pp", "cp"}:
        live.pop("dp", None)  # It follows.
    found = [PendingChange(path=name, before=shape[name], after=value, live=True) for name, value in live.items()]
    before, after = _flat(running, engines), _flat(wanted, engines)
    return found + [
        PendingChange(path=path, before=before[path], after=after[path])
        for path in after
        if before[path] != after[path]
    ]


def reshaping(found: Sequence[PendingChange]) -> dict[str, Any]:
    """What `run.reshape` is to be given for the changes that are live."""
    return {change.path: change.after for change in found if change.live}


def changes_line(found: Sequence[PendingChange]) -> str:
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


def marks(found: Sequence[PendingChange]) -> dict[str, str]:
    """Path of a field -> how it differs from the run."""
    told: dict[str, str] = {}
    for change in found:
        told |= change.marks
    return told


def _flat(config: RunConfig, engines: int) -> dict[str, Any]:
    """Every field by path, but those of the shape; of the batch, the global one."""
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
"""A share of a number, below which it stayed."""
_HALF = 0.5
"""Of what was: from there on a factor says more than a share."""
_STATES = {"parameters": "parameter", "gradients": "gradient", "optimizer_moments": "optimizer_state"}


def effect_text(before: PanelPrediction, after: PanelPrediction) -> str:
    """'a rank holds 19.9 MiB → 13.7 MiB (-31.2%) · 41 k → 38 k tokens/s (-7.3%) · parameters: whole on every
    rank → 1/4 a rank'."""
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
    """Bytes of the rank that holds most."""
    return prediction.heaviest[prediction.stage].total


def _share(before: float, after: float) -> str:
    """'+12%', '3.1 times as much'; '' where it stayed."""
    ratio = after / before
    if abs(ratio - 1) <= _SAME:
        return ""
    return f"{ratio - 1:+.1%}" if _HALF <= ratio < 1 / _HALF else f"{ratio:.2g} times as much"


def _placed(prediction: PanelPrediction) -> dict[str, str]:
    """State -> what each rank has of it, and where: '1/4 on disk'."""
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
    """Show beside each field what is wrong, why it is greyed, what its value means here, and how it differs from the
    run (`marks`). Returns what is wrong, by path."""
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
    """'4 engines (not started) on cpu', or on hosts whose devices nobody knows yet."""
    names = ", ".join(dict.fromkeys(device.name for device in devices))
    if cluster is None and hosts.strip():
        names = f"{hosts.strip()}: whether it fits is known once they have started"
    state = "" if cluster is not None else " (not started)"
    return f"{len(devices)} engine{'s' if len(devices) > 1 else ''}{state} on {names}"


def summary_parts(
    config: RunConfig, prediction: PanelPrediction, devices: Sequence[Device], batch: str, advice: str, *, known: bool
) -> tuple[str, list[str]]:
    """Whether it fits; and that with speed, layout and batch. `known`: whether these are the devices."""
    layout = config.layout(len(devices))
    fits = fit_text(prediction, devices) if known else ""
    parts = [fits, advice, speed_text(prediction)] if known else []
    parts += ["" if layout.world_size == layout.dp else str(layout), batch, bubble_text(config, layout)]
    return fits, [part for part in parts if part]
