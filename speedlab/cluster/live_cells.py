"""A cell between two steps, as a Run hands it out: what the ranks said in it, once they have."""

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
from speedlab.telemetry.live_cells import CellOutcome, cell_path, take_said
from speedlab.telemetry.records import Event
from speedlab.telemetry.run_folder import RunFolderError

if TYPE_CHECKING:
    from speedlab.cluster.run import Run


class LiveCell:
    """The answer to `run.live`, once there is one: `.wait()` or `await`; `said()` has all that the ranks said."""

    ADVICE = "The run goes on without it; run.state says what it does."

    def __init__(self, pending: CommandFuture, run: Run, cell: str, door: DebugServer) -> None:
        self.pending = pending
        self._run, self._cell, self._door = run, cell, door
        self._said: dict[int, CellOutcome] | None = None

    @property
    def done(self) -> bool:
        return self.pending.done

    def wait(self, timeout: float | None = None) -> dict[int, str | None]:
        """The text of the cell's last expression by rank, None where it ends in none.

        Raises RankError where it failed on a rank (the run goes on all the same), RunError when the word was refused or
        the run ended before it, TimeoutError after `timeout` seconds. An interrupt of the kernel ends the cell, and
        pauses the run. Where the cell says `breakpoint()`, this asks for the debugger's commands, by `input`; `q`, or
        an interrupt there, ends the cell on that rank, and the run goes on.
        """
        self.wait_until_done(timeout)
        return self._texts()

    def wait_until_done(self, timeout: float | None = None) -> None:
        """As `wait`, but what the ranks raised is left to look at."""
        try:
            self._run._until(self._served, timeout, str(self.pending))
        except TimeoutError:
            raise  # The cell goes on, and can be waited for again.
        except BaseException:
            self._door.close()
            raise
        self._door.finish()

    def _served(self) -> Event | None:
        self._door.serve()
        return self.pending.look()

    def __await__(self) -> Generator[Any, None, dict[int, str | None]]:
        self._door.close()  # A prompt would hold up what else the event loop does.
        yield from self.pending.__await__()
        return self._texts()

    def said(self) -> dict[int, CellOutcome]:
        """What each rank said in it, as messages of Jupyter. Only once it is done. Raises ClusterError for an answer
        that this user's engines did not write, RunFolderError for one that is damaged, or was not taken for long."""
        if self._said is None:
            self._said = take_said(self._run.folder.path, self._cell, _read)
        return self._said

    @property
    def failures(self) -> dict[int, RemoteFailure]:
        """By rank. Only once it is done; raises as `said` does."""
        failed = {rank: told.failure for rank, told in self.said().items() if told.failure is not None}
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
    """Leave the cell in the run's folder and tell the ranks; see `Run.live`. Raises SyntaxError for code that is none,
    and RunError where the run has no engines."""
    run.check_can("live")
    compile(_as_python(code), "<live cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    cell = secrets.token_hex(8)
    path = cell_path(run.folder.path, cell)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    assert run.cluster is not None
    door = DebugServer(run.cluster.directory, cell)
    try:
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
    """With magics as the calls that IPython makes of them."""
    from IPython.core.inputtransformer2 import TransformerManager

    return TransformerManager().transform_cell(code)
