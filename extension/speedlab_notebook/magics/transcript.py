"""Output of ranks in order, with equal output of several ranks folded; as text and as HTML. Pure."""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from speedlab.cluster.errors import name_ranks
from speedlab.cluster.output_folding import LineFolder

MOST_LINES = 1000
"""Lines kept for a cell. Older lines are dropped, and the display says how many."""
MOST_DISPLAYS = 50
"""Displays kept for a cell."""

_DISPLAY, _CLEAR = "display", "clear"
_PLAIN = "text/plain"
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_ROW = "display:flex;align-items:flex-start"
_LABEL = "flex:0 0 7em;color:var(--jp-ui-font-color2,#767676);font-family:var(--jp-ui-font-family,sans-serif)"
_TEXT = "margin:0;flex:1 1 auto;white-space:pre-wrap;overflow-wrap:anywhere"
_STDERR = "border-left:3px solid #E69F00;padding-left:6px"
_IMAGES = ("image/svg+xml", "image/png", "image/jpeg")


@dataclass
class _TranscriptEntry:
    ranks: list[int]
    kind: str
    lines: list[str] = field(default_factory=list)
    data: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    display_id: str | None = None


class Transcript:
    """The output of a cell's ranks. `feed` adds messages, `text` and `html` return them. The clock is an argument.

    A display passes through the LineFolder as one line of JSON: it keeps its position among the lines, and the same
    display on several ranks is shown once. `clear_output` passes through the LineFolder too, and removes the earlier
    output of its rank.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        """Start an empty transcript.

        Args:
            ranks: The ranks that run the cell.
        """
        self._folder = LineFolder(ranks)
        self._entries: list[_TranscriptEntry] = []
        self._left_out = 0
        self._printed: dict[int, str] = {}
        self._to_clear: set[int] = set()
        """Ranks whose output is removed at their next output (`clear_output(wait=True)`)."""

    def feed(self, rank: int, kind: str, content: Mapping[str, Any], now: float) -> None:
        """Add one message of a rank, in Jupyter's protocol.

        The engine also prints the text of a result. A result that is only text is therefore ignored here; for a result
        with more (a table, a plot) the printed text is removed.

        Args:
            rank: The rank that sent the message.
            kind: 'stream', 'execute_result', 'display_data', 'update_display_data' or 'clear_output'.
            content: The `content` of the message.
            now: The time in seconds, for folding.
        """
        if kind == "stream":
            text = self._without_result(rank, content["text"]) if content["name"] == "stdout" else content["text"]
            if text:
                self._folder.feed(rank, content["name"], text, now)
        elif kind == "execute_result":
            data = content.get("data", {})
            if set(data) != {_PLAIN}:
                self._feed_display(rank, content, now)
                self._printed[rank] = f"{data.get(_PLAIN, '')}\n"
        elif kind in ("display_data", "update_display_data"):
            self._feed_display(rank, content, now, update=kind == "update_display_data")
        elif kind == "clear_output":
            self._folder.end_line(rank)
            self._folder.feed(rank, _CLEAR, f"{json.dumps(bool(content.get('wait')))}\n", now)

    def _feed_display(self, rank: int, content: Mapping[str, Any], now: float, *, update: bool = False) -> None:
        message = {
            "data": content.get("data", {}),
            "metadata": content.get("metadata", {}),
            "display_id": content.get("transient", {}).get("display_id"),
            "update": update,
        }
        self._folder.end_line(rank)
        self._folder.feed(rank, _DISPLAY, json.dumps(message, sort_keys=True) + "\n", now)

    def _without_result(self, rank: int, text: str) -> str:
        """Return `text` without the printed text of a result that is still expected."""
        expected = self._printed.pop(rank, "")
        if expected.startswith(text):
            if left := expected[len(text) :]:
                self._printed[rank] = left
            return ""
        return text.removeprefix(expected)

    def drain(self, now: float, *, everything: bool = False) -> list[tuple[list[int], str]]:
        """Move folded output into the transcript.

        Args:
            now: The time in seconds; output that may still fold with other ranks stays until it is due.
            everything: Whether to take all output, due or not.

        Returns:
            The new output as (ranks, text), for a terminal.
        """
        came = []
        for ranks, stream, text in self._folder.drain(now, everything=everything):
            if stream == _CLEAR:
                self._to_clear.update(ranks)
                # `text` has the `wait` flag of each call as JSON; one call without wait clears at once.
                if "false" in text:
                    self._clear(ranks)
                continue
            self._clear(self._to_clear.intersection(ranks))
            if stream == _DISPLAY:
                for line in text.splitlines():
                    came.append((ranks, self._show(ranks, json.loads(line))))
            else:
                self._write(ranks, stream, text)
                came.append((ranks, text))
        self._forget()
        return came

    def text(self) -> str:
        """Return every line with its ranks in front."""
        lines = [f"… {self._left_out:,} lines left out"] if self._left_out else []
        for entry in self._entries:
            label = f"{name_ranks(entry.ranks)}: "
            body = [line.rstrip("\r\n") for line in entry.lines] if entry.kind != _DISPLAY else [_plain(entry.data)]
            lines += [label + line for line in body]
        return "\n".join(lines)

    def html(self) -> str:
        """Return the output as HTML. Text is escaped; HTML that a rank displayed is inserted unchanged."""
        rows = []
        if self._left_out:
            rows.append(f'<div style="{_LABEL}">… {self._left_out:,} lines left out</div>')
        for entry in self._entries:
            body = _bundle_html(entry) if entry.kind == _DISPLAY else _lines_html(entry)
            rows.append(
                f'<div style="{_ROW}"><div style="{_LABEL}">{html.escape(name_ranks(entry.ranks))}</div>{body}</div>'
            )
        return "".join(rows)

    def _clear(self, ranks: Iterable[int]) -> None:
        """Remove the output of these ranks. Output shared with other ranks stays for those."""
        cleared = set(ranks)
        self._to_clear -= cleared
        for entry in self._entries:
            entry.ranks = [rank for rank in entry.ranks if rank not in cleared]
        self._entries = [entry for entry in self._entries if entry.ranks]

    def _write(self, ranks: list[int], stream: str, text: str) -> None:
        last = self._entries[-1] if self._entries else None
        if last is None or (last.ranks, last.kind) != (ranks, stream):
            last = _TranscriptEntry(ranks, stream)
            self._entries.append(last)
        for line in text.replace("\r\n", "\n").splitlines(keepends=True):
            if last.lines and last.lines[-1].endswith("\r"):
                last.lines[-1] = line  # As in a terminal: text after a carriage return overwrites the line.
            else:
                last.lines.append(line)

    def _show(self, ranks: list[int], message: Mapping[str, Any]) -> str:
        data, metadata, display_id = message["data"], message["metadata"], message["display_id"]
        shown = [entry for entry in self._entries if entry.display_id == display_id and entry.ranks == ranks]
        if message["update"] and display_id is not None and shown:
            for entry in shown:
                entry.data, entry.metadata = data, metadata
        else:
            self._entries.append(_TranscriptEntry(ranks, _DISPLAY, data=data, metadata=metadata, display_id=display_id))
        return _plain(data) + "\n"

    def _forget(self) -> None:
        """Drop the oldest output, so that a cell that prints for hours stays small in the notebook."""
        displays = sum(entry.kind == _DISPLAY for entry in self._entries)
        lines = sum(len(entry.lines) for entry in self._entries)
        while lines > MOST_LINES or displays > MOST_DISPLAYS:
            oldest = self._entries[0]
            cut = len(oldest.lines) if displays > MOST_DISPLAYS else min(len(oldest.lines), lines - MOST_LINES)
            del oldest.lines[:cut]
            lines -= cut
            self._left_out += cut
            if not oldest.lines:
                displays -= oldest.kind == _DISPLAY
                self._left_out += oldest.kind == _DISPLAY
                del self._entries[0]


def _plain(data: Mapping[str, Any]) -> str:
    text = data.get(_PLAIN)
    return text if isinstance(text, str) else f"a display of {', '.join(sorted(data)) or 'nothing'}"


def _lines_html(entry: _TranscriptEntry) -> str:
    text = html.escape(_ANSI.sub("", "".join(entry.lines)).replace("\r", "\n"))
    style = f"{_TEXT};{_STDERR}" if entry.kind == "stderr" else _TEXT
    return f'<pre style="{style}">{text}</pre>'


def _bundle_html(entry: _TranscriptEntry) -> str:
    """Return the richest form of a display: HTML, else a picture, else its text."""
    if isinstance(fragment := entry.data.get("text/html"), str):
        return f'<div style="flex:1 1 auto;overflow-x:auto">{fragment}</div>'
    for kind in _IMAGES:
        if isinstance(picture := entry.data.get(kind), str):
            encoded = base64.b64encode(picture.encode()).decode() if kind == "image/svg+xml" else picture.strip()
            size = entry.metadata.get(kind)
            sizes = [
                f' {name}="{size[name]}"'
                for name in ("width", "height")
                if isinstance(size, Mapping) and isinstance(size.get(name), int)
            ]
            source = html.escape("".join(encoded.split()))
            return f'<img alt="{html.escape(_plain(entry.data))}"{"".join(sizes)} src="data:{kind};base64,{source}">'
    return f'<pre style="{_TEXT}">{html.escape(_ANSI.sub("", _plain(entry.data)))}</pre>'
