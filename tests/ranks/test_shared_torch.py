"""torch's own parallel code on the shared-memory backend gives what it gives on gloo.

The same function runs in a pool on shared memory and in one on gloo. With two ranks a sum has one order, and the
results are the same bits. With four, gloo adds in another order: 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ranks.conftest import PoolOf
from ranks.loops import Case, adamw, sgd, train_ddp
from ranks.pool import Pool
from speedlab.comm.shared import SharedGroup

STEPS, BATCH, WIDTH = 5, 4, 16

Result = dict[str, Tensor]
"""What a rank computed, by name."""


class Block(nn.Module):
    """Two linear layers with a residual, (B, C) -> (B, C)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def blocks(count: int = 4) -> nn.Sequential:
    """The same values in every process."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(*(Block() for _ in range(count)))


def data(step: int, part: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + part)
    x = torch.randn(BATCH, WIDTH, generator=generator)
    return x, torch.tanh(x.roll(1, -1))


def train(model: nn.Module, part: int) -> Result:
    """Five steps of SGD with momentum on this part of the data: losses and whole parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        x, target = data(step, part)
        loss = F.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses), **whole(model)}


def whole(model: nn.Module) -> Result:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def compare(pool_of: PoolOf, size: int, function: Callable[..., Any], *args: Any, exact: bool | None = None) -> Any:
    """Run `function` on shared memory and on gloo; assert that every rank has the same. Returns the results by rank."""
    ours, theirs = (pool_of(size, backend).run(function, *args, timeout=60) for backend in ("shared", "gloo"))
    for rank, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.keys() == b.keys()
        for name, value in a.items():
            where = f"rank {rank}: {name}"
            if size == 2 if exact is None else exact:
                assert torch.equal(value, b[name]), where
            else:
                torch.testing.assert_close(value, b[name], rtol=1e-6, atol=1e-6, msg=lambda text, at=where: at + text)
    return ours


# ---- data parallel ---------------------------------------------------------------------------------------------------


def ddp(case: Case) -> Result:
    path = train_ddp(case)
    return {"losses": torch.tensor(path.losses), "norms": torch.tensor(path.norms), **path.parameters}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_ddp(pool_of: PoolOf, size: int, optimizer: Any) -> None:
    ours = compare(pool_of, size, ddp, Case(steps=STEPS, optimizer=optimizer, accumulation=2))
    assert ours[0]["losses"][-1] != ours[0]["losses"][0]
    for name, value in ours[0].items():
        if name != "losses":
            assert value.equal(ours[1][name]), f"{name}: ranks have the same parameters"


def fsdp(reshard: bool, dtype: str) -> Result:
    model = blocks()
    options: dict[str, Any] = {"reshard_after_forward": reshard}
    if dtype == "bfloat16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model:
        fully_shard(block, **options)
    fully_shard(model, **options)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return train(model, dist.get_rank())


@pytest.mark.parametrize("reshard", [True, False], ids=["resharded", "kept"])
@pytest.mark.parametrize(("size", "dtype"), [(2, "float32"), (4, "float32"), (2, "bfloat16")])
def test_fsdp2(pool_of: PoolOf, size: int, reshard: bool, dtype: str) -> None:
    ours = compare(pool_of, size, fsdp, reshard, dtype)
    plain = pool_of(1).run(fsdp_oracle, size)[0]
    if dtype == "float32":
        mean = torch.stack([result["losses"] for result in ours]).mean(0)
        torch.testing.assert_close(mean, plain, rtol=1e-5, atol=1e-6)


def fsdp_oracle(size: int) -> Tensor:
    """Losses of one process with the data of all."""
    model = blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        x, target = (torch.cat(parts) for parts in zip(*(data(step, part) for part in range(size)), strict=True))
        loss = F.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


# ---- meshes ----------------------------------------------------------------------------------------------------------


def mesh_2x2() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))


def several_axes() -> Result:
    """All-reduces along both axes and over the whole grid, one inside another."""
    mesh, rank = mesh_2x2(), dist.get_rank()
    seen: Result = {}
    for name in ("data", "tensor"):
        group = mesh.get_group(name)
        if isinstance(dist.group.WORLD, SharedGroup):
            assert isinstance(group, SharedGroup)
        tensor = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
        work = dist.all_reduce(tensor, group=group, async_op=True)
        dist.barrier()
        assert work is not None
        work.wait()
        seen[name] = tensor
    coordinates = torch.tensor([rank])
    for name in ("data", "tensor"):
        out = torch.zeros(2, dtype=torch.int64)
        dist.all_gather(list(out.split(1)), coordinates, group=mesh.get_group(name))
        seen[f"ranks along {name}"] = out
    flat = mesh._flatten("all")
    tensor = torch.full((10,), float(rank))
    dist.all_reduce(tensor, group=flat.get_group())
    seen["all"] = tensor
    return seen


def test_sub_groups_along_several_axes(pool_of: PoolOf) -> None:
    ours = compare(pool_of, 4, several_axes, exact=True)
    assert ours[3]["ranks along data"].tolist() == [1, 3]
    assert ours[3]["ranks along tensor"].tolist() == [2, 3]
    assert ours[3]["all"].tolist() == [6.0] * 10


def hybrid() -> Result:
    """Sharded along one axis, replicated along the other."""
    mesh = mesh_2x2()
    model = blocks()
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return train(model, dist.get_rank())


def test_fsdp2_on_two_axes(pool_of: PoolOf) -> None:
    compare(pool_of, 4, hybrid)


# ---- tensor parallel -------------------------------------------------------------------------------------------------


def split_blocks(model: nn.Sequential, mesh: DeviceMesh, sequence: bool) -> nn.Sequential:
    """Columns of `up`, rows of `down`; with `sequence` the norm works on a slice of the rows of x."""
    for block in model:
        plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if sequence:
            plan = {
                "norm": SequenceParallel(sequence_dim=0),
                "up": ColwiseParallel(input_layouts=Shard(0)),
                "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
            }
            plan[""] = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0))
        parallelize_module(block, mesh, plan)
    return model


def tensor_parallel() -> Result:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    return train(split_blocks(blocks(), mesh, sequence=False), 0)


@pytest.mark.parametrize("size", [2, 4])
def test_tensor_parallel(pool_of: PoolOf, size: int) -> None:
    ours = compare(pool_of, size, tensor_parallel)
    assert ours[0]["losses"].equal(ours[1]["losses"])


def tensor_and_sequence_parallel() -> Result:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    model = split_blocks(blocks(1), mesh, sequence=True)
    x, target = data(0, 0)
    out = model(x)
    out = out.full_tensor() if isinstance(out, DTensor) else out
    loss = F.mse_loss(out, target)
    loss.backward()
    return {"out": out.detach(), **{name: p.grad.full_tensor() for name, p in model.named_parameters()}}  # type: ignore[union-attr]  # backward made it


def test_tensor_and_sequence_parallel(pool_of: PoolOf) -> None:
    compare(pool_of, 2, tensor_and_sequence_parallel)


def fsdp_and_tensor_parallel() -> Result:
    mesh = mesh_2x2()
    model = split_blocks(blocks(), mesh["tensor"], sequence=False)
    for block in model:
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return train(model, mesh.get_local_rank("data"))


def test_fsdp2_with_tensor_parallel(pool_of: PoolOf) -> None:
    """Every group has two ranks, so here four give the same bits, too."""
    compare(pool_of, 4, fsdp_and_tensor_parallel, exact=True)


def redistribute() -> Result:
    """DTensor between all placements: all-gather, all-to-all, reduce-scatter, uneven slices."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    given = torch.randn(6, 9, generator=torch.Generator().manual_seed(1))
    rows = distribute_tensor(given, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    local = DTensor.from_local(given * (dist.get_rank() + 1), mesh, [Replicate()])
    product = (rows.t() @ rows).redistribute(mesh, [Shard(0)])
    return {
        "columns": columns.to_local(),
        "whole": columns.full_tensor(),
        "replicated": local.redistribute(mesh, [Shard(1)]).to_local(),
        "product": product.full_tensor(),
    }


@pytest.mark.parametrize("size", [2, 4])
def test_dtensors_are_redistributed(pool_of: PoolOf, size: int) -> None:
    compare(pool_of, size, redistribute)


# ---- pipeline --------------------------------------------------------------------------------------------------------


def pipeline(micro_batches: int) -> Result:
    """1F1B over two stages of two blocks each; losses on the last, parameters of this rank's stage."""
    rank, size = dist.get_rank(), dist.get_world_size()
    part = nn.Sequential(*list(blocks(4))[rank * 4 // size : (rank + 1) * 4 // size])
    stage = PipelineStage(part, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=F.mse_loss)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9)
    seen: Result = {}
    for step in range(STEPS):
        x, target = (torch.cat(parts) for parts in zip(*(data(step, k) for k in range(micro_batches)), strict=True))
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(x)
        elif rank == size - 1:
            schedule.step(target=target, losses=losses)
            seen[f"losses of step {step}"] = torch.stack(losses).detach()
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
    return {**seen, **whole(part)}


@pytest.mark.parametrize("size", [2, 4])
def test_pipeline_1f1b(pool_of: PoolOf, size: int) -> None:
    ours = compare(pool_of, size, pipeline, 4, exact=True)
    losses = ours[-1][f"losses of step {STEPS - 1}"]
    assert losses.mean() < ours[-1]["losses of step 0"].mean()


# ---- functional ------------------------------------------------------------------------------------------------------


def functional_collectives(compiled: bool) -> Result:
    world: Any = dist.group.WORLD
    n, rank = dist.get_world_size(), dist.get_rank()

    def compute(x: Tensor) -> Result:
        return {
            "all_reduce": functional.all_reduce(x, "sum", world) * 2,
            "average": functional.all_reduce(x, "max", world),
            "all_gather": functional.all_gather_tensor(x, 0, world) + 1,
            "all_gather of columns": functional.all_gather_tensor(x, 1, world) + 1,
            "reduce_scatter": functional.reduce_scatter_tensor(x, "sum", 0, world) + 1,
            "all_to_all": functional.all_to_all_single(x, [4 // n] * n, [4 // n] * n, world) + 1,
            "broadcast": functional.broadcast(x, n - 1, world) + 1,
        }

    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))
    seen = (torch.compile(compute, backend="aot_eager", fullgraph=True) if compiled else compute)(x)
    return {name: functional.wait_tensor(value).clone() for name, value in seen.items()}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("size", [2, 4])
def test_functional_collectives(pool_of: PoolOf, size: int, compiled: bool) -> None:
    ours = compare(pool_of, size, functional_collectives, compiled)
    every = [torch.randn(4, 3, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    for rank, seen in enumerate(ours):
        torch.testing.assert_close(seen["all_reduce"], 2 * sum(every))
        assert seen["all_gather"].equal(torch.cat(every) + 1)
        assert seen["broadcast"].equal(every[-1] + 1)
        torch.testing.assert_close(seen["reduce_scatter"], sum(every).chunk(size)[rank] + 1)


def functional_gradients() -> Result:
    """Autograd through collectives: the gradient of an all-gather is a reduce-scatter."""
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(dist.get_rank()), requires_grad=True)
    whole = functional.all_gather_tensor_autograd(x, 0, dist.group.WORLD)
    (whole * torch.arange(whole.numel()).view_as(whole)).sum().backward()
    assert x.grad is not None
    return {"gradient": x.grad}


def test_gradients_through_functional_collectives(pool_of: PoolOf) -> None:
    compare(pool_of, 2, functional_gradients)


def names_of_torch() -> list[str]:
    """Collectives into one tensor, under all names that this torch knows."""
    n, rank = dist.get_world_size(), dist.get_rank()
    known = []
    for name in ("all_gather_single", "all_gather_into_tensor", "_all_gather_base"):
        if (collective := getattr(dist, name, None)) is not None:
            whole = torch.zeros(2 * n)
            collective(whole, torch.full((2,), float(rank)))
            assert whole.tolist() == [float(r) for r in range(n) for _ in range(2)], name
            known.append(name)
    for name in ("reduce_scatter_single", "reduce_scatter_tensor", "_reduce_scatter_base"):
        if (collective := getattr(dist, name, None)) is not None:
            out = torch.zeros(2)
            collective(out, torch.arange(2.0 * n))
            assert out.tolist() == [n * 2.0 * rank, n * (2.0 * rank + 1)], name
            known.append(name)
    return known


@pytest.mark.filterwarnings("ignore::FutureWarning")  # The older names are deprecated, which is the point here.
def test_collectives_into_one_tensor_under_all_their_names(two: Pool) -> None:
    known = two.run(names_of_torch)[0]
    assert {"all_gather_into_tensor", "reduce_scatter_tensor"} & set(known)
