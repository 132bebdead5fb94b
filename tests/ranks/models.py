"""Small models, each with one property that ZeRO must survive, and the batches they train on.

Shapes: B sequences, T tokens, C = 12 channels, V = 29 tokens. Odd sizes, so that partitions cut through parameters and
flats need padding.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, LENGTH, HEADS = 29, 12, 7, 2


def tokens(step: int, index: int, size: int = 2) -> tuple[Tensor, Tensor]:
    """Micro-batch `index` of the global batch of `step`: (B, T) inputs and targets, the same in every process."""
    generator = torch.Generator().manual_seed(1_000_003 * step + index)
    rows = torch.randint(VOCABULARY, (size, LENGTH + 1), generator=generator)
    return rows[:, :-1], (rows[:, 1:] + rows[:, :-1]) % VOCABULARY


def points(step: int, index: int, size: int = 6) -> tuple[Tensor, Tensor]:
    """As `tokens`, for models of real numbers: (B, C) inputs and (B, C) targets."""
    generator = torch.Generator().manual_seed(7_000_003 * step + index)
    x = torch.randn(size, WIDTH, generator=generator)
    return x, torch.tanh(x.roll(1, -1)) + 0.1 * torch.randn(size, WIDTH, generator=generator)


def seeded(kind: type[nn.Module], *args: Any, seed: int = 5) -> Any:
    """A module with the same values in every process."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return kind(*args)


# ---- transformer -----------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal self-attention, (B, T, C) -> (B, T, C). No biases: a key's bias has no gradient but rounding noise."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, -1).transpose(1, 3).unbind(2)  # (B, H, T, D) each
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 21), nn.Linear(21, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Transformer(nn.Module):
    """Three blocks between an embedding and a head; `forward` returns the loss."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def logits(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = self.through(block, x)
        return self.head(self.norm(x))

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.logits(inputs), targets)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def transformer() -> nn.Module:
    return seeded(Transformer)


def rounded_transformer() -> nn.Module:
    """Starts from values that bfloat16 holds exactly: the steps are compared, not the way into bfloat16."""
    model = transformer()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


def tied() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Transformer(tied=True)


def frozen() -> nn.Module:
    """The embedding, a whole block and single parameters of another one do not train."""
    model = seeded(Transformer)
    for part in (model.embedding, model.blocks[0], model.blocks[2].up):
        part.requires_grad_(False)
    return model


def frozen_end() -> nn.Module:
    """The last block and the head do not train: gradients pass through them to what does."""
    model = seeded(Transformer)
    for part in (model.blocks[2], model.blocks[1].down, model.head):
        part.requires_grad_(False)
    return model


class UserCheckpoint(Transformer):
    """The model's own activation checkpointing, of either kind."""

    reentrant = False

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        result = checkpoint(block, x, use_reentrant=self.reentrant)
        assert isinstance(result, Tensor)
        return result


class ReentrantCheckpoint(UserCheckpoint):
    reentrant = True


def user_checkpoint() -> nn.Module:
    return seeded(UserCheckpoint)


def reentrant_checkpoint() -> nn.Module:
    return seeded(ReentrantCheckpoint)


@dataclass
class Parts:
    loss: Tensor
    nested: dict[str, Any]
    note: str = "not a tensor"


class Structured(Transformer):
    """Returns a dataclass that holds a dict of a list of tensors; the loss uses some of them."""

    def forward(self, inputs: Tensor, targets: Tensor) -> Parts:  # type: ignore[override]  # that is the case
        logits = self.logits(inputs)
        extra = {"logits": [logits, {"mean": logits.mean()}], "count": 3, "nothing": None}
        return Parts(cross_entropy(logits, targets), extra)


def structured() -> nn.Module:
    return seeded(Structured)


def structured_loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    output = model(*batch)
    parts = output if isinstance(output, Parts) else None
    assert parts is not None, type(output)
    assert parts.note == "not a tensor"
    return parts.loss + 0.1 * parts.nested["logits"][1]["mean"].float()


class HalfUsed(Transformer):
    """Half of the blocks' output is thrown away, and a second output is never used."""

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # as above
        x = self.embedding(inputs)
        for block in self.blocks:
            x = torch.cat([block(x)[..., :6], x[..., 6:]], dim=-1)
        logits = self.head(self.norm(x))
        return cross_entropy(logits, targets), self.blocks[1](x).square().mean() + logits.sum()


def half_used() -> nn.Module:
    return seeded(HalfUsed)


def first_output(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    return model(*batch)[0]


def plain_loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    return model(*batch)


def loss_of_two_calls(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    """The whole module twice before one backward."""
    inputs, targets = batch
    return model(inputs, targets) + 0.5 * model(inputs.flip(0), targets)


# ---- branches --------------------------------------------------------------------------------------------------------


class Branching(Transformer):
    """Blocks that take part only for some data: the first token of the first sequence decides."""

    def skipped(self, inputs: Tensor) -> set[int]:
        raise NotImplementedError

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        skip = self.skipped(inputs)
        x = self.embedding(inputs)
        for index, block in enumerate(self.blocks):
            if index not in skip:
                x = block(x)
        return cross_entropy(self.head(self.norm(x)), targets)


class SkipsByData(Branching):
    """Each rank, in each step, skips one block or none, as its data says."""

    def skipped(self, inputs: Tensor) -> set[int]:
        return {int(inputs[0, 0]) % 4}


class NeverUsesMiddle(Branching):
    """A block that no rank uses in any step."""

    def skipped(self, inputs: Tensor) -> set[int]:
        return {1}


def skips_by_data() -> nn.Module:
    return seeded(SkipsByData)


def never_uses_middle() -> nn.Module:
    return seeded(NeverUsesMiddle)


class Experts(nn.Module):
    """Parameters outside all blocks that some data does not use: one of two layers, chosen by the data's sign."""

    def __init__(self) -> None:
        super().__init__()
        self.positive, self.negative = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        chosen = self.positive if bool(x[0, 0] > 0) else self.negative
        return F.mse_loss(self.out(torch.tanh(chosen(x))), y)


def experts() -> nn.Module:
    return seeded(Experts)


# ---- buffers, dtypes, sharing ----------------------------------------------------------------------------------------


class NormBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # No bias: in front of a normalisation its gradient is rounding noise.
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.scale: Tensor
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + torch.tanh(self.norm(self.linear(x))) * self.scale


class WithBuffers(nn.Module):
    """BatchNorm's running statistics, a counter, and a buffer that is in no state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NormBlock() for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.out(x), y)


def with_buffers() -> nn.Module:
    return seeded(WithBuffers)


class Mixed(nn.Module):
    """A float64 layer, a bfloat16 layer and float32 ones, in blocks and outside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MixedBlock() for _ in range(2))
        self.exact = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.exact(x.double()), y.double())


class MixedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.single, self.rough = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).bfloat16()
        self.exact = nn.Linear(WIDTH, WIDTH, bias=False).double()

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.single(x))
        x = x + self.rough(x.bfloat16()).float()
        return x + self.exact(x.double()).float()


def mixed() -> nn.Module:
    return seeded(Mixed)


class SharedBlock(nn.Module):
    """One block applied three times, with another one between: a unit that is needed again after its release."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        first, second = self.blocks
        x = self.embedding(inputs)
        for block in (first, second, first, first):
            x = block(x)
        return cross_entropy(self.head(x), targets)


def shared_block() -> nn.Module:
    return seeded(SharedBlock)


class Layered(Transformer):
    """The layers of a block stand in a list of their own, which nobody calls; the last of them is called first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleList([Attention(), nn.Sequential(nn.Linear(WIDTH, 21), nn.GELU(), nn.Linear(21, WIDTH)), norm])
            for norm in (nn.LayerNorm(WIDTH) for _ in range(3))
        )

    def through(self, block: Any, x: Tensor) -> Tensor:
        attention, feed_forward, norm = block
        x = x + attention(norm(x))
        return x + feed_forward(x)


def layered() -> nn.Module:
    return seeded(Layered)


class Staged(Transformer):
    """The blocks stand in lists of a list, as those of models that see images do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList(Block() for _ in range(depth)) for depth in (1, 2))

    def through(self, block: Any, x: Tensor) -> Tensor:
        for each in block:
            x = each(x)
        return x


def staged() -> nn.Module:
    return seeded(Staged)


class EnteredBelow(Transformer):
    """A part of one block is called before that block, parts of another one after it, and the last by its forward."""

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        first, second, third = self.blocks
        x = self.embedding(inputs)
        x = x + second.attention(second.attention_norm(x))
        x = second(first(x))
        x = x + first.down(F.gelu(first.up(x)))
        return cross_entropy(self.head(third.forward(x)), targets)


def entered_below() -> nn.Module:
    return seeded(EnteredBelow)


def entered_below_frozen() -> nn.Module:
    """Frozen are a part that is called alone, and another one beside those that are."""
    model: Any = entered_below()
    for block in model.blocks[:2]:
        block.attention.requires_grad_(False)
    return model


class Scripted(Transformer):
    """A list of modules that take no hooks, and one inside each block."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up, block.down = scripted(), nn.Identity()
        self.blocks.extend(scripted() for _ in range(2))


def scripted() -> Any:
    return torch.jit.script(nn.Sequential(nn.Sequential(nn.Linear(WIDTH, 21), nn.GELU()), nn.Linear(21, WIDTH)))


def with_scripted() -> nn.Module:
    return seeded(Scripted)


class Failing(Transformer):
    """Raises in the middle of the forward when told to. Before that it waits in a block for a file to appear, if it has
    one to wait for: so a test decides which rank is the slower one."""

    fail = False
    wait_for: Path | None = None

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        if self.wait_for is not None and block is self.blocks[1]:
            wait_until(self.wait_for.exists)
        if self.fail and block is self.blocks[2]:
            raise ZeroDivisionError("the model's own error")
        return block(x)


def wait_until(true: Callable[[], bool], seconds: float = 15.0) -> None:
    """Poll until `true()`; raises TimeoutError when it does not become true in time."""
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{true} did not become true in {seconds} s")
        pause.wait(0.01)


def failing() -> nn.Module:
    return seeded(Failing)
