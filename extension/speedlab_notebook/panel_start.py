"""Where a panel's engines are to run, on this machine or on the hosts that a line names, and starting them there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from speedlab.cluster.errors import ClusterError
from speedlab.cluster.launch.host_specs import engines_asked, of_line, parse
from speedlab.cluster.launch.placement import choose_devices
from speedlab.hardware import Device

if TYPE_CHECKING:
    from speedlab.cluster import Cluster

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
