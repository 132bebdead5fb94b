"""The devices of this machine: GPUs (through NVML), CPU cores, memory, and the fast dtype of each. No torch."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

CGROUP = Path("/sys/fs/cgroup")
"""Root of the control groups; version 1 has its memory limits in the folder `memory`."""

OWN_CGROUPS = Path("/proc/self/cgroup")
"""Control groups of this process, one line per hierarchy."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device for one rank: a GPU, or a set of CPU cores."""

    kind: str
    """'cuda' or 'cpu'."""
    name: str
    """Name for users: 'NVIDIA H200' or 'cpu 0-1'."""
    uuid: str
    """UUID for CUDA_VISIBLE_DEVICES; '' for CPU cores."""
    cores: tuple[int, ...]
    """CPU cores that the rank is bound to."""
    threads: int
    """Intra-op threads of the rank."""
    capacity_bytes: int
    """Memory that the rank may fill: the GPU's total, or an equal share of the machine's."""
    free_bytes: int
    """Part of the capacity that was free when it was measured."""
    fast_dtype: str
    """'bfloat16' if the device multiplies bfloat16 faster than float32, otherwise 'float32'."""


# CPU cores


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Return the instruction sets of the first core by their Linux names; empty if unknown."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def cpu_fast_dtype() -> str:
    """Return 'bfloat16' on CPUs with instructions for it (avx512_bf16, amx_bf16, Arm's bf16), otherwise 'float32'."""
    return "bfloat16" if cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16"} else "float32"


def available_cores() -> tuple[int, ...]:
    """Return the cores of this process's affinity, but at most the number that its control groups allow."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return tuple(cores[: _core_quota() or len(cores)])


def _core_quota() -> int | None:
    """Return the number of cores that this process's control groups and their parents allow, rounded up; None without
    limit.
    """
    found = []
    for version, folder in _control_groups("cpu"):
        try:
            if version == 2:
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{word}_us").read_text().strip() for word in ("quota", "period"))
        except (OSError, ValueError):  # This group has no CPU limit.
            continue
        if quota not in ("max", "-1"):
            found.append(max(1, -(-int(quota) // int(period))))
    return min(found, default=None)


def _control_groups(controller: str) -> Iterator[tuple[int, Path]]:
    """Yield (version, folder) of this process's control groups of `controller`, and of their parents."""
    try:
        lines = [line.split(":", 2) for line in OWN_CGROUPS.read_text().splitlines()]
    except OSError:
        lines = []
    version_1 = next((path for _, controllers, path in lines if controller in controllers.split(",")), "/")
    version_2 = next((path for _, controllers, path in lines if not controllers), "/")
    for version, root, own in ((2, CGROUP, version_2), (1, CGROUP / controller, version_1)):
        group = root / own.lstrip("/")
        # A container may see its own group as the root, while the listed path exists only on the host.
        # A limit of any parent group holds, too.
        for folder in (group, *group.parents):
            if folder.is_relative_to(root):
                yield version, folder


def memory_bytes() -> tuple[int, int]:
    """Return (total, available) bytes of memory for this process.

    This is the machine's memory, or the limit of a control group (a container, a batch job) if that is lower.
    """
    import psutil

    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    for limit, used in _memory_limits():
        if limit < memory.total:
            total, available = min(total, limit), max(0, min(available, limit - used))
    return total, available


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Yield (limit, used) bytes of this process's control groups and their parents."""
    names = {
        2: ("memory.max", "memory.current", "inactive_file"),
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    }
    for version, folder in _control_groups("memory"):
        *files, idle = names[version]
        try:
            limit, used = ((folder / name).read_text().strip() for name in files)
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if limit != "max":
            # Inactive file pages count as used, but the kernel frees them when memory is needed.
            yield int(limit), int(used) - int(statistics.get(idle, 0))


def cpu_devices(count: int) -> list[Device]:
    """Return `count` devices with equal numbers of this machine's cores, in order.

    Devices share cores if there are too few.

    Args:
        count: Number of devices.

    Raises:
        ValueError: If `count` is below 1.
    """
    if count < 1:
        raise ValueError(f"{count} CPU devices cannot be made; ask for 1 or more")
    cores = available_cores()
    total, available = memory_bytes()
    share = max(1, len(cores) // count)
    devices = []
    for i in range(count):
        mine = _share_of(cores, i, share)
        devices.append(
            Device(
                kind="cpu",
                name=f"cpu {_ranges(mine)}",
                uuid="",
                cores=mine,
                threads=share,
                capacity_bytes=total // count,
                free_bytes=available // count,
                fast_dtype=cpu_fast_dtype(),
            )
        )
    return devices


def _share_of(cores: Sequence[int], index: int, share: int) -> tuple[int, ...]:
    return tuple(cores[(index * share + j) % len(cores)] for j in range(share))


def _ranges(numbers: Sequence[int]) -> str:
    """Return '0-3,8' for 0, 1, 2, 3, 8."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{part[0]}" if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


# GPUs


def cuda_devices() -> list[Device]:
    """Return the GPUs that NVML and CUDA_VISIBLE_DEVICES show, most free memory first; [] without GPUs.

    MIG instances replace their GPU. Warns if a driver does not respond.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        code = error.value  # pyright: ignore[reportAttributeAccessIssue]  # set in NVMLError.__new__
        if code in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED):
            return []
        warnings.warn(f"NVML does not start ({error}): engines will run on CPU cores", RuntimeWarning, stacklevel=2)
        return []
    try:
        found = [_described(pynvml, i) for i in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()
    devices = sorted(_visible(found, os.environ.get("CUDA_VISIBLE_DEVICES")), key=lambda device: -device.free_bytes)
    cores = available_cores()
    share = max(1, len(cores) // max(1, len(devices)))
    return [replace(device, cores=_share_of(cores, i, share), threads=share) for i, device in enumerate(devices)]


def gpu_share(uuid: str) -> float | None:
    """Return the share of time, 0 to 1, in which a GPU was busy; NVML averages over at most one second.

    Args:
        uuid: UUID of the GPU.

    Returns:
        None if NVML does not know: no driver, a MIG instance, or no such GPU.
    """
    if (pynvml := _open_nvml()) is None:
        return None
    try:
        return pynvml.nvmlDeviceGetUtilizationRates(pynvml.nvmlDeviceGetHandleByUUID(uuid)).gpu / 100
    except pynvml.NVMLError:
        return None


@functools.cache
def _open_nvml() -> Any:
    """Open NVML once per process, because opening takes longer than a query; None without NVML."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _described(pynvml: Any, index: int) -> list[Device]:
    """Return the GPU with this index, or its MIG instances."""
    gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
    major, _ = pynvml.nvmlDeviceGetCudaComputeCapability(gpu)
    handles = _mig_instances(pynvml, gpu) or [gpu]
    devices = []
    for handle in handles:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        devices.append(
            Device(
                kind="cuda",
                name=_text(pynvml.nvmlDeviceGetName(handle)),
                uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
                cores=(),
                threads=1,
                capacity_bytes=int(memory.total),
                free_bytes=int(memory.free),
                fast_dtype="bfloat16" if major >= 8 else "float32",
            )
        )
    return devices


def _mig_instances(pynvml: Any, gpu: Any) -> list[Any]:
    try:
        current, _ = pynvml.nvmlDeviceGetMigMode(gpu)
    except pynvml.NVMLError_NotSupported:  # Most GPUs do not support MIG.
        return []
    if current != pynvml.NVML_DEVICE_MIG_ENABLE:
        return []
    instances = []
    for i in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            instances.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, i))
        except pynvml.NVMLError_NotFound:  # This slot has no instance.
            continue
    return instances


def _visible(found: list[list[Device]], variable: str | None) -> list[Device]:
    """Return the devices of `found`, a list per GPU, that CUDA shows: by index or UUID prefix, up to the first unknown
    one.
    """
    if variable is None:
        return [device for gpu in found for device in gpu]
    devices: list[Device] = []
    for entry in (part.strip() for part in variable.split(",")):
        if entry.isdecimal():
            named = found[int(entry)] if int(entry) < len(found) else []
        else:
            named = [device for gpu in found for device in gpu if entry and device.uuid.startswith(entry)]
        if not named:
            break
        devices += [device for device in named if device not in devices]
    return devices


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
