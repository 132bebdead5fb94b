"""Several runs side by side as a page draws them: a websocket for each page, `comparisons/<id>,<id>,…/drawing`.

It goes as with one run (drawing.py): the page sends Draw, and is sent what it does not have, a Comparison at first and
then Changes, four times a second at most. A run that cannot be read says why in its place; the others go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import replace

import speedlab_server.messages as m
from speedlab.hardware import Device
from speedlab.telemetry.figures.compare import MOST_COMPARED, Look, look_at
from speedlab.telemetry.figures.deltas import ComparedDrawing
from speedlab.telemetry.history import History
from speedlab.telemetry.records import RESTING
from speedlab.telemetry.run_folder import Status
from speedlab_server.drawing import AGAIN_SECONDS, RESTING_TICK_SECONDS, DrawingHandler, frame_of
from speedlab_server.problems import reading_text
from speedlab_server.registry import Registry

log = logging.getLogger(__name__)

COMPARING_TICK_SECONDS = 0.25


class ComparedEasel:
    """What one page has of several runs. One thread at a time."""

    def __init__(self, registry: Registry, ids: Sequence[str]) -> None:
        self._registry = registry
        self._refusal = f"{len(ids)} runs; at most {MOST_COMPARED} are compared: choose fewer" if too_many(ids) else ""
        self._looks = {id: Look(name=id) for id in ids}
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

    def _look_at(self, id: str) -> Look:
        if time.monotonic() < self._again[id]:
            return self._looks[id]
        try:
            reader = self._registry.reader(id)
            reader.look()

            def look(history: History, replaced: int, status: Status, devices: Sequence[Device]) -> Look:
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
