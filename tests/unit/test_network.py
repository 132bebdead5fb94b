"""Ports that are kept for a process until it listens."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

import speedlab.network as network
from speedlab.network import RESERVED_PORTS, reserved_ports


def test_nobody_else_is_given_reserved_ports() -> None:
    with reserved_ports() as first, reserved_ports() as second:
        for ports in (first, second):
            assert len(ports) == RESERVED_PORTS
            assert network._LOWEST_PORT < min(ports) <= max(ports) < 30_000  # Nor does the kernel give them.
        assert not set(first) & set(second)
        for port in first:
            socket.create_server(("127.0.0.1", port)).close()  # Who they are for can listen there.


def test_a_block_is_one_s_alone_until_it_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    with reserved_ports() as only:
        first = only[0] - 1
        monkeypatch.setattr(network, "_LOWEST_PORT", first)
        monkeypatch.setattr(network, "_kernel_ports_begin", lambda: first + 1 + RESERVED_PORTS)
        with reserved_ports() as others:  # There is no other block: the kernel's.
            assert not set(only) & set(others)
    with reserved_ports() as again:
        assert again == only
    with socket.create_server(("127.0.0.1", only[-1])), reserved_ports() as others:
        assert not set(only) & set(others)


def test_where_the_kernel_gives_all_ports_they_are_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_KERNEL_PORTS", tmp_path / "range")
    assert network._kernel_ports_begin() == network._END_PORT
    (tmp_path / "range").write_text("1024\t65535\n")
    with reserved_ports() as ports:
        assert len(set(ports)) == RESERVED_PORTS
