"""Read the lines of a file that grows, gets replaced, or is damaged."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from speedlab.telemetry.run_folder import open_plain, plain_descriptor
from speedlab.telemetry.stream import LINE_LIMIT_BYTES

_FIRST_LOOK_BYTES = 1 << 15


class Tail:
    """Reader of the complete lines of a growing file. Bytes after the last newline wait for the next call."""

    BUDGET_BYTES = 64 * LINE_LIMIT_BYTES

    def __init__(self, path: Path, *, end: int | None = None) -> None:
        """Start at the beginning of a file.

        Args:
            path: The file; may not exist yet.
            end: Byte offset at which to stop; None for the end of the file.
        """
        self.position = 0
        """Byte offset of the first unread line."""
        self.restarted = False
        """Whether the last read started from the beginning, because the file had become shorter."""
        self._path, self._end = str(path), end
        self._size_seen = 0
        self._in_long_line = False

    def read(self) -> list[bytes]:
        """Return the lines completed since the last call, at most 64 MiB at once."""
        self.restarted = False
        try:
            size = os.stat(self._path).st_size
        except FileNotFoundError:
            return []
        size = size if self._end is None else min(size, self._end)
        # Unchanged since the last call (perhaps with an unfinished line), or read to the end.
        if size == self._size_seen or size == self.position:
            return []
        if size < self.position:
            self.position, self.restarted = 0, True
        self._size_seen = size
        lines: list[bytes] = []
        stop = min(self.position + self.BUDGET_BYTES, size)
        # Use a raw descriptor: a buffered file makes twice as many system calls, and a tick reads the files of all
        # ranks.
        file = plain_descriptor(self._path)
        try:
            while self.position < stop:
                if not (data := os.pread(file, min(LINE_LIMIT_BYTES, size - self.position), self.position)):
                    break
                end = data.rfind(b"\n") + 1
                # Only an unfinished line is left.
                if end == 0 and len(data) < LINE_LIMIT_BYTES:
                    break
                lines += self._split(data, end or len(data))
            else:
                if self.position < size:
                    self._size_seen = -1  # More to read: do not count this size as read.
        except OSError as error:
            error.filename = self._path  # Errors of a descriptor have no file name.
            raise
        finally:
            os.close(file)
        return lines

    def skip(self, lines: int) -> None:
        """Move to the start of the last `lines` complete lines, or somewhat earlier, without reading what precedes.

        Args:
            lines: Number of lines.
        """
        try:
            size, window = os.stat(self._path).st_size, _FIRST_LOOK_BYTES
            with open_plain(self._path) as file:
                while window < size:
                    file.seek(size - window)
                    data = file.read(window)
                    # One newline more than lines, because the window may begin within a line.
                    if data.count(b"\n") > lines:
                        self.position = size - window + data.index(b"\n") + 1
                        return
                    window *= 4
        except FileNotFoundError:
            return

    def before(self) -> Iterator[bytes]:
        """Yield the lines from the start of the file to `position` again."""
        again = Tail(Path(self._path), end=self.position)
        while lines := again.read():
            yield from lines

    def _split(self, data: bytes, end: int) -> list[bytes]:
        """Return the lines of `data[:end]`. A line above the limit is skipped and becomes an empty line."""
        self.position += end
        if data[end - 1 : end] != b"\n":
            self._in_long_line = True
            return []
        lines = data[: end - 1].split(b"\n")
        if self._in_long_line:
            lines[0], self._in_long_line = b"", False
        return lines
