"""The same training, three times: a plain loop in one process, the engine on ranks, and DDP as a second oracle.

The global batch of a step is the micro-batches 0 .. accumulation × dp − 1 of `case.batch`; the engine's rank d takes
numbers m × dp + d in its m-th micro-batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import speedlab
from ranks import models

Batch = tuple[Tensor, ...]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Any) -> Optimizer:
    # A larger eps than usual: where a gradient is rounding noise, Adam makes a whole step of it.
    return torch.optim.AdamW(parameters, lr=0.003, eps=1e-5, weight_decay=0.05)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training that must come out alike however it runs. Functions are sent to ranks by name."""

    stage: int = 0
    build: Callable[[], nn.Module] = models.transformer
    batch: Callable[[int, int], Batch] = models.tokens
    loss: Callable[[Any, Batch], Tensor] = models.plain_loss
    optimizer: Callable[[Any], Optimizer] = sgd
    dtype: str = "float32"
    accumulation: int = 1
    checkpointing: str = "none"
    partition_inputs: bool = False
    compile: bool = False
    clip_norm: float | None = None
    offload: tuple[tuple[str, str | int], ...] = ()
    """Fields of the configuration's `offload`: (name, value)."""
    precision: tuple[tuple[str, str], ...] = ()
    """Further fields of the configuration's `precision`: (name, value)."""
    bucket_bytes: int = 1
    """1: each block is a unit of its own; these models' blocks would otherwise all be merged into one."""
    steps: int = 10
    """The second has momentum, the third gathers ahead in the order that the first two took. Nightly: 10."""
    whole: bool = True
    """Whether the plain loop sees the global batch in one forward; else in micro-batches, for models that notice."""

    def config(self) -> dict[str, Any]:
        return {
            "zero": {"stage": self.stage, "bucket_bytes": self.bucket_bytes},
            "precision": {"dtype": self.dtype, **dict(self.precision)},
            "batch": {"micro_size": 2, "accumulation": self.accumulation},
            "activation": {"checkpointing": self.checkpointing, "partition_inputs": self.partition_inputs},
            "compile": self.compile,
            "clip_norm": self.clip_norm,
            "offload": dict(self.offload),
        }

    def __str__(self) -> str:
        clip = "clip" if self.clip_norm else "no clip"
        return (
            f"zero {self.stage}, {getattr(self.build, '__name__', self.build)}, {self.dtype}, "
            f"accumulation {self.accumulation}, "
            f"checkpointing {self.checkpointing}{' of partitioned inputs' if self.partition_inputs else ''}, "
            f"{'compiled, ' if self.compile else ''}{self.optimizer.__name__}, {clip}, bucket {self.bucket_bytes}, "
            f"offload {dict(self.offload)}, precision {dict(self.precision)}"
        )


@dataclass
class Trajectory:
    """What a training did. `losses`: mean over the global batch (of a rank: over its own micro-batches), by step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    """Norm of the global gradient before clipping, by step."""
    parameters: dict[str, Tensor] = field(default_factory=dict)
    """Afterwards, in the master's dtype."""
    live: dict[str, Tensor] = field(default_factory=dict)
    """Afterwards, as the forward sees them, on this rank."""
    start: dict[str, Tensor] = field(default_factory=dict)


# ---- the engine ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def engine_for(case: Case, **arguments: Any) -> Iterator[Any]:
    """An engine for `case`, destroyed at the end also when the test fails."""
    given: dict[str, Any] = {"model": case.build(), "optimizer": case.optimizer, "config": case.config(), **arguments}
    engine = speedlab.initialize(**given)[0]
    try:
        yield engine
    finally:
        engine.destroy()


def engine_step(engine: Any, case: Case, step: int) -> float:
    """One step of `case` on this rank; returns the mean loss of its own micro-batches."""
    total = 0.0
    for micro in range(case.accumulation):
        batch = case.batch(step, micro * engine.world.size + engine.world.rank)
        loss = case.loss(engine, batch)
        engine.backward(loss)
        updated = engine.step()
        assert updated == (micro == case.accumulation - 1), (micro, updated)
        total += loss.item()
    return total / case.accumulation


def train_engine(case: Case) -> Trajectory:
    """Train `case` on this rank as one of the world's."""
    path = Trajectory()
    with engine_for(case) as engine:
        for step in range(case.steps):
            path.losses.append(engine_step(engine, case, step))
            path.norms.append(engine.global_grad_norm)
        finish(path, engine)
    return path


def finish(path: Trajectory, engine: Any) -> None:
    path.parameters = engine.state_dict()
    path.live = {name: speedlab.gather(p) for name, p in engine.module.named_parameters()}


def train_cases(cases: list[Case]) -> list[Trajectory | str]:
    """Many cases in one call. A case that raises ends the rest of the list and is reported by name."""
    paths: list[Trajectory | str] = []
    for case in cases:
        try:
            paths.append(train_engine(case))
        except Exception as error:
            error.add_note(f"in case: {case}")
            raise
    return paths


# ---- the plain loop --------------------------------------------------------------------------------------------------


def train_plain(case: Case, dp: int) -> Trajectory:
    """The oracle: one process, one module, torch's own optimizer, the global batch of `dp` ranks.

    In low precision the module computes in it and float32 masters are updated, as mixed precision is defined
    (arXiv:1710.03740, section 3.1). Gradients of micro-batches are added in float32; without accumulation there is
    only the sum over ranks, which is rounded to the compute dtype, in which such a loop keeps its gradients.

    From step `delayed_update` of the case's offload on, the model gets the masters that were there before the step's
    update (arXiv:2101.06840, section 5.2).
    """
    model = case.build()
    first_late = int(dict(case.offload).get("delayed_update", case.steps + 1))
    path = Trajectory(start={name: p.detach().clone() for name, p in model.named_parameters()})
    compute = DTYPES[case.dtype]
    dtypes = dtypes_of(model, compute)
    masters = {
        name: nn.Parameter(p.detach().clone().float() if dtypes[name] in LOW else p.detach().clone(), p.requires_grad)
        for name, p in model.named_parameters()
    }
    for name, p in model.named_parameters():
        p.data = p.data.to(dtypes[name])
    trainable = [p for p in masters.values() if p.requires_grad]
    optimizer = case.optimizer(trainable)
    for step in range(case.steps):
        micros = [case.batch(step, index) for index in range(case.accumulation * dp)]
        if case.whole:
            micros = [tuple(torch.cat(parts) for parts in zip(*micros, strict=True))]
        path.losses.append(0.0)
        for batch in micros:
            loss = case.loss(model, cast(batch, compute))
            (loss / len(micros)).backward()
            path.losses[-1] += loss.item() / len(micros)
            move_gradients(model, masters)
        if case.accumulation == 1:
            round_gradients(model, masters)
        path.norms.append(norm_of(trainable))
        if case.clip_norm is not None:
            nn.utils.clip_grad_norm_(trainable, case.clip_norm)
        before = {name: p.detach().clone() for name, p in masters.items()}
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_((before if step + 1 >= first_late else masters)[name])
    path.parameters = {name: p.detach().clone() for name, p in masters.items()}
    path.live = {name: masters[name].detach().to(p.dtype) for name, p in model.named_parameters()}
    return path


LOW = (torch.bfloat16, torch.float16)


def dtypes_of(model: nn.Module, compute: torch.dtype) -> dict[str, torch.dtype]:
    """What each parameter computes in. BatchNorm's stay beside its statistics."""
    exact = {id(p) for each in model.modules() if isinstance(each, nn.BatchNorm1d) for p in each.parameters()}
    return {
        name: compute if p.dtype == torch.float32 and id(p) not in exact else p.dtype
        for name, p in model.named_parameters()
    }


def cast(batch: Batch, dtype: torch.dtype) -> Batch:
    return tuple(part.to(dtype) if part.dtype == torch.float32 else part for part in batch)


def move_gradients(model: nn.Module, masters: dict[str, nn.Parameter]) -> None:
    """Add the gradients of the computing copy to the masters'. One that nobody used has none, and is left alone."""
    for name, p in model.named_parameters():
        if p.grad is None:
            continue
        master = masters[name]
        gradient = p.grad.to(master.dtype)
        master.grad = gradient if master.grad is None else master.grad + gradient
        p.grad = None


def round_gradients(model: nn.Module, masters: dict[str, nn.Parameter]) -> None:
    """Round the masters' gradients to the dtype in which the model computes."""
    for name, p in model.named_parameters():
        master = masters[name]
        if master.grad is not None:
            master.grad = master.grad.to(p.dtype).to(master.dtype)


def norm_of(parameters: list[nn.Parameter]) -> float:
    return float(sum(p.grad.double().square().sum() for p in parameters if p.grad is not None) ** 0.5)


# ---- DDP -------------------------------------------------------------------------------------------------------------


def train_ddp(case: Case) -> Trajectory:
    """Train `case` in float32 under DistributedDataParallel on this rank."""
    model = nn.parallel.DistributedDataParallel(case.build(), find_unused_parameters=True)
    optimizer = case.optimizer([p for p in model.parameters() if p.requires_grad])
    path = Trajectory()
    for step in range(case.steps):
        total = 0.0
        for micro in range(case.accumulation):
            batch = case.batch(step, micro * dist.get_world_size() + dist.get_rank())
            with contextlib.nullcontext() if micro == case.accumulation - 1 else model.no_sync():
                loss = case.loss(model, batch)
                (loss / case.accumulation).backward()
            total += loss.item() / case.accumulation
        path.losses.append(total)
        path.norms.append(norm_of(list(model.parameters())))
        if case.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    path.parameters = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    return path


# ---- comparing -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far apart two trainings may be. `update`: distance of parameters as a share of the way the oracle's went."""

    loss: float
    norm: float
    update: float


def mean_losses(paths: list[Trajectory]) -> list[float]:
    return [sum(losses) / len(paths) for losses in zip(*(path.losses for path in paths), strict=True)]


def problems(paths: list[Trajectory], plain: Trajectory, allowed: Tolerance) -> list[str]:
    """What is wrong with a training on ranks (`paths`, by rank) beside the plain one; [] when nothing is."""
    found = []
    for what, ours, theirs, limit in (
        ("loss", mean_losses(paths), plain.losses, allowed.loss),
        ("gradient norm", paths[0].norms, plain.norms, allowed.norm),
    ):
        for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if not abs(a - b) <= limit * abs(b):
                found.append(f"{what} at step {step}: {a:.8g} instead of {b:.8g} (allowed {limit:g} relative)")
                break
    worst, name = worst_update(paths[0].parameters, plain)
    if not worst <= allowed.update:
        found.append(
            f"{name}: {worst:.3g} of its way apart after {len(plain.losses)} steps (allowed {allowed.update:g})"
        )
    for rank, path in enumerate(paths[1:], 1):
        for name, value in path.live.items():
            if not torch.equal(value, paths[0].live[name]):
                found.append(f"{name} differs between rank 0 and rank {rank}")
    for name, value in paths[0].live.items():
        if not torch.equal(value, paths[0].parameters[name].to(value.dtype)):
            found.append(f"{name}: what the forward sees is not the rounded master")
    return found


def worst_update(ours: dict[str, Tensor], plain: Trajectory) -> tuple[float, str]:
    """The largest distance of a parameter from the oracle's, as a share of how far the oracle's moved; and its name. A
    unit in the last place is nobody's fault: a norm's weight of 1 that moves by a thousand of them is off by that much
    when a rounding tips over, and whether it does depends on the processor."""
    worst, where = 0.0, ""
    for name, expected in plain.parameters.items():
        moved = (expected.double() - plain.start[name].double()).norm()
        last_place = torch.finfo(torch.float32).eps * expected.double().abs()
        separate = ((ours[name].double() - expected.double()).abs() - last_place).clamp(min=0.0).norm()
        share = float(separate / moved) if moved > 0 else (0.0 if separate == 0 else float("inf"))
        if not share <= worst:
            worst, where = share, name
    return worst, where
