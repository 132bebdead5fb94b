"""LiveCell: the kernel's handle to a cell between two steps, with the output of the ranks."""

from __future__ import annotations

import ast
import secrets
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speedlab.cluster.debug.connection import DebugServer
from speedlab.cluster.errors import RankError, RemoteFailure
from speedlab.cluster.files.signed_files import read_signed, write_signed
from speedlab.cluster.run_commands import CommandFuture
from speedlab.telemetry.cell_outcomes import CellOutcome, cell_path, take_said
from speedlab.telemetry.records import Event
from speedlab.telemetry.run_folder import RunFolderError

if TYPE_CHECKING:
    from speedlab.cluster.run import Run


class LiveCell:
    """The answer to `run.live`: `.wait()` or `await`; `said()` returns all output of the ranks."""

    ADVICE = "The run goes on without it; run.state says what it does."

    def __init__(self, pending: CommandFuture, run: Run, cell: str, door: DebugServer) -> None:
        self.pending = pending
        self._run, self._cell, self._door = run, cell, door
        self._said: dict[int, CellOutcome] | None = None

    @property
    def done(self) -> bool:
        """Whether the ranks have answered."""
        return self.pending.done

    def wait(self, timeout: float | None = None) -> dict[int, str | None]:
        """Wait for the cell; return the text of its last expression by rank, None without one.

        If the cell calls `breakpoint()`, this prompts for the debugger's commands with `input`. `q`, or an interrupt at
        the prompt, ends the cell on that rank, and the run continues. An interrupt of the kernel ends the cell and
        pauses the run.

        Args:
            timeout: Longest time to wait, in seconds; None for no limit.

        Raises:
            RankError: If the cell raised on a rank; the run continues.
            RunError: If the command was refused, or the run ended before it.
            TimeoutError: After `timeout` seconds.
        """
        self.wait_until_done(timeout)
        return self._texts()

    def wait_until_done(self, timeout: float | None = None) -> None:
        """Do the same as `wait`, but raise no errors of the cell; see `failures`.

        Args:
            timeout: Longest time to wait, in seconds; None for no limit.
        """
        try:
            self._run._until(self._served, timeout, str(self.pending))
        except TimeoutError:
            raise  # The cell continues, and the caller can wait again.
        except BaseException:
            self._door.close()
            raise
        self._door.finish()

    def _served(self) -> Event | None:
        self._door.serve()
        return self.pending.look()

    def __await__(self) -> Generator[Any, None, dict[int, str | None]]:
        self._door.close()  # A prompt would block the event loop.
        yield from self.pending.__await__()
        return self._texts()

    def said(self) -> dict[int, CellOutcome]:
        """Return the output of each rank as Jupyter messages. Call only after the cell is done.

        Raises:
            ClusterError: If this user's engines did not write an answer.
            RunFolderError: If an answer is damaged, or was removed because it was not read for long.
        """
        if self._said is None:
            self._said = take_said(self._run.folder.path, self._cell, _read)
        return self._said

    @property
    def failures(self) -> dict[int, RemoteFailure]:
        """Failures by rank, after the cell is done. Raises the errors of `said`."""
        failed = {rank: reported.failure for rank, reported in self.said().items() if reported.failure is not None}
        try:
            return {rank: RemoteFailure.from_dict(failure) for rank, failure in failed.items()}
        except ValueError as error:
            raise RunFolderError(f"what ranks said in cell {self._cell} cannot be read: {error}") from None

    def _texts(self) -> dict[int, str | None]:
        if failures := self.failures:
            raise RankError(failures, advice=self.ADVICE)
        return {rank: said.text for rank, said in self.said().items()}

    def __repr__(self) -> str:
        return repr(self.pending)


def _read(path: Path) -> bytes:
    return read_signed(path, "Run the cell again")


def post_live(run: Run, code: str, ranks: Iterable[int] | None, *, asks: bool) -> LiveCell:
    """Write the cell to the run folder and post the command; see `Run.live`.

    Args:
        run: The run.
        code: Source code of the cell.
        ranks: Ranks that run it; None for all.
        asks: Whether `breakpoint()` stops.

    Raises:
        SyntaxError: If the code is not valid.
        RunError: If the run has no engines.
    """
    run.check_can("live")
    compile(_as_python(code), "<live cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    cell = secrets.token_hex(8)
    path = cell_path(run.folder.path, cell)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    assert run.cluster is not None
    door = DebugServer(run.cluster.directory, cell)
    try:
        # Before the command, because ranks read the file when they see the command.
        write_signed(path, code.encode())
        if not asks:
            door.close()
        arguments = {"cell": cell, "ranks": None if ranks is None else list(ranks), "asks": asks}
        return LiveCell(run._post("live", **arguments), run, cell, door)
    except BaseException:
        door.close()
        path.unlink(missing_ok=True)
        raise


def _as_python(code: str) -> str:
    """Return the code with magics replaced by the calls that IPython makes of them."""
    from IPython.core.inputtransformer2 import TransformerManager

    return TransformerManager().transform_cell(code)
