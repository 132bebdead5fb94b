"""What of a dashboard stays in a saved notebook: a plain plotly figure and a PNG, in an output of their own."""

from __future__ import annotations

import base64
import threading
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from speedlab.display.figure_style import Figure, on_paper, plain
from speedlab.telemetry.figures import header, overview_figure

if TYPE_CHECKING:
    from speedlab.hardware import Device
    from speedlab.telemetry.feed import Feed
    from speedlab.telemetry.series import History

PLOTLY_MIME = "application/vnd.plotly.v1+json"
_CONFIG = {"displaylogo": False, "showSendToCloud": False, "modeBarButtonsToRemove": ["sendChartToCloud"]}


class StaticPicture:
    """An output that is empty while the run goes on, and holds the plots once it rests."""

    def __init__(self, feed: Feed, devices: Sequence[Device] = ()) -> None:
        self._feed = feed
        self._devices = devices
        self._id = uuid.uuid4().hex
        self._placed = False
        self._wanted: dict[str, Any] | None = None
        self._lock = threading.Lock()

    def place(self) -> None:
        """Display the output in the present cell; what was shown before that appears now."""
        from IPython.display import display

        with self._lock:
            display(self._wanted or {"text/plain": ""}, raw=True, display_id=self._id)
            self._placed = True

    def show(self, history: History, *, png: bytes | None = None) -> None:
        """Put the plots as they are now into the output, with the page's own picture of them when there is one."""
        from IPython.display import update_display

        bundle = picture_bundle(self._feed, history, self._devices, png=png)
        with self._lock:
            self._wanted = bundle
            if self._placed:
                update_display(bundle, raw=True, display_id=self._id)


def show_figure(figure: Figure) -> None:
    """Display a figure, as `telemetry` and the planner give them, as an output that stays in a saved notebook."""
    from IPython.display import display

    title = (figure["layout"].get("title") or {}).get("text", "")
    display({"text/plain": title, PLOTLY_MIME: {**plain(on_paper(figure)), "config": _CONFIG}}, raw=True)


def picture_bundle(
    feed: Feed, history: History, devices: Sequence[Device] = (), *, png: bytes | None = None
) -> dict[str, Any]:
    """The output's MIME types: a plotly figure of some 20 KB, the headline as text, and a PNG when it is given."""
    head = header(history, name=feed.folder.name, status=feed.status)
    title = f"{head.text} · {head.mark} {head.state}"
    figure = overview_figure(history, title=title, devices=devices)
    bundle: dict[str, Any] = {"text/plain": title, PLOTLY_MIME: {**plain(figure), "config": _CONFIG}}
    if png is not None:
        bundle["image/png"] = base64.b64encode(png).decode()
    return bundle
