"""The lines of a file that grows, is replaced, or is damaged."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from speedlab.telemetry.run_folder import open_plain, plain_descriptor
from speedlab.telemetry.stream import LINE_LIMIT_BYTES

_FIRST_LOOK_BYTES = 1 << 15


class Tail:
    """Reads the complete lines of a growing file; what stands behind the last newline is left for the next time."""

    BUDGET_BYTES = 64 * LINE_LIMIT_BYTES

    def __init__(self, path: Path, *, end: int | None = None) -> None:
        """`end`: where to stop, bytes; with none, wherever the file ends."""
        self.position = 0
        """Where the first line that was not read starts, bytes."""
        self.restarted = False
        """Whether the last read began at the start again, because the file had become shorter."""
        self._path, self._end = str(path), end
        self._size_seen = 0
        self._in_long_line = False

    def read(self) -> list[bytes]:
        """Lines that were completed since the last call; of a huge file, at most 64 MiB at once."""
        self.restarted = False
        try:
            size = os.stat(self._path).st_size
        except FileNotFoundError:
            return []
        size = size if self._end is None else min(size, self._end)
        if size == self._size_seen or size == self.position:
            return []
        if size < self.position:
            self.position, self.restarted = 0, True
        self._size_seen = size
        lines: list[bytes] = []
        stop = min(self.position + self.BUDGET_BYTES, size)
        # Without a buffered file, which asks the system twice as often: a tick reads those of all ranks.
        file = plain_descriptor(self._path)
        try:
            while self.position < stop:
                if not (data := os.pread(file, min(LINE_LIMIT_BYTES, size - self.position), self.position)):
                    break
                end = data.rfind(b"\n") + 1
                if end == 0 and len(data) < LINE_LIMIT_BYTES:
                    break
                lines += self._split(data, end or len(data))
            else:
                if self.position < size:
                    self._size_seen = -1  # There is more: do not take this size as read.
        except OSError as error:
            error.filename = self._path  # What is read from a descriptor does not tell whose it is.
            raise
        finally:
            os.close(file)
        return lines

    def skip(self, lines: int) -> None:
        """Go to where the last so many complete lines start, or more of them, without reading what is before."""
        try:
            size, window = os.stat(self._path).st_size, _FIRST_LOOK_BYTES
            with open_plain(self._path) as file:
                while window < size:
                    file.seek(size - window)
                    data = file.read(window)
                    if data.count(b"\n") > lines:
                        self.position = size - window + data.index(b"\n") + 1
                        return
                    window *= 4
        except FileNotFoundError:
            return

    def before(self) -> Iterator[bytes]:
        """The lines from the file's start to `position`, once more, however many."""
        again = Tail(Path(self._path), end=self.position)
        while lines := again.read():
            yield from lines

    def _split(self, data: bytes, end: int) -> list[bytes]:
        """The lines of `data[:end]`. A line beyond the limit is passed over; an empty one stands for it."""
        self.position += end
        if data[end - 1 : end] != b"\n":
            self._in_long_line = True
            return []
        lines = data[: end - 1].split(b"\n")
        if self._in_long_line:
            lines[0], self._in_long_line = b"", False
        return lines
