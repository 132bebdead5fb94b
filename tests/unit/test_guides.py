"""The guides: printed by a command, found by errors, and true: what they quote and name is there."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from import_graph import PACKAGES, ROOT, sources
from markdown_blocks import GUIDES, README, blocks_of
from messages import faults, messages

from speedlab import cli
from speedlab.cluster.errors import ClusterError
from speedlab.cluster.known_runs import RunError
from speedlab.config import ConfigError, RunConfig
from speedlab.config.errors import _SECTIONS, more_in, with_more
from speedlab.display.documentation import FOLDER, KINDS, guide_file, names, sections
from speedlab.layout import LayoutError
from speedlab.telemetry.checkpoint_index import CheckpointError
from speedlab.telemetry.run_folder import RunFolderError

TROUBLE = guide_file("trouble")
PAGES = [README, *GUIDES]
LONGEST = 35
"""Words of a sentence."""
OTHERS = ("torchrun ", "pip ", "python ")
"""Programs that are not ours, whose options nobody here knows."""


def printed(capsys, *arguments: str) -> str:
    assert cli.main(["guide", *arguments]) == 0
    return capsys.readouterr().out


def test_the_command_lists_and_prints_them(capsys) -> None:
    listed = printed(capsys)
    assert sorted(map(guide_file, names())) == GUIDES
    for name in names():
        assert re.search(rf"^  {name} +\w", listed, re.MULTILINE)
        assert printed(capsys, name).strip() == guide_file(name).read_text(encoding="utf-8").strip()
    assert {"script", "trouble"} <= set(names())


def test_the_list_has_a_heading_for_each_folder(capsys) -> None:
    listed = printed(capsys)
    folders = {path.parent.relative_to(FOLDER).as_posix().removeprefix(".") for path in GUIDES}
    assert folders <= set(KINDS)
    assert {folder for folder, heading in KINDS.items() if f"\n\n{heading}\n  " in listed} == folders


def test_stems_differ_but_for_those_of_decisions() -> None:
    stems = [path.stem for path in GUIDES if path.parent.name != "decisions"]
    assert len(stems) == len(set(stems))


def test_an_old_name_finds_its_guide() -> None:
    assert guide_file("measured") == guide_file("performance") == FOLDER / "performance.md"


def test_one_section_is_printed_alone(capsys) -> None:
    text = printed(capsys, "trouble", "memory")
    assert text.startswith("## memory\n")
    assert text.count("\n## ") == 0
    assert "Out of memory on rank" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["troubel"], "there is no guide 'troubel'; did you mean 'trouble'?"),
        (["x"], "there is no guide 'x'; there are: "),
        (["trouble", "memry"], "there is no section 'memry'; did you mean 'memory'?"),
    ],
)
def test_what_there_is_not_is_told(capsys, arguments: list[str], message: str) -> None:
    assert cli.main(["guide", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_line_of_code_is_no_heading() -> None:
    page = "# Title\n## one\n```sh\n## not this\n```\ntext\n## two\nend\n"
    assert {heading: body.count("\n") for heading, body in sections(page).items()} == {"one": 5, "two": 2}


def test_errors_name_sections_that_there_are() -> None:
    asked = {
        node.args[0].value
        for source, _ in sources().values()
        if f"{more_in.__name__}(" in source
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == more_in.__name__
        if isinstance(node.args[0], ast.Constant)
    }
    assert len(asked) >= 4
    assert asked <= set(sections(TROUBLE.read_text(encoding="utf-8")))
    assert more_in("memory") == "more: speedlab guide trouble memory"


def test_a_refusal_names_the_section_that_its_reader_wants() -> None:
    assert set(_SECTIONS.values()) <= set(sections(TROUBLE.read_text(encoding="utf-8")))
    with pytest.raises(ConfigError) as refused:
        RunConfig(batch={"global_size": 7, "micro_size": 2}).batch.resolve(2)
    assert refused.value._render_traceback_()[0].splitlines()[1:] == [more_in("batch")]
    assert LayoutError("tp 3: …")._render_traceback_()[-1] == more_in("layout")
    assert with_more(ConfigError(problems=[("parallel", "tp 3: …")])) == f"parallel: tp 3: …\n{more_in('layout')}"


@pytest.mark.parametrize(
    ("error", "section"),
    [
        (RunError("run 'a' would go on from step 3 and ends at step 3; give it more than 3 steps"), "runs"),
        (RunFolderError("there is no run 'a'; runs in /home/me/runs: b"), "runs"),
        (ClusterError("cluster 'a' runs with 2 engines, and 4 were asked for; …"), "engines"),
        (
            CheckpointError("x.safetensors: its content has changed since it was written (sha256 differs)"),
            "checkpoints",
        ),
        (
            CheckpointError("step-2 exists already and is never overwritten; give another tag\nor move it away"),
            "checkpoints",
        ),
    ],
)
def test_a_message_that_a_section_quotes_names_it_in_a_notebook(error: Any, section: str) -> None:
    assert error._render_traceback_() == [f"{type(error).__name__}: {error}\n{more_in(section)}"]


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("unknown key 'zer'; the nearest known key is 'zero'"),
        ConfigError("batch: …; more: speedlab guide trouble batch"),
        RuntimeError("data of another program"),
    ],
)
def test_a_message_without_a_section_or_with_one_stays_as_it_is(error: Exception) -> None:
    assert with_more(error) == str(error)


def test_a_refusal_at_the_terminal_and_in_a_magic_names_it_too(capsys) -> None:
    assert cli.main(["train", "--batch.global-size", "7", "--batch.micro-size", "2", "--engines", "2"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == more_in("batch")


def test_every_message_that_the_page_quotes_is_in_the_source() -> None:
    texts = [" ".join(text.text.split()) for text in messages()]
    quotes = re.findall(r"^> (.*)$", TROUBLE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(quotes) > 20
    patterns = {quote: ".*".join(map(re.escape, quote.split("…"))) for quote in quotes}
    gone = [quote for quote, pattern in patterns.items() if not any(re.search(pattern, text) for text in texts)]
    assert not gone, "these are no messages any more:\n" + "\n".join(gone)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_what_a_page_names_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for block in blocks_of(path):
        text = text.replace(block.code, "")  # Code is run, or read by the parsers.
    spans = [span for span in re.findall(r"`([^`\n]+)`", text) if not span.startswith(OTHERS)]
    wrong = {span: problems for span in spans if (problems := faults(span))}
    assert not wrong


@pytest.mark.parametrize("path", PAGES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []


MAPS = [ROOT / "ARCHITECTURE.md", *(path for path in GUIDES if path.parent.name in ("concepts", "decisions"))]
"""Documents that name files of the source."""
TOP_FOLDERS = ("speedlab/", "cuda_ops/", "extension/", "tests/", "notebooks/", ".ci/")


@pytest.mark.parametrize(
    "path", [*PAGES, *map(ROOT.joinpath, ("ARCHITECTURE.md", "CONTRIBUTING.md"))], ids=lambda path: path.name
)
def test_files_that_a_document_names_exist(path: Path) -> None:
    named = re.findall(r"`([\w./*-]+)`", path.read_text(encoding="utf-8"))
    ours = [name for name in named if name.startswith(TOP_FOLDERS)]
    made = {"speedlab/notebooks"}  # In the wheel only.
    asked = [name for name in ours if name not in made and "NAME" not in name]
    assert [name for name in asked if not list(ROOT.glob(name))] == []


@pytest.mark.parametrize("path", MAPS, ids=lambda path: path.stem)
def test_source_files_are_named_by_their_whole_path(path: Path) -> None:
    named = re.findall(r"`([\w./-]+\.(?:py|ts))`", path.read_text(encoding="utf-8"))
    folder_table = {"layout.py", "placement.py", "hardware.py", "network.py"}  # Its first row is read by a test.
    assert [name for name in named if name not in folder_table and not (ROOT / name).is_file()] == []


def sentences(page: str) -> list[str]:
    """Return the sentences of a page, without tables, headings, code, quoted messages and addresses of links."""
    text = re.sub(r"^```.*?^```$", "\n", page, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)|^ *\|.*$|^#.*$|^> .*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`\n]*`", "code", text)
    paragraphs = re.split(r"\n\s*\n|\n *(?:[-*]|\d+\.) ", text)
    return [
        sentence for paragraph in paragraphs for sentence in re.split(r"(?<=[.!?])\s+", paragraph) if sentence.strip()
    ]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_sentences_are_short(path: Path) -> None:
    found = sentences(path.read_text(encoding="utf-8"))
    long = [sentence for sentence in found if len(sentence.split()) > LONGEST]
    assert not long, "over 35 words:\n" + "\n".join(long)


def test_a_sentence_ends_at_its_mark_and_tables_are_none() -> None:
    page = "# Title\n\nOne. Two\nis `a b` [here](x.md).\n- Three: four\n\n| a | b |\n\n```sh\nfive six\n```\n> quoted\n"
    assert [" ".join(each.split()) for each in sentences(page)] == ["One.", "Two is code here.", "Three: four"]


def test_they_are_in_the_wheel() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
    assert "speedlab" in build["targets"]["wheel"]["packages"]
    assert all(path.is_relative_to(PACKAGES["speedlab"]) for path in GUIDES)
