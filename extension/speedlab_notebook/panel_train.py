"""What Train does: engines where there are none, then the run. In a thread, because both take their time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from speedlab.config import RunConfig
from speedlab.hardware import Device
from speedlab_notebook.panel_run import TROUBLE, PanelRun
from speedlab_notebook.panel_start import Starting

if TYPE_CHECKING:
    from speedlab.cluster import Cluster, Run


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
