"""The user's optimizer: how to make it once there are segments, and which parameter is in which of its groups.

DeepSpeed's `model_parameters`: what an optimizer that is not made yet shall train, and in which groups.
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
"""As torch's optimizers take them: "params" of each, and options of its own."""


def param_groups_from(model: nn.Module, model_parameters: Any) -> Groups | None:
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


_NOT_ARGUMENTS = {"name", "in_backward"}
"""What a configuration says of an optimizer that is no argument of its class."""

OptimizerChoice = type[Optimizer] | Callable[..., Optimizer] | Optimizer | None


@dataclass(frozen=True, kw_only=True)
class _ChosenOptimizer:
    """What the caller's choice comes to."""

    kind: type[Optimizer]
    groups: list[dict[str, Any]]
    """Over the model's parameters."""
    make: Callable[[list[dict[str, Any]], bool], Optimizer] | None = None
    """Makes it of groups over segments, and may take a fused class where it is told so."""
    instance: Optimizer | None = None
    """What has no `make` is this one, with segments in the place of parameters."""
    is_theirs: bool = False
    """Whether the user has the instance, too."""
    named: dict[str, Any] = field(default_factory=dict)
    """Arguments that `make` gives its class."""
    is_ours: bool = False
    """Whether a fused class will take its place."""


class OptimizerFactory:
    """How to make the user's optimizer once there are segments, and which parameter is in which of its groups.

    Nothing but ids of parameters is kept of the model, so that a model on meta can be materialised in between.
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
        """`models`: the pipeline stages of this rank, or the whole model; without a parameter that trains, the
        optimizer has its groups and nothing in them. `groups`: of the whole model's parameters, for an optimizer that
        is made here; None are the usual ones. `trial_on`: the device on which the optimizer is tried
        (`optimizer_trial`); without it nothing is known of its forms."""
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
        """By id of a parameter."""
        self._options = [{key: value for key, value in group.items() if key != "params"} for group in chosen.groups]
        self.forms = ParameterForms()
        """The forms in which the optimizer may have parameters."""
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
        """How many groups the optimizer has."""
        return len(self._options)

    def build(self, segments: list[list[Tensor]]) -> Optimizer:
        """The optimizer over `segments` (a list for each group). An instance that the user made stays the same object;
        what a callable made may be replaced by our fused class of the same kind, unless something hangs on it."""
        groups = [{"params": tensors, **options} for tensors, options in zip(segments, self._options, strict=True)]
        fusible = all(has_kernels(tensor) for tensors in segments for tensor in tensors)
        if self._make is not None:
            return self._make(groups, fusible)
        assert self.instance is not None  # See `_ChosenOptimizer`.
        replaceable = fusible and not self._is_theirs and not _is_hung_on(self.instance)
        fused = fused_kind(type(self.instance), self._options) if replaceable else None
        if fused is not None:
            return fused(groups)
        for group, tensors in zip(self.instance.param_groups, segments, strict=True):
            group["params"] = tensors
        return self.instance


def _of_config(trainable: list[nn.Parameter], config: OptimizerConfig, groups: Groups | None) -> _ChosenOptimizer:
    """The optimizer that the configuration describes; without `groups`, without decay of what is no matrix."""
    kind = _kind_of(config)
    if groups is None:
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
    """One of the user's class, whose own defaults hold for what the configuration does not name; one that sends signs
    has the configuration's."""
    named = _options_of(kind, config, config.model_fields_set)
    _refuse_unknown(kind, named)
    return _ChosenOptimizer(
        kind=kind,
        groups=[{"params": trainable}] if groups is None else _within(groups, kind, trainable),
        make=lambda segments, fusible: _construct(kind, segments, named, fusible),
        named=named,
        # Its own class is not even made then: torch's would import the compiler.
        is_ours=fused_kind(kind, [_arguments_for(kind, named)]) is not None and _all_in_float32(trainable),
    )


def _all_in_float32(trainable: Iterable[nn.Parameter]) -> bool:
    """Whether the masters of all are."""
    return all(p.dtype.itemsize <= torch.float32.itemsize for p in trainable)


def _within(groups: Groups, kind: type[Optimizer], trainable: list[nn.Parameter]) -> Groups:
    """What of the caller's groups this rank trains. Raises ConfigError for an option that the class has not."""
    takes = FusedAdamW if issubclass(kind, SignCompressedOptimizer) else kind
    for group in groups:
        _refuse_unknown(takes, group.keys() - {"params"})
    known = {id(p) for p in trainable}
    return [{**group, "params": [p for p in group["params"] if id(p) in known]} for group in groups]


def _options_of(kind: type[Optimizer], config: OptimizerConfig, named: set[str]) -> dict[str, Any]:
    """What a class may be given of a configuration: those settings that are `named`, or all in one."""
    if issubclass(kind, SignCompressedOptimizer):
        return {"settings": config}
    return config.model_dump(include=named - _NOT_ARGUMENTS)


def _of_instance(
    choice: Optimizer | Callable[..., Optimizer], trainable: list[nn.Parameter], frozen: Collection[int]
) -> _ChosenOptimizer:
    """The user's instance, or what a callable makes of the parameters. `frozen`: ids of those that are not trained,
    which torch's optimizers leave alone, and which are in nobody's flats that train."""
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
    # As Adagrad's: what it holds of whole parameters is made anew, for the partitions.
    options = {key: value for key, value in instance.param_groups[0].items() if key != "params"}
    given = {key: value for key, value in options.items() if _takes(kind, key)}
    return _ChosenOptimizer(
        kind=kind, groups=groups, make=lambda segments, fusible: kind(segments, **given), named=given
    )


def _numbers_of_groups(groups: list[dict[str, Any]], trainable: list[nn.Parameter]) -> dict[int, int]:
    """The group of each parameter, by its id. Raises ConfigError where groups have others than the model's, or not all
    of these."""
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
        # torch would silently never train them; as parameters of no group they are trained by nobody here either.
        raise ConfigError(
            f"optimizer: {left_out} trainable parameters are in none of its groups; add them or set requires_grad=False"
        )
    return group_of


def _key(
    chosen: _ChosenOptimizer, options: Sequence[Mapping[str, Any]], dimensions: Sequence[Collection[int]]
) -> Hashable | None:
    """What the forms of an optimizer depend on, so that they are found once; None for an instance with attributes that
    are no plain values."""
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
    """Inside, an optimizer of small tensors that holds the model's parameters as well, in a closure, say, finds no
    gradients at them. Raises ConfigError if it has written to them all the same."""
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
    """Whether its state is more than what it began with; where that cannot be seen it counts as more."""
    return any("step" not in state or float(state["step"]) > 0 for state in optimizer.state.values())


def _is_hung_on(optimizer: Optimizer) -> bool:
    """Whether hooks, or a scheduler, which wraps its `step`, would stay behind on it."""
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
    """The `options` that this optimizer's constructor takes, and its fused kernel where it has one."""
    accepted = inspect.signature(kind).parameters
    arguments = {key: value for key, value in options.items() if _takes(kind, key)}
    if "fused" in accepted:
        arguments["fused"] = True
    return arguments
