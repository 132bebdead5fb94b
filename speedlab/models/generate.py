"""Sample from a language model, with the same result on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from speedlab.config import ModelConfig


@torch.no_grad()
def generate(
    model: Callable[[Tensor], Any],
    tokens: Tensor,
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    context: int | None = None,
    vocabulary: int | None = None,
) -> Tensor:
    """Continue `tokens` (1, T) by `count` sampled tokens.

    A forward pass may be a collective. If the model is spread over ranks, call this on all of them with the same
    arguments: each makes exactly `count` passes and draws the same random numbers.

    Args:
        model: Returns an output with `logits` (1, T, V) for (1, T) tokens. A module is in evaluation mode during the
            call.
        tokens: Prompt, (1, T) int64.
        count: Number of tokens to sample.
        temperature: Below 1 favours likely tokens; 0 always takes the likeliest.
        top_k: Sample only from this many likeliest tokens.
        seed: Seed of the random numbers.
        context: Number of last tokens that the model sees; by default the context of a GPT, otherwise all tokens.
        vocabulary: Sample only from the first tokens, if a tokenizer has fewer tokens than the model.

    Returns:
        Prompt and sampled tokens, (1, T + count) int64.

    Raises:
        ValueError: If the prompt is empty, `count` or `temperature` is negative, `top_k`, `context` or `vocabulary` is
            below 1, or the model returns no logits.
    """
    _check(tokens, count, temperature, top_k=top_k, context=context, vocabulary=vocabulary)
    context = context or _context(model)
    # Draw on the CPU, so that the random numbers do not depend on the device.
    generator = torch.Generator().manual_seed(seed)
    with _evaluating(model):
        # Exactly `count` passes on every rank, because a pass may have collectives.
        for _ in range(count):
            seen = tokens if context is None else tokens[:, -context:]
            output = model(seen)
            if not hasattr(output, "logits"):
                kind = type(output).__name__
                raise ValueError(f"the model gave a {kind} for tokens; generate needs an output with .logits")
            logits = output.logits[:, -1, :vocabulary].float().cpu()  # (1, V); one device sync per token
            chosen = _sample(logits, temperature, top_k, generator)  # (1, 1)
            tokens = torch.cat((tokens, chosen.to(tokens.device)), dim=1)
    return tokens


def _sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    """Return one token id for each row: (N, V) float32 -> (N, 1) int64."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    candidates = None
    if top_k is not None and top_k < logits.shape[-1]:
        logits, candidates = logits.topk(top_k, dim=-1)
    # Subtract the maximum, so that no temperature overflows.
    scaled = (logits - logits.max(dim=-1, keepdim=True).values) / temperature
    chosen = torch.multinomial(scaled.softmax(dim=-1), 1, generator=generator)
    # With top_k, `chosen` is an index into the candidates.
    return chosen if candidates is None else candidates.gather(-1, chosen)


def _check(tokens: Tensor, count: int, temperature: float, **at_least_one: int | None) -> None:
    if tokens.dim() != 2 or tokens.shape[0] != 1 or tokens.shape[1] == 0:
        raise ValueError(
            f"the prompt has shape {tuple(tokens.shape)}; generate takes (1, T) token ids with T of at least 1"
        )
    for name, value, least in (("count", count, 0), ("temperature", temperature, 0)):
        if not value >= least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")
    for name, value in at_least_one.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1, or None")


def _context(model: object) -> int | None:
    """Return the context of a GPT, also if the GPT is wrapped as `.module`."""
    config = getattr(getattr(model, "module", model), "config", None)
    return config.context if isinstance(config, ModelConfig) else None


@contextmanager
def _evaluating(model: object) -> Iterator[None]:
    module = getattr(model, "module", model)
    if not (isinstance(module, nn.Module) and module.training):
        yield
        return
    module.eval()
    try:
        yield
    finally:
        module.train()
