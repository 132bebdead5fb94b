"""Random streams of forwards: dropout depends on the data and the position in the model, not on the layout.

Before a block runs, torch's generators of this rank are seeded from (seed, step, global number of the micro-batch, name
of the block, number of its call). So all layouts with equal micro-batches drop equal elements. A recomputation for
activation checkpointing starts with the generators of its forward, and gets the same seed. Random numbers of user code
between forwards do not change.

Also here: random states of a rank (torch, numpy, Python) for checkpoints. Tensors are stored in the rank's file, the
rest in the manifest.
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
    """The hooks that seed the forwards of modules; `detach` removes them."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._device = seed, device
        self._micro_batch = (0, 0)
        self._calls: Counter[str] = Counter()
        self._given: dict[tuple[str, int], int] = {}
        """(block, generator seed that a forward of this step found) → the seed that it got."""
        self._outside: list[Tensor] = []
        self._hooks: list[Any] = []

    def attach(self, module: nn.Module, zero: Zero) -> None:
        """Install hooks on the root and every block.

        Args:
            module: The model part.
            zero: Its partitioner, whose units define the blocks.
        """
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
        """Remove all hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def begin(self, step: int, micro_batch: int) -> None:
        """Set the step and the micro-batch of the next forwards.

        Args:
            step: Number of the step.
            micro_batch: Number of the micro-batch in the global batch.
        """
        if self._micro_batch != (step, micro_batch):
            if self._micro_batch[0] != step:
                self._given.clear()
            self._micro_batch = step, micro_batch
            self._calls.clear()

    def forget(self) -> None:
        """Reset the call counts, so that repeated micro-batches draw the same numbers."""
        self._given.clear()
        self._calls.clear()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if module.training:
            # Blocks seed the generators; `_leave` restores them for user code between forwards.
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
        """Seed the generators for a block. `again`: inside a backward, which recomputes a forward."""
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
    """Return the large random states of this process, as tensors by name.

    Args:
        device: The device of this rank.
    """
    tensors = {
        "random/torch": torch.get_rng_state(),
        "random/numpy": torch.from_numpy(np.random.get_state()[1].astype(np.int64)),  # type: ignore[index]  # the legacy tuple
    }
    if device.type == "cuda":
        tensors["random/cuda"] = torch.cuda.get_rng_state(device)
    return tensors


def random_words() -> dict[str, Any]:
    """Return the other random states, as JSON values."""
    version, state, gauss = random.getstate()
    _, _, position, has_gauss, cached = np.random.get_state()
    return {"python": [version, list(state), gauss], "numpy": [int(position), int(has_gauss), float(cached)]}


def restore_random(words: dict[str, Any], tensors: dict[str, Tensor], device: torch.device) -> None:
    """Set the random states of this process.

    Args:
        words: From `random_words`.
        tensors: From `random_tensors`.
        device: The device of this rank.
    """
    torch.set_rng_state(tensors["random/torch"])
    if "random/cuda" in tensors and device.type == "cuda":
        torch.cuda.set_rng_state(tensors["random/cuda"], device)
    version, state, gauss = words["python"]
    random.setstate((version, tuple(state), gauss))
    position, has_gauss, cached = words["numpy"]
    keys = tensors["random/numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, cached))
