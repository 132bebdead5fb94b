"""Described devices, links and clusters: figures, short texts, and what wrong ones get."""

from __future__ import annotations

import pytest

from speedlab.planner.hardware.devices import DEVICES, Machines, device
from speedlab.planner.hardware.links import Link, parse_link


def test_a_cluster_from_a_line() -> None:
    machines = Machines.parse("64x8 A100-80 nvlink3 ib-200x8")
    assert (machines.hosts, machines.per_host, machines.world_size) == (64, 8, 512)
    assert machines.device.peak("bfloat16") == 312e12
    assert machines.in_host.bandwidth_bytes_per_second == 300e9
    assert machines.between is not None
    assert machines.between.host_bytes_per_second == 200e9, "8 cards of 200 Gbit/s are 200 GB/s"
    assert str(machines) == "64 × 8 A100-80 (nvlink3, ib-200x8)"


def test_one_host_needs_no_network_and_takes_the_devices_own_link() -> None:
    machines = Machines.parse("8 h100")
    assert (machines.hosts, machines.device.name, machines.in_host.name) == (1, "H100", "nvlink4")
    assert machines.between is None


def test_memory_is_less_than_the_cards_print() -> None:
    printed = {"V100-16": 16, "V100-32": 32, "A100-40": 40, "A100-80": 80, "H100": 80, "H200": 141, "B200": 180}
    assert printed.keys() == DEVICES.keys()
    for name, gib in printed.items():
        assert 0.95 * gib < DEVICES[name].memory_bytes / 2**30 < gib


@pytest.mark.parametrize(
    ("text", "hosts", "per_host", "name"),
    [
        ("8xA100", 1, 8, "A100-80"),
        ("8 A100", 1, 8, "A100-80"),
        ("2x8 H100", 2, 8, "H100"),
        ("2 x 8 x h100", 2, 8, "H100"),
        ("H100-80GB", 1, 1, "H100"),
        ("8 x h100", 1, 8, "H100"),
        ("8×H100", 1, 8, "H100"),
        ("h100x8", 1, 8, "H100"),
        ("4*A100-40GB", 1, 4, "A100-40"),
        ("a100 x 8", 1, 8, "A100-80"),
        ("A100-40x8", 1, 8, "A100-40"),
        ("A100-80GB x 8", 1, 8, "A100-80"),
        ("8x A100 (80GB)", 1, 8, "A100-80"),
        ("8 NVIDIA A100-SXM4-40GB GPUs", 1, 8, "A100-40"),
        ("8 H100 SXM5", 1, 8, "H100"),
        ("2 nodes x 8 H100", 2, 8, "H100"),
        ("2 nodes, 8 H100 each", 2, 8, "H100"),
        ("2 hosts of 8 A100-80GB", 2, 8, "A100-80"),
        ("8 H100 per node, 2 nodes", 2, 8, "H100"),
        ("8 H100 x 2 nodes", 2, 8, "H100"),
        ("16 H100 on 2 nodes", 2, 8, "H100"),
        ("64 H200", 8, 8, "H200"),
        ("16 V100-32", 1, 16, "V100-32"),
        ("B200-192GB", 1, 1, "B200"),
    ],
)
def test_machines_as_people_write_them(text: str, hosts: int, per_host: int, name: str) -> None:
    machines = Machines.parse(text)
    assert (machines.hosts, machines.per_host, machines.device.name) == (hosts, per_host, name)
    assert (machines.between is None) == (hosts == 1)


def test_what_a_text_leaves_open_is_said() -> None:
    assert Machines.parse("64x8 A100-80 nvlink3 ib-200x8").assumed == ()
    open_ones = Machines.parse("24 A100")
    assert open_ones.assumed == ("A100 is A100-80", "3 hosts of 8", "the network is ib-200x8")
    assert open_ones == Machines.parse("3x8 A100-80 ib-200x8"), "what was assumed makes no other machines"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("8 A10", "nearest: A100-40, A100-80"),
        ("8 A100-81", "device 'A100-81' is not known; nearest: A100-80"),
        ("8 H100-94GB", "device 'H100-94' is not known; nearest: H100"),
        ("8xMI300X", "device 'MI300X' is not known"),
        ("36 H100", "no host has 36 devices, .* write hosts x devices, for instance '5x8 H100'"),
        ("9 H100 on 2 nodes", "9 devices do not divide by 2 hosts"),
        ("2x8 H100 on 2 nodes", "count hosts twice; write for instance '2x8 H100'"),
        ("2 nodes of H100", "do not say how many of what"),
        ("4x8", "do not say how many of what"),
        ("2x8 A100-80 ib-200x8 eth-100", "name 0 links inside a host and 2 networks"),
        ("", "do not say how many of what"),
        ("8 A100-80 nvlink7", "nearest: nvlink"),
        ("8 A100-80 ibb-200", "network 'ibb' is not known; nearest: ib"),
        ("0x8 A100-80", "at least 1"),
    ],
)
def test_what_a_wrong_text_gets(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Machines.parse(text)


def test_what_a_wrong_link_and_dtype_get() -> None:
    with pytest.raises(ValueError, match="a bandwidth above 0"):
        Link(name="none", bandwidth_bytes_per_second=0, latency_seconds=0)
    with pytest.raises(ValueError, match="V100-32 has no matrix multiplication in bfloat16; it has float16, float32"):
        device("V100-32").peak("bfloat16")
    assert parse_link("eth-2.5").bandwidth_bytes_per_second == 2.5e9 / 8
