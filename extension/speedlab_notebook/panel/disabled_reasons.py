"""The reasons why controls and options of the panel are disabled, and remarks on what a value means on this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

from speedlab.config import AttentionConfig, OuterConfig, RunConfig
from speedlab.config.layout_rules import heads_shared, padded_length, padding_words, why_not
from speedlab.config.validation import partition_words
from speedlab.hardware import Device
from speedlab.layout import Layout
from speedlab.planner import bubble_share
from speedlab.planner.plan import Plan
from speedlab_notebook.panel.prediction import compute_dtype, disk_text

_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
_NO_ISLANDS = {f"outer.{name}": "how islands meet, and parallel.islands is 1" for name in OuterConfig.model_fields}
_PATTERN = [f"model.attention.{name}" for name in AttentionConfig.model_fields if name != "kind"]
_ONEBIT = ("onebit_adam", "onebit_lamb")
_SIGNS = (*_ONEBIT, "zero_one_adam")
_FLOAT16_ON_CPU = "CPUs do not multiply float16 fast; bfloat16 is as small and needs no loss scale"


def greyed_fields(values: Mapping[str, Any], devices: Sequence[Device]) -> dict[str, str]:
    """Return the fields that are disabled.

    Args:
        values: The values of all fields by path.
        devices: One device for each rank.

    Returns:
        Path of a field -> why it is disabled.
    """
    optimizer, dtype = values["optimizer.name"], values["precision.dtype"]
    reasons = _greyed_parallel(values, len(devices)) | _greyed_offload(values) | _greyed_inputs(values)
    reasons |= _greyed_switches(values)
    onebit, layerwise = _ONEBIT, ("lamb", "onebit_lamb")
    adamw = ("adamw", "lamb", *_SIGNS)
    owners = {"betas": (*adamw, "lion"), "eps": adamw, "bias_correction": adamw, "momentum": ("sgd",)}
    owners |= dict.fromkeys(("freeze_step", "compression", "variance_floor", "angle_every_steps"), _SIGNS)
    owners |= {"steady": onebit}
    owners |= dict.fromkeys(("variance_doubling", "local_doubling", "max_local_steps"), ("zero_one_adam",))
    owners |= dict.fromkeys(("max_coeff", "min_coeff"), layerwise)
    owners |= dict.fromkeys(("coeff_beta", "factor_max", "factor_min", "factor_threshold"), ("onebit_lamb",))
    for name, owned_by in owners.items():
        if optimizer not in owned_by:
            uses = "uses" if len(owned_by) == 1 else "use"
            owners_text = " and ".join(filter(None, [", ".join(owned_by[:-1]), owned_by[-1]]))
            reasons[f"optimizer.{name}"] = f"only {owners_text} {uses} it; the optimizer is {optimizer}"
    if optimizer in onebit and values["optimizer.freeze_step"] is not None:
        reasons["optimizer.steady"] = "freeze step says when the variance is frozen"
    if optimizer == "zero_one_adam" and values["optimizer.freeze_step"] is None:
        for name in ("local_doubling", "max_local_steps"):
            reasons[f"optimizer.{name}"] = "ranks make local steps after freeze step, and there is none"
    if values["schedule.kind"] == "constant":
        reasons["schedule.floor"] = "a constant rate does not fall; cosine and linear do"
    if values["model.attention.kind"] == "dense":
        reasons |= dict.fromkeys(_PATTERN, "dense attention sees all before it; block_sparse leaves blocks out")
    if not values["model.attention.both_ways"]:
        reasons["model.attention.both_ways"] = "for encoders given from Python; the built-in GPT is causal"
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


def _greyed_parallel(values: Mapping[str, Any], engines: int) -> dict[str, str]:
    names = ("islands", "tp", "pp", "cp", "schedule")
    islands, tp, pp, cp, schedule = (values[f"parallel.{name}"] for name in names)
    reasons = _greyed_outer(values) if islands > 1 else dict(_NO_ISLANDS)
    if values["parallel.dp"] is None:
        dp = engines // (islands * tp * pp * cp)
        whole = f"dp {dp} = " if islands * dp * tp * pp * cp == engines else ""
        others = str(Layout(islands=islands, pp=pp, cp=cp, tp=tp)).replace(" × dp 1", "")
        reasons["parallel.dp"] = f"follows from the engines: {whole}{engines} engines / ({others})"
    if tp == 1 and not values["parallel.sequence"]:
        reasons["parallel.sequence"] = "the tp ranks share out the tokens, and tp is 1"
    if cp == 1 and values["parallel.cp_heads"] is None:
        reasons["parallel.cp_heads"] = "how the cp ranks divide the work of attention, and cp is 1"
    if cp == 1 and not values["parallel.cp_pad"]:
        reasons["parallel.cp_pad"] = "what cp does not divide is padded, and cp is 1"
    if pp == 1:
        needs = "only a pipeline has it, and pp is 1"
        reasons |= {f"parallel.{name}": needs for name in ("schedule", "chunks", "balance")}
        if values["parallel.cut"] is None:
            reasons["parallel.cut"] = needs
    elif schedule not in ("interleaved", "zero-bubble"):
        reasons["parallel.chunks"] = f"under {schedule} a pipeline rank has one stage; interleaved has several"
    if pp > 1 and values["parallel.cut"] is not None:
        reasons["parallel.balance"] = "the cut says how many blocks each pipeline stage has"
    return reasons


def _greyed_outer(values: Mapping[str, Any]) -> dict[str, str]:
    reasons = {}
    if not values["outer.momentum"]:
        reasons["outer.nesterov"] = "without outer momentum there is nothing to look ahead with"
    if values["outer.compression"] != "topk":
        reasons["outer.topk_share"] = f"only topk uses it; the outer gradient is {values['outer.compression']}"
    if not values["outer.delay_steps"]:
        reasons["outer.mixing"] = "what comes at once takes the place of an island's own parameters"
    return reasons


def _greyed_offload(values: Mapping[str, Any]) -> dict[str, str]:
    """Return why offload fields are disabled.

    A field other than 'none' stays enabled, because the user must change it.
    """
    optimizer, parameters = values["offload.optimizer"], values["offload.parameters"]
    reasons = {}
    if parameters == "none" and values["zero.stage"] != 3:
        reasons["offload.parameters"] = f"parameters lie away at stage 3 only; the stage is {values['zero.stage']}"
    elif parameters == "none" and optimizer == "none":
        reasons["offload.parameters"] = "an update reads and writes both in one place; offload the optimizer first"
    if values["offload.activations"] == "none" and values["activation.checkpointing"] != "block":
        reasons["offload.activations"] = "what waits on the host are inputs of blocks; checkpointing 'block' has them"
    if values["offload.delayed_update"] is None and (why := _no_delay(values)):
        reasons["offload.delayed_update"] = why
    if "disk" not in (optimizer, parameters):
        reasons["offload.folder"] = "nothing is on disk"
    return reasons


def _greyed_inputs(values: Mapping[str, Any]) -> dict[str, str]:
    path = "activation.partition_inputs"
    if values[path]:  # The user must be able to switch it off; a remark says if it has no effect.
        return {}
    tp = values["parallel.tp"]
    if values["activation.checkpointing"] == "none":
        return {path: "what is cut are inputs of blocks that are computed again; checkpointing has them"}
    if tp == 1 or values["parallel.sequence"]:
        return {path: partition_words(tp=tp, sequence=values["parallel.sequence"])}
    return {}


_SWITCHES = ("zero.quantized_weights", "zero.quantized_gradients", "zero.secondary_partition")


def _greyed_switches(values: Mapping[str, Any]) -> dict[str, str]:
    """Return why switches of ZeRO++ are disabled.

    A switch that is on stays enabled, because the user must change it.
    """
    stage, optimizer = values["zero.stage"], values["optimizer.name"]
    weights, gradients, secondary = _SWITCHES
    reasons = {}
    if stage == 0:
        reasons[weights] = "parameters never travel at stage 0"
        reasons[gradients] = "no rank owns the sum of a part at stage 0"
    elif optimizer in _SIGNS:
        reasons[weights] = reasons[gradients] = f"{optimizer} exchanges signs itself"
    elif stage < 3 and values["offload.optimizer"] != "none":
        reasons[weights] = f"at stage {stage} parameters are made of masters on the device, and these lie away; stage 3"
    elif stage < 3 and values["precision.masters"] == "none":
        reasons[weights] = f"at stage {stage} every rank has rounded parameters, and there are no masters; stage 3"
    if stage != 3:
        reasons[secondary] = f"every rank holds all parameters at stage {stage}; stage 3 partitions them"
    elif values["offload.parameters"] != "none":
        reasons[secondary] = "a second partition is on the device, and parameters lie away"
    return {path: why for path, why in reasons.items() if not values[path]}


def _no_delay(values: Mapping[str, Any]) -> str:
    """Return why updates cannot be delayed by a step; '' if they can."""
    if values["offload.optimizer"] == "none":
        return "an update on the device has nothing to overlap with; offload the optimizer first"
    if values["optimizer.in_backward"]:
        return "an update in backward leaves no gradients that could wait"
    if values["precision.masters"] == "none":
        return "without masters an update would change the parameters that the next forward reads"
    return ""


def _offload_remarks(values: Mapping[str, Any], devices: Sequence[Device], plan: Plan | None) -> dict[str, str]:
    """Return remarks on the offload fields.

    On CPUs, host and device are the same memory. For a disk, the remark gives its speed and whether that limits.
    """
    found = {}
    one_memory = devices[0].kind == "cpu"
    for name in ("optimizer", "parameters", "activations"):
        if values[f"offload.{name}"] == "host" and one_memory:
            found[f"offload.{name}"] = "here host and device are the same memory: it makes no room"
    if values["offload.delayed_update"] is not None:
        found["offload.delayed_update"] = "parameters of a step are one update older" + (
            "; here update and step share the cores, so that only a disk's time is hidden" if one_memory else ""
        )
    if "disk" in (values["offload.optimizer"], values["offload.parameters"]) and plan is not None:
        found["offload.optimizer"] = disk_text(plan)
    return found


def sizes(engines: int) -> list[int]:
    """Return the sizes of a mesh axis that divide the number of engines.

    Args:
        engines: The number of engines.
    """
    return [size for size in range(1, engines + 1) if engines % size == 0]


def greyed_options(
    values: Mapping[str, Any], config: RunConfig | None, devices: Sequence[Device]
) -> dict[str, dict[Any, str]]:
    """Return the options that are disabled. A chosen option is never disabled.

    Args:
        values: The values of all fields by path.
        config: The configuration of `values`; None if they give none, and then no layout option is disabled.
        devices: One device for each rank.

    Returns:
        Path of a field -> its disabled options, each with the reason.
    """
    greyed: dict[str, dict[Any, str]] = {}
    if not any(device.kind == "cuda" for device in devices) and values["precision.dtype"] != "float16":
        greyed["precision.dtype"] = {"float16": _FLOAT16_ON_CPU}
    if values["optimizer.name"] in _ONEBIT:
        whole = f"{values['optimizer.name']} needs whole gradients on every rank, which stages 0 and 1 have"
        greyed["zero.stage"] = {stage: whole for stage in (2, 3) if stage != values["zero.stage"]}
    elif values["zero.stage"] > 1:
        whole = f"needs whole gradients on every rank, and stage {values['zero.stage']} partitions them; stage 0 or 1"
        greyed["optimizer.name"] = dict.fromkeys(_ONEBIT, whole)
    if config is not None:
        axes = {name: sizes(len(devices)) for name in ("islands", "tp", "pp", "cp")}
        offered = {**axes, "schedule": _SCHEDULES}
        for name, options in offered.items():
            against = {option: _against(config, len(devices), name, option) for option in options}
            chosen = values[f"parallel.{name}"]
            greyed[f"parallel.{name}"] = {option: why for option, why in against.items() if why and option != chosen}
    return greyed


def _against(config: RunConfig, engines: int, name: str, option: Any) -> str:
    """Return why this option is impossible with all other values; '' if it is possible."""
    # A change of pp or of the schedule changes the stages: do not keep the present cut.
    cut = {} if name in ("islands", "tp", "cp") else {"cut": None}
    return why_not(config, engines, **cut, **{name: option}) or ""


def remarks(
    values: Mapping[str, Any],
    devices: Sequence[Device],
    config: RunConfig | None,
    greyed: Mapping[str, Mapping[Any, str]],
    plan: Plan | None = None,
) -> dict[str, str]:
    """Return remarks on the values, shown after the fields' descriptions.

    Args:
        values: The values of all fields by path.
        devices: One device for each rank.
        config: The configuration of `values`; None if they give none.
        greyed: The result of `greyed_options`.
        plan: The plan of `values`; None leaves out remarks that need one.

    Returns:
        Path of a field -> the remark.
    """
    found = {**_parallel_remarks(config, len(devices), greyed), **_dtype_remark(values, devices, greyed)}
    found |= _offload_remarks(values, devices, plan)
    if values["activation.partition_inputs"]:
        sequence = values["parallel.sequence"]
        found["activation.partition_inputs"] = partition_words(tp=values["parallel.tp"], sequence=sequence)
    if plan is not None and plan.advice:
        reported_at = next((path for path in _SWITCHES if values[path]), "optimizer.name")
        found["outer.every_steps" if values["parallel.islands"] > 1 else reported_at] = plan.advice
    return {path: text for path, text in found.items() if text}


def _parallel_remarks(
    config: RunConfig | None, engines: int, greyed: Mapping[str, Mapping[Any, str]]
) -> dict[str, str]:
    found = {}
    for name in ("islands", "tp", "pp", "cp", "schedule"):
        found[f"parallel.{name}"] = _greyed_text(greyed.get(f"parallel.{name}", {}))
    layout = None if config is None else _layout(config, engines)
    if config is not None and layout is not None and layout.cp > 1:
        found["parallel.cp"] = " · ".join(filter(None, (ways_text(config, layout), found["parallel.cp"])))
    if config is not None and layout is not None and layout.cp > 1:
        length = config.data.sequence_length
        padded = padded_length(config.model, layout, config.parallel, length)
        found["parallel.cp_pad"] = padding_words(length, padded)
    if config is not None and layout is not None and layout.pp > 1:
        micro_batches = config.batch.resolve(layout.data_size).accumulation
        found["batch.accumulation"] = f"the pipeline's micro-batches: {micro_batches}"
        if micro_batches < layout.pp:
            found["batch.accumulation"] += f", fewer than its {layout.pp} ranks, so that some always wait"
        found["parallel.schedule"] = " · ".join(filter(None, (bubble_text(config, layout), found["parallel.schedule"])))
    return found


def _greyed_text(reasons: Mapping[Any, str]) -> str:
    """Return each reason once with its options: 'greyed: interleaved, zero-bubble: pp 4 × 2 stages a rank …'."""
    options: dict[str, list[str]] = {}
    for option, reason in reasons.items():
        options.setdefault(_short(reason), []).append(str(option))
    # The reason of a size names the size already.
    reported = [f"{', '.join(names)}: {why}" if not names[0].isdecimal() else why for why, names in options.items()]
    return f"greyed: {'; '.join(reported)}" if reported else ""


def ways_text(config: RunConfig, layout: Layout) -> str:
    """Return how the cp ranks divide attention.

    Args:
        config: A valid configuration.
        layout: Its layout.

    Returns:
        For example '2 share heads in a ring of 2'.
    """
    shared = heads_shared(config.model, layout, config.parallel.cp_heads)
    ring = layout.cp // shared
    parts = [f"{shared} share heads" if shared > 1 else "", f"a ring of {ring}" if ring > 1 else ""]
    return " in ".join(filter(None, parts))


def bubble_text(config: RunConfig, layout: Layout) -> str:
    """Return the theoretical bubble share of the pipeline.

    Args:
        config: A valid configuration.
        layout: Its layout.

    Returns:
        For example 'bubble 20 % by theory, with 4 micro-batches'; '' without a pipeline.
    """
    if layout.pp == 1:
        return ""
    parallel, micro_batches = config.parallel, config.batch.resolve(layout.data_size).accumulation
    share = bubble_share(parallel.schedule, pp=layout.pp, chunks=parallel.stages_per_rank, micro_batches=micro_batches)
    return f"bubble {100 * share:.0f} % by theory, with {micro_batches} micro-batch{'' if micro_batches == 1 else 'es'}"


def _layout(config: RunConfig, engines: int) -> Layout | None:
    return None if why_not(config, engines, dp=config.parallel.dp) else config.layout(engines)


def _short(reason: str) -> str:
    """Return the reason without the layouts that would work, because the options themselves show those."""
    return reason.partition("; on ")[0].partition("; use a multiple")[0]


def _dtype_remark(
    values: Mapping[str, Any], devices: Sequence[Device], greyed: Mapping[str, Mapping[Any, str]]
) -> dict[str, str]:
    dtype = values["precision.dtype"]
    reported = f"here: {compute_dtype('auto', devices)}"
    if dtype == "bfloat16" and compute_dtype("auto", devices) != "bfloat16":
        reported = "these devices do not multiply bfloat16 faster than float32"
    if greyed.get("precision.dtype"):
        reported += f". Greyed: {_FLOAT16_ON_CPU}"
    return {"precision.dtype": reported}


@cache
def _has_compiler() -> bool:
    return any(shutil.which(name) for name in (os.environ.get("CXX") or "c++", "g++", "clang++"))


@cache
def _has_tensorboard() -> bool:
    return find_spec("tensorboard") is not None
