"""The proof's data: text, HTML, file; and what each check makes of what ranks found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from speedlab import cli
from speedlab.cli.train import parse
from speedlab.cluster import Run
from speedlab.cluster.known_runs import RunError
from speedlab.config import ConfigError, RunConfig
from speedlab.display.documentation import guide_file, sections
from speedlab.engine.proof import (
    counted_tokens,
    document_separation,
    dtypes,
    first_update,
    micro_batch_split,
    parameter_groups,
)
from speedlab.engine.proof.token_batch import NoTokensError, token_batch
from speedlab.telemetry.proof import Finding, ParameterGroup, Proof, Severity, read_proof, write_proof
from speedlab.telemetry.report import write_report
from speedlab.telemetry.run_folder import RunFolder, RunFolderError

SECTIONS = sections(guide_file("proof").read_text(encoding="utf-8"))

SAMPLE = Proof(
    step=0,
    form="cheap",
    seconds=0.6,
    findings=(
        Finding(kind="documents", severity=Severity.WRONG, text="<script>alert(1)</script>", section="documents"),
        Finding(kind="dtypes", severity=Severity.OK, text="loss float32", section="dtypes"),
    ),
    groups=(ParameterGroup(name="group 0", learning_rate=1e-3, weight_decay=0.1, tensors=9, elements=26_000),),
    counted_text=(("question ", False), ("<b>answer</b>", True)),
)


# ---- as text, HTML and a file ----------------------------------------------------------------------------------------


def test_as_text_it_marks_what_counts_and_links_to_the_guide() -> None:
    text = str(SAMPLE)
    assert text.startswith("proof of the first batch: 1 wrong, 1 ok (cheap form, 600 ms, 1.00 % of the first minute)")
    assert "speedlab guide proof documents" in text
    assert "speedlab guide proof dtypes" not in text  # What is ok needs no link.
    assert text.endswith("question ⟦<b>answer</b>⟧")
    assert "group 0" in text


def test_as_html_all_text_is_escaped() -> None:
    shown = SAMPLE._repr_html_()
    assert "<script>" not in shown
    assert "<b>answer" not in shown
    assert "&lt;b&gt;answer&lt;/b&gt;</mark>" in shown


def test_every_finding_links_to_a_section_that_there_is() -> None:
    modules = (micro_batch_split, counted_tokens, document_separation, dtypes, first_update, parameter_groups)
    named = {value for module in modules for name, value in vars(module).items() if name.endswith("SECTION")}
    assert len(named) == 8
    for name in named:
        assert [heading for heading in SECTIONS if name in heading.lower()] == [name]


def test_a_newer_finding_takes_the_place_of_an_older_one() -> None:
    newer = Finding(kind="dtypes", severity=Severity.SUSPICIOUS, text="loss bfloat16")
    other = Finding(kind="new", severity=Severity.OK, text="")
    changed = SAMPLE.with_findings([newer, other], more_seconds=0.4)
    assert [finding.kind for finding in changed.findings] == ["documents", "dtypes", "new"]
    assert changed["dtypes"] is newer
    assert (changed.seconds, changed.groups) == (1.0, SAMPLE.groups)
    with pytest.raises(KeyError, match="there are: documents, dtypes"):
        SAMPLE["nothing"]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(RunConfig(folder=tmp_path, name="a"))


def test_it_is_read_as_it_was_written(folder: RunFolder) -> None:
    assert read_proof(folder.path) is None
    write_proof(folder.path, SAMPLE)
    assert read_proof(folder.path) == SAMPLE


@pytest.mark.parametrize(
    "text",
    [
        "[",
        "[]",
        "{}",
        '{"step": 1}',
        SAMPLE.to_json().replace('"wrong"', '"odd"'),
        SAMPLE.to_json().replace("true", "3"),
    ],
)
def test_a_damaged_file_is_refused_with_its_name(folder: RunFolder, text: str) -> None:
    (folder.path / "proof.json").write_text(text)
    with pytest.raises(RunFolderError, match=r"proof\.json"):
        read_proof(folder.path)


def test_a_run_without_a_proof_says_why(folder: RunFolder) -> None:
    run = Run(folder)
    with pytest.raises(RunError, match="run 'a' has no proof: it is made after the first step"):
        run.proof()
    write_proof(folder.path, SAMPLE)
    assert run.proof() == SAMPLE
    run.feed.close()


def test_the_terminal_prints_it_and_the_report_shows_it(folder: RunFolder, capsys) -> None:
    write_proof(folder.path, SAMPLE)
    assert cli.main(["proof", str(folder.path)]) == 1  # Something in it is wrong.
    assert capsys.readouterr().out.strip() == str(SAMPLE)
    page = write_report(folder).read_text(encoding="utf-8")
    assert "Proof of the first batch" in page
    assert "&lt;b&gt;answer&lt;/b&gt;</mark>" in page


@pytest.mark.parametrize(
    ("words", "form"),
    [([], "cheap"), (["--proof"], "full"), (["--proof", "none"], "none"), (["--proof", "--steps", "3"], "full")],
)
def test_the_option_alone_asks_for_all(words: list[str], form: str) -> None:
    assert parse(words)[0].proof == form


def test_another_form_is_refused() -> None:
    with pytest.raises(ConfigError, match="proof"):
        RunConfig(proof="all")  # pyright: ignore[reportArgumentType]  # what is tested


# ---- batches ---------------------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """Any."""


def view(tokens: Any, targets: Any, positions: Any = None) -> Any:
    parts = [torch.tensor(each) for each in (tokens, targets, positions) if each is not None]
    return token_batch(tuple(parts), Model())


def test_a_dict_gets_its_labels_back_where_they_were() -> None:
    labels = torch.tensor([[-100, 5, 6, 7], [1, -100, 3, 4]])
    given = {"input_ids": torch.arange(8).view(2, 4), "labels": labels, "attention_mask": torch.ones(2, 4)}
    batch = token_batch({**given, "num_items_in_batch": 6}, Model())
    assert batch.targets.tolist() == [[5, 6, 7, -100], [-100, 3, 4, -100]]
    made = batch.as_given()
    assert made.keys() == given.keys()
    assert all(torch.equal(value, given[name]) for name, value in made.items())
    second = batch.rows(1, 2).as_given()
    assert second["labels"].tolist() == [[1, -100, 3, 4]]
    assert second["attention_mask"].shape == (1, 4)


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ("text", "the batch is a str"),
        ({"input_ids": torch.zeros(1, 2)}, "without input_ids and labels"),
        ((torch.zeros(2, 3), torch.zeros(2, 3)), "tokens are torch.float32 of shape (2, 3)"),
        ((torch.zeros(2, 3).long(), torch.zeros(2).long()), "targets are torch.int64 of shape (2,)"),
        ((torch.zeros(2, 3).long(), torch.zeros(2, 4).long()), "tokens are (2, 3) and targets (2, 4)"),
    ],
)
def test_what_has_no_tokens_is_told(batch: Any, reason: str) -> None:
    with pytest.raises(NoTokensError) as refused:
        token_batch(batch, Model())
    assert reason in str(refused.value)


# ---- checks ----------------------------------------------------------------------------------------------------------


def test_text_is_marked_where_it_is_predicted() -> None:
    batch = view([[1, 2, 3, 4]], [[-100, -100, 4, 5]])
    assert counted_tokens.marked_text(batch, None, None) == (("1 2 3 ", False), ("4 5", True))
    decoded = counted_tokens.marked_text(batch, None, lambda ids: "".join(chr(96 + each) for each in ids))
    assert decoded == (("abc", False), ("de", True))
    measured = torch.tensor([[False, True, False, False]])
    assert counted_tokens.marked_text(batch, measured, None) == (("1 2 ", False), ("3 ", True), ("4 5", False))
    other = view([[1, 2, 3]], [[7, -100, 9]])  # Targets that do not follow the tokens.
    assert counted_tokens.marked_text(other, None, None) == (("7 ", True), ("2 ", False), ("9", True))


@pytest.mark.parametrize(
    ("measured", "severity", "text"),
    [
        ([False, False, True, True], "ok", "2 of 4 targets count"),
        ([False, False, True, False], "ok", "2 of 4"),  # A model that shifts labels has none for the last position.
        ([True, True, True, True], "wrong", "trains 2 positions whose target is -100"),
        ([False, False, False, True], "wrong", "no gradient at 1 positions that have a target"),
        (None, "not checked", "the gradient was not measured: no head"),
    ],
)
def test_counted_tokens_are_compared_with_the_gradient(measured: Any, severity: str, text: str) -> None:
    batch = view([[1, 2, 3, 4]], [[-100, -100, 4, 5]])
    given = None if measured is None else torch.tensor([measured])
    found = counted_tokens.finding_of([counted_tokens.counts_of(batch, given, reason="no head")])
    assert (found.severity, text in found.text) == (severity, True), found.text


def test_a_batch_without_a_target_trains_nothing() -> None:
    counts = counted_tokens.counts_of(view([[1, 2]], [[-100, -100]]), torch.zeros(1, 2, dtype=torch.bool))
    assert counted_tokens.finding_of([counts]).severity is Severity.WRONG


def test_a_trial_changes_the_first_document_and_leaves_its_last_token() -> None:
    tokens, targets = [[1, 2, 3, 4, 5, 6, 7, 8]], [[2, 3, -100, 5, 6, 7, 8, 9]]
    trial = document_separation.trial_of([view(tokens, targets, [[0, 1, 2, 0, 1, 2, 3, 4]])])
    assert trial is not None
    assert trial.base.targets.tolist() == [[-100, -100, -100, 5, 6, 7, 8, 9]]
    assert trial.changed.tokens.tolist() == [[8, 8, 3, 4, 5, 6, 7, 8]]
    assert trial.control is not None
    assert trial.control.tokens.tolist() == [[1, 2, 3, 8, 8, 6, 7, 8]]
    assert trial.control.targets.tolist() == [[-100] * 7 + [9]]
    assert document_separation.trial_of([view([[1, 2]], [[2, 3]])]) is None


def losses(changed: float, control: float | None = 2.1) -> document_separation.TrialLosses:
    base = None if control is None else 2.0
    return document_separation.TrialLosses(
        unit="document", base=3.0, changed=changed, control_base=base, control=control
    )


@pytest.mark.parametrize(
    ("ranks", "severity"),
    [
        ([losses(3.0)], "ok"),
        ([losses(3.0 + 5e-5)], "ok"),  # A thousandth of what a change inside makes is rounding.
        ([losses(3.0), losses(3.01)], "wrong"),
        ([losses(3.0, control=2.0)], "not checked"),  # Nothing has an effect yet.
        ([losses(3.01, control=None)], "wrong"),
        ([losses(float("nan"))], "not checked"),
        ([], "not checked"),
    ],
)
def test_documents_are_compared(ranks: Any, severity: str) -> None:
    assert document_separation.finding_of(ranks).severity == severity


@pytest.mark.parametrize(
    ("together", "weighted", "severity", "text"),
    [
        (3.0, False, "ok", "the same loss together and one by one"),  # (2 × 6 + 4 × 1.5) / 6
        (3.75, False, "ok", "a mean over sequences"),
        (3.75, True, "suspicious", "a step depends on the micro-batch size"),
        (7.5, False, "wrong", "a sum over the micro-batch"),
        (5.0, False, "suspicious", "another loss together than one by one"),
        (float("inf"), False, "not checked", "not finite"),
    ],
)
def test_the_cut_of_a_batch(together: float, weighted: bool, severity: str, text: str) -> None:
    ranks = [micro_batch_split.SplitLosses(together=together, alone=(6.0, 1.5), counted=(2, 4))]
    found = micro_batch_split.finding_of(ranks, dtype="float32", weighted_by_tokens=weighted, given=[[6]])
    assert (found.severity, text in found.text) == (severity, True), found.text


def test_micro_batches_of_different_counts_are_told_unless_they_are_weighted() -> None:
    ranks = [micro_batch_split.SplitLosses(together=3.0, alone=(6.0, 1.5), counted=(2, 4))]
    given = [[4, 32], [32, 32]]
    found = micro_batch_split.finding_of(ranks, dtype="float32", weighted_by_tokens=False, given=given)
    assert found.severity is Severity.SUSPICIOUS
    assert "micro-batches have 4 to 32 targets" in found.text
    weighted = micro_batch_split.finding_of(ranks, dtype="float32", weighted_by_tokens=True, given=given)
    assert weighted.severity is Severity.OK


def test_sequences_that_are_cut_get_different_numbers_of_targets() -> None:
    two, first, second = micro_batch_split.parts_of(view([[1, 2, 3, 4]] * 3, [[2, 3, 4, 5]] * 3))
    assert [int(each.counted.sum()) for each in (two, first, second)] == [6, 4, 2]
    assert micro_batch_split.parts_of(view([[1, 2]], [[2, 3]])) == []


def update(**changes: Any) -> Finding:
    given = {"trainable": 3, "unmoved": ["a"], "no_gradient": [], "zero_gradient": [], "rates": {"a": 0.1}, "update": 1}
    return first_update.finding_of(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "severity", "text"),
    [
        ({"unmoved": []}, "ok", "all 3 trainable tensors with a gradient moved in the first update"),
        ({}, "wrong", "1 of 3 trainable tensors did not move in the first update"),
        ({"no_gradient": ["a"]}, "ok", "all 2 trainable tensors"),
        ({"zero_gradient": ["a"]}, "suspicious", "because their gradient is zero: a"),
        ({"unmoved": ["q.lora_A"], "zero_gradient": ["q.lora_A"]}, "ok", "they move from the next update on"),
        ({"rates": {"a": 0.0}}, "not checked", "the learning rate of 1 tensors was 0"),
        ({"rates": {"a": 0.0, "b": 0.0}, "unmoved": ["a", "b"], "trainable": 2}, "not checked", "of every parameter"),
        ({"update": 7}, "wrong", "did not move in update 7"),
    ],
)
def test_what_did_not_move_is_explained(changes: Any, severity: str, text: str) -> None:
    found = update(**changes)
    assert (found.severity, text in found.text) == (severity, True), found.text


@pytest.mark.parametrize(
    ("model", "tokenizer", "largest", "severity"),
    [
        (4096, 352, 351, "suspicious"),
        (50_304, 50_257, 50_256, "ok"),
        (512, 257, 3, "ok"),  # Padding for the sake of kernels.
        (100, 200, 50, "wrong"),
        (100, None, 100, "wrong"),
        (100, None, 5, "not checked"),
        (None, 10, 5, "not checked"),
    ],
)
def test_vocabularies(model: Any, tokenizer: Any, largest: Any, severity: str) -> None:
    assert dtypes.vocabulary(model=model, tokenizer=tokenizer, largest=largest).severity == severity


@pytest.mark.parametrize(
    ("loss", "masters", "rounded", "severity"),
    [
        ("float32", ["float32"], False, "ok"),
        ("bfloat16", ["float32"], False, "suspicious"),
        ("float32", ["bfloat16"], False, "wrong"),
        ("float32", ["bfloat16"], True, "ok"),
    ],
)
def test_dtypes(loss: str, masters: list[str], rounded: bool, severity: str) -> None:
    given = {"compute": "bfloat16", "logits": None, "loss": loss, "masters": masters}
    assert dtypes.finding_of(**given, rounds_stochastically=rounded).severity == severity


def test_groups_without_parameters_and_without_training() -> None:
    options = [{"lr": 0.1, "weight_decay": 0.0}, {"lr": 0.2}]
    counts = [{"0": [2, 30], "-1": [1, 5]}] * 2
    groups = parameter_groups.groups_of(options, counts, copies=2)
    assert [(group.name, group.tensors, group.elements) for group in groups] == [
        ("group 0", 2, 30),
        ("group 1", 0, 0),
        ("frozen", 1, 5),
    ]
    assert groups[1].weight_decay is None
    assert "group 1 has no parameters" in parameter_groups.finding_of(groups).text
    assert parameter_groups.finding_of(groups[1:]).severity is Severity.WRONG
    assert json.loads(SAMPLE.to_json())["groups"][0]["elements"] == 26_000
