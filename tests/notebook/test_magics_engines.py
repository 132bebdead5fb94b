"""The magics against two real engines: a shell, and a notebook that is executed by a real kernel."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from cluster_helpers import is_gone, wait_for
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from nbclient import NotebookClient
from speedlab_notebook import load_ipython_extension, unload_ipython_extension
from traitlets.config import Config

from speedlab.cluster import Cluster, RankError, folding, processes

NAME = "test-magics-two"
PATIENT_SECONDS = 30.0


@pytest.fixture(scope="module")
def ipython_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("magics")
        patch.setenv("IPYTHONDIR", str(path / "ipython"))
        for kind in ("CONFIG", "DATA", "RUNTIME"):
            patch.setenv(f"JUPYTER_{kind}_DIR", str(path / kind.lower()))
        patch.chdir(path)
        yield path


@pytest.fixture(scope="module")
def shell(ipython_directory: Path) -> Iterator[InteractiveShell]:
    """A shell in which `%speedlab start` has started two engines; they are stopped, and gone, at the end."""
    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell.instance(config=config)
    shell.kernel = object()  # As in a notebook: displays can be updated.
    load_ipython_extension(shell)
    shell.run_cell(f"%speedlab start --engines 2 --name {NAME} --device cpu").raise_error()
    cluster: Cluster = shell.user_ns["cluster"]
    token = psutil.Process(cluster.status()[0].pid).environ()[processes.TOKEN]
    pids = [process.pid for process in processes.marked(token)]
    assert len(pids) >= 3  # Two engines and the controller.
    try:
        yield shell
    finally:
        shell.run_cell("%speedlab stop --yes").raise_error()
        unload_ipython_extension(shell)
        InteractiveShell.clear_instance()
    assert [pid for pid in pids if not is_gone(pid)] == []
    assert not cluster.directory.exists()


@pytest.fixture
def display(shell: InteractiveShell) -> CapturingDisplayPublisher:
    shell.display_pub = display = CapturingDisplayPublisher()
    return display


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines wait for the same ones of a rank that a busy machine lets run much later."""
    monkeypatch.setattr(folding, "FOLD_SECONDS", PATIENT_SECONDS)


def run(shell: InteractiveShell, code: str) -> None:
    shell.run_cell(code).raise_error()


def final_text(outputs: list[dict[str, Any]], display_id: str | None = None) -> str:
    """The last state of the display (of this id) once its cell has ended."""

    def ended() -> str:
        texts = [
            output["data"]["text/plain"]
            for output in outputs
            if display_id in (None, output["transient"]["display_id"])
        ]
        return texts[-1] if re.search(r"(done in|failed after) \S+ m?s$", texts[-1]) else ""

    return wait_for(ended, 20)


@pytest.mark.usefixtures("patient")
def test_equal_lines_and_the_last_expression(shell: InteractiveShell, display: CapturingDisplayPublisher) -> None:
    run(shell, "%%ranks\nimport os\nprint('hello')\nprint(os.environ['RANK'])\n40 + 2")
    lines = final_text(display.outputs).splitlines()
    assert sorted(lines[:-1]) == sorted(["ranks 0–1: hello", "rank 0: 0", "rank 1: 1", "ranks 0–1: 42"])
    assert lines[0] == "ranks 0–1: hello"


def test_the_cell_returns_at_once_and_cells_do_not_mix(
    shell: InteractiveShell, display: CapturingDisplayPublisher
) -> None:
    run(shell, "%%ranks 0\nimport time\nprint('first')\ntime.sleep(0.7)\nprint('first again')")
    first_id = display.outputs[0]["transient"]["display_id"]
    before = len(display.outputs)
    run(shell, "%%ranks 0\nprint('second')")
    second = next(o for o in display.outputs[before:] if o["transient"]["display_id"] != first_id)
    assert second["data"]["text/plain"] == "rank 0 is busy; this cell runs when it is done"  # So the first goes on.
    second_id = second["transient"]["display_id"]
    assert final_text(display.outputs, second_id).splitlines()[:-1] == ["rank 0: second"]
    assert final_text(display.outputs, first_id).splitlines()[:-1] == ["rank 0: first", "rank 0: first again"]
    times = [output for output in display.outputs if output["transient"]["display_id"] == first_id]
    assert len(times) <= 12  # At most ten updates a second.


@pytest.mark.usefixtures("patient")
def test_pictures_and_tables_of_ranks(shell: InteractiveShell, display: CapturingDisplayPublisher) -> None:
    run(
        shell,
        "%%ranks\n"
        "from IPython.display import HTML, Image, display\n"
        "print('before')\n"
        "display(Image(data=b'\\x89PNG\\r\\n\\x1a\\nrest', format='png'))\n"
        "HTML('<table><tr><td>cell</td></tr></table>')",
    )
    lines = final_text(display.outputs).splitlines()
    assert lines[:-1] == [
        "ranks 0–1: before",
        "ranks 0–1: <IPython.core.display.Image object>",
        "ranks 0–1: <IPython.core.display.HTML object>",
    ]
    page = display.outputs[-1]["data"]["text/html"]
    assert page.count("data:image/png;base64,iVBORw0KGgpyZXN0") == 1
    assert page.count("<td>cell</td>") == 1


def test_a_semicolon_hides_the_result(shell: InteractiveShell, display: CapturingDisplayPublisher) -> None:
    run(shell, "%%ranks\nfrom IPython.display import HTML\nHTML('<b>hidden</b>');")
    assert len(final_text(display.outputs).splitlines()) == 1
    assert "hidden" not in display.outputs[-1]["data"]["text/html"]


def test_errors_show_the_cell_and_nothing_of_the_transport(
    shell: InteractiveShell, display: CapturingDisplayPublisher
) -> None:
    run(shell, "%%ranks 1\nprint('so far')\n1 / 0")
    text = final_text(display.outputs)
    assert text.startswith("rank 1: so far\nRankError on rank 1\n  ZeroDivisionError: division by zero\n")
    page = display.outputs[-1]["data"]["text/html"]
    assert "1 / 0" in page
    assert "speedlab" not in page.partition("<details>")[2].partition("</details>")[0]
    error = shell.run_cell("%%ranks --wait\nraise ValueError('no')").error_in_exec
    assert isinstance(error, RankError)
    assert set(error.by_rank) == {0, 1}


def test_an_interrupt_of_a_waiting_cell_frees_the_ranks(
    shell: InteractiveShell, display: CapturingDisplayPublisher
) -> None:
    import _thread

    def interrupt() -> None:
        wait_for(lambda: display.outputs and "in it" in display.outputs[-1]["data"]["text/plain"], 20)
        _thread.interrupt_main()

    threading.Thread(target=interrupt).start()
    result = shell.run_cell("%%ranks --wait\nprint('in it', flush=True)\nimport time; time.sleep(60)")
    assert isinstance(result.error_in_exec, KeyboardInterrupt)
    wait_for(lambda: {status.state for status in shell.user_ns["cluster"].status()} == {"idle"})
    assert shell.user_ns["cluster"].submit(abs, -3).result(10) == [3, 3]


def test_status_shows_the_engines(shell: InteractiveShell, display: CapturingDisplayPublisher) -> None:
    run(shell, "%speedlab status")
    rows = display.outputs[-1]["data"]["text/plain"].splitlines()
    pids = [str(status.pid) for status in shell.user_ns["cluster"].status()]
    assert rows[0] == f"cluster {NAME}"
    assert [row.split()[-4] for row in rows[2:4]] == pids
    assert rows[4] == "no run is under way"


def test_in_a_kernel_output_reaches_the_cell_it_belongs_to(shell: InteractiveShell, ipython_directory: Path) -> None:
    """A second kernel finds the cluster; what comes while a later cell runs is stored with the cell that asked."""
    notebook = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_code_cell(source)
            for source in (
                "%load_ext speedlab\n"
                f"import speedlab.cluster.folding\nspeedlab.cluster.folding.FOLD_SECONDS = {PATIENT_SECONDS}",
                "%%ranks\nimport time\ntime.sleep(0.5)\nprint('late')",
                "import time\ntime.sleep(1.5)",
                "%%ranks --wait\nprint('waited for')",
                "%speedlab status",
            )
        ]
    )
    NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    outputs = [cell.outputs for cell in notebook.cells]
    (shown,) = outputs[1]
    assert "ranks 0–1: late" in shown.data["text/plain"]
    assert outputs[2] == []
    (shown,) = outputs[3]
    assert "ranks 0–1: waited for" in shown.data["text/plain"]
    assert f"cluster {NAME}" in outputs[4][0].data["text/plain"]
