"""A run's figures as a page draws them: a websocket for each page, `runs/<id>/drawing`.

1. The page sends Draw: whether it is watching, and the step whose pipeline it wants. Nothing is read while it is not.
2. At most ten times a second, and twice while the run rests, a thread looks at the run's one reader and makes what this
   page does not have: a Keyframe at first, then Changes (speedlab/telemetry/drawing.py).
3. A page that has not taken the last frame gets the next one later, with all that is new by then.

A frame is binary: four bytes with the length of the JSON that follows (little-endian), the JSON itself, which tells the
bytes of each buffer, and the buffers, float32 in the order of the machine, which is little-endian everywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

import speedlab_server.messages as m
from speedlab.hardware import Device
from speedlab.telemetry.drawing import Drawing, Message
from speedlab.telemetry.folder import Status
from speedlab.telemetry.records import RESTING
from speedlab.telemetry.series import History
from speedlab_server.live import TICK_SECONDS, PageSocket
from speedlab_server.problems import reading_text

if TYPE_CHECKING:
    from speedlab_server.handlers import Services
    from speedlab_server.registry import Registry

log = logging.getLogger(__name__)

RESTING_TICK_SECONDS = 0.5
"""A run that rests may be resumed by anybody."""
AGAIN_SECONDS = 2.0
"""After which a run that could not be drawn is tried again."""


class Looking(Protocol):
    """What a page has of what it looks at."""

    @property
    def wait_seconds(self) -> float:
        """Until it is worth while to look again."""
        ...

    def look(self, wanted: m.Draw) -> list[bytes | m.Problem]:
        """What the page does not have yet. In a thread, one at a time."""
        ...


class Easel:
    """What one page has of a run. One thread at a time."""

    def __init__(self, registry: Registry, id: str) -> None:
        self._registry = registry
        self._id = id
        self._drawing: Drawing | None = None
        self._history: History | None = None
        self._replaced = 0
        self._problem = ""
        self.wait_seconds = TICK_SECONDS
        """Until it is worth while to look again."""

    def look(self, wanted: m.Draw) -> list[bytes | m.Problem]:
        """What the page does not have yet; problems are told once, and once that they are over."""
        try:
            frame = self._look(wanted)
        except Exception as error:  # A record or an event that nobody foresaw, a folder that was damaged.
            self._drawing, self.wait_seconds = None, AGAIN_SECONDS
            if (text := reading_text(error)) == self._problem:
                return []
            log.warning("run %s cannot be drawn", self._id, exc_info=error)
            self._problem = text
            return [m.Problem(text=text)]
        over: list[bytes | m.Problem] = [m.Problem(text="")] if self._problem else []
        self._problem = ""
        return over + ([] if frame is None else [frame])

    def _look(self, wanted: m.Draw) -> bytes | None:
        reader = self._registry.reader(self._id)
        reader.look()

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


class DrawingHandler(PageSocket):
    """The page's end of it."""

    def initialize(self, services: Services) -> None:
        self._services = services
        self._wanted = m.Draw(watching=False)
        self._asked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def open(self, id: str) -> None:
        super().open(id)
        self._task = asyncio.ensure_future(self._draw(self.easel(id)))

    def easel(self, id: str) -> Looking:
        """What this page looks at."""
        return Easel(self._services.registry, id)

    def on_message(self, message: str | bytes) -> None:
        if (wanted := self.question(message, m.Draw)) is not None:
            wanted.keyframe |= self._wanted.keyframe
            self._wanted = wanted
            self._asked.set()

    def on_close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _draw(self, easel: Looking) -> None:
        while True:
            self._asked.clear()
            if not self._wanted.watching:
                await self._asked.wait()
                continue
            began, wanted = time.monotonic(), self._wanted
            self._wanted = msgspec.structs.replace(wanted, keyframe=False)  # It is given once.
            for each in await self._services.in_thread(lambda wanted=wanted: easel.look(wanted)):
                sending = self.say(each) if isinstance(each, m.Problem) else self.send(each, binary=True)
                if sending is None:
                    return
                await sending
            await asyncio.sleep(max(0.0, began + TICK_SECONDS - time.monotonic()))
            if easel.wait_seconds > TICK_SECONDS:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._asked.wait(), easel.wait_seconds - TICK_SECONDS)
