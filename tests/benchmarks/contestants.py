"""The training steps that `bench step` compares with ours: one model, one batch, and a different way to keep ranks in
step.

Every peer has what ours has: the same allocator setting, torch's setting with which oneDNN multiplies float32 where our
engine lets it, torch's fused AdamW in one pass, gradients that are dropped instead of zeroed. All use the full logits
and torch's cross-entropy.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from speedlab.calibrate.table import missing
from speedlab.comm.shared import BACKEND, register
from speedlab.config import PrecisionConfig
from speedlab.engine.kernels import CpuKernelOverrides
from speedlab.models import GPT
from tests.benchmarks.contest import AS_INSTALLED, COMPRESSED, KEPT, ON_KERNELS, let_onednn_multiply
from tests.benchmarks.workload import LEARNING_RATE, MICRO_BATCH, batch, model_of

Step = Callable[[Tensor, Tensor], None]
"""One optimizer step on tokens (B, T) and targets (B, T)."""


def names() -> list[str]:
    """Every contestant, the limit first. Peers use gloo, as their users do, and once more our shared-memory backend, so
    that engine and collectives can be told apart; the limit once more with our products and attention. DeepSpeed only
    where it is installed."""
    peers = ["DDP", "ZeroRedundancyOptimizer", "FSDP2 kept", "FSDP2 resharded"]
    on_ours = [f"{peer} on shared" for peer in ("DDP", "FSDP2 kept", "FSDP2 resharded")]
    deepspeed = [f"DeepSpeed {stage}" for stage in range(4)] if not missing() else []
    own = [f"{kind} {stage}" for kind in ("ours", "shipped") for stage in range(4)]
    own += [f"{COMPRESSED} {stage}" for stage in (0, 1)]
    as_installed = [f"{name} {AS_INSTALLED}" for name in ("limit", "DDP")]
    return ["limit", *peers, *on_ours, f"limit {ON_KERNELS}", *deepspeed, *own, *as_installed]


def is_ours(name: str) -> bool:
    """Whether it is SpeedLab's engine."""
    return name.split()[0] in ("ours", "shipped", COMPRESSED)


def settings_of(name: str) -> str:
    """Which settings the processes of a peer have: `KEPT`, `AS_INSTALLED`, or `ON_KERNELS`."""
    return next((settings for settings in (AS_INSTALLED, ON_KERNELS) if name.endswith(settings)), KEPT)


def build(name: str, dtype_name: str) -> Callable[[], None]:
    """The step of a peer on this rank and its batch."""
    dtype = getattr(torch, dtype_name)
    if settings_of(name) == KEPT:
        let_onednn_multiply()
    model = model_of(name)
    kind, *variant = name.removesuffix(AS_INSTALLED).removesuffix(ON_KERNELS).split()
    # DeepSpeed uses the default group, which is gloo: it takes no other.
    group = _group(BACKEND if variant[-1:] == ["shared"] else "gloo") if kind not in ("limit", "DeepSpeed") else None
    makers: dict[str, Callable[[], Step]] = {
        "limit": lambda: _alone(model, dtype, kernels=settings_of(name) == ON_KERNELS),
        "DDP": lambda: _ddp(model, dtype, group),
        "ZeroRedundancyOptimizer": lambda: _zero_redundancy(model, dtype, group),
        "FSDP2": lambda: _fsdp(model, dtype, group, reshard=variant[0] == "resharded"),
        "DeepSpeed": lambda: _deepspeed(model, dtype, int(variant[0])),
    }
    step, (tokens, targets) = makers[kind](), batch()
    return lambda: step(tokens, targets)


@cache
def _group(backend: str) -> dist.ProcessGroup:
    register()
    group = dist.new_group(backend=backend)
    assert isinstance(group, dist.ProcessGroup)
    return group


class _Masters:
    """float32 master weights for a low-precision model, as plainly as torch allows: widen, fused AdamW, copy back."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self._masters = [p.detach().float() if p.dtype != torch.float32 else p for p in parameters]
        self._optimizer = torch.optim.AdamW(self._masters, lr=LEARNING_RATE, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is not parameter and parameter.grad is not None:
                master.grad = parameter.grad.float()
        self._optimizer.step()
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is not parameter:
                parameter.copy_(master)
            parameter.grad = None
            master.grad = None


def _alone(model: nn.Module, dtype: torch.dtype, *, kernels: bool) -> Step:
    """The no-communication limit: as many independent processes, each with the whole model. `kernels`: whose products
    and attention are those of our engine."""
    model = model.to(dtype)
    own = CpuKernelOverrides([model], PrecisionConfig(), torch.device("cpu"), dtype) if kernels else None
    masters = _Masters(list(model.parameters()))

    def step(tokens: Tensor, targets: Tensor) -> None:
        with nullcontext() if own is None else own.under_way():
            model(tokens, targets).loss.backward()
        masters.step()

    return step


def _ddp(model: nn.Module, dtype: torch.dtype, group: dist.ProcessGroup | None) -> Step:
    wrapped = DistributedDataParallel(model.to(dtype), process_group=group, gradient_as_bucket_view=True)
    masters = _Masters(list(model.parameters()))

    def step(tokens: Tensor, targets: Tensor) -> None:
        wrapped(tokens, targets).loss.backward()
        masters.step()

    return step


def _zero_redundancy(model: nn.Module, dtype: torch.dtype, group: dist.ProcessGroup | None) -> Step:
    """torch's ZeRO-1. It has no masters: in bfloat16 it updates bfloat16 weights, which is less work than the others
    do."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # Here: torch warns of itself when this is imported.

    wrapped = DistributedDataParallel(model.to(dtype), process_group=group, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        process_group=group,
        parameters_as_bucket_view=True,  # Parameters travel together, not one by one.
        lr=LEARNING_RATE,
        fused=True,
    )

    def step(tokens: Tensor, targets: Tensor) -> None:
        wrapped(tokens, targets).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _fsdp(model: GPT, dtype: torch.dtype, group: dist.ProcessGroup | None, *, reshard: bool) -> Step:
    assert group is not None
    mesh = DeviceMesh.from_group(group, "cpu")
    policy = (
        MixedPrecisionPolicy()
        if dtype == torch.float32
        else MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step(tokens: Tensor, targets: Tensor) -> None:
        model(tokens, targets).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _deepspeed(model: nn.Module, dtype: torch.dtype, stage: int) -> Step:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed  # type: ignore[import-not-found]  # a peer, only where somebody installed it

    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        # torch's AdamW, to which DeepSpeed hands on what it does not know: fused, or each tensor takes a dozen passes.
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "torch_adam": True, "fused": True}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": dtype == torch.bfloat16},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(tokens: Tensor, targets: Tensor) -> None:
        engine.backward(engine(tokens, targets).loss)
        engine.step()

    return step
