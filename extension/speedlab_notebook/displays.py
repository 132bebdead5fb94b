"""Text and HTML forms of SpeedLab's objects in IPython.

`speedlab` itself has no HTML for these types, so their formatters are registered here by module and class name. No
module is imported before one of its objects is displayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from speedlab.cluster import EngineStatus
    from speedlab.config import RunConfig
    from speedlab.config.base import ConfigSection
    from speedlab.hardware import Device
    from speedlab.telemetry.records import Event, Ledger, StepRecord
    from speedlab.telemetry.run_folder import Status

_NUMBER = "text-align:right"
_WORDS = "text-align:left"


# Tables


def table_html(head: Sequence[str], rows: Sequence[Sequence[str]], *, words: Sequence[str] = ()) -> str:
    """Return a small HTML table.

    Args:
        head: The column names.
        rows: The cells as text; escaped here.
        words: Names of the columns that are aligned left; the others are aligned right.
    """
    styles = [_WORDS if name in words else _NUMBER for name in head]

    def line(tag: str, cells: Sequence[str]) -> str:
        inner = "".join(
            f'<{tag} style="{style}">{escape(cell)}</{tag}>' for style, cell in zip(styles, cells, strict=True)
        )
        return f"<tr>{inner}</tr>"

    body = "".join(line("td", row) for row in rows)
    return f"<table><thead>{line('th', head)}</thead><tbody>{body}</tbody></table>"


def table_text(head: Sequence[str], rows: Sequence[Sequence[str]], *, words: Sequence[str] = ()) -> str:
    """Return a table as lines of text, with two spaces between columns.

    Args:
        head: The column names.
        rows: The cells as text.
        words: Names of the columns that are aligned left; the others are aligned right.
    """
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = []
    for row in (head, *rows):
        cells = [
            cell.ljust(width) if name in words else cell.rjust(width)
            for name, cell, width in zip(head, row, widths, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


_ENGINE_HEAD = ("engine", "rank", "device", "process", "state", "memory")
_ENGINE_WORDS = ("device", "state")


def _engine_rows(engines: Sequence[EngineStatus]) -> list[tuple[str, ...]]:
    from speedlab.display.formatting import bytes_text

    return [
        (
            f"{engine.engine_id}",
            f"{engine.rank}",
            engine.place,
            f"{engine.pid}",
            engine.state,
            bytes_text(engine.rss_bytes),
        )
        for engine in engines
    ]


def engines_bundle(title: str, engines: Sequence[EngineStatus], notes: Sequence[str]) -> dict[str, str]:
    """Return the output of `%speedlab status` as MIME types: a title, a row for each engine, and notes.

    Args:
        title: The line above the table.
        engines: The state of each engine.
        notes: Lines below the table.
    """
    rows = _engine_rows(engines)
    page = [
        f"<b>{escape(title)}</b>",
        table_html(_ENGINE_HEAD, rows, words=_ENGINE_WORDS),
        *(f"<div>{escape(note)}</div>" for note in notes),
    ]
    text = [title, table_text(_ENGINE_HEAD, rows, words=_ENGINE_WORDS), *notes]
    return {"text/plain": "\n".join(text), "text/html": "".join(page)}


# One object

_TEXT_WIDTH = 140
"""Maximum letters in a line of a configuration's text; a single longer field exceeds it."""


def run_config_text(config: RunConfig) -> str:
    """Return a configuration as text, each section on one or more lines; '*' marks values that differ from the default.

    Args:
        config: The configuration.
    """
    width = max(len(name) for name, _ in _parts(config))
    lines = ["RunConfig (* differs from the default)"]
    for name, fields in _parts(config):
        rows = [""]
        for key, value, _, changed in fields:
            shown = f"{key} {value}{'*' if changed else ''}"
            if rows[-1] and width + len(rows[-1]) + len(shown) > _TEXT_WIDTH:
                rows.append("")
            rows[-1] += f" · {shown}" if rows[-1] else shown
        lines += [f"  {name if row is rows[0] else '':<{width}}  {row}" for row in rows]
    return "\n".join(lines)


def run_config_html(config: RunConfig) -> str:
    """Return a configuration as an HTML table.

    A row for each section: descriptions on hover, values that differ from the default in bold.

    Args:
        config: The configuration.
    """
    rows = []
    for name, fields in _parts(config):
        cells = []
        for key, value, description, changed in fields:
            mark = "b" if changed else "span"
            cells.append(f'<{mark} title="{escape(description)}">{escape(f"{key} {value}")}</{mark}>')
        joined = " · ".join(cells)
        rows.append(
            f'<tr><th style="{_WORDS}">{escape(name)}</th><td style="{_WORDS};white-space:normal">{joined}</td></tr>'
        )
    return f"<table><caption>RunConfig; bold differs from the default</caption>{''.join(rows)}</table>"


_Field = tuple[str, str, str, bool]
"""(name, value, description, whether it differs from the default)."""


def _parts(config: RunConfig) -> list[tuple[str, list[_Field]]]:
    """Return the fields of the run itself, then of each section, followed by the sections inside that section."""
    return _with_inner("run", config, type(config)())


def _with_inner(name: str, part: ConfigSection, default: ConfigSection) -> list[tuple[str, list[_Field]]]:
    kind = type(part)
    own = [field for field in kind.model_fields if kind.part_of(field) is None]
    parts = [(name, _fields(part, default, own))]
    for field in kind.model_fields:
        if kind.part_of(field) is not None:
            path = field if name == "run" else f"{name}.{field}"
            parts += _with_inner(path, getattr(part, field), getattr(default, field))
    return parts


def _fields(part: Any, default: Any, names: Sequence[str]) -> list[_Field]:
    fields = type(part).model_fields
    return [
        (
            name,
            _value(getattr(part, name)),
            fields[name].description or "",
            getattr(part, name) != getattr(default, name),
        )
        for name in names
    ]


def _value(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(str(item) for item in value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def ledger_text(ledger: Ledger) -> str:
    """Return the memory of a rank as text.

    Args:
        ledger: The bytes by category and place.

    Returns:
        For example 'Ledger 1.4 GiB of 16 GiB: parameters 312 MiB · gradients …', and a line for each other place.
        Categories with 0 bytes are left out.
    """
    from speedlab.display.formatting import bytes_text

    parts = [f"{name} {bytes_text(count)}" for name, count in _categories(ledger) if count]
    whole = f"{bytes_text(ledger.reported_bytes)} of {bytes_text(ledger.capacity_bytes)}"
    lines = [f"Ledger {whole}: {' · '.join(parts) or 'empty'}"]
    for place, held in _away(ledger):
        named = " · ".join(f"{name.replace('_', ' ')} {bytes_text(count)}" for name, count in held.items())
        lines.append(f"  on {place} {bytes_text(sum(held.values()))}{_of(ledger, place)}: {named}")
    return "\n".join(lines)


def ledger_html(ledger: Ledger) -> str:
    """Return the memory of a rank as an HTML table, with a row for each category in the order of the stacked plots.

    Args:
        ledger: The bytes by category and place.
    """
    from speedlab.display.formatting import bytes_text

    rows = [(name, bytes_text(count)) for name, count in _categories(ledger)]
    rows += [("reported", bytes_text(ledger.reported_bytes)), ("capacity", bytes_text(ledger.capacity_bytes))]
    for place, held in _away(ledger):
        rows += [(f"{name.replace('_', ' ')} on {place}", bytes_text(count)) for name, count in held.items()]
        rows += [(f"capacity of {place}", bytes_text(ledger.capacity_of(place)))] if ledger.capacity_of(place) else []
    return table_html(("category", "memory"), rows, words=("category",))


def _away(ledger: Ledger) -> list[tuple[str, dict[str, int]]]:
    """Return (place, bytes by category) of states outside the device."""
    return [(place, held) for place, held in ledger.by_place().items() if place != "device"]


def _of(ledger: Ledger, place: str) -> str:
    from speedlab.display.formatting import bytes_text

    return f" of {bytes_text(ledger.capacity_of(place))}" if ledger.capacity_of(place) else ""


def _categories(ledger: Ledger) -> list[tuple[str, int]]:
    from speedlab.telemetry.records import CATEGORIES

    return [(name.replace("_", " "), getattr(ledger, name)) for name in CATEGORIES]


def step_record_text(record: StepRecord) -> str:
    """Return a step record as one line.

    Args:
        record: One rank's record of a step.
    """
    from speedlab.display.formatting import bytes_text, count_text, seconds_text

    heldout = f" (held-out {record.heldout_loss:.4f})" if record.heldout_loss is not None else ""
    return (
        f"<step {record.step:,} rank {record.rank}: loss {record.loss:.4f}{heldout}, "
        f"{count_text(record.tokens_per_second)} tokens/s, {seconds_text(record.seconds)}, "
        f"stage {record.zero_stage}, {bytes_text(record.ledger.reported_bytes)}>"
    )


def event_text(event: Event) -> str:
    """Return an event as one line.

    Args:
        event: An event of a run.
    """
    return f"<{event.kind} at step {event.step:,}{f': {event.text}' if event.text else ''}>"


def engine_status_text(engine: EngineStatus) -> str:
    """Return the status of an engine as one line.

    Args:
        engine: The rank, device, state and memory of an engine.
    """
    from speedlab.display.formatting import bytes_text

    memory = bytes_text(engine.rss_bytes)
    return f"<rank {engine.rank} on {engine.place}: {engine.state}, {memory}, process {engine.pid}>"


def device_text(device: Device) -> str:
    """Return a device as one line.

    Args:
        device: The device, with its free memory and capacity in bytes.
    """
    from speedlab.display.formatting import bytes_text

    return (
        f"<{device.kind} {device.name!r}: {bytes_text(device.free_bytes)} of {bytes_text(device.capacity_bytes)} free, "
        f"fast {device.fast_dtype}>"
    )


def status_text(status: Status) -> str:
    """Return the status of a run as one line.

    Args:
        status: The state and the step of a run.
    """
    text = f": {status.reported}" if status.reported else ""
    return f"<{status.state} at step {status.step:,} of {status.steps:,}{text}>"


# Registering

_TEXTS: dict[tuple[str, str], Callable[[Any], str]] = {
    ("speedlab.config.run_config", "RunConfig"): run_config_text,
    ("speedlab.telemetry.records", "Ledger"): ledger_text,
    ("speedlab.telemetry.records", "StepRecord"): step_record_text,
    ("speedlab.telemetry.records", "Event"): event_text,
    ("speedlab.telemetry.records", "RunState"): str,
    ("speedlab.telemetry.run_folder", "Status"): status_text,
    ("speedlab.cluster.cluster", "EngineStatus"): engine_status_text,
    ("speedlab.hardware", "Device"): device_text,
}
"""(module, class) -> its text."""

_PAGES: dict[tuple[str, str], Callable[[Any], str]] = {
    ("speedlab.config.run_config", "RunConfig"): run_config_html,
    ("speedlab.telemetry.records", "Ledger"): ledger_html,
}
"""(module, class) -> its HTML."""


def register(shell: InteractiveShell) -> None:
    """Register the text and HTML formatters.

    Args:
        shell: The IPython shell.
    """
    texts, pages = _formatters(shell)
    for (module, name), function in _TEXTS.items():
        texts.for_type_by_name(module, name, _printer(function))
    for (module, name), function in _PAGES.items():
        pages.for_type_by_name(module, name, function)


def unregister(shell: InteractiveShell) -> None:
    """Remove the formatters, so that Python's `repr` is shown.

    Args:
        shell: The IPython shell.
    """
    texts, pages = _formatters(shell)
    for formatter, known in ((texts, _TEXTS), (pages, _PAGES)):
        for module, name in known:
            formatter.pop(f"{module}.{name}", None)


def _formatters(shell: InteractiveShell) -> tuple[Any, Any]:
    formatters: Any = shell.display_formatter
    return formatters.formatters["text/plain"], formatters.formatters["text/html"]


def _printer(function: Callable[[Any], str]) -> Callable[[Any, Any, bool], None]:
    """Return a function that IPython's text formatter calls.

    Lines are written one by one, because the formatter counts them and breaks long lists between them.
    """

    def write(value: Any, printer: Any, cycle: bool) -> None:
        for number, line in enumerate(function(value).splitlines()):
            if number:
                printer.break_()
            printer.text(line)

    return write
