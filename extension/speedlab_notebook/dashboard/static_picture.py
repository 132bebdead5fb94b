"""The static part of a dashboard in a saved notebook: a picture and a table, in the output of the live view."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from speedlab.cluster.known_runs import RUN_MIME, run_data
from speedlab.display.figure_style import Figure, on_paper, plain
from speedlab.display.svg import figure_svg
from speedlab.telemetry.figures import header
from speedlab.telemetry.figures.overview import overview

if TYPE_CHECKING:
    from ipywidgets import DOMWidget

    from speedlab.cluster.compare_runs import Comparison
    from speedlab.hardware import Device
    from speedlab.telemetry.feed import Feed
    from speedlab.telemetry.history import History

WIDGET_MIME = "application/vnd.jupyter.widget-view+json"
PLOTLY_MIME = "application/vnd.plotly.v1+json"
_CONFIG = {"displaylogo": False, "showSendToCloud": False, "modeBarButtonsToRemove": ["sendChartToCloud"]}


class StaticPicture:
    """The output of a dashboard: the id of the run for the live view, and the plots of the last time the run rested."""

    def __init__(self, feed: Feed | Comparison, devices: Sequence[Device] = ()) -> None:
        """Prepare the output; `place` displays it.

        Args:
            feed: The run, or several runs side by side.
            devices: One device for each rank, for the capacities in the picture.
        """
        self._feed: Any = feed
        self._devices = devices
        self._id = uuid.uuid4().hex
        self._live: dict[str, Any] = {}
        self._kept: dict[str, Any] = {}
        self._placed = False
        self._lock = threading.Lock()

    def place(self, widget: DOMWidget) -> None:
        """Display the output in the present cell.

        Args:
            widget: The live view for pages whose server does not draw.
        """
        from IPython.display import display

        view = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
        with self._lock:
            self._live = {RUN_MIME: self.names(), WIDGET_MIME: view}
            display({**self._live, **self._kept}, raw=True, display_id=self._id)
            self._placed = True

    def names(self) -> dict[str, object]:
        """Return the id of the run, for pages whose server draws."""
        return run_data(self._feed.folder.path)

    def bundle(self, history: History) -> dict[str, Any]:
        """Return the static MIME types, which need no kernel and no server.

        Args:
            history: The step records and events of the run.
        """
        return picture_bundle(self._feed, history, self._devices)

    def show(self, history: History) -> None:
        """Put the present plots into the output.

        Args:
            history: The step records and events of the run.
        """
        from IPython.display import update_display

        kept = self.bundle(history)
        with self._lock:
            self._kept = kept
            if self._placed:
                update_display({**self._live, **kept}, raw=True, display_id=self._id)


def show_figure(figure: Figure) -> None:
    """Display a figure that stays in a saved notebook, with an SVG for pages without plotly.

    Args:
        figure: A figure of `telemetry` or of the planner.
    """
    from IPython.display import display

    title = (figure["layout"].get("title") or {}).get("text", "")
    data = {"text/plain": title, PLOTLY_MIME: {**plain(on_paper(figure)), "config": _CONFIG}}
    if (svg := figure_svg(figure)) is not None:
        data["image/svg+xml"] = svg
    display(data, raw=True)


def picture_bundle(feed: Feed, history: History, devices: Sequence[Device] = ()) -> dict[str, Any]:
    """Return the static MIME types of a dashboard: the headline as text, a picture, and the picture with a table.

    Args:
        feed: The run.
        history: The step records and events of the run.
        devices: One device for each rank.

    Returns:
        MIME type -> content; only text if the run has no record yet.
    """
    head = header(history, name=feed.folder.name, status=feed.status)
    title = f"{head.text} · {head.mark} {head.state}"
    if not history.latest:
        return {"text/plain": title}
    svg, html = overview(history, title=title, devices=devices)
    return {"text/plain": title, "image/svg+xml": svg, "text/html": html}
