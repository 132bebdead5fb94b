"""DeepSpeed's `model_parameters`: what an optimizer that is not made yet shall train, and in which groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from speedlab.config import ConfigError

Groups = list[dict[str, Any]]
"""As torch's optimizers take them: "params" of each, and options of its own."""


def asked_groups(model: nn.Module, model_parameters: Any) -> Groups | None:
    """The groups, where one has options of its own; None where the optimizer's usual ones hold.

    `model_parameters`: None, parameters, pairs of names and parameters, or groups of either. Raises ConfigError where
    one of the model that requires a gradient is not in them.
    """
    if model_parameters is None:
        return None
    given = list(_checked(model_parameters))
    groups = [each for each in given if isinstance(each, Mapping)] or [{"params": given}]
    found: Groups = [
        {**{key: value for key, value in group.items() if key != "name"}, "params": list(_tensors(group["params"]))}
        for group in groups
    ]
    known = {id(parameter) for group in found for parameter in group["params"]}
    left_out = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in known]
    if left_out:
        raise ConfigError(
            f"model_parameters: {left_out[0]} is not in them ({len(left_out)} in all), and would be trained all the "
            "same; set requires_grad=False of what shall not be"
        )
    return found if any(group.keys() - {"params"} for group in found) else None


def _checked(given: Iterable[Any]) -> Iterator[Any]:
    """The same; raises ConfigError at the first that cannot be one: a data set, for instance, may have no end."""
    for each in given:
        own = each[1] if isinstance(each, tuple) and len(each) == 2 else each
        if not isinstance(own, nn.Parameter | Mapping):
            raise ConfigError(
                f"model_parameters: a {type(given).__name__} gives a {type(own).__name__}; give parameters of the "
                "model, pairs of names and parameters, or groups of either"
            )
        yield each


def _tensors(given: Tensor | Iterable[Any]) -> Iterable[Tensor]:
    for each in [given] if isinstance(given, Tensor) else given:
        yield each[1] if isinstance(each, tuple) else each
