"""One file with a model's weights and nothing else, as `torch.load` or safetensors read it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from speedlab.engine.checkpoint.agree import on_first
from speedlab.engine.checkpoint.tensor_file import Values, to_disk, write_tensors

if TYPE_CHECKING:
    from speedlab.comm import Group


def write_weights(everyone: Group, file: Path, state: Mapping[str, Tensor]) -> None:
    """The first rank writes `state`; the file appears when it is whole. Raises CheckpointError on every rank alike."""

    def write() -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        passing = file.with_name(f".{file.name}.partial")
        passing.unlink(missing_ok=True)
        if file.suffix == ".safetensors":
            values = {name: Values.of(tensor) for name, tensor in state.items()}
            write_tensors(passing, values, metadata={"format": "pt"})
        else:
            torch.save(_copies(state), passing)
            to_disk(passing)
        passing.replace(file)

    on_first(everyone, write)


def _copies(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors on the host with memory of their own: a view's file would hold all that it is a view of. What shares
    memory by two names still does."""
    copies: dict[tuple[int, torch.Size], Tensor] = {}
    for tensor in state.values():
        key = tensor.data_ptr(), tensor.shape
        if key not in copies:
            copies[key] = tensor.detach().to("cpu", copy=True).contiguous()
    return {name: copies[tensor.data_ptr(), tensor.shape] for name, tensor in state.items()}
