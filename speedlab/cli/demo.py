"""Run a notebook without a browser, with real engines, and print the results of its run: `speedlab demo`."""

from __future__ import annotations

import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from speedlab.cli.cluster import deaf_to_interrupts
from speedlab.cli.progress import progress_line
from speedlab.cluster import Cluster, ClusterError, Run
from speedlab.cluster.files.cluster_dir import running_clusters
from speedlab.config import ConfigError
from speedlab.config.command_line import read_options
from speedlab.display.documentation import QUICKSTART, notebook_file
from speedlab.display.formatting import seconds_text
from speedlab.telemetry.records import RunState
from speedlab.telemetry.run_folder import RunFolder, RunFolderError

if TYPE_CHECKING:
    from nbformat import NotebookNode

CLUSTER = "default"
"""Name of the cluster that `%speedlab start` starts."""

_PROGRESS_SECONDS = 5.0
_SAMPLE_TAG = "sample"


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Train a small GPT on real text, change its ZeRO stage while it trains, and print what was measured.

    It executes the quickstart notebook without a browser, with real engines; the run is kept in ./runs."""

    notebook: Annotated[Path | None, tyro.conf.Positional] = None
    """Another notebook than the quickstart; its run is looked for in ./runs under the name below."""
    run: str = "quickstart"
    """Name of the run that the notebook starts. An older run of that name is moved aside first."""
    cell_timeout: float = 300.0
    """Longest time of a single cell, in seconds."""


def demo(argv: list[str]) -> int:
    """Execute the notebook and print table, losses, sample and the report's path.

    Args:
        argv: arguments of the command.

    Returns:
        The exit status: 0 done, 1 the notebook failed.

    Raises:
        ClusterError: a cluster with the notebook's name is already running.
    """
    options = read_options(DemoOptions, argv, "speedlab demo")
    begin = time.monotonic()
    notebook = _read(options.notebook or notebook_file(QUICKSTART))
    if any(state.name == CLUSTER for state in running_clusters()):
        raise ClusterError(
            f"cluster {CLUSTER!r} is running and the notebook would use it and end it; "
            f"look with `speedlab status`, end it with `speedlab stop`, then try again"
        )
    folder = Path("runs") / options.run
    if (kept := move_aside(folder)) is not None:
        print(f"the earlier run is now {kept}")
    try:
        with _progress(folder):
            failure = _execute(notebook, options)
    finally:
        _end_engines()
    if failure is not None:
        print(f"speedlab demo: {failure}", file=sys.stderr)
        return 1
    _print_results(folder, notebook)
    print(f"\ndone in {seconds_text(time.monotonic() - begin)}")
    return 0


def move_aside(folder: Path) -> Path | None:
    """Rename an existing run folder to the first free `<name>-before-<n>`.

    Args:
        folder: the run folder.

    Returns:
        The new path; None if there was no folder.

    Raises:
        ConfigError: engines still work on the run.
    """
    if not folder.exists():
        return None
    if _in_use(folder):
        raise ConfigError(f"{folder}: engines hold this run; `speedlab status` shows them, `speedlab stop` ends them")
    number = 1
    while (kept := folder.with_name(f"{folder.name}-before-{number}")).exists():
        number += 1
    return folder.rename(kept)


def _in_use(folder: Path) -> bool:
    try:
        status = RunFolder(folder).read_status()
    except RunFolderError:
        return False  # Not a run, or an incomplete one: move it like any other folder.
    held = any(state.token == status.token for state in running_clusters())
    return held and status.state not in (RunState.FINISHED, RunState.STOPPED)


def _read(path: Path) -> NotebookNode:
    import nbformat

    try:
        return nbformat.read(path, as_version=4)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; give the path of a notebook") from None
    except (nbformat.reader.NotJSONError, nbformat.ValidationError) as error:
        raise ConfigError(f"{path}: is no notebook: {error}") from None


def _execute(notebook: NotebookNode, options: DemoOptions) -> str | None:
    """Run all cells and print each first line. Return the error as text, or None."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    total = sum(cell.cell_type == "code" for cell in notebook.cells)
    done = 0

    def announce(cell: NotebookNode, cell_index: int) -> None:
        nonlocal done
        if cell.cell_type == "code":
            done += 1
            print(f"[{done}/{total}] {_first_line(cell.source)}", flush=True)

    client = NotebookClient(
        notebook,
        timeout=int(options.cell_timeout),
        resources={"metadata": {"path": str(Path.cwd())}},
        store_widget_state=False,  # Megabytes that are not needed here.
        on_cell_start=announce,
    )
    # Not TCP, where any user of the machine could connect.
    client.create_kernel_manager().transport = "ipc"
    with _interruptible():
        try:
            client.execute()
        except CellExecutionError as error:
            return f"cell {done} failed\n{_without_colours(str(error)).strip()}"
        except CellTimeoutError:
            return f"cell {done} took longer than {options.cell_timeout:g} s; --cell-timeout allows more"
        except DeadKernelError:
            return f"the kernel died in cell {done}; the machine may be out of memory"
    return None


def _first_line(source: str) -> str:
    lines = [line for line in source.splitlines() if line.strip()]
    return lines[0] + (" ..." if len(lines) > 1 else "") if lines else ""


def _without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C inside the block, so that engines are stopped."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _progress(folder: Path) -> Iterator[None]:
    """Print the progress of the run in `folder` every few seconds, as soon as it exists."""
    over = threading.Event()

    def watch() -> None:
        run = None
        shown = ""
        while not over.wait(_PROGRESS_SECONDS):
            try:
                run = run or Run(folder)
            except RunFolderError:
                continue  # The notebook has not started the run yet.
            run.feed.poll()
            line = progress_line(run.feed)
            if line != shown:
                print(f"        {line}", flush=True)
            shown = line
        if run is not None:
            run.feed.close()

    thread = threading.Thread(target=watch, name="speedlab-demo-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _end_engines() -> None:
    """Stop the engines after a failed notebook. A complete notebook stops its own engines."""
    if any(state.name == CLUSTER for state in running_clusters()):
        with deaf_to_interrupts():
            print("stopping engines ...", flush=True)
            Cluster.attach(CLUSTER).stop()


def _print_results(folder: Path, notebook: NotebookNode) -> None:
    run = Run(folder)
    try:
        run.feed.poll(files=True)
        ranks = len(run.feed.records)
        print(
            f"\nWhat each of the {ranks} ranks holds at each ZeRO stage, measured (and by the formula), and the median"
        )
        print("speed of its warm steps:\n")
        print(run.table())
        start, end = _heldout_losses(run)
        print(f"\nheld-out loss: {start} at the start, {end} after {run.step} steps")
    finally:
        run.feed.close()
    for text in _outputs(notebook, _SAMPLE_TAG):
        print(f"\nsample:\n{_indented(text)}")
    report = folder / "report.html"
    print(f"\nreport: {report}" if report.is_file() else "\nthe notebook wrote no report")


def _heldout_losses(run: Run) -> tuple[str, str]:
    """Return the first and the last held-out loss, as text."""
    first = next((event.details.get("heldout_loss") for event in run.events if event.kind == "evaluated"), None)
    later = [record.heldout_loss for record in run.records() if record.heldout_loss is not None]
    first = first if first is not None else (later[0] if later else None)
    last = later[-1] if later else None
    return _loss_text(first), _loss_text(last)


def _loss_text(loss: float | None) -> str:
    return "not measured" if loss is None else f"{loss:.3f}"


def _outputs(notebook: NotebookNode, tag: str) -> list[str]:
    """Return the output of each cell with this tag."""
    cells = [cell for cell in notebook.cells if tag in cell.metadata.get("tags", ())]
    return [
        "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout")
        for cell in cells
    ]


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.strip("\n").splitlines())
