"""Rank processes for measurements: one thread each, meeting in a file store, doing what they are told."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONWARNINGS": "ignore::FutureWarning",  # Peers call torch's functions by names of yesterday.
}

KEPT_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_MAX_": "0",
}
"""What `initialize` asks of glibc's allocator, as glibc reads it from the environment: processes that have it keep
freed memory as engines do."""


def run_on_ranks(work: Callable[..., Any], ranks: int, *arguments: Any) -> Any:
    """Run `work(*arguments)` on `ranks` new processes that have joined one world; returns rank 0's result."""
    with RankSet(ranks) as group:
        return group.call(work, *arguments)


class RankSet:
    """`ranks` processes of one world, which sleep between calls: several sets can take turns in one run, each with
    settings of its own. A context manager; its end is theirs.

    `backend`: of their world, as in `comm.join`. `environment`: more variables. `project`: another checkout of the
    project, whose packages these processes import; only `speedlab.calibrate` is the present one.
    """

    def __init__(
        self,
        ranks: int,
        backend: str | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        project: Path | None = None,
    ) -> None:
        context = get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        # Inherited: threads must be set before a process loads torch, the allocator before it starts.
        with changed_environment({**_ENVIRONMENT, **(environment or {})}):
            for rank in range(ranks):
                ours, theirs = context.Pipe()
                arguments = rank, ranks, backend, self._folder.name, project, theirs
                process = context.Process(target=_serve, args=arguments, daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._connections.append(ours)

    def __enter__(self) -> RankSet:
        return self

    def __exit__(self, *error: Any) -> None:
        for connection in self._connections:
            connection.close()  # They end when they read the end of the pipe.
        for process in self._processes:
            process.join(5)
            process.kill()
        self._folder.cleanup()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """`function(*arguments)` on every rank; returns rank 0's result. The function must be importable by name.

        Raises RuntimeError with the text of the first failure; the set is of no use afterwards.
        """
        for connection in self._connections:
            connection.send((function, arguments))
        results: dict[int, Any] = {}
        while len(results) < len(self._connections):
            still = [c for rank, c in enumerate(self._connections) if rank not in results]
            for connection in wait(still):
                rank = self._connections.index(connection)  # type: ignore[arg-type]  # wait gives what it was given
                try:
                    done, results[rank] = self._connections[rank].recv()
                except EOFError:
                    done, results[rank] = False, "its process has ended"
                if not done:
                    raise RuntimeError(f"rank {rank} failed in {function.__qualname__}: {results[rank]}")
        return results[0]


@contextmanager
def changed_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Inside the block these variables are set; what they were comes back."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _import_from(project: Path) -> None:
    """From now on this process imports `speedlab` and `cuda_ops` from another checkout, but `speedlab.calibrate` and
    the benchmarks from here: so the same code measures both. Raises RuntimeError where there is no such package."""
    present = sys.modules["speedlab.calibrate"]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("speedlab", "cuda_ops")]:
        del sys.modules[name]
    sys.modules["speedlab.calibrate"] = present
    sys.path.insert(0, str(project))
    import speedlab

    if project not in Path(speedlab.__file__).parents:
        raise RuntimeError(f"{project} has no package speedlab; {speedlab.__file__} was found instead")


def _serve(
    rank: int, ranks: int, backend: str | None, folder: str, project: Path | None, connection: Connection
) -> None:
    if project is not None:
        _import_from(project)
    import torch

    from speedlab.comm import join, leave

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        SPEEDLAB_RENDEZVOUS=folder,
    )
    join(backend=backend)
    try:
        while True:
            function, arguments = connection.recv()
            try:
                connection.send((True, function(*arguments)))
            except Exception:  # Whatever it is, whoever measures shall see it.
                connection.send((False, traceback.format_exc()))
    except EOFError:
        leave()
