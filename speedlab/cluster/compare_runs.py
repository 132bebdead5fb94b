"""Compare runs in Python: figures, results, and the settings in which they differ."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from speedlab.cluster.files.cluster_dir import root
from speedlab.cluster.known_runs import RUN_MIME, RunError, note_seen, run_id
from speedlab.cluster.reattach import folder_named
from speedlab.cluster.run import Run
from speedlab.telemetry.feed import Feed
from speedlab.telemetry.figures.compare import (
    MOST_COMPARED,
    RunsSideBySide,
    RunStanding,
    compared_figures,
    facts_table,
    look_at,
    settings_table,
)
from speedlab.telemetry.figures.overview import compared_overview
from speedlab.telemetry.history import History
from speedlab.telemetry.records import RESTING, RunState
from speedlab.telemetry.run_folder import RunFolder, Status

if TYPE_CHECKING:
    from speedlab.display.figure_style import Figure


class Comparison:
    """Two or more runs with their current records. Displays itself as the last expression of a cell."""

    def __init__(self, feeds: Sequence[Feed]) -> None:
        """Compare the runs of these feeds.

        Args:
            feeds: One feed per run.

        Raises:
            RunError: If there are fewer than two runs, too many, or one twice.
        """
        paths = [feed.folder.path for feed in feeds]
        if len(set(paths)) < len(paths):
            twice = next(path for path in paths if paths.count(path) > 1)
            raise RunError(f"run {twice.name!r} is there twice; name different runs")
        if not 2 <= len(feeds) <= MOST_COMPARED:
            reported = f"{len(feeds)} run{'' if len(feeds) == 1 else 's'}"
            raise RunError(f"{reported}; 2 to {MOST_COMPARED} are compared, as in speedlab.compare('a', 'b')")
        self.feeds = list(feeds)
        self.version = 0
        """Number of polls that found something new."""
        self._lock = threading.Lock()
        self._histories = [History() for _ in feeds]
        self._looks: list[RunStanding | None] = [None for _ in feeds]

    @property
    def settings(self) -> RunsSideBySide:
        """Settings that differ: rows of `name` and `values`, with one value per run."""
        return settings_table(self._now())

    @property
    def facts(self) -> RunsSideBySide:
        """Results of each run: step, loss, speed, memory."""
        return facts_table(self._now())

    def figures(self) -> dict[str, Figure]:
        """Return plotly figures of all runs: loss, throughput, memory and parts of a step."""
        return compared_figures(self._now())

    def kept(self) -> dict[str, Any]:
        """Return MIME data for pages without a kernel: a picture, and the picture with tables."""
        looks = self._now()
        svg, html = compared_overview(looks)
        text = "\n\n".join(str(table) for table in (facts_table(looks), settings_table(looks)))
        return {"text/plain": text, "image/svg+xml": svg, "text/html": html}

    @property
    def run_data(self) -> dict[str, object]:
        """Ids of the runs for pages, stored under RUN_MIME."""
        paths = [feed.folder.path for feed in self.feeds]
        return {"version": 1, "runs": list(map(run_id, paths)), "names": [path.name for path in paths]}

    def make_known(self) -> None:
        """Register the runs with the Jupyter server by their ids; without that, it does not display them."""
        with contextlib.suppress(OSError):
            root().mkdir(mode=0o700, parents=True, exist_ok=True)
            for feed in self.feeds:
                note_seen(root(), feed.folder.path)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        self.make_known()
        return {**self.kept(), RUN_MIME: self.run_data}

    def __repr__(self) -> str:
        return str(self.kept()["text/plain"])

    # The interface of Feed, so that a dashboard can follow several runs

    @property
    def name(self) -> str:
        """Names of the runs."""
        return " · ".join(feed.folder.name for feed in self.feeds)

    @property
    def folder(self) -> Comparison:
        """This object: it has the `name` and `read_status` that a dashboard needs of a folder."""
        return self

    @property
    def status(self) -> Status:
        """Status of all runs together: at rest when every run rests."""
        return _together([feed.status for feed in self.feeds])

    def read_status(self) -> Status:
        """Read the status of all runs from their folders.

        Raises:
            RunFolderError: If a folder is damaged.
        """
        return _together([feed.folder.read_status() for feed in self.feeds])

    @property
    def looks(self) -> list[RunStanding]:
        """State of each run at the last poll."""
        return [look for look in self._looks if look is not None]

    def poll(self, *, files: bool = False) -> bool:
        """Read new records; return whether there were any. Thread-safe.

        Args:
            files: Whether to read the files, too; see `Feed.poll`.
        """
        news = False
        with self._lock:
            for number, (feed, history) in enumerate(zip(self.feeds, self._histories, strict=True)):
                if feed.poll(files=files) or self._looks[number] is None:
                    history.update(feed.records, feed.events)
                    self._looks[number] = look_at(feed.folder.name, history, feed.status, feed.folder.config)
                    news = True
            self.version += news
        return news

    def close(self) -> None:
        """Close the streams of the runs."""
        for feed in self.feeds:
            feed.close()

    def _now(self) -> list[RunStanding]:
        self.poll(files=True)
        return self.looks


def _together(statuses: Sequence[Status]) -> Status:
    states = [status.state for status in statuses]
    computing = [state for state in states if state not in RESTING]
    # All rest: prefer a paused run, which may continue, so that a picture made now is updated after the run has ended.
    return Status(state=(computing or [state for state in states if state is RunState.PAUSED] or states)[0])


def compare(*runs: Run | RunFolder | str | os.PathLike[str]) -> Comparison:
    """Compare two to eight runs.

    Args:
        *runs: Handles, or names or folders of runs.

    Raises:
        RunError: If there is no such run, or one is given twice.
        RunFolderError: If a folder cannot be read.
    """
    folders = [run.folder if isinstance(run, Run) else _folder(run) for run in runs]
    return Comparison([Feed(folder) for folder in folders])


def _folder(run: RunFolder | str | os.PathLike[str]) -> RunFolder:
    return run if isinstance(run, RunFolder) else folder_named(run)
