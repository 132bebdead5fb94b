"""How a model's own loss reads its `labels`: which label belongs to which output.

1. Causal models of transformers pass their labels to `ForCausalLMLoss`, which shifts them by one. `ForCausalLMLoss`
   also takes shifted targets as `shift_labels`: one for each token, including the last one.
2. Some models shift labels in their own forward pass. They name the results `shift_logits` or `shift_labels`.
3. Masked language models, decoders of an encoder's output, and classifiers compare label t with output t.
4. A loss that is not a mean over labels (CTC, detection) does not use single labels.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from enum import Enum
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn


class Labels(Enum):
    """How a model reads `labels`."""

    SHIFTED = "shifted"
    """Label t + 1 belongs to output t. `shift_labels` gives shifted targets instead."""
    SHIFTED_ONLY = "shifted only"
    """Label t + 1 belongs to output t. There is no other way to pass targets."""
    ALIGNED = "aligned"
    """Label t belongs to output t."""
    UNKNOWN = "unknown"
    """The loss is not a mean over the labels, or there are no labels."""


_found: WeakKeyDictionary[nn.Module, Labels] = WeakKeyDictionary()


def label_rule(model: nn.Module) -> Labels:
    """Return how `model` reads its labels, after one inspection per model.

    A module outside transformers that takes `labels` counts as `SHIFTED_ONLY`, unless it takes `shift_labels`.

    Args:
        model: A model of the user.
    """
    if model not in _found:
        _found[model] = _look(model)
    return _found[model]


def is_known(model: nn.Module) -> bool:
    """Return whether the model computes its loss with transformers' own function, so that `label_rule` cannot be wrong.

    Args:
        model: A model of the user.
    """
    owner = owner_of(model)
    return is_transformers(owner) and any("loss_function" in code.co_names for code in _forwards(owner))


def owner_of(model: nn.Module) -> nn.Module:
    """Return the module that computes the loss: a model of transformers inside `model`, or `model` itself.

    Args:
        model: A model of the user.
    """
    inside = (module for module in model.modules() if is_transformers(module))
    return next((module for module in inside if "labels" in _parameters(module)), model)


def _look(model: nn.Module) -> Labels:
    owner = owner_of(model)
    if not is_transformers(owner):
        return Labels.SHIFTED if "shift_labels" in _parameters(owner) else Labels.SHIFTED_ONLY
    whole: Any = owner
    # 4: not a mean over labels.
    if getattr(whole, "loss_type", None) == "ForCTC":
        return Labels.UNKNOWN
    names = [(code.co_names, code.co_varnames) for code in _forwards(owner)]
    if any("loss_function" in used for used, _ in names):
        # 1: transformers' own loss function.
        taken = inspect.signature(whole.loss_function).parameters
        return Labels.SHIFTED if "shift_labels" in taken else Labels.ALIGNED
    # 2 and 3: local variables with these names show that the forward pass shifts labels itself.
    moved = {"shift_logits", "shift_labels"}
    return Labels.SHIFTED_ONLY if any(moved & set(local) for _, local in names) else Labels.ALIGNED


def is_transformers(module: nn.Module) -> bool:
    """Return whether `module` is a model of transformers. This does not import transformers.

    Args:
        module: Any module.
    """
    known = sys.modules.get("transformers.modeling_utils")
    return known is not None and isinstance(module, known.PreTrainedModel)


def _parameters(module: nn.Module) -> frozenset[str]:
    return frozenset(inspect.signature(module.forward).parameters)


def _forwards(module: nn.Module) -> Iterator[CodeType]:
    """Yield the code of the forward method, and of those that it calls through super()."""
    for kind in type(module).__mro__:
        forward = vars(kind).get("forward")
        if forward is None:
            continue
        code = getattr(inspect.unwrap(forward), "__code__", None)
        if code is None:
            return
        yield code
        if "super" not in code.co_names and "__class__" not in code.co_freevars:
            return
