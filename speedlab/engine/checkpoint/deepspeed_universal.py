"""Import DeepSpeed's "universal" checkpoints, only with explicit trust, because their files are pickles.

Such a folder has `zero/<parameter>/fp32.pt`, `exp_avg.pt`, `exp_avg_sq.pt` and, from some optimizers, `step.pt`. A file
holds the whole parameter's tensor under "param", flat or in its shape; from ZeRO-3 the flat tensor alone. torch.load is
always used in weights-only mode, which was unsafe before torch 2.10.
"""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speedlab.engine.checkpoint.collective_errors import all_or_none
from speedlab.engine.checkpoint.read import take_whole
from speedlab.engine.state import TrainingState
from speedlab.telemetry.checkpoint_index import CheckpointError, Place

_LATEST = "latest_universal"
_MASTER = "fp32"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_OLDEST_TORCH = (2, 10)


def import_deepspeed(
    folder: Place, engine: TrainingState, *, trust_pickle: bool = False, step: int | None = None
) -> int:
    """Load parameters and Adam's moments of a universal checkpoint into an engine of the same model. Collective.

    Any layout can load it. The learning-rate schedule, the loss scale and random states do not change.

    Args:
        folder: The folder of one tag, or its parent, whose file `latest_universal` names the tag.
        engine: The training state.
        trust_pickle: Must be True. Set it only if you trust the writer of the files.
        step: Number of steps so far, if the files do not contain it.

    Returns:
        The step of the engine after the load.

    Raises:
        CheckpointError: On every rank, before any change.
    """
    group = engine.everyone
    zero = all_or_none(group, lambda: _zero_folder(Path(folder).expanduser(), trust_pickle))
    adam = any("betas" in options for options in engine.optimizer.param_groups)
    shapes = {row.name: row.whole_shape for row in engine.placement.rows}
    trainable = {row.name for row in engine.placement.rows if row.trainable}
    moments = [kind for kind in _MOMENTS if adam and all((zero / name / f"{kind}.pt").exists() for name in trainable)]
    # All ranks or none load moments: ranks of a pipeline check different files.
    if min(group.collect(len(moments))) < len(_MOMENTS):
        moments = []

    def check() -> int | None:
        for name, shape in shapes.items():
            for kind in (_MASTER, *(moments if name in trainable else ())):
                _read(zero / name / f"{kind}.pt", shape)
        return step if step is not None else _step(zero, trainable)

    steps = [known for known in group.collect(all_or_none(group, check)) if known is not None]
    if moments and not steps:
        raise CheckpointError(f"{zero}: its files do not tell how many steps were made, which Adam needs; give step=")
    done = int(max(steps, default=0))
    with torch.no_grad():
        take_whole(
            engine,
            lambda name, kind: _read(zero / name / f"{_MASTER if kind == 'master' else kind}.pt", shapes[name]),
            moments,
            {"step": float(done)} if moments else None,
        )
    engine.global_step = done
    return done


def _zero_folder(folder: Path, trust_pickle: bool) -> Path:
    if not trust_pickle:
        raise CheckpointError(
            f"{folder}: DeepSpeed's checkpoints are pickles, which may run code when they are read; where you trust "
            "its author, say trust_pickle=True"
        )
    version = tuple(int(number) for number in torch.__version__.split("+")[0].split(".")[:2])
    if version < _OLDEST_TORCH:
        raise CheckpointError(
            f"torch {torch.__version__} can be deceived when it reads pickles weights-only; use 2.10 or newer"
        )
    latest = folder / _LATEST
    if latest.exists():
        tag = latest.read_text().strip()
        # A file from elsewhere must not name a folder outside its own.
        if Path(tag).name != tag:
            raise CheckpointError(f"{latest}: names {tag!r}, which is outside its own folder")
        folder = folder / tag
    if not (folder / "zero").is_dir():
        raise CheckpointError(
            f"{folder}: has no folder 'zero'; make a universal checkpoint of it with DeepSpeed's ds_to_universal first"
        )
    return folder / "zero"


def _read(file: Path, shape: tuple[int, ...]) -> Tensor:
    """Return a parameter's tensor, flat. The file is mapped, so that only copied values are read."""
    content = _load(file)
    tensor = content.get("param") if isinstance(content, dict) else content
    if not isinstance(tensor, Tensor):
        raise CheckpointError(f"{file}: holds no tensor under 'param'")
    if tensor.numel() != math.prod(shape) or (tensor.ndim > 1 and tuple(tensor.shape) != tuple(shape)):
        raise CheckpointError(
            f"{file}: holds another model: its shape is {list(tensor.shape)} there and {list(shape)} here"
        )
    return tensor.reshape(-1)


def _step(zero: Path, names: set[str]) -> int | None:
    for name in sorted(names):
        file = zero / name / "step.pt"
        if file.exists():
            content = _load(file)
            content = content.get("param") if isinstance(content, dict) else content
            return int(content) if isinstance(content, Tensor | int | float) else None
    return None


def _load(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise CheckpointError(f"{file}: is missing; the checkpoint is not complete, or of another model") from None
    except pickle.UnpicklingError:
        raise CheckpointError(f"{file}: holds more than tensors and numbers, which is not read") from None
    except (RuntimeError, ValueError, EOFError) as error:
        raise CheckpointError(f"{file}: is damaged: {str(error).splitlines()[0]}") from None
