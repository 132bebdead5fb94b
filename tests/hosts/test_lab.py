"""The laboratory itself: hosts that are apart, links that can be shaped, cut and counted, and nothing left of them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from host_helpers import needs

from tests.benchmarks.lab import Lab
from tests.benchmarks.lab.daemons import mpi_environment, start_slurm, start_sshd
from tests.benchmarks.lab.network import sweep

RECEIVE = """
import socket, sys
server = socket.create_server((sys.argv[1], 4000))
print("listening", flush=True)
while True:
    connection, _ = server.accept()
    while connection.recv(1 << 20):
        pass
    connection.close()
"""

SEND = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 4000), 2.0)
begin = time.monotonic()
left = int(sys.argv[2])
while left > 0:
    left -= connection.send(bytes(min(left, 1 << 20)))
connection.shutdown(socket.SHUT_WR)
connection.recv(1)  # The other end closes when it has read all.
print(time.monotonic() - begin)
"""


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-ISc", code, *arguments]


def bridges() -> str:
    return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout


def test_hosts_are_apart_and_reach_each_other(two: Lab, tmp_path: Path) -> None:
    a, b = two.hosts
    assert [host.run("uname", "-n").stdout.strip() for host in two.hosts] == ["host-a", "host-b"]
    assert a.run("sh", "-c", "echo $$").stdout.strip() != str(os.getpid())
    server = a.start(*python(RECEIVE, a.address), stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "listening\n"
    assert [process.name() for process in a.processes()] == [psutil.Process(server.pid).children()[0].name()]
    assert b.processes() == []
    before = b.bytes_carried()[1]
    b.run(*python(SEND, "host-a", "1000000"))
    assert 1_000_000 <= b.bytes_carried()[1] - before < 1_200_000
    with pytest.raises(RuntimeError, match="on host-b, false:"):
        b.run("false")
    with pytest.raises(subprocess.TimeoutExpired):
        b.run("sleep", "60", timeout=0.3)
    assert b.processes() == []


def test_links_are_shaped_cut_and_guarded(two: Lab) -> None:
    a, b = two.hosts
    server = a.start(*python(RECEIVE, a.address), stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    server.stdout.readline()
    b.shape(80e6)  # 10 MB/s: 2 MB take 0.2 s, less what the bucket lets through at once.
    assert float(b.run(*python(SEND, "host-a", "2000000")).stdout) > 0.15
    b.shape(None)
    assert float(b.run(*python(SEND, "host-a", "2000000")).stdout) < 0.15
    b.cut()
    assert "timed out" in b.run(*python(SEND, a.address, "1"), check=False).stderr
    b.mend()
    # The question for the neighbour's address that was asked while the link was down fails a little later than that.
    deadline = time.monotonic() + 20
    while reported := b.run(*python(SEND, a.address, "1"), check=False).stderr:
        assert time.monotonic() < deadline, reported
    a.forbid(4000, silently=False)
    assert "PermissionError" in b.run(*python(SEND, a.address, "1"), check=False).stderr
    b.run("ip", "rule", "del", "dport", "4000")
    a.forbid("3990-4010")
    assert "timed out" in b.run(*python(SEND, a.address, "1"), check=False).stderr


def test_a_folder_may_be_each_hosts_own(hosts_are_possible: None, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    with Lab(2, private=[tmp_path / "own"]) as lab:
        lab.hosts[0].run("touch", str(tmp_path / "own" / "here"), str(tmp_path / "for all"))
        assert lab.hosts[0].run("ls", str(tmp_path / "own")).stdout == "here\n"
        assert lab.hosts[1].run("ls", str(tmp_path / "own")).stdout == ""
        assert "for all" in lab.hosts[1].run("ls", str(tmp_path)).stdout


CRASHES = """
import os, subprocess
from tests.benchmarks.lab import Lab
lab = Lab(2)
lab.hosts[0].start("setsid", "sleep", "600")
while not lab.hosts[0].processes():
    pass
print(lab.bridge, *(process.pid for process in lab.hosts[0].processes()), lab.hosts[1].first_pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_nothing_is_left_of_a_laboratory_whose_process_was_killed(hosts_are_possible: None) -> None:
    done = subprocess.run([sys.executable, "-c", CRASHES], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    bridge, *pids = done.stdout.split()
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(int(pid)) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [pid for pid in pids if psutil.pid_exists(int(pid))] == []
    assert bridge in bridges()
    assert bridge in sweep()
    assert bridge not in bridges()


def test_daemons_answer(two: Lab) -> None:
    needs("ssh")
    needs("slurm")
    needs("mpi")
    settings = start_sshd(two)
    to_b = ["ssh", "-F", str(settings), "host-b"]
    assert subprocess.run([*to_b, "hostname"], capture_output=True, text=True, check=True).stdout == "host-b\n"
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", 22), 1.0)
    known = {**os.environ, **mpi_environment(two, settings)}
    addresses = ",".join(host.address for host in two.hosts)
    command = ["mpiexec", "-hosts", addresses, "-n", "2", "hostname"]
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=known, timeout=30).stdout
    assert sorted(out.split()) == ["host-a", "host-b"]
    known = {**os.environ, **start_slurm(two)}
    written = two.folder / "written"
    job = f"#!/bin/sh\nsrun --ntasks=2 --nodes=2 hostname > {written}.new\nmv {written}.new {written}\n"
    (two.folder / "job").write_text(job)
    submit = ["sbatch", "--nodes=2", "--ntasks=2", f"--output={two.folder / 'job.log'}", str(two.folder / "job")]
    subprocess.run(submit, capture_output=True, text=True, check=True, env=known, timeout=30)
    deadline = time.monotonic() + 20
    while not written.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sorted(written.read_text().split()) == ["host-a", "host-b"]
