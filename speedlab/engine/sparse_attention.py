"""Block-sparse attention (`model.attention: block_sparse`) in a user's model: set before sharding, undone at the end.

1. Modules of this package are built with their attention, which must equal the configuration's.
2. Transformers models get it through the attention interface, with a copy of their configuration, because other models
   may share the original. Features that block-sparse attention cannot compute are refused.
3. On any other module the setting would have no effect, so it is refused.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from speedlab.config import AttentionConfig, ConfigError
from speedlab.config.attention import HEADS_THAT_FIT, direction_problem, head_fits
from speedlab.engine.model_construction import ModelSource
from speedlab.models.gpt import SparseAttend
from speedlab.models.hf_attention import beyond_window, covers, registered
from speedlab.parallel.tensor import attention_dropout

_DENSE = "set model.attention.kind to 'dense'"
_HEAD_SIZES = ("qk_head_dim", "head_dim", "attention_head_size", "head_size")
"""Attributes of transformers' attention modules for the elements of a head."""

_KNOWN_LAYERS = {"full_attention", "sliding_attention", "attention"}
"""Names in configurations for layers with softmax attention over keys."""


class BlockSparse:
    """The configured attention in a user's models; with kind 'dense' they keep their own."""

    def __init__(self, attention: AttentionConfig) -> None:
        self.attention = attention
        self._before: list[tuple[nn.Module, Any]] = []
        """Modules, and their original transformers configurations."""

    def within(self, source: ModelSource) -> ModelSource:
        """Set this attention, in place for a module.

        Args:
            source: A module, or a callable that makes one.

        Returns:
            The module, or a callable that also sets the attention.

        Raises:
            ConfigError: If the model does not support it; then nothing has changed.
        """
        if self.attention.kind == "dense":
            return source
        return self._set(source) if isinstance(source, nn.Module) else lambda: self._set(source())

    def _set(self, model: nn.Module) -> nn.Module:
        check_attention(model, self.attention)
        twins: dict[int, Any] = {}
        for module in (module for whole in _of_transformers(model) for module in whole.modules()):
            before = module.__dict__.get("config")
            if before is None or not hasattr(before, "_attn_implementation"):
                continue
            if id(before) not in twins:
                twin = copy.deepcopy(before)
                twin._attn_implementation = registered(self.attention)
                twins.update(_pairs(before, twin))
            self._before.append((module, before))
            module.config = twins[id(before)]
        return model

    def undo(self) -> None:
        """Restore the models' own attention."""
        while self._before:
            module, before = self._before.pop()
            module.config = before


def _pairs(config: Any, twin: Any) -> Iterator[tuple[int, Any]]:
    """Yield (id of a configuration, its copy) for `config` and its sub-configurations."""
    yield id(config), twin
    for key in getattr(config, "sub_configs", ()):
        if getattr(config, key, None) is not None:
            yield from _pairs(getattr(config, key), getattr(twin, key))


def check_attention(model: nn.Module, attention: AttentionConfig) -> None:
    """Check that a model supports the configured attention. Changes nothing.

    Args:
        model: The model.
        attention: The configured attention.

    Raises:
        ConfigError: If the model cannot use it, or would ignore it.
    """
    if attention.kind == "dense":
        return
    own = [module.attention for module in model.modules() if isinstance(module, SparseAttend)]
    if own and (problem := direction_problem(attention, type(model).__name__)) is not None:
        raise ConfigError(problem)
    if any(each != attention for each in own):
        raise ConfigError(
            f"model: the {type(model).__name__} given was built with another attention ({own[0]}) than model.attention "
            f"({attention}); build it from config.model"
        )
    theirs = list(_of_transformers(model))
    if not own and not theirs:
        raise ConfigError(
            f"model.attention.kind: 'block_sparse' has no effect on a {type(model).__name__}, which computes its "
            f"attention itself; {_DENSE}, or give a GPT(config.model) or a model of transformers"
        )
    problems = [("model", text) for whole in theirs for text in dict.fromkeys(_problems(whole, attention))]
    if problems:
        raise ConfigError(problems=problems)


def _of_transformers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost transformers models in `module`, or the module itself."""
    if "transformers.modeling_utils" not in sys.modules:
        return  # No transformers model can exist.
    from transformers import PreTrainedModel

    if isinstance(module, PreTrainedModel):
        yield module
        return
    for child in module.children():
        yield from _of_transformers(child)


def _problems(model: Any, attention: AttentionConfig) -> Iterator[str]:
    """Yield what prevents block-sparse attention in a transformers model, each with a remedy."""
    import transformers
    from transformers.masking_utils import sdpa_mask

    if "q_length" not in inspect.signature(sdpa_mask).parameters:
        yield f"transformers {transformers.__version__} makes masks in another way; upgrade it to 5.23, or {_DENSE}"
        return
    name = type(model).__name__
    parts = [module for module in model.modules() if isinstance(module, transformers.PreTrainedModel)]
    attentions = {key: module for key, module in model.named_modules() if isinstance(_causality(module), bool)}
    if not attentions or not all(part._can_set_attn_implementation() for part in parts):
        yield (
            f"{name} computes its attention without transformers' attention interface, so that nothing can stand in "
            f"its place; {_DENSE}, or take a model whose attention is exchangeable, as those of Llama, Qwen, Mistral, "
            "GPT-2 and BERT are"
        )
        return
    config = model.config
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        yield f"{name} attends from one sequence to another, which 'block_sparse' does not; {_DENSE}"
        return
    for key, module in attentions.items():
        yield from _problems_of_one(key, module, attention)
    if getattr(config, "output_attentions", False):
        yield f"{name} is to return attention probabilities, which are never made; set output_attentions to False"


def _causality(module: nn.Module) -> Any:
    """Return `is_causal` of modules that call the attention interface; None for others."""
    return module.__dict__.get("is_causal")


def _problems_of_one(key: str, module: Any, attention: AttentionConfig) -> Iterator[str]:
    config = getattr(module, "config", None)
    if module.is_causal and (problem := direction_problem(attention, key)) is not None:
        yield problem
    kinds = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS
    if kinds:
        yield f"layers of kind {', '.join(sorted(kinds))} do not attend as 'block_sparse' would; {_DENSE}"
    window = module.sliding_window if hasattr(module, "sliding_window") else getattr(config, "sliding_window", None)
    if window is not None and not covers(attention, window):
        yield beyond_window(attention, window)
    if not module.is_causal and attention.pattern == "sliding":
        blocks = -(-attention.window // attention.block) * attention.block
        yield (
            "pattern 'sliding' counts tokens before a query, and this is an encoder, whose queries see both ways; "
            f"pattern 'longformer' with global_blocks 0 and window {blocks} shows whole blocks on both sides"
        )
    dropped = attention_dropout(key, module)
    if dropped is not None:
        p, where = dropped
        yield f"'block_sparse' drops no attention probabilities, and {p} are to be dropped; set {where} to 0"
    softcap = getattr(module, "attn_logit_softcapping", None)
    if softcap is not None:
        yield f"scores are capped at {softcap}, which 'block_sparse' does not; set attn_logit_softcapping to None"
    if getattr(module, "sinks", None) is not None:
        yield f"{key} has sinks in addition to its keys, which 'block_sparse' has not; {_DENSE}"
    size = next((value for each in _HEAD_SIZES if isinstance(value := getattr(module, each, None), int)), None)
    if size is not None and getattr(module, "v_head_dim", size) != size:
        sizes = f"keys of {size} elements and values of {module.v_head_dim}"
        yield f"{key} has {sizes}, and 'block_sparse' takes one size for both; {_DENSE}"
    elif size is not None and not head_fits(size):
        yield f"'block_sparse' takes {HEADS_THAT_FIT}, and those of {key} have {size}; {_DENSE}, or choose other heads"
