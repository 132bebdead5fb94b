"""Cluster: engines on devices, and what one does with them.

It is a handle: several, in several kernels, may speak to one cluster. Everything that must outlive them is its
supervisor's (`supervisor/`), which a handle asks; what runs is written in the cluster's folder (`home.py`), so that a
new kernel finds it.
"""

from __future__ import annotations

import contextlib
import html
import secrets
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import speedlab.cluster.ending as ending
import speedlab.cluster.host_specs as host_specs
import speedlab.cluster.pretended as pretended
import speedlab.cluster.processes as processes
from speedlab.cluster.cells import run_cell
from speedlab.cluster.devices import choose_devices
from speedlab.cluster.errors import ClusterError
from speedlab.cluster.home import ClusterState, Home, running_clusters
from speedlab.cluster.kernel_interrupt import is_the_users
from speedlab.cluster.ranks_output import RanksOutput
from speedlab.cluster.results import RankResults
from speedlab.cluster.runs_of import RunsOf
from speedlab.cluster.shipping import pack
from speedlab.cluster.supervisor import messages as m
from speedlab.cluster.supervisor import spawn
from speedlab.cluster.supervisor.client import Client, SupervisorGoneError
from speedlab.config import ConfigError, GivenConfig, config_of
from speedlab.config.errors import more_in
from speedlab.hardware import Device
from speedlab.network import LinkRate

if TYPE_CHECKING:
    from speedlab.cluster.run import Run

BACKENDS = ("shared", "gloo")

_MOST_ASKED = 3


@dataclass(frozen=True, kw_only=True)
class EngineStatus:
    """One rank's engine, as it is now."""

    rank: int
    engine_id: int
    pid: int
    device: Device
    state: str
    """'idle', 'busy', 'frozen' (its process is suspended) or 'dead' (it ended, or stopped answering)."""
    rss_bytes: int


class Cluster:
    """One engine per GPU, else 4 on CPU cores; or, if one of that name runs, a handle of it.

    `device`: 'cuda', 'cpu', or 'auto'. `backend`: how CPU engines reach each other, 'shared' (memory, the default) or
    'gloo' (sockets). With `start=False` nothing happens until `start()`. Raises ClusterError when
    there are too few devices, or the running cluster has another number or kind of engines.

    On several hosts, in one of three ways: `hosts=["gpu-1:8", "gpu-2:8"]` over SSH, as the user may;
    `slurm={"nodes": 4, "gpus_per_node": 8, "partition": "a100", "time": "8:00:00"}`; `mpi={"hostfile": "hosts"}`.
    They have the same Python, and share the folders of runs (a home on the network): else records come over the wire,
    and checkpoints cannot be. `interface`: of the hosts, over which
    ranks reach each other; "" takes the one that leads here. `progress` hears what a start waits for, as a place in a
    queue. `speedlab guide hosts` tells more.

    `link="1 Gbit/s 1 ms"`: each CPU engine pretends to be a host of its own, and what they send each other takes as
    long as it would over such a link, for lessons on slow networks. Raises ClusterError for what is no link, with GPUs,
    and together with hosts, which have links of their own.
    """

    def __init__(
        self,
        engines: int | None = None,
        *,
        name: str = "default",
        device: str = "auto",
        backend: str | None = None,
        link: str | None = None,
        start: bool = True,
        hosts: Sequence[str] | host_specs.SshHosts | None = None,
        slurm: Mapping[str, Any] | None = None,
        mpi: Mapping[str, Any] | None = None,
        interface: str = "",
        progress: Callable[[str], object] = print,
    ) -> None:
        if backend not in (None, *BACKENDS):
            raise ClusterError(f"backend is {backend!r}; it is {' or '.join(map(repr, BACKENDS))}")
        self.name = name
        self._home = Home(name)
        self._wanted = engines
        self._wanted_device = device
        self._wanted_backend = backend
        self._spec = host_specs.parse(hosts, slurm, mpi)
        self._wanted_link = pretended.parse(link, on_hosts=self._spec is not None)
        self._interface, self._given_up = interface, threading.Event()
        self._waiting = spawn.Waiting(progress=progress, given_up=self._given_up.is_set)
        if self._spec is not None and engines is not None:
            raise ClusterError(
                f"engines is {engines}, and hosts say how many each has; leave it out, or write them as 'gpu-1:8'"
            )
        self._lock = threading.RLock()
        self._state: ClusterState | None = None
        self._stamp = 0
        self._client: Client | None = None
        self._unfinished: weakref.WeakValueDictionary[str, RankResults] = weakref.WeakValueDictionary()
        self.output = RanksOutput(self)
        """What the ranks write to stdout and stderr."""
        self.runs = RunsOf(self)
        """The runs of this cluster, as its supervisor has them."""
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
        with cluster._lock, cluster._home.lock():
            cluster._take(running[chosen])
            cluster._connect()
        return cluster

    def start(self) -> None:
        """Start the engines, or connect to those of this name that run. Returns when all are ready, torch imported."""
        self._given_up.clear()
        with self._lock, self._home.lock():
            state = self._home.read()
            if state is not None and state.running:
                self._require_same(state)
                if self._state is None or self._state.token != state.token or self._lost:
                    self._take(state)
                    self._connect()
                return
            self._disconnect("the controller of the cluster had died")
            if state is None and self._joins_a_start():
                return
            ending.end_processes(self._home, 0.0)  # Its controller died, or its supervisor before all was ready.
            self._start()

    def give_up_start(self) -> None:
        """Let a `start` that another thread is in end with ClusterError; what it has begun, also a place in a queue, is
        given back. Does nothing when there is none."""
        self._given_up.set()

    def _joins_a_start(self) -> bool:
        """Whether somebody else has begun to start the cluster, as a kernel before its restart; it is ready when this
        returns."""
        try:
            self._client = Client(
                self._home.supervisor_socket, self.output.printed, self._waiting.progress, self._waiting.given_up
            )
        except SupervisorGoneError:
            return False
        state = self._home.read()
        assert state is not None
        try:
            self._require_same(state)
        except ClusterError as error:
            self._disconnect(str(error))
            raise
        self._take(state)
        return True

    def _start(self) -> None:
        devices = choose_devices(self._wanted, self._wanted_device) if self._spec is None else []
        token, backend = secrets.token_hex(16), self._wanted_backend or BACKENDS[0]
        self._home.create(token)
        try:
            if self._spec is None:
                link = pretended.between(devices, self._wanted_link)
                self._client = spawn.start(
                    self._home, token, devices, backend, link, self.output.printed, self._waiting
                )
            else:
                self._client = spawn.start_on_hosts(
                    self._home,
                    token,
                    self._spec,
                    device=self._wanted_device,
                    backend=backend,
                    interface=self._interface,
                    printed=self.output.printed,
                    waiting=self._waiting,
                )
            state = self._home.read()
            assert state is not None
            self._take(state)
        except BaseException:
            if self._spec is not None:
                self._give_hosts_back()
            processes.end(processes.marked(token), patience_seconds=0.0)
            self._home.remove()
            raise

    def _give_hosts_back(self) -> None:
        """Of a start that nobody wants any more: where it was too late to cancel it, its supervisor has to be asked."""
        with contextlib.suppress(ClusterError, SupervisorGoneError, TimeoutError):
            client = Client(self._home.supervisor_socket, self.output.printed)
            client.ask(m.Stop(), seconds=ending.STOP_HOSTS_SECONDS)
            client.close()

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
        return len(self._now().devices)

    @property
    def devices(self) -> list[Device]:
        """Devices by rank."""
        return list(self._now().devices)

    @property
    def link(self) -> LinkRate | None:
        """What the engines pretend to have between them; None where they pretend nothing."""
        text = self._now().link
        return LinkRate.parse(text) if text else None

    @property
    def token(self) -> str:
        """Which cluster of this name it is."""
        return self._now().token

    def status(self) -> list[EngineStatus]:
        """Each rank's engine, as it is now."""
        devices = self.devices
        return [
            EngineStatus(
                rank=found.rank,
                engine_id=found.engine_id,
                pid=found.pid,
                device=devices[found.rank],
                state=found.state,
                rss_bytes=found.rss_bytes,
            )
            for found in self._ask(m.Look())
        ]

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
        named = {getattr(function, "__name__", "the function"): function, "its arguments": args} | kwargs
        return self._submit(pack((function, args, kwargs), named), ranks)

    def execute(self, code: str, *, ranks: Iterable[int] | None = None, shown: bool = False) -> RankResults:
        """Run a cell's code in each engine's namespace. The last expression is printed, and its text returned. `shown`:
        whether `RankResults.sayings` is to tell what ranks print and display in it."""
        work = pack((run_cell, (code,), {}), {"the cell": code})
        return self._submit(work, ranks, shown=shown)

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
        return self._interrupt(timeout_seconds)

    def debug(self, rank: int) -> None:
        """Open a post-mortem of what `rank` raised last, with pdb's commands; `q` ends it. A rank keeps it, and the
        tensors in its frames, until it begins with something else. Raises ClusterError for a rank that is not there, is
        dead, works, or keeps nothing."""
        from speedlab.cluster.debugger import debug

        debug(self, rank)

    def restart(self, rank: int) -> None:
        """End the engine of `rank`, if it is still there, and start a new one on the same device.

        What it held is lost. The others are interrupted, keep what they hold, and form a new process group with it.
        Where its host was lost and is back, all engines of that host are started.
        """
        self._ask(m.Restart(rank=rank))

    def resize(self, engines: int, *, progress: Callable[[str], object] = print) -> None:
        """Change the number of engines: those that stay keep their processes and what cells have put there, new ones
        get the next devices, those too many are ended. Returns when all are ready.

        CPU cores are shared out anew. Hosts come and go whole, those that are lost first; one that was left out comes
        back when there are to be more engines. Ranks lose their process group, and engines that cells have built lose
        their peers. A paused run goes on from its newest checkpoint, with its configuration as it is;
        `run.reshape(engines=…)` saves first and fits the configuration. Raises ClusterError, with the cluster as it
        was, while a run or a cell is under way, or when there are too few devices.
        """
        self._ask(m.Resize(engines=engines), progress=progress)
        self._wanted = engines

    def check_size(self, engines: int) -> None:
        """Raise ClusterError where `resize` could not give so many engines."""
        self._ask(m.Resize(engines=engines, only_look=True))

    def stop(self) -> None:
        """End all engines, what they started, and the controller; interrupts first. Does nothing when none runs."""
        with self._lock, self._home.lock():
            state = self._home.read()
            if state is not None and self._client is not None and state.running:
                with contextlib.suppress(SupervisorGoneError, ClusterError, TimeoutError):
                    if state.hosts and self._lost:
                        self._connect()  # Only a supervisor gives hosts back.
                    self._client.ask(m.Stop(), seconds=ending.stop_seconds(state))
            ending.end_processes(self._home, ending.STOP_PATIENCE_SECONDS)
            self._disconnect("the cluster was stopped")
            self._home.remove()

    def check_controller(self) -> None:
        """Raise ClusterError when the cluster has ended, so that nobody waits for an answer that cannot come. Where
        only its supervisor has, a new one takes over."""
        state = self._state
        if state is None or not state.running:
            left = self._home.read()
            known = left.over if state is not None and left is not None and left.token == state.token else ""
            reason = known or f"the controller of cluster {self.name!r} has died or was stopped"
            self._abandon(reason)
            raise ClusterError(f"{reason}; speedlab.Cluster(name={self.name!r}) starts it anew")
        if self._lost:
            self._reconnect()

    # Inside

    def _require_same(self, state: ClusterState) -> None:
        """Raise ClusterError unless the running cluster is what is asked for."""
        size, kind = len(state.devices), state.devices[0].kind
        attach = f"speedlab.Cluster.attach({self.name!r})"
        what_to_do = f"use it as it is with {attach}, stop it first, or give the new one another name; "
        what_to_do += more_in("engines")
        if not host_specs.may_be(self._spec, state.hosts):
            raise ClusterError(
                f"cluster {self.name!r} runs on {', '.join(state.hosts) or 'this machine'}, and other hosts were asked "
                f"for; {what_to_do}"
            )
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
        if self._wanted_link is not None and str(self._wanted_link) != state.link:
            raise ClusterError(
                f"the engines of cluster {self.name!r} {pretended.words(state.link) or 'pretend no link'}, and "
                f"{self._wanted_link} was asked for; {what_to_do}"
            )

    # ---- the supervisor ----------------------------------------------------------------------------------------------

    @property
    def _lost(self) -> bool:
        return self._client is None or self._client.lost

    def _ask(
        self, question: m.Question, *, progress: Callable[[str], object] | None = None, seconds: float | None = None
    ) -> Any:
        """Ask the supervisor; a new one, where it ends meanwhile. What is asked twice must be the same as once. Raises
        TimeoutError where it does not answer within `seconds`."""
        for _ in range(_MOST_ASKED):
            try:
                self._now()
                client = self._client
                assert client is not None
                return client.ask(question, progress=progress, seconds=seconds)
            except SupervisorGoneError:
                continue
        raise ClusterError(
            f"the supervisor of cluster {self.name!r} ended {_MOST_ASKED} times over the same question "
            f"({type(question).__name__}); its log is {self._home.log / 'supervisor.log'}"
        )

    def _submit(self, work: bytes, ranks: Iterable[int] | None, *, shown: bool = False) -> RankResults:
        results = RankResults(self, secrets.token_hex(8), work, shown=shown)
        self._now()
        chosen = results.wanted = None if ranks is None else list(ranks)
        self._hear_of(results)
        try:
            results.begun(self._ask(m.Submit(id=results.id, work=work, ranks=chosen, shown=shown)))
        except KeyboardInterrupt:
            del self._unfinished[results.id]  # Not asked for again, where the interrupt has cut the connection.
            if is_the_users():  # Nobody has a handle of it: it must not go on.
                processes.uninterrupted(results.interrupt)
            raise
        return results

    def _hear_of(self, results: RankResults) -> None:
        self._unfinished[results.id] = results
        if self._client is not None:
            self._client.hear_of(results.id, results)

    def _interrupt(self, timeout_seconds: float, *, id: str = "", folder: str = "") -> list[int]:
        return self._ask(m.Interrupt(id=id, folder=folder, seconds=timeout_seconds))

    def _reconnect(self) -> None:
        """Connect anew, to a new supervisor where the old one has ended."""
        with self._lock:
            if self._lost:
                with self._home.lock():
                    self._connect()

    def _connect(self) -> None:
        """Connect to the supervisor; with the home's lock. Submissions that have not ended are asked for again."""
        state = self._state
        assert state is not None
        self._client = None
        try:
            self._client = spawn.connect(self._home, state.token, self.output.printed)
        except (ClusterError, FileNotFoundError):
            if state.running:
                raise
            # It has ended meanwhile; its logs, which such errors show, have nothing to do with it.
            raise ClusterError(
                f"cluster {self.name!r} ended just now; speedlab.Cluster(name={self.name!r}) starts it anew"
            ) from None
        self.output.connected()
        try:
            for results in [results for results in self._unfinished.values() if not results.done]:
                self._ask_again(self._client, results)
        except BaseException:
            self._client.close()  # Those that were not asked for again are, with the next connection.
            raise

    def _ask_again(self, client: Client, results: RankResults) -> None:
        client.hear_of(results.id, results)
        if known := client.ask(m.Watch(id=results.id, shown=results.shown)):
            results.begun(known)
            return
        # The supervisor had not heard of it, or had not begun with it.
        wanted = results.ranks or results.wanted
        try:
            results.begun(client.ask(m.Submit(id=results.id, work=results.work, ranks=wanted, shown=results.shown)))
        except ClusterError as error:  # Its engine has died meanwhile: that concerns who waits for it, and no other.
            results.begun(wanted or range(len(self._state.devices) if self._state is not None else 1))
            results.abandon(str(error))

    def _take(self, state: ClusterState) -> None:
        self._state, self._stamp = state, self._home.stamp()

    def _disconnect(self, reason: str) -> None:
        client, self._client, self._state = self._client, None, None
        self._abandon(reason)
        if client is not None:
            client.close()

    def _abandon(self, reason: str) -> None:
        for results in list(self._unfinished.values()):
            results.abandon(reason)

    def _now(self) -> ClusterState:
        """What runs by now. Raises ClusterError when nothing does."""
        state = self._state
        if state is None:
            raise ClusterError(f"cluster {self.name!r} is not running; cluster.start() starts it")
        stamp = self._home.stamp()
        if stamp != self._stamp:
            found = self._home.read()
            if found is None or found.token != state.token:
                raise ClusterError(
                    f"cluster {self.name!r} was stopped by another handle; "
                    f"speedlab.Cluster(name={self.name!r}) starts or finds the present one"
                )
            self._state, self._stamp, state = found, stamp, found
        self.check_controller()
        return state

    def __repr__(self) -> str:
        if self._state is None or not self.running:
            return f"<Cluster {self.name!r}: not running>"
        devices = self.devices
        names = ", ".join(dict.fromkeys(device.name for device in devices))
        engines = f"{len(devices)} engine{'s' if len(devices) != 1 else ''} on {names}"
        return f"<Cluster {self.name!r}: {engines}{pretended.note(self._now().link)}>"

    def _repr_html_(self) -> str:
        if self._state is None or not self.running:
            return html.escape(repr(self))
        rows = "".join(
            f"<tr><td>{status.rank}</td><td>{html.escape(status.device.name)}</td><td>{status.state}</td>"
            f"<td>{status.rss_bytes / 2**30:.2f} GiB</td><td>{status.pid}</td></tr>"
            for status in self.status()
        )
        head = "<tr><th>rank</th><th>device</th><th>state</th><th>memory</th><th>process</th></tr>"
        caption = f"Cluster {html.escape(self.name)}{pretended.note(self._now().link)}"
        return f"<b>{caption}</b><table>{head}{rows}</table>"
