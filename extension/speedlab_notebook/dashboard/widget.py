"""The dashboard of one run, or of several runs side by side.

One output has three forms, and a page shows the first form it knows:

1. the id of the run: JupyterLab and Notebook draw it through their server's extension (extension/lab/src/dashboard);
2. a widget with the same view, fed by a thread of this kernel, for pages whose server does not draw;
3. a picture with a table, for pages without kernel and server (static_picture.py).

The thread polls the run's feed ten times a second while a view is watching. If the server draws, the thread reads only
the run's state until a widget sends a message. The thread always leaves the picture when the run comes to rest.
telemetry/figures/deltas.py defines the messages.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets
from ipywidgets import widget_serialization

from speedlab.cluster.compare_runs import Comparison
from speedlab.cluster.files.cluster_dir import root
from speedlab.cluster.known_runs import note_seen
from speedlab.telemetry.feed import Feed
from speedlab.telemetry.figures.deltas import SERVED, ComparedDrawing, Drawing, Message
from speedlab.telemetry.history import History
from speedlab.telemetry.prediction import prediction_of
from speedlab.telemetry.records import RESTING
from speedlab.telemetry.run_folder import RunFolderError
from speedlab.telemetry.tables import SegmentError, tensors_in
from speedlab_notebook.anywidget_assets import PlotlyBundle, as_text, built
from speedlab_notebook.dashboard.static_picture import StaticPicture

if TYPE_CHECKING:
    from speedlab.cluster import Run
    from speedlab.hardware import Device
    from speedlab.telemetry.run_folder import RunFolder, Status


log = logging.getLogger(__name__)

TICK_SECONDS = 0.1
SILENT_TICK_SECONDS = 1.0
"""Interval for updates of the header line without new records, because it shows how long a run has been silent."""
RESTING_TICK_SECONDS = 0.5
"""Poll interval for a run that rests, which another kernel may resume, and for a dashboard without viewers."""
FIRST_KEYFRAME_SECONDS = 1.0
LAST_KEYFRAME_SECONDS = 16.0
"""The interval between automatic keyframes doubles from FIRST_KEYFRAME_SECONDS to this.

A page that missed a tick catches up at the next keyframe, even while a cell keeps the kernel from answering.
"""
SILENCE_SECONDS = 90.0
"""A view that sent nothing for this long, while the kernel could receive, counts as closed."""
JOIN_SECONDS = 5.0
"""Longest wait for the thread at closing; a slow disk may delay it. The thread then ends by itself."""


class Dashboard(anywidget.AnyWidget):
    """The live view of a run; `show` makes one and displays it."""

    bundle = traitlets.Instance(PlotlyBundle, allow_none=True).tag(sync=True, **widget_serialization)
    """None until a view has sent a message, if the server draws."""
    keyframe = traitlets.Dict().tag(sync=True)
    """{"message": the last Keyframe, "buffers": [base64 text, …]}; empty if the server draws."""

    def __init__(
        self,
        feed: Feed | Comparison,
        *,
        name: str,
        devices: Sequence[Device] = (),
        picture: StaticPicture | None = None,
        owns_feed: bool = False,
    ) -> None:
        """Read the run and start the thread.

        Args:
            feed: The run, or several runs side by side.
            name: The title of the dashboard.
            devices: One device for each rank.
            picture: The static picture to update when the run rests; None for none.
            owns_feed: Whether closing the dashboard also closes `feed`.
        """
        self._feed: Any = feed
        self._owns_feed = owns_feed
        self._history = History()
        self._name, self._devices = name, devices
        self._known_events = -1
        self._drawing = self.new_drawing(feed, name, devices)
        self._own: dict[str, Drawing] = {}
        """Views with their own smoothing -> the drawing that only this view receives."""
        self._steps: dict[str, int] = {}
        """View -> the step whose pipeline the user points at in this view; the last entry counts for the others."""
        self._picture = picture
        self._version = -1
        self._rewritten = False
        self._trouble = ""
        """Why the page cannot be updated; "" if it can."""
        # If the server draws, no view of this widget is visible until one says so; else (None) one may be visible.
        self._watching: set[str] | None = set() if os.environ.get(SERVED) else None
        self._heard = time.monotonic()
        self._spoke: dict[str, float] = {}
        """View -> the time of its last message."""
        self._loop = _running_loop()
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        feed.poll(files=True)
        self._take_news()
        self._pictured = self._feed.status.state
        """The run's state when the picture was last updated; each state at rest gets its own picture."""
        self._look_again = 0.0
        self._esm, self._css = (built(name).read_text() for name in ("dashboard.js", "dashboard.css"))
        first: dict[str, Any] = {}
        if self.watched:
            first = {"bundle": PlotlyBundle.shared(), "keyframe": _packed(self._drawing.keyframe(feed.status))}
        super().__init__(**first)
        self.on_msg(self._on_message)
        atexit.register(self._end)  # Ends the thread while the interpreter still has what the thread uses.
        if self._picture is not None:
            self._picture.show(self._history)
        self._start()

    def new_drawing(self, feed: Any, name: str, devices: Sequence[Device]) -> Drawing:
        """Return the drawing that computes what the page receives next.

        Args:
            feed: The run.
            name: The title.
            devices: One device for each rank.
        """
        return Drawing(self._history, name=name, devices=devices)

    def send(self, content: Any, buffers: Sequence[bytes] | None = None) -> None:
        """Send a message to the page.

        Args:
            content: The message.
            buffers: Binary buffers; sent as base64 text, because some gateways fail at binary messages.
        """
        super().send({**content, "buffers_as_text": list(map(as_text, buffers))} if buffers else content)

    # Messages of the page

    def _on_message(self, _: Any, content: dict[str, Any], buffers: Sequence[Any]) -> None:
        """Handle a Draw or a Segment message of a view (speedlab_server/schema)."""
        if content.get("type") == "Segment":
            self._tell_tensors(content)
        if not self.hear(content):
            return
        view, step, share = str(content.get("view")), content.get("step"), content.get("smoothing")
        watching = bool(content.get("watching"))
        step = step if isinstance(step, int) and watching else None
        with self._lock:
            if watching and isinstance(share, int | float):
                self._steps.pop(view, None)
                self._point()
                self._draw_for(view, float(share), step, keyframe=bool(content.get("keyframe")))
                return
            self._own.pop(view, None)
            self._steps.pop(view, None)
            self._steps |= {} if step is None else {view: step}
            self._point()

    def _point(self) -> None:
        """Show the pipeline of the step that a view points at, the latest of several. Called with the lock."""
        pointed = next(reversed(self._steps.values()), None)
        changed, self._drawing.pipeline_step = pointed != self._drawing.pipeline_step, pointed
        if changed and (message := self._drawing.tick(self._feed.status)) is not None:
            self.send(message[0], buffers=message[1])

    def _draw_for(self, view: str, share: float, step: int | None, *, keyframe: bool) -> None:
        """Give a view its own smoothing.

        Other views, and the first picture of a new view, keep the default smoothing.
        """
        if keyframe or view not in self._own:
            self._own[view] = Drawing(self._history, name=self._name, devices=self._devices)
        self._own[view].smooth(share)
        self._own[view].pipeline_step = step
        self._send_own(view)

    def _send_own(self, view: str, *, rewritten: bool = False) -> None:
        message = self._own[view].next(self._feed.status, rewritten=rewritten)
        if message is not None:
            self.send({"type": "OwnDrawing", "view": view, "drawn": message[0]}, buffers=message[1])

    def _tell_tensors(self, asked: dict[str, Any]) -> None:
        """Send the tensors of the memory segment that the user selected."""
        rank, category, place = (asked.get(name) for name in ("rank", "category", "place"))
        try:
            reported = tensors_in(
                self._feed.folder,
                self._history.latest,
                rank=rank if isinstance(rank, int) else -1,
                category=str(category),
                place=str(place),
            )
        except SegmentError as error:
            reported = {"type": "Problem", "text": str(error)}
        self.send(reported)

    def hear(self, content: dict[str, Any]) -> bool:
        """Handle a Draw message: whether the view is watching, and whether it missed something.

        Args:
            content: A message of a view.

        Returns:
            Whether the message was a Draw.
        """
        self._heard = time.monotonic()
        if content.get("type") != "Draw":
            return False
        self._spoke[str(content.get("view"))] = self._heard
        self._set_watching(str(content.get("view")), bool(content.get("watching")))
        if content.get("keyframe") and str(content.get("view")) not in self._own:
            self._send_keyframe()
        return True

    def _set_watching(self, view: str, on: bool) -> None:
        """Start the thread when the first view becomes visible; wake it to rest after the last view is gone."""
        if self._watching is None:
            self._watching = set()
        known = view in self._watching
        (self._watching.add if on else self._watching.discard)(view)
        if on and not known:
            if self.bundle is None:
                self.bundle = PlotlyBundle.shared()
            self._look(keyframe=True)
            if self._trouble:
                self.send({"type": "Problem", "text": self._trouble})
            self._start()
            self._wake.set()
        if not self._watching:
            self._wake.set()

    @property
    def watched(self) -> bool:
        """Whether a view may be visible. If no server draws, this is assumed until the first view sends a message."""
        return self._watching is None or bool(self._watching)

    # The thread

    @property
    def running(self) -> bool:
        """Whether the thread that polls is alive."""
        return self._thread is not None and self._thread.is_alive()

    def _start(self) -> None:
        with self._lock:
            if self.running or self._closed.is_set():
                return
            self._thread = threading.Thread(target=self._work, name="speedlab-dashboard", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        wait = FIRST_KEYFRAME_SECONDS
        due = time.monotonic() + wait
        while not self._closed.is_set():
            if not self.watched:
                self._look_for_rest()
                self._wait(RESTING_TICK_SECONDS)
                continue
            keyframe = time.monotonic() >= due and not self._at_rest
            self._look(keyframe=keyframe)
            if keyframe:
                wait = min(2 * wait, LAST_KEYFRAME_SECONDS)
                due = time.monotonic() + wait
            self._forget_silent()
            self._wait(RESTING_TICK_SECONDS if self._at_rest or self._trouble else TICK_SECONDS)
        self._let_go()

    def _forget_silent(self) -> None:
        """Drop views that were silent for long. A view of a reloaded page does not report that it is gone."""
        if not any(map(_is_silent, [self._heard, *self._spoke.values()])) or not self._kernel_listens():
            return
        with self._lock:
            if _is_silent(self._heard):  # Also if no view has sent a message yet.
                self._watching = set()
            for view in [view for view, heard in self._spoke.items() if _is_silent(heard)]:
                del self._spoke[view]
                self._set_watching(view, False)
                self._own.pop(view, None)
                self._steps.pop(view, None)
            self._point()

    def _wait(self, seconds: float) -> None:
        self._wake.wait(seconds)
        self._wake.clear()

    def _look_for_rest(self) -> None:
        """Without viewers, read only the run's state, and leave a picture when the run comes to rest."""
        with contextlib.suppress(RunFolderError, OSError):  # Retried at the next poll.
            state = self._feed.folder.read_status().state
            if state in RESTING and state != self._pictured:
                self._feed.poll(files=True)
                with self._lock:
                    self._take_news()
                self._leave_picture()
            self._pictured = state

    def _kernel_listens(self) -> bool:
        """Return whether the kernel's loop answers within 1 second.

        While a cell blocks the loop, messages of living pages are not received, so silence means nothing.
        """
        if self._loop is None or self._loop.is_closed():
            return False
        answered = threading.Event()
        self._loop.call_soon_threadsafe(answered.set)
        return answered.wait(1.0)

    def _look(self, *, keyframe: bool) -> None:
        """Call `update`, and send a keyframe if one is due.

        An error is shown on the page, which would otherwise stop without a reason.
        """
        trouble = ""
        try:
            self.update()
            if keyframe:
                self._send_keyframe()
        except Exception as error:  # For example an unexpected record, or a damaged folder: keep the thread alive.
            self._version = -1
            trouble = f"This view cannot read the run, and tries again: {type(error).__name__}: {error}"
            if trouble != self._trouble:
                log.exception("a dashboard of %s cannot be drawn", self._feed.folder.name)
        if trouble != self._trouble:
            self._trouble = trouble
            self.send({"type": "Problem", "text": trouble})

    def update(self) -> None:
        """Poll the feed and send new data to the page; update the picture if the run came to rest."""
        self._feed.poll()
        if self._feed.version == self._version and time.monotonic() < self._look_again:
            return
        self._look_again = time.monotonic() + SILENT_TICK_SECONDS
        state = self._feed.status.state
        came_to_rest = self._at_rest and state != self._pictured
        if came_to_rest:
            self._feed.poll(files=True)
        with self._lock:
            self._take_news()
            message = self._drawing.next(self._feed.status, rewritten=self._rewritten)
            for view in self._own:
                self._send_own(view, rewritten=self._rewritten)
            self._rewritten = False
            if message is not None and message[0]["type"] != "Changes":
                self.keyframe = _packed(message)
            elif message is not None:
                self.send(message[0], buffers=message[1])
            self._pictured = state
        if came_to_rest:
            self._leave_picture()

    def _leave_picture(self) -> None:
        """Put the present plots into the notebook."""
        if self._picture is not None:
            self._picture.show(self._history)

    def _take_news(self) -> None:
        self._version = self._feed.version
        if len(self._feed.events) != self._known_events:  # A start or a new layout changes it.
            self._known_events = len(self._feed.events)
            self._history.predicted = prediction_of(self._feed.folder.config, self._feed.events, self._devices)
        self._rewritten |= self._history.update(self._feed.records, self._feed.events)

    def _send_keyframe(self) -> None:
        with self._lock:
            self.keyframe = _packed(self._drawing.keyframe(self._feed.status))

    @property
    def _at_rest(self) -> bool:
        return self._feed.status.state in RESTING

    def _end(self) -> None:
        """End the thread and wait for it; no new thread starts afterwards."""
        self._closed.set()
        self._wake.set()
        with self._lock:  # A `_start` in another thread has finished when we hold the lock.
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(JOIN_SECONDS)

    def close(self) -> None:
        """Stop and remove the view from the page; the static picture stays."""
        self._end()
        atexit.unregister(self._end)
        if not self.running:
            self._let_go()
        super().close()

    def _let_go(self) -> None:
        """Close the feed if the dashboard owns it.

        The thread does this at its end, so that `close` never waits for a slow read. Without a thread `close` does it.
        """
        if self._owns_feed:
            self._feed.close()


def _packed(message: Message) -> dict[str, Any]:
    """Return a message as the `keyframe` trait holds it."""
    return {"message": message[0], "buffers": list(map(as_text, message[1]))}


def show(run: Run | RunFolder | str | Path) -> Dashboard:
    """Display the dashboard of a run, with the static picture in the same output.

    Args:
        run: A run's handle, folder or path.

    Returns:
        The displayed dashboard.

    Raises:
        RunFolderError: There is no such run.
    """
    feed, devices = _feed_of(run)
    with contextlib.suppress(OSError):  # The server finds the run by its id; if this fails, the widget draws.
        root().mkdir(mode=0o700, parents=True, exist_ok=True)
        note_seen(root(), feed.folder.path)
    picture = StaticPicture(feed, devices)
    owns_feed = feed is not getattr(run, "feed", None)
    dashboard = Dashboard(feed, name=feed.folder.name, devices=devices, picture=picture, owns_feed=owns_feed)
    picture.place(dashboard)
    return dashboard


def _feed_of(run: Any) -> tuple[Feed, Sequence[Device]]:
    feed = getattr(run, "feed", None)
    if feed is None:
        return Feed(run), ()
    devices: Sequence[Device] = ()
    if run.cluster is not None:
        from speedlab.cluster import ClusterError

        with contextlib.suppress(ClusterError):  # The engines are gone; the run can still be shown.
            devices = run.cluster.devices
    return feed, devices


def _running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the kernel's event loop; None outside of one."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _is_silent(heard: float) -> bool:
    return time.monotonic() - heard > SILENCE_SECONDS


class _Drawing:
    """Adapter: a ComparedDrawing with the methods of Drawing that a dashboard calls."""

    def __init__(self, comparison: Comparison) -> None:
        self._comparison = comparison
        self._drawn = ComparedDrawing()

    def keyframe(self, status: Status) -> Message:
        """Return a keyframe of all runs.

        Args:
            status: Ignored; each run has its own status.
        """
        return self._drawn.keyframe(self._comparison.looks)

    def next(self, status: Status, *, rewritten: bool = False) -> Message | None:
        """Return the next message, or None.

        Args:
            status: Ignored; each run has its own status.
            rewritten: Ignored.
        """
        return self._drawn.next(self._comparison.looks)


class ComparedPicture(StaticPicture):
    """The output of several runs: their ids for the live view, and their plots of the last time all rested."""

    def __init__(self, comparison: Comparison) -> None:
        """Prepare the output.

        Args:
            comparison: The runs.
        """
        super().__init__(comparison)
        self._comparison = comparison

    def names(self) -> dict[str, object]:
        """Return the ids of the runs, for pages whose server draws."""
        return self._comparison.run_data

    def bundle(self, history: History) -> dict[str, Any]:
        """Return the static MIME types.

        Args:
            history: Ignored; the comparison has the histories of its runs.
        """
        return self._comparison.kept()


class ComparedDashboard(Dashboard):
    """The live view of several runs; `show_comparison` makes one and displays it."""

    compares = traitlets.Bool(True).tag(sync=True)

    def new_drawing(self, feed: Any, name: str, devices: Sequence[Any]) -> Any:
        """Return the drawing of the comparison.

        Args:
            feed: The comparison.
            name: Ignored.
            devices: Ignored.
        """
        return _Drawing(feed)

    def _on_message(self, _: Any, content: dict[str, Any], buffers: Sequence[Any]) -> None:
        self.hear(content)

    def _take_news(self) -> None:
        self._version = self._feed.version


def show_comparison(comparison: Comparison) -> ComparedDashboard:
    """Display several runs side by side, with the static picture in the same output.

    Args:
        comparison: The runs.

    Returns:
        The displayed dashboard.
    """
    comparison.make_known()
    picture = ComparedPicture(comparison)
    dashboard = ComparedDashboard(comparison, name=comparison.name, picture=picture, owns_feed=True)
    picture.place(dashboard)
    return dashboard
