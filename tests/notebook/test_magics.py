"""`%speedlab` in a real IPython shell, with clusters and runs that are made up here."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.error import UsageError
from magics_fakes import RECORD, FakeCluster, Notebook, make_run
from speedlab_notebook import current, load_ipython_extension, unload_ipython_extension
from speedlab_notebook.magics import commands, speedlab_magic

from speedlab.cluster.known_runs import remember_run
from speedlab.config import RunConfig
from speedlab.telemetry.records import RunState, Span
from speedlab.telemetry.writer import RecordWriter

# Loading


def test_loading_twice_and_unloading(notebook: Notebook) -> None:
    shell = notebook.shell
    load_ipython_extension(shell)
    load_ipython_extension(shell)
    assert len(shell.Completer.custom_matchers) == 1
    unload_ipython_extension(shell)
    assert shell.find_line_magic("speedlab") is None
    assert shell.find_cell_magic("ranks") is None
    assert shell.Completer.custom_matchers == []
    assert "<step" not in shell.display_formatter.format(RECORD)[0]["text/plain"]
    unload_ipython_extension(shell)  # Nothing is left to take out, and that is no error.


def test_loading_imports_nothing_heavy(tmp_path: Path) -> None:
    code = """
import sys
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config
config = Config(); config.HistoryManager.enabled = False
shell = InteractiveShell.instance(config=config)
shell.run_line_magic("load_ext", "speedlab")
shell.run_line_magic("load_ext", "speedlab")
print(*sorted({"torch", "numba", "plotly", "ipyparallel", "ipywidgets", "anywidget"} & set(sys.modules)))
"""
    environment = {"IPYTHONDIR": str(tmp_path), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=environment
    )
    rest = done.stdout.splitlines()
    assert rest[0].startswith("The speedlab extension is already loaded")
    assert rest[-1] == ""


# The line


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("statsu", "unknown subcommand 'statsu'; the nearest is 'status'"),
        ("zzz", "unknown subcommand 'zzz'; known: start, status, panel"),
        ("status --nme x", "unknown option '--nme'; the nearest is '--name'"),
        ("start --engines", "--engines needs a value, as in --engines N"),
        ("start --engines --name x", "--engines needs a value"),
        ("start --engines 0", "'0' is not a whole number of at least 1"),
        ("start --engines=two", "'two' is not a whole number"),
        ("layout --rank -1", "--rank needs a value"),
        ("layout --rank=-1", "'-1' is not a whole number of at least 0"),
        ("start --device gpu", "unknown value 'gpu'; the nearest is 'cpu'"),
        ("stop --yes=1", "--yes is a switch and takes no value"),
        ("status here", "%speedlab status takes no 'here'"),
        ("panel one two", "one run at a time, not 'one' and 'two'"),
        ("start --name 'x", "quotes come in pairs"),
    ],
)
def test_what_is_wrong_in_a_line_is_named(line: str, complaint: str) -> None:
    with pytest.raises(UsageError) as caught:
        commands.parse(line)
    assert complaint in str(caught.value)


def test_lines_are_read() -> None:
    command, arguments = commands.parse("start --engines=4 --name 'my cluster' --device cpu")
    assert command is not None
    assert (command.name, arguments) == ("start", {"engines": 4, "name": "my cluster", "device": "cpu"})
    assert commands.parse("config quickstart --json")[1] == {"run": "quickstart", "json": True}
    assert commands.parse("layout --parameters --rank 0")[1] == {"parameters": True, "rank": 0}  # Ranks begin with 0.
    # README and the design write comments behind magics, and IPython leaves them in the line.
    assert commands.parse("start --engines 4   # it's one engine per GPU")[1] == {"engines": 4}
    assert commands.parse("trace --output a#1.json")[1] == {"output": "a#1.json"}
    for line in ("", "--help", "help", "# nothing"):
        assert commands.parse(line) == (None, {})


def test_every_subcommand_has_an_example_that_is_right_and_help(notebook: Notebook) -> None:
    for command in commands.COMMANDS.values():
        assert command.example.startswith("%speedlab ")
        found, _ = commands.parse(command.example.removeprefix("%speedlab "))
        assert found is command
        assert command.description in notebook.run(f"%speedlab {command.name} --help")
        assert command.example in commands.help_text()
    assert notebook.run("%speedlab") == commands.help_text() + "\n"
    magic = notebook.shell.find_line_magic("speedlab")
    assert notebook.shell.inspector.info(magic)["docstring"] == commands.help_text()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("%speedlab st", {"start", "status", "stop"}),
        ("%speedlab start --d", {"--device"}),
        ("%speedlab start --device c", {"cpu", "cuda"}),
        ("%speedlab start --engines 2 --e", set()),
        ("%speedlab stop --", {"--name", "--yes", "--help"}),
        ("%speedlab dash q", {"quick-start"}),
        ("%speedlab dash quick-s", {"quick-start"}),
        ("%speedlab dash quick-start ", {"slow.run", "--help"}),
        ("%speedlab dash ", {"quick-start", "slow.run", "--help"}),
        ("%speedlab report slow.run ", {"--help"}),
        ("%%ranks 0 --w", {"--wait"}),
    ],
)
def test_completion(notebook: Notebook, line: str, expected: set[str]) -> None:
    cluster = FakeCluster()
    make_run(cluster, "quick-start")
    make_run(cluster, "slow.run")
    with provisionalcompleter():
        found = list(notebook.shell.Completer.completions(line, len(line)))
    if expected:
        assert {completion.text for completion in found} == expected
        assert {line[completion.start :] for completion in found} == {line.rpartition(" ")[2]}
    else:
        assert not {completion.text for completion in found} & {"--engines"}


# Subcommands


def test_start_pushes_the_cluster_and_says_what_runs(notebook: Notebook) -> None:
    text = notebook.run("%speedlab start --engines 2 --name x --device cpu")
    cluster = notebook.shell.user_ns["cluster"]
    assert (cluster.name, cluster.asked) == ("x", (2, "cpu", None))
    assert text.startswith("cluster 'x': 2 engines on cpu <0> · ready after ")
    assert "was running" in notebook.run("%speedlab start --name x")
    error = notebook.error("%speedlab start --engines 3 --name x")
    assert isinstance(error, speedlab_magic.CommandError)
    reported = "cluster 'x' runs with 2 engines, and 3 were asked for; stop it first"
    assert str(error) == f"{reported}\nmore: speedlab guide trouble engines"


def test_a_pretended_link_is_told_as_pretended(notebook: Notebook) -> None:
    text = notebook.run("%speedlab start --engines 2 --device cpu --link '1 Gbit/s 1 ms'")
    assert text.startswith("cluster 'default': 2 engines on cpu <0>, over a pretended link of 1 Gbit/s 1 ms · ready")
    notebook.run("%speedlab status")
    assert notebook.last("text/plain").startswith("cluster default, over a pretended link of 1 Gbit/s 1 ms\n")


def test_a_slow_start_says_what_it_does(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = threading.Event()
    monkeypatch.setattr(speedlab_magic, "SAY_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(speedlab_magic, "print", lambda *words, **_: (print(*words), printed.set()), raising=False)
    made = FakeCluster.__init__

    def slow(self: FakeCluster, *arguments: Any, **keywords: Any) -> None:
        assert printed.wait(10)
        made(self, *arguments, **keywords)

    monkeypatch.setattr(FakeCluster, "__init__", slow)
    begins = "starting 2 engines of cluster 'default'; torch is imported"
    assert notebook.run("%speedlab start --engines 2").startswith(begins)


def test_errors_are_shown_without_a_traceback(notebook: Notebook) -> None:
    notebook.error("%speedlab interrupt")
    text = notebook.capsys.readouterr().out
    assert text.strip() == "CommandError: no cluster runs; speedlab.Cluster() starts one"


def test_status_is_a_table_and_escapes_what_it_shows(notebook: Notebook) -> None:
    assert notebook.run("%speedlab status") == "no cluster runs; %speedlab start starts one\n"
    cluster = FakeCluster(name="here")
    FakeCluster(name="there")
    make_run(cluster, "quickstart", RunState.PAUSED)
    (cluster.directory / "runs/quickstart/records/rank-0.jsonl").write_text(
        f"{replace(RECORD, rank=0).to_json()}\n{replace(RECORD, rank=0, step=57).to_json()}\n{{half a li"
    )
    cluster.engine_states[1] = "busy"
    notebook.run("%speedlab status --name here")
    page = notebook.last()
    assert "cpu &lt;0&gt;" in page
    assert "cpu <0>" not in page
    assert notebook.last("text/plain").splitlines() == [
        "cluster here",
        "engine  rank  device   process  state   memory",
        "     5     0  cpu <0>      100  idle   256 MiB",
        "     6     1  cpu <0>      101  busy   256 MiB",
        "run 'quickstart' is paused at step 57 of 200",
        "also running: there; %speedlab status --name there",
    ]
    assert notebook.shell.user_ns["cluster"] is cluster


def test_a_name_of_the_user_is_not_overwritten(notebook: Notebook) -> None:
    FakeCluster()
    notebook.run("cluster = 'mine'")
    notebook.run("%speedlab status")
    assert notebook.shell.user_ns["cluster"] == "mine"


def test_stop_asks_for_yes_while_a_run_has_not_ended(notebook: Notebook) -> None:
    assert notebook.run("%speedlab stop") == "no cluster runs, so there is nothing to stop\n"
    cluster = FakeCluster()
    folder = make_run(cluster, "quickstart", RunState.PAUSED)
    error = str(notebook.error("%speedlab stop"))
    assert "run 'quickstart' is paused at step 12 of 200 on cluster 'default'" in error
    assert "`%speedlab stop --yes`" in error
    assert cluster.running
    assert "is stopped" in notebook.run("%speedlab stop --yes")
    assert not cluster.running

    cluster = FakeCluster()
    folder.write_status(replace(folder.read_status(), state=RunState.FINISHED))
    notebook.run("%speedlab stop")
    assert not cluster.running


@pytest.mark.parametrize("status", ['{"state"', "[]", None], ids=["no JSON", "no object", "none"])
def test_a_damaged_run_beside_others_stops_no_command(notebook: Notebook, status: str | None) -> None:
    cluster = FakeCluster()
    make_run(cluster, "quickstart", RunState.PAUSED)
    file = make_run(cluster, "damaged", RunState.FINISHED).path / "status.json"
    remember_run(cluster, file.parent)
    file.unlink() if status is None else file.write_text(status)
    notebook.run("%speedlab status")
    assert "run 'quickstart' is paused at step 12 of 200" in notebook.last("text/plain")
    assert "run 'quickstart' is paused" in str(notebook.error("%speedlab stop"))
    notebook.run("%speedlab stop --yes")
    assert not cluster.running


def test_a_file_that_cannot_be_written_is_told_without_a_traceback(notebook: Notebook) -> None:
    report = make_run(FakeCluster(), "quickstart", RunState.FINISHED).path / "report.html"
    report.mkdir()
    assert str(notebook.error("%speedlab report quickstart")) == f"{report}: Is a directory"


def test_interrupt_names_the_ranks_that_go_on(notebook: Notebook) -> None:
    cluster = FakeCluster()
    cluster.interrupted = [0]
    text = notebook.run("%speedlab interrupt")
    assert text.splitlines() == [
        "rank 0 of cluster 'default': idle, with what they held",
        "rank 1: did not stop; cluster.restart(1) ends that engine and starts a new one",
    ]


def test_attach_brings_back_names_and_views(notebook: Notebook) -> None:
    cluster = FakeCluster()
    text = notebook.run("%speedlab attach")
    assert "it has no run yet" in text
    assert notebook.shown == [("panel", cluster, None)]

    notebook.shown.clear()
    make_run(cluster, "quickstart")
    notebook.run("%speedlab attach")
    run = notebook.shell.user_ns["run"]
    assert run.name == "quickstart"
    assert notebook.shell.user_ns["cluster"] is cluster
    assert notebook.shown == [("panel", cluster, run), ("dashboard", run)]

    notebook.shown.clear()
    cluster.running = False
    assert "its engines are gone" in notebook.run("%speedlab attach quickstart")
    assert [name for name, *_ in notebook.shown] == ["dashboard"]
    assert "no run 'quick'" in str(notebook.error("%speedlab attach quick"))


def test_dash_and_panel_take_the_run_under_way(notebook: Notebook) -> None:
    cluster = FakeCluster()
    notebook.run("%speedlab panel")
    assert notebook.shown.pop() == ("panel", cluster, None)

    old = make_run(cluster, "old", RunState.RUNNING)
    notebook.run("%speedlab dash")
    held = notebook.shell.user_ns["run"]
    assert notebook.shown.pop() == ("dashboard", held)
    old.write_status(replace(old.read_status(), state=RunState.FINISHED))
    notebook.run("%speedlab dash")
    assert notebook.shown.pop() == ("dashboard", held)  # Nothing is newer.

    make_run(cluster, "new")
    notebook.run("%speedlab panel")
    assert notebook.shown.pop()[2].name == "new"
    assert notebook.shell.user_ns["run"].name == "new"
    notebook.run("%speedlab dash old")
    assert notebook.shown.pop()[1].name == "old"


def test_panel_without_engines(notebook: Notebook) -> None:
    notebook.run("%speedlab panel")
    assert notebook.shown == [("panel", None, None)]


def test_config_of_nothing_and_of_a_run(notebook: Notebook) -> None:
    from speedlab.config import annotated_yaml

    assert notebook.run("%speedlab config") == annotated_yaml(RunConfig()).rstrip() + "\n"
    assert notebook.run("%speedlab config --json") == RunConfig().to_json() + "\n"
    make_run(FakeCluster(), "quickstart")
    assert "stage: 3" in notebook.run("%speedlab config quickstart")
    assert '"name": "quickstart"' in notebook.run("%speedlab config --present --json")


def test_report_is_written_and_linked(notebook: Notebook) -> None:
    make_run(FakeCluster(), "quickstart", RunState.FINISHED)
    notebook.run("%speedlab report quickstart")
    assert 'href="runs/quickstart/report.html"' in notebook.last()
    assert Path("runs/quickstart/report.html").stat().st_size > 1000


def test_what_is_on_the_disk_is_shown_when_no_engines_run(notebook: Notebook) -> None:
    """After `%speedlab stop`, and in a kernel that knows nothing of the run yet."""
    assert "there is no run" in str(notebook.error("%speedlab report"))
    cluster = FakeCluster()
    make_run(cluster, "kept", RunState.STOPPED)
    notebook.run("%speedlab stop")
    for known in (True, False):
        if not known:
            notebook.shell.user_ns.pop("run")
        notebook.run("%speedlab report")
        assert "runs/kept/report.html" in notebook.last("text/plain")
        notebook.run("%speedlab dash")
        assert notebook.shown.pop()[1].name == "kept"
        assert 'name: "kept"' in notebook.run("%speedlab config --present")


def test_trace_is_written_and_linked(notebook: Notebook) -> None:
    folder = make_run(FakeCluster(), "quickstart", RunState.FINISHED)
    assert "there is no timeline of a step" in str(notebook.error("%speedlab trace quickstart"))
    with RecordWriter(folder, 0, stream_hz=10) as writer:
        for step in (1, 2):
            span = Span("F", 0, 0, 0.0, 0.5)
            writer.write(replace(RECORD, rank=0, step=step, timeline=[span]))
    notebook.run("%speedlab trace quickstart --step 1 --output one.json")
    assert 'href="one.json"' in notebook.last()
    assert "step 1 as a Chrome trace" in notebook.last()
    assert '"dur":500000.0' in Path("one.json").read_text()


def test_guides_are_shown(notebook: Notebook) -> None:
    assert "usage: guide NAME [SECTION]" in notebook.run("%speedlab guide")
    notebook.run("%speedlab guide trouble --section memory")
    assert notebook.last("text/markdown").startswith("## memory\n")
    assert "there is no guide 'troubel'; did you mean 'trouble'?" in str(notebook.error("%speedlab guide troubel"))
    assert commands.complete("%speedlab guide tr", "tr", list) == ["trouble"]


def test_runs_of_the_cluster_are_found_from_another_directory(
    notebook: Notebook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = FakeCluster()
    remember_run(cluster, make_run(cluster, "quickstart").path)  # type: ignore[arg-type]  # its directory is all that is used
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert [folder.name for folder in current.active_runs(cluster)] == ["quickstart"]  # type: ignore[arg-type]


def test_a_plan_is_shown_and_what_cannot_be_planned_is_refused(notebook: Notebook) -> None:
    line = '%speedlab plan gpt2-xl --machines "1x8 A100-80" --zero 3 --micro 4 --global 256'
    notebook.run(line)
    assert "fits: " in notebook.last()
    notebook.run(f"{line} --search")
    assert "limited by" in notebook.last()
    refused = notebook.error('%speedlab plan gpt3-17b --machines "8 A100-80"')
    assert isinstance(refused, speedlab_magic.CommandError)
    assert "nearest: gpt3-175b" in str(refused)
