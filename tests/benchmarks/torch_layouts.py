"""torch's own tensor and pipeline parallelism on the benchmark's GPT: DTensor, `torch.distributed.pipelining`, FSDP2.

As good as torch's parts allow without writing kernels or collectives of one's own: queries, keys and values in one
matrix, whose rows stand by heads so that DTensor can cut them; the cross-entropy over a cut vocabulary
(`loss_parallel`); the embedding tied to the head also over two pipeline stages; AdamW fused, on the local tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

from speedlab.config import ModelConfig
from speedlab.layout import AXES, Layout
from speedlab.models import GPT
from speedlab.models.gpt import rotate, rotation_table
from tests.benchmarks.cut_loss import LossOf, loss_over

Batches = Sequence[tuple[Tensor, Tensor]]
"""Micro-batches of this rank: tokens and targets, (B, T) each."""

Step = Callable[[Batches], float | None]
"""One optimizer step; returns the mean loss of this rank's micro-batches on ranks that know it."""


def make_step(model: GPT, layout: Layout, cut: tuple[int, ...], dtype: torch.dtype, optimizer: dict[str, Any]) -> Step:
    """The step of this rank under `layout`, from the values of `model`; `cut`: blocks of each pipeline stage."""
    mesh = init_device_mesh("cpu", layout.mesh_shape, mesh_dim_names=AXES)
    index = layout.index(dist.get_rank(), "pp")
    part = PeerStage(model, cut, index)
    partitioned = layout.dp > 1
    if not partitioned:
        part.to(dtype)
    if layout.tp > 1:
        _cut_layers(part, mesh["tp"])
    if partitioned:
        _shard(part, mesh["dp"], dtype)
    update = _Update(part, optimizer, twins=_twins(part, layout, mesh))
    loss_of = loss_over(mesh["tp"] if layout.tp > 1 else None)
    context = loss_parallel if layout.tp > 1 else nullcontext
    if layout.pp > 1:
        return _pipelined(part, layout, mesh, loss_of, context, update)
    sync = part.set_requires_gradient_sync if isinstance(part, FSDPModule) else lambda last: None
    return _accumulating(part, loss_of, context, update, sync)


def make_plain_step(model: GPT, dtype: torch.dtype, optimizer: dict[str, Any]) -> Step:
    """The plain loop of one process."""
    model.to(dtype)
    update = _Update(model, optimizer, twins=None)
    return _accumulating(lambda tokens: model(tokens).logits, loss_over(None), nullcontext, update, lambda last: None)


def _accumulating(
    forward: Callable[[Tensor], Tensor],
    loss_of: LossOf,
    context: Callable[[], Any],
    update: _Update,
    sync: Callable[[bool], object],
) -> Step:
    def step(batches: Batches) -> float:
        total = 0.0
        with context():
            for number, (tokens, targets) in enumerate(batches):
                sync(number == len(batches) - 1)
                loss = loss_of(forward(tokens), targets)
                (loss / len(batches)).backward()
                total += float(loss.detach())
        update()
        return total / len(batches)

    return step


def _pipelined(
    part: PeerStage,
    layout: Layout,
    mesh: DeviceMesh,
    loss_of: LossOf,
    context: Callable[[], Any],
    update: _Update,
) -> Step:
    index = layout.index(dist.get_rank(), "pp")
    stage = PipelineStage(part, index, layout.pp, torch.device("cpu"), group=mesh["pp"].get_group())
    schedules: dict[int, Schedule1F1B] = {}

    def step(batches: Batches) -> float | None:
        schedule = schedules.get(len(batches))
        if schedule is None:
            schedule = schedules[len(batches)] = Schedule1F1B(stage, len(batches), loss_fn=loss_of)
        losses: list[Tensor] = []
        tokens, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        with context():
            if part.embedding is not None:
                schedule.step(tokens, return_outputs=False)
            else:
                schedule.step(target=targets if part.head is not None else None, losses=losses, return_outputs=False)
        update()
        return float(torch.stack(losses).detach().mean()) if losses else None

    return step


# ---- the model -------------------------------------------------------------------------------------------------------


class PeerStage(nn.Module):
    """One pipeline stage of the GPT, or all of it: tokens (B, T) or what came (B, T, C) → (B, T, C), or logits of the
    vocabulary that this rank holds."""

    def __init__(self, model: GPT, cut: tuple[int, ...], index: int) -> None:
        super().__init__()
        first, last = index == 0, index == len(cut) - 1
        start = sum(cut[:index])
        self.embedding = nn.Embedding.from_pretrained(model.embedding.weight.detach(), freeze=False) if first else None
        self.blocks = nn.ModuleList(
            PeerBlock(model.config, block) for block in list(model.blocks)[start : start + cut[index]]
        )
        self.norm = _norm(model.config, model.norm) if last else None
        self.head = _linear(model.embedding.weight) if last else None
        if self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.weight
        self.head_size = model.config.hidden // model.config.heads

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        rotation = rotation_table(torch.arange(x.shape[1], device=x.device), self.head_size)
        for block in self.blocks:
            x = block(x, rotation)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


class PeerBlock(nn.Module):
    """One block. Rows of `qkv` stand by heads: (head, query, key or value, element)."""

    def __init__(self, config: ModelConfig, block: Any) -> None:
        super().__init__()
        self.head_size = config.hidden // config.heads
        packed = block.attention.qkv.weight.detach().unflatten(0, (3, config.heads, self.head_size))
        self.attention_norm = _norm(config, block.attention_norm)
        self.qkv = _linear(packed.transpose(0, 1).flatten(0, 2))
        self.out = _linear(block.attention.out.weight)
        self.mlp_norm = _norm(config, block.mlp_norm)
        self.up, self.down = _linear(block.mlp.up.weight), _linear(block.mlp.down.weight)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (-1, 3, self.head_size))  # (B, T, H, 3, D)
        q, k, v = qkv.transpose(1, 2).unbind(3)  # (B, H, T, D) each
        y = F.scaled_dot_product_attention(rotate(q, rotation), rotate(k, rotation), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


def _linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight.detach().clone())
    return layer


def _norm(config: ModelConfig, norm: Any) -> nn.RMSNorm:
    copy = nn.RMSNorm(config.hidden, eps=norm.eps)
    copy.weight = nn.Parameter(norm.weight.detach().clone())
    return copy


# ---- what torch does with it -----------------------------------------------------------------------------------------


def _cut_layers(part: PeerStage, mesh: DeviceMesh) -> None:
    for block in part.blocks:
        plan = {"qkv": ColwiseParallel(), "out": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    if part.embedding is not None:
        parallelize_module(part.embedding, mesh, RowwiseParallel(input_layouts=Replicate()))
    if part.head is not None:
        parallelize_module(part.head, mesh, ColwiseParallel())
        if part.embedding is not None:
            part.head.weight = part.embedding.weight


def _shard(part: PeerStage, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    # DTensor hands on views; nothing here writes into them.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    for block in part.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    fully_shard(part, mesh=mesh, reshard_after_forward=False, mp_policy=policy)


def _twins(part: PeerStage, layout: Layout, mesh: DeviceMesh) -> tuple[Tensor, Any] | None:
    """The copy of the tied embedding on the first or last pipeline stage, and the group of both."""
    if layout.pp == 1:
        return None
    lines = [layout.peers(rank, "pp") for rank in range(layout.world_size)]
    pairs = {(line[0], line[-1]) for line in lines}
    groups = {pair: dist.new_group(list(pair)) for pair in sorted(pairs)}
    peers = lines[dist.get_rank()]
    layer = part.embedding if part.embedding is not None else part.head
    return (layer.weight, groups[peers[0], peers[-1]]) if layer is not None else None


class _Update:
    """AdamW on what this rank holds, with float32 masters for parameters of lower precision."""

    def __init__(
        self,
        part: nn.Module,
        optimizer: dict[str, Any],
        *,
        twins: tuple[Tensor, Any] | None,
    ) -> None:
        self._twins = twins
        self._parameters = list(part.parameters())
        self._locals = [_local(parameter.detach()) for parameter in self._parameters]
        self._masters = [local if local.dtype == torch.float32 else local.float() for local in self._locals]
        self._optimizer = torch.optim.AdamW(self._masters, fused=True, **optimizer)

    @torch.no_grad()
    def __call__(self) -> None:
        if self._twins is not None:
            parameter, group = self._twins
            own = _gradient(parameter)
            dist.all_reduce(own, group=group)
            parameter.grad = _like(parameter, own)
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            master.grad = _gradient(parameter).float()
        self._optimizer.step()
        for parameter, local, master in zip(self._parameters, self._locals, self._masters, strict=True):
            if master is not local:
                local.copy_(master)
            parameter.grad = None


def _gradient(parameter: Tensor) -> Tensor:
    """Of what this rank holds of a parameter. DTensor leaves the gradient of an embedding that is not tied uncut."""
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        gradient = gradient.redistribute(placements=parameter.placements)
    return _local(gradient)


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    if isinstance(parameter, DTensor):
        return DTensor.from_local(local, parameter.device_mesh, parameter.placements, run_check=False)
    return local


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
