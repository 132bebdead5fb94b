"""Whole steps of a small GPT, whose batches are a function of the step and the place in it under any layout."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import speedlab
from ranks.tensor_models import VOCABULARY, gpt


@contextmanager
def engine_of(config: dict[str, Any], **shape: Any) -> Iterator[Any]:
    engine = speedlab.initialize(model=gpt(tied=True, **shape), config=config)[0]
    try:
        yield engine
    finally:
        engine.destroy()


def batch(step: int, place: int) -> tuple[Tensor, Tensor]:
    """Two sequences of 12 tokens."""
    whole = torch.randint(VOCABULARY, (2, 13), generator=torch.Generator().manual_seed(100 * step + place))
    return whole[:, :-1], whole[:, 1:]


def step_of(engine: Any, step: int) -> float:
    own, shares = engine.mesh.data_index, engine.layout.data_size
    return engine.train_batch([batch(step, micro * shares + own) for micro in range(engine.accumulation)])


@contextmanager
def warnings_of(name: str) -> Iterator[list[str]]:
    """What the logger of this name says meanwhile."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def refusal_of_one_stage(config: dict[str, Any]) -> str:
    """What this rank says to a model of two pipeline stages of which the last one has a norm in float64."""
    model = gpt(tied=False)
    model.norm.to(torch.float64)  # Nothing is computed.
    try:
        speedlab.initialize(model=model, config=config)[0].destroy()
    except speedlab.ConfigError as error:
        return str(error)
    return ""
