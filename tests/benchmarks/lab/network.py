"""Hosts in namespaces of one machine, each with a link of its own to a bridge: what needs several hosts can be tried.

1. A host is a process that waits, alone in namespaces of its own for network, process numbers, mounts and its name.
   It reads a pipe whose other end only this process holds: however this process ends, the pipe closes, the host's
   first process ends, and the kernel ends all others of the host and takes its links down.
2. A veth pair is a host's link: `eth0` inside; outside, its other end hangs on the bridge. This machine has an address
   on the bridge, too, and is the place from which a person works; nothing is forwarded to any other network.
3. The bridge alone outlives a crash. Names of links carry our process number; the next laboratory sweeps those whose
   process has ended.

Needs root and iproute2. netem (delay, loss) is not in every kernel, so links are shaped with `tbf` and cut.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

_LOCK = Path(tempfile.gettempdir()) / "speedlab-lab.lock"
_LINK = re.compile(r"sl(\d+)(h\d+)?")
"""Names of bridges, and of the outer ends of hosts' links."""
_FIRST_PROCESS = """
import signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The kernel then takes ended processes off the list by itself.
print("ready", flush=True)
sys.stdin.read()
"""
_NAMESPACES = ["--net", "--uts", "--mount", "--pid"]
_BURST_SECONDS = 0.001
_LEAST_BURST_BYTES = 64 * 1024
"""Of a shaped link: no less than the largest packet that the kernel hands it at once."""


def missing_for_lab() -> str | None:
    """Why there can be no laboratory here, in a sentence; None when there can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "hosts in namespaces need Linux and root"
    lacking = [name for name in ("ip", "tc", "unshare", "nsenter") if shutil.which(name) is None]
    if lacking:
        return f"{', '.join(lacking)} not found; on Debian and Ubuntu: apt-get install iproute2 util-linux"
    done = subprocess.run(["unshare", *_NAMESPACES, "--fork", "true"], capture_output=True, text=True, check=False)
    return f"namespaces cannot be made here: {done.stderr.strip()}" if done.returncode else None


class LabHost:
    """One host of a laboratory. `name` is what it calls itself, and a name that all hosts resolve."""

    interface = "eth0"

    def __init__(self, lab: Lab, number: int, name: str, private: Sequence[Path]) -> None:
        self.name, self.address, self._lab = name, f"{lab.subnet}.{number + 1}", lab
        self._started: list[subprocess.Popen[Any]] = []
        self._shaped = False
        self._outside = f"sl{os.getpid()}h{number}"
        unshare = ["unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc"]
        self._unshare = subprocess.Popen(
            [*unshare, sys.executable, "-ISc", _FIRST_PROCESS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._unshare.stdout is not None
        if self._unshare.stdout.readline() != "ready\n":
            raise RuntimeError(f"host {name} of the laboratory did not start")
        self.first_pid = psutil.Process(self._unshare.pid).children()[0].pid
        """Number outside of the host's first process."""
        self._join(private)

    def _join(self, private: Sequence[Path]) -> None:
        _ip("link", "add", self._outside, "type", "veth", "peer", "name", self.interface, "netns", str(self.first_pid))
        _ip("link", "set", self._outside, "master", self._lab.bridge, "up")
        for words in (
            ["ip", "addr", "add", f"{self.address}/24", "dev", self.interface],
            ["ip", "link", "set", self.interface, "up"],
            ["ip", "link", "set", "lo", "up"],
            # Of what daemons keep there (sockets, process numbers) each host has its own.
            ["mount", "-t", "tmpfs", "tmpfs", "/run"],
            ["mkdir", "-p", "/run/sshd", "/run/munge"],
            ["mount", "--bind", str(self._lab.folder / "names"), "/etc/hosts"],
            ["sh", "-c", f"echo {self.name} > /proc/sys/kernel/hostname"],
            *(["mount", "-t", "tmpfs", "tmpfs", str(folder)] for folder in private),
        ):
            self.run(*words)

    # ---- commands ----------------------------------------------------------------------------------------------------

    def run(
        self, *command: str, env: Mapping[str, str] | None = None, timeout: float = 60.0, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the host; its output is captured as text. Raises RuntimeError, with what it said, where it
        fails, and TimeoutExpired after `timeout` seconds, when it has been ended."""
        process = self.start(*command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            out, errors = process.communicate(timeout=timeout)
        except BaseException:
            end_all(process)
            raise
        if check and process.returncode:
            raise RuntimeError(f"on {self.name}, {' '.join(command)}: {errors.strip() or out.strip()}")
        return subprocess.CompletedProcess(command, process.returncode, out, errors)

    def start(self, *command: str, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[Any]:
        """A process in the host, as subprocess.Popen gives it, which ends with the host. `end_all` ends it, and all
        that it started, before."""
        enter = ["nsenter", "--target", str(self.first_pid), *_NAMESPACES, f"--wd={options.pop('cwd', os.getcwd())}"]
        options.setdefault("stdin", subprocess.DEVNULL)
        process = subprocess.Popen([*enter, "--", *command], env=dict(env) if env is not None else None, **options)
        self._started.append(process)
        return process

    def processes(self) -> list[psutil.Process]:
        """What runs in the host but its first process, with numbers as they are seen from outside; no zombies."""
        own = os.stat(f"/proc/{self.first_pid}/ns/pid").st_ino
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                inside = os.stat(f"/proc/{process.pid}/ns/pid").st_ino == own
                if inside and process.pid != self.first_pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    # ---- the link ----------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Take the link down: packets vanish in both directions, and nobody is told."""
        _ip("link", "set", self._outside, "down")

    def mend(self) -> None:
        """Bring the link back."""
        _ip("link", "set", self._outside, "up")

    def shape(self, bits_per_second: float | None) -> None:
        """Let the link carry at most so much in each direction; None: as much as the machine can."""
        for device, words in (
            (self._outside, []),
            (self.interface, ["nsenter", f"--net=/proc/{self.first_pid}/ns/net"]),
        ):
            if bits_per_second is None:
                if self._shaped:
                    _run(*words, "tc", "qdisc", "del", "dev", device, "root")
            else:
                burst = max(_LEAST_BURST_BYTES, int(bits_per_second / 8 * _BURST_SECONDS))
                rate = ["rate", f"{int(bits_per_second)}bit", "burst", str(burst), "latency", "50ms"]
                _run(*words, "tc", "qdisc", "replace", "dev", device, "root", "tbf", *rate)
        self._shaped = bits_per_second is not None

    def forbid(self, ports: int | str, *, silently: bool = True) -> None:
        """A firewall before `ports` (a number, or "30000-40000") of this host, until it ends. `silently`: what it
        answers there is dropped, so that who connects waits; else other hosts are told at once that they may not."""
        if silently:
            self.run("ip", "rule", "add", "ipproto", "tcp", "sport", str(ports), "blackhole")
            return
        for host in self._lab.hosts:
            if host is not self:
                host.run("ip", "rule", "add", "to", self.address, "ipproto", "tcp", "dport", str(ports), "prohibit")

    def bytes_carried(self) -> tuple[int, int]:
        """(received, sent) bytes of the link, headers included."""
        text = self.run("ip", "-s", "-j", "link", "show", "dev", self.interface).stdout
        counts = json.loads(text)[0]["stats64"]
        return int(counts["rx"]["bytes"]), int(counts["tx"]["bytes"])

    def end(self) -> None:
        """End every process of the host; its namespaces and its link go with them."""
        assert self._unshare.stdin is not None
        self._unshare.stdin.close()
        for process in (self._unshare, *self._started):
            process.wait(10)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        _run("ip", "link", "del", self._outside, check=False)  # The kernel does so by itself, but later.


class Lab:
    """`count` hosts, named "host-a", "host-b" and so on, until the block ends.

    `private`: folders that exist and that each host shall see empty and as its own; everything else all hosts share.
    Raises RuntimeError where there can be no laboratory (`missing_for_lab`).
    """

    def __init__(self, count: int, *, private: Sequence[Path] = ()) -> None:
        if missing := missing_for_lab():
            raise RuntimeError(missing)
        self.bridge = f"sl{os.getpid()}"
        self._temporary = tempfile.TemporaryDirectory(prefix="speedlab-lab-")
        self.folder = Path(self._temporary.name)
        """Keys, settings and logs of the laboratory's daemons."""
        self.hosts: list[LabHost] = []
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            with _alone():
                sweep()
                self.subnet = _free_subnet()
                _ip("link", "add", self.bridge, "type", "bridge")
                _ip("addr", "add", f"{self.address}/24", "dev", self.bridge)
            _ip("link", "set", self.bridge, "up")
            names = [f"host-{chr(ord('a') + k)}" for k in range(count)]
            lines = ["127.0.0.1 localhost", *(f"{self.subnet}.{k + 1} {name}" for k, name in enumerate(names))]
            (self.folder / "names").write_text("\n".join(lines) + "\n")
            for number, name in enumerate(names):
                self.hosts.append(LabHost(self, number, name, private))
            undo.pop_all()

    @property
    def address(self) -> str:
        """Of this machine, from which a person works, on the hosts' network."""
        return f"{self.subnet}.254"

    def close(self) -> None:
        """End all hosts and take the bridge down. Does nothing the second time."""
        for host in self.hosts:
            host.end()
        self.hosts = []
        _run("ip", "link", "del", self.bridge, check=False)
        self._temporary.cleanup()

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def sweep() -> list[str]:
    """Remove what is left of laboratories whose process has ended; returns the names of links. Their hosts have ended
    by themselves."""
    swept = []
    for link in json.loads(_ip("-j", "link") or "[]"):
        match = _LINK.fullmatch(link.get("ifname", ""))
        if match and not psutil.pid_exists(int(match[1])):
            _run("ip", "link", "del", match[0], check=False)  # The kernel may be just about to do so.
            swept.append(match[0])
    return swept


def end_all(process: subprocess.Popen[Any]) -> None:
    """Kill a process of `LabHost.start` and everything that it started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait(10)


def _free_subnet() -> str:
    """The first three numbers of a network of 254 addresses that this machine has no address in."""
    taken = _ip("-o", "-4", "addr") + _ip("route")
    for number in range(1, 255):
        subnet = f"10.83.{number}"
        if f"{subnet}." not in taken:
            return subnet
    raise RuntimeError("all networks 10.83.1.0 to 10.83.254.0 are in use on this machine")


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Two laboratories that start at the same time must not choose the same network."""
    with _LOCK.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _run(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
