"""The `%%ranks` cell magic: run a cell on ranks and show their output in one display of the cell.

1. `ranks_cell` submits the cell; the supervisor forwards the output of its ranks.
2. The magic returns. A thread (`RanksCell`) receives the output, folds lines that are equal on several ranks, and
   updates the display at most ten times a second.
3. After every rank is done and has sent its last output, the display gets a final line, or the RankError.
4. A cell that waits (`--wait`, or a call of `breakpoint()`) serves the debugger meanwhile: `breakpoint()` stops the
   rank and asks for the debugger's commands below the cell.

`HandleView` shows output in a notebook and `TerminalView` in a terminal. `live_cell` runs a cell between two steps of
a run (`--live`); its output arrives all at once, after the ranks are done.
"""

from __future__ import annotations

import ast
import contextlib
import html
import re
import secrets
import threading
import time
import tokenize
import traceback
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from IPython.core.displayhook import DisplayHook
from IPython.core.error import UsageError
from IPython.core.inputtransformer2 import TransformerManager

from speedlab.cluster.debug.connection import DebugServer
from speedlab.cluster.errors import name_ranks
from speedlab.cluster.interrupts import is_the_users
from speedlab_notebook.magics.commands import unknown, without_comment

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from speedlab.cluster import Cluster, RankError, RankResults
    from speedlab.cluster.run_cell_handle import LiveCell
    from speedlab_notebook.magics.transcript import Transcript


Came = list[tuple[list[int], str]]
"""New output as (ranks, text)."""


class CellView(Protocol):
    """The output area of one cell."""

    def update(self, transcript: Transcript, came: Came, note: str) -> int:
        """Show new output.

        Args:
            transcript: All output up to now.
            came: The output since the last update.
            note: The status line.

        Returns:
            The number of characters sent to the page.
        """
        ...

    def end(self, transcript: Transcript, came: Came, line: str, error: RankError | None) -> None:
        """Show all output with the final line.

        Args:
            transcript: All output.
            came: The output since the last update.
            line: The final line.
            error: The error of the ranks; None if none failed.
        """
        ...


def view_in(shell: InteractiveShell, note: str) -> CellView:
    """Return a view for the cell that the shell runs.

    Args:
        shell: A notebook's kernel or a terminal's shell.
        note: The first status line.
    """
    return HandleView(note) if hasattr(shell, "kernel") else TerminalView(note)


class HandleView:
    """A display in a notebook that is replaced when output arrives."""

    def __init__(self, note: str) -> None:
        """Display the note in the present cell.

        Args:
            note: The first status line.
        """
        from IPython.display import DisplayHandle

        self._handle = DisplayHandle()
        # Displayed on the kernel's thread, which belongs to the cell. Other threads update it by the display's id.
        self._handle.display({"text/plain": note, "text/html": _note_html(note)}, raw=True)

    def update(self, transcript: Transcript, came: Came, note: str) -> int:
        """Replace the display by all output up to now; return the number of characters sent."""
        return self._replace(transcript, note, None)

    def end(self, transcript: Transcript, came: Came, line: str, error: RankError | None) -> None:
        """Replace the display by all output, the error and the final line."""
        self._replace(transcript, line, error)

    def _replace(self, transcript: Transcript, note: str, error: RankError | None) -> int:
        text = "\n".join(filter(None, (transcript.text(), str(error) if error else "", note)))
        page = transcript.html() + (error._repr_html_() if error else "") + _note_html(note)
        self._handle.update({"text/plain": text, "text/html": page}, raw=True)
        return len(text) + len(page)


class TerminalView:
    """Lines on stdout, for a terminal, which cannot replace a display."""

    def __init__(self, note: str) -> None:
        """Print the note.

        Args:
            note: The first status line.
        """
        print(note)

    def update(self, transcript: Transcript, came: Came, note: str) -> int:
        """Print the output since the last update; return 0."""
        lines = [f"{name_ranks(ranks)}: {line}" for ranks, text in came for line in text.splitlines()]
        if lines:
            print("\n".join(lines), flush=True)
        return 0

    def end(self, transcript: Transcript, came: Came, line: str, error: RankError | None) -> None:
        """Print the rest of the output, the error and the final line."""
        self.update(transcript, came, line)
        print(f"{error}\n{line}" if error else line, flush=True)


def _note_html(note: str) -> str:
    style = "color:var(--jp-ui-font-color2,#767676);font-family:var(--jp-ui-font-family,sans-serif)"
    return f'<div class="speedlab-ranks-note" style="{style}">{html.escape(note)}</div>'


def live_cell(
    shell: InteractiveShell, cluster: Cluster, code: str, *, ranks: Sequence[int] | None, wait: bool, shows_result: bool
) -> None:
    """Run a cell between two steps of the cluster's active run.

    Args:
        shell: The IPython shell, for the display.
        cluster: The cluster whose engines hold the run.
        code: The text of the cell.
        ranks: The ranks that run the cell; None for all.
        wait: Whether to return only after the ranks are done.
        shows_result: Whether to show the value of the last expression.

    Raises:
        ClusterError: No run is active, or `code` is no Python.
        RankError: With `wait`, a rank failed.
    """
    from speedlab.cluster import ClusterError
    from speedlab.cluster.run import Run
    from speedlab_notebook.current import active_runs, can_ask

    runs = active_runs(cluster)
    if not runs:
        raise ClusterError(
            f"no run is on in cluster {cluster.name!r}, so there are no steps between which this cell could run; "
            "%%ranks without --live runs it now"
        )
    run = Run(runs[-1], cluster)
    try:
        live = run.live(code, ranks, asks=wait and can_ask(shell))
    except (SyntaxError, ValueError) as error:  # ValueError: of a null character, before Python 3.12.
        reported = "".join(traceback.format_exception_only(error)).rstrip()
        raise ClusterError(f"no rank was given this cell, which is no Python\n{reported}") from None
    view = view_in(shell, f"this cell runs after the step that run {run.name!r} is computing")
    if wait:
        try:
            live.wait_until_done()
        except KeyboardInterrupt:  # The interrupt ended the cell; its output may show why it took so long.
            if live.done:
                _show(live, view, shows_result=shows_result, shows_error=False)
            raise
        _show(live, view, shows_result=shows_result, shows_error=False)
        live.wait()
        return
    threading.Thread(target=_follow, args=(live, view, shows_result), name="speedlab-live-cell", daemon=True).start()


def _follow(live: LiveCell, view: CellView, shows_result: bool) -> None:
    from speedlab_notebook.magics.transcript import Transcript

    try:
        live.pending.wait()
        _show(live, view, shows_result=shows_result, shows_error=True)
    except Exception as error:  # The cell was refused or the run ended: show the reason in the cell.
        view.end(Transcript([]), [], f"{type(error).__name__}: {error}", None)


def _show(live: LiveCell, view: CellView, *, shows_result: bool, shows_error: bool) -> None:
    """Show the output of the ranks, in each rank's own order."""
    from speedlab.cluster import RankError
    from speedlab.display.formatting import seconds_text
    from speedlab_notebook.magics.transcript import Transcript

    said, failures, event = live.said(), live.failures, live.pending.event
    assert event is not None
    transcript, now = Transcript(said), time.monotonic()
    for rank, reported in said.items():
        for kind, content in reported.messages:
            if kind != "execute_result" or shows_result:
                transcript.feed(rank, kind, content, now)
    line = f"{name_ranks(failures or said)} {'failed' if failures else 'done'} after step {event.step}, "
    line += f"which held it up for {seconds_text(event.details.get('seconds', 0.0))}"
    error = RankError(failures, advice=live.ADVICE) if failures and shows_error else None
    view.end(transcript, transcript.drain(now, everything=True), line, error)


USAGE = "%%ranks [0,2-3] [--live] [--wait]"
UPDATE_SECONDS = 0.1
POLL_SECONDS = 0.05
LAST_WORDS_SECONDS = 1.0
"""Time to wait for the last output after all ranks are done."""

_BYTES_PER_SECOND = 2e6
_CHECK_SECONDS = 1.0
_SPAN = re.compile(r"(\d{1,9})(?:[-–](\d{1,9}))?")
_MOST_RANKS = 2**16
"""More than any cluster has. A typing error such as 0-999999999 must not exhaust the kernel's memory."""

OPTIONS = ("--live", "--wait")


class RanksLine(NamedTuple):
    """The parsed line of the magic. `ranks` is None for all ranks."""

    ranks: list[int] | None
    live: bool
    wait: bool


def parse(line: str) -> RanksLine:
    """Parse the line of `%%ranks`.

    Args:
        line: The line after the magic's name, for example '0,2-3 --wait'.

    Returns:
        The ranks without duplicates, in the given order, and the options.

    Raises:
        UsageError: An unknown option, or a word that is no rank and no span of ranks.
    """
    ranks: list[int] = []
    asked = set()
    for word in without_comment(line).replace(",", " ").split():
        if word in OPTIONS:
            asked.add(word)
        elif word.startswith("-"):
            raise UsageError(f"%%ranks: {unknown('option', word, OPTIONS)}; {USAGE}")
        elif (span := _SPAN.fullmatch(word)) is None:
            raise UsageError(f"%%ranks: {word!r} is neither a rank nor a span of ranks; {USAGE}")
        else:
            first, last = int(span[1]), int(span[2] or span[1])
            if last < first:
                raise UsageError(f"%%ranks: the span {word} runs backwards; {last}-{first} is the same ranks")
            if last - first >= _MOST_RANKS:
                raise UsageError(f"%%ranks: {word} are {last - first + 1:,} ranks; no cluster has so many")
            ranks += range(first, last + 1)
    return RanksLine(list(dict.fromkeys(ranks)) or None, "--live" in asked, "--wait" in asked)


def ranks_cell(shell: InteractiveShell, line: str, code: str) -> None:
    """Run a cell on ranks. Return at once, or after the ranks are done if the cell waits.

    Args:
        shell: The IPython shell, for the cluster and the display.
        line: The line after the magic's name.
        code: The text of the cell.

    Raises:
        UsageError: The line cannot be parsed.
        ClusterError: No cluster runs.
        RankError: The cell waits, and a rank failed.
    """
    from speedlab_notebook.current import can_ask, cluster_at_hand

    asked = parse(line)
    cluster = cluster_at_hand(shell)
    quiet = _ends_quietly(code)
    wait = asked.wait or stops(code)
    if asked.live:
        live_cell(shell, cluster, code, ranks=asked.ranks, wait=wait, shows_result=not quiet)
        return
    note = _why_it_waits(cluster, asked.ranks)
    name = secrets.token_hex(8) if wait and can_ask(shell) else ""
    with DebugServer(cluster.directory, name) if name else contextlib.nullcontext() as door:
        results = cluster.execute(code, ranks=asked.ranks, shown=True, door=name)
        view = view_in(shell, note or f"{name_ranks(results.ranks)} running")
        cell = RanksCell(cluster, results, view, shows_error=not wait, shows_result=not quiet)
        cell.start()
        if wait:
            cell.wait(door)


def stops(code: str) -> bool:
    """Return whether the cell itself calls `breakpoint()`. Such a cell waits: the user must answer the debugger.

    Args:
        code: The text of the cell.
    """
    try:
        tree = ast.parse(TransformerManager().transform_cell(code))
    except (SyntaxError, ValueError):  # ValueError: of a null character, before Python 3.12.
        return False  # The ranks report the syntax error.
    called = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(isinstance(function, ast.Name) and function.id == "breakpoint" for function in called)


def _ends_quietly(code: str) -> bool:
    """Return whether the cell ends with a semicolon, which hides its result."""
    try:
        return bool(DisplayHook.semicolon_at_end_of_expression(code))
    except (SyntaxError, tokenize.TokenError):  # Incomplete, or no Python (for example after %%bash): run it anyway.
        return False


def _why_it_waits(cluster: Cluster, ranks: Collection[int] | None) -> str:
    """Return the first status line if ranks are busy; '' if the cell runs at once."""
    from speedlab_notebook.current import standing, training_run

    busy = [engine.rank for engine in cluster.status() if engine.state != "idle"]
    if ranks is not None:
        busy = [rank for rank in busy if rank in ranks]
    if not busy:
        return ""
    run = training_run(cluster)
    if run is not None:
        return f"{standing(run)} and keeps the engines busy; this cell runs when it pauses or ends"
    are, they = ("is", "it is") if len(busy) == 1 else ("are", "they are")
    return f"{name_ranks(busy)} {are} busy; this cell runs when {they} done"


class RanksCell:
    """One cell on its ranks, from submission to its final line."""

    def __init__(
        self,
        cluster: Cluster,
        results: RankResults,
        view: CellView,
        *,
        shows_error: bool = True,
        shows_result: bool = True,
    ) -> None:
        """Prepare to follow a submitted cell.

        Args:
            cluster: The cluster that runs the cell.
            results: The results of the submission, which also receive the ranks' output.
            view: Where to show the output.
            shows_error: Whether the display shows the error; False if `wait` raises it.
            shows_result: Whether to show the value of the last expression.
        """
        from speedlab_notebook.magics.transcript import Transcript

        self._cluster = cluster
        self._results = results
        self._view = view
        self._shows_error = shows_error
        self._shows_result = shows_result
        self._transcript = Transcript(results.ranks)
        self._talking = set(results.ranks)
        self._begun = False
        self._done = threading.Event()
        results.add_done_callback(lambda _: self._done.set())
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._follow, name="speedlab-ranks-cell", daemon=True)

    def start(self) -> None:
        """Start the thread that follows the cell."""
        self._thread.start()

    def wait(self, door: DebugServer | None) -> None:
        """Wait until the ranks are done and all output is shown.

        A KeyboardInterrupt of the user also interrupts the ranks.

        Args:
            door: The debugger's server, served meanwhile; None for a cell that cannot ask the user.

        Raises:
            RankError: A rank failed.
        """
        try:
            while self._thread.is_alive():
                if door is None:
                    self._thread.join(POLL_SECONDS)
                else:
                    door.serve(POLL_SECONDS)
            if door is not None:
                door.finish()
        except KeyboardInterrupt:
            if is_the_users():
                self._results.interrupt()
            raise
        self._results.result()

    def _follow(self) -> None:
        self._follow_until_done()
        came = self._transcript.drain(time.monotonic(), everything=True)
        self._view.end(self._transcript, came, self._last_line(), self._error())

    def _follow_until_done(self) -> None:
        update_at, check_at, last_words_at = 0.0, time.monotonic() + _CHECK_SECONDS, None
        while self._talking:
            begun = self._begun
            for rank, kind, content in self._results.sayings(POLL_SECONDS):
                self._hear(rank, kind, content)
            now = time.monotonic()
            if self._done.is_set():
                last_words_at = last_words_at or now + LAST_WORDS_SECONDS
                if now >= last_words_at:
                    return
            elif now >= check_at:
                check_at = now + _CHECK_SECONDS
                self._check()
            if now >= update_at:
                came = self._transcript.drain(now)
                if came or begun != self._begun:
                    size = self._view.update(self._transcript, came, f"{name_ranks(self._results.ranks)} running")
                    # Each update sends the whole output again: limit the traffic to _BYTES_PER_SECOND.
                    update_at = now + UPDATE_SECONDS + size / _BYTES_PER_SECOND
        while not self._done.wait(_CHECK_SECONDS):  # Results use another channel than output, and may arrive later.
            self._check()

    def _hear(self, rank: int, kind: str, content: Mapping[str, Any]) -> None:
        if not self._begun:
            self._begun, self._started = True, time.monotonic()
        if kind == "status":
            if content["execution_state"] == "idle":
                self._talking.discard(rank)
        elif kind != "execute_result" or self._shows_result:
            self._transcript.feed(rank, kind, content, time.monotonic())

    def _check(self) -> None:
        """End the cell if the cluster's controller is gone."""
        from speedlab.cluster import ClusterError

        try:
            self._cluster.check_controller()
        except ClusterError as error:
            # The results may belong to a closed connection, and then nothing else would end them.
            self._results.abandon(str(error))

    def _error(self) -> RankError | None:
        from speedlab.cluster import RankError

        failures = self._results.failures
        return RankError(failures) if failures and self._shows_error else None

    def _last_line(self) -> str:
        from speedlab.display.formatting import seconds_text

        failed = list(self._results.failures)
        took = seconds_text(time.monotonic() - self._started)
        if failed:
            return f"{name_ranks(failed)} failed after {took}"
        return f"{name_ranks(self._results.ranks)} done in {took}"
