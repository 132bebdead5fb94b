"""ipyparallel launchers that bind each engine to a device: `ipyparallel.Cluster(engines="speedlab")`.

What an engine must have before torch is imported (the devices it sees, threads, rendezvous) is put into its environment
here; its CPU affinity is set by the engine process itself, from that environment.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ipyparallel.cluster.launcher import LocalEngineLauncher, LocalEngineSetLauncher
from traitlets import Dict, List, Unicode, default

from speedlab.cluster.away import RUNS, RUNS_FOLDER
from speedlab.cluster.devices import choose_devices
from speedlab.cluster.hosts import Host, places
from speedlab.cluster.processes import ENGINE_MODULE
from speedlab.hardware import Device
from speedlab.network import Endpoint

ENGINE_COMMAND = [sys.executable, "-m", ENGINE_MODULE]
ENGINE_ARGUMENTS = [
    "--log-level=WARN",
    "--HistoryManager.enabled=False",
    # Each value in the cache of outputs would keep its tensors alive.
    "--InteractiveShell.cache_size=0",
    "--InteractiveShell.colors=nocolor",
]

UNSUPERVISED_FILE = "unsupervised"
"""In the rendezvous folder of a host of several: there while its agent does not hear of the supervisor."""


def rank_environment(rank: int, devices: list[dict[str, Any]], rendezvous: str) -> dict[str, str]:
    """What the engine of `rank` finds in its environment; `devices` are the fields of hardware.Device, by rank."""
    device = devices[rank]
    threads = str(device["threads"])
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(devices)),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(len(devices)),
        "SPEEDLAB_RENDEZVOUS": rendezvous,
        "SPEEDLAB_DEVICE": json.dumps(device),
        "CUDA_VISIBLE_DEVICES": device["uuid"],
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "NUMBA_NUM_THREADS": threads,
        # Ranks that share cores must sleep while they wait: two pools that spin halve each other's bandwidth.
        "OMP_WAIT_POLICY": "passive",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def host_environment(rank: int, hosts: Sequence[Host], rendezvous: str, store: Endpoint) -> dict[str, str]:
    """As `rank_environment`, for a cluster of several hosts. `rendezvous`: the folder, on the rank's host, with
    `generation`; `store`: where rank 0 serves what all ranks meet in (`speedlab.comm.over_hosts`)."""
    place = places(hosts)[rank]
    host = hosts[place.host]
    devices = device_fields(device for each in hosts for device in each.devices)
    return {
        **rank_environment(rank, devices, rendezvous),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(len(host.devices)),
        "SPEEDLAB_HOST": host.name,
        "SPEEDLAB_STORE": str(store),
        RUNS: str(Path(rendezvous).with_name(RUNS_FOLDER)),
        "SPEEDLAB_SUPERVISOR_LOCK": str(Path(rendezvous) / UNSUPERVISED_FILE),
        "GLOO_SOCKET_IFNAME": host.interface,
        "NCCL_SOCKET_IFNAME": host.interface,
    }


class DeviceEngineLauncher(LocalEngineLauncher):
    """One engine on its device. The identifier is the rank."""

    devices = List(Dict(), help="Fields of hardware.Device, by rank").tag(to_dict=True)
    rendezvous = Unicode(help="Folder of the process group's file stores").tag(to_dict=True)

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


class DeviceEngineSetLauncher(LocalEngineSetLauncher):
    """One engine per device of this machine; `devices` are chosen when none are given."""

    launcher_class = DeviceEngineLauncher
    devices = List(Dict(), help="Fields of hardware.Device, by rank").tag(to_dict=True)
    rendezvous = Unicode(help="Folder of the process group's file stores").tag(to_dict=True)

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


def device_fields(devices: Iterable[Device]) -> list[dict[str, Any]]:
    """Devices as plain data for JSON."""
    return [{**asdict(device), "cores": list(device.cores)} for device in devices]
