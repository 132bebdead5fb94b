"""Models of transformers that attend to blocks, trained under every axis: beside a plain loop of the same model with
its own eager attention under a mask. What is refused: tests/unit/test_hugging_face_attention.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import speedlab
from ranks.conftest import PoolOf
from ranks.layout_cases import LayoutCase, labels_loss, long_tokens
from ranks.tensor_models import hugging_face
from ranks.test_layouts import FLOAT32, PlainOf, check
from speedlab.config import ConfigError
from speedlab.layout import Layout

pytest.importorskip("transformers")

WINDOW = 19
ATTENTION = {"kind": "block_sparse", "block": 16, "pattern": "sliding", "window": WINDOW}


@dataclass(frozen=True, kw_only=True)
class SparseCase(LayoutCase):
    """A training whose attention is over blocks of 16 tokens; 41 tokens are two whole blocks and a part of one."""

    loss: Any = labels_loss
    batch: Any = long_tokens

    def config(self) -> dict[str, Any]:
        return {**super().config(), "model": {"attention": ATTENTION}}


def llama() -> Any:
    return hugging_face("llama", hidden_size=64, num_attention_heads=4, num_key_value_heads=2)


def gpt2() -> Any:
    return hugging_face("gpt2", n_embd=64, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0)


class Masked(nn.Module):
    """A model with eager attention under a mask, with the names of its own parameters."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        whole.set_attn_implementation("eager")
        self._whole = [whole]  # In a list: no module of this one.
        for name, child in whole.named_children():
            self.add_module(name, child)

    def forward(self, tokens: Tensor) -> Any:
        seen = torch.ones(2 * [tokens.shape[1]], dtype=torch.bool).tril().triu(1 - WINDOW)
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        return self._whole[0](tokens, attention_mask=mask.expand(len(tokens), 1, -1, -1))


def masked_llama() -> nn.Module:
    return Masked(llama())


def masked_gpt2() -> nn.Module:
    return Masked(gpt2())


@pytest.mark.parametrize(("build", "masked"), [(llama, masked_llama), (gpt2, masked_gpt2)])
def test_every_axis(pool_of: PoolOf, plain: PlainOf, build: Any, masked: Any) -> None:
    options: list[dict[str, Any]] = [
        {"layout": Layout(dp=2), "stage": 3, "accumulation": 2},
        {"layout": Layout(dp=2), "stage": 1, "accumulation": 2, "checkpointing": "block"},
        {"layout": Layout(tp=2), "stage": 0, "accumulation": 2},
        {"layout": Layout(pp=2), "stage": 0},
    ]
    check(pool_of, plain, [SparseCase(build=build, **each) for each in options], FLOAT32, timeout=120, build=masked)


SETTINGS: dict[str, Any] = {"model": {"attention": ATTENTION}, "batch": {"micro_size": 2}, "precision": "float32"}


def implementations() -> tuple[list[str], list[bool]]:
    """(the attention at the start, then under an engine, under another one, and at the end), and whether the model has
    its own configuration: after a refusal, and at the end."""
    model: Any = llama()
    config = model.config
    names, own = [config._attn_implementation], []
    with pytest.raises(ConfigError, match="optimizer"):
        speedlab.initialize(model=model, config=SETTINGS, optimizer=torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    own.append(model.config is config)
    for _ in range(2):  # The second takes the model from the first.
        engine = speedlab.initialize(model=model, config=SETTINGS)[0]
        names.append(model.config._attn_implementation)
    engine.destroy()
    own.append(model.config is config)
    return [*names, config._attn_implementation], own


def test_the_model_is_given_back_with_its_own_attention(pool_of: PoolOf) -> None:
    (names, own) = pool_of(1).run(implementations, timeout=60)[0]
    assert names[0] == names[3] == "sdpa"
    assert names[1] == names[2]
    assert names[1].startswith("speedlab_block_sparse_")
    assert own == [True, True]


def of_a_function() -> tuple[float, float]:
    """The loss of a model that a function makes, and that of its values under eager attention with a mask."""
    engine = speedlab.initialize(model=llama, config=SETTINGS)[0]
    tokens = long_tokens(0, 0)[0]
    found = engine.evaluate([{"input_ids": tokens, "labels": tokens}])
    plain = llama()
    plain.load_state_dict(engine.state_dict())
    engine.destroy()
    with torch.no_grad():
        logits = Masked(plain)(tokens).logits
        return found, nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item()


def test_a_function_that_makes_the_model(pool_of: PoolOf) -> None:
    (found, expected) = pool_of(1).run(of_a_function, timeout=60)[0]
    assert found == pytest.approx(expected, rel=1e-5)


def refusal() -> str:
    with pytest.raises(ConfigError) as error:
        speedlab.initialize(model=nn.Linear(2, 2), config=SETTINGS)
    return str(error.value)


def test_any_other_module_is_refused(pool_of: PoolOf) -> None:
    (said,) = pool_of(1).run(refusal, timeout=60)
    assert said.startswith("model.attention.kind: 'block_sparse' has no effect on a Linear")
