"""Predict the seconds of a step that offload costs. No torch.

1. During forward and backward, parameters are fetched for both and reduced gradients are written. Transfers overlap
   with kernels; only the excess is exposed.
2. An update on the host reads and writes states piece by piece. Transfers and computation overlap, so the slowest of
   them counts. An update in backward, or delayed to the next step, is part of the passes. A delayed update reads
   masters once more to make parameters of them, and this is exposed.

The device's own link connects device and host memory. The ranks of a host share the disk, and reads and writes share
its bandwidth. On CPU cores host and device share one memory, so nothing is transferred.
"""

from __future__ import annotations

from dataclasses import dataclass

from speedlab.placement import MemoryKind
from speedlab.planner.hardware.devices import Machines
from speedlab.planner.hardware.links import parse_link
from speedlab.planner.memory.offload import has_masters, state_places, state_widths, zero_policy_of
from speedlab.planner.setup import Setup
from speedlab.planner.time.efficiency import Efficiency

_FLOAT32 = 4

LIMITING_SHARE = 0.05
"""Share of a step from which on the wait for a disk counts as limiting."""


@dataclass(frozen=True, kw_only=True)
class Flow:
    """Bytes of one rank in a step, by link and disk direction."""

    link: float
    disk_read: float
    disk_write: float

    def __add__(self, other: Flow) -> Flow:
        return Flow(
            link=self.link + other.link,
            disk_read=self.disk_read + other.disk_read,
            disk_write=self.disk_write + other.disk_write,
        )

    def seconds(self, setup: Setup, machines: Machines, efficiency: Efficiency) -> float:
        """Return the seconds of the slower of link and disk, which work in parallel.

        Args:
            setup: the training.
            machines: the hosts and their devices.
            efficiency: reached share of the link's bandwidth.
        """
        sharing, host = min(machines.per_host, setup.layout.world_size), machines.host
        disk = self.disk_read / host.disk_read_bytes_per_second + self.disk_write / host.disk_write_bytes_per_second
        link = parse_link(machines.device.host_link).bandwidth_bytes_per_second * efficiency.host_link
        return max(0.0 if machines.device.on_host else self.link / link, disk * sharing)


def flows(setup: Setup, machines: Machines, owned: float) -> tuple[Flow, Flow]:
    """Return the transfers (during forward and backward, during the update) of a rank.

    Args:
        setup: the training.
        machines: the hosts and their devices.
        owned: parameters that the rank updates.
    """
    places = state_places(zero_policy_of(setup))
    widths = state_widths(setup, "cpu" if machines.device.on_host else "cuda")
    element = widths["parameters"]
    summed = _FLOAT32 if setup.wide_sums and setup.accumulation > 1 else element
    # A pipeline sums its gradients once a step.
    sums = 1 if setup.layout.pp > 1 else setup.accumulation
    masters = has_masters(setup, "cpu" if machines.device.on_host else "cuda")
    states = owned * (widths["optimizer_moments"] + widths["master_weights"])
    parameters, gradients = owned * element, owned * summed
    comes, goes = places["parameters"] is not MemoryKind.DEVICE, places["gradients"] is not MemoryKind.DEVICE
    # Fetched for forward and again for backward, in every micro-batch.
    reads = 2 * setup.accumulation * parameters
    passes = Flow(
        link=(reads if comes else 0) + (sums * gradients if goes else 0),
        disk_read=(reads if places["parameters"] is MemoryKind.DISK else 0)
        + ((sums - 1) * gradients if places["gradients"] is MemoryKind.DISK else 0),
        disk_write=sums * gradients if places["gradients"] is MemoryKind.DISK else 0,
    )
    states_on_disk = places["optimizer_moments"] is MemoryKind.DISK
    # The update writes the new parameters to where they are stored.
    written = parameters if places["parameters"] is MemoryKind.DISK else 0
    at_hand = setup.optimizer.in_backward and machines.device.on_host  # Gathered parameters are still in memory.
    update = Flow(
        link=(0 if comes else parameters) + (0 if goes else gradients),
        disk_read=(states if states_on_disk else 0)
        + (gradients if places["gradients"] is MemoryKind.DISK else 0)
        + (0 if masters or at_hand else written),  # Without masters the update reads the parameters.
        disk_write=(states if states_on_disk else 0) + written,
    )
    return passes, update


def waited_seconds(
    setup: Setup, machines: Machines, efficiency: Efficiency, *, owned: float, computing: float, updating: float
) -> float:
    """Return the seconds of a step that a rank waits for host memory or disk.

    Args:
        setup: the training.
        machines: the hosts and their devices.
        efficiency: reached share of the link's bandwidth.
        owned: parameters that the rank updates.
        computing: seconds of forward and backward.
        updating: seconds of the update.
    """
    if not setup.offload.used:
        return 0.0
    passes, update = flows(setup, machines, owned)
    if setup.optimizer.in_backward:
        return max(0.0, (passes + update).seconds(setup, machines, efficiency) - computing - updating)
    if setup.offload.delayed_update is not None:
        hidden, shown = _alongside(setup, machines, owned, passes, update)
        moving = hidden.seconds(setup, machines, efficiency)
        return max(0.0, moving - computing - updating) + shown.seconds(setup, machines, efficiency)
    return max(0.0, passes.seconds(setup, machines, efficiency) - computing) + max(
        0.0, update.seconds(setup, machines, efficiency) - updating
    )


def _alongside(setup: Setup, machines: Machines, owned: float, passes: Flow, update: Flow) -> tuple[Flow, Flow]:
    """Return the transfers of a delayed update: (overlapped with forward and backward, exposed after them)."""
    places = state_places(zero_policy_of(setup))
    widths = state_widths(setup, "cpu" if machines.device.on_host else "cuda")
    parameters = owned * widths["parameters"]
    on_disk = places["master_weights"] is MemoryKind.DISK
    shown = Flow(
        link=0 if places["parameters"] is not MemoryKind.DEVICE else parameters,
        disk_read=owned * widths["master_weights"] if on_disk else 0,
        disk_write=parameters if places["parameters"] is MemoryKind.DISK else 0,
    )
    hidden = Flow(
        link=passes.link + update.link - shown.link,
        disk_read=passes.disk_read + update.disk_read,
        disk_write=passes.disk_write + update.disk_write - shown.disk_write,
    )
    return hidden, shown


def unhidden_update(setup: Setup, machines: Machines, *, computing: float, updating: float) -> float:
    """Return the seconds by which an update extends a step.

    These are all of its seconds, unless the host computes a delayed update while another device runs kernels.

    Args:
        setup: the training.
        machines: the hosts and their devices.
        computing: seconds of forward and backward.
        updating: seconds of the update.
    """
    alongside = setup.offload.delayed_update is not None and not machines.device.on_host
    return max(0.0, updating - computing) if alongside else updating
