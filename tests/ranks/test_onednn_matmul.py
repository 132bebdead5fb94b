"""By whom the linear layers of a module that an engine drives multiply float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import speedlab
from cuda_ops import onednn_matmul
from ranks.pool import Pool


class Layers(nn.Module):
    """Linear layers around an activation, and a matrix of which no layer knows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.mix = nn.Parameter(torch.eye(64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(torch.relu(self.up(x))) @ self.mix).pow(2).mean()


class Settings(TorchDispatchMode):
    """With which setting each product was made."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("mm", "addmm"):
            self.seen.append(setting())
        return func(*args, **(kwargs or {}))


def setting() -> str:
    return torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]


def hooks_of(module: nn.Module) -> int:
    hooks = [*module.up._forward_hooks.values(), *module.down._forward_hooks.values()]
    return sum(isinstance(each, onednn_matmul._Hook) for each in hooks)


def train(stage: int, dtype: str, choice: str, checkpointing: str) -> dict[str, Any]:
    """Two steps: the settings of the second's products, and what is left of it behind a failure and at the end."""
    torch.manual_seed(0)
    config = {
        "zero": {"stage": stage},
        "precision": {"dtype": dtype, "products": choice},
        "batch": {"micro_size": 128},
        "activation": {"checkpointing": checkpointing},
    }
    # As where oneDNN is faster: the setting is the same on every processor.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onednn_matmul, "faster", lambda: True)
        module = Layers()
        engine, *_ = speedlab.initialize(model=module, config=config, units=lambda name, each: name == "up")
        x = torch.randn(128, 64)
        for _ in range(2):
            with Settings() as settings:
                engine.backward(engine(x))
            engine.step()
        with pytest.raises(RuntimeError):
            engine(torch.ones(128, 3))
        found = {"seen": settings.seen, "after a failure": setting(), "hooks": hooks_of(module)}
        engine.destroy()
        return {**found, "hooks at the end": hooks_of(module)}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("checkpointing", ["none", "block"])
def test_layers_of_a_float32_engine_multiply_by_onednn(two: Pool, stage: int, checkpointing: str) -> None:
    """Four of seven products at least: where a block is computed again, this ends one of its own layer's."""
    for found in two.run(train, stage, "float32", "auto", checkpointing):
        seen = found["seen"]
        assert seen[:3] == ["bf16", "bf16", "none"], "forward: two layers, and the matrix"
        assert seen[3:5] == ["none", "none"], "backward: the matrix"
        assert set(seen[5:]) == {"bf16"} or checkpointing == "block"
        assert seen.count("bf16") >= 5
        assert found["after a failure"] == "none"
        assert (found["hooks"] > 0, found["hooks at the end"]) == (True, 0)


@pytest.mark.parametrize(("dtype", "choice"), [("float32", "torch"), ("bfloat16", "auto")])
def test_others_are_left_as_they_are(two: Pool, dtype: str, choice: str) -> None:
    for found in two.run(train, 1, dtype, choice, "none"):
        assert set(found["seen"]) == {"none"}
        assert found["hooks"] == 0


def settings_of_one_bit_adam(others: int) -> tuple[list[str], bytes]:
    """Of the products of two steps in a process that has trained `others` before, of other shapes; and the parameters'
    bits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onednn_matmul, "faster", lambda: True)
        patch.setattr(onednn_matmul, "MOST_SHAPES", 4)
        for number in range(others):
            steps_of({"optimizer": {"name": "adamw"}}, rows=64 + 8 * number)
        return steps_of({"optimizer": {"name": "onebit_adam", "freeze_step": 1}}, rows=128)


def steps_of(config: dict[str, Any], rows: int) -> tuple[list[str], bytes]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module, x = Layers(), torch.randn(rows, 64)
    settings = {"zero": {"stage": 0}, "precision": {"dtype": "float32"}, "batch": {"micro_size": rows}}
    engine, *_ = speedlab.initialize(model=module, config=settings | config)
    with Settings() as seen:
        for _ in range(2):
            engine.backward(engine(x))
            engine.step()
    parameters = torch.cat([value.flatten() for value in engine.state_dict().values()])
    engine.destroy()
    return seen.seen, parameters.numpy().tobytes()


def test_whose_products_are_does_not_depend_on_what_was_trained_before(two: Pool) -> None:
    """oneDNN's machine code is bounded for each engine: the bits of a run would else be those of a fresh process only
    until so many shapes were multiplied."""
    for used, fresh in zip(two.run(settings_of_one_bit_adam, 3), two.run(settings_of_one_bit_adam, 0), strict=True):
        assert fresh[0].count("bf16") >= 8
        assert used == fresh
