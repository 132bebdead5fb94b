"""Seeding a block's forward: the generators that the run draws from, and nothing else."""

from __future__ import annotations

import pytest
import torch

from speedlab.parallel import seed_generators


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_only_generators_of_the_run_are_seeded(monkeypatch, kind: str) -> None:
    """Other devices write down the stack of Python for later, at every block of every forward."""
    asked: list[str] = []
    for module in (torch.cuda, torch.xpu, torch.mtia, torch.mps):
        for name in ("manual_seed", "manual_seed_all"):
            said = f"{module.__name__}.{name}"
            monkeypatch.setattr(module, name, lambda seed, said=said: asked.append(said), raising=False)
    with torch.random.fork_rng([]):
        seed_generators(7, torch.device(kind))
        drawn = torch.rand(5)
        assert drawn.equal(torch.rand(5, generator=torch.Generator().manual_seed(7)))
    assert asked == (["torch.cuda.manual_seed"] if kind == "cuda" else [])
