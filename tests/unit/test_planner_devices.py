"""Described devices, links and clusters: figures, short texts, and what wrong ones get."""

from __future__ import annotations

import pytest

from speedlab.planner.devices import DEVICES, Machines, device
from speedlab.planner.links import Link, parse_link


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
    ("text", "says"),
    [
        ("8 A100", "nearest: A100-40, A100-80"),
        ("2x8 A100-80", "need a network"),
        ("2x8 A100-80 ib-200x8 eth-100", "name 0 links inside a host and 2 networks"),
        ("A100-80", "do not begin with how many"),
        ("", "do not begin with how many"),
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
