"""A run's progress on stderr: one line that is redrawn in a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from speedlab.display.formatting import count_text, seconds_text
from speedlab.telemetry.feed import Feed

_REDRAW_SECONDS = 0.2
_PLAIN_SECONDS = 10.0
_BAR_WIDTH = 12
_SPEED_STEPS = 20


class Progress:
    """Draws what `feed` holds; `say` prints a line of text above the bar."""

    def __init__(self, feed: Feed, stream: TextIO | None = None) -> None:
        self._feed = feed
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._last_drawn = float("-inf")
        self._drawn = ""

    def update(self, *, force: bool = False) -> None:
        """Draw again if it is time to."""
        now = time.monotonic()
        if not force and now - self._last_drawn < (_REDRAW_SECONDS if self._live else _PLAIN_SECONDS):
            return
        width = shutil.get_terminal_size().columns - 1 if self._live else None
        line = progress_line(self._feed, width)
        if line == self._drawn and not force:
            return
        self._last_drawn, self._drawn = now, line
        if self._live:
            self._stream.write(f"\r\x1b[K{line[:width]}")
        else:
            self._stream.write(f"{line}\n")
        self._stream.flush()

    def say(self, text: str) -> None:
        """Print `text` for good; the bar goes on below it."""
        self._stream.write(f"\r\x1b[K{text}\n{self._drawn}" if self._live and self._drawn else f"{text}\n")
        self._stream.flush()

    def close(self) -> None:
        """Draw a last time and leave the line."""
        self.update(force=True)
        if self._live:
            self._stream.write("\n")
            self._stream.flush()


_DROPPED = ("zero", "bar", "heldout", "speed", "loss")
"""What is left out where a terminal is narrow, one after the other; the step and the time that is left stay."""


def progress_line(feed: Feed, width: int | None = None) -> str:
    """'step 120/2,000 ━━━━━━────── 41.2 k tokens/s · loss 5.91 (held-out 6.02) · zero 2 · 3 min 5 s left', or as much
    of it as `width` columns hold."""
    parts = _parts(feed)
    line = _joined(parts)
    for name in _DROPPED:
        if width is None or len(line) <= width:
            break
        parts.pop(name, None)
        line = _joined(parts)
    return line


def _parts(feed: Feed) -> dict[str, str]:
    status, last = feed.status, feed.last
    step = last.step if last is not None else status.step
    filled = _BAR_WIDTH * step // max(1, status.steps)
    parts = {"step": f"step {step:,}/{status.steps:,}", "bar": "━" * filled + "─" * (_BAR_WIDTH - filled)}
    if last is None:
        return {**parts, "speed": str(status.state)}
    recent = feed.records[last.rank][-_SPEED_STEPS:]
    seconds = sum(record.seconds for record in recent)
    speed = count_text(sum(record.tokens for record in recent) / seconds if seconds else 0)
    parts |= {"speed": f"{speed} tokens/s", "loss": f"loss {last.loss:.3f}"}
    heldout = feed.records[last.rank].heldout_loss
    if heldout is not None:
        parts["heldout"] = f"(held-out {heldout:.3f})"
    left = (status.steps - step) * seconds / len(recent)
    ending = f"{seconds_text(left)} left" if left and status.state == "running" else str(status.state)
    return {**parts, "zero": f"zero {last.zero_stage}", "left": ending}


def _joined(parts: Mapping[str, str]) -> str:
    groups = (("step", "bar", "speed"), ("loss", "heldout"), ("zero",), ("left",))
    texts = (" ".join(parts[name] for name in group if name in parts) for group in groups)
    return " · ".join(text for text in texts if text)
