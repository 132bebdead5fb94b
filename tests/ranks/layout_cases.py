"""Trainings of the built-in GPT under every layout, beside the plain loop of `ranks.loops`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import speedlab
from ranks import models
from ranks.loops import Case, Trajectory
from ranks.tensor_models import hugging_face
from speedlab.config import ModelConfig
from speedlab.layout import Layout
from speedlab.models import GPT


def gpt(**changes: Any) -> nn.Module:
    """A GPT of 8 blocks (so that 4 pipeline ranks may hold two stages each) with 4 heads, alike in every process.

    29 tokens, which no number of tensor ranks divides.
    """
    shape = {"layers": 8, "hidden": 24, "heads": 4, "ffn_hidden": 32, "vocab_size": models.VOCABULARY, "context": 8}
    return models.seeded(GPT, ModelConfig(**shape, **changes))


def rounded_gpt() -> nn.Module:
    """As `gpt`, with values that bfloat16 holds."""
    model = gpt()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


untied_gpt2 = partial(gpt, tied=False, position="learned", norm="layer", bias=True)


tiled_gpt = partial(gpt, ffn_tile=3, bias=True)
"""Its feed-forward layers are computed 3 tokens at a time, and again in backward; sequences have 7 or 8."""

whole_gpt = partial(gpt, bias=True)


def sparse_gpt() -> nn.Module:
    """A GPT whose attention is over some blocks of 16 tokens; 41 tokens are two whole blocks and a part of one."""
    attention = {"kind": "block_sparse", "block": 16, "pattern": "sliding", "window": 19}
    shape = {"layers": 4, "hidden": 64, "heads": 4, "ffn_hidden": 32, "vocab_size": models.VOCABULARY, "context": 64}
    return models.seeded(GPT, ModelConfig(**shape, attention=attention))


def masked_gpt() -> nn.Module:
    """`sparse_gpt` by its definition: dense attention with a mask."""
    model = sparse_gpt()
    for block in model.blocks:
        block.attention.attend = Masked(model.config.attention.window)
    return model


class Masked(nn.Module):
    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril().triu(1 - self.window)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def long_tokens(step: int, index: int) -> tuple[Tensor, Tensor]:
    return _tokens(step, index, 41)


def even_tokens(step: int, index: int) -> tuple[Tensor, Tensor]:
    """A number of tokens that two ranks can share."""
    return _tokens(step, index, 42)


def _tokens(step: int, index: int, length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1_000_003 * step + index)
    rows = torch.randint(models.VOCABULARY, (2, length + 1), generator=generator)
    return rows[:, :-1], (rows[:, 1:] + rows[:, :-1]) % models.VOCABULARY


def llama() -> nn.Module:
    return hugging_face("llama")  # Fewer key and value heads than heads.


def gpt2() -> nn.Module:
    return hugging_face("gpt2", resid_pdrop=0.0, embd_pdrop=0.0)


def t5() -> nn.Module:
    return hugging_face("t5")


def bert() -> nn.Module:
    return hugging_face("bert", hidden_dropout_prob=0.0)


def labels_loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    """Of Hugging Face models: the mean over the given targets, target t for output t."""
    tokens, targets = batch
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return model(tokens, labels=targets).loss
    return F.cross_entropy(model(tokens).logits.float().flatten(0, 1), targets.flatten())


def gpt_loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    return model(*batch).loss


@dataclass(frozen=True, kw_only=True)
class LayoutCase(Case):
    """A training under a layout. `accumulation` is the number of micro-batches."""

    layout: Layout
    steps: int = 4
    """Order of units and buffers repeat from the third step on; the nightly tier takes ten."""
    schedule: str = "1f1b"
    sequence: bool = False
    cp_heads: int | None = None
    cp_pad: bool = False
    cut: tuple[int, ...] | None = None
    balance: str = "parameters"
    build: Any = gpt
    loss: Any = gpt_loss
    accumulation: int = 4
    clip_norm: float | None = 0.3
    """Norms are about 1: this clips, so that a wrong norm is a wrong training."""

    def config(self) -> dict[str, Any]:
        parallel = {
            "tp": self.layout.tp,
            "pp": self.layout.pp,
            "cp": self.layout.cp,
            "cp_heads": self.cp_heads,
            "cp_pad": self.cp_pad,
            "schedule": self.schedule,
            "sequence": self.sequence,
            "cut": self.cut,
            "balance": self.balance,
        }
        return {**super().config(), "parallel": parallel}

    def __str__(self) -> str:
        shape = f"{self.layout}, {self.schedule if self.layout.pp > 1 else 'no pipeline'}"
        return f"{shape}{', sequence' if self.sequence else ''}, heads {self.cp_heads}, {super().__str__()}"

    def plain(self) -> Case:
        """The same training for the plain loop."""
        return Case(
            build=self.build,
            loss=self.loss,
            batch=self.batch,
            optimizer=self.optimizer,
            dtype=self.dtype,
            accumulation=self.accumulation,
            clip_norm=self.clip_norm,
            steps=self.steps,
            whole=self.whole,
            offload=self.offload,
        )


def batches(case: LayoutCase, step: int, data_index: int) -> list[tuple[Tensor, ...]]:
    """The micro-batches of a step that the ranks of one data index see."""
    return [case.batch(step, micro * case.layout.dp + data_index) for micro in range(case.accumulation)]


def train_layouts(cases: list[LayoutCase]) -> list[Trajectory]:
    """Train each case on this rank; a case that raises is named."""
    paths = []
    for case in cases:
        try:
            paths.append(train_layout(case))
        except Exception as error:
            error.add_note(f"in case: {case}")
            raise
    return paths


def train_layout(case: LayoutCase, *, own_loss: bool = False) -> Trajectory:
    """Train a case on this rank; with `own_loss` the engine computes the case's loss, too."""
    path, loss = Trajectory(), case.loss if own_loss else None
    engine = speedlab.initialize(model=case.build(), optimizer=case.optimizer, config=case.config(), loss=loss)[0]
    try:
        for step in range(case.steps):
            path.losses.append(engine.train_batch(batches(case, step, engine.mesh.data_index)))
            path.norms.append(engine.global_grad_norm)
        path.parameters = engine.state_dict()
    finally:
        engine.destroy(keep_parameters=False)
    return path
