"""What the process of an engine must have before torch is imported: the devices it sees, threads, rendezvous. It is put
into its environment here; its CPU affinity is set by the process itself, from that environment.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from speedlab.cluster.files.agent_run_dir import RUNS, RUNS_FOLDER
from speedlab.cluster.files.processes import ENGINE_MODULE
from speedlab.cluster.launch.placement import Host, rank_hosts, thread_limits
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

HEARTBEAT_SECONDS = 0.2
"""Between two heartbeats of the controller. A new engine joins with the next one: that is most of what starting would
take otherwise."""
SILENT_SECONDS = 30.0
"""How long the controller and an engine of several hosts bear to hear nothing of each other, and the controller on one
host, where an engine that computed on a busy machine was silent for 13 s. That an engine has ended its nanny tells. An
agent bears twice as much, and ends all engines of its host then, also those that are too busy to look."""

UNSUPERVISED_FILE = "unsupervised"
"""In the rendezvous folder of a host of several: there while its agent does not hear of the supervisor."""


def rank_environment(rank: int, devices: list[dict[str, Any]], rendezvous: str) -> dict[str, str]:
    """What the engine of `rank` finds in its environment; `devices` are the fields of hardware.Device, by rank."""
    device = devices[rank]
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(devices)),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(len(devices)),
        "SPEEDLAB_RENDEZVOUS": rendezvous,
        "SPEEDLAB_DEVICE": json.dumps(device),
        "CUDA_VISIBLE_DEVICES": device["uuid"],
        **thread_limits(device["threads"]),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def host_environment(rank: int, hosts: Sequence[Host], rendezvous: str, store: Endpoint) -> dict[str, str]:
    """As `rank_environment`, for a cluster of several hosts. `rendezvous`: the folder, on the rank's host, with
    `generation`; `store`: where rank 0 serves what all ranks meet in (`speedlab.comm.multi_host_rendezvous`)."""
    place = rank_hosts(hosts)[rank]
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


def device_fields(devices: Iterable[Device]) -> list[dict[str, Any]]:
    """Devices as plain data for JSON."""
    return [{**asdict(device), "cores": list(device.cores)} for device in devices]
