"""Environment variables of an engine: visible devices, threads and rendezvous, which must be set before torch is
imported.

The engine sets its CPU affinity itself, from these variables.
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
    # Values in the output cache would keep their tensors alive.
    "--InteractiveShell.cache_size=0",
    "--InteractiveShell.colors=nocolor",
]

HEARTBEAT_SECONDS = 0.2
"""Interval of the controller's heartbeats. A new engine joins at the next heartbeat, so a long interval would dominate
the start.
"""
SILENT_SECONDS = 30.0
"""Time without heartbeat after which the controller drops an engine; on several hosts also after which an engine ends.

An engine that computed on a busy machine was silent for 13 s. The nanny of an engine reports the end of its process at
once. An agent waits twice as long; then it ends all engines of its host, even those that are too busy to check.
"""

UNSUPERVISED_FILE = "unsupervised"
"""File in a host's rendezvous folder that exists while its agent does not hear from the supervisor."""


def rank_environment(rank: int, devices: list[dict[str, Any]], rendezvous: str) -> dict[str, str]:
    """Return the environment variables of a rank.

    Args:
        rank: The rank.
        devices: Fields of hardware.Device, by rank.
        rendezvous: Rendezvous folder.
    """
    device = devices[rank]
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(devices)),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(len(devices)),
        "SPEEDLAB_RENDEZVOUS": rendezvous,
        "SPEEDLAB_DEVICE": json.dumps(device),
        # The engine sees only its own GPU.
        "CUDA_VISIBLE_DEVICES": device["uuid"],
        **thread_limits(device["threads"]),
        # All ranks are on this machine.
        "GLOO_SOCKET_IFNAME": "lo",
    }


def host_environment(rank: int, hosts: Sequence[Host], rendezvous: str, store: Endpoint) -> dict[str, str]:
    """Return the environment variables of a rank in a cluster of several hosts.

    Args:
        rank: The rank.
        hosts: Hosts in the order of ranks.
        rendezvous: Rendezvous folder on the rank's host, with the file `generation`.
        store: Address at which rank 0 serves the store (`speedlab.comm.multi_host_rendezvous`).
    """
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
    """Return devices as plain data for JSON."""
    return [{**asdict(device), "cores": list(device.cores)} for device in devices]
