"""Where the controller of a cluster of several hosts listens, so that they reach it and nobody else understands it."""

from __future__ import annotations

import re
import socket
import subprocess

from speedlab.cluster.agent_launchers import ask_slurm
from speedlab.cluster.errors import ClusterError
from speedlab.cluster.host_specs import SlurmJob, Spec, SshHosts
from speedlab.network import address_of, interface_towards


def controller_address(spec: Spec, interface: str = "") -> str:
    """The address of this machine at which the hosts of `spec` reach the controller: that of `interface`, else of the
    one that leads to them. Raises ClusterError for a host that is not known here."""
    if interface:
        try:
            return address_of(interface)
        except ValueError as error:
            raise ClusterError(str(error)) from None
    if isinstance(spec, SlurmJob):
        return interface_towards(_slurm_controller())[1]
    host = spec.names[0].rpartition("@")[2]
    if isinstance(spec, SshHosts):
        words = ["ssh", *(["-F", spec.config] if spec.config else []), "-G", spec.names[0]]
        try:
            shown = subprocess.run(words, capture_output=True, text=True, check=False, timeout=30).stdout
        except FileNotFoundError:
            raise ClusterError("no ssh on this machine; install the OpenSSH client") from None
        # What the user's settings make of the name.
        host = dict(line.split(" ", 1) for line in shown.splitlines() if " " in line).get("hostname", host)
    try:
        return interface_towards(socket.getaddrinfo(host, None)[0][4][0])[1]  # type: ignore[arg-type]  # of IP families
    except OSError as error:
        reason = error.strerror or error
        raise ClusterError(
            f"{spec.names[0]} is not known here ({reason}); check the name in the list of hosts"
        ) from None


def _slurm_controller() -> str:
    """Slurm's own controller is on the network that its nodes are on."""
    shown = ask_slurm("scontrol", "show", "config")
    found = re.search(r"^SlurmctldHost\S*\s*=\s*([^(\s]+)(?:\(([^)]+)\))?", shown, re.MULTILINE)
    if found is None:
        raise ClusterError("Slurm does not say where its controller is; name the interface that leads to its nodes")
    return str(socket.getaddrinfo(found[2] or found[1], None)[0][4][0])
