"""The plots of a run as plotly figures: pure functions from a History to plain dicts. No Jupyter, no plotly import.

A figure is {"data": [...], "layout": {...}}, with numpy float32 arrays in `data`. `plain` converts a figure to JSON
data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from speedlab.display.figure_style import Figure, plain
from speedlab.display.formatting import count_text, seconds_text
from speedlab.hardware import Device
from speedlab.telemetry.figures.costs import cost_figures
from speedlab.telemetry.figures.markers import STATE_MARKS
from speedlab.telemetry.figures.memory import memory_figure, places_figure, states_figure
from speedlab.telemetry.figures.pipeline import pipeline_figure
from speedlab.telemetry.figures.steps import (
    RECENT_STEPS,
    anatomy_by_rank_figure,
    anatomy_figure,
    exchange_figure,
    gradient_figure,
    loss_figure,
    throughput_figure,
)
from speedlab.telemetry.history import History
from speedlab.telemetry.prediction import error_text
from speedlab.telemetry.records import RunState, StepRecord
from speedlab.telemetry.run_folder import Status
from speedlab.telemetry.trace import timeline_of

__all__ = [
    "Header",
    "History",
    "anatomy_by_rank_figure",
    "anatomy_figure",
    "exchange_figure",
    "figures",
    "gradient_figure",
    "header",
    "loss_figure",
    "memory_figure",
    "places_figure",
    "plain",
    "states_figure",
    "throughput_figure",
]


def figures(history: History, *, devices: Sequence[Device] = ()) -> dict[str, Figure]:
    """Return all plots by name, in the order of the page.

    Optional plots: 'places' if states are not on the device, the costs if they were measured, 'exchange' if a step
    sends other data than float32 gradients, 'pipeline' if there is one.

    Args:
        history: The run's data.
        devices: Devices by rank, for labels.
    """
    timeline = timeline_of(history.records)
    pipeline = {} if timeline is None else {"pipeline": pipeline_figure(timeline, devices=devices)}
    by_place = places_figure(history)
    return {
        "memory": memory_figure(history, devices=devices),
        **({} if by_place is None else {"places": by_place}),
        "states": states_figure(history, devices=devices),
        "loss": loss_figure(history),
        "throughput": throughput_figure(history),
        "anatomy": anatomy_figure(history),
        "ranks": anatomy_by_rank_figure(history, devices=devices),
        "gradient": gradient_figure(history),
        **cost_figures(history),
        **({"exchange": exchange_figure(history)} if history.lead.exchanges else {}),
        **pipeline,
    }


_SILENT_SECONDS = 5.0
_SILENT_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class Header:
    """The line above the plots: its text, the state with a mark, and a note such as a warning."""

    text: str
    state: str
    mark: str
    note: str = ""


def header(history: History, *, name: str, status: Status, now: float | None = None) -> Header:
    """Return 'quickstart · step 131/2,000 · 41.2 k tokens/s · 38 % of peak · loss 5.91 (held-out 6.02) · 4 engines'.

    Args:
        history: The run's data.
        name: The run's name.
        status: The run's status.
        now: Seconds since 1970. If given, the note warns when a running run has finished no step for long.
    """
    lead = history.lead
    steps = int(lead.column("step")[-1]) if lead.length else status.step
    parts = [name, f"step {steps:,}/{status.steps:,}" if status.steps else f"step {steps:,}"]
    if lead.length:
        speed = median(lead.column("tokens_per_second")[-RECENT_STEPS:].tolist())
        parts.append(f"{count_text(speed)} tokens/s{_predicted_text(history, speed)}")
        share = history.share_of_peak(median(lead.column("flops_per_second")[-RECENT_STEPS:].tolist()))
        if share is not None:
            parts.append(f"{share * 100:.2g} % of peak")
        heldout = f" (held-out {history.heldout[-1][1]:.2f})" if history.heldout else ""
        parts.append(f"loss {lead.smoothed[-1]:.2f}{heldout}")
        newest = history.latest[history.lead_rank]
        parts.append(f"ZeRO stage {newest.zero_stage}{_exchange_text(newest)}")
    note = status.reported or ("" if now is None else _silence(history, status, now))
    engines = len(status.rank_pids) or len(history.latest)
    link = history.pretended_link
    parts.append(f"{engines} engine{'' if engines == 1 else 's'}{f' over a pretended link of {link}' if link else ''}")
    return Header(text=" · ".join(parts), state=str(status.state), mark=STATE_MARKS[status.state], note=note)


def _exchange_text(record: StepRecord) -> str:
    """Describe the communication of a step that sends other data than gradients; '' for the others.

    Examples: ' · compressed, 3.14 % of float32 sent', ' · warm-up before compression', ' · islands meet in 12 steps',
    ' · ranks exchange in 3 steps'.
    """
    reported = record.exchange
    if not reported:
        return ""
    if "steps_to_meeting" in reported:
        left = reported["steps_to_meeting"]
        return f" · islands meet in {left:,.0f} step{'' if left == 1 else 's'}"
    if "steps_to_exchange" in reported:
        left = reported["steps_to_exchange"]
        return f" · ranks exchange in {left:,.0f} step{'' if left == 1 else 's'}"
    if reported.get("variance_updated"):
        return " · gradients sent whole, for the variance"
    if not reported.get("compressed"):
        return " · warm-up before compression"
    whole = reported.get("float32_bytes")
    return " · compressed" + (f", {100 * reported['sent_bytes'] / whole:.3g} % of float32 sent" if whole else "")


def _predicted_text(history: History, measured: float) -> str:
    """Return ' (predicted 14.6 k, 69 % more than measured)'; '' without a prediction."""
    if history.predicted is None:
        return ""
    now = float(history.predicted.tokens_per_second(history.lead.column("step")[-1:])[0])
    return f" (predicted {', '.join(filter(None, (count_text(now), error_text(now, measured))))})"


def _silence(history: History, status: Status, now: float) -> str:
    """Return a warning if no step has finished for long. Only progress is a reliable sign: a rank that hangs in a
    collective still looks alive.
    """
    if status.state is not RunState.RUNNING or not history.latest:
        return ""
    if now - history.latest[history.lead_rank].time < _SILENT_SECONDS:
        return ""  # The usual case: do not read the other ranks.
    usual = median(history.lead.column("seconds")[-RECENT_STEPS:].tolist())
    reported = [record.time for record in history.latest.values()] + [event.time for event in history.events[-1:]]
    silent = now - max(reported)
    if silent < max(_SILENT_SECONDS, _SILENT_STEPS * usual):
        return ""
    return f"no step for {seconds_text(int(silent))}; they took {seconds_text(usual)} each"
