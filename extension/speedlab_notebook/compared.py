"""Runs side by side in a notebook: what is displayed is drawn as the dashboard of one run is (dashboard.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import traitlets

from speedlab.cluster.compare import Comparison
from speedlab.telemetry.figures.deltas import ComparedDrawing
from speedlab_notebook.dashboard import Dashboard
from speedlab_notebook.static_picture import StaticPicture

if TYPE_CHECKING:
    from speedlab.telemetry.figures.deltas import Message
    from speedlab.telemetry.history import History
    from speedlab.telemetry.run_folder import Status


class _Drawing:
    """A ComparedDrawing as a dashboard asks its own."""

    def __init__(self, comparison: Comparison) -> None:
        self._comparison = comparison
        self._drawn = ComparedDrawing()

    def keyframe(self, status: Status) -> Message:
        return self._drawn.keyframe(self._comparison.looks)

    def next(self, status: Status, *, rewritten: bool = False) -> Message | None:
        return self._drawn.next(self._comparison.looks)


class ComparedPicture(StaticPicture):
    """An output with the runs as a page draws them, and their plots as they were when all had come to rest."""

    def __init__(self, comparison: Comparison) -> None:
        super().__init__(comparison)
        self._comparison = comparison

    def names(self) -> dict[str, object]:
        return self._comparison.run_data

    def bundle(self, history: History) -> dict[str, Any]:
        return self._comparison.kept()


class ComparedDashboard(Dashboard):
    """Several runs, live. `show(comparison)` makes one and displays it."""

    compares = traitlets.Bool(True).tag(sync=True)

    def new_drawing(self, feed: Any, name: str, devices: Sequence[Any]) -> Any:
        return _Drawing(feed)

    def _on_message(self, _: Any, content: dict[str, Any], buffers: Sequence[Any]) -> None:
        self.hear(content)

    def _take_news(self) -> None:
        self._version = self._feed.version


def show(comparison: Comparison) -> ComparedDashboard:
    """Display the runs side by side, and in the same output the picture that stays."""
    comparison.make_known()
    picture = ComparedPicture(comparison)
    dashboard = ComparedDashboard(comparison, name=comparison.name, picture=picture, owns_feed=True)
    picture.place(dashboard)
    return dashboard
