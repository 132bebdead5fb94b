"""The proof of the first batch on ranks: it finds what is wrong, under every layout, and leaves no trace."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import speedlab
from ranks import models
from ranks.pool import Pool
from ranks.runs import as_engine, new_run, own_rank, trainer_of
from ranks.tensor_models import hugging_face
from speedlab.config import ModelConfig
from speedlab.engine.drivers import WholeModel
from speedlab.engine.proof import Prover
from speedlab.engine.proof.observation import Observation
from speedlab.models import GPT
from speedlab.telemetry.proof import Proof, read_proof
from speedlab.telemetry.run_folder import RunFolder
from speedlab.trainer import first_batch_proof, run_registry

Batch = tuple[Tensor, ...]
LENGTH = 16


class GPTWithoutDocuments(GPT):
    """Takes positions of documents, and lets documents see each other."""

    def starts(self, positions: Tensor | None) -> None:
        return None


class Gated(GPT):
    """A branch behind a factor of zero, and a layer that is never called."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.gate = nn.Parameter(torch.zeros(()))
        self.branch = nn.Linear(config.hidden, config.hidden)
        self.never_called = nn.Linear(3, 3)

    def embed(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        x = super().embed(tokens, positions)
        return x + self.gate * self.branch(x)


class OnlyTrains(GPT):
    def forward(self, tokens: Tensor, targets: Tensor | None = None, positions: Tensor | None = None) -> Any:
        if not self.training:
            raise RuntimeError("this model only trains")
        return super().forward(tokens, targets, positions)


def gpt(kind: type[GPT] = GPT, **changes: Any) -> nn.Module:
    shape = {"layers": 2, "hidden": 24, "heads": 4, "ffn_hidden": 32, "vocab_size": models.VOCABULARY, "context": 24}
    return models.seeded(kind, ModelConfig(**shape, **changes))


def packed(index: int = 0, rows: int = 2) -> Batch:
    """Two documents in each sequence; the first three targets of the second sequence do not count."""
    generator = torch.Generator().manual_seed(index)
    whole = torch.randint(models.VOCABULARY, (rows, LENGTH + 1), generator=generator)
    targets = whole[:, 1:].clone()
    targets[:, 6] = -100
    targets[1, :3] = -100
    positions = torch.cat([torch.arange(7), torch.arange(LENGTH - 7)]).repeat(rows, 1)
    return whole[:, :-1].contiguous(), targets, positions


def as_dict(index: int = 0) -> dict[str, Tensor]:
    """As transformers' collator for packed batches gives it, with the same targets."""
    tokens, targets, positions = packed(index)
    labels = torch.cat([torch.full_like(targets[:, :1], -100), targets[:, :-1]], dim=1)
    return {"input_ids": tokens, "labels": labels, "position_ids": positions}


def adamw(parameters: Any, lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr)


def without_learning_rate(parameters: Any) -> torch.optim.Optimizer:
    return adamw(parameters, lr=0.0)


def too_small_to_count(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-30)


def loss_of_all_tokens(model: Any, batch: Batch) -> Tensor:
    tokens, targets, positions = batch
    logits = model(tokens, positions=positions).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.clamp(min=0).flatten())


def sum_of_losses(model: Any, batch: Batch) -> Tensor:
    tokens, targets, positions = batch
    logits = model(tokens, positions=positions).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def severities(proof: Proof) -> dict[str, str]:
    return {finding.kind: str(finding.severity) for finding in proof.findings}


def engine_of(build: Callable[[], nn.Module], config: dict[str, Any], **arguments: Any) -> Any:
    given = {"optimizer": adamw, **arguments}
    whole = {"batch": {"micro_size": 2}, "precision": "float32", **config}
    return speedlab.initialize(model=build(), config=whole, **given)[0]


# ---- what it finds ---------------------------------------------------------------------------------------------------


def prove_and_step(
    build: Callable[[], nn.Module], batch: Callable[[int], Any], config: dict[str, Any], **arguments: Any
) -> tuple[dict[str, str], dict[str, str]]:
    """The severities and texts by kind after one update."""
    engine = engine_of(build, config, **arguments)
    try:
        micro = batch(engine.mesh.data_index)
        before = engine.proof(micro)
        engine.train_batch([micro])
        after = engine.proof()
        assert before.groups == after.groups
        assert Proof.from_data(json.loads(after.to_json())) == after
        return severities(after), {finding.kind: finding.text for finding in after.findings}
    finally:
        engine.destroy(keep_parameters=False)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_training_that_is_right_is_ok_at_every_stage(two: Pool, stage: int) -> None:
    reported = two.run(prove_and_step, gpt, packed, {"zero": stage})
    assert reported[0] == reported[1]  # The same findings on all ranks.
    found, texts = reported[0]
    assert {kind for kind, severity in found.items() if severity != "ok"} == {"vocabulary"}
    assert texts["counted tokens"].startswith("54 of 64 targets count in the first micro-batch of 2 ranks")
    assert "first document" in texts["documents"]
    assert texts["first update"].startswith("all 14 trainable tensors")


@pytest.mark.parametrize("axis", ["tp", "pp", "cp"])
def test_it_works_under_every_layout(two: Pool, axis: str) -> None:
    reported = two.run(prove_and_step, gpt, packed, {"parallel": {axis: 2}, "zero": 1})
    assert reported[0] == reported[1]
    found, texts = reported[0]
    # Under cp each rank reads a part of each sequence; the finding gives that reason.
    unchecked = {"vocabulary"} | ({"counted tokens"} if axis == "cp" else set())
    assert {kind: severity for kind, severity in found.items() if severity != "ok"} == dict.fromkeys(
        unchecked, "not checked"
    )
    assert texts["first update"].startswith("all 14 trainable tensors")
    count = sum(parameter.numel() for parameter in gpt().parameters())
    assert texts["parameter groups"].startswith(f"{count:,} of {count:,} parameters train")


def test_a_model_of_transformers_with_labels(two: Pool) -> None:
    (found, texts), _ = two.run(prove_and_step, llama, as_dict, {"zero": 3}, timeout=120)
    assert {kind for kind, severity in found.items() if severity != "ok"} == {"vocabulary"}
    assert texts["counted tokens"].startswith("50 of 64 targets count")  # The last output has no label.


def llama() -> nn.Module:
    return hugging_face("llama", vocab_size=models.VOCABULARY)


FAULTS: dict[str, tuple[Any, dict[str, Any], str, str, str]] = {
    "documents see each other": (GPTWithoutDocuments, {}, "documents", "wrong", "tokens see other documents"),
    "masked targets are trained": (
        GPT,
        {"loss": loss_of_all_tokens},
        "counted tokens",
        "wrong",
        "the loss trains 10 positions whose target is -100",
    ),
    "the loss is a sum": (GPT, {"loss": sum_of_losses}, "batch cut", "wrong", "a sum over the micro-batch"),
    "a layer is never called": (
        Gated,
        {},
        "gradients",
        "suspicious",
        "2 of 19 trainable tensors got no gradient: never_called.bias, never_called.weight",
    ),
    "a factor is zero": (
        Gated,
        {"optimizer": torch.optim.SGD},
        "first update",
        "suspicious",
        "because their gradient is zero: branch.bias, branch.weight",
    ),
    "the updates are lost in rounding": (
        GPT,
        {"optimizer": too_small_to_count},
        "first update",
        "wrong",
        "14 of 14 trainable tensors did not move in the first update",
    ),
    "a warm-up begins at zero": (
        GPT,
        {"optimizer": without_learning_rate},
        "first update",
        "not checked",
        "the learning rate of every parameter was 0",
    ),
}


def prove_faults(stage: int) -> dict[str, tuple[str, str]]:
    found = {}
    for name, (kind, arguments, check, _, _) in FAULTS.items():
        severity, texts = prove_and_step(lambda kind=kind: gpt(kind), packed, {"zero": stage}, **arguments)
        found[name] = severity[check], texts[check]
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_each_fault_is_found(two: Pool, stage: int) -> None:
    found, others = two.run(prove_faults, stage, timeout=120)
    assert found == others
    for name, (_, _, _, severity, text) in FAULTS.items():
        assert found[name][0] == severity, f"{name}: {found[name]}"
        assert text in found[name][1], name


def prove_what_fails() -> tuple[dict[str, str], str, str, int]:
    engine = engine_of(lambda: gpt(OnlyTrains), {"zero": 3})
    try:
        proof = engine.proof(packed(engine.mesh.data_index))
        engine.train_batch([packed(engine.mesh.data_index)])
        assert [finding.kind for finding in proof.failed] == ["documents", "batch cut"]
        assert proof["batch cut"].text == proof["documents"].text
        return severities(proof), proof["documents"].text, proof["gradients"].text, engine.global_step
    finally:
        engine.destroy(keep_parameters=False)


def test_what_fails_in_a_check_is_told_and_the_training_goes_on(two: Pool) -> None:
    (found, text, gradients, steps), other = two.run(prove_what_fails)
    assert (found, text, gradients, steps) == other
    assert found["documents"] == "not checked"
    assert text == "the check failed: RuntimeError: this model only trains"
    assert found["counted tokens"] == found["gradients"] == "ok"
    assert steps == 1


def prove_inside_a_step() -> str:
    engine = engine_of(gpt, {"batch": {"micro_size": 2, "accumulation": 2}})
    batch = packed(engine.mesh.data_index)
    engine.backward(engine(batch[0], batch[1]).loss)
    engine.step()
    with pytest.raises(RuntimeError) as refused:
        engine.proof(batch)
    engine.abandon_step()
    with pytest.raises(ValueError, match="there is none yet"):
        engine.proof()
    engine.destroy(keep_parameters=False)
    return str(refused.value)


def test_inside_a_step_it_is_refused(two: Pool) -> None:
    assert two.run(prove_inside_a_step)[0].startswith("proof: micro-batch 2 of 2 of a step is under way")


# ---- it leaves no trace ----------------------------------------------------------------------------------------------


class WithStatistics(nn.Module):
    """Dropout, and BatchNorm's running statistics, over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCABULARY, 12)
        self.blocks = nn.ModuleList(models.NormBlock() for _ in range(2))
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(12, models.VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens).flatten(0, 1)
        for block in self.blocks:
            x = self.dropout(block(x))
        return F.cross_entropy(self.head(x), targets.flatten())


def with_statistics() -> nn.Module:
    return models.seeded(WithStatistics)


def dropping_gpt() -> nn.Module:
    return gpt(dropout=0.2)


def bits_of(build: Callable[[], nn.Module], stage: int, *, proves: bool) -> list[Any]:
    """All that three steps leave: losses, parameters, buffers, random numbers, the number of the step."""
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)
    config = {"zero": stage, "batch": {"micro_size": 2, "accumulation": 2}, "loss_over": "tokens"}
    engine = engine_of(build, config)
    try:
        losses = []
        for step in range(3):
            batch = [packed(7 * step + 2 * m + engine.mesh.data_index)[:2] for m in range(2)]
            if proves:
                engine.module.blocks[0].eval()
                engine.proof(batch[0])
                assert not engine.module.blocks[0].training  # Modes stay as they are.
                engine.train()
            losses.append(engine.train_batch(batch))
            if proves:
                engine.proof()
        numbers = [torch.rand(()).item(), random.random(), np.random.random()]
        buffers = [buffer.clone() for buffer in engine.module.buffers()]
        return [losses, engine.state_dict(), buffers, numbers, engine.global_step, engine.global_samples]
    finally:
        engine.destroy(keep_parameters=False)


def differences(build: Callable[[], nn.Module]) -> list[str]:
    found = []
    for stage in range(4):
        plain, proved = (bits_of(build, stage, proves=proves) for proves in (False, True))
        same = [
            plain[0] == proved[0],
            all(torch.equal(value, proved[1][name]) for name, value in plain[1].items()),
            all(torch.equal(*pair) for pair in zip(plain[2], proved[2], strict=True)),
            plain[3:] == proved[3:],
        ]
        found += [f"stage {stage}: {same}"] * (not all(same))
    return found


@pytest.mark.parametrize("build", [dropping_gpt, with_statistics])
def test_a_training_with_proofs_has_the_same_bits(two: Pool, build: Callable[[], nn.Module]) -> None:
    assert two.run(differences, build, timeout=120) == [[], []]


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def world(two: Pool) -> Iterator[Pool]:
    """Two ranks that may leave their world: the pool's own is made anew after them."""
    yield two
    two.new_group()


def advance(run: str) -> tuple[str, dict[str, Tensor]]:
    with as_engine(run):
        state = run_registry.advance(run)
        return state, {name: value.clone() for name, value in trainer_of(run).engine.state_dict().items()}


def run_in(folder: Path, documents: str = "joined", **changes: Any) -> str:
    folder.mkdir()
    shape = {"layers": 2, "hidden": 32, "heads": 2, "ffn_hidden": 64, "context": 16, "dropout": 0.1}
    data = {"source": str(folder / "text"), "tokenizer": "bytes", "sequence_length": 16, "documents": documents}
    given = {"steps": 3, "model": shape, "data": data, "batch": {"global_size": 8, "micro_size": 2}, **changes}
    return new_run(folder, **given)


def test_a_run_has_a_proof_by_default_and_the_same_bits_without(world: Pool, tmp_path: Path) -> None:
    bits = {}
    for form in ("none", "cheap", "full"):
        run = run_in(tmp_path / form, **({} if form == "cheap" else {"proof": form}))
        (state, bits[form]), _ = world.run(advance, run)
        assert state == "finished"
        proof = read_proof(Path(run))
        reported = [event for event in RunFolder(run).read_events() if event.kind == "proof"]
        if form == "none":
            assert proof is None
            assert not reported
            continue
        assert proof is not None
        assert (proof.form, proof.step) == (form, 0)
        assert [event.step for event in reported] == [1]
        unusual = {kind: severity for kind, severity in severities(proof).items() if severity != "ok"}
        assert unusual == {"vocabulary": "suspicious"}  # 4,096 tokens for a tokenizer of 257.
        assert proof["vocabulary"].text in reported[0].text
        assert "".join(text for text, _ in proof.counted_text).isalpha()
    assert all(torch.equal(value, bits[form][name]) for form in bits for name, value in bits["none"].items())


def advance_with_a_fault(run: str, owner: type, name: str) -> str:
    """Rank 1 fails in a part of the proof alone, and rank 0 waits for it in a collective."""

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("something of this rank is broken")

    with as_engine(run):
        if own_rank() == 1:
            with patch.object(owner, name, fails):
                return run_registry.advance(run)
        return run_registry.advance(run)


@pytest.mark.parametrize(
    ("owner", "name", "kinds"),
    [
        (WholeModel, "evaluate", {"documents", "batch cut"}),
        (Prover, "_update", {"first update"}),
        (Observation, "start", {"counted tokens", "first update"}),
        (Prover, "_counted", {"counted tokens"}),
    ],
)
def test_a_rank_that_fails_in_the_proof_does_not_end_the_run(
    world: Pool, tmp_path: Path, owner: type, name: str, kinds: set[str]
) -> None:
    run = run_in(tmp_path / "run")
    assert world.run(advance_with_a_fault, run, owner, name) == ["finished"] * 2
    proof = read_proof(Path(run))
    assert proof is not None
    unchecked = {kind: proof[kind].text for kind, severity in severities(proof).items() if severity == "not checked"}
    assert unchecked.keys() == kinds
    assert all("something of this rank is broken" in text for text in unchecked.values()), unchecked


def advance_and_prove(run: str) -> list[str]:
    """Pause after two steps, ask for a proof, go on."""
    with as_engine(run):
        states = [run_registry.advance(run)]
        if own_rank() == 0:
            RunFolder(run).post("prove")
            RunFolder(run).post("resume")
        states.append(run_registry.advance(run))
        return states


def test_a_proof_that_was_asked_for_sees_the_update_after_it(world: Pool, tmp_path: Path) -> None:
    run = run_in(tmp_path / "run", proof="none", steps=4)
    RunFolder(run).post("step", n=2)
    assert world.run(advance_and_prove, run)[0] == ["paused", "finished"]
    proof = read_proof(Path(run))
    assert proof is not None
    assert (proof.form, proof.step) == ("full", 2)
    assert proof["first update"].text == "all 14 trainable tensors with a gradient moved in update 3"
    reported = [(event.step, event.command) for event in RunFolder(run).read_events() if event.kind == "proof"]
    assert reported == [(2, 2), (3, None)]


def advance_without_time(run: str) -> str:
    with as_engine(run), patch.object(first_batch_proof, "_FORWARDS_SECONDS", 1e-9):
        return run_registry.advance(run)


def test_forwards_that_would_take_too_long_are_left_out(world: Pool, tmp_path: Path) -> None:
    run = run_in(tmp_path / "run", steps=1)
    assert world.run(advance_without_time, run) == ["finished"] * 2
    proof = read_proof(Path(run))
    assert proof is not None
    assert [kind for kind, severity in severities(proof).items() if severity == "not checked"] == [
        "documents",
        "batch cut",
    ]
    assert "`speedlab train --proof` and run.prove() make them" in proof["documents"].text


def test_documents_are_looked_for_in_later_batches(world: Pool, tmp_path: Path) -> None:
    run = run_in(tmp_path / "run", steps=1, documents="separate")
    # Kernels for documents may have to be compiled first.
    assert world.run(advance, run, timeout=240)[0][0] == "finished"
    proof = read_proof(Path(run))
    assert proof is not None
    assert proof["documents"].severity == "ok"
    assert proof["documents"].text.startswith("changing the first document")
