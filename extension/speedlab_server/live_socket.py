"""What comes by itself: a page says on a websocket what it wants to hear, and hears it at most ten times a second.

1. A page sends Subscribe; it replaces the one before. With nothing in it, nothing is read and nothing is sent.
2. Ten times a second each run that a page watches is looked at, in a thread; pages share the run's one reader. Ranks'
   output is looked at likewise (`live_output.py`).
3. What is new of all of them goes in one Tick. A page that has not taken the last one yet gets the next one later,
   with all that is new by then: what it has is counted where a message is sent.
4. What is on a slow disk is late alone: the others do not wait for it.

Ranks' output as it comes to one page that watches it.

A look costs a question about each rank's file. Only files that have changed are read, of at most so many ranks at once
as one answer holds, those first that were read longest ago; the others follow with the next looks.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from jupyter_core.utils import ensure_async
from jupyter_server.auth.decorator import ws_authenticated
from jupyter_server.base.handlers import JupyterHandler
from jupyter_server.base.websocket import WebSocketMixin
from tornado import web
from tornado.websocket import WebSocketClosedError, WebSocketHandler

import speedlab_server.schema as m
from speedlab_server.errors import reading_text, version_text
from speedlab_server.output import MOST_RANKS, OutputPosition, files_of, folder_of, output_of
from speedlab_server.run_registry import live_tokens

if TYPE_CHECKING:
    from speedlab_server.handlers import Services


_FOLDER_SECONDS = 1.0
"""How often is looked whether the cluster is still there, and still the one that holds the run."""
_OUTPUT_RETRY_SECONDS = 2.0
"""After which output that could not be read is tried again."""


class WatchedOutput:
    """What ranks print, as one page watches it."""

    def __init__(self, watch: m.WatchOutput) -> None:
        self._watch = watch
        self._folder = Path()
        self._seen: dict[int, OutputPosition] = {}
        """How far each rank was read, in the order in which they were."""
        self._told = False
        self._problem = ""
        self._due = {"folder": 0.0, "again": 0.0}

    def news(self, services: Services) -> m.OutputNews | None:
        """What the page does not have yet; None when there is nothing. In a thread, one at a time."""
        now = time.monotonic()
        if now < self._due["again"]:
            return None
        try:
            output = self._read(services, now)
        except Exception as error:
            self._due["again"] = now + _OUTPUT_RETRY_SECONDS
            text = reading_text(error, "this output")
            if text == self._problem:
                return None
            self._problem = text
            return self._news(problem=text)
        problem = "" if self._problem else None
        self._problem = ""
        return None if output is None and problem is None else self._news(output=output, problem=problem)

    def _news(self, output: m.Output | None = None, problem: str | None = None) -> m.OutputNews:
        return m.OutputNews(kind=self._watch.kind, id=self._watch.id, output=output, problem=problem)

    def _read(self, services: Services, now: float) -> m.Output | None:
        if now >= self._due["folder"]:
            self._folder = folder_of(services.registry, self._watch.kind, self._watch.id)
            self._due["folder"] = now + _FOLDER_SECONDS
        # Looked at before it is read: what is printed in between is found again with the next look.
        files = files_of(self._folder)
        # Those that were never read, then those read longest ago: ranks that always print keep none waiting.
        turns = {rank: turn for turn, rank in enumerate(self._seen)}
        changed = [rank for rank, place in files.items() if self._seen.get(rank) != place]
        changed = sorted(changed, key=lambda rank: (turns.get(rank, -1), rank))[:MOST_RANKS]
        if not changed and self._told:
            return None
        output = output_of(self._folder, after=self._watch.after, ranks=changed)
        for rank in changed:
            self._seen.pop(rank, None)
            self._seen[rank] = files[rank]
        self._watch.after = output.cursor
        # The first answer comes also without a line: the page knows then that nothing was printed.
        if not output.ranks and self._told:
            return None
        self._told = True
        return output


TICK_SECONDS = 0.1
MOST_RUNS = 16
"""That a page may watch at once."""
MOST_OUTPUTS = 8
"""Likewise, of ranks' output."""
OTHER_VERSION = 4409
"""Code with which a page of another version is sent away."""
_MEMORY_SECONDS = 1.0
_LISTS_SECONDS = 1.0
_RUN_RETRY_SECONDS = 2.0
"""After which a run that could not be read is tried again."""


_Question = TypeVar("_Question", bound=m.Message)


class _Greeting(msgspec.Struct):
    """All that a message of any version has."""

    version: int


class WatchedRun:
    """A run as one page watches it: what the page has of it, and what it was last told."""

    def __init__(self, watch: m.Watch) -> None:
        self._watch = watch
        self._version = -1
        self._cluster = ""
        self._status: m.RunSummary | None = None
        self._memory: list[m.RankMemory] = []
        self._problem = ""
        self._due = {"memory": 0.0, "cluster": 0.0, "again": 0.0}

    def news(self, services: Services) -> m.RunNews | None:
        """What the page does not have yet; None when there is nothing. In a thread, one at a time."""
        now = time.monotonic()
        if now < self._due["again"]:
            return None
        try:
            reader = services.registry.reader(self._watch.id)
            version = reader.look()
            changed, self._version = version != self._version, version
            news = self._news(reader, now, changed)
        except Exception as error:
            self._due["again"] = now + _RUN_RETRY_SECONDS
            if (text := reading_text(error)) == self._problem:
                return None
            self._problem = text
            return m.RunNews(id=self._watch.id, problem=text)
        if self._problem:
            self._problem = ""
            news = news or m.RunNews(id=self._watch.id)
            news.problem = ""
        return news

    def _news(self, reader: Any, now: float, changed: bool) -> m.RunNews | None:
        news, watch = m.RunNews(id=self._watch.id), self._watch
        if now >= self._due["cluster"] and "status" in watch.parts:
            self._due["cluster"] = now + _LISTS_SECONDS
            cluster = live_tokens().get(reader.token, "")
            changed, self._cluster = changed or cluster != self._cluster, cluster
        if "memory" in watch.parts and now >= self._due["memory"]:
            self._due["memory"] = now + _MEMORY_SECONDS
            if (memory := reader.memory()) != self._memory:
                self._memory = news.memory = memory
        if changed:
            if "status" in watch.parts and (status := reader.summary(self._cluster)) != self._status:
                self._status = news.status = status
            if "records" in watch.parts:
                news.records = self._records(reader)
            if "events" in watch.parts:
                news.events = self._events(reader)
        something = news.status or news.records or news.events or news.memory is not None
        return news if something else None

    def _records(self, reader: Any) -> m.Records | None:
        watch = self._watch
        records = reader.records(watch)
        steps = records.columns["step"]
        if not steps and (watch.generation, watch.stride) == (records.generation, records.stride):
            return None
        watch.generation, watch.stride = records.generation, records.stride
        watch.after = int(steps[-1]) if steps and steps[-1] is not None else watch.after
        return records

    def _events(self, reader: Any) -> m.Events | None:
        events = reader.events(self._watch.events_after)
        if not events.events and events.keep == self._watch.events_after:
            return None
        self._watch.events_after = events.keep + len(events.events)
        if self._watch.events_after < events.total:
            self._version = -1  # The rest comes with the next tick.
        return events


class PageConnection:
    """One connection."""

    def __init__(self, handler: LiveHandler) -> None:
        self._handler = handler
        self._watched: dict[str, WatchedRun | WatchedOutput] = {}
        """By `run/` and its id, or `output/`, its kind and its id; "" among the jobs are the lists."""
        self._jobs: dict[str, asyncio.Future[Any]] = {}
        self._sending: asyncio.Future[Any] | None = None
        self._lists = False
        self._lists_due = 0.0
        self._lists_problem: str | None = None
        self._runs: list[m.RunSummary] | None = None
        self._clusters: list[m.ClusterSummary] | None = None

    @property
    def hears(self) -> bool:
        return bool(self._watched or self._lists)

    def subscribe(self, wanted: m.Subscribe) -> None:
        # Lines come once: output that is watched already goes on, with what is being read of it.
        outputs = {f"output/{watch.kind}/{watch.id}": watch for watch in wanted.outputs}
        stays = {key: watched for key, watched in self._watched.items() if key in outputs}
        # Jobs of the old ones end by themselves, and nobody asks what they found.
        self._jobs = {key: job for key, job in self._jobs.items() if key in stays}
        self._watched = {f"run/{watch.id}": WatchedRun(watch) for watch in wanted.runs}
        self._watched |= {key: WatchedOutput(watch) for key, watch in outputs.items()} | stays
        self._lists, self._lists_due, self._runs, self._clusters = wanted.lists, 0.0, None, None
        self._lists_problem = None

    def begin(self, services: Services) -> list[asyncio.Future[Any]]:
        """Start looking at what nobody looks at for this page just now; returns what is under way."""
        if self._sending is not None and not self._sending.done():
            return []
        for id, watched in self._watched.items():
            if id not in self._jobs:
                self._jobs[id] = asyncio.ensure_future(services.in_thread(lambda it=watched: it.news(services)))
        now = time.monotonic()
        if self._lists and "" not in self._jobs and now >= self._lists_due:
            self._lists_due = now + _LISTS_SECONDS
            self._jobs[""] = asyncio.ensure_future(
                services.in_thread(lambda: (services.registry.runs(), services.all_clusters()))
            )
        return list(self._jobs.values())

    def send(self) -> None:
        """Tell the page what was found."""
        if self._sending is not None and not self._sending.done():
            return
        tick = m.Tick()
        for id, job in list(self._jobs.items()):
            if not job.done():
                continue
            if (error := self._jobs.pop(id).exception()) is not None:
                tick.lists_problem = self._lists_told(reading_text(error, "the lists of clusters and runs"))
                if tick.lists_problem is not None:
                    self._handler.log.warning("SpeedLab: %s", tick.lists_problem, exc_info=error)
                continue
            found = job.result()
            if id:
                if isinstance(found, m.OutputNews):
                    tick.outputs.append(found)
                elif found is not None:
                    tick.runs.append(found)
                continue
            runs, clusters = found
            tick.lists_problem = self._lists_told("")
            if runs != self._runs:
                self._runs = tick.all_runs = runs
            if clusters != self._clusters:
                self._clusters = tick.all_clusters = clusters
        if tick != m.Tick():
            self._sending = self._handler.say(tick)

    def _lists_told(self, problem: str) -> str | None:
        """What the page is to be told of this problem with the lists; None where it was."""
        before, self._lists_problem = self._lists_problem, problem
        return problem if problem != before else None


class Hub:
    """Looks for all pages at once, as long as one of them wants to hear something."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._pages: set[PageConnection] = set()
        self._running: asyncio.Task[None] | None = None

    def join(self, page: PageConnection) -> None:
        """Also when what it wants has changed."""
        self._pages.add(page)
        if page.hears and (self._running is None or self._running.done()):
            self._running = asyncio.ensure_future(self._run())

    def leave(self, page: PageConnection) -> None:
        self._pages.discard(page)

    async def _run(self) -> None:
        while any(page.hears for page in self._pages):
            await self._look_for_all()
            await self._services.in_thread(self._services.registry.close_idle)  # Meanwhile another page may have come.

    async def _look_for_all(self) -> None:
        while pages := [page for page in self._pages if page.hears]:
            began = time.monotonic()
            if jobs := [job for page in pages for job in page.begin(self._services)]:
                await asyncio.wait(jobs, timeout=TICK_SECONDS)
            for page in pages:
                if page in self._pages:
                    page.send()
            await asyncio.sleep(max(0.0, began + TICK_SECONDS - time.monotonic()))


class PageSocket(WebSocketMixin, WebSocketHandler, JupyterHandler):
    """A page's websocket. Jupyter's own checks of user and origin, as for a kernel's."""

    auth_resource = "speedlab"

    def set_default_headers(self) -> None:
        """A websocket has none."""

    def get_compression_options(self) -> dict[str, Any]:
        return {}  # Numbers as text: a third of the bytes.

    @ws_authenticated
    async def get(self, *args: Any, **kwargs: Any) -> None:
        if not await ensure_async(self.authorizer.is_authorized(self, self.current_user, "read", "speedlab")):
            raise web.HTTPError(403)
        await ensure_async(super().get(*args, **kwargs))

    def question(self, message: str | bytes, kind: type[_Question]) -> _Question | None:
        """What the page asks; None where it was told that this is none, or of another version and was sent away."""
        try:
            theirs = msgspec.json.decode(message, type=_Greeting).version
            if theirs != m.VERSION:
                self.say(m.Problem(text=version_text(theirs, m.VERSION)))
                self.close(OTHER_VERSION, "another version of the messages")
                return None
            return msgspec.json.decode(message, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.say(m.Problem(text=f"this is no {kind.__name__}: {error}"))
            return None

    def say(self, message: m.Message) -> asyncio.Future[Any] | None:
        return self.send(msgspec.json.encode(message))

    def send(self, data: bytes, *, binary: bool = False) -> asyncio.Future[Any] | None:
        """Done when the page's side of the connection has taken it; None where it closes just now."""
        try:
            sending = self.write_message(data, binary=binary)
        except WebSocketClosedError:
            return None
        sending.add_done_callback(_quietly)
        return sending


class LiveHandler(PageSocket):
    """The page's end of it."""

    def initialize(self, hub: Hub) -> None:
        self._hub = hub
        self._page = PageConnection(self)

    def on_message(self, message: str | bytes) -> None:
        if (wanted := self.question(message, m.Subscribe)) is None:
            return
        for what, those, most in (("runs", wanted.runs, MOST_RUNS), ("outputs", wanted.outputs, MOST_OUTPUTS)):
            if len(those) > most:
                self.say(m.Problem(text=f"{len(those)} {what} at once; a page may watch {most}: watch fewer"))
                return
        self._page.subscribe(wanted)
        self._hub.join(self._page)

    def on_close(self) -> None:
        self._hub.leave(self._page)


def _quietly(sent: asyncio.Future[Any]) -> None:
    """A page that has gone meanwhile takes nothing, and nobody minds."""
    with suppress(WebSocketClosedError, asyncio.CancelledError):
        sent.result()
