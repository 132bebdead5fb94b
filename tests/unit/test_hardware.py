"""Devices of this machine: core shares, control-group limits, and GPUs as a made-up NVML shows them."""

# ruff: noqa: N802  # The names are NVML's own.

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from speedlab import hardware

GIB = 2**30


# CPU cores


@pytest.mark.parametrize(
    ("cores", "count", "expected"),
    [
        ((0, 1), 4, [((0,), "cpu 0"), ((1,), "cpu 1"), ((0,), "cpu 0"), ((1,), "cpu 1")]),
        ((0, 1, 2, 3), 2, [((0, 1), "cpu 0-1"), ((2, 3), "cpu 2-3")]),
        ((0, 1, 2, 3, 4), 2, [((0, 1), "cpu 0-1"), ((2, 3), "cpu 2-3")]),
        ((1, 5, 6), 1, [((1, 5, 6), "cpu 1,5-6")]),
        ((7,), 2, [((7,), "cpu 7"), ((7,), "cpu 7")]),
    ],
)
def test_cpu_devices_share_the_cores(monkeypatch, cores, count, expected) -> None:
    monkeypatch.setattr(hardware, "available_cores", lambda: cores)
    monkeypatch.setattr(hardware, "memory_bytes", lambda: (8 * GIB, 4 * GIB))
    devices = hardware.cpu_devices(count)
    assert [(device.cores, device.name) for device in devices] == expected
    assert {device.threads for device in devices} == {len(expected[0][0])}
    assert {device.capacity_bytes for device in devices} == {8 * GIB // count}
    assert {device.free_bytes for device in devices} == {4 * GIB // count}
    assert {(device.kind, device.uuid) for device in devices} == {("cpu", "")}


def test_no_cpu_device_cannot_be_asked_for() -> None:
    with pytest.raises(ValueError, match="0 CPU devices cannot be made; ask for 1 or more"):
        hardware.cpu_devices(0)


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ({"avx2"}, "float32"),
        ({"avx512_bf16"}, "bfloat16"),
        ({"amx_bf16"}, "bfloat16"),
        ({"asimd", "bf16"}, "bfloat16"),
        (set(), "float32"),
    ],
)
def test_bfloat16_is_fast_where_there_are_instructions_for_it(monkeypatch, flags, dtype) -> None:
    monkeypatch.setattr(hardware, "cpu_flags", lambda: frozenset(flags))
    assert hardware.cpu_fast_dtype() == dtype


@pytest.fixture
def cgroup(monkeypatch, tmp_path):
    """A made-up control group on a machine of 4 cores and 16 GiB, of which 10 are available; write its files."""
    monkeypatch.setattr(hardware, "CGROUP", tmp_path)
    monkeypatch.setattr(hardware, "OWN_CGROUPS", tmp_path / "none")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=16 * GIB, available=10 * GIB))
    return tmp_path


@pytest.mark.parametrize(
    ("limit", "cores"),
    [("200000 100000", (0, 1)), ("150000 100000", (0, 1)), ("50000 100000", (0,)), ("max 100000", (0, 1, 2, 3))],
)
def test_cores_are_at_most_the_control_groups_share(cgroup, limit, cores) -> None:
    (cgroup / "cpu.max").write_text(limit + "\n")
    assert hardware.available_cores() == cores


@pytest.mark.parametrize("group", ["job/step", "job", "."])
def test_a_quota_counts_for_all_groups_below_it(cgroup, monkeypatch, group) -> None:
    """Of both versions; where several grant less than all, the least counts."""
    own = cgroup / "own"
    monkeypatch.setattr(hardware, "OWN_CGROUPS", own)
    for lines, root, limits in (
        ("0::/job/step\n", cgroup, {"cpu.max": "200000 100000"}),
        ("9:memory:/other\n4:cpu,cpuacct:/job/step\n0::/\n", cgroup / "cpu",
         {"cpu.cfs_quota_us": "150000", "cpu.cfs_period_us": "100000"}),
    ):  # fmt: skip
        own.write_text(lines)
        (root / "job" / "step").mkdir(parents=True, exist_ok=True)
        for name, text in limits.items():
            (root / group / name).write_text(text + "\n")
        assert hardware.available_cores() == (0, 1)
        (root / "cpu.max").write_text("50000 100000\n") if root == cgroup else None
        assert hardware.available_cores() == ((0,) if root == cgroup else (0, 1))
        for file in [*cgroup.rglob("cpu.max"), *cgroup.rglob("cpu.cfs_*")]:
            file.unlink()
        assert hardware.available_cores() == (0, 1, 2, 3)


def test_without_a_control_group_the_machine_counts(cgroup) -> None:
    assert hardware.available_cores() == (0, 1, 2, 3)
    assert hardware.memory_bytes() == (16 * GIB, 10 * GIB)


@pytest.mark.parametrize(
    ("limit", "used", "cached", "expected"),
    [
        (8 * GIB, 3 * GIB, 0, (8 * GIB, 5 * GIB)),
        (8 * GIB, 3 * GIB, 2 * GIB, (8 * GIB, 7 * GIB)),
        (12 * GIB, 1 * GIB, 0, (12 * GIB, 10 * GIB)),
        (2 * GIB, 3 * GIB, 0, (2 * GIB, 0)),
        (64 * GIB, 1 * GIB, 0, (16 * GIB, 10 * GIB)),
        ("max", 1 * GIB, 0, (16 * GIB, 10 * GIB)),
    ],
)
def test_memory_is_at_most_the_control_groups_limit(cgroup, limit, used, cached, expected) -> None:
    (cgroup / "memory.max").write_text(f"{limit}\n")
    (cgroup / "memory.current").write_text(f"{used}\n")
    (cgroup / "memory.stat").write_text(f"anon {used - cached}\ninactive_file {cached}\n")
    assert hardware.memory_bytes() == expected


@pytest.mark.parametrize("group", ["job/step", "job", "."])
def test_a_limit_counts_for_all_groups_below_it(cgroup, monkeypatch, group) -> None:
    """Of a batch system's job, say: the process is in a group below the one with the limit. Both versions."""
    own = cgroup / "own"
    monkeypatch.setattr(hardware, "OWN_CGROUPS", own)
    for lines, root, names in (
        ("0::/job/step\n", cgroup, ("memory.max", "memory.current", "inactive_file")),
        ("9:cpu:/other\n4:memory,hugetlb:/job/step\n0::/\n", cgroup / "memory",
         ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
    ):  # fmt: skip
        own.write_text(lines)
        folder = root / group
        folder.mkdir(parents=True, exist_ok=True)
        limit, used, idle = names
        (folder / limit).write_text(f"{8 * GIB}\n")
        (folder / used).write_text(f"{3 * GIB}\n")
        (folder / "memory.stat").write_text(f"{idle} {GIB}\n")
        assert hardware.memory_bytes() == (8 * GIB, 6 * GIB)
        (folder / limit).unlink()
        assert hardware.memory_bytes() == (16 * GIB, 10 * GIB)


# GPUs


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class NotSupportedError(NVMLError):
    pass


class NotFoundError(NVMLError):
    pass


def gpu(name: str, uuid: str, *, free: int, major: int = 9, mig: list[SimpleNamespace | None] | None = None):
    return SimpleNamespace(name=name, uuid=uuid, free=free, total=80 * GIB, major=major, mig=mig)


class FakeNVML:
    """As much of pynvml as is used, over a list of made-up GPUs."""

    NVML_ERROR_LIBRARY_NOT_FOUND, NVML_ERROR_DRIVER_NOT_LOADED, NVML_DEVICE_MIG_ENABLE = 12, 9, 1
    NVMLError, NVMLError_NotSupported, NVMLError_NotFound = NVMLError, NotSupportedError, NotFoundError

    def __init__(self, gpus: list[SimpleNamespace], failure: int | None = None) -> None:
        self.gpus, self.failure, self.open = gpus, failure, False

    def nvmlInit(self):
        if self.failure:
            raise NVMLError(self.failure)
        self.open = True

    def nvmlShutdown(self):
        self.open = False

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        assert self.open
        return self.gpus[index]

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(total=handle.total, free=handle.free)

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return handle.major, 0

    def nvmlDeviceGetName(self, handle):
        return handle.name.encode()  # As older versions return it.

    def nvmlDeviceGetUUID(self, handle):
        return handle.uuid

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert self.open
        found = [gpu for gpu in self.gpus if gpu.uuid == uuid]
        if not found:
            raise NotFoundError(6)
        return found[0]

    def nvmlDeviceGetUtilizationRates(self, handle):
        if handle.mig:
            raise NotSupportedError(3)
        return SimpleNamespace(gpu=87, memory=12)

    def nvmlDeviceGetMigMode(self, handle):
        if handle.mig is None:
            raise NotSupportedError(3)
        return int(bool(handle.mig)), int(bool(handle.mig))

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):
        return len(handle.mig)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, index):
        if handle.mig[index] is None:
            raise NotFoundError(6)
        return handle.mig[index]


@pytest.fixture
def nvml(monkeypatch):
    """Install a made-up NVML: call it with the GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(hardware, "available_cores", lambda: tuple(range(8)))
    hardware._open_nvml.cache_clear()

    def install(*gpus: SimpleNamespace, failure: int | None = None) -> FakeNVML:
        fake = FakeNVML(list(gpus), failure)
        monkeypatch.setitem(sys.modules, "pynvml", fake)  # pyright: ignore[reportArgumentType]
        return fake

    yield install
    hardware._open_nvml.cache_clear()


def test_how_busy_a_gpu_is_where_nvml_tells_it(nvml) -> None:
    cut = gpu("cut", "MIG-1", free=1, mig=[gpu("part", "MIG-2", free=1)])
    fake = nvml(gpu("H200", "GPU-a", free=1), cut)
    assert [hardware.gpu_share(uuid) for uuid in ("GPU-a", "MIG-1", "GPU-none")] == [0.87, None, None]
    fake.nvmlInit = None  # It was opened once, and is not again.
    assert hardware.gpu_share("GPU-a") == 0.87
    hardware._open_nvml.cache_clear()
    nvml(failure=FakeNVML.NVML_ERROR_LIBRARY_NOT_FOUND)
    assert hardware.gpu_share("GPU-a") is None


def three_gpus() -> list[SimpleNamespace]:
    return [
        gpu("H200", "GPU-aaaa", free=10 * GIB),
        gpu("H200", "GPU-abbb", free=70 * GIB),
        gpu("V100", "GPU-cccc", free=30 * GIB, major=7),
    ]


def test_gpus_come_by_free_memory_with_equal_shares_of_the_cores(nvml) -> None:
    fake = nvml(*three_gpus())
    devices = hardware.cuda_devices()
    assert [device.uuid for device in devices] == ["GPU-abbb", "GPU-cccc", "GPU-aaaa"]
    assert [device.free_bytes // GIB for device in devices] == [70, 30, 10]
    assert [device.cores for device in devices] == [(0, 1), (2, 3), (4, 5)]
    assert {device.threads for device in devices} == {2}
    assert [device.fast_dtype for device in devices] == ["bfloat16", "float32", "bfloat16"]
    assert devices[1].name == "V100"
    assert not fake.open


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("", []),
        ("-1", []),
        ("2", ["GPU-cccc"]),
        ("0, 2", ["GPU-aaaa", "GPU-cccc"]),
        ("0,9,2", ["GPU-aaaa"]),
        ("GPU-abbb", ["GPU-abbb"]),
        ("GPU-a", ["GPU-aaaa", "GPU-abbb"]),
        ("1,GPU-abbb", ["GPU-abbb"]),
    ],
)
def test_cuda_visible_devices_is_obeyed(nvml, monkeypatch, visible, expected) -> None:
    nvml(*three_gpus())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert sorted(device.uuid for device in hardware.cuda_devices()) == expected


def test_a_gpu_in_instances_counts_as_its_instances(nvml) -> None:
    parts = [gpu("H200 MIG 1g", "MIG-1", free=GIB), None, gpu("H200 MIG 2g", "MIG-2", free=2 * GIB)]
    nvml(gpu("H200", "GPU-aaaa", free=0, mig=parts), gpu("H200", "GPU-bbbb", free=3 * GIB, mig=[]))
    assert [device.uuid for device in hardware.cuda_devices()] == ["GPU-bbbb", "MIG-2", "MIG-1"]


@pytest.mark.parametrize("failure", [FakeNVML.NVML_ERROR_LIBRARY_NOT_FOUND, FakeNVML.NVML_ERROR_DRIVER_NOT_LOADED])
def test_a_machine_without_a_driver_has_no_gpus(nvml, failure) -> None:
    nvml(failure=failure)
    assert hardware.cuda_devices() == []


def test_a_driver_that_does_not_answer_is_reported(nvml) -> None:
    nvml(failure=18)
    with pytest.warns(RuntimeWarning, match=r"NVML does not start \(error 18\): engines will run on CPU cores"):
        assert hardware.cuda_devices() == []
