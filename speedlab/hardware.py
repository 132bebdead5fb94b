"""What this machine has: GPUs through NVML, CPU cores with their memory, and what each computes fast. No torch."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

CGROUP = Path("/sys/fs/cgroup")
"""Where the limits of control groups are; of version 1 those on memory in `memory`."""

OWN_CGROUPS = Path("/proc/self/cgroup")
"""The groups that this process is in, a line for each hierarchy."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One place a rank can run: a GPU, or a set of CPU cores."""

    kind: str
    """'cuda' or 'cpu'."""
    name: str
    """For people: 'NVIDIA H200' or 'cpu 0-1'."""
    uuid: str
    """What CUDA_VISIBLE_DEVICES takes for a GPU; '' for CPU cores."""
    cores: tuple[int, ...]
    """CPU cores that the rank is bound to."""
    threads: int
    """Intra-op threads of the rank."""
    capacity_bytes: int
    """Memory the rank may fill: the GPU's total, or an equal share of the machine's."""
    free_bytes: int
    """Of that, what was free when it was looked at."""
    fast_dtype: str
    """'bfloat16' where the device multiplies it faster than float32, else 'float32'."""


# CPU cores


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Instruction sets of the first core, as Linux names them; empty where it cannot be known."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def cpu_fast_dtype() -> str:
    """bfloat16 on CPUs with instructions for it (avx512_bf16, amx_bf16, Arm's bf16), else float32."""
    return "bfloat16" if cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16"} else "float32"


def available_cores() -> tuple[int, ...]:
    """The cores this process may run on: those of its affinity, and no more than its control group may keep busy."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return tuple(cores[: _core_quota() or len(cores)])


def _core_quota() -> int | None:
    """Cores' worth of time that this process's control groups grant, own ones and those above, rounded up; None where
    they grant all."""
    found = []
    for version, folder in _control_groups("cpu"):
        try:
            if version == 2:
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{word}_us").read_text().strip() for word in ("quota", "period"))
        except (OSError, ValueError):  # One without a CPU limit.
            continue
        if quota not in ("max", "-1"):
            found.append(max(1, -(-int(quota) // int(period))))
    return min(found, default=None)


def _control_groups(controller: str) -> Iterator[tuple[int, Path]]:
    """(version, folder) of this process's control groups of `controller`, own ones and those above."""
    try:
        lines = [line.split(":", 2) for line in OWN_CGROUPS.read_text().splitlines()]
    except OSError:
        lines = []
    version_1 = next((path for _, controllers, path in lines if controller in controllers.split(",")), "/")
    version_2 = next((path for _, controllers, path in lines if not controllers), "/")
    for version, root, own in ((2, CGROUP, version_2), (1, CGROUP / controller, version_1)):
        group = root / own.lstrip("/")
        # A container may see its own group as the root, under a path that only the host knows.
        for folder in (group, *group.parents):
            if folder.is_relative_to(root):
                yield version, folder


def memory_bytes() -> tuple[int, int]:
    """(total, available) bytes of memory for this process: the machine's, or those of a control group that it is in
    (a container, a job of a batch system) where that is less."""
    import psutil

    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    for limit, used in _memory_limits():
        if limit < memory.total:
            total, available = min(total, limit), max(0, min(available, limit - used))
    return total, available


def _memory_limits() -> Iterator[tuple[int, int]]:
    """(limit, used) bytes of this process's control groups, own ones and those above."""
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
            # File pages that nobody has used for a while count as used, but make room when something is allocated.
            yield int(limit), int(used) - int(statistics.get(idle, 0))


def cpu_devices(count: int) -> list[Device]:
    """`count` devices with equally many of this machine's cores, in order; they share cores when there are too few.

    Raises ValueError when `count` is below 1.
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
    """'0-3,8' for 0, 1, 2, 3, 8."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{part[0]}" if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


# GPUs


def cuda_devices() -> list[Device]:
    """The GPUs that NVML and CUDA_VISIBLE_DEVICES show, the one with most free memory first; [] where there are none.

    A GPU that is cut into MIG instances counts as its instances. Warns when there is a driver that does not answer.
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
    """Share of the last moments, at most a second, in which the GPU of this UUID computed anything, 0 to 1; None where
    NVML does not tell it: no driver, an instance of a GPU that is cut, or no such GPU."""
    if (pynvml := _open_nvml()) is None:
        return None
    try:
        return pynvml.nvmlDeviceGetUtilizationRates(pynvml.nvmlDeviceGetHandleByUUID(uuid)).gpu / 100
    except pynvml.NVMLError:
        return None


@functools.cache
def _open_nvml() -> Any:
    """NVML, opened once for as long as this process lives, since opening takes longer than asking; None without it."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _described(pynvml: Any, index: int) -> list[Device]:
    """The GPU with this index, or its MIG instances."""
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
    except pynvml.NVMLError_NotSupported:  # Most GPUs cannot be cut.
        return []
    if current != pynvml.NVML_DEVICE_MIG_ENABLE:
        return []
    instances = []
    for i in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            instances.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, i))
        except pynvml.NVMLError_NotFound:  # A place that no instance takes.
            continue
    return instances


def _visible(found: list[list[Device]], variable: str | None) -> list[Device]:
    """What CUDA shows of `found`, a list for each GPU: by number or start of a UUID, up to the first unknown one."""
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
