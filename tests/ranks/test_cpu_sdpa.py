"""By whom attention in a module that an engine drives is computed."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import speedlab
from cuda_ops import cpu_sdpa
from ranks.pool import Pool

STEPS = 3
KERNELS = ("partial_attention", "partial_gradients")


class Encoder(nn.Module):
    """A transformer of torch's, and a head."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)).pow(2).mean()


def plain(x: Tensor, steps: int) -> list[float]:
    torch.manual_seed(0)
    module = Encoder()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = module(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def counted(called: dict[str, int], name: str, kernel: Any, *args: Any, **rest: Any) -> Any:
    called[name] += 1
    return kernel(*args, **rest)


def train(stage: int, choice: str) -> dict[str, Any]:
    """Three steps: losses beside a plain loop's, and how often our kernels were called, in a step and elsewhere."""
    called = dict.fromkeys(KERNELS, 0)
    x = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_sdpa, "is_faster", lambda: True)
        for name in KERNELS:
            patch.setattr(cpu_sdpa, name, partial(counted, called, name, getattr(cpu_sdpa, name)))
        expected = plain(x, 3)
        torch.manual_seed(0)
        module = Encoder()
        engine, *_ = speedlab.initialize(
            model=module,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            config={
                "zero": {"stage": stage},
                "precision": {"dtype": "float32", "attention": choice},
                "batch": {"micro_size": 2},
            },
        )
        other, *_ = speedlab.initialize(model=Encoder(), config={"precision": {"attention": "torch"}})
        losses = []
        for _ in range(3):
            loss = engine(x)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        in_steps = dict(called)
        with pytest.raises(AssertionError):
            engine(torch.ones(2, 64, 3))
        q = torch.randn(1, 2, 64, 16, requires_grad=True)
        F.scaled_dot_product_attention(q, q, q).sum().backward()
        other.backward(other(x))
        elsewhere = {name: called[name] - in_steps[name] for name in KERNELS}
        other.destroy()
        engine.destroy()
        return {
            "losses": losses,
            "expected": expected,
            "in steps": in_steps,
            "elsewhere": elsewhere,
        }


@pytest.mark.parametrize(("stage", "choice", "calls"), [(0, "auto", 6), (3, "auto", 6), (1, "torch", 0)])
def test_a_model_asks_torch_and_our_kernels_answer(two: Pool, stage: int, choice: str, calls: int) -> None:
    """Two layers, three steps."""
    for found in two.run(train, stage, choice):
        assert found["losses"] == pytest.approx(found["expected"], rel=1e-5)
        assert found["in steps"] == dict.fromkeys(KERNELS, calls)
        assert found["elsewhere"] == dict.fromkeys(KERNELS, 0)


def train_llama(padded: bool) -> dict[str, Any]:
    """Losses of a model of transformers whose heads share keys, beside a plain loop's, and calls of our kernels."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, attn_implementation="sdpa")
    tokens = torch.randint(0, 64, (2, 64), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[:, 50:] = int(not padded)
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}
    called = dict.fromkeys(KERNELS, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_sdpa, "is_faster", lambda: True)
        for name in KERNELS:
            patch.setattr(cpu_sdpa, name, partial(counted, called, name, getattr(cpu_sdpa, name)))
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        expected = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
        torch.manual_seed(0)
        engine, *_ = speedlab.initialize(
            model=LlamaForCausalLM(config),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            config={"zero": {"stage": 2}, "precision": "float32", "batch": {"micro_size": 2}},
        )
        losses = []
        for _ in range(STEPS):
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.destroy()
    return {"losses": losses, "expected": expected, "called": called}


@pytest.mark.parametrize(("padded", "calls"), [(False, 2 * STEPS), (True, 0)])
def test_heads_of_transformers_that_share_keys(two: Pool, padded: bool, calls: int) -> None:
    for found in two.run(train_llama, padded):
        assert found["losses"] == pytest.approx(found["expected"], rel=1e-5)
        assert found["called"] == dict.fromkeys(KERNELS, calls)
