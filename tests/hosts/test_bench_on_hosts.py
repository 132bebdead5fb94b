"""`python -m tests.benchmarks network` and `bench hosts`, on hosts in namespaces: what they measure, and that nothing
is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from host_helpers import await_true, needs

from speedlab.calibrate.rank_processes import changed_environment
from tests.benchmarks import network
from tests.benchmarks.hosts_trials import time_registering
from tests.benchmarks.lab import Lab
from tests.benchmarks.lab.daemons import start_sshd


def links() -> list[str]:
    shown = subprocess.run(["ip", "-j", "link"], capture_output=True, text=True, check=True).stdout
    return [link["ifname"] for link in json.loads(shown)]


@pytest.mark.timeout(120)
def test_an_interrupt_leaves_no_host_link_or_process(hosts_are_possible: None) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.benchmarks", "network", "--quick"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        cwd=Path(__file__).parents[2],
        start_new_session=True,  # As a terminal's job: Ctrl-C reaches all of it.
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    own = f"sl{process.pid}"

    def ranks() -> list[psutil.Process]:
        found = []
        for each in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # Hosts are made by commands of moments.
                if any("lab.ranks" in word for word in each.cmdline()):
                    found.append(each)
        return found

    try:
        await_true(lambda: len(ranks()) >= 2, "ranks in the hosts")
        everything = psutil.Process(process.pid).children(recursive=True)
        assert any(name.startswith(own) for name in links())
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(30) != 0
    finally:
        process.kill()
    assert [name for name in links() if name.startswith(own)] == []
    await_true(lambda: not any(each.is_running() for each in everything), "all processes have ended")


@pytest.mark.timeout(240)
def test_bytes_and_speeds_over_a_shaped_link(
    hosts_are_possible: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--links", "1 Gbit/s", "--hosts", "2x1", "--cases", "1-bit Adam, ZeRO-0", "--rounds", "1", "--steps", "1"]
    network.main([*words, "--run-steps", "3", "--json", str(tmp_path / "rows")])
    plain, onebit = map(json.loads, (tmp_path / "rows").read_text().splitlines())
    # 10.45M parameters: half of the gradients there and half back, and headers.
    assert plain["step_bytes"] == pytest.approx(41.8e6, rel=0.1)
    assert 25 < plain["step_bytes"] / onebit["step_bytes"] < 33
    assert plain["step_seconds"] > plain["wire_seconds"] == pytest.approx(plain["step_bytes"] * 8e-9)
    assert "bytes ≤ 1/28: yes" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.timeout(120)
def test_engines_register_without_torch(hosts_are_possible: None) -> None:
    needs("ssh")
    path = os.pathsep.join(path for path in sys.path if path)
    with Lab(2) as lab, changed_environment({"PYTHONPATH": path}):
        assert time_registering(lab, start_sshd(lab), 4) > 0
        await_true(lambda: all(len(host.processes()) == 1 for host in lab.hosts), "only sshd is left")
