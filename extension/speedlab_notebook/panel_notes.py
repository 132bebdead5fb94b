"""What stands beside each field of a panel, and the line below its tabs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from speedlab.config import RunConfig
from speedlab.hardware import Device
from speedlab_notebook.panel_fields import Field
from speedlab_notebook.panel_reading import Reading
from speedlab_notebook.panel_reasons import bubble_text, greyed_fields, greyed_options, remarks, sizes
from speedlab_notebook.panel_states import Prediction, fit_text, speed_text

if TYPE_CHECKING:
    from speedlab.cluster import Cluster

_AXES = ("parallel.islands", "parallel.tp", "parallel.pp", "parallel.cp")


def show_notes(
    fields: Mapping[str, Field],
    reading: Reading,
    devices: Sequence[Device],
    prediction: Prediction | None,
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
    config: RunConfig, prediction: Prediction, devices: Sequence[Device], batch: str, advice: str, *, known: bool
) -> tuple[str, list[str]]:
    """Whether it fits; and that with speed, layout and batch. `known`: whether these are the devices."""
    layout = config.layout(len(devices))
    fits = fit_text(prediction, devices) if known else ""
    parts = [fits, advice, speed_text(prediction)] if known else []
    parts += ["" if layout.world_size == layout.dp else str(layout), batch, bubble_text(config, layout)]
    return fits, [part for part in parts if part]
