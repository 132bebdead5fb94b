"""Trainings of the built-in GPT under every layout, beside the plain loop of `ranks.loops`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
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


def llama() -> nn.Module:
    return hugging_face("llama")  # Fewer key and value heads than heads.


def gpt2() -> nn.Module:
    return hugging_face("gpt2", resid_pdrop=0.0, embd_pdrop=0.0)


def t5() -> nn.Module:
    return hugging_face("t5")


def bert() -> nn.Module:
    return hugging_face("bert", hidden_dropout_prob=0.0)


def labels_loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    """As the engine asks Hugging Face models for their loss: the tokens are the labels."""
    return model(batch[0], labels=batch[0]).loss


def gpt_loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    return model(*batch).loss


@dataclass(frozen=True, kw_only=True)
class LayoutCase(Case):
    """A training under a layout. `accumulation` is the number of micro-batches."""

    layout: Layout
    schedule: str = "1f1b"
    sequence: bool = False
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
            "schedule": self.schedule,
            "sequence": self.sequence,
            "cut": self.cut,
            "balance": self.balance,
        }
        return {**super().config(), "parallel": parallel}

    def __str__(self) -> str:
        shape = f"{self.layout}, {self.schedule if self.layout.pp > 1 else 'no pipeline'}"
        return f"{shape}{', sequence' if self.sequence else ''}, {super().__str__()}"

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
        )


def batches(case: LayoutCase, step: int, data_index: int) -> list[tuple[Tensor, ...]]:
    """The micro-batches of a step that the ranks of one data index see."""
    return [case.batch(step, micro * case.layout.dp + data_index) for micro in range(case.accumulation)]


def train_layouts(cases: list[LayoutCase]) -> list[Trajectory]:
    """Train each case on this rank; a case that raises is named."""
    paths = []
    for case in cases:
        try:
            paths.append(_train(case))
        except Exception as error:
            error.add_note(f"in case: {case}")
            raise
    return paths


def _train(case: LayoutCase) -> Trajectory:
    path = Trajectory()
    engine = speedlab.initialize(model=case.build(), optimizer=case.optimizer, config=case.config())[0]
    try:
        for step in range(case.steps):
            path.losses.append(engine.train_batch(batches(case, step, engine.group.index)))
            path.norms.append(engine.global_grad_norm)
        path.parameters = engine.state_dict()
    finally:
        engine.destroy(keep_parameters=False)
    return path
