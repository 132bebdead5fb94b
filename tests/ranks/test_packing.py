"""Documents that stand in one sequence, under every layout, beside a plain loop that runs each by itself."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import speedlab
from ranks import models
from ranks.conftest import PoolOf
from ranks.layout_cases import LayoutCase, llama, sparse_gpt
from ranks.loops import Trajectory, problems
from ranks.runs import as_engine, new_run, trainer_of
from ranks.test_layouts import BFLOAT16, FLOAT32, PlainOf, check
from speedlab.config import ConfigError, ModelConfig
from speedlab.layout import Layout, LayoutError
from speedlab.models import GPT
from speedlab.telemetry.run_folder import RunFolder
from speedlab.trainer import run_registry


def packed(length: int, step: int, index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets and positions (2, length). Each sequence has three documents, of other lengths in each, so that
    all micro-batches have as many targets that count."""
    generator = torch.Generator().manual_seed(1_000_003 * step + index)
    rows = torch.randint(models.VOCABULARY, (2, length + 1), generator=generator)
    targets = (rows[:, 1:] + rows[:, :-1]) % models.VOCABULARY
    cuts = torch.stack([torch.randperm(length - 1, generator=generator)[:2].sort().values + 1 for _ in range(2)])
    places = torch.arange(length)
    begins = torch.zeros(2, length, dtype=torch.int64).scatter_(1, cuts, cuts)
    return rows[:, :-1], targets.scatter(1, cuts - 1, -100), places - begins.cummax(1).values


many, odd = partial(packed, 48), partial(packed, 41)


def each_by_itself(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    """The mean over targets that count, of documents that are sequences of their own."""
    tokens, targets, positions = batch
    total = torch.zeros(())
    for row in range(len(tokens)):
        ends = [*(positions[row] == 0).nonzero().flatten().tolist()[1:], tokens.shape[1]]
        start = 0
        for end in ends:
            count = int((targets[row, start:end] != -100).sum())
            if count:
                own = (each[row : row + 1, start:end] for each in (tokens, targets))
                total = total + model(*own).loss * count
            start = end
    return total / int((targets != -100).sum())


def wide(**changes: Any) -> nn.Module:
    """A GPT of 4 blocks whose heads the kernels take."""
    shape = {"layers": 4, "hidden": 64, "heads": 4, "ffn_hidden": 32, "vocab_size": models.VOCABULARY, "context": 48}
    return models.seeded(GPT, ModelConfig(**{**shape, **changes}))


def learned() -> nn.Module:
    """Of heads that they do not take, which go through dense attention with a mask."""
    return wide(hidden=24, tied=False, position="learned", norm="layer", bias=True)


def rounded() -> nn.Module:
    model = wide()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


def sparse_learned() -> nn.Module:
    return wide(position="learned", attention={"kind": "block_sparse", "block": 16, "window": 19})


def long_sparse() -> nn.Module:
    """Of as many blocks as rings of four have chunks. A window means the same in a document by itself."""
    attention = {"kind": "block_sparse", "block": 16, "window": 45}
    return wide(attention=attention, context=128)


long_dense, blocks = partial(wide, context=560), partial(packed, 128)


def case_of(layout: Layout, stage: int, build: Any = wide, **options: Any) -> LayoutCase:
    return LayoutCase(
        **{"layout": layout, "stage": stage, "build": build, "batch": many, "loss": each_by_itself, **options}
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage(pool_of: PoolOf, plain: PlainOf, stage: int) -> None:
    cases = [
        case_of(Layout(dp=2), stage, accumulation=2),
        case_of(Layout(dp=2), stage, learned, accumulation=1, checkpointing="block"),
        case_of(Layout(dp=2), stage, (sparse_gpt, sparse_learned)[stage % 2], accumulation=2, batch=odd),
    ]
    check(pool_of, plain, cases, FLOAT32, timeout=120)


def test_tensor_parallel(pool_of: PoolOf, plain: PlainOf) -> None:
    cases = [
        case_of(Layout(tp=2), 1, accumulation=2, batch=odd),
        case_of(Layout(tp=2), 1, accumulation=2, sequence=True),
        case_of(Layout(tp=2), 1, learned, accumulation=1, sequence=True, checkpointing="block"),
        case_of(Layout(tp=2), 1, sparse_gpt, accumulation=1),
    ]
    check(pool_of, plain, cases, FLOAT32, timeout=120)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
def test_pipelines(pool_of: PoolOf, plain: PlainOf, schedule: str) -> None:
    cases = [
        case_of(Layout(pp=2), 1, schedule=schedule),
        case_of(Layout(pp=2), 3, learned, schedule=schedule, checkpointing="block"),
        case_of(Layout(pp=2), 2, sparse_gpt, schedule=schedule, batch=odd),
    ]
    check(pool_of, plain, cases, FLOAT32, timeout=120)


@pytest.mark.parametrize("cp_heads", [1, 2])
def test_context_parallel(pool_of: PoolOf, plain: PlainOf, cp_heads: int) -> None:
    """A ring, whose chunks are no whole blocks under dense attention, and shared heads."""
    cases = [
        case_of(Layout(cp=2), 2, accumulation=2, cp_heads=cp_heads),
        case_of(Layout(cp=2), 3, learned, accumulation=2, checkpointing="block", cp_heads=cp_heads),
        case_of(Layout(cp=2), 0, long_sparse, accumulation=2, batch=blocks, cp_heads=cp_heads),
        case_of(Layout(cp=2), 1, accumulation=2, batch=odd, cp_heads=cp_heads, cp_pad=True),
    ]
    check(pool_of, plain, cases, FLOAT32, timeout=120)


def test_rings_of_four(pool_of: PoolOf, plain: PlainOf) -> None:
    """One in which a rank's chunks are several blocks, and one of two ranks that share heads with two others."""
    cases = [
        case_of(Layout(cp=4), 1, long_dense, accumulation=1, batch=partial(packed, 8 * 70), cp_heads=1),
        case_of(Layout(cp=4), 3, accumulation=2, cp_heads=2, checkpointing="selective"),
        case_of(Layout(cp=4), 2, long_sparse, accumulation=1, batch=blocks, cp_heads=1),
    ]
    check(pool_of, plain, cases, FLOAT32, timeout=120)


def test_several_axes_at_once(pool_of: PoolOf, plain: PlainOf) -> None:
    cases = [
        case_of(Layout(cp=2, tp=2), 3, learned, accumulation=2, sequence=True),
        case_of(Layout(cp=2, pp=2), 1, accumulation=2),
        case_of(Layout(cp=2, pp=2), 1, schedule="interleaved", accumulation=2, cp_heads=1),
        case_of(Layout(cp=2, tp=2), 2, long_sparse, accumulation=2, batch=blocks, cp_heads=1, sequence=True),
        case_of(Layout(tp=2, pp=2), 1, accumulation=2, sequence=True, checkpointing="block"),
        case_of(Layout(cp=2, dp=2), 3, accumulation=1),
        case_of(Layout(cp=4), 2, sparse_gpt, accumulation=2),
    ]
    check(pool_of, plain, cases, FLOAT32, timeout=120)


def test_bfloat16(pool_of: PoolOf, plain: PlainOf) -> None:
    low: dict[str, Any] = {"dtype": "bfloat16", "whole": False}
    cases = [case_of(layout, 2, rounded, **low) for layout in (Layout(dp=2), Layout(cp=2), Layout(pp=2))]
    cases.append(case_of(Layout(cp=2), 2, rounded, cp_heads=1, **low))
    check(pool_of, plain, cases, BFLOAT16, timeout=120)


def own_loop(case: LayoutCase) -> Trajectory:
    """A loop of somebody's own, which calls the engine with positions."""
    path = Trajectory()
    engine: Any = speedlab.initialize(model=case.build(), optimizer=case.optimizer, config=case.config())[0]
    try:
        for step in range(case.steps):
            path.losses.append(0.0)
            for micro in range(case.accumulation):
                tokens, targets, positions = case.batch(step, micro * case.layout.dp + engine.mesh.data_index)
                loss = engine(tokens, targets, positions=positions).loss
                engine.backward(loss)
                engine.step()
                path.losses[-1] += engine.mesh["dp"].sum(loss.detach()).item() / case.accumulation / case.layout.dp
            path.norms.append(engine.global_grad_norm)
        path.parameters = engine.state_dict()
    finally:
        engine.destroy(keep_parameters=False)
    return path


def test_a_loop_of_ones_own(pool_of: PoolOf, plain: PlainOf) -> None:
    case = case_of(Layout(dp=2), 3, accumulation=2)
    for path in pool_of(2).run(own_loop, case, timeout=90):
        assert problems([path], plain(case.plain(), 2), FLOAT32) == []


def dropped(case: LayoutCase) -> list[float]:
    engine: Any = speedlab.initialize(model=case.build(), optimizer=case.optimizer, config=case.config())[0]
    try:
        return [engine.train_batch([case.batch(step, 0)]) for step in range(3)]
    finally:
        engine.destroy(keep_parameters=False)


def test_dropout_drops_what_one_process_drops(pool_of: PoolOf) -> None:
    case = case_of(Layout(), 0, partial(wide, dropout=0.2), accumulation=1)
    (alone,) = pool_of(1).run(dropped, case, timeout=60)
    for layout, heads in ((Layout(tp=2), None), (Layout(cp=2), None), (Layout(cp=2), 1)):
        for found in pool_of(2).run(dropped, replace(case, layout=layout, cp_heads=heads), timeout=60):
            assert found == pytest.approx(alone, rel=2e-6)


def look(case: LayoutCase) -> tuple[float, Tensor | None]:
    """(held-out loss, logits) of sequences whose length no number of ranks divides."""
    engine: Any = speedlab.initialize(model=case.build(), optimizer=case.optimizer, config=case.config())[0]
    try:
        batch = packed(45, 0, 0)
        with torch.no_grad():
            whole = case.layout.pp == 1
            logits = engine.eval()(batch[0], positions=batch[2]).logits if whole else None
        return engine.evaluate([batch]), logits
    finally:
        engine.destroy(keep_parameters=False)


@pytest.mark.parametrize("build", [wide, learned])
def test_held_out_sequences_of_any_length(pool_of: PoolOf, build: Any) -> None:
    model = build()
    tokens, targets, positions = packed(45, 0, 0)
    expected = each_by_itself(model, (tokens, targets, positions)).item()
    layouts = Layout(cp=2, tp=2), Layout(cp=2, pp=2), Layout(tp=4), Layout(cp=4)
    for layout, heads in (*((layout, None) for layout in layouts), (Layout(cp=4), 1), (Layout(cp=2, pp=2), 1)):
        sequence = layout.tp > 1
        case = case_of(layout, 1, build, accumulation=2, sequence=sequence, cp_heads=heads)
        for loss, logits in pool_of(4).run(look, case, timeout=60):
            assert loss == pytest.approx(expected, rel=2e-6)
            if logits is not None:
                torch.testing.assert_close(logits, model(tokens, positions=positions).logits, rtol=1e-5, atol=1e-5)


def labels_by_themselves(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    """The same of a Hugging Face model."""
    tokens, targets, positions = batch
    total = torch.zeros(())
    for row in range(len(tokens)):
        ends = [*(positions[row] == 0).nonzero().flatten().tolist()[1:], tokens.shape[1]]
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            logits = model(tokens[row : row + 1, start:end]).logits[0].float()
            total = total + nn.functional.cross_entropy(logits, targets[row, start:end], reduction="sum")
    return total / (targets != -100).sum()


def test_models_of_transformers(pool_of: PoolOf, plain: PlainOf) -> None:
    options: dict[str, Any] = {"loss": labels_by_themselves, "batch": partial(packed, 20)}
    cases = [
        case_of(Layout(dp=2), 3, llama, accumulation=2, checkpointing="block", **options),
        case_of(Layout(tp=2), 1, llama, accumulation=2, **options),
        case_of(Layout(pp=2), 1, llama, **options),
    ]
    check(pool_of, plain, cases, FLOAT32, timeout=120)


def refusals(layout: Layout, how: dict[str, Any]) -> list[str]:
    case = case_of(layout, 1, accumulation=2, **how)
    engine: Any = speedlab.initialize(model=case.build(), optimizer=case.optimizer, config=case.config())[0]
    tokens, targets, positions = packed(48, 0, 0)
    wrong: list[list[Any]] = [
        [(tokens, targets, positions)] * 2,
        [(tokens, targets, positions[:, 1:])] * 2,
        [(tokens, targets, positions), (tokens, targets)],
    ]
    reported = []
    try:
        for batches in wrong:
            try:
                engine.train_batch(batches)
                reported.append("")
            except (ConfigError, LayoutError, ValueError) as error:
                reported.append(str(error))
        return reported
    finally:
        engine.destroy(keep_parameters=False)


def test_what_is_refused(pool_of: PoolOf) -> None:
    shape = "positions: torch.int64 of shape (2, 47), expected int64 of the tokens' shape (2, 48)"
    for fine, wrong, some in pool_of(2).run(refusals, Layout(cp=2), {"cp_heads": 1}, timeout=60):
        assert fine == ""
        assert wrong.startswith(shape)
        assert some == ""  # Each micro-batch is computed by itself.
    for fine, wrong, some in pool_of(2).run(refusals, Layout(pp=2), {}, timeout=60):
        assert fine == ""
        assert wrong.startswith(shape)
        assert some.startswith("train_batch: positions came with some micro-batches and not with others")


# ---- runs ------------------------------------------------------------------------------------------------------------


def write_texts(folder: Path) -> Path:
    """Files much shorter and a little longer than a sequence."""
    folder.mkdir()
    for number in range(120):
        length = 3 + 7 * number % 40
        (folder / f"{number:03}.txt").write_text("".join(chr(97 + (number + 3 * k) % 26) for k in range(length)))
    return folder


def trained(run: str) -> tuple[list[float], list[float], list[list[int]]]:
    """(losses, held-out losses, shapes and ends of a micro-batch) of a whole run."""
    with as_engine(run):
        state = run_registry.advance(run)
        assert state == "finished", state
        training = trainer_of(run).training
        tokens, targets, positions = next(training.batches(training.train_rows, 0))
        assert (targets[tokens == training.corpus.end] == -100).all()
        assert (positions[:, 1:][tokens[:, :-1] == training.corpus.end] == 0).all()
        shapes = [[*each.shape] for each in (tokens, targets, positions)]
        folder = RunFolder(run)
        before = [event.details["heldout_loss"] for event in folder.read_events() if event.kind == "evaluated"]
        records = [json.loads(line) for line in (folder.path / "records" / "rank-0.jsonl").read_text().splitlines()]
        after = [record["heldout_loss"] for record in records if record["heldout_loss"] is not None]
        return [record["loss"] for record in records], before + after, shapes


def test_a_run_is_the_same_under_every_layout(pool_of: PoolOf, tmp_path: Path) -> None:
    source = write_texts(tmp_path / "texts")
    data = {"source": str(source), "tokenizer": "bytes", "sequence_length": 16, "documents": "separate"}
    found = {}
    for layout in (Layout(dp=2), Layout(tp=2), Layout(pp=2), Layout(cp=2)):
        place = tmp_path / str(layout).replace(" ", "")
        place.mkdir()
        axes = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp}
        run = new_run(place, data=data, steps=4, eval={"every_steps": 2}, parallel=axes)
        (losses, heldout, shapes), _ = pool_of(2).run(trained, run, timeout=90)
        pool_of(2).new_group()
        assert shapes == [[1, 16]] * 3
        assert len(losses) == 4
        assert len(heldout) == 3
        found[str(layout)] = losses, heldout
    (first, first_heldout), *others = found.values()
    for losses, heldout in others:
        assert losses == pytest.approx(first, rel=2e-5)
        assert heldout == pytest.approx(first_heldout, rel=2e-5)
