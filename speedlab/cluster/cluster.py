"""Cluster: engines on devices, and what one does with them.

It is a handle: several, in several kernels, may speak to one cluster. Everything that must outlive them is its
supervisor's (`supervisor/`), which a handle asks (`handle.py`); what runs is written in the cluster's folder
(`home.py`), so that a new kernel finds it.

What a handle asks of its cluster: of one that it starts, and of one that it finds.
"""

from __future__ import annotations

import contextlib
import html
import math
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import speedlab.cluster.files.processes as processes
import speedlab.cluster.launch.host_specs as host_specs
import speedlab.cluster.shutdown as ending
import speedlab.cluster.simulated_link as pretended
from speedlab.cluster.connection import ClusterRuns, SupervisorConnection
from speedlab.cluster.errors import ClusterError
from speedlab.cluster.files.cluster_dir import ClusterState, running_clusters
from speedlab.cluster.launch.placement import choose_devices
from speedlab.cluster.results import RankResults
from speedlab.cluster.supervisor import protocol as m
from speedlab.cluster.supervisor import spawn
from speedlab.cluster.supervisor.client import Client, SupervisorGoneError
from speedlab.cluster.worker.remote import run_cell_at
from speedlab.cluster.worker.serialization import pack
from speedlab.config import ConfigError, ConfigLike, as_config
from speedlab.config.errors import briefly, more_in
from speedlab.hardware import Device
from speedlab.network import LinkRate

if TYPE_CHECKING:
    from speedlab.cluster.run import Run


BACKENDS = ("shared", "gloo")


@dataclass(frozen=True, kw_only=True)
class ClusterRequest:
    """As `Cluster` has it; None, and the device 'auto', where whatever runs will do."""

    engines: int | None
    device: str
    backend: str | None
    link: LinkRate | None
    spec: host_specs.Spec | None
    timeout_seconds: float | None = None

    @classmethod
    def parse(
        cls,
        engines: int | None,
        device: str,
        backend: str | None,
        link: str | None,
        spec: host_specs.Spec | None,
        timeout_seconds: float | None = None,
    ) -> ClusterRequest:
        """Raises ClusterError for what no cluster can be."""
        if timeout_seconds is not None and not 0 < timeout_seconds < math.inf:
            raise ClusterError(f"timeout_seconds is {timeout_seconds!r}; it is a number of seconds above 0")
        if backend not in (None, *BACKENDS):
            raise ClusterError(f"backend is {backend!r}; it is {' or '.join(map(repr, BACKENDS))}")
        parsed = pretended.parse(link, on_hosts=spec is not None)
        if spec is not None and engines is not None:
            raise ClusterError(
                f"engines is {engines}, and hosts say how many each has; leave it out, or write them as 'gpu-1:8'"
            )
        return cls(
            engines=engines, device=device, backend=backend, link=parsed, spec=spec, timeout_seconds=timeout_seconds
        )

    def require(self, state: ClusterState) -> None:
        """Raise ClusterError unless the cluster that runs is such a one."""
        name, size, kind = state.name, len(state.devices), state.devices[0].kind
        attach = f"speedlab.Cluster.attach({name!r})"
        what_to_do = f"use it as it is with {attach}, stop it first, or give the new one another name; "
        what_to_do += more_in("engines")
        if not host_specs.may_be(self.spec, state.hosts):
            raise ClusterError(
                f"cluster {name!r} runs on {', '.join(state.hosts) or 'this machine'}, and other hosts were asked "
                f"for; {what_to_do}"
            )
        if self.engines is not None and self.engines != size:
            raise ClusterError(
                f"cluster {name!r} runs with {size} engines, and {self.engines} were asked for; {what_to_do}"
            )
        if self.device not in ("auto", kind):
            raise ClusterError(f"cluster {name!r} runs on {kind}, and {self.device} was asked for; {what_to_do}")
        if self.backend not in (None, state.backend):
            raise ClusterError(
                f"the engines of cluster {name!r} reach each other through {state.backend!r}, and "
                f"{self.backend!r} was asked for; {what_to_do}"
            )
        if self.timeout_seconds is not None and self.timeout_seconds != state.timeout_seconds:
            limit = f"{state.timeout_seconds:g} s" if state.timeout_seconds else "the usual time"
            raise ClusterError(
                f"the engines of cluster {name!r} wait {limit} for each other, and {self.timeout_seconds:g} s were "
                f"asked for; {what_to_do}"
            )
        if self.link is not None and str(self.link) != state.link:
            raise ClusterError(
                f"the engines of cluster {name!r} {pretended.words(state.link) or 'pretend no link'}, and "
                f"{self.link} was asked for; {what_to_do}"
            )


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
    host: str = ""
    """Of a cluster of several hosts: on which one it runs; there `pid` counts."""

    @property
    def place(self) -> str:
        """'cpu 0', or 'cpu 0 on gpu-1' where there are several hosts."""
        return f"{self.device.name} on {self.host}" if self.host else self.device.name


class Cluster(SupervisorConnection):
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

    `timeout_seconds`: how long a collective waits for a rank that does not come; 1,800 by default. Then the ranks raise
    PeerLost, which names the call in which each of them is. A configuration may have another limit (`timeout_seconds`).
    """

    def __init__(
        self,
        engines: int | None = None,
        *,
        name: str = "default",
        device: str = "auto",
        backend: str | None = None,
        link: str | None = None,
        timeout_seconds: float | None = None,
        start: bool = True,
        hosts: Sequence[str] | host_specs.SshHosts | None = None,
        slurm: Mapping[str, Any] | None = None,
        mpi: Mapping[str, Any] | None = None,
        interface: str = "",
        progress: Callable[[str], object] = print,
    ) -> None:
        self._wanted = ClusterRequest.parse(
            engines, device, backend, link, host_specs.parse(hosts, slurm, mpi), timeout_seconds
        )
        super().__init__(name)
        self._interface, self._given_up = interface, threading.Event()
        self._waiting = spawn.StartWaiter(progress=progress, given_up=self._given_up.is_set)
        self.runs = ClusterRuns(self)
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
                self._wanted.require(state)
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
            self._wanted.require(state)
        except ClusterError as error:
            self._disconnect(str(error))
            raise
        self._take(state)
        return True

    def _start(self) -> None:
        wanted, token = self._wanted, secrets.token_hex(16)
        devices = choose_devices(wanted.engines, wanted.device) if wanted.spec is None else []
        backend, timeout_seconds = wanted.backend or BACKENDS[0], wanted.timeout_seconds or 0.0
        self._home.create(token)
        try:
            if wanted.spec is None:
                link = pretended.between(devices, wanted.link)
                self._client = spawn.start(
                    self._home, token, devices, backend, link, timeout_seconds, self.output.printed, self._waiting
                )
            else:
                self._client = spawn.start_on_hosts(
                    self._home,
                    token,
                    wanted.spec,
                    device=wanted.device,
                    backend=backend,
                    timeout_seconds=timeout_seconds,
                    interface=self._interface,
                    printed=self.output.printed,
                    waiting=self._waiting,
                )
            state = self._home.read()
            assert state is not None
            self._take(state)
        except BaseException:
            if wanted.spec is not None:
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
        state = self._now()
        hosts = {engine.rank: engine.host for engine in state.engines}
        return [
            EngineStatus(
                rank=found.rank,
                engine_id=found.engine_id,
                pid=found.pid,
                device=state.devices[found.rank],
                state=found.state,
                rss_bytes=found.rss_bytes,
                host=hosts.get(found.rank, ""),
            )
            for found in self._ask(m.GetRankStatus())
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

    def execute(
        self, code: str, *, ranks: Iterable[int] | None = None, shown: bool = False, door: str = ""
    ) -> RankResults:
        """Run a cell's code in each engine's namespace. The last expression is printed, and its text returned. `shown`:
        whether `RankResults.sayings` is to tell what ranks print and display in it; `door`: name of the DebugServer
        that is served, where `breakpoint()` in it is to stop."""
        work = pack((run_cell_at, (door, code), {}), {"the cell": code})
        return self._submit(work, ranks, shown=shown)

    def train(
        self,
        config: ConfigLike,
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
                - `forward(input_ids=..., labels=...)` gives an output with `.loss`, as Hugging Face's models do; they
                  get the targets as labels, at the right places;
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
        from speedlab.cluster.start_run import start_run

        if loss is not None and not callable(loss):
            raise ConfigError(
                f"loss: {briefly(loss)} cannot be called; give a function f(model, batch) that calls the model "
                "and gives the mean loss, or none where the model's forward gives it"
            )
        given = {"model": model, "loss": loss, "tp_plan": tp_plan}
        return start_run(self, as_config(config), **{key: value for key, value in given.items() if value is not None})

    # Control

    def interrupt(self, timeout_seconds: float = 2.0) -> list[int]:
        """Interrupt what the ranks are doing; returns the ranks that are idle then.

        1. Take tasks that have not begun out of the queues.
        2. Send SIGINT, look, and send it again to a rank that still works on what it worked on before.
        3. Cut the connections to the other ranks of one that does not come back, and break the store in which ranks
           meet: it waits for a peer.
        4. Let the ranks leave their process group: a collective that was cut off makes it unusable.

        A rank that is missing in the answer is inside a long native call or frozen; `restart(rank)` ends it. Or its
        host does not answer, which the output names: it is interrupted once that does, if it still works on the same.
        """
        return self._interrupt(timeout_seconds)

    def debug(self, rank: int) -> None:
        """Open a post-mortem of what `rank` raised last, with pdb's commands; `q` ends it. A rank keeps it, and the
        tensors in its frames, until it begins with something else. Raises ClusterError for a rank that is not there, is
        dead, works, or keeps nothing."""
        from speedlab.cluster.debug.post_mortem import debug

        debug(self, rank)

    def restart(self, rank: int, *more: int) -> None:
        """End the engines of these ranks, where they are still there, and start new ones on the same devices.

        What they held is lost. The others are interrupted, keep what they hold, and form a new process group with them.
        Where the host of one was lost and is back, all engines of that host are started.
        """
        self._ask(m.Restart(rank=rank, more=list(more)))

    def resize(self, engines: int, *, progress: Callable[[str], object] = print) -> None:
        """Change the number of engines: those that stay keep their processes and what cells have put there, new ones
        get the next devices, those too many are ended. Returns when all are ready.

        CPU cores are shared out anew. Hosts come and go whole, those that are lost first; one that was left out comes
        back when there are to be more engines. Ranks lose their process group, and engines that cells have built lose
        their peers. A paused run goes on from its newest checkpoint, with its configuration as it is;
        `run.reshape(engines=…)` saves first and fits the configuration. Raises ClusterError, with the cluster as it
        was, while a run or a cell is under way, or when there are too few devices.
        """
        self._ask(m.ResizeCluster(engines=engines), progress=progress)
        self._wanted = replace(self._wanted, engines=engines)

    def check_size(self, engines: int) -> None:
        """Raise ClusterError where `resize` could not give so many engines."""
        self._ask(m.ResizeCluster(engines=engines, only_look=True))

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
