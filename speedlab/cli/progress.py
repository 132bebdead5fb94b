"""A run's progress on stderr: one line that is redrawn in a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

from speedlab.display.text import count_text, seconds_text
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
        line = progress_line(self._feed)
        if line == self._drawn and not force:
            return
        self._last_drawn, self._drawn = now, line
        if self._live:
            width = shutil.get_terminal_size().columns - 1
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


def progress_line(feed: Feed) -> str:
    """'step 120/2,000 ━━━━━━────── 41.2 k tokens/s · loss 5.91 (held-out 6.02) · zero 2 · 3 min 5 s left'."""
    status, last = feed.status, feed.last
    step = last.step if last is not None else status.step
    filled = _BAR_WIDTH * step // max(1, status.steps)
    parts = [f"step {step:,}/{status.steps:,} {'━' * filled}{'─' * (_BAR_WIDTH - filled)}"]
    if last is None:
        return f"{parts[0]} {status.state}"
    recent = feed.records[last.rank][-_SPEED_STEPS:]
    seconds = sum(record.seconds for record in recent)
    parts[0] += f" {count_text(sum(record.tokens for record in recent) / seconds if seconds else 0)} tokens/s"
    heldout = next((record.heldout_loss for record in reversed(feed.records[last.rank]) if record.heldout_loss), None)
    parts.append(f"loss {last.loss:.3f}" + (f" (held-out {heldout:.3f})" if heldout is not None else ""))
    parts.append(f"zero {last.zero_stage}")
    left = (status.steps - step) * seconds / len(recent)
    parts.append(f"{seconds_text(left)} left" if left and status.state == "running" else str(status.state))
    return " · ".join(parts)
