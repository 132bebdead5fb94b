"""Random states of a rank: torch's, numpy's and Python's. Tensors go to the rank's file, the rest to the manifest."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


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
