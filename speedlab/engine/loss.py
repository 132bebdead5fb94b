"""The loss of a micro-batch: the contract of a model's forward, or a user's loss function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from speedlab.config import ConfigError
from speedlab.config.errors import briefly
from speedlab.layout import Layout
from speedlab.models.hf_attention import keep_separate, packing_problem, without_cache
from speedlab.models.labels import Labels, is_known, label_rule
from speedlab.models.packing import IGNORED, check_documents, check_positions

LossFunction = Callable[[nn.Module, Any], Tensor]
"""`loss(model, batch)`: calls the model and returns the mean loss of a micro-batch, a scalar."""

CONTRACT = """\
What a model's forward takes and gives is one of these:
  forward(tokens, targets)              gives the loss, or an output with .loss; both (B, T) int64
  forward(input_ids=..., labels=...)    gives an output with .loss, as Hugging Face's models do; targets that are given
                                        next to tokens become labels at the right places
  anything else                         give loss=f as well: f(model, batch) calls the model and gives the loss;
                                        in a run, batch is (tokens, targets)
With data.documents 'separate' a batch has positions (B, T) int64 as well, the position of each token in its document:
forward(tokens, targets, positions=...), of Hugging Face's models forward(..., position_ids=...); in a run, batch is
then (tokens, targets, positions)"""

_looked_at: WeakSet[nn.Module] = WeakSet()
"""Models whose loss was compared with that of the given targets."""

_LOSS_CONTRACT = (
    "give a function that is called as loss(model, batch), calls the model, and gives the mean loss; in a run, batch "
    "is (tokens, targets), with data.documents 'separate' (tokens, targets, positions)"
)


def loss_of(model: nn.Module, batch: Any, loss: LossFunction | None) -> Tensor:
    """Return the differentiable loss of one micro-batch, a scalar.

    1. With `loss`: its result for the model and the batch, of any kind.
    2. A dict of tensors: the model's keyword arguments.
    3. Tokens and targets: the model gets both. A model with `input_ids` and `labels`, as in Hugging Face, gets them so
       that target t belongs to output t, even if its own loss shifts labels.
    4. Positions of documents, the third item of a batch: passed as `positions`, to Hugging Face's models as
       `position_ids`.

    Caches of transformers models are off meanwhile, because packed documents would see each other through a cache.

    Args:
        model: The model.
        batch: The micro-batch.
        loss: The user's loss function, or None.

    Raises:
        ConfigError: For any other batch, and for a result that is no loss.
    """
    with without_cache(model):
        return _loss_of(model, batch, loss)


def _loss_of(model: nn.Module, batch: Any, loss: LossFunction | None) -> Tensor:
    if loss is not None:
        return _as_loss(loss(model, batch), f"loss: {_name(loss)}(model, batch)")
    if isinstance(batch, Mapping):
        given = keep_separate(model, dict(batch))
        return _as_loss(model(**given), f"model: {type(model).__name__}.forward")
    if not (isinstance(batch, list | tuple) and len(batch) in (2, 3)):
        raise ConfigError(
            f"batch: it is a {type(batch).__name__}; give (tokens, targets), a dict of the model's keyword arguments, "
            f"or anything together with loss=; positions of documents may follow targets"
        )
    return _as_loss(_call(model, *batch), f"model: {type(model).__name__}.forward")


def _call(model: nn.Module, tokens: Tensor, targets: Tensor, positions: Tensor | None = None) -> Any:
    """Return the model's output for tokens and targets.

    Raises ConfigError if forward takes no targets, or would not separate documents.
    """
    parameters = inspect.signature(model.forward).parameters
    if positions is not None:
        return _call_separate(model, parameters, tokens, targets, positions)
    if "targets" in parameters:
        return model(tokens, targets=targets)
    kinds = [parameter.kind for parameter in parameters.values()]
    positional = sum(
        kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds
    )
    # A wrapper with forward(*args, **kwargs), such as PEFT's, passes labels on.
    takes_anything = inspect.Parameter.VAR_KEYWORD in kinds and not positional
    if {"input_ids", "labels"} <= parameters.keys() or takes_anything:
        return _call_with_labels(model, tokens, targets)
    if positional > 1 or inspect.Parameter.VAR_POSITIONAL in kinds:
        return model(tokens, targets)
    raise ConfigError(
        f"model: {type(model).__name__}.forward({', '.join(parameters)}) takes no targets, so it gives no loss\n"
        f"{CONTRACT}"
    )


def _call_separate(
    model: nn.Module, parameters: Mapping[str, inspect.Parameter], tokens: Tensor, targets: Tensor, positions: Tensor
) -> Any:
    """Return the model's output for documents that must be separate."""
    check_positions(positions, tokens)
    check_documents(positions)
    if "positions" in parameters:
        return model(tokens, targets, positions=positions)
    if (problem := packing_problem(model)) is not None:
        raise ConfigError(f"model: {problem}")
    return _call_with_labels(model, tokens, targets, position_ids=positions)


def _call_with_labels(model: nn.Module, tokens: Tensor, targets: Tensor, **others: Tensor) -> Any:
    """Return the output of a model with `input_ids` and `labels`; its loss compares target t with output t.

    A model that shifts labels and takes no `shift_labels` gets one more token. No earlier output sees this token, and
    its own output has no label.
    """
    rule, labels = label_rule(model), targets.contiguous()  # Some models require contiguous labels.
    if rule is Labels.SHIFTED:
        return model(input_ids=tokens, labels=labels, shift_labels=labels, **others)
    if rule is Labels.SHIFTED_ONLY:
        # Any valid id is right, because no earlier output sees it.
        last = torch.where(targets[:, -1:] < 0, tokens[:, -1:], targets[:, -1:])
        tokens = torch.cat((tokens, last), dim=1)
        # The model shifts labels by one place, which moves target t back to output t.
        labels = F.pad(labels, (1, 0), value=IGNORED)
        others = {name: torch.cat((each, each[:, -1:] + 1), dim=1) for name, each in others.items()}
    output = model(input_ids=tokens, labels=labels, **others)
    if not is_known(model):
        _check_targets(model, output, targets)
    return output


def _check_targets(model: nn.Module, output: Any, targets: Tensor) -> None:
    """Raise ConfigError if the model's loss belongs to shifted targets. Compares the values, once per model."""
    if model in _looked_at or isinstance(targets, FakeTensor) or targets.dim() != 2:
        return
    _looked_at.add(model)
    logits, loss = getattr(output, "logits", None), getattr(output, "loss", None)
    length = targets.shape[1]
    if not isinstance(logits, Tensor) or not isinstance(loss, Tensor) or logits.dim() != 3 or length < 2:
        return
    logits = logits.detach().float()
    longer = logits.shape[1] - length
    meant = _cross_entropy(logits[:, :length], targets)
    # Shifted by one output if the tokens were extended, by one target otherwise.
    other = _cross_entropy(logits[:, 1:], targets) if longer else _cross_entropy(logits[:, :-1], targets[:, 1:])
    found = loss.detach().float()
    if torch.isclose(found, other, rtol=1e-5) and not torch.isclose(found, meant, rtol=1e-3):
        raise ConfigError(
            f"model: the loss of {type(model).__name__} belongs to other targets: it is {found.item():.6f}, and the "
            f"mean over the given targets is {meant.item():.6f}. Give it `shift_labels`, name its targets `targets`, "
            "or give loss=f"
        )


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def check_loss(loss: LossFunction | None, layout: Layout) -> None:
    """Check a user's loss function.

    Args:
        loss: The loss function, or None.
        layout: The layout of the run.

    Raises:
        ConfigError: If it cannot be called with a model and a batch, or under a pipeline, where no rank holds the
            model.
    """
    if loss is None:
        return
    if not callable(loss):
        raise ConfigError(f"loss: it is a {type(loss).__name__}; {_LOSS_CONTRACT}")
    try:
        inspect.signature(loss).bind(None, None)
    except TypeError as error:
        takes = inspect.signature(loss)
        raise ConfigError(f"loss: {_name(loss)}{takes} cannot be called so ({error}); {_LOSS_CONTRACT}") from None
    except ValueError:
        pass  # A builtin has no signature.
    if layout.pp > 1:
        raise ConfigError(
            f"loss: under {layout} no rank holds the whole model, so loss(model, batch) cannot call it; set "
            f"parallel.pp to 1, or leave loss out for a model that computes its own"
        )


def _as_loss(output: Any, who: str) -> Tensor:
    found = output
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif not isinstance(output, Tensor):
        found = getattr(output, "loss", None)
    if isinstance(found, Tensor) and found.numel() == 1 and found.is_floating_point():
        return found
    raise ConfigError(f"{who} gave {_described(output)}, which is no loss\n{CONTRACT}")


def _described(value: Any) -> str:
    """Describe a value that is no loss, for an error."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}, {str(value.dtype).removeprefix('torch.')}"
    kind = type(value).__name__
    if isinstance(value, Mapping):
        return f"a {kind} with {', '.join(map(briefly, islice(value, 3))) or 'nothing'}"
    loss: Any = getattr(value, "loss", len)
    if not callable(loss):
        return f"a {kind} whose .loss is {_described(loss) if isinstance(loss, Tensor) else briefly(loss)}"
    if isinstance(value, list | tuple):
        return f"a {kind} of {len(value)}"
    return f"{value!r}" if isinstance(value, int | float | None) else f"a {kind}"


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)
