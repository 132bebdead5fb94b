"""Train: start engines if none run, then start the run.

1. `devices_of` gives the devices for the prediction: of this machine, or of the hosts that a line names.
2. `Starting` starts the engines there; another thread can cancel the start.
3. `PanelTrain` does both in a thread, because each takes seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from speedlab.cluster.errors import ClusterError
from speedlab.cluster.launch.host_specs import engines_asked, of_line, parse
from speedlab.cluster.launch.placement import choose_devices
from speedlab.config import RunConfig
from speedlab.hardware import Device
from speedlab_notebook.panel.run_control import TROUBLE, PanelRun

if TYPE_CHECKING:
    from speedlab.cluster import Cluster, Run


HOSTS_EXAMPLE = "this machine; or gpu-1:8, gpu-2:8; slurm nodes=4, gpus_per_node=8; mpi HOSTFILE"


def devices_of(cluster: Cluster | None, engines: int | None = None, hosts: str = "") -> Sequence[Device]:
    """Return one device for each rank that Train would use.

    Devices of other hosts are unknown before the start; this machine's first device is assumed for each of their ranks.

    Args:
        cluster: The cluster, whose devices are returned if it runs.
        engines: Number of engines on this machine; None takes the default number.
        hosts: The line that names hosts; '' for this machine.

    Raises:
        ClusterError: `hosts` cannot be parsed, or this machine has fewer devices than `engines`.
    """
    if cluster is not None:
        with suppress(ClusterError):  # The cluster was stopped; Train starts it again.
            return cluster.devices
    words = of_line(hosts)
    if not words:
        return choose_devices(engines, "auto")
    spec, here = parse(**words), choose_devices(None, "auto")
    assert spec is not None
    count = engines_asked(spec) or len(here)
    return [here[0]] * count


class Starting:
    """A start of engines in one thread, which another thread can cancel."""

    def __init__(self, said: Callable[[str], object]) -> None:
        """Make a start that is not yet under way.

        Args:
            said: Called with what the start waits for, for example a place in a queue.
        """
        self._said = said
        self._cluster: Cluster | None = None

    @property
    def under_way(self) -> bool:
        """Whether the engines are starting."""
        return self._cluster is not None

    def start(self, cluster: Cluster | None, engines: int, hosts: str) -> Cluster:
        """Start the engines and wait until they run.

        Args:
            cluster: The cluster to start; None makes a new one.
            engines: Number of engines of a new cluster on this machine.
            hosts: The line that names hosts of a new cluster; '' for this machine.

        Returns:
            The running cluster.

        Raises:
            ClusterError: The engines cannot start, or the start was cancelled.
        """
        from speedlab.cluster import Cluster

        if cluster is None:
            words = of_line(hosts)
            cluster = Cluster(None if words else engines, start=False, progress=self._said, **words)
        self._cluster = cluster
        try:
            cluster.start()
        finally:
            self._cluster = None
        return cluster

    def give_up(self) -> None:
        """Cancel the start; do nothing if none is under way."""
        if (cluster := self._cluster) is not None:
            cluster.give_up_start()


def engines_note(cluster: Cluster | None, hosts: str) -> str:
    """Return the note below the boxes for engines and hosts.

    Args:
        cluster: The cluster; None if Train starts one.
        hosts: The line that names hosts; '' for this machine.
    """
    if cluster is not None:
        return f"cluster {cluster.name!r} has them; %speedlab stop ends it, then others can start"
    if not hosts.strip():
        return "Engines that Train starts: one rank, one device"
    try:
        spec = parse(**of_line(hosts))
    except ClusterError as error:
        return str(error)
    assert spec is not None
    many = "as many as each host has devices" if engines_asked(spec) is None else f"{engines_asked(spec)} in all"
    return f"Engines that Train starts there: {many}; predicted as on this machine's devices until they have started"


class Trained(Protocol):
    """The part of the panel that PanelTrain uses."""

    cluster: Cluster | None
    config: RunConfig | None
    devices: Sequence[Device]

    @property
    def hosts(self) -> Any: ...
    def take_devices(self, devices: Sequence[Device]) -> None: ...
    def refresh(self) -> None: ...
    def tell(self, text: str) -> None: ...
    def tell_error(self, error: Exception) -> None: ...


class PanelTrain:
    """Train in a thread, one start at a time. `activity` describes the present action; '' means none."""

    def __init__(self, panel: Trained, run: PanelRun, on_run: Callable[[Run], object] | None) -> None:
        """Make an idle trainer for a panel.

        Args:
            panel: The panel that gives the configuration and shows progress.
            run: Takes each run that was started.
            on_run: Called with each run that was started.
        """
        self.activity = ""
        self._panel = panel
        self._run = run
        self._on_run = on_run
        self._starting = Starting(self._waits_for)

    @property
    def is_starting(self) -> bool:
        """Whether engines are starting; Stop cancels the start then."""
        return self._starting.under_way

    def begin(self) -> None:
        """Train the panel's configuration in a thread; do nothing if a start is under way."""
        panel = self._panel
        if panel.config is None or self.activity:
            return
        panel.tell("")
        count, hosts = len(panel.devices), panel.hosts.value.strip()
        where = f"on {hosts}" if hosts else f"{count} engine{'s' if count > 1 else ''}"
        self.activity = f"starting {where} …"
        if panel.cluster is not None and panel.cluster.running:
            self.activity = "checking configuration and data …"
        panel.refresh()
        # The controls may change while engines start: train what they showed at the click.
        arguments = (panel.config, count)
        threading.Thread(target=self._work, args=arguments, name="speedlab-panel-train", daemon=True).start()

    def stop(self) -> None:
        """Cancel the start of engines, or stop the run."""
        if self._starting.under_way:
            self._starting.give_up()
        else:
            self._run.post(lambda run: run.stop())

    def _work(self, config: RunConfig, count: int) -> None:
        panel = self._panel
        try:
            cluster = self._started_cluster(count)
            self.activity = "checking configuration and data …"
            panel.refresh()
            run = cluster.train(config)
            self._run.take(run, config)
            if self._on_run is not None:
                self._on_run(run)
        except Exception as error:  # Nothing else reports errors of this thread.
            panel.tell_error(error)
        finally:
            self.activity = ""
            try:
                panel.refresh()
            except TROUBLE as error:  # The run folder may have been damaged meanwhile.
                panel.tell_error(error)

    def _started_cluster(self, count: int) -> Cluster:
        panel = self._panel
        if panel.cluster is None or not panel.cluster.running:
            panel.cluster = self._starting.start(panel.cluster, count, panel.hosts.value)
        panel.take_devices(panel.cluster.devices)
        return panel.cluster

    def _waits_for(self, words: str) -> None:
        """Show what the start waits for."""
        self.activity = f"{words}; Stop gives the start up"
        self._panel.refresh()
