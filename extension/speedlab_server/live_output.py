"""Ranks' output as it comes to one page that watches it.

A look costs a question about each rank's file. Only files that have changed are read, of at most so many ranks at once
as one answer holds, those first that were read longest ago; the others follow with the next looks.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import speedlab_server.messages as m
from speedlab_server.output import MOST_RANKS, Place, files_of, folder_of, output_of
from speedlab_server.problems import reading_text

if TYPE_CHECKING:
    from speedlab_server.handlers import Services

_FOLDER_SECONDS = 1.0
"""How often is looked whether the cluster is still there, and still the one that holds the run."""
_AGAIN_SECONDS = 2.0
"""After which output that could not be read is tried again."""


class WatchedOutput:
    """What ranks print, as one page watches it."""

    def __init__(self, watch: m.WatchOutput) -> None:
        self._watch = watch
        self._folder = Path()
        self._seen: dict[int, Place] = {}
        """How far each rank was read, in the order in which they were."""
        self._told = False
        self._problem = ""
        self._due = {"folder": 0.0, "again": 0.0}

    def news(self, services: Services) -> m.OutputNews | None:
        """What the page does not have yet; None when there is nothing. In a thread, one at a time."""
        now = time.monotonic()
        if now < self._due["again"]:
            return None
        try:
            output = self._read(services, now)
        except Exception as error:
            self._due["again"] = now + _AGAIN_SECONDS
            text = reading_text(error, "this output")
            if text == self._problem:
                return None
            self._problem = text
            return self._news(problem=text)
        problem = "" if self._problem else None
        self._problem = ""
        return None if output is None and problem is None else self._news(output=output, problem=problem)

    def _news(self, output: m.Output | None = None, problem: str | None = None) -> m.OutputNews:
        return m.OutputNews(kind=self._watch.kind, id=self._watch.id, output=output, problem=problem)

    def _read(self, services: Services, now: float) -> m.Output | None:
        if now >= self._due["folder"]:
            self._folder = folder_of(services.registry, self._watch.kind, self._watch.id)
            self._due["folder"] = now + _FOLDER_SECONDS
        # Looked at before it is read: what is printed in between is found again with the next look.
        files = files_of(self._folder)
        # Those that were never read, then those read longest ago: ranks that always print keep none waiting.
        turns = {rank: turn for turn, rank in enumerate(self._seen)}
        changed = [rank for rank, place in files.items() if self._seen.get(rank) != place]
        changed = sorted(changed, key=lambda rank: (turns.get(rank, -1), rank))[:MOST_RANKS]
        if not changed and self._told:
            return None
        output = output_of(self._folder, after=self._watch.after, ranks=changed)
        for rank in changed:
            self._seen.pop(rank, None)
            self._seen[rank] = files[rank]
        self._watch.after = output.cursor
        # The first answer comes also without a line: the page knows then that nothing was printed.
        if not output.ranks and self._told:
            return None
        self._told = True
        return output
