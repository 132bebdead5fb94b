"""Write a model's weights to a single file, for `torch.load` or safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from speedlab.engine.checkpoint.collective_errors import on_first
from speedlab.engine.checkpoint.safetensors_files import Values, to_disk, write_tensors
from speedlab.telemetry.checkpoint_index import CheckpointError

if TYPE_CHECKING:
    from speedlab.comm import Group


def write_weights(everyone: Group, file: Path, state: Mapping[str, Any]) -> None:
    """Write weights on the first rank. The file appears when it is complete.

    Args:
        everyone: All ranks.
        file: The path; the suffix .safetensors chooses this format.
        state: Weights by name.

    Raises:
        CheckpointError: On every rank, also for values that safetensors cannot hold: extra states of modules, and
            quantised tensors of their own class.
    """

    def write() -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder, so that the rename is atomic.
        passing = file.with_name(f".{file.name}.partial")
        passing.unlink(missing_ok=True)
        if file.suffix == ".safetensors":
            for name, value in state.items():
                if not _is_plain(value):
                    raise CheckpointError(
                        f"{file}: {name} is a {type(value).__name__}, and safetensors hold plain tensors; give a name "
                        "that ends in .bin, or use save_checkpoint"
                    )
            values = {name: Values.of(tensor) for name, tensor in state.items()}
            write_tensors(passing, values, metadata={"format": "pt"})
        else:
            torch.save(_copies(state), passing)
            to_disk(passing)
        passing.replace(file)

    on_first(everyone, write)


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and not is_traceable_wrapper_subclass(value)


def _copies(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of tensors in host memory, because the file of a view would hold its whole base.

    Tensors with shared memory stay shared. Other values stay unchanged.
    """
    copies: dict[tuple[int, torch.Size], Tensor] = {}
    for tensor in filter(_is_plain, state.values()):
        key = tensor.data_ptr(), tensor.shape
        if key not in copies:
            copies[key] = tensor.detach().to("cpu", copy=True).contiguous()
    return {name: copies[value.data_ptr(), value.shape] if _is_plain(value) else value for name, value in state.items()}
