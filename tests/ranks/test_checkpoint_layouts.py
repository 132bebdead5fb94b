"""Random layouts of four ranks write what random others read: parameters and moments come back to the bit."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import speedlab
from ranks.conftest import PoolOf
from speedlab.config import ModelConfig
from speedlab.engine.checkpoint.manifest import read_manifest, sources_of
from speedlab.engine.checkpoint.read import Files
from speedlab.layout import ShardRange
from speedlab.models import GPT

MODELS = {
    "tied": ModelConfig(layers=4, hidden=24, heads=4, ffn_hidden=40, vocab_size=37, context=16, bias=True),
    "untied": ModelConfig(
        layers=4,
        hidden=24,
        heads=4,
        ffn_hidden=40,
        vocab_size=37,
        context=16,
        tied=False,
        position="learned",
        norm="layer",
    ),
}


@dataclass(frozen=True)
class Shape:
    """A layout and stage of four ranks."""

    pp: int
    dp: int
    tp: int
    stage: int
    schedule: str
    sequence: bool

    def config(self, dtype: str) -> dict[str, Any]:
        return {
            "parallel": {
                "pp": self.pp,
                "tp": self.tp,
                "schedule": self.schedule,
                "sequence": self.sequence and self.tp > 1,
            },
            "zero": {"stage": self.stage, "bucket_bytes": 1},
            "precision": {"dtype": dtype},
            "batch": {"micro_size": 1, "accumulation": 4},
            "optimizer": {"lr": 0.01},
            "data": {"sequence_length": 8},
        }

    def __str__(self) -> str:
        return f"pp {self.pp} × dp {self.dp} × tp {self.tp}, zero {self.stage}, {self.schedule}"


SHAPES = [
    Shape(pp, 4 // (pp * tp), tp, stage, schedule, sequence=stage % 2 == 1)
    for pp in (1, 2, 4)
    for tp in (1, 2, 4)
    for stage in range(4)
    for schedule in (("1f1b", "interleaved") if pp == 2 else ("gpipe",))
    if 4 % (pp * tp) == 0
]


def engine_of(shape: Shape, model: str, dtype: str, seed: int) -> Any:
    config = {**shape.config(dtype), "seed": seed}
    return speedlab.initialize(model=lambda: GPT(MODELS[model]), config=config)[0]


def write(shape: Shape, model: str, dtype: str, folder: Path) -> dict[str, Tensor]:
    engine = engine_of(shape, model, dtype, 1)
    try:
        for step in range(2):
            generator = torch.Generator().manual_seed(10 * step + engine.group.index)
            rows = [torch.randint(0, 37, (1, 9), generator=generator) for _ in range(engine.accumulation)]
            engine.train_batch([(row[:, :-1], row[:, 1:]) for row in rows])
        engine.save_checkpoint(folder, "first")
        return engine.state_dict()
    finally:
        engine.destroy(keep_parameters=False)


def read_and_write(shape: Shape, model: str, dtype: str, folder: Path) -> dict[str, Tensor]:
    """Into an engine of other values; then this layout writes what it read, in the background."""
    engine = engine_of(shape, model, dtype, 2)
    try:
        engine.load_checkpoint(folder, "first")
        assert engine.global_step == 2
        engine.save_checkpoint(folder, "second", wait=False)
        engine.saving.wait(30)
        return engine.state_dict()
    finally:
        engine.destroy(keep_parameters=False)


def content(path: Path) -> dict[str, Tensor]:
    """Every state of every parameter whole, put together by plain indexing."""
    manifest = read_manifest(path)
    states: dict[str, Tensor] = {}
    with Files(path) as files:
        for name, entry in manifest["parameters"].items():
            assert {"master", "exp_avg", "exp_avg_sq"} == entry["states"].keys()
            assert entry["scalars"]["step"] == 2
            for kind in entry["states"]:
                states[f"{name}/{kind}"] = torch.full(entry["shape"], torch.nan)
            parts: dict[ShardRange | None, list[Any]] = {}

            for source in sources_of(entry):
                parts.setdefault(source.stretch.part, []).append(source)
            for part, sources in parts.items():
                ordered = sorted(sources, key=lambda source: source.stretch.start)
                for kind in entry["states"]:
                    own = torch.cat([files.values(source, kind) for source in ordered])
                    whole = states[f"{name}/{kind}"]
                    if part is None:
                        whole.copy_(own.view(whole.shape))
                        continue
                    own, place = own.view(part.own_shape), 0
                    for low, high in part.ranges:
                        whole.narrow(part.dim, low, high - low).copy_(own.narrow(part.dim, place, high - low))
                        place += high - low
    return states


HALF = [shape for number, shape in enumerate(SHAPES) if (number // 8 + shape.stage) % 2 == 0]


def pairs(shapes: list[Shape]) -> list[Any]:
    """Every shape writes once and reads once, in an order drawn by a fixed seed."""
    drawn = random.Random(4)
    writers, readers = drawn.sample(shapes, len(shapes)), drawn.sample(shapes, len(shapes))
    return [pytest.param(a, b, id=f"{a} → {b}") for a, b in zip(writers, readers, strict=True)]


def test_half_of_the_shapes_hold_every_layout_schedule_and_stage() -> None:
    for field in ("pp", "dp", "tp", "stage", "schedule", "sequence"):
        assert {getattr(shape, field) for shape in HALF} == {getattr(shape, field) for shape in SHAPES}, field
    layouts = {(shape.pp, shape.tp, shape.schedule) for shape in SHAPES}
    assert {(shape.pp, shape.tp, shape.schedule) for shape in HALF} == layouts


@pytest.mark.nightly
@pytest.mark.parametrize(("writer", "reader"), pairs(SHAPES))
def test_what_any_layout_wrote_any_other_reads(pool_of: PoolOf, tmp_path: Path, writer: Shape, reader: Shape) -> None:
    check(pool_of, tmp_path, writer, reader)


@pytest.mark.parametrize(("writer", "reader"), pairs(HALF))
def test_what_a_layout_wrote_another_reads(pool_of: PoolOf, tmp_path: Path, writer: Shape, reader: Shape) -> None:
    check(pool_of, tmp_path, writer, reader)


def check(pool_of: PoolOf, tmp_path: Path, writer: Shape, reader: Shape) -> None:
    drawn = random.Random(str((writer, reader)))
    model, dtype = drawn.choice(["tied", "untied"]), drawn.choice(["float32", "bfloat16"])
    pool = pool_of(4)
    written = pool.run(write, writer, model, dtype, tmp_path)[0]
    read = pool.run(read_and_write, reader, model, dtype, tmp_path)
    first, second = content(tmp_path / "first"), content(tmp_path / "second")
    assert first.keys() == second.keys()
    assert [name for name in first if not first[name].equal(second[name])] == []
    for name, _ in GPT(MODELS[model]).named_parameters():
        assert first[f"{name}/master"].equal(written[name]), f"{name}: not what {writer} held"
        for rank, state in enumerate(read):
            assert state[name].equal(written[name]), f"{name} on rank {rank} of {reader}"
