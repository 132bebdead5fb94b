"""Checkpoints: resuming is exact, any layout reads any other's, and damage is an error that names the file."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grids import thinned
from torch import Tensor, nn

from ranks import models
from ranks.conftest import PoolOf
from ranks.loops import Case, Trajectory, adamw, engine_for, engine_step, finish, sgd
from ranks.pool import Pool
from ranks.test_parity import FLOAT32, STAGES


class Noisy(models.Transformer):
    """Dropout, so that the random state matters, and a parameter without elements, as of a layer that adds none."""

    def __init__(self) -> None:
        super().__init__()
        self.added = nn.Linear(0, models.WIDTH, bias=False)

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(block(x), 0.2, self.training) + self.added(x[..., :0])


def noisy() -> nn.Module:
    return models.seeded(Noisy)


def half_life(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)


def everything(engine: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All that must come back: masters, moments (as this rank holds them), rates, scale and random states."""
    partitioned = engine.partitioned_optimizer
    moments = {
        f"{flat.name}/{kind}": state.clone()
        for flat in partitioned.flats
        for kind, state in partitioned.states_of(flat).items()
    }
    return {
        "parameters": engine.state_dict(),
        "moments": moments,
        "steps": sorted(
            float(value) for state in optimizer.state.values() for key, value in state.items() if key == "step"
        ),
        "rates": [group["lr"] for group in optimizer.param_groups],
        "scale": engine.loss_scale.state_dict(),
        "step": engine.global_step,
        "random": (torch.get_rng_state(), random.random(), float(np.random.rand())),
    }


def train_saving(case: Case, folder: Path, save_at: int) -> tuple[list[float], dict[str, Any]]:
    """Train to the end; before step `save_at` save. Returns the losses from there and everything at the end."""
    seed_rank()
    with engine_for(case, lr_scheduler=half_life) as engine:
        losses = []
        for step in range(case.steps):
            if step == save_at:
                # An object that JSON holds comes back as it was.
                path = engine.save_checkpoint(folder, client_state={"position": [step, "x"], "flag": True})
                assert path == folder / f"step-{step:06d}"
                losses.clear()
            losses.append(engine_step(engine, case, step))
        return losses, everything(engine, engine.optimizer)


def resume(case: Case, folder: Path, tag: str | None = None) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """Load into an engine that has made another step before, and train to the end."""
    torch.manual_seed(999)
    with engine_for(case, lr_scheduler=half_life) as engine:
        engine_step(engine, case, 40)
        path, client_state = engine.load_checkpoint(folder, tag)
        assert path.parent == folder
        losses = [engine_step(engine, case, step) for step in range(engine.global_step, case.steps)]
        return losses, everything(engine, engine.optimizer), client_state


def seed_rank() -> None:
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)


def differences(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """Places where two nested states are not the same to the bit."""
    if isinstance(ours, dict):
        if ours.keys() != theirs.keys():
            return [f"{path}: keys {sorted(ours)} and {sorted(theirs)}"]
        return [line for key in ours for line in differences(ours[key], theirs[key], f"{path}/{key}")]
    if isinstance(ours, Tensor):
        return [] if ours.equal(theirs) else [path]
    if isinstance(ours, tuple | list):
        pairs = zip(ours, theirs, strict=True)
        return [line for i, (a, b) in enumerate(pairs) for line in differences(a, b, f"{path}/{i}")]
    return [] if ours == theirs else [f"{path}: {ours} and {theirs}"]


SIZES, DTYPES = [1, 2, 4], ["float32", "bfloat16", "float16"]


@pytest.mark.parametrize(
    ("stage", "dtype", "ranks"),
    thinned(
        itertools.product(STAGES, DTYPES, SIZES),
        lambda stage, dtype, size: (stage + SIZES.index(size)) % 3 == DTYPES.index(dtype),
    ),
    indirect=["ranks"],
)
def test_resuming_in_the_same_layout_is_exact(ranks: Pool, tmp_path: Path, stage: int, dtype: str) -> None:
    case = Case(stage=stage, dtype=dtype, build=noisy, optimizer=adamw, steps=6, clip_norm=0.5)
    whole = ranks.run(train_saving, case, tmp_path, 3, timeout=40)
    resumed = ranks.run(resume, case, tmp_path, timeout=40)
    for rank, ((losses, end), (again, end_again, client_state)) in enumerate(zip(whole, resumed, strict=True)):
        assert again == losses, f"rank {rank}"
        assert differences(end_again, end) == [], f"rank {rank}"
        assert client_state == {"position": [3, "x"], "flag": True}


def test_resuming_with_accumulation_and_momentum_is_exact(two: Pool, tmp_path: Path) -> None:
    for stage in STAGES:
        case = Case(stage=stage, optimizer=sgd, accumulation=2, steps=5, checkpointing="block", build=models.frozen)
        folder = tmp_path / str(stage)
        whole, resumed = two.run(train_saving, case, folder, 2), two.run(resume, case, folder)
        for (losses, end), (again, end_again, _) in zip(whole, resumed, strict=True):
            assert again == losses
            assert differences(end_again, end) == []


# ---- other layouts ---------------------------------------------------------------------------------------------------


def save_after(case: Case, folder: Path, steps: int) -> dict[str, Tensor]:
    with engine_for(case) as engine:
        for step in range(steps):
            engine_step(engine, case, step)
        engine.save_checkpoint(folder, "here")
        return engine.state_dict()


def load_and_go_on(case: Case, folder: Path) -> tuple[dict[str, Tensor], Trajectory]:
    path = Trajectory()
    with engine_for(case) as engine:
        engine.load_checkpoint(folder, "here")
        loaded = engine.state_dict()
        for step in range(engine.global_step, case.steps):
            engine_step(engine, case, step)
            path.losses.append(engine.totals.loss)
        finish(path, engine)
    return loaded, path


def spread(case: Case, ranks: int) -> Case:
    """The same global batch of 4 micro-batches on so many ranks."""
    return replace(case, accumulation=4 // ranks)


LAYOUTS = [(1, 0), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3), (4, 0), (4, 1), (4, 2), (4, 3)]


@pytest.mark.parametrize(
    ("dtype", "build"),
    thinned(
        itertools.product(["float32", "bfloat16"], [models.tied, models.frozen]),
        lambda dtype, build: (dtype == "float32") == (build is models.tied),
    ),
)
def test_every_layout_reads_every_other(pool_of: PoolOf, plain, tmp_path: Path, build, dtype: str) -> None:
    """Masters come back to the bit, moments so that losses go on as in the plain loop. Units are cut differently."""
    case = Case(build=build, dtype=dtype, optimizer=adamw, steps=6, whole=dtype == "float32")
    written: dict[tuple[int, int], dict[str, Tensor]] = {}
    for size, stage in LAYOUTS:
        folder = tmp_path / f"{size}-{stage}"
        written[size, stage] = pool_of(size).run(save_after, replace(spread(case, size), stage=stage), folder, 3)[0]
    # Each is read by another number of ranks, at another stage and with blocks merged into other units.
    for (size, stage), (other, other_stage) in zip(LAYOUTS, LAYOUTS[5:] + LAYOUTS[:5], strict=True):
        reader = replace(spread(case, other), stage=other_stage, bucket_bytes=12_000)
        results = pool_of(other).run(load_and_go_on, reader, tmp_path / f"{size}-{stage}")
        where = f"dp {size} stage {stage} read at dp {other} stage {other_stage}"
        for loaded, path in results:
            assert [n for n, p in written[size, stage].items() if not p.equal(loaded[n])] == [], where
            if dtype == "float32":
                assert path.losses == pytest.approx(plain(spread(case, 2), 2).losses[3:], rel=FLOAT32.loss), where
            assert path.losses == pytest.approx(results[0][1].losses), where


def test_layouts_go_on_alike_in_bfloat16(pool_of: PoolOf, tmp_path: Path) -> None:
    """From one checkpoint, with the same global batch, on 1, 2 and 4 ranks. Sums are in float32 where accumulated."""
    case = Case(dtype="bfloat16", optimizer=adamw, steps=6)
    pool_of(2).run(save_after, replace(spread(case, 2), stage=3), tmp_path, 3)
    curves = [
        pool_of(size).run(load_and_go_on, replace(spread(case, size), stage=stage), tmp_path)[0][1].losses
        for size, stage in LAYOUTS
    ]
    for curve, layout in zip(curves, LAYOUTS, strict=True):
        assert curve == pytest.approx(curves[0], rel=1e-3), layout


# ---- damage ----------------------------------------------------------------------------------------------------------


def flip_a_byte(folder: Path) -> Path:
    file = folder / "rank-1.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return file


def cut_a_file(folder: Path) -> Path:
    file = folder / "rank-0.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    return file


def lose_a_file(folder: Path) -> Path:
    file = folder / "rank-1.safetensors"
    file.unlink()
    return file


def empty_a_file(folder: Path) -> Path:
    file = folder / "rank-0.safetensors"
    file.write_bytes(b"")
    return file


def swap_files(folder: Path) -> Path:
    first, second = folder / "rank-0.safetensors", folder / "rank-1.safetensors"
    first.rename(folder / "aside")
    second.rename(first)
    (folder / "aside").rename(second)
    return first


def lose_the_manifest(folder: Path) -> Path:
    file = folder / "manifest.json"
    file.unlink()
    return file


def cut_the_manifest(folder: Path) -> Path:
    file = folder / "manifest.json"
    file.write_text(file.read_text()[:200])
    return file


def foreign_manifest(folder: Path) -> Path:
    file = folder / "manifest.json"
    file.write_text(json.dumps({"format": "another", "files": {}}))
    return file


def newer_version(folder: Path) -> Path:
    return change_manifest(folder, lambda manifest: manifest.update(version=99))


def escape_the_folder(folder: Path) -> Path:
    def change(manifest: dict[str, Any]) -> None:
        manifest["files"]["../outside"] = manifest["files"].pop("rank-1.safetensors")

    return change_manifest(folder, change)


def list_a_parameter_short(folder: Path) -> Path:
    """A slice is missing from the manifest: values would silently stay what they were."""

    def change(manifest: dict[str, Any]) -> None:
        manifest["parameters"]["blocks.1.up.weight"]["slices"].pop()

    return change_manifest(folder, change)


def point_outside_a_file(folder: Path) -> Path:
    """A slice that begins after the end of what its file holds."""

    def change(manifest: dict[str, Any]) -> None:
        for piece in manifest["parameters"]["blocks.1.up.weight"]["slices"]:
            piece["offset"] += 10_000_000

    return change_manifest(folder, change)


def rename_a_parameter(folder: Path) -> Path:
    def change(manifest: dict[str, Any]) -> None:
        manifest["parameters"]["other"] = manifest["parameters"].pop("norm.bias")

    return change_manifest(folder, change)


def reshape_a_parameter(folder: Path) -> Path:
    def change(manifest: dict[str, Any]) -> None:
        manifest["parameters"]["norm.bias"]["shape"] = [5]

    return change_manifest(folder, change)


def wrong_type_in_the_manifest(folder: Path) -> Path:
    return change_manifest(folder, lambda manifest: manifest.update(files=["rank-0.safetensors"]))


def change_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text())
    change(manifest)
    file.write_text(json.dumps(manifest))
    return file


DAMAGES = [
    flip_a_byte,
    cut_a_file,
    lose_a_file,
    empty_a_file,
    swap_files,
    lose_the_manifest,
    cut_the_manifest,
    foreign_manifest,
    newer_version,
    escape_the_folder,
    list_a_parameter_short,
    point_outside_a_file,
    rename_a_parameter,
    reshape_a_parameter,
    wrong_type_in_the_manifest,
]


def load_damaged(case: Case, folder: Path, tag: str) -> tuple[str, str, list[str], float]:
    """(kind and text of the error, what changed, the next step's loss)."""
    with engine_for(case) as engine:
        engine_step(engine, case, 0)
        before = engine.state_dict()
        kind = message = ""
        try:
            engine.load_checkpoint(folder, tag)
        except Exception as error:  # the test looks at its kind
            kind, message = type(error).__name__, str(error)
        after = engine.state_dict()
        changed = [name for name in before if not before[name].equal(after[name])]
        return kind, message, changed, engine_step(engine, case, 1)


@pytest.fixture(scope="module")
def sound(pool_of: PoolOf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an undamaged checkpoint `here`, written by two ranks at stage 2."""
    folder = tmp_path_factory.mktemp("checkpoints")
    pool_of(2).run(save_after, Case(stage=2), folder, 2)
    return folder


@pytest.mark.parametrize(
    ("damage", "stage"),
    thinned(itertools.product(DAMAGES, [0, 3]), lambda damage, stage: DAMAGES.index(damage) % 2 == (stage == 3)),
)
def test_damage_is_an_error_that_names_the_file(two: Pool, sound: Path, tmp_path: Path, damage, stage: int) -> None:
    shutil.copytree(sound / "here", tmp_path / "here")
    file = damage(tmp_path / "here")
    for rank, (kind, message, changed, loss) in enumerate(two.run(load_damaged, Case(stage=stage), tmp_path, "here")):
        assert kind == "CheckpointError", f"rank {rank}: {kind}: {message}"
        assert str(file) in message, f"rank {rank}"
        assert changed == [], "nothing is changed before everything is known to be sound"
        assert loss == pytest.approx(3.5, abs=0.5), "the engine goes on"


def load_from(case: Case, folder: Path, tag: str | None) -> str:
    with engine_for(case) as engine:
        try:
            engine.load_checkpoint(folder, tag)
        except Exception as error:  # the test looks at its text
            return f"{type(error).__name__}: {error}"
    return "loaded"


def test_another_model_is_named(two: Pool, sound: Path, tmp_path: Path) -> None:
    other = Case(build=models.with_buffers, batch=models.points)
    for message in two.run(load_from, other, sound, "here"):
        assert message.startswith("CheckpointError")
        assert str(sound / "here" / "manifest.json") in message
    for tag in ("nothing", None):
        for message in two.run(load_from, Case(), tmp_path, tag):
            assert message.startswith("CheckpointError")
            assert str(tmp_path) in message


def test_a_checkpoint_that_leaves_out_what_has_no_elements(two: Pool, tmp_path: Path) -> None:
    """As earlier versions wrote it."""
    case = Case(build=noisy, stage=2)
    two.run(save_after, case, tmp_path, 2)
    change_manifest(tmp_path / "here", lambda manifest: manifest["parameters"].pop("added.weight"))
    assert two.run(load_from, replace(case, stage=3), tmp_path, "here") == ["loaded", "loaded"]


def save_several(case: Case, folder: Path) -> list[str]:
    """Two tags, one of them twice; then the newest is loaded by leaving out the tag."""
    said = []
    with engine_for(case) as engine:
        for step, tag in enumerate(("z-first", "a-second")):
            engine_step(engine, case, step)
            engine.save_checkpoint(folder, tag)
        try:
            engine.save_checkpoint(folder, "z-first")
        except Exception as error:  # the test looks at its text
            said.append(f"{type(error).__name__}: {error}")
        said.append(engine.load_checkpoint(folder)[0].name)
    return said


def test_nothing_is_overwritten_and_the_newest_is_found(two: Pool, tmp_path: Path) -> None:
    for error, newest in two.run(save_several, Case(stage=1), tmp_path):
        assert error.startswith("CheckpointError")
        assert str(tmp_path / "z-first") in error
        assert newest == "a-second", "newest by step, not by name"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-second", "z-first"], "nothing half-written stays"


def test_each_element_is_written_once_and_hashes_are_true(two: Pool, tmp_path: Path) -> None:
    """The slices in the manifest cover each parameter exactly once, where every rank holds all, and where not."""
    for stage in (0, 3):
        folder = tmp_path / str(stage)
        two.run(save_after, Case(stage=stage), folder, 1)
        manifest = json.loads((folder / "here" / "manifest.json").read_text())
        for name, parameter in models.transformer().named_parameters():
            slices = sorted((piece["start"], piece["end"]) for piece in manifest["parameters"][name]["slices"])
            assert slices[0][0] == 0
            assert slices[-1][1] == parameter.numel()
            assert all(a[1] == b[0] for a, b in itertools.pairwise(slices)), name
        for name, entry in manifest["files"].items():
            data = (folder / "here" / name).read_bytes()
            assert entry["bytes"] == len(data)
            assert entry["sha256"] == hashlib.sha256(data).hexdigest()


def save_without_room(case: Case, folder: Path) -> str:
    from unittest import mock

    usage = mock.Mock(free=1000)
    with engine_for(case) as engine, mock.patch("shutil.disk_usage", return_value=usage):
        engine_step(engine, case, 0)
        try:
            engine.save_checkpoint(folder, "here")
        except Exception as error:  # the test looks at its text
            return f"{type(error).__name__}: {error}"
    return "saved"


def test_no_room_is_said_before_anything_is_written(two: Pool, tmp_path: Path) -> None:
    for message in two.run(save_without_room, Case(stage=2), tmp_path):
        assert message.startswith("CheckpointError")
        assert str(tmp_path / "here") in message
        assert "MiB" in message
    assert list(tmp_path.iterdir()) == []
