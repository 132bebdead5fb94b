"""Start rank processes for measurements: one thread each, rendezvous through a file store, calls through pipes."""

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
    "PYTHONWARNINGS": "ignore::FutureWarning",  # Peers use deprecated names of torch.
}

KEPT_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_MAX_": "0",
}
"""Settings of glibc's allocator as environment variables, equal to those of `initialize`.

Processes with these settings keep freed memory, as engines do.
"""


def run_on_ranks(work: Callable[..., Any], ranks: int, *arguments: Any) -> Any:
    """Run `work(*arguments)` on new processes of one world.

    Args:
        work: a function that is importable by name.
        ranks: number of processes.
        arguments: its arguments.

    Returns:
        The result of rank 0.

    Raises:
        RuntimeError: a rank failed.
    """
    with RankSet(ranks) as group:
        return group.call(work, *arguments)


class RankSet:
    """Processes of one world, which sleep between calls. A context manager, which ends the processes.

    Several sets with different settings can alternate in one run.

    Args:
        ranks: number of processes.
        backend: backend of their world, as in `comm.join`.
        environment: additional environment variables.
        project: another checkout whose packages the processes import; only `speedlab.calibrate` is the current one.
    """

    def __init__(
        self,
        ranks: int,
        backend: str | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        project: Path | None = None,
    ) -> None:
        # A fork would inherit torch's threads and locks.
        context = get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        # Environment, because threads must be set before torch is loaded, and the allocator before the process starts.
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
            connection.close()  # The closed pipe ends the processes.
        for process in self._processes:
            process.join(5)
            process.kill()
        self._folder.cleanup()

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [process.pid for process in self._processes]

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run `function(*arguments)` on every rank.

        Args:
            function: a function that is importable by name.
            arguments: its arguments.

        Returns:
            The result of rank 0.

        Raises:
            RuntimeError: a rank failed; the message has its traceback. The set cannot be used any more.
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
    """Set environment variables inside the block, and restore the old values afterwards.

    Args:
        variables: name -> value. Child processes that start inside the block inherit the values.
    """
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
    """Import `speedlab` and `cuda_ops` from another checkout from now on, except for `speedlab.calibrate`.

    The same code then measures both checkouts. Raise RuntimeError if the checkout has no such package.
    """
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
            except Exception:  # Any failure is reported to the measuring process.
                connection.send((False, traceback.format_exc()))
    except EOFError:
        leave()
