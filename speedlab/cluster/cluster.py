"""Cluster: engines on devices, and what one does with them.

It is a handle: several, in several kernels, may speak to one cluster. What runs is written in the cluster's folder
(`home.py`), so that a new kernel finds it, and a handle reads it again when another one has changed it.
"""

from __future__ import annotations

import html
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import speedlab.cluster.processes as processes
import speedlab.cluster.remote as remote
import speedlab.cluster.start as start
from speedlab.cluster.connection import Connection, EngineStatus
from speedlab.cluster.devices import choose_devices
from speedlab.cluster.errors import ClusterError
from speedlab.cluster.home import ClusterState, Home, running_clusters
from speedlab.cluster.results import RankResults
from speedlab.cluster.shipping import pack
from speedlab.cluster.tasks import POLL_SECONDS
from speedlab.config import ConfigError, GivenConfig, config_of
from speedlab.config.errors import more_in
from speedlab.hardware import Device

if TYPE_CHECKING:
    from ipyparallel import Client

    from speedlab.cluster.output import OutputHub
    from speedlab.cluster.run import Run

log = logging.getLogger("speedlab.cluster")

RELEASE_SECONDS = 2.0
"""After a rank has failed or died, how long the others may still work on the same submission before they are
interrupted: normally they wait for the one that will not come."""

BACKENDS = ("shared", "gloo")

_RESET_SECONDS = 5.0
_STOP_PATIENCE_SECONDS = 1.0


class Cluster:
    """One engine per GPU, else 4 on CPU cores; or, if one of that name runs, a handle of it.

    `device`: 'cuda', 'cpu', or 'auto'. `backend`: how CPU engines reach each other, 'shared' (memory, the default) or
    'gloo' (sockets). With `start=False` nothing happens until `start()`. Raises ClusterError when
    there are too few devices, or the running cluster has another number or kind of engines.
    """

    def __init__(
        self,
        engines: int | None = None,
        *,
        name: str = "default",
        device: str = "auto",
        backend: str | None = None,
        start: bool = True,
    ) -> None:
        if backend not in (None, *BACKENDS):
            raise ClusterError(f"backend is {backend!r}; it is {' or '.join(map(repr, BACKENDS))}")
        self.name = name
        self._home = Home(name)
        self._wanted = engines
        self._wanted_device = device
        self._wanted_backend = backend
        self._open: Connection | None = None
        self._lock = threading.RLock()
        self._interrupting = threading.Lock()
        if start:
            self.start()

    @classmethod
    def attach(cls, name: str | None = None) -> Cluster:
        """A handle of a running cluster: `name`, else 'default', else the newest. ClusterError when none runs."""
        running = {state.name: state for state in running_clusters()}
        if not running or (name is not None and name not in running):
            what = f"cluster {name!r} does not run" if name is not None else "no cluster runs"
            others = f"; running: {', '.join(running)}" if running else ""
            arguments = f"name={name!r}" if name is not None else ""
            raise ClusterError(f"{what}{others}; speedlab.Cluster({arguments}) starts one")
        chosen = name or ("default" if "default" in running else next(iter(running)))
        cluster = cls(name=chosen, start=False)
        cluster._connect(running[chosen])
        return cluster

    def start(self) -> None:
        """Start the engines, or connect to those of this name that run. Returns when all are ready, torch imported."""
        with self._lock, self._home.lock():
            state = self._home.read()
            if state is not None and state.running:
                self._require_same(state)
                if self._open is None or self._open.state.token != state.token:
                    self._connect(state)
                return
            if state is not None:  # Its controller died; engines may be left.
                processes.end(processes.marked(state.token), patience_seconds=0.0)
            self._disconnect("the controller of the cluster had died")
            devices = choose_devices(self._wanted, self._wanted_device)
            self._connect(*start.start_cluster(self._home, devices, self._wanted_backend or BACKENDS[0]))

    # What it is

    @property
    def directory(self) -> Path:
        """The cluster's own folder, mode 0700; it is removed when the cluster stops."""
        return self._home.path

    @property
    def running(self) -> bool:
        """Whether the cluster's controller is alive."""
        state = self._home.read()
        return state is not None and state.running

    @property
    def size(self) -> int:
        """Number of engines, the world size."""
        return len(self._now().state.devices)

    @property
    def devices(self) -> list[Device]:
        """Devices by rank."""
        return list(self._now().state.devices)

    @property
    def output(self) -> OutputHub:
        """What the ranks write to stdout and stderr."""
        return self._now().output

    def status(self) -> list[EngineStatus]:
        """Each rank's engine, as it is now."""
        return self._now().status()

    # Work

    def submit(
        self, function: Callable[..., Any], /, *args: Any, ranks: Iterable[int] | None = None, **kwargs: Any
    ) -> RankResults:
        """Run `function(*args, **kwargs)` on each rank; returns at once.

        What a notebook, or a module in the user's folder, defines travels by value, with the globals that it uses;
        globals that the notebook has not are those of the engines' namespace, where cells of `%%ranks` put theirs, and
        where stays what the function binds with `global`. Raises ClusterError for a rank that does not exist or whose
        engine is dead, and for what cannot travel, such as an open file.
        """
        with self._lock:
            now = self._now()
            return self._send(now, now.living(ranks), function, args, kwargs)

    def execute(self, code: str, *, ranks: Iterable[int] | None = None) -> RankResults:
        """Run a cell's code in each engine's namespace. The last expression is printed, and its text returned."""
        return self.submit(remote.run_cell, code, ranks=ranks)

    def train(
        self,
        config: GivenConfig,
        *,
        model: Any = None,
        loss: Callable[[Any, Any], Any] | None = None,
        tp_plan: Mapping[str, str] | None = None,
    ) -> Run:
        """Check everything, start the run on all ranks, and return its handle. A try that fails leaves no name behind.

        Args:
            config: RunConfig, a dict of its fields, or the path of a JSON or YAML file; of DeepSpeed's keys, too.
            model: one's own, also one of the notebook: a torch.nn.Module, whose values all ranks begin with, or a class
                or function that makes one without arguments, on each rank from the configuration's seed. One that is
                too large to be whole on a rank is made under `torch.device("meta")`, and gets its values part by part.
                None takes the GPT of the configuration. Its forward is one of these:
                - `forward(tokens, targets)`, both (B, T) int64, gives the loss, or an output with `.loss`; with
                  data.documents 'separate' it also takes `positions`, where each token stands in its document;
                - `forward(input_ids=..., labels=...)` gives an output with `.loss`, as Hugging Face's models do, which
                  shift the labels themselves: both are the tokens;
                - any other, together with `loss`.
            loss: `loss(model, batch)` calls the model and gives the mean loss of a micro-batch, one number; `batch` is
                (tokens, targets), and with data.documents 'separate' (tokens, targets, positions). Not under a
                pipeline, where no rank holds the model.
            tp_plan: how layers are cut over tensor-parallel ranks: pattern of module names → style. None takes the one
                that the model brings along.

        A model of one's own is tried before: one micro-batch goes through it without values or memory. What depends on
        values cannot be tried so; a warning then says it. It is kept in the run folder, signed for this user, so that
        the run can be resumed from any kernel.

        Raises ConfigError, LayoutError, RunFolderError or ClusterError.
        """
        from speedlab.cluster.run import start_run

        if loss is not None and not callable(loss):
            raise ConfigError(
                f"loss: {loss!r} cannot be called; give a function f(model, batch) that calls the model and gives the "
                "mean loss, or none where the model's forward gives it"
            )
        given = {"model": model, "loss": loss, "tp_plan": tp_plan}
        return start_run(self, config_of(config), **{key: value for key, value in given.items() if value is not None})

    # Control

    def interrupt(self, timeout_seconds: float = 2.0) -> list[int]:
        """Interrupt what the ranks are doing; returns the ranks that are idle then.

        1. Take tasks that have not begun out of the queues.
        2. Send SIGINT, look, and send it again to a rank that still works on what it worked on before.
        3. Cut the connections to the other ranks of one that does not come back, and break the store in which ranks
           meet: it waits for a peer.
        4. Let the ranks leave their process group: a collective that was cut off makes it unusable.

        A rank that is missing in the answer is inside a long native call or frozen; `restart(rank)` ends it.
        """
        with self._interrupting:
            now = self._now()
            alive = {engine.rank for engine in now.state.engines if now.tasks.reaches(engine)}
            tasks = {rank: found for rank, found in now.tasks.under_way(now.state).items() if rank in alive}
            if not tasks:
                return sorted(alive)
            still = now.tasks.stop(now.state, tasks, timeout_seconds, self._home.break_stores)
            stopped = sorted(alive - still)
            # Not all ranks may have joined the group, or the same one: they meet again where none has been.
            self._home.next_generation()
            self._reset(now, stopped)
            return stopped

    def restart(self, rank: int) -> None:
        """End the engine of `rank`, if it is still there, and start a new one on the same device.

        What it held is lost. The others are interrupted, keep what they hold, and form a new process group with it.
        """
        with self._lock, self._home.lock():
            now = self._now()
            (rank,) = now.existing([rank])
            old = now.state.engines[rank]
            now.end([old])
            self.interrupt()
            self._home.next_generation()
            (new,) = start.start_engines(self._home, now.state, now.client, [rank])
            engines = tuple(new if engine.rank == rank else engine for engine in now.state.engines)
            state = replace(now.state, engines=engines)
            self._home.write(state)
            now.take_over(state, self._home.stamp())
            others = [engine.rank for engine in engines if engine.rank != rank and now.tasks.reaches(engine)]
            self._reset(now, others)

    def resize(self, engines: int, *, progress: Callable[[str], object] = print) -> None:
        """Change the number of engines: those that stay keep their processes and what cells have put there, new ones
        get the next devices, those too many are ended. Returns when all are ready.

        CPU cores are shared out anew. Ranks lose their process group, and engines that cells have built lose their
        peers. A paused run goes on from its newest checkpoint, with its configuration as it is;
        `run.reshape(engines=…)` saves first and fits the configuration. Raises ClusterError, with the cluster as it
        was, while a run or a cell is under way, or when there are too few devices.
        """
        from speedlab.cluster.resize import Resize

        with self._lock, self._home.lock():
            Resize(self, self._home, self._now(), progress).to(engines)
            self._wanted = engines

    def stop(self) -> None:
        """End all engines, what they started, and the controller; interrupts first. Does nothing when none runs."""
        with self._lock, self._home.lock():
            state = self._home.read()
            if state is not None:
                if self._open is not None and state.running:
                    self.interrupt()
                left = processes.end(processes.marked(state.token), patience_seconds=_STOP_PATIENCE_SECONDS)
                if left:
                    pids = ", ".join(str(process.pid) for process in left)
                    raise ClusterError(f"processes {pids} cannot be ended; they may wait for a device or a disk")
            self._disconnect("the cluster was stopped")
            self._home.remove()

    def release_waiting(self, results: RankResults) -> None:
        """A rank of `results` has failed: interrupt the others in RELEASE_SECONDS, if they have not ended by then."""
        timer = threading.Timer(RELEASE_SECONDS, self._release, [results])
        timer.daemon = True
        timer.start()

    def check_controller(self) -> None:
        """Raise ClusterError when the controller has died, so that nobody waits for an answer that cannot come."""
        now = self._open
        if now is not None and now.state.running:
            return
        reason = f"the controller of cluster {self.name!r} has died or was stopped"
        if now is not None:
            now.tasks.abandon(reason)
        raise ClusterError(f"{reason}; speedlab.Cluster(name={self.name!r}) starts it anew")

    # Inside

    def _require_same(self, state: ClusterState) -> None:
        """Raise ClusterError unless the running cluster is what is asked for."""
        size, kind = len(state.devices), state.devices[0].kind
        attach = f"speedlab.Cluster.attach({self.name!r})"
        what_to_do = f"use it as it is with {attach}, stop it first, or give the new one another name; "
        what_to_do += more_in("engines")
        if self._wanted is not None and self._wanted != size:
            raise ClusterError(
                f"cluster {self.name!r} runs with {size} engines, and {self._wanted} were asked for; {what_to_do}"
            )
        if self._wanted_device not in ("auto", kind):
            raise ClusterError(
                f"cluster {self.name!r} runs on {kind}, and {self._wanted_device} was asked for; {what_to_do}"
            )

        if self._wanted_backend not in (None, state.backend):
            raise ClusterError(
                f"the engines of cluster {self.name!r} reach each other through {state.backend!r}, and "
                f"{self._wanted_backend!r} was asked for; {what_to_do}"
            )

    def _connect(self, state: ClusterState, client: Client | None = None) -> None:
        self._disconnect("the handle was connected anew")
        try:
            self._open = Connection(self._home, state, client or start.connect(self._home, state))
        except (ClusterError, FileNotFoundError):
            if state.running:
                raise
            # Another process has ended it meanwhile; its logs, which such errors show, have nothing to do with it.
            raise ClusterError(
                f"cluster {self.name!r} ended just now; speedlab.Cluster(name={self.name!r}) starts it anew"
            ) from None

    def _disconnect(self, reason: str) -> None:
        now, self._open = self._open, None
        if now is not None:
            now.tasks.abandon(reason)
            now.close()

    def _now(self) -> Connection:
        """The connection, and what runs by now. Raises ClusterError when nothing does."""
        now = self._open
        if now is None:
            raise ClusterError(f"cluster {self.name!r} is not running; cluster.start() starts it")
        stamp = self._home.stamp()
        if stamp != now.stamp:
            state = self._home.read()
            if state is None or state.token != now.state.token:
                raise ClusterError(
                    f"cluster {self.name!r} was stopped by another handle; "
                    f"speedlab.Cluster(name={self.name!r}) starts or finds the present one"
                )
            now.take_over(state, stamp)
        self.check_controller()
        return now

    def _send(
        self,
        now: Connection,
        ranks: list[int],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> RankResults:
        named = {getattr(function, "__name__", "the function"): function, "its arguments": args} | kwargs
        work = pack((function, args, kwargs), named)
        results = RankResults(self, now.output, now.tasks.send(now.state, ranks, remote.call, work))
        now.tasks.watch(results)
        return results

    def _reset(self, now: Connection, ranks: list[int]) -> None:
        """Let idle ranks leave their process group."""
        ranks = [rank for rank in ranks if now.tasks.reaches(now.state.engines[rank])]
        if not ranks:
            return
        resets = self._send(now, ranks, remote.reset, (), {})
        deadline = time.monotonic() + _RESET_SECONDS
        while not resets.done and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        for rank in resets.unfinished:
            log.warning("rank %d does not leave its process group; cluster.restart(%d) brings it back", rank, rank)
        for rank, failure in resets.failures.items():
            log.warning("rank %d could not leave its process group: %s", rank, failure)

    def _release(self, results: RankResults) -> None:
        if results.done or self._open is None:
            return
        try:
            self.interrupt()
        except Exception:  # On this thread nobody else would hear of it.
            if self.running:  # Else it was stopped meanwhile, which whoever waits is told.
                log.exception("ranks that wait for a failed one could not be interrupted")

    def __repr__(self) -> str:
        if self._open is None or not self.running:
            return f"<Cluster {self.name!r}: not running>"
        devices = self.devices
        names = ", ".join(dict.fromkeys(device.name for device in devices))
        return f"<Cluster {self.name!r}: {len(devices)} engine{'s' if len(devices) != 1 else ''} on {names}>"

    def _repr_html_(self) -> str:
        if self._open is None or not self.running:
            return html.escape(repr(self))
        rows = "".join(
            f"<tr><td>{status.rank}</td><td>{html.escape(status.device.name)}</td><td>{status.state}</td>"
            f"<td>{status.rss_bytes / 2**30:.2f} GiB</td><td>{status.pid}</td></tr>"
            for status in self.status()
        )
        head = "<tr><th>rank</th><th>device</th><th>state</th><th>memory</th><th>process</th></tr>"
        return f"<b>Cluster {html.escape(self.name)}</b><table>{head}{rows}</table>"
