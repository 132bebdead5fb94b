"""HTTP requests of pages, under `<base_url>/speedlab/api/`. Every answer is JSON, errors included.

GET  clusters                      Clusters
POST clusters                      ClusterWordGiven  body: a Start
GET  clusters/<id>                 Cluster
POST clusters/<id>/words           ClusterWordGiven  body: a Word (CLUSTER_WORDS)
GET  places                        Places     Python environments that can start a cluster
GET  clusters/<id>/output          Output     ?after=<cursor> ranks=0,1 match=<text>
GET  runs                          Runs
GET  runs/<id>                     Run
GET  runs/<id>/records             Records    ?after=<step> generation= stride= points= rank=
GET  runs/<id>/events              Events     ?after=<number of events known>
GET  runs/<id>/tensors             Tensors    ?rank= category= place=
GET  runs/<id>/output              Output     as above, of the cluster that holds the run
POST runs/<id>/words               WordGiven  body: a Word
GET  notebooks/<name>              Notebook   one of SpeedLab's notebooks
GET  runs/<id>/drawing             a websocket, see `figure_socket`
GET  live                          a websocket, see `live_socket`
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import responses
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from jupyter_core.utils import ensure_async
from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from jupyter_server.utils import url_path_join
from tornado import web

import speedlab_server.cluster_commands as cluster_words
import speedlab_server.commands as words
import speedlab_server.schema as m
from speedlab.display.documentation import notebook_file
from speedlab_server.clusters import Clusters, Reached, all_clusters, find
from speedlab_server.errors import OtherVersionError, QuestionError, reported, version_text
from speedlab_server.figure_socket import ComparisonHandler, DrawingHandler
from speedlab_server.live_socket import Hub, LiveHandler
from speedlab_server.rank_output import folder_of, output_of
from speedlab_server.run_reader import Reader
from speedlab_server.run_registry import Registry, live_tokens
from speedlab_server.start_cluster import NOTHING_FITS, ClusterLauncher, Pythons, candidates, place_of

RESOURCE = "speedlab"
"""Resource name for Jupyter's authorizer: to read it, and to write it (commands)."""
VERSION_HEADER = "X-SpeedLab-Version"
_SETTING = "speedlab_server"
_MOST_WORD_BYTES = 2**14
_MOST_DIGITS = 15
"""Maximum digits of a number: a page's numbers are doubles, which hold no more."""

_Asked = TypeVar("_Asked", bound=m.Part)


@dataclass
class Services:
    """Objects that all handlers share."""

    registry: Registry
    clusters: Clusters
    starts: ClusterLauncher
    pythons: Pythons
    disk: ThreadPoolExecutor
    """Threads that read files: never the event loop, and never the threads that wait for a supervisor."""

    def all_clusters(self) -> list[m.ClusterSummary]:
        """Return every cluster of this user, including those that pages have just started. Waits for the disk."""
        return self.starts.reported(all_clusters())

    async def in_thread(self, work: Callable[[], Any]) -> Any:
        """Run `work` in a thread for disk access and return its result.

        Args:
            work: A function without arguments.
        """
        return await asyncio.get_running_loop().run_in_executor(self.disk, work)


def add_handlers(web_app: Any, root_dir: str) -> None:
    """Add SpeedLab's handlers to a Jupyter server.

    Args:
        web_app: The server's tornado application.
        root_dir: The server's root folder.
    """
    disk = ThreadPoolExecutor(8, thread_name_prefix="speedlab-disk")
    starts = ClusterLauncher(Path(root_dir or ".").expanduser())
    services = Services(Registry(root_dir), Clusters(), starts, Pythons(), disk)
    web_app.settings[_SETTING] = services
    base = url_path_join(web_app.settings["base_url"], "speedlab", "api")
    routes = [(rf"{base}/{pattern}", handler) for pattern, handler in _ROUTES]
    live = (rf"{base}/live", LiveHandler, {"hub": Hub(services)})
    drawing = (f"{base}/runs/{_ID}/drawing", DrawingHandler, {"services": services})
    comparison = (f"{base}/comparisons/{_IDS}/drawing", ComparisonHandler, {"services": services})
    web_app.add_handlers(".*$", [*routes, drawing, comparison, live, (rf"{base}/.*", NothingHandler)])


class Handler(APIHandler):
    """Answers with messages, and with a Problem after an error."""

    auth_resource = RESOURCE
    _track_activity = False  # An open page must not keep an idle server alive.

    @property
    def services(self) -> Services:
        """The server's services."""
        return self.settings[_SETTING]

    async def prepare(self) -> None:
        """Refuse pages of another version."""
        await super().prepare()
        theirs = self.request.headers.get(VERSION_HEADER, str(m.VERSION))
        if not self._finished and theirs != str(m.VERSION):
            raise OtherVersionError(version_text(theirs[:16], m.VERSION))

    def say(self, message: m.Message, status: int = 200) -> None:
        """Send a message as JSON.

        Args:
            message: The message.
            status: HTTP status.
        """
        self.set_status(status)
        self.finish(msgspec.json.encode(message))

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Answer with a Problem that describes the error.

        Args:
            status_code: HTTP status.
            **kwargs: Passed by tornado; has `exc_info`.
        """
        error = (kwargs.get("exc_info") or (None, None))[1]
        known = reported(error) if isinstance(error, Exception) and not isinstance(error, web.HTTPError) else None
        text = responses.get(status_code, "this cannot be answered")
        if known is not None:
            status_code, text = known
        elif isinstance(error, web.HTTPError):
            text = error.log_message or error.reason or text
        elif error is not None:
            text = f"the server could not answer ({type(error).__name__}); its log has details"
        self.say(m.Problem(text=text), status_code)

    def log_exception(self, typ: Any, value: BaseException | None, tb: Any) -> None:
        """Log unexpected errors only.

        Args:
            typ: Type of the exception.
            value: The exception.
            tb: Its traceback.
        """
        if isinstance(value, web.HTTPError) or not isinstance(value, Exception) or reported(value) is None:
            super().log_exception(typ, value, tb)

    def whole(self, name: str, otherwise: int) -> int:
        """Return an integer argument of the query.

        Args:
            name: Name of the argument.
            otherwise: Default.

        Raises:
            QuestionError: The argument is no integer, or has too many digits.
        """
        text = self.get_query_argument(name, "")
        try:
            if len(text) > _MOST_DIGITS:
                raise ValueError
            return int(text) if text else otherwise
        except ValueError:
            what = f"no whole number of at most {_MOST_DIGITS} digits"
            raise QuestionError(f"{name}: {text[:32]!r} is {what}") from None

    def asked(self, kind: type[_Asked], what: str, example: str) -> _Asked:
        """Decode the request's body.

        Args:
            kind: Type of the message.
            what: Its name, for errors.
            example: An example, for errors.

        Raises:
            QuestionError: The body is too large or no such message.
        """
        if len(self.request.body) > _MOST_WORD_BYTES:
            raise QuestionError(f"a {what} has at most {_MOST_WORD_BYTES} bytes")
        try:
            return msgspec.json.decode(self.request.body, type=kind)
        except msgspec.DecodeError as error:
            raise QuestionError(f"this is no {what}: {error}; one is {example}") from None

    async def kernelspecs(self) -> dict[str, Any]:
        """Return the kernelspecs of this server."""
        return await ensure_async(self.settings["kernel_spec_manager"].get_all_specs())

    async def reader(self, id: str) -> Reader:
        """Return the run's reader after a poll.

        Args:
            id: Id of the run.
        """

        def opened() -> Reader:
            reader = self.services.registry.reader(id)
            reader.look()
            return reader

        return await self.services.in_thread(opened)


class NothingHandler(Handler):
    """Answers unknown addresses."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """Answer with status 404."""
        raise web.HTTPError(404, "SpeedLab's server has no such address")


class ClustersHandler(Handler):
    @web.authenticated
    @authorized
    async def get(self) -> None:
        """Answer with all clusters."""
        self.say(m.Clusters(clusters=await self.services.in_thread(self.services.all_clusters)))

    @web.authenticated
    @authorized
    async def post(self) -> None:
        """Start a cluster. Status 202: the list of clusters shows the progress."""
        start = self.asked(m.Start, "start of a cluster", '{"name": "default", "place": "server"}')
        places = candidates(await self.kernelspecs())
        place = place_of(start.place, places)
        await self.services.in_thread(lambda: cluster_words.begin(self.services.starts, start, place))
        self.say(m.ClusterWordGiven(cluster=start.name, word="start"), 202)


class PlacesHandler(Handler):
    @web.authenticated
    @authorized
    async def get(self) -> None:
        """Answer with the Pythons that can start a cluster."""
        places = candidates(await self.kernelspecs())
        found = await self.services.pythons.able(places)
        reported_places = [m.StartPlace(id=place.id, name=place.name) for place in found]
        self.say(m.Places(places=reported_places, problem="" if found else NOTHING_FITS))


class ClusterWordsHandler(Handler):
    @web.authenticated
    @authorized
    async def post(self, id: str) -> None:
        """Execute a command for a cluster; answer when it is done.

        Args:
            id: Id of the cluster.
        """
        word = self.asked(m.Word, "word for a cluster", '{"word": "stop"}')
        cluster_words.check(word)
        await self.services.clusters.give_word(lambda: cluster_words.give(id, word.word, self.services.starts))
        self.say(m.ClusterWordGiven(cluster=id, word=word.word))


class ClusterHandler(Handler):
    @web.authenticated
    @authorized
    async def get(self, id: str) -> None:
        """Answer with a cluster, its runs, and the memory of its newest run.

        Args:
            id: Id of the cluster.
        """
        cluster = await self.services.clusters.look(id)
        cluster.runs, cluster.memory = await self.services.in_thread(lambda: self._runs_of(id))
        self.say(cluster)

    def _runs_of(self, id: str) -> tuple[list[str], list[m.RankMemory]]:
        folder, _ = find(id)
        registry = self.services.registry
        held = {run.id for run in registry.runs() if run.cluster == id}
        given = registry.given_to(folder, id)
        for run in given:
            if run in held:
                reader = registry.reader(run)
                reader.look()
                return given, reader.memory()
        return given, []


class OutputHandler(Handler):
    """Output of ranks: those of a cluster, or of the cluster that holds a run."""

    @web.authenticated
    @authorized
    async def get(self, kind: str, id: str) -> None:
        """Answer with the output since the cursor `after`.

        Args:
            kind: "clusters" or "runs".
            id: Id of the cluster or run.
        """
        ranks = self._ranks()
        after, match = self.get_query_argument("after", ""), self.get_query_argument("match", "")

        def read() -> m.Output:
            folder = folder_of(self.services.registry, kind, id)
            return output_of(folder, after=after, ranks=ranks, match=match)

        self.say(await self.services.in_thread(read))

    def _ranks(self) -> list[int] | None:
        text = self.get_query_argument("ranks", "")
        try:
            return [int(rank) for rank in text.split(",")] if text else None
        except ValueError:
            raise QuestionError(f"ranks: {text[:32]!r} are no numbers with commas between them") from None


class RunsHandler(Handler):
    @web.authenticated
    @authorized
    async def get(self) -> None:
        """Answer with all runs."""
        self.say(m.Runs(runs=await self.services.in_thread(self.services.registry.runs)))


class RunHandler(Handler):
    @web.authenticated
    @authorized
    async def get(self, id: str) -> None:
        """Answer with a run, its configuration and its memory.

        Args:
            id: Id of the run.
        """
        reader = await self.reader(id)

        def described() -> m.Run:
            config = json.loads(reader.folder.config.to_json())
            cluster = live_tokens().get(reader.folder.read_status().token, "")
            return m.Run(run=reader.summary(cluster), ranks=reader.ranks, config=config, memory=reader.memory())

        self.say(await self.services.in_thread(described))


class RecordsHandler(Handler):
    @web.authenticated
    @authorized
    async def get(self, id: str) -> None:
        """Answer with the step records that the page does not have.

        Args:
            id: Id of the run.
        """
        watch = m.Watch(
            id=id,
            parts=["records"],
            generation=self.whole("generation", 0),
            stride=self.whole("stride", 0),
            after=self.whole("after", -1),
            points=self.whole("points", 400),
        )
        rank = self.whole("rank", -1)
        reader = await self.reader(id)
        self.say(await self.services.in_thread(lambda: reader.records(watch, rank if rank >= 0 else None)))


class EventsHandler(Handler):
    @web.authenticated
    @authorized
    async def get(self, id: str) -> None:
        """Answer with the events that the page does not have.

        Args:
            id: Id of the run.
        """
        after = self.whole("after", 0)
        reader = await self.reader(id)
        self.say(await self.services.in_thread(lambda: reader.events(after)))


class TensorsHandler(Handler):
    @web.authenticated
    @authorized
    async def get(self, id: str) -> None:
        """Answer with the tensors in a segment of the memory bars.

        Args:
            id: Id of the run.
        """
        rank, category = self.whole("rank", -1), self.get_query_argument("category", "")
        place = self.get_query_argument("place", "device")
        reader = await self.reader(id)
        self.say(await self.services.in_thread(lambda: reader.tensors(rank, category, place)))


class NotebookHandler(Handler):
    """Notebooks of SpeedLab, which the launcher's card copies into the user's folder."""

    @web.authenticated
    @authorized
    async def get(self, name: str) -> None:
        """Answer with a notebook.

        Args:
            name: Name of the notebook.
        """

        def read() -> dict[str, Any]:
            return json.loads(notebook_file(name).read_bytes())

        self.say(m.Notebook(name=name, content=await self.services.in_thread(read)))


class WordsHandler(Handler):
    @web.authenticated
    @authorized
    async def post(self, id: str) -> None:
        """Post a command to a run. Status 202: the event with the command's number is the answer.

        Args:
            id: Id of the run.
        """
        word = self.asked(m.Word, "control word", '{"word": "pause"}')
        words.check(word)
        path, cluster = await self.services.in_thread(lambda: self._place_of(id))
        if cluster:
            work: Callable[[Reached], int] = lambda reached: words.give(path, reached, word)  # noqa: E731
            number = await self.services.clusters.with_reached(cluster, work)
        else:
            number = await self.services.in_thread(lambda: words.give(path, None, word))
        self.say(m.WordGiven(run=id, word=word.word, number=number), 202)

    def _place_of(self, id: str) -> tuple[Path, str]:
        """Return the run's folder, and the id of the cluster that holds it ('' for none)."""
        path = self.services.registry.path_of(id)
        return path, live_tokens().get(self.services.registry.reader(id).folder.read_status().token, "")


_ID = r"([A-Za-z0-9@_.%-]{1,128})"
_IDS = r"([A-Za-z0-9@_.%,-]{1,4096})"
_ROUTES: list[tuple[str, type[Handler]]] = [
    ("clusters", ClustersHandler),
    ("places", PlacesHandler),
    (f"clusters/{_ID}", ClusterHandler),
    (f"clusters/{_ID}/words", ClusterWordsHandler),
    (f"(clusters|runs)/{_ID}/output", OutputHandler),
    (rf"notebooks/{_ID}", NotebookHandler),
    ("runs", RunsHandler),
    (f"runs/{_ID}", RunHandler),
    (f"runs/{_ID}/records", RecordsHandler),
    (f"runs/{_ID}/events", EventsHandler),
    (f"runs/{_ID}/tensors", TensorsHandler),
    (f"runs/{_ID}/words", WordsHandler),
]
