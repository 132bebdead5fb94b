"""Client of the fork server, for a supervisor or an agent: fork engines from one process that has imported torch.

Importing torch and the engine takes two seconds of a core, and every engine would repeat it. One process does it once,
while the controller starts, and each engine is a fork: ready in a tenth of the time, with shared memory for the
libraries.

The process (`fork_server.py`) ends with its parent; its engines continue. It uses no device, so GPU engines could be
forked, too. That has not been tested on a GPU, so GPU engines are separate processes.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from speedlab.cluster.errors import ClusterError
from speedlab.cluster.files.processes import NURSERY_MODULE
from speedlab.cluster.launch.placement import thread_limits
from speedlab.config.errors import more_in

START_SECONDS = 90.0
"""Time limit for engines to become ready; only a first start from a cold disk comes near it."""

_POLL_SECONDS = 0.05
_LOOK_SECONDS = 1.0
"""Time limit of a query about ended engines."""
_LOG_LINES = 12
_PLACES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Variables that OpenMP reads at its import, before an engine is bound to its own cores: all ranks would use the first
cores.
"""


def can_fork(kinds: Iterable[str]) -> bool:
    """Return whether engines on these kinds of devices can be forked: only on Linux, because forking is not safe on
    macOS.

    Args:
        kinds: 'cpu' or 'cuda' for each device.
    """
    return sys.platform == "linux" and all(kind == "cpu" for kind in kinds)


class ForkServer:
    """Forks engines. Methods are thread-safe.

    The process starts with `begin`, `ready` or the first `fork`, and again after it has died.
    """

    def __init__(self, environment: Mapping[str, str], log: Path, seconds: float = START_SECONDS) -> None:
        """Describe the process; nothing is started.

        Args:
            environment: Full environment of the process and its engines.
            log: File for its output.
            seconds: Time limit of a fork, including all imports.
        """
        kept = {name: value for name, value in environment.items() if name not in _PLACES}
        self._environment, self._log, self._seconds = {**kept, "CUDA_VISIBLE_DEVICES": ""}, log, seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._answers = -1
        """Pipe with answers, separate from stdout, because any code may print."""
        self._ready = False
        """Whether the process has sent its first line, after its imports."""
        self._read = b""
        self._log_begins = 0
        self._begun_for: tuple[object, ...] = ()
        self._ended: dict[int, int] = {}
        self._number = 0
        """Number of the last request; its answer has the same. A late answer to an earlier request is ignored."""
        self._lock = threading.Lock()

    def begin(self, threads: int) -> None:
        """Let the process import torch, without waiting.

        A process for another number of threads, or from before a package was installed, is replaced.

        Args:
            threads: Threads per engine.
        """
        with self._lock:
            self._begin(threads)

    def ready(self, threads: int) -> bool:
        """Do the same as `begin`, and return whether a `fork` would happen at once.

        Args:
            threads: Threads per engine.

        Raises:
            ClusterError: If the process ended during its imports.
        """
        with self._lock:
            if self._process is None or self._ready:
                self._begin(threads)
            return self._is_ready(0.0)

    def fork(
        self, environment: Mapping[str, str], arguments: Sequence[str], log: str, cancelled: Callable[[], bool]
    ) -> int:
        """Fork an engine; return its process id.

        Args:
            environment: Variables in addition to those of the process.
            arguments: Command-line arguments of the engine.
            log: File for its output.
            cancelled: Polled while waiting.

        Raises:
            ClusterError: If the engine cannot be forked, or the start was cancelled.
        """
        order = {"environment": dict(environment), "arguments": list(arguments), "log": log}
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._begin(int(environment["OMP_NUM_THREADS"]))
            self._await_imports(cancelled)
            if (answer := self._ask(order, self._seconds)) is None:
                raise self._gave_up(f"what engines are forked off does not answer within {self._seconds:g} s")
        if "pid" not in answer:
            raise ClusterError(f"no engine of rank {environment['RANK']} could be started: {answer.get('problem')}")
        return answer["pid"]

    def ended(self) -> dict[int, int]:
        """Return the exit status of ended engines by process id; negative for a signal.

        Ends that the fork server did not live to see are missing.
        """
        with self._lock:
            if self._process is not None and self._ready and self._process.poll() is None:
                with suppress(ClusterError):
                    answer = self._ask({"ended": True}, _LOOK_SECONDS) or {"ended": {}}  # The process may be suspended.
                    self._ended.update({int(pid): status for pid, status in answer["ended"].items()})
            return dict(self._ended)

    def close(self) -> None:
        """End the process; engines continue."""
        with self._lock:
            self._end()

    def _begin(self, threads: int) -> None:
        wanted = (threads, *_when_installed())
        if self._process is not None and self._process.poll() is None and self._begun_for == wanted:
            return
        self._end()
        answers, theirs = os.pipe()
        try:
            with self._log.open("ab") as log:
                self._log_begins = log.tell()
                self._process = subprocess.Popen(
                    [sys.executable, "-m", NURSERY_MODULE, str(theirs)],
                    env={**self._environment, **thread_limits(threads)},
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    pass_fds=[theirs],
                    start_new_session=True,
                )
        except OSError as error:
            os.close(answers)
            raise ClusterError(f"what engines are forked off cannot be started: {error}") from None
        finally:
            os.close(theirs)
        self._answers, self._begun_for = answers, wanted

    def _await_imports(self, cancelled: Callable[[], bool]) -> None:
        """Wait until the process can fork. No order is sent before, so a cancelled start needs no undo."""
        deadline = time.monotonic() + self._seconds
        while not self._is_ready(_POLL_SECONDS):
            if cancelled():
                self._end()
                break
            if time.monotonic() > deadline:
                raise self._gave_up(f"after {self._seconds:g} s torch was not imported")
        if cancelled():
            raise ClusterError("it was interrupted")

    def _is_ready(self, seconds: float) -> bool:
        if not self._ready and (line := self._line(seconds)) is not None:
            assert json.loads(line) == {"ready": True}
            self._ready = True
        return self._ready

    def _ask(self, order: Mapping[str, Any], seconds: float) -> dict[str, Any] | None:
        """Send an order to a ready process; return its answer, or None on timeout. Raises ClusterError if the process
        has ended.
        """
        assert self._process is not None
        assert self._process.stdin is not None
        self._number += 1
        with suppress(BrokenPipeError):  # The process has ended; `_line` reports that.
            self._process.stdin.write(json.dumps({**order, "number": self._number}).encode() + b"\n")
            self._process.stdin.flush()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            line = self._line(_POLL_SECONDS)
            if line is not None and (answer := json.loads(line))["number"] == self._number:
                return answer
        return None

    def _line(self, seconds: float) -> bytes | None:
        """Return the next line of the process; None if it is not complete in time. Raises ClusterError if the process
        has ended.
        """
        look = select.poll()
        look.register(self._answers, select.POLLIN)
        if b"\n" not in self._read and look.poll(1000 * seconds):
            part = os.read(self._answers, 65536)
            if not part:
                assert self._process is not None
                status = self._process.wait()
                when = "has ended" if self._ready else "ended before they were ready"
                raise self._gave_up(f"what engines are forked off {when}, with status {status}")
            self._read += part
        line, end, rest = self._read.partition(b"\n")
        if not end:
            return None
        self._read = rest
        return line

    def _gave_up(self, what: str) -> ClusterError:
        self._end()
        with self._log.open("rb") as log:
            log.seek(self._log_begins)
            lines = log.read().decode(errors="replace").splitlines()[-_LOG_LINES:]
        reported = [f"{self._log.name}:", *(f"  {line}" for line in lines)] if lines else []
        return ClusterError("\n".join([what, *reported, more_in("engines")]))

    def _end(self) -> None:
        process, self._process = self._process, None
        self._ready, self._read = False, b""
        if process is None:
            return
        process.kill()
        process.wait()
        os.close(self._answers)
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.close()


def _when_installed() -> tuple[int, ...]:
    """Return a value that changes with every installed package, so that a restarted process imports the new one."""
    folders = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    return tuple(Path(folder).stat().st_mtime_ns for folder in sorted(folders) if Path(folder).exists())
