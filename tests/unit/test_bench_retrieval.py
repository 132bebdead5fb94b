"""`bench retrieval`: stages of a training, positions that jump, what is seen and what cannot be, and what is told."""

from __future__ import annotations

import json

import pytest
import torch

from speedlab.calibrate.table import BenchRow
from speedlab.config import AttentionConfig, describe
from speedlab.models.gpt import CausalAttention, SparseAttend
from tests.benchmarks import retrieval
from tests.benchmarks.retrieval import JumpingPositions, Options, answered, learn, pattern, stages


def test_sequences_double_up_to_the_full_length_and_runs_grow_along() -> None:
    made = stages(16384, 512, sparse=True)
    assert [stage.length for stage in made] == [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
    assert [stage.attention.window for stage in made] == [32, 32, 64, 128, 256, 512, 512, 512, 512]
    assert [stage.rows for stage in made] == [64, 64, 64, 32, 16, 8, 4, 2, 1]
    assert made[0].rate == 4e-3
    assert made[-1].rate == pytest.approx(4e-3 / 8)
    assert {stage.attention for stage in stages(16384, 512, sparse=False)} == {AttentionConfig()}


def test_the_last_stage_has_the_length_and_the_window_that_are_asked_for() -> None:
    last = stages(300, 128, sparse=True)[-1]
    assert (last.length, last.attention.window) == (300, 128)


def test_every_token_reaches_the_last_one_within_the_layers() -> None:
    assert describe(pattern(512), 16384).layers_to_first == 2


def test_positions_jump_forwards_up_to_the_reach_in_training_alone() -> None:
    positions = JumpingPositions(reach=1000, seed=0)
    device = torch.device("cpu")
    drawn = torch.stack([positions(100, device) for _ in range(200)])
    steps = drawn.diff()
    assert steps.min() == 1
    assert (steps > 1).sum(dim=1).max() <= 4
    assert drawn.max() < 1000
    assert drawn.max() > 900
    assert torch.equal(positions(1000, device), torch.arange(1000))
    positions.eval()
    assert torch.equal(positions(100, device), torch.arange(100))


@pytest.mark.parametrize(("sparse", "kind"), [(False, CausalAttention), (True, SparseAttend)])
def test_a_side_ends_with_its_own_attention(sparse, kind) -> None:
    options = Options(length=256, window=128, most=1)
    model = learn(options, 0, sparse=sparse)
    attend = model.blocks[0].attention.attend  # pyright: ignore[reportAttributeAccessIssue]  # a list of modules
    assert type(attend) is kind
    if sparse:
        assert attend.attention == pattern(128)  # pyright: ignore[reportAttributeAccessIssue]  # SparseAttend's
    assert 0 <= answered(model, 256, 4) <= 1


def test_answers_are_counted() -> None:
    class Knows(torch.nn.Module):
        def forward(self, tokens: torch.Tensor) -> object:
            """What stands behind the first mark; every other time something else."""
            self.asked = getattr(self, "asked", -1) + 1
            found = tokens[0, int((tokens[0] == 0).int().argmax()) + 1] + self.asked % 2
            return type("Output", (), {"logits": torch.nn.functional.one_hot(found, 64)[None, None]})

    assert answered(Knows(), 128, 8) == 0.5  # pyright: ignore[reportArgumentType]  # no GPT
    assert answered(Knows(), 128, 8, depth=0.0) == 0.5  # pyright: ignore[reportArgumentType]  # no GPT


def row(unit: str, ours: float, peer: float) -> BenchRow:
    return BenchRow(case="case", ours=ours, unit=unit, peer_name="dense", peer=peer, n=3)


@pytest.mark.parametrize(
    ("unit", "ours", "peer", "reported"),
    [
        ("% right", 97.0, 99.0, "case: +2.00 points of accuracy below dense, goal 2: met"),
        ("% right", 96.9, 99.0, "case: +2.10 points of accuracy below dense, goal 2: MISSED"),
        ("% right", 50.0, 50.0, "case: dense attention has learned too little (50 % right); raise --most: MISSED"),
        ("nats", 3.03, 3.0, "case: +1.00 % of held-out loss above dense, goal 2: met"),
        ("nats", 3.3, 3.0, "case: +10.00 % of held-out loss above dense, goal 2: MISSED"),
    ],
)
def test_what_is_lost_is_told_in_points_and_per_cent(unit, ours, peer, reported) -> None:
    assert retrieval.reported(row(unit, ours, peer)) == reported


def test_a_length_or_window_that_cannot_be_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--length", "128"], ["--window", "100"]):
        with pytest.raises(SystemExit, match="give at least 256 tokens, and a window of whole blocks of 64"):
            retrieval.main(words)
    assert capsys.readouterr().out == ""


@pytest.mark.nightly  # Learns the task on both sides, and reads text.
@pytest.mark.timeout(400)
def test_a_small_run(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    words = "--length 512 --window 64 --seeds 0 --text-length 256 --text-steps 10"
    retrieval.main([*words.split(), "--json", str(file)])
    answers, text = [json.loads(line) for line in file.read_text().splitlines()]
    assert answers["peer"] >= 95
    assert answers["ours"] >= 90
    assert text["ours"] == pytest.approx(text["peer"], rel=0.02)
    assert capsys.readouterr().out.count(", goal 2: ") == 2
