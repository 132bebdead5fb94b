"""Fold the output of ranks: equal lines of several ranks become one."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

FOLD_SECONDS = 0.3
"""How long a line waits for the same line of other ranks. Engines send their output every 0.2 s."""
PARTIAL_SECONDS = 1.0
"""How long an incomplete line waits for its end."""
MOST_LINES = 2000
"""Maximum number of waiting lines of one rank. Beyond it the oldest are dropped, and a line reports how many."""

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r(?!\n|$)|\n)")


@dataclass
class _Line:
    stream: str
    text: str
    time: float


class LineFolder:
    """Folds equal lines of several ranks. Pure: the clock is an argument.

    1. Text is split into lines. Each rank has one queue for both streams, so the order of a rank's lines is kept.
    2. A line is due when every rank has it at the head of its queue, or when it has waited for FOLD_SECONDS.
    3. A due line is returned together with the equal heads of other ranks. Among due lines, one that another rank still
       has further down its queue goes later, so that it is folded when it comes up there; else the lowest rank goes
       first.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._queues: dict[int, deque[_Line]] = {rank: deque() for rank in ranks}
        self._partial: dict[tuple[int, str], _Line] = {}
        self._left_out: dict[int, int] = {}

    def expect(self, size: int) -> None:
        """Fold the lines of ranks 0 to `size` - 1 from now on; lines of other ranks are still returned.

        Args:
            size: Number of ranks.
        """
        for rank in range(size):
            self._queues.setdefault(rank, deque())
        for rank in [rank for rank, queue in self._queues.items() if rank >= size and not queue]:
            del self._queues[rank]

    @property
    def waiting(self) -> bool:
        """Whether any text waits."""
        return bool(self._partial) or any(self._queues.values())

    def feed(self, rank: int, stream: str, text: str, now: float) -> None:
        """Add text that a rank wrote; it may end inside a line.

        Args:
            rank: The rank.
            stream: 'stdout' or 'stderr'.
            text: The text.
            now: Current time in seconds.
        """
        queue = self._queues.setdefault(rank, deque())
        held = self._partial.pop((rank, stream), None)
        text = held.text + text if held else text
        end = 0
        for match in _LINE.finditer(text):
            queue.append(_Line(stream, match.group(), now))
            end = match.end()
        if end < len(text):
            self._partial[rank, stream] = _Line(stream, text[end:], held.time if held and not end else now)
        while len(queue) > MOST_LINES:
            queue.popleft()
            self._left_out[rank] = self._left_out.get(rank, 0) + 1

    def end_line(self, rank: int) -> None:
        """End the incomplete line of `rank`: later text begins a new entry."""
        for key in [key for key in self._partial if key[0] == rank]:
            self._queues.setdefault(rank, deque()).append(self._partial.pop(key))

    def drain(self, now: float, *, everything: bool = False) -> list[tuple[list[int], str, str]]:
        """Return the due lines, in order; neighbours with the same ranks and stream are one entry.

        Args:
            now: Current time in seconds.
            everything: Whether to return waiting lines, too.

        Returns:
            (ranks, stream, text) entries.
        """
        self._give_up_on_partial_lines(now, everything)
        out: list[tuple[list[int], str, str]] = []
        for rank in list(self._left_out):
            out.append(([rank], "stderr", f"… {self._left_out.pop(rank)} lines of output left out\n"))
        while (due := self._due(now, everything)) is not None:
            ranks = [rank for rank, queue in self._queues.items() if queue and _same(queue[0], due)]
            for rank in ranks:
                self._queues[rank].popleft()
            if out and out[-1][0] == ranks and out[-1][1] == due.stream:
                out[-1] = (ranks, due.stream, out[-1][2] + due.text)
            else:
                out.append((ranks, due.stream, due.text))
        return out

    def _due(self, now: float, everything: bool) -> _Line | None:
        heads = [queue[0] for _, queue in sorted(self._queues.items()) if queue]
        if len(heads) == len(self._queues) and all(_same(head, heads[0]) for head in heads):
            return heads[0]
        late = [head for head in heads if everything or now - head.time >= FOLD_SECONDS]
        return min(late, key=self._comes_again, default=None)

    def _comes_again(self, line: _Line) -> bool:
        """Return whether a rank with another line at its head has `line` further down."""
        return any(
            queue and not _same(queue[0], line) and any(_same(other, line) for other in queue)
            for queue in self._queues.values()
        )

    def _give_up_on_partial_lines(self, now: float, everything: bool) -> None:
        for (rank, stream), line in list(self._partial.items()):
            if everything or now - line.time >= PARTIAL_SECONDS:
                del self._partial[rank, stream]
                self._queues.setdefault(rank, deque()).append(line)


def _same(a: _Line, b: _Line) -> bool:
    return a.stream == b.stream and a.text == b.text
