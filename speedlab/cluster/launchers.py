"""ipyparallel launchers that bind each engine to a device: `ipyparallel.Cluster(engines="speedlab")`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from ipyparallel.cluster.launcher import LocalEngineLauncher, LocalEngineSetLauncher
from traitlets import Any as AnyTrait
from traitlets import Dict, List, Unicode, default

from speedlab.cluster.devices import choose_devices
from speedlab.cluster.engine_environment import ENGINE_ARGUMENTS, ENGINE_COMMAND, device_fields, rank_environment

Fork = Callable[[dict[str, str], list[str], str], int]
"""fork(environment, arguments, log): an engine's process id (`nursery.py`)."""


class DeviceEngineLauncher(LocalEngineLauncher):
    """One engine on its device. The identifier is the rank."""

    devices = List(Dict(), help="Fields of hardware.Device, by rank").tag(to_dict=True)
    rendezvous = Unicode(help="Folder of the process group's file stores").tag(to_dict=True)
    fork = AnyTrait(None, help="A Fork that makes its process; None: it is started by itself")

    @default("fork")
    def _default_fork(self) -> Fork | None:
        return getattr(self.parent, "fork", None)

    @default("devices")
    def _default_devices(self) -> list[dict[str, Any]]:
        return getattr(self.parent, "devices", [])

    @default("rendezvous")
    def _default_rendezvous(self) -> str:
        return getattr(self.parent, "rendezvous", "")

    @default("engine_cmd")
    def _default_engine_cmd(self) -> list[str]:
        return list(ENGINE_COMMAND)

    @default("engine_args")
    def _default_engine_args(self) -> list[str]:
        return list(ENGINE_ARGUMENTS)

    def get_env(self) -> dict[str, str]:
        return {**super().get_env(), **rank_environment(int(self.identifier), self.devices, self.rendezvous)}

    def start(self) -> None:
        if self.fork is None:
            super().start()
            return
        self.pid = self.fork(self.get_env(), [*self.cluster_args, *self.engine_args], self.output_file)
        with contextlib.suppress(psutil.NoSuchProcess):  # Who waits for it says how it ended.
            self.process = psutil.Process(self.pid)
        self.notify_start(self.pid)


class DeviceEngineSetLauncher(LocalEngineSetLauncher):
    """One engine per device of this machine; `devices` are chosen when none are given."""

    launcher_class = DeviceEngineLauncher
    devices = List(Dict(), help="Fields of hardware.Device, by rank").tag(to_dict=True)
    rendezvous = Unicode(help="Folder of the process group's file stores").tag(to_dict=True)
    fork = AnyTrait(None, help="As of DeviceEngineLauncher")

    @default("delay")
    def _default_delay(self) -> float:
        return 0.0

    @default("rendezvous")
    def _default_rendezvous(self) -> str:
        return str(Path(self.profile_dir) / f"rendezvous-{self.cluster_id}")

    @default("engine_cmd")
    def _default_engine_cmd(self) -> list[str]:
        return list(ENGINE_COMMAND)

    @default("engine_args")
    def _default_engine_args(self) -> list[str]:
        return list(ENGINE_ARGUMENTS)

    def start(self, n: int) -> list[int]:
        if not self.devices:
            self.devices = device_fields(choose_devices(n, "auto"))
        os.makedirs(self.rendezvous, mode=0o700, exist_ok=True)
        return super().start(n)
