"""Describe this machine for the planner: from its calibration, or with assumed rates before `speedlab calibrate`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from speedlab.hardware import Device, memory_bytes
from speedlab.planner.calibration import Calibration, store
from speedlab.planner.hardware import disk_rates
from speedlab.planner.hardware.devices import DEVICES, DeviceSpec, Machines
from speedlab.planner.hardware.hosts import free_disk_bytes
from speedlab.planner.hardware.links import IN_HOST, Link, parse_link
from speedlab.planner.memory.predict import memory_by_rank, predict_memory
from speedlab.planner.memory.rank_memory import RankMemory
from speedlab.planner.setup import Setup
from speedlab.planner.time.efficiency import Efficiency, efficiency_of
from speedlab.planner.time.step_time import StepTime, predict_time

NOT_CALIBRATED = "(not yet calibrated)"

# Assumed rates of a current CPU for each thread of a rank, until the machine is calibrated.
_THREAD_FLOPS = 5e10
_THREAD_BYTES_PER_SECOND = 5e9
_NARROW_SLOWDOWN = 4.0
"""Slowdown of bfloat16 against float32 on a CPU without bfloat16 instructions."""
_SHARED_MEMORY = Link(name="shared-memory", bandwidth_bytes_per_second=3e9, latency_seconds=3e-5)
_KERNEL_SECONDS = 2e-5


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Machines, and what is known about their speed."""

    machines: Machines
    efficiency: Efficiency
    calibration: Calibration | None = None
    """The calibration of this machine, if there is one."""
    kind: Literal["cpu", "cuda"] = "cuda"
    """Which allocator's rules count the memory."""
    note: str = ""
    """Text to show next to every speed."""

    @property
    def process_bytes(self) -> int:
        """Bytes of an engine's process outside its tensors; 0 if not measured."""
        return 0 if self.calibration is None else self.calibration.process_remainder()[0]

    def memory(self, setup: Setup) -> list[RankMemory]:
        """Return the memory of each distinct position of a set-up.

        Raises:
            ValueError: the layout or cut does not divide the model.
        """
        return _memory(setup, self.kind, self.process_bytes)

    def by_rank(self, setup: Setup) -> list[RankMemory]:
        """Return the memory of each rank of a set-up, by rank."""
        return memory_by_rank(setup, self.memory(setup))

    def time(self, setup: Setup) -> StepTime:
        """Return the predicted time of a step of a set-up.

        Raises:
            ValueError: the shape or dtype is invalid.
            LayoutError: the machines have too few devices.
        """
        return predict_time(setup, self.machines, self.efficiency)

    def over(self, link: Link) -> Hardware:
        """Return the same devices over a simulated network.

        Args:
            link: the link between devices. Each device is modelled as its own host, with its share of memory and disk.
        """
        machines = self.machines
        host, count = machines.host, machines.world_size
        disk = None if host.disk_bytes is None else host.disk_bytes // count
        host = replace(host, memory_bytes=host.memory_bytes // count, disk_bytes=disk)
        separate = replace(machines, per_host=1, hosts=count, between=link, host=host)
        return replace(self, machines=separate, note=f"{self.note} (over a {link.name})".lstrip())

    @classmethod
    def of(cls, machines: Machines) -> Hardware:
        """Return described machines with their usual efficiency.

        Args:
            machines: the hosts and their devices.
        """
        return cls(machines=machines, efficiency=efficiency_of(machines.device))


@lru_cache(maxsize=256)
def _memory(setup: Setup, kind: Literal["cpu", "cuda"], process_bytes: int) -> list[RankMemory]:
    """Return a cached prediction of the memory.

    A panel asks for all ZeRO stages at every change of a control, and most of them do not change.
    """
    return predict_memory(setup, device=kind, outside_framework=process_bytes)


def hardware_here(devices: Sequence[Device], dtype: str, folder: Path | None = None) -> Hardware:
    """Return these devices of this machine, with measured rates if there are any.

    Args:
        devices: devices of this machine, one for each rank.
        dtype: the dtype of the measured rates.
        folder: folder of states on disk; None: the current folder.
    """
    hardware = _devices_here(devices, dtype)
    folder = folder or Path()
    host = replace(hardware.machines.host, memory_bytes=memory_bytes()[0], disk_bytes=free_disk_bytes(folder))
    if (rates := disk_rates.known(folder)) is not None:
        host = replace(
            host,
            disk_read_bytes_per_second=rates.read_bytes_per_second,
            disk_write_bytes_per_second=rates.write_bytes_per_second,
            disk_measured=True,
        )
    return replace(hardware, machines=replace(hardware.machines, host=host))


def _devices_here(devices: Sequence[Device], dtype: str) -> Hardware:
    capacity = min(device.capacity_bytes for device in devices)
    kind = "cpu" if devices[0].kind == "cpu" else "cuda"
    try:
        found = _calibration()
        if found is not None and (found.device == "cpu") == (kind == "cpu"):
            machines = found.machines(len(devices), dtype)
            return Hardware(
                machines=replace(machines, device=replace(machines.device, memory_bytes=capacity)),
                efficiency=found.efficiency(len(devices), dtype),
                calibration=found,
                kind=kind,
            )
        note = NOT_CALIBRATED
    except ValueError as error:  # A damaged file, one of another machine, or no measurement in this dtype.
        note = f"(not calibrated: {error})"
    machines, efficiency = usual(devices)
    return Hardware(machines=machines, efficiency=efficiency, kind=kind, note=note)


def _calibration() -> Calibration | None:
    try:
        # The modification time is the cache key, so a new calibration is used at once.
        changed = store.path().stat().st_mtime_ns
    except OSError:
        return None
    return _loaded(changed)


@lru_cache(maxsize=1)
def _loaded(changed: int) -> Calibration | None:
    """Return the calibration with this modification time; cached, because a panel asks at every change of a control."""
    return store.load()


def usual(devices: Sequence[Device]) -> tuple[Machines, Efficiency]:
    """Return one host with these devices, and their assumed efficiency.

    Args:
        devices: devices of this machine. The one with the least memory represents all of them.
    """
    # All ranks hold the same, so the smallest device limits the run.
    first = min(devices, key=lambda device: device.capacity_bytes)
    spec = described(first)
    if spec is None:
        machines = Machines(device=_cpu(first), per_host=len(devices), in_host=_SHARED_MEMORY)
        return machines, Efficiency.measured(kernel_seconds=_KERNEL_SECONDS)
    # A GPU without bfloat16 arithmetic computes it in float32.
    peaks = {"bfloat16": spec.peak_flops["float32"], **spec.peak_flops}
    spec = replace(spec, memory_bytes=first.capacity_bytes, peak_flops=peaks)
    link = parse_link(spec.in_host if spec.in_host in IN_HOST else spec.host_link)
    return Machines(device=spec, per_host=len(devices), in_host=link), efficiency_of(spec)


def described(device: Device) -> DeviceSpec | None:
    """Return the data sheet of a GPU.

    Args:
        device: a device of this machine. Its name selects the data sheet, and its memory among several. For an unknown
            name, the nearest memory does.

    Returns:
        The data sheet; None for CPU cores.
    """
    if device.kind != "cuda":
        return None
    words = set(re.findall(r"[A-Z]+\d+", device.name.upper()))
    named = [spec for name, spec in DEVICES.items() if name.partition("-")[0] in words]
    return min(named or DEVICES.values(), key=lambda spec: abs(spec.memory_bytes - device.capacity_bytes))


def _cpu(device: Device) -> DeviceSpec:
    single = _THREAD_FLOPS * device.threads
    narrow = 2 * single if device.fast_dtype == "bfloat16" else single / _NARROW_SLOWDOWN
    return DeviceSpec(
        name="cpu",
        memory_bytes=device.capacity_bytes,
        peak_flops={"float32": single, "bfloat16": narrow},
        memory_bytes_per_second=_THREAD_BYTES_PER_SECOND * device.threads,
        host_link="pcie4",
    )
