"""The `%speedlab` line magic: one function for each subcommand. `commands.py` holds the table of options.

The file also registers `%%ranks`, and the completion of both magics.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import speedlab_notebook.magics.commands as commands
from speedlab_notebook.current import run_names
from speedlab_notebook.magics.ranks_magic import OPTIONS, ranks_cell

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from speedlab.cluster import Cluster

_MATCHER = "speedlab_notebook"
SAY_AFTER_SECONDS = 1.0
"""An action that takes longer than this prints what it does."""

_RANKS_HELP = """Run a cell on ranks, or on all: %%ranks [0,2-3] [--live] [--wait]

  %%ranks                 on every rank; the cell returns at once and its output comes as the ranks print it
  %%ranks 0,2-3           on ranks 0, 2 and 3
  %%ranks 0 --wait        returns when rank 0 is done, and raises RankError when it failed
  %%ranks --live          between two steps of the run that trains, which goes on; finds `engine`, `model` and `batch`

breakpoint() in a cell stops there, and asks for pdb's commands below it: the other ranks wait, q ends it on that rank.
Such a cell waits, as with --wait; with --wait it also stops where a function that it calls says breakpoint().

Equal lines of several ranks are shown once. Names that the cell sets stay on the ranks. While a run trains, the cell
waits for it to pause or to end, but with --live.
"""


class CommandError(RuntimeError):
    """`%speedlab` cannot do what the line asks for. Shown without a traceback: the message says what to do."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


def register(shell: InteractiveShell) -> None:
    """Register both magics and their completion; replace an earlier registration.

    Args:
        shell: The IPython shell of the kernel.
    """

    def speedlab(line: str) -> None:
        run_line(shell, line)

    def ranks(line: str, cell: str) -> None:
        with _short_errors():
            ranks_cell(shell, line, cell)

    speedlab.__doc__ = commands.help_text()
    ranks.__doc__ = _RANKS_HELP
    shell.magics_manager.register_function(speedlab, magic_kind="line", magic_name="speedlab")
    shell.magics_manager.register_function(ranks, magic_kind="cell", magic_name="ranks")
    _remove_matcher(shell)
    shell.Completer.custom_matchers.append(_matcher(shell))


def unregister(shell: InteractiveShell) -> None:
    """Remove both magics and their completion.

    Args:
        shell: The IPython shell of the kernel.
    """
    shell.magics_manager.magics["line"].pop("speedlab", None)
    shell.magics_manager.magics["cell"].pop("ranks", None)
    _remove_matcher(shell)


def _matcher(shell: InteractiveShell) -> Any:
    """Return the completer of both magics. If it knows words for a line, it suppresses all other completers."""
    from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher

    @context_matcher(identifier=_MATCHER, priority=1000)
    def matcher(context: CompletionContext) -> Any:
        line = context.text_until_cursor.lstrip()
        symbol = "" if line[-1:].isspace() else line.rpartition(" ")[2]
        words: list[str] = []
        if line.startswith("%speedlab "):
            words = commands.complete(line, symbol, lambda: run_names(shell))
        elif line.startswith("%%ranks "):
            given = line.split()
            words = [option for option in OPTIONS if option.startswith(symbol) and option not in given]
        completions = [SimpleCompletion(text=word, type="magic") for word in words]
        return {"completions": completions, "matched_fragment": symbol, "suppress": bool(words)}

    return matcher


def _remove_matcher(shell: InteractiveShell) -> None:
    matchers = shell.Completer.custom_matchers
    matchers[:] = [known for known in matchers if getattr(known, "matcher_identifier", None) != _MATCHER]


def run_line(shell: InteractiveShell, line: str) -> None:
    """Run one line of `%speedlab`.

    Args:
        shell: The IPython shell; some subcommands set `cluster` and `run` in its namespace.
        line: The line after the magic's name.

    Raises:
        UsageError: The line cannot be parsed.
        CommandError: The command failed for a reason that the user can fix.
    """
    command, arguments = commands.parse(line)
    if command is None or arguments.pop("help", False):
        print(commands.help_text() if command is None else command.help())
        return
    with _short_errors():
        _ACTIONS[command.name](shell, **arguments)


@contextmanager
def _short_errors() -> Iterator[None]:
    """Convert errors that the user can fix into CommandError, which shows no traceback."""
    from speedlab.cluster.errors import ClusterError
    from speedlab.cluster.known_runs import RunError
    from speedlab.config import ConfigError
    from speedlab.config.errors import with_more
    from speedlab.display.optional_dependencies import MissingExtraError, extras
    from speedlab.layout import LayoutError
    from speedlab.telemetry.checkpoint_index import CheckpointError
    from speedlab.telemetry.run_folder import RunFolderError

    try:
        with extras():
            yield
    except (
        ClusterError,
        RunError,
        RunFolderError,
        ConfigError,
        LayoutError,
        CheckpointError,
        MissingExtraError,
    ) as error:
        raise CommandError(with_more(error)) from error
    except OSError as error:
        if error.filename is None:
            raise
        raise CommandError(f"{error.filename2 or error.filename}: {error.strerror}") from error


@contextmanager
def _telling(text: str) -> Iterator[None]:
    """Print `text` if the body takes longer than SAY_AFTER_SECONDS."""
    timer = threading.Timer(SAY_AFTER_SECONDS, print, [text], {"flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# Subcommands


def _start(
    shell: InteractiveShell,
    engines: int | None = None,
    name: str = "default",
    device: str = "auto",
    backend: str | None = None,
    link: str | None = None,
    timeout_seconds: float | None = None,
    hosts: str | None = None,
    slurm: str | None = None,
    mpi: str | None = None,
) -> None:
    from speedlab.cluster import Cluster
    from speedlab.cluster.launch.host_specs import of_words
    from speedlab.display.formatting import seconds_text

    count = "engines" if engines is None else f"{engines} engine{'s' if engines > 1 else ''}"
    ran_before = name in _names_running()
    began = time.monotonic()
    with _telling(f"starting {count} of cluster {name!r}; torch is imported, which takes a few seconds"):
        there = of_words(hosts, slurm, mpi)
        cluster = Cluster(
            engines, name=name, device=device, backend=backend, link=link, timeout_seconds=timeout_seconds, **there
        )
    shell.push({"cluster": cluster})
    did = "was running" if ran_before else f"ready after {seconds_text(time.monotonic() - began)}"
    print(f"{_described(cluster)} · {did} · it is `cluster`")


def _status(shell: InteractiveShell, name: str | None = None) -> None:
    from IPython.display import display

    import speedlab.cluster.simulated_link as pretended
    from speedlab_notebook.current import active_runs, cluster_at_hand, standing
    from speedlab_notebook.displays import engines_bundle

    running = _names_running()
    if not running:
        print("no cluster runs; %speedlab start starts one")
        return
    cluster = cluster_at_hand(shell, name)
    notes = [standing(folder) for folder in active_runs(cluster)] or ["no run is under way"]
    if others := [other for other in running if other != cluster.name]:
        notes.append(f"also running: {', '.join(others)}; %speedlab status --name {others[0]}")
    title = f"cluster {cluster.name}{pretended.note(cluster.link)}"
    display(engines_bundle(title, cluster.status(), notes), raw=True)


def _panel(shell: InteractiveShell, run: str | None = None) -> None:
    from speedlab_notebook.current import active_runs, cluster_at_hand, held_run, run_at_hand
    from speedlab_notebook.panel.panel import show as show_panel

    if run is None and not _names_running():
        show_panel(None, held_run(shell))  # The panel predicts without engines, and its Train button starts them.
        return
    cluster = cluster_at_hand(shell)
    wanted = run is not None or held_run(shell) is not None or bool(active_runs(cluster))
    found = run_at_hand(shell, run) if wanted else None
    show_panel(found.cluster or cluster if found is not None else cluster, found)


def _plan(shell: InteractiveShell, **words: Any) -> None:
    from IPython.display import display

    from speedlab.cluster.launch.placement import choose_devices
    from speedlab.config import ConfigError
    from speedlab.planner.request import PlanRequest

    try:
        asked = PlanRequest.of_words(words)
        answer = asked.answer(choose_devices(asked.engines, "auto"))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    display(answer)


def _dash(shell: InteractiveShell, runs: tuple[str, ...] | list[str] = ()) -> None:
    from speedlab_notebook.current import held_run, run_at_hand

    if len(runs) > 1:
        from speedlab.cluster import compare
        from speedlab_notebook.dashboard.widget import show_comparison as show_compared

        held = held_run(shell)
        here = () if held is None else (held.name, str(held.folder.path))
        show_compared(compare(*(held if held is not None and name in here else name for name in runs)))
        return
    from speedlab_notebook.dashboard.widget import show as show_dashboard

    show_dashboard(run_at_hand(shell, runs[0] if runs else None))


def _attach(shell: InteractiveShell, run: str | None = None) -> None:
    from speedlab.cluster import Cluster, attach
    from speedlab.cluster.known_runs import RunError
    from speedlab.cluster.run_commands import resume_hint
    from speedlab_notebook.current import push_run
    from speedlab_notebook.dashboard.widget import show as show_dashboard
    from speedlab_notebook.panel.panel import show as show_panel

    try:
        found = attach(run)
    except RunError:
        if run is not None:
            raise
        cluster = Cluster.attach()
        shell.push({"cluster": cluster})
        print(f"{_described(cluster)} · it has no run yet · it is `cluster`")
        show_panel(cluster, None)
        return
    push_run(shell, found)
    if found.cluster is None:
        print(f"{found!r} · {resume_hint(found)} · it is `run`")
    else:
        print(f"{_described(found.cluster)} · {found!r} · they are `cluster` and `run`")
        show_panel(found.cluster, found)
    show_dashboard(found)


def _interrupt(shell: InteractiveShell, name: str | None = None) -> None:
    from speedlab.cluster.errors import name_ranks, restart_of
    from speedlab_notebook.current import cluster_at_hand

    cluster = cluster_at_hand(shell, name)
    with _telling(f"interrupting cluster {cluster.name!r}"):
        idle = cluster.interrupt()
    left = sorted(set(range(cluster.size)) - set(idle))
    if idle:
        print(f"{name_ranks(idle)} of cluster {cluster.name!r}: idle, with what they held")
    if left:
        new = "that engine and starts a new one" if len(left) == 1 else "those engines and starts new ones"
        print(f"{name_ranks(left)}: did not stop; {restart_of(left)} ends {new}")


def _debug(shell: InteractiveShell, rank: str = "", name: str | None = None) -> None:
    from IPython.core.error import UsageError

    from speedlab_notebook.current import cluster_at_hand

    if not rank.isdecimal():
        raise UsageError(f"%speedlab debug: {rank!r} is no rank; %speedlab debug 2 looks at rank 2")
    cluster_at_hand(shell, name).debug(int(rank))


def _stop(shell: InteractiveShell, name: str | None = None, yes: bool = False) -> None:
    from speedlab.cluster import ClusterError
    from speedlab_notebook.current import active_runs, cluster_at_hand, standing

    running = _names_running()
    if not running and name is None:
        print("no cluster runs, so there is nothing to stop")
        return
    cluster = cluster_at_hand(shell, name)
    held = active_runs(cluster)
    if held and not yes:
        raise ClusterError(
            f"{standing(held[-1])} on cluster {cluster.name!r}; steps since its last checkpoint would be lost. "
            f"`%speedlab stop --yes` stops anyway, run.save() keeps them"
        )
    with _telling(f"stopping cluster {cluster.name!r}"):
        cluster.stop()
    print(f"cluster {cluster.name!r} is stopped; its engines have ended")


def _config(shell: InteractiveShell, run: str | None = None, present: bool = False, json: bool = False) -> None:
    from speedlab.config import RunConfig, annotated_yaml
    from speedlab_notebook.current import run_at_hand

    config = run_at_hand(shell, run).config if run is not None or present else RunConfig()
    print(config.to_json() if json else annotated_yaml(config).rstrip())


def _report(shell: InteractiveShell, run: str | None = None) -> None:
    from IPython.display import display

    from speedlab.telemetry.report import write_report
    from speedlab_notebook.current import run_at_hand

    found = run_at_hand(shell, run)
    with _telling(f"writing the report of {found.name!r}"):
        path = write_report(found.folder, found.table())
    display({"text/plain": f"report: {path}", "text/html": f"report: {_link(path)}"}, raw=True)


def _layout(shell: InteractiveShell, run: str | None = None, parameters: bool = False, rank: int = 0) -> None:
    from IPython.display import display

    from speedlab_notebook.current import run_at_hand

    found = run_at_hand(shell, run)
    config = found.present_config
    layout = config.layout(len(found.feed.status.rank_pids), built_in=False)
    with _telling(f"reading the layout of {found.name!r}"):
        table = found.placement(rank) if parameters else found.layout_table()
    print(f"{found.name}: {layout}, ZeRO stage {config.zero.stage}" + (f", rank {rank}" if parameters else ""))
    display(table)


def _trace(
    shell: InteractiveShell, run: str | None = None, step: int | None = None, output: str = "trace.json"
) -> None:
    from IPython.display import display

    from speedlab_notebook.current import run_at_hand

    path = Path(output)
    written = run_at_hand(shell, run).trace(path, step)
    text = f"step {written} as a Chrome trace, for chrome://tracing or Perfetto"
    display({"text/plain": f"{path}: {text}", "text/html": f"{_link(path)}: {text}"}, raw=True)


def _guide(shell: InteractiveShell, guide: str = "", section: str = "") -> None:
    from IPython.display import display

    from speedlab.display.documentation import NoGuideError, page

    try:
        text = page(guide, section)
    except NoGuideError as error:
        raise CommandError(str(error)) from None
    if not guide:
        print(text)
        return
    display({"text/plain": text, "text/markdown": text}, raw=True)


_ACTIONS: dict[str, Callable[..., None]] = {
    "start": _start,
    "status": _status,
    "panel": _panel,
    "plan": _plan,
    "dash": _dash,
    "attach": _attach,
    "interrupt": _interrupt,
    "debug": _debug,
    "stop": _stop,
    "config": _config,
    "report": _report,
    "layout": _layout,
    "guide": _guide,
    "trace": _trace,
}
# Every subcommand of the table has a function, and every function an entry in the table.
assert _ACTIONS.keys() == commands.COMMANDS.keys()


def _names_running() -> list[str]:
    from speedlab.cluster.files.cluster_dir import running_clusters

    return [state.name for state in running_clusters()]


def _described(cluster: Cluster) -> str:
    """Return for example "cluster 'default': 4 engines on cpu 0-1, cpu 2-3", plus the simulated link if any."""
    import speedlab.cluster.simulated_link as pretended

    devices = cluster.devices
    names = ", ".join(dict.fromkeys(device.name for device in devices))
    engines = f"{len(devices)} engine{'s' if len(devices) != 1 else ''} on {names}"
    return f"cluster {cluster.name!r}: {engines}{pretended.note(cluster.link)}"


def _link(path: Path) -> str:
    """Return a link for the notebook's browser if the file is in or below the notebook's folder, else its path."""
    shown = escape(str(path))
    relative = os.path.relpath(path)
    if relative.startswith(os.pardir):
        return f"<code>{shown}</code>"
    return f'<a href="{escape(relative)}" target="_blank" rel="noopener">{shown}</a>'
