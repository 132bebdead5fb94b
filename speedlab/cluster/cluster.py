"""Cluster: start engines on devices, submit work to them, and stop them.

A `Cluster` is a handle: several handles, in several kernels, can use one cluster. Everything that must outlive a handle
is part of the supervisor (`supervisor/`), which a handle asks (`connection.py`). The folder of the cluster records what
runs (`files/cluster_dir.py`), so that a new kernel finds it.

`ClusterRequest` holds what the user asked for, and compares it with a cluster that runs.
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
    """The arguments of `Cluster`. None, and the device 'auto', accept whatever runs."""

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
        """Check the arguments of `Cluster`.

        Args:
            engines: Number of engines.
            device: 'cuda', 'cpu' or 'auto'.
            backend: 'shared' or 'gloo'.
            link: Simulated link, such as "1 Gbit/s 1 ms".
            spec: Hosts of the cluster.
            timeout_seconds: Timeout of collectives.

        Raises:
            ClusterError: If no cluster can have these arguments.
        """
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
        """Raise ClusterError unless a running cluster fits this request.

        Args:
            state: State of the running cluster.
        """
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
    """The current status of one rank's engine."""

    rank: int
    engine_id: int
    pid: int
    device: Device
    state: str
    """'idle', 'busy', 'frozen' (the process is suspended) or 'dead' (it ended, or stopped answering)."""
    rss_bytes: int
    host: str = ""
    """Name of the host in a cluster of several hosts; `pid` is a process id of that host."""

    @property
    def place(self) -> str:
        """'cpu 0', or 'cpu 0 on gpu-1' in a cluster of several hosts."""
        return f"{self.device.name} on {self.host}" if self.host else self.device.name


class Cluster(SupervisorConnection):
    """One engine per GPU, or 4 engines on CPU cores without GPUs. If a cluster of this name runs, a handle to it.

    On several hosts, in one of three ways:

    - `hosts=["gpu-1:8", "gpu-2:8"]`: over SSH, with the rights of the user;
    - `slurm={"nodes": 4, "gpus_per_node": 8, "partition": "a100", "time": "8:00:00"}`;
    - `mpi={"hostfile": "hosts"}`.

    The hosts need the same Python. They should share the folders of runs (a home folder on the network); otherwise
    records are sent over the network, and checkpoints are not possible. `speedlab guide hosts` has the details.

    Args:
        engines: Number of engines.
        name: Name of the cluster.
        device: 'cuda', 'cpu' or 'auto'.
        backend: How CPU engines communicate: 'shared' (shared memory, the default) or 'gloo' (sockets).
        link: Simulated link, such as "1 Gbit/s 1 ms", for lessons on slow networks. Each CPU engine acts as a host of
            its own, and transfers take as long as over such a link. Not with GPUs or several hosts.
        timeout_seconds: How long a collective waits for a missing rank; 1,800 by default. Then the ranks raise
            PeerLost, which names the call that each rank is in. A run's configuration can set its own
            `timeout_seconds`.
        start: False to start nothing until `start()`.
        hosts: Hosts to reach over SSH.
        slurm: Resources to request from Slurm.
        mpi: Arguments for mpirun.
        interface: Network interface of the hosts for traffic between ranks; "" for the one that leads here.
        progress: Called with what a start waits for, such as a position in a queue.

    Raises:
        ClusterError: If there are too few devices, or the running cluster has another number or kind of engines.
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
        """The runs of this cluster, as its supervisor sees them."""
        if start:
            self.start()

    @classmethod
    def attach(cls, name: str | None = None) -> Cluster:
        """Return a handle to a running cluster.

        Args:
            name: Name of the cluster; None for 'default' if it runs, else the newest.

        Raises:
            ClusterError: If no such cluster runs.
        """
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
        """Start the engines, or connect to running ones of this name. Returns after all are ready and have imported
        torch.

        Raises:
            ClusterError: If the engines do not start, or the running cluster does not fit the arguments.
        """
        self._given_up.clear()
        with self._lock, self._home.lock():
            state = self._home.read()
            # Another handle or kernel has started the cluster: use it if it fits.
            if state is not None and state.running:
                self._wanted.require(state)
                if self._state is None or self._state.token != state.token or self._lost:
                    self._take(state)
                    self._connect()
                return
            self._disconnect("the controller of the cluster had died")
            if state is None and self._joins_a_start():
                return
            # The controller died, or the supervisor died before the engines were ready.
            ending.end_processes(self._home, 0.0)
            self._start()

    def give_up_start(self) -> None:
        """Cancel a `start` in another thread, which then raises ClusterError. Everything it began is undone, also a
        queued job.
        """
        self._given_up.set()

    def _joins_a_start(self) -> bool:
        """Wait for a start that another process began, such as a kernel before its restart; return False if there is
        none.
        """
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
        # Store the token before any process starts, so that a crash leaves only processes that can be found.
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
            # A failed start leaves nothing: processes are found by their token.
            processes.end(processes.marked(token), patience_seconds=0.0)
            self._home.remove()
            raise

    def _give_hosts_back(self) -> None:
        """Return the hosts of a cancelled start. If it was too late to cancel, the supervisor has to stop them."""
        with contextlib.suppress(ClusterError, SupervisorGoneError, TimeoutError):
            client = Client(self._home.supervisor_socket, self.output.printed)
            client.ask(m.Stop(), seconds=ending.STOP_HOSTS_SECONDS)
            client.close()

    # Properties

    @property
    def directory(self) -> Path:
        """Folder of the cluster, mode 0700; removed when the cluster stops."""
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
        """The simulated link between engines; None without one."""
        text = self._now().link
        return LinkRate.parse(text) if text else None

    @property
    def token(self) -> str:
        """Unique id; distinguishes clusters of the same name."""
        return self._now().token

    def status(self) -> list[EngineStatus]:
        """Return the current status of each rank's engine."""
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
        """Run `function(*args, **kwargs)` on each rank; return at once.

        Functions from a notebook, or from a module in the user's folder, are sent by value, with the globals that they
        use. A global that the notebook does not define is looked up in the engine's namespace, which `%%ranks` cells
        fill. A name that the function binds with `global` is set in that namespace, too.

        Args:
            function: Function to call.
            *args: Arguments of the function.
            ranks: Ranks that call it; None for all.
            **kwargs: Keyword arguments of the function.

        Returns:
            The results by rank, while they arrive.

        Raises:
            ClusterError: If a rank does not exist, its engine is dead, or something cannot be pickled, such as an open
                file.
        """
        named = {getattr(function, "__name__", "the function"): function, "its arguments": args} | kwargs
        return self._submit(pack((function, args, kwargs), named), ranks)

    def execute(
        self, code: str, *, ranks: Iterable[int] | None = None, shown: bool = False, door: str = ""
    ) -> RankResults:
        """Run the code of a cell in each engine's namespace. The last expression is printed, and its text is the
        result.

        Args:
            code: Source code of the cell.
            ranks: Ranks that run it; None for all.
            shown: Whether `RankResults.sayings` yields what ranks print and display.
            door: Name of the DebugServer at which `breakpoint()` in the cell stops; "" for none.

        Returns:
            The results by rank, while they arrive.

        Raises:
            ClusterError: If a rank does not exist or its engine is dead.
        """
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
        """Check the configuration, start the run on all ranks, and return its handle. A start that fails leaves no
        folder.

        A model of one's own is tried first: one micro-batch passes through it, without values or memory. What depends
        on values cannot be tried; a warning then says so. The model is stored in the run folder, signed for this user,
        so that any kernel can resume the run.

        Args:
            config: RunConfig, a dict of its fields, or the path of a JSON or YAML file; DeepSpeed's keys are accepted,
                too.
            model: A model of one's own; None for the GPT of the configuration. Either a torch.nn.Module, whose values
                all ranks begin with, or a class or function without arguments that makes one on each rank from the
                configuration's seed. A notebook can define it. A model that is too large for one rank is made under
                `torch.device("meta")` and gets its values part by part. Its forward is one of these:

                - `forward(tokens, targets)`, both (B, T) int64, returns the loss, or an output with `.loss`. With
                  data.documents 'separate' it also takes `positions`: the position of each token in its document.
                - `forward(input_ids=..., labels=...)` returns an output with `.loss`, as Hugging Face models do. The
                  targets are passed as labels, at the right positions.
                - any other, together with `loss`.
            loss: `loss(model, batch)` calls the model and returns the mean loss of a micro-batch, a scalar. `batch` is
                (tokens, targets), and with data.documents 'separate' (tokens, targets, positions). Not with a pipeline,
                because no rank holds the whole model.
            tp_plan: How layers are partitioned over tensor-parallel ranks: pattern of module names → style. None for
                the plan of the model.

        Raises:
            ConfigError: If the configuration or the model is not valid.
            LayoutError: If the layout does not fit the engines.
            RunFolderError: If the run folder cannot be made or used.
            ClusterError: If the engines cannot start the run.
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
        """Interrupt the work of all ranks.

        1. Remove tasks that have not begun from the queues.
        2. Send SIGINT, look, and send it again to each rank that still works on the same task.
        3. A rank that does not stop waits for a peer: abort its connections to the other ranks, and break the
           rendezvous store.
        4. Let the ranks leave their process group: an aborted collective makes it unusable.

        Args:
            timeout_seconds: Longest time to wait until the ranks stop.

        Returns:
            The ranks that are idle afterwards. A missing rank is inside a long native call or suspended;
            `restart(rank)` ends it. Or its host does not answer, and the output names the host: the rank is interrupted
            after the host answers again, if it still works on the same task.
        """
        return self._interrupt(timeout_seconds)

    def debug(self, rank: int) -> None:
        """Open a post-mortem of the last exception of `rank`, with pdb's commands; `q` ends it.

        A rank keeps the exception, and the tensors in its frames, until it begins with something else.

        Args:
            rank: The rank.

        Raises:
            ClusterError: If the rank does not exist, is dead, is busy, or keeps no exception.
        """
        from speedlab.cluster.debug.post_mortem import debug

        debug(self, rank)

    def restart(self, rank: int, *more: int) -> None:
        """End the engines of these ranks, if they still run, and start new ones on the same devices.

        Their state is lost. The other ranks are interrupted, keep their state, and form a new process group with the
        new engines. If the host of a rank was lost and is back, all engines of that host are started.

        Args:
            rank: Rank to restart.
            *more: Further ranks to restart.

        Raises:
            ClusterError: If a rank does not exist or a new engine does not start.
        """
        self._ask(m.Restart(rank=rank, more=list(more)))

    def resize(self, engines: int, *, progress: Callable[[str], object] = print) -> None:
        """Change the number of engines; return after all are ready.

        1. Engines that stay keep their processes and what cells have defined there. New engines get the next devices.
           Engines that are too many are ended.
        2. CPU cores are divided again. Hosts are added and removed as a whole, lost hosts first; a host that was left
           out is used again when there are more engines.
        3. Ranks lose their process group, and training engines that cells have built lose their peers.
        4. A paused run continues from its newest checkpoint, with its configuration as it is. `run.reshape(engines=…)`
           saves first and adapts the configuration.

        Args:
            engines: New number of engines.
            progress: Called with a sentence for the user.

        Raises:
            ClusterError: If a run or a cell is active, or devices are missing. The cluster stays as it was.
        """
        self._ask(m.ResizeCluster(engines=engines), progress=progress)
        self._wanted = replace(self._wanted, engines=engines)

    def check_size(self, engines: int) -> None:
        """Raise ClusterError if `resize` could not change to so many engines.

        Args:
            engines: Number of engines.
        """
        self._ask(m.ResizeCluster(engines=engines, only_look=True))

    def stop(self) -> None:
        """Interrupt the ranks, and end all engines, their child processes and the controller. Does nothing if no
        cluster runs.
        """
        with self._lock, self._home.lock():
            state = self._home.read()
            if state is not None and self._client is not None and state.running:
                with contextlib.suppress(SupervisorGoneError, ClusterError, TimeoutError):
                    if state.hosts and self._lost:
                        self._connect()  # Only a supervisor can return the hosts.
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
