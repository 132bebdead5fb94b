"""Background work of the panel, in threads: find changes that make a model fit, and measure the speed of a disk."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from speedlab.cluster.errors import ClusterError
from speedlab.cluster.worker.remote import measure_disk
from speedlab.config import RunConfig
from speedlab.hardware import Device
from speedlab.planner.hardware import disk_rates
from speedlab.planner.hardware.disk_rates import DiskRates
from speedlab.planner.setup import Setup
from speedlab_notebook.panel.prediction import PanelPrediction, advice_text, fit_problem
from speedlab_notebook.panel.run_control import TROUBLE, PollingThread

if TYPE_CHECKING:
    from speedlab.cluster import Cluster

_REST_SECONDS = 0.3
"""Wait after a change of a control before the search starts. The search costs more than an update of the panel."""

_MEASURE_SECONDS = 60.0
"""Timeout. The measurement takes a few seconds unless the engine is busy."""


class Asking(Protocol):
    """The part of the panel that Advisor and DiskMeasurer use."""

    cluster: Cluster | None
    config: RunConfig | None
    prediction: PanelPrediction | None
    devices: Sequence[Device]

    @property
    def is_busy(self) -> bool: ...
    def show_summary(self) -> None: ...
    def refresh(self) -> None: ...
    def tell_error(self, error: Exception) -> None: ...


class Advisor:
    """A search, in a thread, for the cheapest changes that make a model fit."""

    def __init__(self, panel: Asking) -> None:
        self._panel = panel
        self._found: tuple[Setup | None, str] = (None, "")
        """The setup that does not fit, and the changes that make it fit."""
        self.watch = PollingThread(self._look)

    def text(self) -> str:
        """Return the changes that make the present setup fit; start the search if they are not known yet."""
        prediction = self._panel.prediction
        assert prediction is not None
        setup, text = self._found
        if setup == prediction.plan.setup:
            return text
        self.watch.start()
        return "looking for changes that fit …"

    def _look(self) -> float | None:
        """Search for the present setup. Return 0 to search again if the controls changed meanwhile, else None."""
        time.sleep(_REST_SECONDS)
        prediction = self._panel.prediction
        if prediction is None or not fit_problem(prediction, self._panel.devices):
            return None
        text = advice_text(prediction.plan)
        now = self._panel.prediction
        if now is None or now.plan.setup != prediction.plan.setup:
            return 0.0
        self._found = prediction.plan.setup, text
        self._panel.show_summary()
        return None


class DiskMeasurer:
    """A measurement, once for each folder, of the disk for offloaded states.

    An engine measures, because the kernel has no torch.
    """

    def __init__(self, panel: Asking) -> None:
        self._panel = panel
        self._tried: set[Path] = set()
        """Folders whose disk was measured, or could not be measured."""
        self.watch = PollingThread(self._look)

    def measure_if_wanted(self) -> None:
        """Start the measurement if states go to a disk that was not measured and the engines are free."""
        if self._folder() is not None:
            self.watch.start()

    def _folder(self) -> Path | None:
        """Return the folder for offloaded states whose disk should be measured now, or None."""
        panel = self._panel
        if panel.config is None or panel.prediction is None or panel.is_busy:
            return None
        offload, machines = panel.config.offload, panel.prediction.plan.machines
        folder = offload.folder or panel.config.folder
        wanted = "disk" in (offload.optimizer, offload.parameters) and not machines.host.disk_measured
        free = panel.cluster is not None and panel.cluster.running and folder not in self._tried
        return folder if wanted and free else None

    def _look(self) -> float | None:
        folder, cluster = self._folder(), self._panel.cluster
        if folder is None or cluster is None:
            return None
        self._tried.add(folder)
        try:
            (rates,) = cluster.submit(measure_disk, str(folder.absolute()), ranks=[0]).result(_MEASURE_SECONDS)
            disk_rates.keep(folder, DiskRates(read_bytes_per_second=rates[0], write_bytes_per_second=rates[1]))
        except TROUBLE as error:
            self._panel.tell_error(error)
            return None
        except (TimeoutError, OSError, ValueError) as error:
            self._panel.tell_error(ClusterError(f"disk of {folder}: {error}"))
            return None
        self._panel.refresh()
        return None
