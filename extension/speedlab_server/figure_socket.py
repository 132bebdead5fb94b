"""Figures of runs for pages: websockets `runs/<id>/drawing` and `comparisons/<id>,<id>,…/drawing`.

1. The page sends Draw: whether it is visible, and the step of the pipeline plot. While the page is hidden, nothing is
   read.
2. A thread per page polls the run's shared reader, at most ten times a second, and twice while the run rests. It
   creates what the page does not have: a Keyframe first, then Changes (speedlab/telemetry/figures/deltas.py).
3. A page that has not received the last frame gets the next one later, with all news until then.

A frame is binary: four bytes with the length of the JSON (little-endian), the JSON with the length of each buffer, and
the buffers, float32 in the machine's byte order, which is little-endian everywhere.

A comparison of several runs works in the same way: a Comparison first, then Changes, at most four times a second. A
run that cannot be read shows its error; the others continue.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

import speedlab_server.schema as m
from speedlab.hardware import Device
from speedlab.telemetry.figures.compare import MOST_COMPARED, RunStanding, look_at
from speedlab.telemetry.figures.deltas import ComparedDrawing, Drawing, Message
from speedlab.telemetry.history import History
from speedlab.telemetry.records import RESTING
from speedlab.telemetry.run_folder import Status
from speedlab_server.errors import reading_text
from speedlab_server.live_socket import TICK_SECONDS, PageSocket
from speedlab_server.run_registry import Registry

if TYPE_CHECKING:
    from speedlab_server.handlers import Services
    from speedlab_server.run_reader import Reader


log = logging.getLogger(__name__)

RESTING_TICK_SECONDS = 0.5
"""Poll interval of a run at rest. It is polled, because any client may resume it."""
STILL_SECONDS = 0.3
"""A run without news is drawn again after this time, for delayed bars and for the warning about a silent run."""
READER_SECONDS = 0.5
"""How long to use a run's reader before asking the registry again. The folder may disappear, and the registry closes
unused readers.
"""
AGAIN_SECONDS = 2.0
"""Delay before a run is drawn again after an error."""


class PageView(Protocol):
    """What a page shows, and what it has received of it."""

    @property
    def wait_seconds(self) -> float:
        """Seconds until the next poll is useful."""
        ...

    def look(self, wanted: m.Draw) -> list[bytes | m.Problem]:
        """Return what the page does not have yet. Runs in a thread, one call at a time.

        Args:
            wanted: How to draw.
        """
        ...


class FigureSession:
    """The figures of a run that one page has received. Use from one thread at a time.

    Args:
        registry: The server's runs.
        id: Id of the run.
    """

    def __init__(self, registry: Registry, id: str) -> None:
        self._registry = registry
        self._id = id
        self._drawing: Drawing | None = None
        self._history: History | None = None
        self._replaced = 0
        self._reader: Reader | None = None
        self._reader_due = self._draw_due = float("-inf")
        self._drawn: tuple[int, m.Draw] | None = None
        """The version of the data in the last drawing, and how it was drawn."""
        self._problem = ""
        self.wait_seconds = TICK_SECONDS
        """Seconds until the next poll is useful."""

    def look(self, wanted: m.Draw) -> list[bytes | m.Problem]:
        """Return what the page does not have yet. An error is sent once, and its end is sent as an empty Problem.

        Args:
            wanted: How to draw.
        """
        try:
            frame = self._look(wanted)
        except Exception as error:  # For example an unexpected record, or a damaged folder.
            self._drawing = self._reader = self._drawn = None
            self.wait_seconds = AGAIN_SECONDS
            if (text := reading_text(error)) == self._problem:
                return []
            log.warning("run %s cannot be drawn", self._id, exc_info=error)
            self._problem = text
            return [m.Problem(text=text)]
        over: list[bytes | m.Problem] = [m.Problem(text="")] if self._problem else []
        self._problem = ""
        return over + ([] if frame is None else [frame])

    def _look(self, wanted: m.Draw) -> bytes | None:
        now = time.monotonic()
        if (reader := self._reader) is None or now >= self._reader_due:
            reader = self._reader = self._registry.reader(self._id)
            self._reader_due = now + READER_SECONDS
        known, self._drawn = self._drawn, (reader.look(), wanted)
        if known == self._drawn and now < self._draw_due and not wanted.keyframe:
            return None
        self._draw_due = now + STILL_SECONDS

        def next_message(history: History, replaced: int, status: Status, devices: Sequence[Device]) -> Message | None:
            drawing = self._drawing
            if drawing is None or history is not self._history:  # A new reader, after a pause.
                drawing = self._drawing = Drawing(history, name=reader.folder.name)
                self._history, self._replaced = history, replaced
            self.wait_seconds = RESTING_TICK_SECONDS if status.state in RESTING else TICK_SECONDS
            rewritten, self._replaced = replaced != self._replaced, replaced
            drawing.devices, drawing.pipeline_step = devices, wanted.step
            drawing.smooth(wanted.smoothing)
            return drawing.keyframe(status) if wanted.keyframe else drawing.next(status, rewritten=rewritten)

        message = reader.draw(next_message)
        return None if message is None else frame_of(*message)


def frame_of(message: dict[str, Any], buffers: Sequence[bytes]) -> bytes:
    """Return a message and its buffers as one binary frame.

    Args:
        message: Plain data.
        buffers: float32 buffers.
    """
    reported = {**message, "version": m.VERSION, "buffers": list(map(len, buffers))}
    head = msgspec.json.encode(reported)
    return b"".join([struct.pack("<I", len(head)), head, *buffers])


class FigureRenderer:
    """Polls for one page, in a thread that lives while the page is visible.

    A thread pool is not used: handing over each poll and its result would cost as much as the poll.
    """

    def __init__(self, easel: PageView, send: Callable[[list[bytes | m.Problem]], asyncio.Future[Any] | None]) -> None:
        """Create a renderer; call it in the event loop.

        Args:
            easel: What the page shows.
            send: Sends results to the page, in the event loop. Returns a future that is done when the page has
                received them; None if the page is gone.
        """
        self._easel, self._send = easel, send
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._wanted = m.Draw(watching=False)
        self._works = False
        self._asked = threading.Event()
        self._under_way = False
        """Whether the page has not received the last result yet."""

    def ask(self, wanted: m.Draw) -> None:
        """Set how the page wants the run to be drawn.

        Args:
            wanted: How to draw.
        """
        with self._lock:
            wanted.keyframe |= self._wanted.keyframe
            self._wanted = wanted
            if wanted.watching and not self._works:
                threading.Thread(target=self._work, name="speedlab-drawing", daemon=True).start()
                self._works = True
        self._asked.set()

    def _work(self) -> None:
        try:
            began = time.monotonic()
            while self._look():
                time.sleep(max(0.0, began + TICK_SECONDS - time.monotonic()))  # Costs half of an Event's wait.
                if (rest := self._easel.wait_seconds - TICK_SECONDS) > 0:
                    self._asked.wait(rest)
                began = time.monotonic()
        except BaseException:
            with self._lock:
                self._works = False  # The next `ask` starts another thread.
            raise

    def _look(self) -> bool:
        """Poll once. Return whether the page is visible."""
        self._asked.clear()
        waits = self._under_way
        with self._lock:
            wanted = self._wanted
            if not wanted.watching:
                self._works = False
                return False
            if not waits:
                self._wanted = msgspec.structs.replace(wanted, keyframe=False)  # Send a requested keyframe once.
        if not waits and (found := self._easel.look(wanted)):
            self._under_way = True
            with contextlib.suppress(RuntimeError):  # The server and its loop have ended.
                self._loop.call_soon_threadsafe(self._give, found)
        return True

    def _give(self, found: list[bytes | m.Problem]) -> None:
        if (sending := self._send(found)) is not None:
            sending.add_done_callback(self._taken)

    def _taken(self, _: object) -> None:
        self._under_way = False


class DrawingHandler(PageSocket):
    """The websocket of a run's figures."""

    def initialize(self, services: Services) -> None:
        """Set the services.

        Args:
            services: The server's services.
        """
        self._services = services
        self._painter: FigureRenderer | None = None

    def open(self, id: str) -> None:
        """Create the renderer.

        Args:
            id: Id of the run, or of the runs.
        """
        super().open(id)
        self._painter = FigureRenderer(self.easel(id), self._put)

    def easel(self, id: str) -> PageView:
        """Return what this page shows.

        Args:
            id: Id of the run.
        """
        return FigureSession(self._services.registry, id)

    def on_message(self, message: str | bytes) -> None:
        """Handle a Draw.

        Args:
            message: The message.
        """
        if self._painter is not None and (wanted := self.question(message, m.Draw)) is not None:
            self._painter.ask(wanted)

    def on_close(self) -> None:
        """Stop the renderer."""
        if self._painter is not None:
            self._painter.ask(m.Draw(watching=False))

    def _put(self, found: list[bytes | m.Problem]) -> asyncio.Future[Any] | None:
        sending = None
        for each in found:
            sending = self.say(each) if isinstance(each, m.Problem) else self.send(each, binary=True)
        return sending


COMPARING_TICK_SECONDS = 0.25


class ComparedEasel:
    """The comparison of runs that one page has received. Use from one thread at a time.

    Args:
        registry: The server's runs.
        ids: Ids of the runs.
    """

    def __init__(self, registry: Registry, ids: Sequence[str]) -> None:
        self._registry = registry
        self._refusal = f"{len(ids)} runs; at most {MOST_COMPARED} are compared: choose fewer" if too_many(ids) else ""
        self._looks = {id: RunStanding(name=id) for id in ids}
        self._again = dict.fromkeys(ids, 0.0)
        """When to read each run again after an error."""
        self._drawing = ComparedDrawing()
        self.wait_seconds = COMPARING_TICK_SECONDS
        """Seconds until the next poll is useful."""

    def look(self, wanted: m.Draw) -> list[bytes | m.Problem]:
        """Return what the page does not have yet.

        Args:
            wanted: How to draw.
        """
        if too_many(self._looks):
            refusal, self._refusal, self.wait_seconds = self._refusal, "", RESTING_TICK_SECONDS
            return [m.Problem(text=refusal)] if refusal else []
        for id in self._looks:
            self._looks[id] = self._look_at(id)
        looks = list(self._looks.values())
        rests = all(look.status.state in RESTING or look.problem for look in looks)
        self.wait_seconds = RESTING_TICK_SECONDS if rests else COMPARING_TICK_SECONDS
        try:
            message = self._drawing.keyframe(looks) if wanted.keyframe else self._drawing.next(looks)
        except Exception as error:  # Unexpected records must not end the page's thread silently.
            log.warning("%d runs cannot be compared", len(looks), exc_info=error)
            self._drawing, self.wait_seconds = ComparedDrawing(), AGAIN_SECONDS
            return [m.Problem(text=reading_text(error))]
        return [] if message is None else [frame_of(*message)]

    def _look_at(self, id: str) -> RunStanding:
        if time.monotonic() < self._again[id]:
            return self._looks[id]
        try:
            reader = self._registry.reader(id)
            reader.look()

            def look(history: History, replaced: int, status: Status, devices: Sequence[Device]) -> RunStanding:
                return look_at(reader.folder.name, history, status, reader.folder.config)

            return reader.draw(look)
        except Exception as error:  # For example an unexpected record, or a damaged or missing folder.
            self._again[id] = time.monotonic() + AGAIN_SECONDS
            known, text = self._looks[id], reading_text(error)
            if text != known.problem:
                log.warning("run %s cannot be compared", id, exc_info=error)
            return replace(known, problem=text)


class ComparisonHandler(DrawingHandler):
    """The websocket of a comparison."""

    def easel(self, ids: str) -> ComparedEasel:
        """Return the comparison that this page shows.

        Args:
            ids: Ids of the runs, separated by commas.
        """
        return ComparedEasel(self._services.registry, list(dict.fromkeys(ids.split(","))))


def too_many(ids: Collection[str]) -> bool:
    """Return whether these are more runs than can be compared.

    Args:
        ids: Ids of the runs.
    """
    return len(ids) > MOST_COMPARED
