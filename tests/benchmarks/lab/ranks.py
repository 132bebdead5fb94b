"""Ranks in the hosts of a laboratory, which wait to be told what to do; `RankSet` is the same on one host."""

from __future__ import annotations

import os
import pickle
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from speedlab.cluster.launch.environment import host_environment
from speedlab.cluster.launch.placement import Host
from speedlab.hardware import cpu_devices
from speedlab.network import Endpoint
from tests.benchmarks.lab.network import Lab

STORE_PORT = 29500

_SERVE = "from tests.benchmarks.lab.ranks import serve; serve()"


class HostRanks:
    """`each` ranks on every host of `lab`; they import torch when the first function is sent. They end with the lab."""

    def __init__(self, lab: Lab, each: int, folder: Path) -> None:
        """`folder`: an empty one, for what the ranks print and where they learn which generation they are."""
        (folder / "generation").write_text("0")
        hosts = [
            Host(name=h.name, address=h.address, interface=h.interface, devices=tuple(cpu_devices(each)))
            for h in lab.hosts
        ]
        self.store = Endpoint(host=hosts[0].name, address=hosts[0].address, port=STORE_PORT)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._folder = folder
        for rank in range(len(hosts) * each):
            environment = {
                **os.environ,
                **host_environment(rank, hosts, str(folder), self.store),
                # As on one host: matrix kernels round otherwise with other thread counts.
                **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"),
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            }
            with (folder / f"rank-{rank}.log").open("w") as log:
                process = lab.hosts[rank // each].start(
                    sys.executable,
                    "-c",
                    _SERVE,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                )
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 90.0) -> list[Any]:
        """What the function returns on each rank, by rank; an exception that it raised there as `Raised`.

        The function must be importable by name. Raises TimeoutError, with what the rank printed.
        """
        self.begin(function, *arguments)
        return self.results(timeout)

    def begin(self, function: Callable[..., Any], *arguments: Any) -> None:
        payload = pickle.dumps((function, arguments))
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(len(payload).to_bytes(8, "big") + payload)
            process.stdin.flush()

    def results(self, timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        return [self._result(rank, deadline) for rank in range(len(self._processes))]

    def _result(self, rank: int, deadline: float) -> Any:
        pipe = self._processes[rank].stdout
        assert pipe is not None
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"rank {rank} did not answer:\n{self.log(rank)}")
        size = pipe.read(8)
        if not size:
            raise RuntimeError(f"rank {rank} has ended:\n{self.log(rank)}")
        return pickle.loads(pipe.read(int.from_bytes(size, "big")))

    def log(self, rank: int) -> str:
        return (self._folder / f"rank-{rank}.log").read_text()


def rank_results(results: list[Any]) -> list[Any]:
    """`results`, none of which may be an exception. Raises RuntimeError with the first one's trace."""
    for rank, result in enumerate(results):
        if isinstance(result, Raised):
            raise RuntimeError(f"rank {rank}: {result.trace}")
    return results


class Raised:
    """What a function raised on a rank."""

    def __init__(self, error: BaseException) -> None:
        self.kind, self.text = type(error).__name__, str(error)
        self.trace = "".join(traceback.format_exception(error))


def serve() -> None:
    """Do what comes on the standard input, in a rank's process; what is printed goes to its log."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while size := sys.stdin.buffer.read(8):
        try:
            function, arguments = pickle.loads(sys.stdin.buffer.read(int.from_bytes(size, "big")))
            result = function(*arguments)
        except BaseException as error:  # Whatever it is, it is the caller's to see.
            result = Raised(error)
        payload = pickle.dumps(result)
        answers.write(len(payload).to_bytes(8, "big") + payload)
        answers.flush()
