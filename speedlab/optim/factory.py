"""Optimizer factory: make the user's optimizer over segments, and map parameters to its groups.

1. `param_groups_from` reads DeepSpeed's `model_parameters`.
2. `OptimizerFactory` resolves the choice (configuration, class, instance or callable) and runs the trial of forms.
3. `OptimizerFactory.build` makes the optimizer once the segments exist.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from speedlab.config import ConfigError, OptimizerConfig
from speedlab.optim.fused import FusedAdamW, FusedOptimizer, Lion, UncorrectedAdamW, fused_kind
from speedlab.optim.lamb import Lamb
from speedlab.optim.onebit_adam import OneBitAdam
from speedlab.optim.onebit_lamb import OneBitLamb
from speedlab.optim.optimizer_state import has_kernels
from speedlab.optim.optimizer_trial import OptimizerMaker, require_base, try_optimizer
from speedlab.optim.parameter_forms import EVERY_FORM, ParameterForms
from speedlab.optim.sign_compression import SignCompressedOptimizer
from speedlab.optim.zero_one_adam import ZeroOneAdam

Groups = list[dict[str, Any]]
"""As in torch's optimizers: dicts with "params" and the options of each group."""


def param_groups_from(model: nn.Module, model_parameters: Any) -> Groups | None:
    """Return parameter groups that have their own options.

    Args:
        model: The model.
        model_parameters: None, parameters, (name, parameter) pairs, or groups of either.

    Returns:
        The groups; None if no group has its own options, so that the optimizer's default groups apply.

    Raises:
        ConfigError: If a parameter of the model that requires a gradient is missing.
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
    """Yield the items. Raises ConfigError at the first wrong one, because a data set, for instance, may be endless."""
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


_NOT_ARGUMENTS = {"name", "in_backward"}
"""Optimizer settings that are not arguments of the class."""

OptimizerChoice = type[Optimizer] | Callable[..., Optimizer] | Optimizer | None


@dataclass(frozen=True, kw_only=True)
class _ChosenOptimizer:
    """The caller's choice, resolved."""

    kind: type[Optimizer]
    groups: list[dict[str, Any]]
    """Groups over the model's parameters."""
    make: Callable[[list[dict[str, Any]], bool], Optimizer] | None = None
    """Makes the optimizer from groups over segments; the flag allows a fused class."""
    instance: Optimizer | None = None
    """Without `make`: this instance, with segments in place of parameters."""
    is_theirs: bool = False
    """Whether the user also holds the instance."""
    named: dict[str, Any] = field(default_factory=dict)
    """Arguments that `make` gives the class."""
    is_ours: bool = False
    """Whether a fused class will replace it."""


class OptimizerFactory:
    """A factory for the user's optimizer, and the group of each parameter.

    It stores only ids of parameters, so that a model on the meta device can be materialised in between.
    """

    def __init__(
        self,
        choice: OptimizerChoice,
        models: Sequence[nn.Module],
        config: OptimizerConfig,
        groups: Groups | None = None,
        *,
        trial_on: torch.device | None = None,
    ) -> None:
        """Resolve the choice, and try the optimizer.

        Args:
            choice: The user's choice, as for `initialize`.
            models: The pipeline stages of this rank, or the whole model. Without a trainable parameter, the groups are
                empty.
            config: The `optimizer` section of the configuration.
            groups: Groups over the whole model's parameters, for an optimizer made here; None for the default groups.
            trial_on: Device of the trial (`optimizer_trial`); None skips the trial, and no form is known.

        Raises:
            ConfigError: If the choice does not fit the model.
        """
        trainable = [p for model in models for p in model.parameters() if p.requires_grad]
        if choice is None:
            chosen = _of_config(trainable, config, groups)
        elif isinstance(choice, type):
            chosen = _of_class(choice, trainable, config, groups)
        else:
            frozen = {id(p) for model in models for p in model.parameters() if not p.requires_grad}
            chosen = _of_instance(choice, trainable, frozen)
        self._make, self.instance, self._is_theirs = chosen.make, chosen.instance, chosen.is_theirs
        self.kind = chosen.kind
        """Class of the optimizer."""
        self.group_of = _numbers_of_groups(chosen.groups, trainable)
        """Group number by id of the parameter."""
        self._options = [{key: value for key, value in group.items() if key != "params"} for group in chosen.groups]
        self.forms = ParameterForms()
        """The parameter forms that the optimizer supports."""
        if trial_on is not None:
            is_ours = choice is None or chosen.is_ours or issubclass(self.kind, FusedOptimizer)
            self.forms = EVERY_FORM if is_ours else self._tried(chosen, models, trainable, trial_on)

    def _tried(
        self,
        chosen: _ChosenOptimizer,
        models: Sequence[nn.Module],
        trainable: Sequence[nn.Parameter],
        device: torch.device,
    ) -> ParameterForms:
        names = {id(p): name for model in models for name, p in model.named_parameters()}
        own = [group["params"] for group in chosen.groups]
        dimensions = [frozenset(p.ndim for p in group) for group in own]
        make, instance = chosen.make, chosen.instance
        subject = OptimizerMaker(
            self._options,
            make=None if make is None else lambda groups: make(groups, False),
            instance=instance,
            names=[names[id(group[0])] if group else "" for group in own],
            dimensions=dimensions,
            key=_key(chosen, self._options, dimensions),
        )
        with _untouched(trainable, names, self.kind):
            return try_optimizer(subject, device)

    @property
    def group_count(self) -> int:
        """Return the number of parameter groups."""
        return len(self._options)

    def build(self, segments: list[list[Tensor]]) -> Optimizer:
        """Make the optimizer over segments.

        An instance made by the user stays the same object. The result of a callable may be replaced by the equivalent
        fused class, unless hooks or a scheduler are attached.

        Args:
            segments: 1-D segments of each group.
        """
        groups = [{"params": tensors, **options} for tensors, options in zip(segments, self._options, strict=True)]
        fusible = all(has_kernels(tensor) for tensors in segments for tensor in tensors)
        if self._make is not None:
            return self._make(groups, fusible)
        assert self.instance is not None  # See `_ChosenOptimizer`.
        # The user may use the object, or hooks on it, so only an unused object is replaced.
        replaceable = fusible and not self._is_theirs and not _is_hung_on(self.instance)
        fused = fused_kind(type(self.instance), self._options) if replaceable else None
        if fused is not None:
            return fused(groups)
        for group, tensors in zip(self.instance.param_groups, segments, strict=True):
            group["params"] = tensors
        return self.instance


def _of_config(trainable: list[nn.Parameter], config: OptimizerConfig, groups: Groups | None) -> _ChosenOptimizer:
    """Return the optimizer of the configuration; without `groups`, only matrices have weight decay."""
    kind = _kind_of(config)
    if groups is None:
        # Usual practice: no weight decay on biases and norm gains.
        matrices = [p for p in trainable if p.ndim >= 2]
        others = [p for p in trainable if p.ndim < 2]
        groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    else:
        groups = _within(groups, kind, trainable)
    options = _options_of(kind, config, set(OptimizerConfig.model_fields))
    return _ChosenOptimizer(
        kind=kind,
        groups=[group for group in groups if group["params"]] or groups,
        make=lambda segments, fusible: _construct(kind, segments, options, fusible),
    )


def _of_class(
    kind: type[Optimizer], trainable: list[nn.Parameter], config: OptimizerConfig, groups: Groups | None
) -> _ChosenOptimizer:
    """Return an optimizer of the user's class.

    The class's defaults apply to arguments that the configuration does not name. An optimizer that sends signs uses all
    settings.
    """
    named = _options_of(kind, config, config.model_fields_set)
    _refuse_unknown(kind, named)
    return _ChosenOptimizer(
        kind=kind,
        groups=[{"params": trainable}] if groups is None else _within(groups, kind, trainable),
        make=lambda segments, fusible: _construct(kind, segments, named, fusible),
        named=named,
        # Then torch's class is not instantiated, because that would import the compiler.
        is_ours=fused_kind(kind, [_arguments_for(kind, named)]) is not None and _all_in_float32(trainable),
    )


def _all_in_float32(trainable: Iterable[nn.Parameter]) -> bool:
    """Return whether all masters are float32."""
    return all(p.dtype.itemsize <= torch.float32.itemsize for p in trainable)


def _within(groups: Groups, kind: type[Optimizer], trainable: list[nn.Parameter]) -> Groups:
    """Return the part of the caller's groups that this rank trains. Raises ConfigError for an unknown option."""
    takes = FusedAdamW if issubclass(kind, SignCompressedOptimizer) else kind
    for group in groups:
        _refuse_unknown(takes, group.keys() - {"params"})
    known = {id(p) for p in trainable}
    return [{**group, "params": [p for p in group["params"] if id(p) in known]} for group in groups]


def _options_of(kind: type[Optimizer], config: OptimizerConfig, named: set[str]) -> dict[str, Any]:
    """Return the constructor arguments from the configuration: the `named` settings, or all settings in one object."""
    if issubclass(kind, SignCompressedOptimizer):
        return {"settings": config}
    return config.model_dump(include=named - _NOT_ARGUMENTS)


def _of_instance(
    choice: Optimizer | Callable[..., Optimizer], trainable: list[nn.Parameter], frozen: Collection[int]
) -> _ChosenOptimizer:
    """Return the user's instance, or the result of the callable.

    `frozen` has ids of untrained parameters, which torch's optimizers skip and which no trained flat parameter holds.
    """
    nothing = nn.Parameter(torch.zeros(0))  # torch's optimizers refuse an empty list.
    instance = choice if isinstance(choice, Optimizer) else choice(trainable or [nothing])
    if not isinstance(instance, Optimizer):
        raise ConfigError(f"optimizer: the callable returned {type(instance).__name__}, not a torch.optim.Optimizer")
    require_base(instance)
    if instance.state and (isinstance(choice, Optimizer) or _has_stepped(instance)):
        raise ConfigError(
            "optimizer: it already has state; initialise first, and load state through load_checkpoint. One "
            "that has state from its making on, as Adagrad, is given as a class, or a callable that makes it"
        )
    kind = type(instance)
    groups = [
        {**group, "params": [p for p in group["params"] if p is not nothing and id(p) not in frozen]}
        for group in instance.param_groups
    ]
    if not instance.state:
        return _ChosenOptimizer(kind=kind, groups=groups, instance=instance, is_theirs=isinstance(choice, Optimizer))
    # As Adagrad: its states of whole parameters are created again for the partitions.
    options = {key: value for key, value in instance.param_groups[0].items() if key != "params"}
    given = {key: value for key, value in options.items() if _takes(kind, key)}
    return _ChosenOptimizer(
        kind=kind, groups=groups, make=lambda segments, fusible: kind(segments, **given), named=given
    )


def _numbers_of_groups(groups: list[dict[str, Any]], trainable: list[nn.Parameter]) -> dict[int, int]:
    """Return the group number of each parameter, by id.

    Raises ConfigError if groups contain other parameters, or miss some.
    """
    known = {id(p) for p in trainable}
    strangers = sum(id(p) not in known for group in groups for p in group["params"])
    if strangers:
        raise ConfigError(
            f"optimizer: {strangers} of its parameters are not in this rank's part of the model; build it from "
            f"model.parameters(), or under a pipeline give a class or a callable instead"
        )
    group_of = {id(p): index for index, group in enumerate(groups) for p in group["params"]}
    left_out = len(known) - len(group_of)
    if left_out:
        # torch would silently never train them, and neither would the engine.
        raise ConfigError(
            f"optimizer: {left_out} trainable parameters are in none of its groups; add them or set requires_grad=False"
        )
    return group_of


def _key(
    chosen: _ChosenOptimizer, options: Sequence[Mapping[str, Any]], dimensions: Sequence[Collection[int]]
) -> Hashable | None:
    """Return a cache key of everything that the supported forms depend on.

    None for an instance with attributes that are not plain values.
    """
    given: list[object] = [chosen.kind, *map(frozenset, dimensions)]
    given += [sorted((key, repr(value)) for key, value in own.items()).__repr__() for own in (*options, chosen.named)]
    if chosen.instance is None:
        return tuple(given)
    for name, value in vars(chosen.instance).items():
        if name in _KNOWN_ATTRIBUTES or (name.startswith("_optimizer_") and name.endswith("_hooks")):
            continue
        if not (value is None or isinstance(value, bool | int | float | str)):
            return None
        given.append((name, value))
    return tuple(given)


_KNOWN_ATTRIBUTES = {"defaults", "param_groups", "state", "step"}


@contextmanager
def _untouched(trainable: Sequence[nn.Parameter], names: Mapping[int, str], kind: type[Optimizer]) -> Iterator[None]:
    """Hide, inside, the gradients of the model's parameters from the optimizer under trial.

    An optimizer may hold these parameters, for example in a closure. Raises ConfigError if it has changed them.
    """
    gradients = [(p, p.grad) for p in trainable if p.grad is not None]
    versions = [p._version for p in trainable]
    for p, _ in gradients:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in gradients:
            p.grad = gradient
    for p, version in zip(trainable, versions, strict=True):
        if p._version != version:
            raise ConfigError(
                f"optimizer: {kind.__name__} has changed {names[id(p)]!r} in a trial over other tensors, because it "
                "keeps parameters outside of param_groups. Build the model again, and let step() go over param_groups"
            )


def _kind_of(config: OptimizerConfig) -> type[Optimizer]:
    if config.name == "adamw" and not config.bias_correction:
        return UncorrectedAdamW
    return {
        "adamw": AdamW,
        "lamb": Lamb,
        "onebit_adam": OneBitAdam,
        "onebit_lamb": OneBitLamb,
        "lion": Lion,
        "sgd": SGD,
        "zero_one_adam": ZeroOneAdam,
    }[config.name]


def _construct(
    kind: type[Optimizer], segments: list[dict[str, Any]], options: dict[str, Any], fusible: bool
) -> Optimizer:
    fused = fused_kind(kind, [_arguments_for(kind, options)]) if fusible else None
    chosen: Callable[..., Optimizer] = fused or kind
    return chosen(segments, **_arguments_for(chosen, options))


def _has_stepped(optimizer: Optimizer) -> bool:
    """Return whether the optimizer has stepped; unknown counts as stepped."""
    return any("step" not in state or float(state["step"]) > 0 for state in optimizer.state.values())


def _is_hung_on(optimizer: Optimizer) -> bool:
    """Return whether hooks, or a scheduler that wraps `step`, are attached to this object."""
    hooks = [value for name, value in vars(optimizer).items() if name.endswith("_hooks")]
    return any(hooks) or "step" in vars(optimizer)


def _takes(kind: Callable[..., Optimizer], key: str) -> bool:
    parameters = inspect.signature(kind).parameters
    return key in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _refuse_unknown(kind: type[Optimizer], named: Iterable[str]) -> None:
    for key in named:
        if not _takes(kind, key):
            known = ", ".join(name for name in inspect.signature(kind).parameters if name != "params")
            raise ConfigError(f"optimizer.{key}: {kind.__name__} takes no {key}; it takes {known}")


def _arguments_for(kind: Callable[..., Optimizer], options: dict[str, Any]) -> dict[str, Any]:
    """Return the `options` that this constructor takes, with `fused` if available."""
    accepted = inspect.signature(kind).parameters
    arguments = {key: value for key, value in options.items() if _takes(kind, key)}
    if "fused" in accepted:
        arguments["fused"] = True
    return arguments
