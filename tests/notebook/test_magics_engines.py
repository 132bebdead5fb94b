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

from speedlab.cluster import Cluster, RankError, Run, output_folding
from speedlab.cluster.files import processes
from speedlab.telemetry.records import RunState

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
    monkeypatch.setattr(output_folding, "FOLD_SECONDS", PATIENT_SECONDS)


@pytest.fixture
def small_run(shell: InteractiveShell, tmp_path: Path) -> Iterator[Run]:
    """One of two ranks that would go on for long."""
    text = tmp_path / "text"
    text.mkdir()
    (text / "all.txt").write_text("".join(chr(97 + number % 26) for number in range(6000)))
    cluster: Cluster = shell.user_ns["cluster"]
    run = cluster.train(
        {
            "folder": tmp_path / "runs",
            "steps": 1_000_000,
            "model": {"layers": 2, "hidden": 32, "heads": 2, "ffn_hidden": 64, "context": 16},
            "data": {"source": str(text), "tokenizer": "bytes", "sequence_length": 16},
            "precision": "float32",
            "batch": {"global_size": 4, "micro_size": 2},
            "eval": {"every_steps": 0},
            "zero": 3,
        }
    )
    yield run
    try:
        if run.state is RunState.RUNNING:
            run.stop().wait(20)
    except BaseException:
        cluster.interrupt()  # The other tests have the same ranks.
        raise


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
def test_a_cell_may_await(shell: InteractiveShell, display: CapturingDisplayPublisher) -> None:
    code = "import asyncio\nasync def f():\n    await asyncio.sleep(0.01)\n    return 42\n"
    run(shell, f"%%ranks --wait\n{code}await asyncio.gather(f(), f())")
    assert final_text(display.outputs).splitlines()[:-1] == ["ranks 0–1: [42, 42]"]


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("bars", ["tqdm.auto", "tqdm.notebook", "tqdm"])
def test_progress_bars_go_to_their_end(shell: InteractiveShell, display: CapturingDisplayPublisher, bars: str) -> None:
    pytest.importorskip("tqdm")
    run(shell, f"%%ranks 0 --wait\nfrom {bars} import tqdm\nfor _ in tqdm(range(3), disable=False):\n    pass")
    line, _ = final_text(display.outputs).splitlines()
    assert re.fullmatch(r"rank 0: 100%\|█+\| 3/3 \[.*\]", line)


@pytest.mark.usefixtures("patient")
def test_pictures_and_tables_of_ranks(shell: InteractiveShell, display: CapturingDisplayPublisher) -> None:
    run(
        shell,
        "%%ranks\n"
        "from IPython.display import HTML, Image, clear_output, display\n"
        "print('gone')\n"
        "clear_output(wait=True)\n"
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


LIVE = """%%ranks --live --wait
from IPython.display import HTML, Image, clear_output, display
print('gone', end='')
clear_output(wait=True)
print(tuple(batch[0].shape), len(list(model.parameters())) > 0)
display(HTML('<b>drawn</b>'), Image(data=b'\\x89PNG\\r\\n\\x1a\\nrest', format='png'))
engine.global_step"""


@pytest.mark.usefixtures("patient")
def test_a_live_cell_runs_between_two_steps_and_the_run_goes_on(
    shell: InteractiveShell, display: CapturingDisplayPublisher, small_run: Run
) -> None:
    small_run.wait_until(2, timeout=60)
    run(shell, LIVE)
    lines = display.outputs[-1]["data"]["text/plain"].splitlines()
    step = int(lines[3].removeprefix("ranks 0–1: "))
    assert step >= 2
    assert lines[:2] == ["ranks 0–1: (2, 16) True", "ranks 0–1: <IPython.core.display.HTML object>"]
    assert re.fullmatch(rf"ranks 0–1 done after step {step}, which held it up for \S+ m?s", lines[4])
    assert display.outputs[-1]["data"]["text/html"].count("<b>drawn</b>") == 1
    assert display.outputs[-1]["data"]["text/html"].count("data:image/png;base64,iVBORw0KGgpyZXN0") == 1
    small_run.wait_until(step + 2, timeout=60)

    with pytest.raises(RankError, match="rank 1\n  ZeroDivisionError"):
        small_run.live("import os\nif os.environ['RANK'] == '1': 1 / 0").wait(20)
    after = small_run.step
    assert small_run.live("1 + 1", ranks=[0]).wait(20) == {0: "2"}
    small_run.wait_until(after + 2, timeout=60)
    with pytest.raises(SyntaxError):
        small_run.live("1 +")
    error = shell.run_cell("%%ranks --live\nx = [1,").error_in_exec
    assert str(error).endswith("    x = [1,\n        ^\nSyntaxError: '[' was never closed")
    assert error._render_traceback_() == [f"CommandError: {error}"]
    small_run.stop().wait(20)
    assert small_run.errors == []


def test_an_interrupt_ends_a_live_cell_and_pauses_its_run(
    shell: InteractiveShell, display: CapturingDisplayPublisher, small_run: Run, tmp_path: Path
) -> None:
    import _thread

    begun = tmp_path / "begun"

    def interrupt() -> None:
        wait_for(begun.exists, 30)
        _thread.interrupt_main()

    threading.Thread(target=interrupt).start()
    cell = f"%%ranks --live --wait\nimport time, pathlib\npathlib.Path({str(begun)!r}).touch()\ntime.sleep(60)"
    assert isinstance(shell.run_cell(cell).error_in_exec, KeyboardInterrupt)
    assert small_run.wait(20) is RunState.PAUSED
    assert small_run.errors == []
    step = small_run.step
    small_run.resume()
    assert small_run.wait_until(step + 2, timeout=30) >= step + 2


BROKEN = """
def broken(module, arguments):
    share = 0
    return 1 / share
model.register_forward_pre_hook(broken)
"""
STOPS = """%%ranks --live --wait
def look(step):
    breakpoint()
    return step + 1
look(41) if os.environ["RANK"] == "1" else engine.global_step
"""


@pytest.mark.usefixtures("patient")
def test_the_debugger_stops_in_a_live_cell_and_looks_at_what_failed(
    shell: InteractiveShell,
    display: CapturingDisplayPublisher,
    small_run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines: list[Any] = []

    def person(prompt: str) -> str:
        assert prompt == "rank 1 (Pdb) "
        line = lines.pop(0)
        if line is KeyboardInterrupt:
            raise KeyboardInterrupt
        return line

    def says(cell: str, *commands: Any) -> str:
        lines[:] = commands
        capsys.readouterr()
        run(shell, cell)
        assert lines == []
        return capsys.readouterr().out

    monkeypatch.setattr("builtins.input", person)
    run(shell, "%%ranks --live --wait\nimport os")
    session = says(STOPS, "p step", "w", "!step = 50", "c").splitlines()
    assert [re.sub(r"\S+\.py\(", "(", line) for line in session] == [
        "> (3)look()",
        "-> return step + 1",
        "41",
        "  (4)<module>()",
        '-> look(41) if os.environ["RANK"] == "1" else engine.global_step',
        "> (3)look()",
        "-> return step + 1",
    ]
    assert "rank 1: 51\n" in display.outputs[-1]["data"]["text/plain"]
    small_run.wait_until(small_run.step + 2, timeout=60)
    assert "rank 1 works on something" in str(shell.run_cell("%speedlab debug 1").error_in_exec)
    lines[:] = [KeyboardInterrupt]
    assert "BdbQuit" in str(shell.run_cell(STOPS).error_in_exec)
    small_run.wait_until(small_run.step + 2, timeout=60)

    small_run.live(BROKEN, ranks=[1]).wait(20)
    with pytest.raises(RankError, match="Look: %speedlab debug 1, or %%ranks 1"):
        small_run.wait(60)
    reported = says("%speedlab debug 1", "p share + 7", "up", "p type(self).__name__", "q")
    assert reported.startswith("rank 1: ZeroDivisionError: division by zero\n")
    assert "\n7\n" in reported
    assert "\n'GPT'\n" in reported
    assert "rank 0 keeps no exception" in str(shell.run_cell("%speedlab debug 0").error_in_exec)

    with pytest.raises(RankError):
        run(shell, "%%ranks 1 --wait\nvalue = {'a': 3}\nvalue['b']")
    assert "\n7\n" in says("%speedlab debug 1", "p value['a'] + 4", "q")
    assert "there is no rank 7;" in str(shell.run_cell("%speedlab debug 7").error_in_exec)
    assert "'x' is no rank" in str(shell.run_cell("%speedlab debug x").error_in_exec)


PLAIN = """%%ranks
import os, torch, torch.distributed as dist, speedlab.comm
speedlab.comm.join()
here = torch.full((1,), float(os.environ["RANK"]) + 1)
breakpoint()
dist.all_reduce(here)
here.item()
"""


@pytest.mark.usefixtures("patient")
def test_a_plain_cell_stops_at_its_breakpoint_and_the_cluster_stays_usable(
    shell: InteractiveShell,
    display: CapturingDisplayPublisher,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines: list[Any] = []
    prompts: list[str] = []
    by_rank: dict[str, list[str]] = {}

    def person(prompt: str) -> str:
        """On a slow machine prompts of two ranks may alternate: what `by_rank` has is for each."""
        prompts.append(prompt)
        line = by_rank[prompt].pop(0) if by_rank else lines.pop(0)
        if line is KeyboardInterrupt:
            raise KeyboardInterrupt
        return line

    monkeypatch.setattr("builtins.input", person)
    by_rank.update({f"rank {rank} (Pdb) ": ["p here.item() * 10", "c"] for rank in (0, 1)})
    run(shell, PLAIN)
    assert "ranks 0–1: 3.0\n" in display.outputs[-1]["data"]["text/plain"]
    assert {"10.0", "20.0"} <= set(capsys.readouterr().out.splitlines())
    assert sorted(prompts) == sorted(["rank 0 (Pdb) ", "rank 1 (Pdb) "] * 2)
    by_rank.clear()

    # Who leaves the first ends the cell there; the other one, which waits for it, is released.
    for leave in ("q", KeyboardInterrupt):
        lines[:], prompts[:] = [leave, "c"], []
        failed = shell.run_cell(PLAIN).error_in_exec
        assert isinstance(failed, RankError)
        assert failed.by_rank[int(prompts[0][5])].kind == "BdbQuit"
        assert "BdbQuit: the debugger was left at its prompt" in failed._render_traceback_()[1]
        assert lines == []
    lines[:] = ["c", "c"]
    run(shell, PLAIN)
    assert "ranks 0–1: 3.0\n" in display.outputs[-1]["data"]["text/plain"]

    # Where nobody is in front of a prompt it goes on: a function of an earlier cell may stop.
    run(shell, "%%ranks --wait\ndef stopping(number):\n    breakpoint()\n    return number")
    run(shell, "%%ranks\nstopping(41) + 1")
    said = final_text(display.outputs)
    assert "no prompt waits for this cell" in said
    assert "ranks 0–1: 42\n" in said
    by_rank.update({f"rank {rank} (Pdb) ": ["!number = 6", "c"] for rank in (0, 1)})
    run(shell, "%%ranks --wait\nstopping(41) + 1")
    assert "ranks 0–1: 7\n" in display.outputs[-1]["data"]["text/plain"]


@pytest.mark.usefixtures("display")
def test_without_a_run_there_are_no_steps_to_be_between(shell: InteractiveShell) -> None:
    error = shell.run_cell("%%ranks --live\n1").error_in_exec
    assert "no run is on in cluster" in str(error)
    assert "%%ranks without --live runs it now" in str(error)


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
                f"from speedlab.cluster import output_folding\noutput_folding.FOLD_SECONDS = {PATIENT_SECONDS}",
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
