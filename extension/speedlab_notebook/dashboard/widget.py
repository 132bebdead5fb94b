"""The dashboard: what it displays is drawn by the Jupyter server where that has our extension, else by this kernel.

An output has several faces, of which a place shows the first it knows: the run's id, which JupyterLab and Notebook draw
through their server (extension/lab/src/dashboard); a widget of the same view, fed by a thread of this kernel, for the
others; and a picture with a table, for where nothing runs (static_picture.py). What is sent is in
telemetry/figures/deltas.py.

The thread polls the run's feed ten times a second while somebody looks. Where the server draws, it reads the run's
state alone, until a widget has spoken; it always leaves the picture when the run comes to rest.

Runs side by side in a notebook: what is displayed is drawn as the dashboard of one run is (dashboard.py).
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
"""How often the header line is looked at when nothing comes: it tells how long a run has been silent."""
RESTING_TICK_SECONDS = 0.5
"""A run that rests may be resumed by anybody; its state alone is read so often, too."""
FIRST_KEYFRAME_SECONDS = 1.0
LAST_KEYFRAME_SECONDS = 16.0
"""Keyframes come by themselves at intervals that double between these two. A page that missed a tick catches up with
the next one, even while a cell keeps the kernel from answering."""
SILENCE_SECONDS = 90.0
"""A page that has said nothing for so long, though the kernel would have heard it, was closed."""
JOIN_SECONDS = 5.0
"""How long closing waits for the thread, which a slow disk may hold. The thread then ends by itself."""


class Dashboard(anywidget.AnyWidget):
    """A run, live. `show(run)` makes one and displays it."""

    bundle = traitlets.Instance(PlotlyBundle, allow_none=True).tag(sync=True, **widget_serialization)
    """None until a view has spoken, where the server draws."""
    keyframe = traitlets.Dict().tag(sync=True)
    """{"message": the last Keyframe, "buffers": [as `as_text` gives them, …]}; empty where the server draws."""

    def __init__(
        self,
        feed: Feed | Comparison,
        *,
        name: str,
        devices: Sequence[Device] = (),
        picture: StaticPicture | None = None,
        owns_feed: bool = False,
    ) -> None:
        self._feed: Any = feed
        self._owns_feed = owns_feed
        self._history = History()
        self._name, self._devices = name, devices
        self._known_events = -1
        self._drawing = self.new_drawing(feed, name, devices)
        self._own: dict[str, Drawing] = {}
        """By view, of those that smooth by a share of their own: what they are sent, and nobody else."""
        self._steps: dict[str, int] = {}
        """By view, the step whose pipeline a person points at there: the last one counts for all of the others."""
        self._picture = picture
        self._version = -1
        self._rewritten = False
        self._trouble = ""
        """Why the page cannot be told what is new; "" while it is."""
        self._watching: set[str] | None = set() if os.environ.get(SERVED) else None
        self._heard = time.monotonic()
        self._spoke: dict[str, float] = {}
        """When each view has spoken last."""
        self._loop = _running_loop()
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        feed.poll(files=True)
        self._take_news()
        self._pictured = self._feed.status.state
        """How the run was when the picture was left: each state at rest has its own."""
        self._look_again = 0.0
        self._esm, self._css = (built(name).read_text() for name in ("dashboard.js", "dashboard.css"))
        first: dict[str, Any] = {}
        if self.watched:
            first = {"bundle": PlotlyBundle.shared(), "keyframe": _packed(self._drawing.keyframe(feed.status))}
        super().__init__(**first)
        self.on_msg(self._on_message)
        atexit.register(self._end)  # While all that the thread uses is still there.
        if self._picture is not None:
            self._picture.show(self._history)
        self._start()

    def new_drawing(self, feed: Any, name: str, devices: Sequence[Device]) -> Drawing:
        """What says what a page is sent next."""
        return Drawing(self._history, name=name, devices=devices)

    def send(self, content: Any, buffers: Sequence[bytes] | None = None) -> None:
        """Tell the page."""
        super().send({**content, "buffers_as_text": list(map(as_text, buffers))} if buffers else content)

    # What the page says

    def _on_message(self, _: Any, content: dict[str, Any], buffers: Sequence[Any]) -> None:
        """A Draw or a Segment of a view (speedlab_server/schema/__init__.py)."""
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
        """Show the step of the pipeline at which a view points, the last one that does. Called with the lock."""
        pointed = next(reversed(self._steps.values()), None)
        changed, self._drawing.pipeline_step = pointed != self._drawing.pipeline_step, pointed
        if changed and (message := self._drawing.tick(self._feed.status)) is not None:
            self.send(message[0], buffers=message[1])

    def _draw_for(self, view: str, share: float, step: int | None, *, keyframe: bool) -> None:
        """How a view smooths is its own choice: the other views of this widget, and the picture that a new one begins
        with, keep the usual way."""
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
        """What is in the segment that a person has chosen."""
        rank, category, place = (asked.get(name) for name in ("rank", "category", "place"))
        try:
            told = tensors_in(
                self._feed.folder,
                self._history.latest,
                rank=rank if isinstance(rank, int) else -1,
                category=str(category),
                place=str(place),
            )
        except SegmentError as error:
            told = {"type": "Problem", "text": str(error)}
        self.send(told)

    def hear(self, content: dict[str, Any]) -> bool:
        """What any view says in a Draw: whether it is watching, and that it has missed something. False for others."""
        self._heard = time.monotonic()
        if content.get("type") != "Draw":
            return False
        self._spoke[str(content.get("view"))] = self._heard
        self._set_watching(str(content.get("view")), bool(content.get("watching")))
        if content.get("keyframe") and str(content.get("view")) not in self._own:
            self._send_keyframe()
        return True

    def _set_watching(self, view: str, on: bool) -> None:
        """Start when the first view comes into sight, stop when the last one has gone."""
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
        """Whether somebody may be looking: until the first view has spoken, somebody may, where no server draws."""
        return self._watching is None or bool(self._watching)

    # The thread

    @property
    def running(self) -> bool:
        """Whether the thread that polls is at work."""
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
        """Views that have said nothing for long are gone, as those of a page that was reloaded: they tell nobody."""
        if not any(map(_is_silent, [self._heard, *self._spoke.values()])) or not self._kernel_listens():
            return
        with self._lock:
            if _is_silent(self._heard):  # Also where none has spoken yet.
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
        """Nobody looks: only the run's state is read, until there is a picture to be left."""
        with contextlib.suppress(RunFolderError, OSError):  # It may be read next time.
            state = self._feed.folder.read_status().state
            if state in RESTING and state != self._pictured:
                self._feed.poll(files=True)
                with self._lock:
                    self._take_news()
                self._leave_picture()
            self._pictured = state

    def _kernel_listens(self) -> bool:
        """Whether the kernel's loop is free, so that a living page would have been heard. While a cell keeps it, it is
        not, and silence says nothing."""
        if self._loop is None or self._loop.is_closed():
            return False
        answered = threading.Event()
        self._loop.call_soon_threadsafe(answered.set)
        return answered.wait(1.0)

    def _look(self, *, keyframe: bool) -> None:
        """`update`, and a keyframe where one is due. What keeps it from that is told on the page, which would stand
        still as if nothing had come."""
        trouble = ""
        try:
            self.update()
            if keyframe:
                self._send_keyframe()
        except Exception as error:  # A record or an event that nobody foresaw, a folder that was damaged.
            self._version = -1
            trouble = f"This view cannot read the run, and tries again: {type(error).__name__}: {error}"
            if trouble != self._trouble:
                log.exception("a dashboard of %s cannot be drawn", self._feed.folder.name)
        if trouble != self._trouble:
            self._trouble = trouble
            self.send({"type": "Problem", "text": trouble})

    def update(self) -> None:
        """Look at the feed and send what is new."""
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
        """Put the plots into the notebook as they are."""
        if self._picture is not None:
            self._picture.show(self._history)

    def _take_news(self) -> None:
        self._version = self._feed.version
        if len(self._feed.events) != self._known_events:  # They tell of a start and of changes of shape.
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
        """Let the thread end, and wait for it; none is started any more."""
        self._closed.set()
        self._wake.set()
        with self._lock:  # Whoever is starting one has started it.
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(JOIN_SECONDS)

    def close(self) -> None:
        """Stop and take the view from the page; the static picture stays."""
        self._end()
        atexit.unregister(self._end)
        if not self.running:
            self._let_go()
        super().close()

    def _let_go(self) -> None:
        """Leave the feed: the thread does, so that nobody waits for what it reads, or who finds it ended."""
        if self._owns_feed:
            self._feed.close()


def _packed(message: Message) -> dict[str, Any]:
    """As a trait has it."""
    return {"message": message[0], "buffers": list(map(as_text, message[1]))}


def show(run: Run | RunFolder | str | Path) -> Dashboard:
    """Display the dashboard of a run, given as its handle or its folder, and in the same output the picture that stays.

    Raises RunFolderError when there is no such run.
    """
    feed, devices = _feed_of(run)
    with contextlib.suppress(OSError):  # The server then knows it by its id; where it cannot, the widget draws.
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

        with contextlib.suppress(ClusterError):  # The engines have gone since: the run can still be looked at.
            devices = run.cluster.devices
    return feed, devices


def _running_loop() -> asyncio.AbstractEventLoop | None:
    """The kernel's loop; None outside one."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _is_silent(heard: float) -> bool:
    return time.monotonic() - heard > SILENCE_SECONDS


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


def show_comparison(comparison: Comparison) -> ComparedDashboard:
    """Display the runs side by side, and in the same output the picture that stays."""
    comparison.make_known()
    picture = ComparedPicture(comparison)
    dashboard = ComparedDashboard(comparison, name=comparison.name, picture=picture, owns_feed=True)
    picture.place(dashboard)
    return dashboard
