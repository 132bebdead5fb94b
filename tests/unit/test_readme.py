"""Shell lines of README and of each guide, as a console session: real parsers read all, the short ones are executed."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import tyro
from markdown_blocks import GUIDES, README, ROOT, blocks_of
from telemetry_samples import make_folder, make_record

from speedlab import cli
from speedlab.cluster.files.cluster_dir import known_clusters
from speedlab.config import RunConfig
from speedlab.telemetry.proof import Proof, write_proof
from speedlab.telemetry.records import RunState
from speedlab.telemetry.run_folder import Status
from speedlab.telemetry.writer import RecordWriter

LONG = {"train", "start", "export", "calibrate", "demo", "bench", "stop"}
"""Commands that are only parsed: they start engines or need what these leave."""

SESSION, LOOPS = "tests/notebook/test_readme_session.py", "tests/ranks/test_guides.py"
RUN_BY = {
    "README": {"%speedlab": SESSION, "cluster.train": SESSION, "from_pretrained": LOOPS},
    "first-run": {"%speedlab": SESSION, "cluster.train": SESSION},
    "fine-tune": {"from_pretrained": LOOPS},
    "own-model-and-data": {"cluster.train": SESSION, "engine": LOOPS},
    "slow-networks": {"cluster": SESSION},
    "plain-torch": {"init_process_group": LOOPS},
    "script": {"": LOOPS},
    "proof": {"": LOOPS},
}
"""For each page with Python: a word in a block -> the test that runs such blocks."""

PAGES = [README, *GUIDES]


def lines_of(path: Path) -> list[list[str]]:
    blocks = [block for block in blocks_of(path) if block.language == "sh"]
    return [
        words for block in blocks for line in block.code.splitlines() if (words := shlex.split(line, comments=True))
    ]


def name_of(page: Path) -> str:
    return f"{page.parent.name}/{page.stem}"


class Parsed(Exception):  # noqa: N818  # what has happened
    """The command line was read without a complaint."""


@pytest.fixture
def console(monkeypatch, tmp_path: Path) -> Path:
    """An empty folder to be in, with a run and DeepSpeed's file; no cluster or calibration of the person's is seen."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (json,) = (block.code for path in GUIDES for block in blocks_of(path) if block.language == "json")
    Path("ds_config.json").write_text(json)
    folder = make_folder(tmp_path / "runs", "run-1", steps=2)
    with RecordWriter(folder, 0, stream_hz=10) as writer:
        for step in (1, 2):
            writer.write(make_record(step))
    write_proof(folder.path, Proof(step=0, form="cheap", seconds=0.1, findings=()))
    folder.write_status(Status(state=RunState.FINISHED, step=2, steps=2))
    Path("config.yaml").write_text(RunConfig().to_yaml())
    return tmp_path


def parse_only(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    real = tyro.cli

    def parse(*given: Any, **named: Any) -> None:
        real(*given, **named)
        raise Parsed

    with monkeypatch.context() as patch:
        patch.setattr(tyro, "cli", parse)
        with pytest.raises(Parsed):
            cli.main(arguments)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(line[0] == "speedlab" for line in lines_of(page))], ids=name_of
)
def test_the_console_session_of_a_page(page: Path, console: Path, monkeypatch, capsys) -> None:
    for _, command, *arguments in (words for words in lines_of(page) if words[0] == "speedlab"):
        if command in LONG:
            parse_only(monkeypatch, [command, *arguments])
            continue
        target = Path(arguments.pop()) if arguments and arguments[:-1] and arguments[-2] == ">" else None
        status = cli.main([command, *(word for word in arguments if word != ">")])
        shown = capsys.readouterr()
        assert status == 0, (command, arguments, shown.err)
        if target is not None:
            target.write_text(shown.out)
    if page.stem == "terminal":
        assert (console / "runs/run-1/report.html").is_file()
    assert list(known_clusters()) == [], "no line that is executed starts engines"


def test_the_terminal_page_shows_nearly_every_command() -> None:
    (page,) = (page for page in GUIDES if page.stem == "terminal")
    shown = {words[1] for words in lines_of(page)}
    assert set(cli.COMMANDS) - shown == {"plan", "trace", "calibrate", "demo", "bench", "guide"}


def test_targets_of_make_exist() -> None:
    targets = {line.partition(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if ":" in line}
    asked = [words for path in (README, *GUIDES) for words in lines_of(path) if words[0] == "make"]
    assert asked
    assert {words[1] for words in asked} <= targets


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_run_somewhere(page: Path) -> None:
    blocks = blocks_of(page)
    assert {block.language for block in blocks} <= {"", "sh", "python", "json", "text"}  # Diagrams have no language.
    assert {words[0] for words in lines_of(page)} <= {"make", "speedlab"}
    tests = RUN_BY.get(page.stem, {})
    for block in (block for block in blocks if block.language == "python"):
        assert any(word in block.code for word in tests), f"{page.name}:{block.line} is run by no test"
    for path in tests.values():
        assert page.name in (ROOT / path).read_text(encoding="utf-8") or page == README


def test_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


def test_it_names_the_command_that_runs_all_tests() -> None:
    """Continuous integration calls it."""
    assert ["make", "test"] in [words[:2] for words in lines_of(README)]
