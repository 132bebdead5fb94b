"""Persistent rank processes for tests: made once for a world size and backend, then given functions to run.

1. Processes are forked off a server that has imported torch under the same limits of threads, and done nothing else;
   each joins a group through a file store.
2. `run` sends a function by reference to every rank and returns the results by rank.
3. When a rank raises, it leaves the group at once, so that its peers' collectives fail instead of waiting; when all
   have answered, a new group is made in a new store and the processes go on.
4. When a rank hangs or dies, the stacks of all are taken, the processes are killed and new ones are made.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

COLLECTIVE_TIMEOUT_SECONDS = 60
"""How long a collective waits for a peer. Longer than most calls may take, so that a hang is seen by the pool first."""

START_TIMEOUT_SECONDS = 180.0
GRACE_SECONDS = 10.0
"""How long the others may still take once one rank has failed."""

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_VISIBLE_DEVICES": "",  # This tier runs on CPUs, also where there are GPUs.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


PRELOADED = ["torch._dynamo", "torch.distributed.nn.functional", "speedlab.engine", "transformers"]
"""What every rank would import by itself. Nothing in it starts a thread, which no fork would survive."""


@dataclass(frozen=True)
class Failure:
    """What one rank raised. `kind` is the exception's class name."""

    kind: str
    message: str
    traceback: str


class RanksFailed(RuntimeError):  # noqa: N818  # what happened, as in RankError of the cluster
    """A function raised on some ranks. The text holds the tracebacks, causes before consequences (a lost peer)."""

    def __init__(self, name: str, by_rank: dict[int, Failure], note: str = "") -> None:
        self.by_rank = by_rank
        causes = {rank: f for rank, f in by_rank.items() if not _is_consequence(f)} or by_rank
        parts = [f"{name} failed on rank {', '.join(map(str, sorted(by_rank)))}{note}"]
        seen: set[str] = set()
        for rank, failure in sorted(causes.items()):
            same = failure.traceback in seen
            seen.add(failure.traceback)
            parts.append(f"--- rank {rank}: " + ("the same" if same else failure.traceback.rstrip()))
        super().__init__("\n".join(parts))


class RanksHung(RuntimeError):  # noqa: N818  # what happened
    """A function did not return in time on some ranks, or a process died. The text holds the stacks of all ranks."""


def _is_consequence(failure: Failure) -> bool:
    return failure.kind == "PeerLost" or "Connection closed by peer" in failure.message


class Pool:
    """`size` rank processes, started by the first `run`; `close` ends them.

    `hosts`: the name of each rank's host, a letter each ("aabb"), for those that shall believe to be on several.
    """

    def __init__(self, size: int, backend: str = "shared", hosts: str = "") -> None:
        self.size, self.backend, self.hosts = size, backend, hosts
        self._folder = tempfile.TemporaryDirectory(prefix=f"speedlab-ranks-{size}-")
        self._generation = 0
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._used = False

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any) -> list[Any]:
        """`function(*args, **kwargs)` on every rank, as a list by rank. The function must be importable by name.

        Raises RanksFailed when it raised on any rank, RanksHung after `timeout` seconds. The pool is usable afterwards.
        """
        name = getattr(function, "__qualname__", repr(function))
        if not self._processes:
            self._spawn()
        self._used = True
        replies = self._ask(name, timeout, function, *args, **kwargs)
        failures = {rank: reply for rank, reply in replies.items() if isinstance(reply, Failure)}
        if not failures:
            return [replies[rank] for rank in range(self.size)]
        missing = sorted(set(range(self.size)) - replies.keys())
        if missing:
            note = f"; rank {', '.join(map(str, missing))} was still busy {GRACE_SECONDS:.0f} s later and was killed"
            raise RanksFailed(name, failures, note + self._kill())
        self.new_group()
        raise RanksFailed(name, failures)

    def new_group(self) -> None:
        """Let all ranks leave their group and make a new one; for functions that leave it themselves."""
        replies = self._ask("joining a new group", START_TIMEOUT_SECONDS, _join, self._next_store())
        if any(isinstance(reply, Failure) for reply in replies.values()):
            self._kill(stacks=False)

    def rest(self) -> None:
        """Let go of the groups that functions have made for layouts: a thread of each wakes a hundred times a second,
        in every process."""
        if self._used and self._processes:
            self.new_group()
        self._used = False

    def close(self) -> None:
        """End the processes and remove the stores."""
        for connection in self._connections:
            connection.close()  # Workers end when they read the end of the pipe.
        deadline = time.monotonic() + 5
        for process in self._processes:
            process.join(max(0.1, deadline - time.monotonic()))
        self._kill(stacks=False)
        self._folder.cleanup()

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _spawn(self) -> None:
        context = _fork_server()
        store = self._next_store()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, self.size, self.backend, self.hosts[rank:][:1], theirs, store, self._stacks(rank)),
                name=f"rank-{rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        replies = self._collect("starting the pool", START_TIMEOUT_SECONDS)
        failures = {rank: reply for rank, reply in replies.items() if isinstance(reply, Failure)}
        if failures:
            self._kill(stacks=False)
            raise RanksFailed("starting the pool", failures)

    def _ask(
        self, name: str, timeout: float, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> dict[int, Any]:
        payload = pickle.dumps((function, args, kwargs))
        for connection in self._connections:
            connection.send_bytes(payload)
        return self._collect(name, timeout)

    def _collect(self, name: str, timeout: float) -> dict[int, Any]:
        """Replies by rank; ends early, without those missing, `GRACE_SECONDS` after a failure. Raises RanksHung."""
        replies: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        failed = False
        while len(replies) < self.size:
            open_ranks = {self._connections[r]: r for r in range(self.size) if r not in replies}
            ready = wait(list(open_ranks), max(0.0, deadline - time.monotonic()))
            if not ready and failed:
                return replies
            if not ready:
                raise self._given_up(f"{name} did not return in {timeout:.0f} s on rank {sorted(open_ranks.values())}")
            for connection in ready:
                rank = open_ranks[connection]  # type: ignore[index]  # wait returns what it was given
                try:
                    replies[rank] = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]  # as above
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(5)
                    code = self._processes[rank].exitcode
                    raise self._given_up(f"{name}: the process of rank {rank} died, exit code {code}") from None
                if isinstance(replies[rank], Failure) and not failed:
                    failed = True
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return replies

    def _given_up(self, problem: str) -> RanksHung:
        return RanksHung(problem + self._kill())

    def _kill(self, *, stacks: bool = True) -> str:
        """Kill the processes; the next `run` starts others. Returns what each was doing."""
        text = ""
        if stacks:
            before = [self._stacks(rank).stat().st_size for rank in range(self.size)]
            for process in self._processes:
                if process.is_alive():
                    os.kill(process.pid, signal.SIGUSR1)
            for rank, process in enumerate(self._processes):
                path, deadline = self._stacks(rank), time.monotonic() + 1
                while process.is_alive() and path.stat().st_size == before[rank] and time.monotonic() < deadline:
                    process.join(0.02)
                text += f"\n--- rank {rank} was in:\n{path.read_text()[before[rank] :].rstrip()}"
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(5)
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        return text

    def _next_store(self) -> Path:
        self._generation += 1
        return Path(self._folder.name) / f"store-{self._generation}"

    def _stacks(self, rank: int) -> Path:
        path = Path(self._folder.name) / f"stacks-{rank}"
        path.touch()
        return path


def _fork_server() -> multiprocessing.context.ForkServerContext:
    """Makes processes in a tenth of a second, where each would import torch for three. It is started under the limits
    of threads, which torch reads when it is imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return context


# ---- in the rank processes -------------------------------------------------------------------------------------------

_place: tuple[int, int, str] = (0, 1, "gloo")
"""(rank, world size, backend) of this process."""


def _serve(rank: int, size: int, backend: str, host: str, connection: Connection, store: Path, stacks: Path) -> None:
    global _place  # noqa: PLW0603  # which rank a process is does not change, and `_join` is sent by reference
    _place = rank, size, backend
    os.environ.update(ENVIRONMENT, SPEEDLAB_HOST=host)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SPEEDLAB_RENDEZVOUS", "SPEEDLAB_DEVICE"):
        os.environ.pop(name, None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the test runner's; it closes the pipes.
    with stacks.open("a") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)
        connection.send_bytes(_attempt(lambda: _start(store)))
        while True:
            try:
                payload = connection.recv_bytes()
            except (EOFError, ConnectionResetError):
                return
            connection.send_bytes(_attempt(lambda: _call(payload)))  # noqa: B023  # called before the next round
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # What an engine does with it must not meet the next test.


def _call(payload: bytes) -> Any:
    function, args, kwargs = pickle.loads(payload)
    _freeze_modules()
    return function(*args, **kwargs)


def _freeze_modules() -> None:
    """Modules stay: where some are new, collections look at none of them any more, and `initialize` collects. Before a
    call, because only then is everything of the last one garbage: frozen in a circle, its connections would stay open.
    """
    if sys.modules.keys() <= _frozen:
        return
    gc.collect()
    gc.freeze()
    _frozen.update(sys.modules)


_frozen = set[str]()
"""Names of modules that were there at the last freeze."""


def _attempt(work: Callable[[], Any]) -> bytes:
    """The pickled result of `work`, or a Failure; then this rank has left the group."""
    try:
        return pickle.dumps(work())
    except BaseException as error:  # whatever it is, it is the test's to see; this process goes on
        failure = Failure(type(error).__name__, str(error), "".join(traceback.format_exception(error)))
        # Frames hold engines, engines hold connections: without them nothing keeps the connections open.
        traceback.clear_frames(error.__traceback__)
        del error
    _leave()
    return pickle.dumps(failure)


def _start(store: Path) -> None:
    _join(store)
    import torch._dynamo  # The first optimizer step would import it, in the middle of a test.

    assert torch._dynamo is not None
    _freeze_modules()


def _join(store: Path) -> None:
    import datetime

    import torch
    import torch.distributed as dist

    # Its functions have the world of the moment of its import as a default argument, which would keep that world's
    # connections open for ever; the first optimizer step imports it. Imported before any world it keeps nothing.
    import torch.distributed.nn.functional

    from cuda_ops import cpu_sdpa, onednn_matmul
    from speedlab.comm.shared import register
    from speedlab.comm.transports import shared_memory

    shared_memory.LEAST_JOINED_BYTES = 0  # Small models are gathered, multiplied and attended to as large ones are.
    onednn_matmul.LEAST_ROWS = onednn_matmul.LEAST_ELEMENTS = 1
    cpu_sdpa.WORTH = dict.fromkeys(cpu_sdpa.WORTH, (1, float("inf")))
    rank, size, backend = _place
    torch.set_num_threads(1)
    _leave()
    timeout = datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_SECONDS)
    register()
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)


def _leave() -> None:
    if "torch" not in sys.modules:
        return
    from speedlab.comm import leave
    from speedlab.comm.timeouts import give_timeout

    gc.collect()
    leave()
    give_timeout(None)  # It is of a process, not of a world.
