"""The live websocket: a page subscribes to runs, output and lists, and receives what is new, at most ten times a
second.

1. A page sends Subscribe, which replaces its earlier subscription. For an empty one, nothing is read and nothing sent.
2. Ten times a second a thread polls each watched run; all pages share one reader per run. Ranks' output is polled in
   the same way.
3. One Tick contains all news. A page that has not received the last Tick gets the next one later, with all news until
   then: positions advance only when a message is sent.
4. A slow disk delays only its own news.

`WatchedOutput` follows the output of ranks for one page. A poll checks the size of each rank's file, and reads only
changed files, of at most as many ranks as fit one answer, the least recently read ones first. The others follow in
later polls.
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
from speedlab_server.rank_output import MOST_RANKS, OutputPosition, files_of, folder_of, output_of
from speedlab_server.run_registry import live_tokens

if TYPE_CHECKING:
    from speedlab_server.handlers import Services


_FOLDER_SECONDS = 1.0
"""How often to check that the cluster still exists and still holds the run."""
_OUTPUT_RETRY_SECONDS = 2.0
"""Delay before output is read again after an error."""


class WatchedOutput:
    """The output of ranks, as one page follows it.

    Args:
        watch: The page's subscription.
    """

    def __init__(self, watch: m.WatchOutput) -> None:
        self._watch = watch
        self._folder = Path()
        self._seen: dict[int, OutputPosition] = {}
        """The position of each rank, in the order in which ranks were read."""
        self._reported = False
        self._problem = ""
        self._due = {"folder": 0.0, "again": 0.0}

    def news(self, services: Services) -> m.OutputNews | None:
        """Return what the page does not have yet; None if there is nothing. Runs in a thread, one call at a time.

        Args:
            services: The server's services.
        """
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
        # Take the positions before reading: the next poll finds what is printed in between.
        files = files_of(self._folder)
        # Ranks never read first, then the least recently read: ranks that always print do not starve the others.
        turns = {rank: turn for turn, rank in enumerate(self._seen)}
        changed = [rank for rank, place in files.items() if self._seen.get(rank) != place]
        changed = sorted(changed, key=lambda rank: (turns.get(rank, -1), rank))[:MOST_RANKS]
        if not changed and self._reported:
            return None
        output = output_of(self._folder, after=self._watch.after, ranks=changed)
        for rank in changed:
            self._seen.pop(rank, None)
            self._seen[rank] = files[rank]
        self._watch.after = output.cursor
        # Send the first answer even without lines, so that the page knows that nothing was printed.
        if not output.ranks and self._reported:
            return None
        self._reported = True
        return output


TICK_SECONDS = 0.1
MOST_RUNS = 16
"""Maximum number of runs that a page may watch at once."""
MOST_OUTPUTS = 8
"""Maximum number of outputs that a page may watch at once."""
OTHER_VERSION = 4409
"""Websocket close code for a page of another version."""
_MEMORY_SECONDS = 1.0
_LISTS_SECONDS = 1.0
_RUN_RETRY_SECONDS = 2.0
"""Delay before a run is read again after an error."""


_Question = TypeVar("_Question", bound=m.Message)


class _Greeting(msgspec.Struct):
    """The field that messages of all versions have."""

    version: int


class WatchedRun:
    """A run, as one page follows it: what the page has received so far.

    Args:
        watch: The page's subscription.
    """

    def __init__(self, watch: m.Watch) -> None:
        self._watch = watch
        self._version = -1
        self._cluster = ""
        self._status: m.RunSummary | None = None
        self._memory: list[m.RankMemory] = []
        self._problem = ""
        self._due = {"memory": 0.0, "cluster": 0.0, "again": 0.0}

    def news(self, services: Services) -> m.RunNews | None:
        """Return what the page does not have yet; None if there is nothing. Runs in a thread, one call at a time.

        Args:
            services: The server's services.
        """
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
            self._version = -1  # Send the rest with the next tick.
        return events


class PageConnection:
    """One connection to a page.

    Args:
        handler: The websocket.
    """

    def __init__(self, handler: LiveHandler) -> None:
        self._handler = handler
        self._watched: dict[str, WatchedRun | WatchedOutput] = {}
        """Keys are `run/` and an id, or `output/`, a kind and an id. Among the jobs, "" means the lists."""
        self._jobs: dict[str, asyncio.Future[Any]] = {}
        self._sending: asyncio.Future[Any] | None = None
        self._lists = False
        self._lists_due = 0.0
        self._lists_problem: str | None = None
        self._runs: list[m.RunSummary] | None = None
        self._clusters: list[m.ClusterSummary] | None = None

    @property
    def receives(self) -> bool:
        """Whether the page subscribes to anything."""
        return bool(self._watched or self._lists)

    def subscribe(self, wanted: m.Subscribe) -> None:
        """Replace the page's subscription.

        Args:
            wanted: The new subscription.
        """
        # Keep watched outputs with their jobs: lines are sent once, and would get lost.
        outputs = {f"output/{watch.kind}/{watch.id}": watch for watch in wanted.outputs}
        stays = {key: watched for key, watched in self._watched.items() if key in outputs}
        # Other old jobs end by themselves; their results are dropped.
        self._jobs = {key: job for key, job in self._jobs.items() if key in stays}
        self._watched = {f"run/{watch.id}": WatchedRun(watch) for watch in wanted.runs}
        self._watched |= {key: WatchedOutput(watch) for key, watch in outputs.items()} | stays
        self._lists, self._lists_due, self._runs, self._clusters = wanted.lists, 0.0, None, None
        self._lists_problem = None

    def begin(self, services: Services) -> list[asyncio.Future[Any]]:
        """Start the polls that are not in progress for this page.

        Args:
            services: The server's services.

        Returns:
            All polls in progress.
        """
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
        """Send the finished results to the page."""
        if self._sending is not None and not self._sending.done():
            return
        tick = m.Tick()
        for id, job in list(self._jobs.items()):
            if not job.done():
                continue
            if (error := self._jobs.pop(id).exception()) is not None:
                tick.lists_problem = self._lists_reported(reading_text(error, "the lists of clusters and runs"))
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
            tick.lists_problem = self._lists_reported("")
            if runs != self._runs:
                self._runs = tick.all_runs = runs
            if clusters != self._clusters:
                self._clusters = tick.all_clusters = clusters
        if tick != m.Tick():
            self._sending = self._handler.say(tick)

    def _lists_reported(self, problem: str) -> str | None:
        """Return the text about the lists to send; None if the page has it already."""
        before, self._lists_problem = self._lists_problem, problem
        return problem if problem != before else None


class Hub:
    """Polls for all pages, while at least one of them has a subscription.

    Args:
        services: The server's services.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._pages: set[PageConnection] = set()
        self._running: asyncio.Task[None] | None = None

    def join(self, page: PageConnection) -> None:
        """Add a page, or react to its new subscription.

        Args:
            page: The page's connection.
        """
        self._pages.add(page)
        if page.receives and (self._running is None or self._running.done()):
            self._running = asyncio.ensure_future(self._run())

    def leave(self, page: PageConnection) -> None:
        """Remove a page.

        Args:
            page: The page's connection.
        """
        self._pages.discard(page)

    async def _run(self) -> None:
        while any(page.receives for page in self._pages):
            await self._look_for_all()
            # Loop: a page may have joined meanwhile.
            await self._services.in_thread(self._services.registry.close_idle)

    async def _look_for_all(self) -> None:
        while pages := [page for page in self._pages if page.receives]:
            began = time.monotonic()
            if jobs := [job for page in pages for job in page.begin(self._services)]:
                await asyncio.wait(jobs, timeout=TICK_SECONDS)
            for page in pages:
                if page in self._pages:
                    page.send()
            await asyncio.sleep(max(0.0, began + TICK_SECONDS - time.monotonic()))


class PageSocket(WebSocketMixin, WebSocketHandler, JupyterHandler):
    """A page's websocket, with Jupyter's checks of user and origin, as for a kernel's."""

    auth_resource = "speedlab"

    def set_default_headers(self) -> None:
        """Set no headers: a websocket has none."""

    def get_compression_options(self) -> dict[str, Any]:
        """Enable compression with its default options."""
        return {}  # Compresses numbers in text to a third.

    @ws_authenticated
    async def get(self, *args: Any, **kwargs: Any) -> None:
        """Open the websocket if the user may read SpeedLab's pages."""
        if not await ensure_async(self.authorizer.is_authorized(self, self.current_user, "read", "speedlab")):
            raise web.HTTPError(403)
        await ensure_async(super().get(*args, **kwargs))

    def question(self, message: str | bytes, kind: type[_Question]) -> _Question | None:
        """Decode a page's message. On an error, answer with a Problem, or close the socket of a page of another
        version.

        Args:
            message: The message.
            kind: Its expected type.

        Returns:
            None after an error.
        """
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
        """Send a message as JSON.

        Args:
            message: The message.
        """
        return self.send(msgspec.json.encode(message))

    def send(self, data: bytes, *, binary: bool = False) -> asyncio.Future[Any] | None:
        """Send data.

        Args:
            data: The data.
            binary: Send a binary frame.

        Returns:
            A future that is done when the connection has accepted the data; None if the connection is closing.
        """
        try:
            sending = self.write_message(data, binary=binary)
        except WebSocketClosedError:
            return None
        sending.add_done_callback(_quietly)
        return sending


class LiveHandler(PageSocket):
    """The websocket `live`."""

    def initialize(self, hub: Hub) -> None:
        """Set the hub.

        Args:
            hub: The server's hub.
        """
        self._hub = hub
        self._page = PageConnection(self)

    def on_message(self, message: str | bytes) -> None:
        """Handle a Subscribe.

        Args:
            message: The message.
        """
        if (wanted := self.question(message, m.Subscribe)) is None:
            return
        for what, those, most in (("runs", wanted.runs, MOST_RUNS), ("outputs", wanted.outputs, MOST_OUTPUTS)):
            if len(those) > most:
                self.say(m.Problem(text=f"{len(those)} {what} at once; a page may watch {most}: watch fewer"))
                return
        self._page.subscribe(wanted)
        self._hub.join(self._page)

    def on_close(self) -> None:
        """Remove the page from the hub."""
        self._hub.leave(self._page)


def _quietly(sent: asyncio.Future[Any]) -> None:
    """Ignore the result of a send to a page that has left."""
    with suppress(WebSocketClosedError, asyncio.CancelledError):
        sent.result()
