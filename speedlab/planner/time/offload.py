"""What it costs that states lie away from the device, in seconds of a step. No torch.

1. During forward and backward: parameters come, for both, and summed gradients go. This travels beside the kernels,
   and what takes longer than they do is waited for.
2. The update reads and writes states piece by piece where the host computes it: what moves them and what computes work
   side by side, so that the slowest of them counts. In backward, or beside the next step, it is a part of the passes;
   beside the next step masters are read once more, to be made parameters of, and that is waited for.

The device and the host's memory are joined by the device's own link; the disk is shared by the ranks of a host, and
reading and writing share what it can do. On CPU cores the host's memory is the device's, so that nothing has to travel.
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
"""Of a step: from this on, the wait for a disk limits it."""


@dataclass(frozen=True, kw_only=True)
class Flow:
    """Bytes of one rank in a step, by what they go through."""

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
        """Of the slower of the two, which work side by side."""
        sharing, host = min(machines.per_host, setup.layout.world_size), machines.host
        disk = self.disk_read / host.disk_read_bytes_per_second + self.disk_write / host.disk_write_bytes_per_second
        link = parse_link(machines.device.host_link).bandwidth_bytes_per_second * efficiency.host_link
        return max(0.0 if machines.device.on_host else self.link / link, disk * sharing)


def flows(setup: Setup, machines: Machines, owned: float) -> tuple[Flow, Flow]:
    """(during forward and backward, during the update) of a rank that updates `owned` parameters."""
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
    reads = 2 * setup.accumulation * parameters
    passes = Flow(
        link=(reads if comes else 0) + (sums * gradients if goes else 0),
        disk_read=(reads if places["parameters"] is MemoryKind.DISK else 0)
        + ((sums - 1) * gradients if places["gradients"] is MemoryKind.DISK else 0),
        disk_write=sums * gradients if places["gradients"] is MemoryKind.DISK else 0,
    )
    states_on_disk = places["optimizer_moments"] is MemoryKind.DISK
    written = parameters if places["parameters"] is MemoryKind.DISK else 0
    at_hand = setup.optimizer.in_backward and machines.device.on_host  # Gathered parameters are there at that time.
    update = Flow(
        link=(0 if comes else parameters) + (0 if goes else gradients),
        disk_read=(states if states_on_disk else 0)
        + (gradients if places["gradients"] is MemoryKind.DISK else 0)
        + (0 if masters or at_hand else written),  # Without masters the update reads the parameters themselves.
        disk_write=(states if states_on_disk else 0) + written,
    )
    return passes, update


def waited_seconds(
    setup: Setup, machines: Machines, efficiency: Efficiency, *, owned: float, computing: float, updating: float
) -> float:
    """Of a step, what a rank waits for the host's memory or the disk, where forward and backward take `computing`
    seconds and the update of its `owned` parameters `updating`."""
    if not setup.offload.used:
        return 0.0
    passes, update = flows(setup, machines, owned)
    if setup.optimizer.in_backward:
        return max(0.0, (passes + update).seconds(setup, machines, efficiency) - computing - updating)
    if setup.offload.delayed_update is not None:
        hidden, shown = _beside(setup, machines, owned, passes, update)
        moving = hidden.seconds(setup, machines, efficiency)
        return max(0.0, moving - computing - updating) + shown.seconds(setup, machines, efficiency)
    return max(0.0, passes.seconds(setup, machines, efficiency) - computing) + max(
        0.0, update.seconds(setup, machines, efficiency) - updating
    )


def _beside(setup: Setup, machines: Machines, owned: float, passes: Flow, update: Flow) -> tuple[Flow, Flow]:
    """What moves beside forward and backward, and what does behind them, of an update that is late by a step."""
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
    """Of an update of `updating` seconds, those that a step of `computing` ones takes longer by: all of them, unless
    the processors of the host make it beside the kernels of another device."""
    beside = setup.offload.delayed_update is not None and not machines.device.on_host
    return max(0.0, updating - computing) if beside else updating
