"""Presets of the panel: named configurations, each with its predicted memory and speed on these devices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from speedlab.config import MODEL_PRESETS, ConfigError, RunConfig
from speedlab.display.formatting import bytes_text, count_text
from speedlab.hardware import Device
from speedlab.layout import LayoutError
from speedlab.planner.hardware.links import Link
from speedlab.planner.setup import Setup
from speedlab_notebook.panel.prediction import PanelPrediction, fit_problem, predict

_Changes = dict[str, Any]
"""Sections of a RunConfig, plus `micro_size` (the largest) and `micro_batches` (the least number of them)."""

_ARRANGED = ("parallel", "outer", "zero", "offload", "activation", "batch")
"""Sections that a preset replaces completely. Model, data, optimizer and the rest keep their values."""


_LEAST: _Changes = {"zero": 3, "activation": {"checkpointing": "block"}, "micro_size": 1}


@dataclass(frozen=True, kw_only=True)
class PanelPreset:
    """A named configuration."""

    name: str
    about: str
    config: RunConfig | None
    result: str
    """Predicted memory and speed on these devices; if `config` is None, why the preset is impossible."""


def presets(now: RunConfig, devices: Sequence[Device], link: Link | None = None) -> list[PanelPreset]:
    """Return the presets, from plain to special, for the present model and global batch.

    Args:
        now: The present configuration.
        devices: One device for each rank.
        link: The simulated link between the devices; None takes this machine's.
    """
    found = [_tried(name, about, now, changes, devices, link) for name, about, changes in _named(now, devices)]
    return [*found, _fastest(now, devices, link), _largest(now, devices, link)]


def _tried(
    name: str, about: str, now: RunConfig, changes: _Changes, devices: Sequence[Device], link: Link | None
) -> PanelPreset:
    try:
        config = _arranged(now, changes, len(devices))
        prediction = predict(config, devices, link)
    except (ConfigError, LayoutError) as error:
        return PanelPreset(name=name, about=about, config=None, result=f"not here: {str(error).splitlines()[0]}")
    if problem := fit_problem(prediction, devices):
        return PanelPreset(name=name, about=about, config=None, result=f"does not fit: {problem}")
    return PanelPreset(name=name, about=about, config=config, result=_result(prediction))


def _arranged(now: RunConfig, changes: _Changes, engines: int) -> RunConfig:
    """Return `now` with these sections and the same global batch. Raise ConfigError or LayoutError if impossible."""
    changes = dict(changes)
    most, micro_batches = changes.pop("micro_size", None), changes.pop("micro_batches", 1)
    kept = {name: value for name, value in now.model_dump().items() if name not in (*_ARRANGED, *changes)}
    shares = RunConfig(**kept, **changes).layout(engines).data_size
    was = now.batch.resolve(now.layout(engines).data_size)
    each = max(1, was.global_size // shares)
    micro_size = math.gcd(each, most or was.micro_size)
    while each // micro_size < micro_batches and micro_size % 2 == 0:
        micro_size //= 2
    config = RunConfig(**kept, **changes, batch={"global_size": was.global_size, "micro_size": micro_size})
    config.batch.resolve(shares)
    return config


def _named(now: RunConfig, devices: Sequence[Device]) -> Iterator[tuple[str, str, _Changes]]:
    engines, place = len(devices), "disk" if devices[0].kind == "cpu" else "host"
    yield "Plain copies", "stage 0: every rank has everything, gradients are averaged", {"zero": 0}
    yield "ZeRO-2", "gradients and optimizer states are shared out over the ranks", {"zero": 2}
    yield "Least memory", "ZeRO-3, blocks computed again in backward, micro-batches of one", _LEAST
    away = {"optimizer": place, "parameters": place, "folder": now.offload.folder}
    yield f"States on {place}", f"the same, with waiting states on {place}", {**_LEAST, "offload": away}
    if engines % 2 == 0:
        yield "Tensor parallel", "each layer is cut over two ranks", {"parallel": {"tp": 2}, "zero": 1}
        yield "Pipeline", "two pipeline stages", {"parallel": {"pp": 2}, "zero": 1, "micro_batches": 8}
        yield "Slow network", "two islands that average from time to time", {"parallel": {"islands": 2}}
    if engines % 4 == 0:
        three = {"parallel": {"pp": 2, "tp": 2}, "zero": 1, "micro_batches": 8}
        yield "Three dimensions", "tp 2 and pp 2, and dp with what is left", three


def _fastest(now: RunConfig, devices: Sequence[Device], link: Link | None) -> PanelPreset:
    name, about = "Fastest", "the best layout, stage, micro-batch and recomputation that the planner finds"
    try:
        found = predict(now, devices, link).plan.search().candidates
        config = RunConfig(**{**now.model_dump(), **_as_fields(found[0].setup, now)}) if found else None
    except (ConfigError, LayoutError, ValueError) as error:
        return PanelPreset(name=name, about=about, config=None, result=f"not here: {str(error).splitlines()[0]}")
    if config is None:
        return PanelPreset(
            name=name, about=about, config=None, result="does not fit: no layout does; a smaller model may"
        )
    result = _figures(found[0].held_bytes, found[0].time.tokens_per_second)
    return PanelPreset(name=name, about=about, config=config, result=result)


def _largest(now: RunConfig, devices: Sequence[Device], link: Link | None) -> PanelPreset:
    """Return the largest built-in model that fits on these devices with the least-memory settings."""
    name, about = "Largest model", "the largest built-in model that fits, arranged for least memory"
    for model in reversed(MODEL_PRESETS):
        tried = _tried(name, about, now, {**_LEAST, "model": {"preset": model}}, devices, link)
        if tried.config is not None:
            return replace(tried, result=f"{model}, {tried.result}")
    return PanelPreset(name=name, about=about, config=None, result="not here: none of the built-in models fits")


def _as_fields(setup: Setup, now: RunConfig) -> dict[str, Any]:
    """Return the layout that a search found as sections of a configuration; outer and offload keep their values."""
    layout = setup.layout
    parallel = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "islands": layout.islands}
    parallel |= {"sequence": setup.sequence_parallel, "schedule": setup.schedule, "chunks": setup.chunks}
    activation = {"checkpointing": setup.checkpointing, "partition_inputs": setup.partition_inputs}
    batch = {"micro_size": setup.micro_size, "accumulation": setup.accumulation}
    zero = {**now.zero.model_dump(), "stage": setup.zero_stage}
    others = {"outer": now.outer.model_dump(), "offload": now.offload.model_dump()}
    return {"parallel": parallel, "activation": activation, "batch": batch, "zero": zero, **others}


def _result(prediction: PanelPrediction) -> str:
    held = prediction.heaviest[prediction.stage].total
    return _figures(held, prediction.plan.time.tokens_per_second)


def _figures(held_bytes: int, tokens_per_second: float) -> str:
    return f"{bytes_text(held_bytes)} a rank, about {count_text(tokens_per_second)} tokens/s"
