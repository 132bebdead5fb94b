"""Packed documents in keyword arguments: `engine(**batch)` trains as a plain loop that sees each document by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import speedlab
from ranks import models
from ranks.layout_cases import llama
from ranks.loops import sgd
from ranks.pool import Pool

LENGTHS = (3, 5, 4)


def packed(step: int, index: int) -> dict[str, Tensor]:
    """Three documents in each of two sequences of 12 tokens, as collators give them."""
    generator = torch.Generator().manual_seed(1_000_003 * step + index)
    tokens = torch.randint(models.VOCABULARY, (2, sum(LENGTHS)), generator=generator)
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).expand(2, -1)
    return {
        "input_ids": tokens,
        "labels": tokens.masked_fill(positions == 0, -100),
        "position_ids": positions,
        "attention_mask": torch.ones_like(tokens),
    }


def by_themselves(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The mean loss over the targets of documents that are sequences of their own."""
    total = torch.zeros(())
    for tokens in batch["input_ids"].split(LENGTHS, dim=1):
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
        total = total + F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    return total / (batch["labels"] != -100).sum()


def plain() -> dict[str, Tensor]:
    model: Any = llama()
    optimizer = sgd(model.parameters())
    for step in range(4):
        for index in (0, 1):
            (by_themselves(model, packed(step, index)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def trained(stage: int, way: str) -> dict[str, Tensor]:
    config = {"zero": {"stage": stage, "bucket_bytes": 1}, "batch": {"micro_size": 2}, "precision": "float32"}
    model: Any = llama()
    model.config.use_cache = True  # As models of transformers have it; those of these tests do not.
    engine: Any = speedlab.initialize(model=model, optimizer=sgd, config=config)[0]
    try:
        for step in range(4):
            batch = packed(step, engine.world.rank)
            if way == "call":
                engine.backward(engine(**batch).loss)
                engine.step()
            else:
                engine.train_batch([batch])
            assert model.config.use_cache
        evaluated = engine.evaluate([packed(9, engine.world.rank)])
        whole = engine.state_dict()
        engine.eval()
        with torch.no_grad():  # Without targets a call may generate.
            assert engine(input_ids=packed(0, 0)["input_ids"]).past_key_values is not None
    finally:
        engine.destroy()
    with torch.no_grad():
        expected = sum(by_themselves(model, packed(9, index)).item() for index in (0, 1)) / 2
    assert evaluated == pytest.approx(expected, rel=1e-5)
    return whole


@pytest.mark.parametrize(("stage", "way"), [(0, "call"), (3, "call"), (2, "step")])
def test_documents_are_separate(two: Pool, stage: int, way: str) -> None:
    expected = plain()
    for found in two.run(trained, stage, way, timeout=90):
        assert max(float((found[name] - value).abs().max()) for name, value in expected.items()) <= 2e-5


def refused() -> list[str]:
    """What ranks say of batches whose documents would see each other."""
    config = {"zero": {"stage": 3}, "batch": {"micro_size": 2}}
    engine: Any = speedlab.initialize(model=llama(), optimizer=sgd, config=config)[0]
    said = []
    try:
        holes = packed(0, 0)
        holes["attention_mask"][:, 5] = 0
        for batch in (holes, {**packed(0, 0), "use_cache": True}):
            for call in (lambda batch: engine(**batch), lambda batch: engine.train_batch([batch])):
                with pytest.raises(ValueError, match="documents") as caught:
                    call(batch)
                said.append(str(caught.value))
        engine.train_batch([packed(0, engine.world.rank)])
        return said
    finally:
        engine.destroy(keep_parameters=False)


def test_what_would_mix_documents_is_refused(two: Pool) -> None:
    for said in two.run(refused, timeout=60):
        assert [text.partition(":")[0] for text in said] == ["attention_mask"] * 2 + ["use_cache"] * 2
