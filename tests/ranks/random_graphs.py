"""Random modules whose tensors leave their blocks by every path, trained by an engine and by a plain loop.

1. A `Graph` is the description of a module as data: a list of blocks, each with the doors its tensors leave by.
2. `Net` builds the module of a description, and computes its loss.
3. `differences` trains it on every rank at one stage, and on one process, and compares the parameters.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import speedlab
from speedlab.comm import MappedShards
from speedlab.optim.errors import NonFiniteError
from speedlab.parallel.zero.flat_param import FlatParam

Result = tuple[dict[str, Tensor], list[Tensor]]
"""Parameters at the end, and inputs' gradients by step (and rank)."""

WIDTH, HIDDEN, ROWS, STEPS = 8, 11, 3, 4
ALLOWED = 2e-5

OUTPUTS = ["tensor", "view", "view in place", "tuple", "object", "list argument", "generator", "parameter"]
"""How the block's result leaves it. "view in place": its caller modifies the view. "parameter": with a parameter of the
block, which its caller uses."""
SIDES = ["none", "hook", "inner hook", "stored", "stored view in place", "cache", "list"]
"""What else leaves it and counts in the loss: what a user's hook on the block or on a layer of it kept, a loss stored
on the module, an activation that a later block reads, a tensor appended to an argument."""
DETACHED = ["none", "none", "none", "first", "last"]
"""Where a block multiplies with a detached parameter, whose gradient waits for nothing: backward reads what is first
last."""
CUSTOM = ["none", "none", "none", "attribute", "view", "detached"]
"""How a custom autograd function keeps its parameter: as an attribute, as an attribute that is a view, or so with
nothing that a hook sees and no gradient for it."""
RECOMPUTED = ["none", "none", "block", "reentrant", "inside", "config"]
"""By whom the block is recomputed: its caller, with or without reentrance, itself in a part, the engine."""


@dataclass(frozen=True, kw_only=True)
class BlockPlan:
    output: str
    side: str
    recomputed: str
    frozen: str
    """"none", "some" or "all" of its parameters."""
    detached: str
    custom: str
    calls: int


@dataclass(frozen=True, kw_only=True)
class Graph:
    blocks: tuple[BlockPlan, ...]
    main_counts: bool
    """Whether the loss contains the last block's output, or only what left by side doors."""
    reads_input_gradient: bool
    saves_on_cpu: bool

    @property
    def checkpointing(self) -> str:
        return "block" if any(block.recomputed == "config" for block in self.blocks) else "none"


def graph(seed: int) -> Graph:
    """Return the description number `seed`."""
    draw = random.Random(seed)
    blocks = []
    for _ in range(draw.randint(2, 4)):
        output, side, recomputed = draw.choice(OUTPUTS), draw.choice(SIDES), draw.choice(RECOMPUTED)
        if recomputed in ("block", "reentrant", "config"):
            # A recomputed block gives what torch.utils.checkpoint can give, and computes nothing twice that counts.
            output = output if output in ("tensor", "view", "view in place", "tuple") else "tensor"
            side = side if side in ("none", "hook") else "hook"
        if output == "generator":
            side = side if side in ("none", "inner hook", "stored") else "none"
        blocks.append(
            BlockPlan(
                output=output,
                side=side,
                recomputed=recomputed if output != "generator" else "none",
                frozen=draw.choice(["none", "none", "none", "some", "all"]),
                detached=draw.choice(DETACHED),
                custom=draw.choice(CUSTOM),
                # Reentrant recomputation gives a parameter a gradient for each call, which is refused at every stage.
                calls=draw.choice([1, 1, 1, 2]) if recomputed != "reentrant" else 1,
            )
        )
    if any(block.recomputed == "config" for block in blocks):  # It recomputes all blocks.
        blocks = [_recomputed_by_engine(block) for block in blocks]
    if all(block.frozen == "all" for block in blocks):
        blocks[0] = BlockPlan(**{**vars(blocks[0]), "frozen": "none"})
    sides = any(block.side != "none" and block.frozen != "all" for block in blocks)
    return Graph(
        blocks=tuple(blocks),
        main_counts=not sides or draw.random() < 0.6,
        reads_input_gradient=draw.random() < 0.3,
        saves_on_cpu=draw.random() < 0.15,
    )


def _recomputed_by_engine(block: BlockPlan) -> BlockPlan:
    output = block.output if block.output in ("tensor", "view", "view in place", "tuple") else "tensor"
    return BlockPlan(
        **{**vars(block), "recomputed": "config", "output": output, "side": "hook" if block.side != "none" else "none"}
    )


class Scale(torch.autograd.Function):
    """x · w, which keeps the parameter as an attribute, where no hook on saved tensors sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.w = w
        return x * w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        return grads[0] * ctx.w, (grads[0] * x).sum(0)


class ScaleByView(torch.autograd.Function):
    """The same, which saves nothing and keeps a view of the parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.x, ctx.w = x.detach(), w.view(1, -1)
        return x * w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        return grads[0] * ctx.w, (grads[0] * ctx.x).sum(0) if ctx.needs_input_grad[1] else None


class Block(nn.Module):
    """(B, C) → (B, C), which leaves as the plan says."""

    def __init__(self, plan: BlockPlan) -> None:
        super().__init__()
        self.plan = plan
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.scale, self.shift = nn.Parameter(1 + 0.1 * torch.randn(WIDTH)), nn.Parameter(0.1 * torch.randn(WIDTH))
        self.stored: list[Tensor] = []
        self.cached: Tensor | None = None
        frozen = {"none": [], "some": [self.up.weight, self.scale], "all": list(self.parameters())}[plan.frozen]
        for parameter in frozen:
            parameter.requires_grad_(False)

    def forward(self, x: Tensor, side: list[Tensor] | None = None) -> Any:
        if self.plan.output == "generator":
            return self._generated(x)
        y, h = self._compute(x)
        self._leave_by_side(x, h, side)
        match self.plan.output:
            case "view" | "view in place":
                return y.view(1, *y.shape)
            case "tuple":
                return y, h.mean()
            case "object":
                return SimpleNamespace(result=y)
            case "list argument":
                assert side is not None
                side.append(y)
                return None
            case "parameter":
                return y, self.shift
        return y

    def _generated(self, x: Tensor) -> Iterator[Tensor]:
        y, h = self._compute(x)
        self._leave_by_side(x, h, None)
        yield y

    def _compute(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.plan.detached == "first":
            x = x + 0.1 * (torch.tanh(x) * self.shift.detach().view(1, -1))
        scaled = self._scale(x)
        if self.plan.recomputed == "inside" and torch.is_grad_enabled():
            h = checkpoint(self._inside, scaled, use_reentrant=False)
        else:
            h = self._inside(scaled)
        y = x + 0.5 * self.down(h)
        if self.plan.detached == "last":
            y = y + 0.1 * (h @ self.up.weight.detach())
        return y, h

    def _scale(self, x: Tensor) -> Tensor:
        match self.plan.custom:
            case "attribute":
                return Scale.apply(x, self.scale)
            case "view":
                return ScaleByView.apply(x, self.scale)
            case "detached":
                return ScaleByView.apply(x, self.scale.detach()) * self.scale
        return x * self.scale

    def _inside(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(x) + (x * self.shift).sum(-1, keepdim=True))

    def _leave_by_side(self, x: Tensor, h: Tensor, side: list[Tensor] | None) -> None:
        match self.plan.side:
            case "stored":
                self.stored.append((h * h).mean() + (self.scale * x).square().mean() + self._scale(x).sum(0).mean())
            case "stored view in place":
                view = self.down(h).view(-1)
                view *= 0.5
                view += self.shift.repeat(len(x))
                self.stored.append(view.square().mean())
            case "cache":
                self.cached = self.down(torch.sin(h)) * self.scale
            case "list":
                assert side is not None
                self.stored.append((self.down(h) * self.scale).mean())


class Net(nn.Module):
    """(B, C) → a dict of the head's output and what left by side doors."""

    def __init__(self, plan: Graph) -> None:
        super().__init__()
        self.plan = plan
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block(block) for block in plan.blocks)
        self.kept: list[Tensor] = []
        for block in self.blocks:
            assert isinstance(block, Block)
            if block.plan.side == "hook":
                block.register_forward_hook(lambda _, args, output: self._keep(output))
            elif block.plan.side == "inner hook":
                block.up.register_forward_hook(lambda _, args, output: self._keep(output.sin()))

    def _keep(self, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor) and first.requires_grad:
            self.kept.append(first.square())

    def forward(self, x: Tensor) -> Tensor:
        self._forget()
        x, cached = self.first(x), None
        for block in self.blocks:
            assert isinstance(block, Block)
            for _ in range(block.plan.calls):
                x = self._call(block, x)
                x = x if cached is None else x + 0.1 * cached
                cached = block.cached
        return self.head(x).square().mean()

    def _call(self, block: Block, x: Tensor) -> Tensor:
        side: list[Tensor] = []
        needs_side = block.plan.output == "list argument" or block.plan.side == "list"
        args = (x, side) if needs_side else (x,)
        if block.plan.recomputed in ("block", "reentrant"):
            made = checkpoint(block, *args, use_reentrant=block.plan.recomputed == "reentrant")
        else:
            made = block(*args)
        match block.plan.output:
            case "view":
                return made.squeeze(0)
            case "view in place":
                made = made.squeeze(0)
                made += x
                made *= 0.7
                return made
            case "tuple":
                return made[0] + made[1]
            case "object":
                return made.result
            case "list argument":
                return side[0]
            case "generator":
                return next(made)
            case "parameter":
                return made[0] * (1 + made[1])
        return made

    def loss(self, output: Tensor) -> Tensor:
        """The loss of the last forward, whose side outputs it takes."""
        total = output if self.plan.main_counts else 0 * output.detach()
        for kept in self.kept:
            total = total + 0.1 * kept.mean()
        for block in self.blocks:
            assert isinstance(block, Block)
            for stored in block.stored:
                total = total + 0.1 * stored
            if block.cached is not None:
                total = total + 0.1 * block.cached.square().mean()
        return total

    def _forget(self) -> None:
        """Drop the side outputs of the last forward, and of what its backward computed again."""
        self.kept.clear()
        for block in self.blocks:
            assert isinstance(block, Block)
            block.stored.clear()
            block.cached = None


def net(plan: Graph, seed: int) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net(plan)


def data(plan: Graph, step: int, rank: int) -> Tensor:
    """The micro-batch of a rank, (B, C)."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
    return x.requires_grad_(plan.reads_input_gradient)


def around(plan: Graph) -> AbstractContextManager[object]:
    """What the caller has around each forward."""
    return save_on_cpu() if plan.saves_on_cpu else nullcontext()


def train_plain(plan: Graph, seed: int, ranks: int) -> Result:
    """Parameters after the plain loop over the micro-batches of all ranks, and the inputs' gradients by step and
    rank."""
    module = net(plan, seed)
    optimizer, gradients = torch.optim.SGD(trained(module), lr=0.05, momentum=0.9), []
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(ranks):
            x = data(plan, step, rank)
            with around(plan):
                output = module(x)
            (module.loss(output) / ranks).backward()
            gradients += [x.grad * ranks] if x.grad is not None else []
        optimizer.step()
    return {name: parameter.detach() for name, parameter in module.named_parameters()}, gradients


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def train_engine(plan: Graph, seed: int, stage: int) -> Result:
    """The same on this rank, by an engine. The gradients are those of this rank's inputs."""
    module, rank = net(plan, seed), dist.get_rank()
    config = {
        "zero": {"stage": stage, "bucket_bytes": 1},
        "precision": {"dtype": "float32"},
        "batch": {"micro_size": ROWS},
        "activation": {"checkpointing": plan.checkpointing},
    }
    optimizer = torch.optim.SGD(trained(module), lr=0.05, momentum=0.9)
    engine, *_ = speedlab.initialize(model=module, optimizer=optimizer, config=config)
    gradients = []
    try:
        for step in range(STEPS):
            x = data(plan, step, rank)
            with around(plan):
                output = engine(x)
            engine.backward(module.loss(output))
            engine.step()
            gradients += [x.grad * dist.get_world_size()] if x.grad is not None else []
        return engine.state_dict(), gradients
    finally:
        engine.destroy(keep_parameters=False)


def differences(seeds: list[int], stages: list[int]) -> list[str]:
    """A line for each graph and stage whose parameters, or inputs' gradients, are not those of the plain loop. Where
    plain torch refuses a graph, the engine has to refuse it as well. A read of released parameters gives NaN, if their
    memory is this rank's."""
    wrong = []
    for seed in seeds:
        plan = graph(seed)
        wanted = _outcome(lambda plan=plan, seed=seed: train_plain(plan, seed, dist.get_world_size()))
        for stage in stages:
            with patch.object(FlatParam, "release", filled_and_released):
                found = _outcome(lambda plan=plan, seed=seed, stage=stage: train_engine(plan, seed, stage))
            if problem := _problem(wanted, found):
                wrong.append(f"graph({seed}) at stage {stage}: {problem}\n{plan}")
    return wrong


def filled_and_released(flat: FlatParam, release: Callable[[FlatParam], None] = FlatParam.release) -> None:
    """Release the flat; its memory is NaN, so that a read of it is seen."""
    with torch.no_grad():
        if not isinstance(flat._coming, MappedShards):  # That one's memory is that of peers' shards.
            flat.full.fill_(math.nan)
    release(flat)


def _outcome(train: Callable[[], Result]) -> Result | str:
    """What a training gives, or the error's text."""
    try:
        return train()
    except (RuntimeError, NonFiniteError) as error:
        known = "modified by an inplace operation"
        return known if known in str(error) else f"{type(error).__name__}: {error}"


def _problem(wanted: Result | str, found: Result | str) -> str:
    if isinstance(wanted, str) or isinstance(found, str):
        shown = [each if isinstance(each, str) else "a result" for each in (wanted, found)]
        return "" if wanted == found else "plain torch gives {}, the engine {}".format(*shown)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    far = [(found[0][name] - wanted[0][name]).abs().max().item() for name in wanted[0]]
    far += [(a - b).abs().max().item() for a, b in zip(found[1], wanted[1][rank::ranks], strict=True)]
    return "" if all(each <= ALLOWED for each in far) else f"{max(far):.1e}"  # NaN is not <= anything.
