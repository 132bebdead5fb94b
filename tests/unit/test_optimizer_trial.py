"""The trial of an optimizer on small tensors: the forms in which it may have parameters, and what stays."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from speedlab.config import ConfigError, OptimizerConfig
from speedlab.optim.factory import OptimizerChoice, OptimizerFactory
from speedlab.optim.parameter_forms import EVERY_FORM, ParameterForms, RequiredForms

CPU = torch.device("cpu")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 4)


def forms_of(choice: OptimizerChoice, model: nn.Module | None = None, **named: Any) -> ParameterForms:
    return OptimizerFactory(choice, [model or Model()], OptimizerConfig(**named), trial_on=CPU).forms


class Elementwise(Optimizer):
    """What a test changes of it shows in a trial."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)

    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p -= group["lr"] * gradient


class ByNorm(Elementwise):
    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p -= group["lr"] * gradient / gradient.norm()


class ByRows(Elementwise):
    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p -= group["lr"] * (gradient - gradient.mean(-1, keepdim=True))


class ByAllNorms(Elementwise):
    """One size of step for all parameters, as of D-Adaptation."""

    def step(self, closure: Any = None) -> None:
        every = [p.grad.square().sum() for group in self.param_groups for p in group["params"] if p.grad is not None]
        for group in self.param_groups:
            group["size"] = max(group.get("size", 0.0), math.sqrt(sum(every)))
        super().step()

    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p -= group["lr"] * gradient / group["size"]


class FromTheTenthStep(Elementwise):
    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        p -= group["lr"] * (gradient / gradient.norm() if state["step"] > 10 else gradient)


class CountsCalls(Elementwise):
    """A count for all parameters, as of several packages: flats that are updated one by one would raise it."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
        super().step()

    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p -= group["lr"] / group["calls"] * gradient


class Draws(Elementwise):
    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p -= group["lr"] * (gradient + torch.randn_like(gradient))


class KeepsAMatrix(Elementwise):
    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["precondition"] = torch.eye(3)
        p -= group["lr"] * gradient


WHOLE = {"flattened": True, "pieces": True}
EXPECTED: dict[type[Optimizer], ParameterForms] = {
    Elementwise: EVERY_FORM,
    ByNorm: ParameterForms(flattened=True, shares=True, pieces=True),
    ByRows: ParameterForms(shares=True, pieces=True),
    ByAllNorms: ParameterForms(flattened=True, joined=True),
    FromTheTenthStep: ParameterForms(flattened=True, shares=True, pieces=True),
    CountsCalls: ParameterForms(flattened=True, joined=True, parts=True, shares=True),
}


@pytest.mark.parametrize("kind", EXPECTED, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("form", ["class", "callable", "instance"])
def test_forms_are_found_by_a_trial(kind: type[Optimizer], form: str) -> None:
    model = Model()
    choice: OptimizerChoice = {"class": kind, "callable": partial(kind), "instance": kind(model.parameters())}[form]
    assert forms_of(choice, model) == EXPECTED[kind]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"foreach": True},
        {"fused": True},
        {"amsgrad": True},
        {"maximize": True},
        {"lr": 0.0},
        {"lr": torch.tensor(0.0)},
    ],
    ids=str,
)
def test_torchs_adamw_has_every_form(options: dict[str, Any]) -> None:
    model = Model()
    assert forms_of(AdamW(model.parameters(), **options), model) == EVERY_FORM
    assert forms_of(lambda p: AdamW(p, **options)) == EVERY_FORM


@pytest.mark.parametrize(
    "name", ["Adadelta", "Adagrad", "Adam", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"]
)
def test_elementwise_optimizers_of_torch_have_every_form(name: str) -> None:
    kind = getattr(torch.optim, name)
    model = Model()
    assert forms_of(kind, model) == forms_of(lambda p: kind(p, foreach=True), model) == EVERY_FORM
    if (
        name != "Adagrad"
    ):  # Its states are there before the first step: `OptimizerFactory` takes it as a class or callable.
        assert forms_of(kind(model.parameters()), model) == EVERY_FORM


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (Draws, "draws random numbers"),
        (KeepsAMatrix, "'precondition', that is neither a number nor one value for each element"),
        (torch.optim.LBFGS, r"TypeError: LBFGS.step\(\) missing 1 required positional argument: 'closure'"),
        (torch.optim.SparseAdam, "SparseAdam does not support dense gradients"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_no_form_is_right_for_says_why(choice: Any, words: str) -> None:
    problem = forms_of(choice).problem(choice.__name__, ONE_RANK)
    assert problem.startswith(f"optimizer: {choice.__name__} ")
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(problem)


# ---- parameters outside of param_groups ------------------------------------------------------------------------------


class Composite(Optimizer):
    """Two optimizers, which have the parameters."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params, {})
        matrices, others = [p for p in params if p.ndim > 1], [p for p in params if p.ndim < 2]
        self.inner = [SGD(matrices or others[:1], lr=0.1)]
        self.other = AdamW(others, lr=0.1)

    def step(self, closure: Any = None) -> None:
        self.inner[0].step()
        self.other.step()


class Captured(Elementwise):
    """The list of parameters that it was made with."""

    def __init__(self, params: Any) -> None:
        self.own = list(params)
        super().__init__(self.own)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.own:
            if p.grad is not None:
                p -= 0.1 * p.grad


class Closure(Elementwise):
    def __init__(self, params: Any) -> None:
        own = list(params)
        super().__init__(own)
        self.every: Callable[[], list[Tensor]] = lambda: own

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.every():
            if p.grad is not None:
                p -= 0.1 * p.grad


class Merged(Optimizer):
    """It shows the groups of two optimizers as copies."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        self.inner = [SGD(params[:1], lr=0.1), SGD(params[1:], lr=0.1)]
        super().__init__(params, {})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # what a wrapper does
        return [dict(group) for each in self.inner for group in each.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        pass

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        pass

    def step(self, closure: Any = None) -> None:
        for each in self.inner:
            each.step()


@pytest.mark.parametrize("kind", [Composite, Captured, Closure, Merged])
@pytest.mark.parametrize("form", ["class", "callable", "instance"])
def test_parameters_kept_elsewhere_are_refused_by_name(kind: type[Optimizer], form: str) -> None:
    model = Model()
    before = copy.deepcopy(model.state_dict())
    choice: OptimizerChoice = {"class": kind, "callable": partial(kind), "instance": kind(model.parameters())}[form]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    problem = forms_of(choice, model).problem(kind.__name__, ONE_RANK)
    if form == "class":  # It is given groups, of which these classes know nothing.
        assert "failed in a trial" in problem
    else:
        assert "param_groups" in problem
        assert "'first.weight'" in problem
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is not None for p in model.parameters())


class WritesAnyway(Closure):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.every():
            p *= 0.9


def test_what_writes_to_the_model_in_a_trial_is_told() -> None:
    with pytest.raises(ConfigError, match=r"WritesAnyway has changed .first.weight. in a trial"):
        forms_of(partial(WritesAnyway))


class NoBase(Optimizer):
    def __init__(self, params: Any) -> None:
        self.own = list(params)

    def step(self, closure: Any = None) -> None:
        pass


class GroupsWithoutBase(NoBase):
    def __init__(self, params: Any) -> None:
        self.param_groups, self.state = [{"params": list(params)}], {}


@pytest.mark.parametrize("kind", [NoBase, GroupsWithoutBase])
@pytest.mark.parametrize("form", ["class", "callable", "instance"])
def test_a_class_that_has_not_called_its_base_is_told_so(kind: type[Optimizer], form: str) -> None:
    model = Model()
    choice: OptimizerChoice = {"class": kind, "callable": partial(kind), "instance": kind(model.parameters())}[form]
    with pytest.raises(ConfigError, match=rf"optimizer: {kind.__name__}.__init__ has not called super\(\).__init__"):
        forms_of(choice, model)


# ---- what is left alone ----------------------------------------------------------------------------------------------


def test_nothing_of_the_user_is_disturbed() -> None:
    model, calls = Model(), []
    optimizer = SGD(model.parameters(), lr=0.3, momentum=0.9)
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert forms_of(optimizer, model) == EVERY_FORM
    assert forms_of(Draws).failure
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
    assert not calls
    assert not optimizer.state
    assert schedule.last_epoch == 0
    assert optimizer.param_groups[0]["lr"] == 0.3
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Counts(Elementwise):
    made = 0

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        type(self).made += 1


def test_the_same_optimizer_is_tried_once() -> None:
    forms_of(Counts)
    made = Counts.made
    assert made > 1
    forms_of(Counts)
    assert Counts.made == made
    forms_of(Counts, lr=0.25)
    assert Counts.made > made


def test_groups_that_do_not_move_are_no_fault() -> None:
    def frozen(params: Any) -> Optimizer:
        params = list(params)
        return AdamW([{"params": params[:2]}, {"params": params[2:], "lr": 0.0, "weight_decay": 0.0}])

    assert forms_of(frozen) == EVERY_FORM
    assert forms_of(lambda p: Adagrad(p, initial_accumulator_value=0.5)) == EVERY_FORM


def test_many_groups_of_several_kinds() -> None:
    def layerwise(params: Any) -> Optimizer:
        return AdamW([{"params": [p], "lr": 0.1 / k, "betas": (0.9, 0.9 + 0.01 * k)} for k, p in enumerate(params, 1)])

    assert forms_of(layerwise) == EVERY_FORM


# ---- what a run needs ------------------------------------------------------------------------------------------------

ONE_RANK = RequiredForms(stage=0, ranks=1, tp=1, pp=1, offload="", in_backward=False)


@pytest.mark.parametrize(
    ("changes", "forms", "words"),
    [
        ({}, EXPECTED[ByNorm], ""),
        ({}, EXPECTED[ByRows], "trains otherwise if a parameter is flattened"),
        ({"stage": 2, "ranks": 2}, EXPECTED[ByNorm], "zero.stage 2: Kind trains otherwise"),
        ({"stage": 2, "ranks": 2}, EXPECTED[ByAllNorms], "Set zero.stage to 0"),
        ({"tp": 2}, EXPECTED[ByNorm], "parallel.tp 2: "),
        ({"pp": 2}, EXPECTED[ByNorm], ""),
        ({"pp": 2}, EXPECTED[ByAllNorms], "Set parallel.pp to 1"),
        ({"offload": "offload.optimizer 'disk'"}, EXPECTED[CountsCalls], "offload.optimizer 'disk': Kind trains"),
        ({"in_backward": True}, EXPECTED[CountsCalls], "Set optimizer.in_backward to false"),
        ({"stage": 3, "ranks": 4, "tp": 2, "pp": 2, "in_backward": True}, EVERY_FORM, ""),
    ],
)
def test_a_run_is_refused_for_what_it_needs(changes: dict[str, Any], forms: ParameterForms, words: str) -> None:
    needs = RequiredForms(**{**vars(ONE_RANK), **changes})
    problem = forms.problem("Kind", needs)
    assert words in problem
    assert bool(problem) == bool(words)
