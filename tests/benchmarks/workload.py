"""What the contestants of `bench step` train: one model from the same values, one batch. In every checkout the same."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from speedlab.config import ModelConfig
from speedlab.models import GPT

SHIPPED = ModelConfig(layers=6, hidden=384, heads=6, ffn_hidden=1536, vocab_size=16384, context=128)
"""17 million parameters, 6.3 of them in the tied embedding, with the loss that a user of SpeedLab gets."""

MODEL = SHIPPED.model_copy(update={"loss": "full"})
"""The same with torch's."""

MICRO_BATCH, SEQUENCE = 4, 128

LEARNING_RATE = 1e-3


def model_of(kind: str) -> GPT:
    """The model of a contestant, with the same values on every rank and in every checkout."""
    torch.manual_seed(0)
    return GPT(SHIPPED if kind == "shipped" else MODEL)


def batch() -> tuple[Tensor, Tensor]:
    """Tokens and targets (B, T) of this rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (2, MICRO_BATCH, SEQUENCE)
    tokens, targets = torch.randint(0, MODEL.vocab_size, shape, generator=generator)
    return tokens, targets
