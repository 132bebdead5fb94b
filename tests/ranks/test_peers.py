"""Other judges: DistributedDataParallel and FSDP2 on the same data, and models that others wrote (Hugging Face)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ranks import models
from ranks.conftest import Check
from ranks.loops import (
    Case,
    Tolerance,
    Trajectory,
    adamw,
    engine_for,
    engine_step,
    problems,
    sgd,
    train_cases,
    train_ddp,
    train_engine,
)
from ranks.pool import Pool
from ranks.test_parity import FLOAT32, STAGES

# ---- DDP and FSDP2 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_distributed_data_parallel(ranks: Pool, optimizer) -> None:
    """Every stage gives what DDP gives, also with accumulation and clipping."""
    case = Case(optimizer=optimizer, accumulation=2, clip_norm=0.3, steps=6)
    peers = ranks.run(train_ddp, case)
    theirs = replace_losses(peers)
    theirs.start = {name: p.detach() for name, p in case.build().named_parameters()}
    cases = [replace(case, stage=stage) for stage in STAGES]
    for case, *paths in zip(cases, *ranks.run(train_cases, cases), strict=True):
        assert problems(paths, theirs, FLOAT32) == [], str(case)


def replace_losses(paths: list[Trajectory]) -> Trajectory:
    """Rank 0's trajectory with losses that are means over ranks."""
    means = [sum(losses) / len(paths) for losses in zip(*(path.losses for path in paths), strict=True)]
    return Trajectory(losses=means, norms=paths[0].norms, parameters=paths[0].parameters)


def train_fsdp2(case: Case) -> Trajectory:
    """Blocks and root under fully_shard, in float32; norms and parameters are made whole by DTensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = case.build()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = case.optimizer(model.parameters())
    path = Trajectory()
    for step in range(case.steps):
        total = 0.0
        for micro in range(case.accumulation):
            loss = case.loss(model, case.batch(step, micro * dist.get_world_size() + dist.get_rank()))
            (loss / case.accumulation).backward()
            total += loss.item() / case.accumulation
        path.losses.append(total)
        limit = case.clip_norm if case.clip_norm is not None else float("inf")
        path.norms.append(whole(nn.utils.clip_grad_norm_(model.parameters(), limit)).item())
        optimizer.step()
        optimizer.zero_grad()
    path.parameters = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
    return path


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def test_fully_sharded_data_parallel(two: Pool) -> None:
    """Stage 3 gives what FSDP2 gives."""
    case = Case(stage=3, optimizer=adamw, accumulation=2, clip_norm=0.3, steps=6)
    theirs = replace_losses(two.run(train_fsdp2, case))
    theirs.start = {name: p.detach() for name, p in case.build().named_parameters()}
    assert problems(two.run(train_engine, case), theirs, FLOAT32) == []


# ---- buffers as under DDP --------------------------------------------------------------------------------------------


def buffers_of_ddp(case: Case) -> tuple[dict[str, Tensor], list[float]]:
    model = nn.parallel.DistributedDataParallel(case.build())
    optimizer = case.optimizer(model.parameters())
    for step in range(case.steps):
        model(*case.batch(step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    buffers = {name: b.clone() for name, b in model.module.named_buffers()}
    return buffers, evaluations(model, case)


def buffers_of_engine(case: Case) -> tuple[dict[str, Tensor], list[float]]:
    with engine_for(case) as engine:
        for step in range(case.steps):
            engine_step(engine, case, step)
        buffers = {name: b.clone() for name, b in engine.module.named_buffers()}
        return buffers, evaluations(engine, case)


def evaluations(model: Any, case: Case) -> list[float]:
    """The loss of one batch, the same on every rank, with the running statistics."""
    model.eval()
    with torch.no_grad():
        return [model(*case.batch(70, 0)).item()]


@pytest.mark.parametrize("stage", STAGES)
def test_buffers_and_batch_norm_as_under_ddp(two: Pool, stage: int) -> None:
    """Running statistics are those of DDP on rank 0, and evaluation gives the same on every rank, as DDP's does."""
    case = Case(stage=stage, build=models.with_buffers, batch=models.points, steps=5)
    theirs, ours = two.run(buffers_of_ddp, case), two.run(buffers_of_engine, case)
    for name, expected in theirs[0][0].items():
        torch.testing.assert_close(ours[0][0][name], expected, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        assert ours[0][0][name].dtype == expected.dtype
    assert ours[0][1] == pytest.approx(theirs[0][1], rel=1e-5)
    assert theirs[1][1] == theirs[0][1]
    assert ours[1][1] == ours[0][1], "rank 1 evaluates with the same statistics as rank 0"


# ---- Hugging Face ----------------------------------------------------------------------------------------------------


def gpt2() -> nn.Module:
    """GPT-2 with a tied head, without dropout: 3 blocks of 12 channels."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=models.VOCABULARY,
        n_positions=16,
        n_embd=models.WIDTH,
        n_layer=3,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        initializer_range=0.3,
    )
    return models.seeded(GPT2LMHeadModel, config)


def llama() -> nn.Module:
    """Llama with grouped keys: 3 blocks of 12 channels; its rotary frequencies are a buffer in no state dict."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=models.VOCABULARY,
        hidden_size=models.WIDTH,
        intermediate_size=21,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        use_cache=False,
        initializer_range=0.3,
    )
    return models.seeded(LlamaForCausalLM, config)


def hugging_face_loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    """Their own loss, from their own output class."""
    inputs, _ = batch
    return model(input_ids=inputs, labels=inputs).loss


HF = [gpt2, llama]
# GPT-2's joint query-key-value layer has a bias for keys too, whose gradient is rounding noise.
HF_FLOAT32 = Tolerance(loss=2e-6, norm=5e-6, update=5e-4)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("build", HF)
def test_hugging_face(check: Check, two: Pool, build: Callable[[], nn.Module], stage: int) -> None:
    case = Case(stage=stage, build=build, loss=hugging_face_loss, accumulation=2, steps=5)
    cases = [case, replace(case, checkpointing="block", clip_norm=0.3), replace(case, bucket_bytes=2**20)]
    check(two, cases, HF_FLOAT32, timeout=60)


def units_of(build: Callable[[], nn.Module]) -> list[str]:
    case = Case(stage=3, build=build, loss=hugging_face_loss)
    with engine_for(case) as engine:
        return [unit.name for unit in engine.zeros[0].units]


def test_units_of_hugging_face_models_are_their_blocks(two: Pool) -> None:
    assert two.run(units_of, gpt2)[0] == ["root", "transformer.h.0", "transformer.h.1", "transformer.h.2"]
    assert two.run(units_of, llama)[0] == ["root", "model.layers.0", "model.layers.1", "model.layers.2"]


def gradient_checkpointing(case: Case, reentrant: bool) -> Trajectory:
    """Their own activation checkpointing, of either kind."""
    model: Any = case.build()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    path = Trajectory()
    with engine_for(case, model=model) as engine:
        for step in range(case.steps):
            path.losses.append(engine_step(engine, case, step))
            path.norms.append(engine.global_grad_norm)
        path.parameters = engine.state_dict()
    return path


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
def test_hugging_face_checkpointing(two: Pool, plain, stage: int, reentrant: bool) -> None:
    case = Case(stage=stage, build=llama, loss=hugging_face_loss, steps=4)
    paths = two.run(gradient_checkpointing, case, reentrant, timeout=40)
    assert problems(paths, plain(case, 2), HF_FLOAT32) == []


def from_meta(build: Callable[[], nn.Module], stage: int) -> tuple[list[float], dict[str, Tensor], list[Tensor]]:
    case = Case(stage=stage, build=build, loss=hugging_face_loss, steps=3)
    with engine_for(case, model=functools.partial(plain_build, build)) as engine:
        start = engine.state_dict()
        buffers = [buffer.clone() for buffer in engine.module.buffers()]
        return [engine_step(engine, case, step) for step in range(case.steps)], start, buffers


def plain_build(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


@pytest.mark.parametrize("build", HF)
def test_hugging_face_models_on_meta(two: Pool, build: Callable[[], nn.Module]) -> None:
    """Built on meta by their own function: initialised as they would initialise themselves, buffers included, and
    alike at stages 0 and 3."""
    reference = build()
    (losses, start, buffers), (again, start_3, _) = (
        two.run(from_meta, build, stage, timeout=40)[0] for stage in (0, 3)
    )
    assert losses == pytest.approx(again, rel=2e-6)
    for name, parameter in reference.named_parameters():
        assert start[name].equal(start_3[name]), name
        if parameter.numel() >= 100:
            assert start[name].std().item() == pytest.approx(parameter.std().item(), rel=0.3), name
        elif parameter.ndim == 1:
            assert start[name].equal(parameter), f"{name}: norms start at one, biases at zero"
    for ours, theirs in zip(buffers, reference.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)
