"""Random streams of forward passes: what dropout draws depends on the data and the place in the model, on no layout.

Before a block computes, torch's generators of this rank are seeded from (seed, step, global number of the micro-batch,
name of the block, how often it was called). So every layout with the same micro-batches drops the same elements. A
recomputation for activation checkpointing, which begins with the generators as the forward found them, gets the seed of
that forward again. What the user's own code draws between forwards is left alone.

Random states of a rank: torch's, numpy's and Python's. Tensors go to the rank's file, the rest to the manifest.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from speedlab.parallel import seed_generators
from speedlab.parallel.zero import Zero
from speedlab.parallel.zero.module_hooks import hook_of
from speedlab.parallel.zero.units import UnitPhase


class RandomStreams:
    """The hooks that seed the forwards of some modules; `detach` takes them off."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._device = seed, device
        self._micro_batch = (0, 0)
        self._calls: Counter[str] = Counter()
        self._given: dict[tuple[str, int], int] = {}
        """(block, seed that a forward of this step found) → the seed that it got."""
        self._outside: list[Tensor] = []
        self._hooks: list[Any] = []

    def attach(self, module: nn.Module, zero: Zero) -> None:
        """Seed the root and every block of `module`, whose units are `zero`'s."""
        blocks = {id(block) for unit in zero.units[1:] for block in unit.modules}
        enter, leave = hook_of(self, module, RandomStreams._enter), hook_of(self, module, RandomStreams._leave)
        self._hooks.append(module.register_forward_pre_hook(enter, prepend=True))
        self._hooks.append(module.register_forward_hook(leave, always_call=True))

        def seed_for(name: str) -> Callable[..., None]:
            def hook(driver: Zero, block: nn.Module, args: Any) -> None:
                if block.training:
                    self._seed_for(name, again=driver.current is UnitPhase.BACKWARD)

            return hook

        for name, block in module.named_modules():
            if id(block) in blocks or block is module:
                self._hooks.append(block.register_forward_pre_hook(hook_of(zero, block, seed_for(name))))

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def begin(self, step: int, micro_batch: int) -> None:
        """The forwards to come belong to this step and to this micro-batch of the global batch."""
        if self._micro_batch != (step, micro_batch):
            if self._micro_batch[0] != step:
                self._given.clear()
            self._micro_batch = step, micro_batch
            self._calls.clear()

    def forget(self) -> None:
        """The step's micro-batches are run again, and draw what they drew."""
        self._given.clear()
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

    def _seed_for(self, name: str, *, again: bool) -> None:
        """`again`: inside a backward, which computes a forward anew."""
        found = torch.initial_seed()
        seed = self._given.get((name, found)) if again else None
        if seed is None:
            self._calls[name] += 1
            seed = _number([self._seed, *self._micro_batch, name, self._calls[name]])
            self._given[name, found] = seed
        seed_generators(seed, self._device)


def _number(parts: Iterable[object]) -> int:
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def random_tensors(device: torch.device) -> dict[str, Tensor]:
    """Those states of this process that are large."""
    tensors = {
        "random/torch": torch.get_rng_state(),
        "random/numpy": torch.from_numpy(np.random.get_state()[1].astype(np.int64)),  # type: ignore[index]  # the legacy tuple
    }
    if device.type == "cuda":
        tensors["random/cuda"] = torch.cuda.get_rng_state(device)
    return tensors


def random_words() -> dict[str, Any]:
    """The rest, as JSON holds it."""
    version, state, gauss = random.getstate()
    _, _, position, has_gauss, cached = np.random.get_state()
    return {"python": [version, list(state), gauss], "numpy": [int(position), int(has_gauss), float(cached)]}


def restore_random(words: dict[str, Any], tensors: dict[str, Tensor], device: torch.device) -> None:
    """Set this process's states to what `random_words` and `random_tensors` gave."""
    torch.set_rng_state(tensors["random/torch"])
    if "random/cuda" in tensors and device.type == "cuda":
        torch.cuda.set_rng_state(tensors["random/cuda"], device)
    version, state, gauss = words["python"]
    random.setstate((version, tuple(state), gauss))
    position, has_gauss, cached = words["numpy"]
    keys = tensors["random/numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, cached))
