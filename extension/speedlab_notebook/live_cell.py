"""A cell between two steps of a run: `%%ranks --live`. What ranks say in it comes at once, when they are done."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from speedlab.cluster.errors import name_ranks
from speedlab_notebook.ranks_view import View, view_in

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from speedlab.cluster import Cluster
    from speedlab.cluster.live_cells import LiveCell


def live_cell(
    shell: InteractiveShell, cluster: Cluster, code: str, *, ranks: Sequence[int] | None, wait: bool, shows_result: bool
) -> None:
    """Run `code` between two steps of the run that the cluster's engines hold. Returns at once, or with `wait` when it
    is done, raising RankError."""
    from speedlab.cluster import ClusterError
    from speedlab.cluster.run import Run
    from speedlab_notebook.at_hand import active_runs, can_ask

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
        told = "".join(traceback.format_exception_only(error)).rstrip()
        raise ClusterError(f"no rank was given this cell, which is no Python\n{told}") from None
    view = view_in(shell, f"this cell runs behind the step that run {run.name!r} is computing")
    if wait:
        try:
            live.wait_until_done()
        except KeyboardInterrupt:  # It has ended the cell, which may have said why it took so long.
            if live.done:
                _show(live, view, shows_result=shows_result, shows_error=False)
            raise
        _show(live, view, shows_result=shows_result, shows_error=False)
        live.wait()
        return
    threading.Thread(target=_follow, args=(live, view, shows_result), name="speedlab-live-cell", daemon=True).start()


def _follow(live: LiveCell, view: View, shows_result: bool) -> None:
    from speedlab_notebook.transcript import Transcript

    try:
        live.pending.wait()
        _show(live, view, shows_result=shows_result, shows_error=True)
    except Exception as error:  # Refused, or the run has ended: that is what the cell has to show.
        view.end(Transcript([]), [], f"{type(error).__name__}: {error}", None)


def _show(live: LiveCell, view: View, *, shows_result: bool, shows_error: bool) -> None:
    """What the ranks said, in the order in which each said it."""
    from speedlab.cluster import RankError
    from speedlab.display.formatting import seconds_text
    from speedlab_notebook.transcript import Transcript

    said, failures, event = live.said(), live.failures, live.pending.event
    assert event is not None
    transcript, now = Transcript(said), time.monotonic()
    for rank, told in said.items():
        for kind, content in told.messages:
            if kind != "execute_result" or shows_result:
                transcript.feed(rank, kind, content, now)
    line = f"{name_ranks(failures or said)} {'failed' if failures else 'done'} after step {event.step}, "
    line += f"which held it up for {seconds_text(event.details.get('seconds', 0.0))}"
    error = RankError(failures, advice=live.ADVICE) if failures and shows_error else None
    view.end(transcript, transcript.drain(now, everything=True), line, error)
