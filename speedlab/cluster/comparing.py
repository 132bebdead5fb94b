"""Runs side by side, in Python: figures, what each has come to, and the settings in which they differ."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from speedlab.cluster.known_runs import RUN_MIME, RunError, run_id
from speedlab.cluster.reattach import folder_named
from speedlab.cluster.run import Run
from speedlab.telemetry.compared import (
    MOST_COMPARED,
    Look,
    RunsSideBySide,
    compared_figures,
    facts_table,
    look_at,
    settings_table,
)
from speedlab.telemetry.compared_overview import compared_overview
from speedlab.telemetry.feed import Feed
from speedlab.telemetry.folder import RunFolder, Status
from speedlab.telemetry.records import RESTING
from speedlab.telemetry.series import History

if TYPE_CHECKING:
    from speedlab.display.figure_style import Figure


class Comparison:
    """Two or more runs, as they stand whenever somebody asks. As the last line of a cell it shows itself."""

    def __init__(self, feeds: Sequence[Feed]) -> None:
        """Raises RunError for fewer than two runs, for one that is there twice, and for too many."""
        paths = [feed.folder.path for feed in feeds]
        if len(set(paths)) < len(paths):
            twice = next(path for path in paths if paths.count(path) > 1)
            raise RunError(f"run {twice.name!r} is there twice; name different runs")
        if not 2 <= len(feeds) <= MOST_COMPARED:
            told = f"{len(feeds)} run{'' if len(feeds) == 1 else 's'}"
            raise RunError(f"{told}; 2 to {MOST_COMPARED} are compared, as in speedlab.compare('a', 'b')")
        self._feeds = [(feed, History()) for feed in feeds]

    @property
    def names(self) -> list[str]:
        return [feed.folder.name for feed, _ in self._feeds]

    @property
    def settings(self) -> RunsSideBySide:
        """The settings in which they differ: rows of `name` and `values`, a value for each run."""
        return settings_table(self.looks())

    @property
    def facts(self) -> RunsSideBySide:
        """What each has come to: step, loss, speed, memory."""
        return facts_table(self.looks())

    def figures(self) -> dict[str, Figure]:
        """Loss, throughput, memory and anatomy of all of them, as plotly takes them."""
        return compared_figures(self.looks())

    def looks(self, *, files: bool = True) -> list[Look]:
        """How each stands now; `files`: whatever their streams say, as Feed.poll has it."""
        found = []
        for feed, history in self._feeds:
            feed.poll(files=files)
            history.update(feed.records, feed.events)
            found.append(look_at(feed.folder.name, history, feed.status, feed.folder.config))
        return found

    def bundle(self) -> dict[str, Any]:
        """Its MIME types: for pages that show it live through their server, and for where nothing runs."""
        looks = self.looks()
        svg, html = compared_overview(looks)
        text = "\n\n".join(str(table) for table in (facts_table(looks), settings_table(looks)))
        return {"text/plain": text, "image/svg+xml": svg, "text/html": html, RUN_MIME: self.run_data}

    @property
    def run_data(self) -> dict[str, object]:
        """Names the runs to pages, under RUN_MIME."""
        ids = [run_id(feed.folder.path) for feed, _ in self._feeds]
        return {"version": 1, "runs": ids, "names": self.names}

    # As a dashboard follows it: like the feed of one run.

    @property
    def folders(self) -> list[RunFolder]:
        return [feed.folder for feed, _ in self._feeds]

    @property
    def rests(self) -> bool:
        """Whether all runs do, as they were last looked at."""
        return all(feed.status.state in RESTING for feed, _ in self._feeds)

    def close(self) -> None:
        """Leave the streams of the runs."""
        for feed, _ in self._feeds:
            feed.close()

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        return self.bundle()

    def __repr__(self) -> str:
        return str(self.bundle()["text/plain"])


def compare(*runs: Run | RunFolder | str | os.PathLike[str]) -> Comparison:
    """Two to eight runs side by side: handles, or the names or folders of runs.

    Raises RunError where there is no such run, or one is there twice, RunFolderError for a folder that cannot be read.
    """
    folders = [run.folder if isinstance(run, Run) else _folder(run) for run in runs]
    return Comparison([Feed(folder) for folder in folders])


def _folder(run: RunFolder | str | os.PathLike[str]) -> RunFolder:
    return run if isinstance(run, RunFolder) else folder_named(run)
