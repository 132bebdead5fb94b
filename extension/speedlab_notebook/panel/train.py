"""What Train does: engines where there are none, then the run. In a thread, because both take their time.

Where a panel's engines are to run, on this machine or on the hosts that a line names, and starting them there.
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
    """The cluster's devices; where it does not run, those that a new one would get: `engines` of this machine, None:
    as many as usual. Of other hosts nobody knows them before the start: as many as `hosts` asks for, of this machine's
    kind.

    Raises ClusterError for hosts that cannot be read, and for more engines than this machine has devices."""
    if cluster is not None:
        with suppress(ClusterError):  # Stopped since: Train starts it again.
            return cluster.devices
    words = of_line(hosts)
    if not words:
        return choose_devices(engines, "auto")
    spec, here = parse(**words), choose_devices(None, "auto")
    assert spec is not None
    count = engines_asked(spec) or len(here)
    return [here[0]] * count


class Starting:
    """A start of engines, in the thread that trains, which another one may give up."""

    def __init__(self, said: Callable[[str], object]) -> None:
        """`said` hears what the start waits for, as a place in a queue."""
        self._said = said
        self._cluster: Cluster | None = None

    @property
    def under_way(self) -> bool:
        return self._cluster is not None

    def start(self, cluster: Cluster | None, engines: int, hosts: str) -> Cluster:
        """`cluster`, or a new one on `engines` devices of this machine or on `hosts`, running. Raises ClusterError."""
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
        if (cluster := self._cluster) is not None:
            cluster.give_up_start()


def engines_note(cluster: Cluster | None, hosts: str) -> str:
    """What is said below the boxes for engines and hosts."""
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
    """The panel whose configuration is trained."""

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
    """One start at a time. `activity` tells what it does now; '' when nothing."""

    def __init__(self, panel: Trained, run: PanelRun, on_run: Callable[[Run], object] | None) -> None:
        """`on_run` is called with each run that was started."""
        self.activity = ""
        self._panel = panel
        self._run = run
        self._on_run = on_run
        self._starting = Starting(self._waits_for)

    @property
    def is_starting(self) -> bool:
        """Whether engines start, which Stop gives up."""
        return self._starting.under_way

    def begin(self) -> None:
        """Train what the panel says, unless that has begun."""
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
        arguments = (panel.config, count)
        threading.Thread(target=self._work, args=arguments, name="speedlab-panel-train", daemon=True).start()

    def stop(self) -> None:
        """End the run, or give a start up."""
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
        except Exception as error:  # Whatever it is: nobody but the panel can tell it.
            panel.tell_error(error)
        finally:
            self.activity = ""
            try:
                panel.refresh()
            except TROUBLE as error:  # The run's folder may have been damaged since.
                panel.tell_error(error)

    def _started_cluster(self, count: int) -> Cluster:
        panel = self._panel
        if panel.cluster is None or not panel.cluster.running:
            panel.cluster = self._starting.start(panel.cluster, count, panel.hosts.value)
        panel.take_devices(panel.cluster.devices)
        return panel.cluster

    def _waits_for(self, words: str) -> None:
        """The start tells what it waits for, as a place in a queue."""
        self.activity = f"{words}; Stop gives the start up"
        self._panel.refresh()
