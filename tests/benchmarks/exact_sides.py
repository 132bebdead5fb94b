"""The sides of `python -m tests.benchmarks exact`, each in rank processes of its own: one step of the built-in GPT.

A step's update keeps gradients in the place of parameters, so that the whole state afterwards is every gradient,
whichever rank had it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

_VOCABULARY, _HEAD = 512, 64
_PATTERN = {"kind": "block_sparse", "pattern": "bigbird", "block": 64, "window": 512, "random_blocks": 2}
_QUERIES = 2048
"""Of masked dense attention, computed at once: a mask of all would take the square of the length."""


@dataclass(frozen=True, kw_only=True)
class Case:
    length: int
    layers: int
    heads: int


@dataclass(frozen=True, kw_only=True)
class Side:
    cp: int = 1
    heads_shared: int = 1
    sparse: bool = False
    masked: bool = False
    """Dense attention, under the mask of the sparse pattern."""
    threads: int = 1


@dataclass(frozen=True)
class Step:
    """What a step left: `gradients` by parameter, whole ones."""

    loss: float
    gradients: dict[str, Any]
    seconds: float
    peak_bytes: int
    """The most that rank 0 took beyond what it held before."""

    def alongside(self, other: Step) -> tuple[float, float, str]:
        """How far off: the loss, relatively; the gradient that is furthest off, in norms; and whose that is."""
        off = {
            name: float((own.double() - wanted.double()).norm() / wanted.double().norm())
            for name, own, wanted in ((name, self.gradients[name], wanted) for name, wanted in other.gradients.items())
        }
        worst = max(off, key=lambda name: off[name])
        return abs(self.loss - other.loss) / abs(other.loss), off[worst], worst


def warm(case: Case, side: Side) -> None:
    """Import and compile everything, on a short sequence."""
    step(replace(case, length=64 * 8), side)


def step(case: Case, side: Side) -> Step:
    import torch

    import speedlab
    from speedlab.engine.memory_ledger import PeakMemory, give_freed_memory_back, release_freed_memory
    from speedlab.models import GPT

    torch.set_num_threads(side.threads)
    release_freed_memory(torch.device("cpu"))
    before, config = PeakMemory.resident(), _config(case, side)

    def model() -> Any:
        made: Any = GPT(config.model)
        for block in made.blocks if side.masked else ():
            block.attention.attend = _masked_attention(case.length)
        return made

    engine = speedlab.initialize(model=model, optimizer=_keeps_gradients, config=config)[0]
    give_freed_memory_back()  # After initialize, which asks for the opposite.
    peak = PeakMemory(engine.world.device)
    rows = torch.randint(_VOCABULARY, (1, case.length + 1), generator=torch.Generator().manual_seed(1))
    peak.take()
    start = time.perf_counter()
    loss = engine.train_batch([(rows[:, :-1], rows[:, 1:])])
    seconds = time.perf_counter() - start
    taken = peak.take()[0] - before
    gradients = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.destroy(keep_parameters=False)
    return Step(loss, gradients, seconds, taken)


def _keeps_gradients(groups: Any) -> Any:
    import torch

    class KeepsGradients(torch.optim.Optimizer):
        """Its update: each parameter becomes its gradient."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.copy_(parameter.grad)

    return KeepsGradients(groups, {})


def _masked_attention(length: int) -> Any:
    import torch
    import torch.nn.functional as F
    from torch import Tensor
    from torch.utils.checkpoint import checkpoint

    from speedlab.config import AttentionConfig
    from speedlab.config.attention import seen_blocks

    attention = AttentionConfig.model_validate(_PATTERN)
    rows = seen_blocks(attention, length)

    class Masked(torch.nn.Module):
        """torch's attention, some queries at a time, with a mask over tokens made of the pattern's definition."""

        def forward(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None = None) -> Tensor:
            assert starts is None
            firsts = range(0, q.shape[2], _QUERIES)
            return torch.cat([checkpoint(self._some, q, k, v, first, use_reentrant=False) for first in firsts], dim=2)

        @staticmethod
        def _some(q: Tensor, k: Tensor, v: Tensor, first: int) -> Tensor:
            end = min(first + _QUERIES, q.shape[2])
            seen = torch.zeros(end - first, end, dtype=torch.bool)
            for row in range(first // attention.block, -(-end // attention.block)):
                for key in rows[row]:
                    places = slice(row * attention.block - first, (row + 1) * attention.block - first)
                    seen[places, key * attention.block : (key + 1) * attention.block] = True
            seen &= torch.arange(end) <= torch.arange(first, end)[:, None]
            return F.scaled_dot_product_attention(q[:, :, first:end], k[:, :, :end], v[:, :, :end], attn_mask=seen)

    return Masked()


def _config(case: Case, side: Side) -> Any:
    import speedlab

    hidden = case.heads * _HEAD
    return speedlab.RunConfig.model_validate(
        {
            "model": {
                "layers": case.layers,
                "hidden": hidden,
                "heads": case.heads,
                "ffn_hidden": 4 * hidden,
                "vocab_size": _VOCABULARY,
                "context": case.length,
                "attention": _PATTERN if side.sparse else {},
            },
            "data": {"sequence_length": case.length, "tokenizer": "bytes"},
            "precision": {"dtype": "float32", "attention": "torch"},
            "batch": {"micro_size": 1, "accumulation": 1},
            "parallel": {"cp": side.cp, "cp_heads": side.heads_shared if side.cp > 1 else None},
            "zero": {"stage": 3 if side.cp > 1 else 0},
            "clip_norm": None,
            "schedule": {"kind": "constant", "warmup_steps": 0},
        }
    )
