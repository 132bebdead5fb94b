"""Why a control of the panel is greyed, and what this machine makes of a value."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

from speedlab.hardware import Device
from speedlab_notebook.panel_states import compute_dtype

_LATER = {
    "parallel.tp": "tensor parallelism comes with a later version; dp = engines",
    "parallel.pp": "pipeline parallelism comes with a later version; dp = engines",
}
_FLOAT16_ON_CPU = "CPUs do not multiply float16 fast; bfloat16 is as small and needs no loss scale"


def greyed_fields(values: Mapping[str, Any], devices: Sequence[Device]) -> dict[str, str]:
    """Path of a field -> why it is greyed, given all `values` by path."""
    dp, optimizer, dtype = len(devices), values["optimizer.name"], values["precision.dtype"]
    reasons = dict(_LATER)
    if values["parallel.dp"] is None:
        reasons["parallel.dp"] = f"follows from the engines: dp {dp} = {dp} engines / (pp 1 × tp 1)"
    for name, owner in (("betas", "adamw"), ("eps", "adamw"), ("momentum", "sgd")):
        if owner != optimizer:
            reasons[f"optimizer.{name}"] = f"only {owner} uses it; the optimizer is {optimizer}"
    if values["schedule.kind"] == "constant":
        reasons["schedule.floor"] = "a constant rate does not fall; cosine does"
    if values["data.tokenizer"] != "bpe":
        reasons["data.vocab_size"] = "only the tokenizer 'bpe' trains a vocabulary"
    if dtype != "float16":
        for name in ("initial_loss_scale", "loss_scale_window", "min_loss_scale"):
            reasons[f"precision.{name}"] = f"only float16 scales the loss; dtype is {dtype}"
    if devices[0].kind == "cpu" and not values["compile"] and not _has_compiler():
        reasons["compile"] = "needs a C++ compiler on CPUs, and this machine has none"
    if not _has_tensorboard():
        reasons["telemetry.tensorboard"] = "tensorboard is not installed here; no event files are written"
    return reasons


def greyed_options(values: Mapping[str, Any], devices: Sequence[Device]) -> dict[str, dict[Any, str]]:
    """Path of a field -> its options that are not offered, each with the reason. What is chosen is not greyed."""
    if any(device.kind == "cuda" for device in devices) or values["precision.dtype"] == "float16":
        return {}
    return {"precision.dtype": {"float16": _FLOAT16_ON_CPU}}


def remarks(values: Mapping[str, Any], devices: Sequence[Device]) -> dict[str, str]:
    """Path of a field -> what this machine makes of its value, beside the description."""
    dtype = values["precision.dtype"]
    told = f"here: {compute_dtype('auto', devices)}"
    if dtype == "bfloat16" and compute_dtype("auto", devices) != "bfloat16":
        told = "these devices do not multiply bfloat16 faster than float32"
    if greyed_options(values, devices):
        told += f". Greyed: {_FLOAT16_ON_CPU}"
    return {"precision.dtype": told}


@cache
def _has_compiler() -> bool:
    return any(shutil.which(name) for name in (os.environ.get("CXX") or "c++", "g++", "clang++"))


@cache
def _has_tensorboard() -> bool:
    return find_spec("tensorboard") is not None
