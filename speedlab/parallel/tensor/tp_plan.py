"""Tensor-parallel plans: which layers of a model are cut, and how. A plan maps patterns of module names to styles.

Styles have the names of Hugging Face's plans (`STYLES`). `find_plan` finds the plan of a model, `resolve` applies a
plan to its modules.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from torch import nn


class PlanError(ValueError):
    """A plan is missing or cannot be applied. The message says what would work."""


class LayerSharding(Enum):
    """Which shard of a layer each rank holds."""

    OUTPUT = "output"
    """Some of its outputs (column-parallel); of an embedding, some of its columns."""
    INPUT = "input"
    """The weights of some of its inputs (row-parallel); of an embedding, some of its rows: the vocabulary."""
    NOTHING = "nothing"
    """The full layer, with the same input on all ranks."""
    NOTHING_BUT_VALUES = "nothing but values"
    """The full layer, but its input is only this rank's part. So its gradients are partial."""


@dataclass(frozen=True, kw_only=True)
class Style:
    """One way to cut a layer.

    Attributes:
        cut: The shard that each rank holds.
        whole_outside: Whether the input (of INPUT) or the output (of OUTPUT) is complete on all ranks. If not, the
            neighbouring layer is cut, too.
        packed: Number of matrices in one weight.
    """

    cut: LayerSharding
    whole_outside: bool = False
    packed: int = 1


_COLUMN, _ROW = Style(cut=LayerSharding.OUTPUT), Style(cut=LayerSharding.INPUT)
_COLUMN_GATHERED = Style(cut=LayerSharding.OUTPUT, whole_outside=True)
_ROW_OF_WHOLE = Style(cut=LayerSharding.INPUT, whole_outside=True)
_WHOLE = Style(cut=LayerSharding.NOTHING)

STYLES: dict[str, Style] = {
    "colwise": _COLUMN,
    "local_colwise": _COLUMN,
    "colwise_rep": _COLUMN_GATHERED,
    "colwise_gather_output": _COLUMN_GATHERED,
    "packed_colwise": Style(cut=LayerSharding.OUTPUT, packed=2),
    "packed_colwise_3": Style(cut=LayerSharding.OUTPUT, packed=3),
    "rowwise": _ROW,
    "local_rowwise": _ROW,
    "rowwise_rep": _ROW_OF_WHOLE,
    "rowwise_split_input": _ROW_OF_WHOLE,
    "embedding_rowwise": _ROW,
    "embedding_colwise": _COLUMN_GATHERED,
    "replicate": _WHOLE,
    "replicated": _WHOLE,
    "replicated_with_grad_allreduce": Style(cut=LayerSharding.NOTHING_BUT_VALUES),
}
"""Names of both generations of Hugging Face plans (transformers 4 and 5). packed_colwise_3 is ours, for fused queries,
keys and values."""


def style_named(name: object, pattern: str) -> Style:
    """Return the style of a name in a plan.

    Args:
        name: Name of the style.
        pattern: The plan's pattern, for the message.

    Raises:
        PlanError: The style is not supported.
    """
    style = STYLES.get(name) if isinstance(name, str) else None
    if style is None:
        reason = (
            "sequence parallelism is built for the GPT of this package only"
            if name == "sequence_parallel"
            else "mixtures of experts and other special layers are not cut"
        )
        raise PlanError(
            f"tp_plan: {pattern!r} asks for {name!r}, which is not built ({reason}); give a plan without it as "
            f"tp_plan=, with these styles: {', '.join(STYLES)}"
        )
    return style


Plan = dict[str, str]

GPT = "speedlab.models.gpt"
"""Module of the built-in GPT's classes. They are compared by name, because models and parallelism do not import each
other."""

_GPT_PLAN: Plan = {
    "embedding": "embedding_rowwise",
    "blocks.*.attention.qkv": "packed_colwise_3",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.mlp.up": "colwise",
    "blocks.*.mlp.down": "rowwise",
    "head": "colwise_gather_output",
}

_T5_PLAN: Plan = {
    "shared": "embedding_rowwise",
    "lm_head": "colwise_gather_output",
    **{
        f"{stack}.{pattern}": style
        for stack in ("encoder", "decoder")
        for pattern, style in {
            "embed_tokens": "embedding_rowwise",
            **{
                f"block.*.layer.*.{attention}.{layer}": style
                for attention in ("SelfAttention", "EncDecAttention")
                for layer, style in (("q", "colwise"), ("k", "colwise"), ("v", "colwise"), ("o", "rowwise"))
            },
            "block.*.layer.*.SelfAttention.relative_attention_bias": "colwise",
            "block.*.layer.*.DenseReluDense.wi": "colwise",
            "block.*.layer.*.DenseReluDense.wi_0": "colwise",
            "block.*.layer.*.DenseReluDense.wi_1": "colwise",
            "block.*.layer.*.DenseReluDense.wo": "rowwise",
        }.items()
    },
}

_BASE_PLANS: dict[str, Plan] = {
    "gpt2": {
        "wte": "embedding_rowwise",
        "h.*.attn.c_attn": "packed_colwise_3",
        "h.*.attn.c_proj": "rowwise",
        "h.*.crossattention.q_attn": "colwise",
        "h.*.crossattention.c_attn": "packed_colwise",
        "h.*.crossattention.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
    "bert": {
        "embeddings.word_embeddings": "embedding_rowwise",
        **{f"encoder.layer.*.attention.self.{layer}": "colwise" for layer in ("query", "key", "value")},
        **{f"encoder.layer.*.crossattention.self.{layer}": "colwise" for layer in ("query", "key", "value")},
        "encoder.layer.*.attention.output.dense": "rowwise",
        "encoder.layer.*.crossattention.output.dense": "rowwise",
        "encoder.layer.*.intermediate.dense": "colwise",
        "encoder.layer.*.output.dense": "rowwise",
    },
    "t5": _T5_PLAN,
}
"""Plans for Hugging Face models that have none, by model type, relative to the model without its heads."""

_HEAD_PLANS: dict[str, Plan] = {
    "gpt2": {"lm_head": "colwise_gather_output"},
    "bert": {"cls.predictions.decoder": "colwise_gather_output"},
}
"""Plans for their heads, relative to the full model."""

_FORGOTTEN: dict[str, Plan] = {"apertus": {"layers.*.mlp.act_fn": "replicated_with_grad_allreduce"}}
"""Entries that plans of Hugging Face models lack, relative to the model without its heads. The activation of Apertus
has parameters, which see only this rank's part of the values."""


def class_name(module: object) -> str:
    """Return the full name of a module's class."""
    return _name(type(module))


def is_gpt(module: object) -> bool:
    """Return whether a module is the built-in GPT, or a pipeline stage of it."""
    return any(_name(kind) == f"{GPT}.GPT" for kind in type(module).__mro__)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def find_plan(model: nn.Module) -> Plan:
    """Return the plan of a model. There are three sources:

    1. The built-in GPT has its own plan.
    2. A Hugging Face model or its configuration may have a plan (transformers 4 or 5).
    3. GPT-2, BERT and T5 have none, so their plans are in this file.

    Args:
        model: The full model or a pipeline stage.

    Raises:
        PlanError: No plan exists for this class.
    """
    modules = list(model.named_modules())
    plan: Plan = {}
    for name, module in modules:
        prefix = f"{name}." if name else ""
        if is_gpt(module):
            found: Mapping[str, str] = _GPT_PLAN
        else:
            found = _carried(module)
        plan |= {prefix + pattern: style for pattern, style in found.items()}
    if not plan:
        plan = _built_in(model, {id(module): name for name, module in modules})
    if not plan:
        raise PlanError(
            f"{type(model).__name__} carries no plan for tensor parallelism and none is built in for it; give one as "
            'tp_plan=, such as {"layers.*.up": "colwise", "layers.*.down": "rowwise"}'
        )
    return within(plan, model)


def check_plan(model: nn.Module, plan: Mapping[str, str]) -> None:
    """Check that a plan can be applied.

    Args:
        model: The model.
        plan: Pattern of module names → name of a style.

    Raises:
        PlanError: A style is not supported, or a pattern matches no module.
    """
    for _ in resolve(model, plan):
        pass


def within(plan: Mapping[str, str], model: nn.Module) -> Plan:
    """Return the entries of a plan that match modules or parameters of a model.

    Args:
        plan: A plan for the full model.
        model: The model; may be one pipeline stage.
    """
    names = [name for name, _ in (*model.named_modules(remove_duplicate=False), *model.named_parameters())]
    return {pattern: style for pattern, style in plan.items() if any(map(_regex(pattern).fullmatch, names))}


def _carried(module: nn.Module) -> dict[str, str]:
    """Return the plan of a Hugging Face module: `_tp_plan` of the module or its class. A model without heads also has
    `base_model_tp_plan` in its configuration.
    """
    carried = dict(getattr(module, "_tp_plan", None) or {})
    if getattr(module, "base_model", None) is module:
        config = getattr(module, "config", None)
        carried |= dict(getattr(config, "base_model_tp_plan", None) or {})
        carried |= _FORGOTTEN.get(getattr(config, "model_type", None) or "", {})
    return carried


def _built_in(model: nn.Module, names: Mapping[int, str]) -> Plan:
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in _BASE_PLANS:
        return {}
    base = names[id(getattr(model, "base_model", model))]
    prefix = f"{base}." if base else ""
    return {**{prefix + pattern: style for pattern, style in _BASE_PLANS[kind].items()}, **_HEAD_PLANS.get(kind, {})}


def resolve(model: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[str, nn.Module, Style]]:
    """Yield (name, module, style) for every module that the plan matches, in model order. If several patterns match,
    the last one wins.

    Args:
        model: The model.
        plan: Pattern of module names → name of a style.

    Raises:
        PlanError: A style is not supported, or a pattern matches no module.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    chosen: dict[str, Style] = {}
    for pattern, style_name in plan.items():
        style = style_named(style_name, pattern)
        matched = list(filter(_regex(pattern).fullmatch, modules))
        if not matched:
            generic = sorted({re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in modules})
            near = difflib.get_close_matches(pattern, generic, n=1)
            hint = f"; nearest: {near[0]!r}" if near else ""
            if any(_regex(pattern).fullmatch(name) for name, _ in model.named_parameters()):
                raise PlanError(
                    f"tp_plan: {pattern!r} is a parameter, and layers are what is cut (mixtures of experts and other "
                    f"special layers are not); give a plan without it as tp_plan={hint}"
                )
            raise PlanError(f"tp_plan: {pattern!r} names no module of {type(model).__name__}{hint}")
        chosen |= dict.fromkeys(matched, style)
    seen: set[int] = set()
    for name, module in modules.items():
        if name in chosen and id(module) not in seen:
            seen.add(id(module))
            yield name, module, chosen[name]


def _regex(pattern: str) -> re.Pattern[str]:
    """Return a pattern as a regular expression; `*` matches one level of a name, such as the number of a layer."""
    return re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
