"""Random streams of forward passes: what dropout draws depends on the data and the place in the model, on no layout.

Before a block computes, torch's generators of this rank are seeded from (seed, step, global number of the micro-batch,
name of the block, how often it was called). So every layout with the same micro-batches drops the same elements, and a
recomputation for activation checkpointing, which torch gives the same state, does too. What the user's own code draws
between forwards is left alone.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from speedlab.parallel.zero import Zero


class RandomStreams:
    """The hooks that seed the forwards of some modules; `detach` takes them off."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._device = seed, device
        self._micro_batch = (0, 0)
        self._calls: Counter[str] = Counter()
        self._outside: list[Tensor] = []
        self._hooks: list[Any] = []

    def attach(self, module: nn.Module, zero: Zero) -> None:
        """Seed the root and every block of `module`, whose units are `zero`'s."""
        blocks = {id(block) for unit in zero.units[1:] for block in unit.modules}
        self._hooks.append(module.register_forward_pre_hook(self._enter, prepend=True))
        self._hooks.append(module.register_forward_hook(self._leave))
        for name, block in module.named_modules():
            if id(block) in blocks or block is module:
                self._hooks.append(block.register_forward_pre_hook(lambda m, _, name=name: self._seed_for(m, name)))

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def begin(self, step: int, micro_batch: int) -> None:
        """The forwards to come belong to this step and to this micro-batch of the global batch."""
        if self._micro_batch != (step, micro_batch):
            self._micro_batch = step, micro_batch
            self._calls.clear()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if module.training:
            self._outside = [torch.get_rng_state()]
            if self._device.type == "cuda":
                self._outside.append(torch.cuda.get_rng_state(self._device))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._outside:
            torch.set_rng_state(self._outside[0])
            if self._device.type == "cuda":
                torch.cuda.set_rng_state(self._outside[1], self._device)
            self._outside = []

    def _seed_for(self, module: nn.Module, name: str) -> None:
        if module.training:
            self._calls[name] += 1
            torch.manual_seed(_number([self._seed, *self._micro_batch, name, self._calls[name]]))


def _number(parts: Iterable[object]) -> int:
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
