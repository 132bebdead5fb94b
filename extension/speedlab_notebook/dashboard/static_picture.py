"""What stays of a dashboard in a saved notebook: a picture and a table, in the output that also shows it live."""

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
    """An output with the run as a page draws it, and the plots as they were when the run last came to rest."""

    def __init__(self, feed: Feed | Comparison, devices: Sequence[Device] = ()) -> None:
        self._feed: Any = feed
        self._devices = devices
        self._id = uuid.uuid4().hex
        self._live: dict[str, Any] = {}
        self._kept: dict[str, Any] = {}
        self._placed = False
        self._lock = threading.Lock()

    def place(self, widget: DOMWidget) -> None:
        """Display the output in the present cell, with `widget` for places whose server does not draw."""
        from IPython.display import display

        view = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
        with self._lock:
            self._live = {RUN_MIME: self.names(), WIDGET_MIME: view}
            display({**self._live, **self._kept}, raw=True, display_id=self._id)
            self._placed = True

    def names(self) -> dict[str, object]:
        """What names it to pages whose server draws."""
        return run_data(self._feed.folder.path)

    def bundle(self, history: History) -> dict[str, Any]:
        """What stays: MIME types for where nothing runs."""
        return picture_bundle(self._feed, history, self._devices)

    def show(self, history: History) -> None:
        """Put the plots as they are now into the output."""
        from IPython.display import update_display

        kept = self.bundle(history)
        with self._lock:
            self._kept = kept
            if self._placed:
                update_display({**self._live, **kept}, raw=True, display_id=self._id)


def show_figure(figure: Figure) -> None:
    """Display a figure, as `telemetry` and the planner give them, as an output that stays in a saved notebook, with a
    drawing of it for places without plotly."""
    from IPython.display import display

    title = (figure["layout"].get("title") or {}).get("text", "")
    data = {"text/plain": title, PLOTLY_MIME: {**plain(on_paper(figure)), "config": _CONFIG}}
    if (svg := figure_svg(figure)) is not None:
        data["image/svg+xml"] = svg
    display(data, raw=True)


def picture_bundle(feed: Feed, history: History, devices: Sequence[Device] = ()) -> dict[str, Any]:
    """The output's MIME types for where nothing runs: the headline, a picture, and the picture with a table."""
    head = header(history, name=feed.folder.name, status=feed.status)
    title = f"{head.text} · {head.mark} {head.state}"
    if not history.latest:
        return {"text/plain": title}
    svg, html = overview(history, title=title, devices=devices)
    return {"text/plain": title, "image/svg+xml": svg, "text/html": html}
