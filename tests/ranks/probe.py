"""A small model in which a step can go wrong in many ways, and the micro-batches that decide which parts it uses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from ranks import models
from ranks.models import VOCABULARY, WIDTH


@dataclass
class Output:
    loss: Tensor


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ZeroDivisionError("in the backward pass")


class Block(nn.Module):
    """(B, T, C) -> (B, T, C), with a gain of no dimension (or of one) and a layer that does not train."""

    def __init__(self, *, scalars: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 17), nn.Linear(17, WIDTH)
        self.fixed = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.gain = nn.Parameter(torch.full(() if scalars else (1,), 0.9))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(F.gelu(self.up(self.norm(self.fixed(x)))))


class Probe(nn.Module):
    """Blocks that are called in another order than they are registered, between an embedding and a head tied to it.

    `branches`: the first token says whether block 0, and whether `side`, take part: see `batch`. `scalars`: the scale
    of the logits and the blocks' gains have no dimension, else one.
    """

    def __init__(self, *, branches: bool = True, scalars: bool = True, order: tuple[int, ...] = (2, 0, 1)) -> None:
        super().__init__()
        self.branches, self.order = branches, order
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(scalars=scalars) for _ in order)
        self.side = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        with torch.no_grad():
            self.embedding.weight.mul_(0.3)  # As a head it would begin with losses at which steps of SGD go astray.
        self.logit_scale = nn.Parameter(torch.full(() if scalars else (1,), 1.3))
        self.fails: str | None = None
        self.fails_in = 0
        """Forwards until the one that fails; 0 is the next."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Output:
        failing, self.fails_in = (self.fails if self.fails_in == 0 else None), self.fails_in - 1
        first = int(tokens[0, 0]) if self.branches else 3
        x = self.embedding(tokens)
        for index in self.order:
            if index == 0 and not first & 1:
                continue
            x = self.blocks[index](x)
            if failing == "forward":
                raise ZeroDivisionError("in the forward pass")
            if failing == "backward" and index == 2:
                x = RaisesInBackward.apply(x)
        if first & 2:
            x = x + torch.tanh(self.side(x))
        logits = self.logit_scale * self.head(self.norm(x))
        return Output(F.cross_entropy(logits.flatten(0, 1), targets.flatten()))

    @contextlib.contextmanager
    def failing(self, where: str, after: int = 0) -> Iterator[None]:
        """Inside, the forward that comes after `after` others fails: `where` is "forward" or "backward"."""
        self.fails, self.fails_in = where, after
        try:
            yield
        finally:
            self.fails, self.fails_in = None, 0


def probe() -> nn.Module:
    return seeded(Probe)


class SideProbe(Probe):
    """A Probe with hooks of a user's: one keeps an activation inside a block, one changes a block's output in place
    through a view. What was kept counts in the `whole_loss`."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        for block in self.blocks:
            assert isinstance(block, Block)
            block.up.register_forward_hook(lambda _, args, output: self.kept.append(output.sin()))
        self.blocks[1].register_forward_hook(_change_in_place)

    def forward(self, tokens: Tensor, targets: Tensor) -> Output:
        self.kept.clear()
        return super().forward(tokens, targets)

    def side_loss(self) -> Tensor:
        kept, self.kept = self.kept, []
        return 0.1 * torch.stack([each.square().mean() for each in kept]).sum()


def _change_in_place(block: nn.Module, args: Any, output: Tensor) -> Tensor:
    changed = output.flatten(0, 1)
    changed *= 0.9
    return changed.view_as(output)


def side_probe() -> nn.Module:
    return seeded(SideProbe)


def whole_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """As the `loss` of initialize."""
    return model(*batch).loss + (model.side_loss() if isinstance(model, SideProbe) else 0)


def straight() -> nn.Module:
    """Without branches or scalars: what a test of another rule trains."""
    return seeded(lambda: Probe(branches=False, scalars=False))


def branching() -> nn.Module:
    """With branches, without scalars."""
    return seeded(lambda: Probe(scalars=False))


def turned_round() -> nn.Module:
    """Six blocks, the last one called first."""
    return seeded(lambda: Probe(branches=False, scalars=False, order=(5, 4, 3, 2, 1, 0)))


class Mixture(nn.Module):
    """Each token goes to one of sixteen experts, so that a micro-batch of 14 tokens leaves some without any."""

    EXPERTS = 16

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.router = nn.Linear(WIDTH, self.EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(self.EXPERTS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Output:
        tokens, targets = tokens.flatten(), targets.flatten()  # (N,), as the experts see them
        x = self.embedding(tokens)
        weights, chosen = self.router(x).sigmoid(), tokens % self.EXPERTS
        y = x
        for index in chosen.unique().tolist():
            rows = (chosen == index).nonzero().flatten()
            y = y.index_add(0, rows, weights[rows, index : index + 1] * torch.tanh(self.experts[index](x[rows])))
        return Output(F.cross_entropy(self.head(y), targets))


def mixture() -> nn.Module:
    return seeded(Mixture)


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return build()


def batch(number: int, rank: int) -> tuple[Tensor, Tensor]:
    """Micro-batch `number` of `rank`: (B, T) tokens and targets. Bits 0 and 1 of the number say whether ranks 0 and 1
    use block 0, bits 2 and 3 whether they use `side`; the rest only makes other data."""
    tokens, targets = models.tokens(number, rank)
    tokens = tokens.clone()
    tokens[0, 0] = (number >> rank & 1) + 2 * (number >> 2 + rank & 1)
    return tokens, targets


NOBODY, ONLY_RANK_0, ONLY_RANK_1, EVERYBODY = 0, 1 + 4, 2 + 8, 15
"""Numbers of micro-batches by who uses both branches; the same plus 16 is other data."""


# ---- optimizers ------------------------------------------------------------------------------------------------------


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Any) -> Optimizer:
    # A larger eps than usual: where a gradient is rounding noise, Adam makes a whole step of it.
    return torch.optim.AdamW(parameters, lr=0.003, eps=1e-5, weight_decay=0.05)


OPTIMIZERS = {"sgd": sgd, "adamw": adamw}
