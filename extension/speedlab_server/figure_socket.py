"""A run's figures as a page draws them: a websocket for each page, `runs/<id>/drawing`.

1. The page sends Draw: whether it is watching, and the step whose pipeline it wants. Nothing is read while it is not.
2. At most ten times a second, and twice while the run rests, a thread of the page's looks at the run's one reader and
   makes what this page does not have: a Keyframe at first, then Changes (speedlab/telemetry/figures/deltas.py).
3. A page that has not taken the last frame gets the next one later, with all that is new by then.

A frame is binary: four bytes with the length of the JSON that follows (little-endian), the JSON itself, which tells the
bytes of each buffer, and the buffers, float32 in the order of the machine, which is little-endian everywhere.

Several runs side by side as a page draws them: a websocket for each page, `comparisons/<id>,<id>,…/drawing`.

It goes as with one run (drawing.py): the page sends Draw, and is sent what it does not have, a Comparison at first and
then Changes, four times a second at most. A run that cannot be read says why in its place; the others go on.
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
"""A run that rests may be resumed by anybody."""
STILL_SECONDS = 0.3
"""After which a run of which nothing new has come is drawn again: bars may have had to wait, and how long a run has
been silent is told."""
READER_SECONDS = 0.5
"""For which a run's reader is kept without asking for it: its folder may go, and a reader that nobody asks for is
closed."""
AGAIN_SECONDS = 2.0
"""After which a run that could not be drawn is tried again."""


class PageView(Protocol):
    """What a page has of what it looks at."""

    @property
    def wait_seconds(self) -> float:
        """Until it is worth while to look again."""
        ...

    def look(self, wanted: m.Draw) -> list[bytes | m.Problem]:
        """What the page does not have yet. In a thread, one at a time."""
        ...


class FigureSession:
    """What one page has of a run. One thread at a time."""

    def __init__(self, registry: Registry, id: str) -> None:
        self._registry = registry
        self._id = id
        self._drawing: Drawing | None = None
        self._history: History | None = None
        self._replaced = 0
        self._reader: Reader | None = None
        self._reader_due = self._draw_due = float("-inf")
        self._drawn: tuple[int, m.Draw] | None = None
        """The version of what was read when it was last drawn, and how."""
        self._problem = ""
        self.wait_seconds = TICK_SECONDS
        """Until it is worth while to look again."""

    def look(self, wanted: m.Draw) -> list[bytes | m.Problem]:
        """What the page does not have yet; problems are told once, and once that they are over."""
        try:
            frame = self._look(wanted)
        except Exception as error:  # A record or an event that nobody foresaw, a folder that was damaged.
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
            if drawing is None or history is not self._history:  # Another reader, after a pause.
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
    """One binary frame of it."""
    told = {**message, "version": m.VERSION, "buffers": list(map(len, buffers))}
    head = msgspec.json.encode(told)
    return b"".join([struct.pack("<I", len(head)), head, *buffers])


class FigureRenderer:
    """Looks for one page, in a thread that is there while the page watches: to hand each look to a pool, and what it
    has found back, costs as much as the look."""

    def __init__(self, easel: PageView, send: Callable[[list[bytes | m.Problem]], asyncio.Future[Any] | None]) -> None:
        """`send`: gives the page what was found, on the loop that is running now; done when the page has taken it, None
        where there is no page any more."""
        self._easel, self._send = easel, send
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._wanted = m.Draw(watching=False)
        self._works = False
        self._asked = threading.Event()
        self._under_way = False
        """Whether the page has not taken what was found last."""

    def ask(self, wanted: m.Draw) -> None:
        """How the page wants the run to be drawn from now on."""
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
                time.sleep(max(0.0, began + TICK_SECONDS - time.monotonic()))  # Half of what an Event's wait costs.
                if (rest := self._easel.wait_seconds - TICK_SECONDS) > 0:
                    self._asked.wait(rest)
                began = time.monotonic()
        except BaseException:
            with self._lock:
                self._works = False  # The next wish has another thread.
            raise

    def _look(self) -> bool:
        """Whether there was somebody to look for."""
        self._asked.clear()
        waits = self._under_way
        with self._lock:
            wanted = self._wanted
            if not wanted.watching:
                self._works = False
                return False
            if not waits:
                self._wanted = msgspec.structs.replace(wanted, keyframe=False)  # It is given once.
        if not waits and (found := self._easel.look(wanted)):
            self._under_way = True
            with contextlib.suppress(RuntimeError):  # The server has ended, and its loop with it.
                self._loop.call_soon_threadsafe(self._give, found)
        return True

    def _give(self, found: list[bytes | m.Problem]) -> None:
        if (sending := self._send(found)) is not None:
            sending.add_done_callback(self._taken)

    def _taken(self, _: object) -> None:
        self._under_way = False


class DrawingHandler(PageSocket):
    """The page's end of it."""

    def initialize(self, services: Services) -> None:
        self._services = services
        self._painter: FigureRenderer | None = None

    def open(self, id: str) -> None:
        super().open(id)
        self._painter = FigureRenderer(self.easel(id), self._put)

    def easel(self, id: str) -> PageView:
        """What this page looks at."""
        return FigureSession(self._services.registry, id)

    def on_message(self, message: str | bytes) -> None:
        if self._painter is not None and (wanted := self.question(message, m.Draw)) is not None:
            self._painter.ask(wanted)

    def on_close(self) -> None:
        if self._painter is not None:
            self._painter.ask(m.Draw(watching=False))

    def _put(self, found: list[bytes | m.Problem]) -> asyncio.Future[Any] | None:
        sending = None
        for each in found:
            sending = self.say(each) if isinstance(each, m.Problem) else self.send(each, binary=True)
        return sending


COMPARING_TICK_SECONDS = 0.25


class ComparedEasel:
    """What one page has of several runs. One thread at a time."""

    def __init__(self, registry: Registry, ids: Sequence[str]) -> None:
        self._registry = registry
        self._refusal = f"{len(ids)} runs; at most {MOST_COMPARED} are compared: choose fewer" if too_many(ids) else ""
        self._looks = {id: RunStanding(name=id) for id in ids}
        self._again = dict.fromkeys(ids, 0.0)
        """When each is tried again, where it could not be read."""
        self._drawing = ComparedDrawing()
        self.wait_seconds = COMPARING_TICK_SECONDS
        """Until it is worth while to look again."""

    def look(self, wanted: m.Draw) -> list[bytes | m.Problem]:
        """What the page does not have yet."""
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
        except Exception as error:  # Records that nobody foresaw must not end the page's task without a word.
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
        except Exception as error:  # A record or an event that nobody foresaw, a folder that was damaged or is gone.
            self._again[id] = time.monotonic() + AGAIN_SECONDS
            known, text = self._looks[id], reading_text(error)
            if text != known.problem:
                log.warning("run %s cannot be compared", id, exc_info=error)
            return replace(known, problem=text)


class ComparisonHandler(DrawingHandler):
    """The page's end of it."""

    def easel(self, ids: str) -> ComparedEasel:
        return ComparedEasel(self._services.registry, list(dict.fromkeys(ids.split(","))))


def too_many(ids: Collection[str]) -> bool:
    return len(ids) > MOST_COMPARED
