"""Engines that are forked off one process which has imported torch: the asking side, of a supervisor or an agent.

To import torch and the engine takes two seconds of a core, and every engine would do it again. Here one process does,
while the controller starts, and each engine is a fork of it: ready in a tenth of that, and the libraries' memory is
shared.

The process (`nursery_process.py`) ends with who started it; its engines live on. It has touched no device, and engines
of GPUs could be forked off it as well; that was never tried on one, so they are started as processes of their own.
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
"""How long engines may take to become ready; only a first start from a cold disk comes near."""

_POLL_SECONDS = 0.05
_LOOK_SECONDS = 1.0
"""How long the process may take to say how engines have ended."""
_LOG_LINES = 12
_PLACES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""OpenMP reads them, and the cores, when it is imported, which is before an engine is bound to its own: all ranks would
compute on the first ones."""


def can_fork(kinds: Iterable[str]) -> bool:
    """Whether engines of these kinds of devices may be forks: on macOS a fork of a process with its frameworks is not
    safe."""
    return sys.platform == "linux" and all(kind == "cpu" for kind in kinds)


class ForkServer:
    """Forks engines; its process starts with `begin`, `ready` or the first `fork`, and again when it has died.

    `environment`: all of it, and of its engines. `log`: what it prints. `seconds`: how long a fork may take, with all
    imports. Methods may be called from any thread."""

    def __init__(self, environment: Mapping[str, str], log: Path, seconds: float = START_SECONDS) -> None:
        kept = {name: value for name, value in environment.items() if name not in _PLACES}
        self._environment, self._log, self._seconds = {**kept, "CUDA_VISIBLE_DEVICES": ""}, log, seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._answers = -1
        """Where the process answers: a pipe of its own, since anything may print on its output."""
        self._ready = False
        """Whether the process has said its first line: it has imported everything."""
        self._read = b""
        self._log_begins = 0
        self._begun_for: tuple[object, ...] = ()
        self._ended: dict[int, int] = {}
        self._number = 0
        """Of the last question; its answer has it, too. One that came too late, or while a question was given up, is
        none of the next."""
        self._lock = threading.Lock()

    def begin(self, threads: int) -> None:
        """Let it import torch meanwhile, for engines of so many threads. One that has done so for another number, or
        before something was installed, is followed by another."""
        with self._lock:
            self._begin(threads)

    def ready(self, threads: int) -> bool:
        """As `begin`; whether a `fork` would be done at once. Raises ClusterError where the process has ended over its
        imports."""
        with self._lock:
            if self._process is None or self._ready:
                self._begin(threads)
            return self._is_ready(0.0)

    def fork(
        self, environment: Mapping[str, str], arguments: Sequence[str], log: str, cancelled: Callable[[], bool]
    ) -> int:
        """An engine with this environment, besides its own, these arguments and this file for what it prints; returns
        its process id. Raises ClusterError where there is none, and once `cancelled()`."""
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
        """How engines have ended, by process id, as far as the process that they were forked off has lived to see it:
        an exit status, less than 0 for a signal."""
        with self._lock:
            if self._process is not None and self._ready and self._process.poll() is None:
                with suppress(ClusterError):
                    answer = self._ask({"ended": True}, _LOOK_SECONDS) or {"ended": {}}  # It may be suspended.
                    self._ended.update({int(pid): status for pid, status in answer["ended"].items()})
            return dict(self._ended)

    def close(self) -> None:
        """End the process; engines live on."""
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
        """Nothing is ordered before: what is not ordered need not be called off."""
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
        """The answer of a process that is ready; None where none comes in time. Raises ClusterError where the process
        has ended."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._number += 1
        with suppress(BrokenPipeError):  # It has ended: there is no answer, either.
            self._process.stdin.write(json.dumps({**order, "number": self._number}).encode() + b"\n")
            self._process.stdin.flush()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            line = self._line(_POLL_SECONDS)
            if line is not None and (answer := json.loads(line))["number"] == self._number:
                return answer
        return None

    def _line(self, seconds: float) -> bytes | None:
        """What the process says next; None where nothing whole came within so many seconds. Raises ClusterError where
        it has ended."""
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
        told = [f"{self._log.name}:", *(f"  {line}" for line in lines)] if lines else []
        return ClusterError("\n".join([what, *told, more_in("engines")]))

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
    """Changes with every package that is installed: an engine that is started again then imports what is there now."""
    folders = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    return tuple(Path(folder).stat().st_mtime_ns for folder in sorted(folders) if Path(folder).exists())
