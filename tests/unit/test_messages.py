"""No message advises what does not work: every command, option, call, keyword and field that a text names exists."""

from __future__ import annotations

import re

import pytest
from import_graph import PACKAGES
from messages import Text, docstrings, faults, messages, texts_of


@pytest.fixture(scope="module")
def found() -> list[Text]:
    return messages()


def test_what_texts_name_exists(found: list[Text]) -> None:
    wrong = [f"{text}\n    {'; '.join(problems)}" for text in found if (problems := faults(text.text, text.path))]
    assert not wrong, "\n".join(wrong)


def test_texts_of_all_rooms_are_read(found: list[Text]) -> None:
    assert len(found) > 1000
    rooms = {folder.name for package in PACKAGES.values() for folder in package.rglob("*") if any(folder.glob("*.py"))}
    assert rooms <= {text.path.parent.name for text in found}
    for kind in ("run.", "cluster.", "engine.", "speedlab.", "`speedlab ", "`%speedlab ", " --"):
        assert any(kind in text.text for text in found), kind


def test_what_docstrings_name_exists_and_they_show_no_code_that_nobody_runs() -> None:
    reported = docstrings()
    assert len(reported) > 1000
    wrong = [
        f"{text.path}:{text.line}: {span}: {'; '.join(problems)}"
        for text in reported
        for span in re.findall(r"`([^`\n]+)`", text.text)
        if not re.fullmatch(r"\w+\(.*\)", span)  # A function of the file's own.
        if (problems := faults(span, text.path))
    ]
    assert not wrong, "\n".join(wrong)
    shown = [f"{text.path}:{text.line}" for text in reported if "```" in text.text or ">>>" in text.text]
    assert not shown, "code goes to README or to a guide, where tests run it"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("look with `speedlab stats`", "there is no command speedlab stats"),
        ("look with `%speedlab export x`", "there is no command %speedlab export"),
        ("run `speedlab report --html r`", "speedlab report has no --html"),
        ("`speedlab bench kernel` measures it", "there is no benchmark kernel"),
        ("`speedlab bench kernels --rank 4` measures it", "speedlab bench kernels has no --rank"),
        ("`make bench NAME=steps` measures it", "there is no benchmark steps"),
        ('`make bench NAME=step ARGS="--rank 4"` measures it', "benchmark step has no --rank"),
        ("`python -m tests.benchmarks step --rank 4` measures it", "benchmark step has no --rank"),
        ("give --no-such-thing", "no command has --no-such-thing"),
        ("a cell with %%rank 0", "there is no magic %%rank"),
        ("run.pauze() first", "Run has no pauze"),
        ("run.pause().wayt() first", "CommandFuture has no wayt"),
        ("run.save(tga=_) keeps it", "unexpected keyword argument 'tga'"),
        ("run.advance(1, 2) goes on", "too many positional arguments"),
        ("cluster.status(3) tells", "too many positional arguments"),
        ("the engine has engine.backwards(loss)", "Engine has no backwards"),
        ("speedlab.Cluter(name=_) starts one", "speedlab has no Cluter"),
        ("sl.Cluster(engine=4) starts one", "unexpected keyword argument 'engine'"),
        ("give initialize(tpplan={}) one", "nothing public takes tpplan="),
        ("devise='cpu' uses the CPU cores", "nothing public takes devise="),
        ("shorten data.sequnce_length to 4", "the configuration has no data.sequnce_length"),
        ("or set sequenze: false", "the configuration has no sequenze"),
    ],
)
def test_what_does_not_exist_is_found(text: str, problem: str) -> None:
    (found,) = faults(text)
    assert problem in found


@pytest.mark.parametrize(
    "text",
    [
        "`speedlab train config.yaml --zero.stage 3`, then speedlab report RUN; speedlab bench kernels --only adamw",
        "run.reshape(zero=3, tp=2).wait(), run.save('a'), run.step is 120, run.advance(5), run.folder.path",
        "speedlab.attach(_).resume(step=50); speedlab.comm.shared.register(); cluster.submit(f, 1, ranks=[0], x=2)",
        "forward(input_ids=..., labels=...) gives an output with .loss; initialize(tp_plan=...) cuts it",
        "torch.utils.checkpoint with use_reentrant=False; set requires_grad=False; compile: false",
        "runs/_/cluster.json, engine.py, data.json, optimizer.step() and speedlab_notebook stay alone",
    ],
)
def test_what_exists_is_not_refused(text: str) -> None:
    assert faults(text) == []


def test_a_file_of_the_terminal_names_options_of_its_own_command() -> None:
    path = PACKAGES["speedlab"] / "cli/export.py"
    assert faults("give another --tag", path) == []
    assert faults("give another --engines", path) == ["no command has --engines"]


def test_texts_are_whole_and_docstrings_are_none(tmp_path) -> None:
    path = tmp_path / "a.py"
    path.write_text('"""not this one"""\ndef f(n):\n    raise E(f"{n} came: give " "run.f(x={n})", "alone")\n')
    assert [(text.line, text.text) for text in texts_of(path)] == [(3, "_ came: give run.f(x={n})")]
