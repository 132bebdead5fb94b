"""A trial of an optimizer on small tensors: does it update each element independently, as partitioned states need?

The engine gives an optimizer one-dimensional segments in place of parameters: several parameters joined, or the part
that a rank holds. The trial trains small parameters as a plain loop does, and in each of these forms, over enough steps
for warm-ups and look-aheads, and compares. The name of a class decides nothing.

1. The reference: parameters of several shapes, all in one optimizer.
2. The forms, with equal gradients: each parameter flattened; several joined; both halves of these in one optimizer
   each; some parameters in one optimizer and some in another; one step per tensor.
3. A form is supported if parameters and numbers of groups (the estimate `d` of Prodigy) equal those of the reference.

The trial restores random generators and the parameters of the model.
"""

from __future__ import annotations

import copy
import random
import sys
import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.optim import Optimizer

from speedlab.config import ConfigError
from speedlab.optim.parameter_forms import ParameterForms

_SMALL = ((13, 11), (5,), (3, 2, 2, 2), (6, 7))
"""Shapes of the parameters of a group: a matrix, a vector, a convolution, another matrix."""
_LARGE = ((67, 71), (37,), (5, 3, 3, 3), (24, 31))
"""Larger shapes that show block effects.

The first one has more elements than 8-bit optimizers leave in float32, and no shape is a multiple of their blocks. Only
an optimizer that passes on small shapes trains these: a Shampoo of such a long vector would invert its square.
"""
_Shapes = Sequence[tuple[int, ...]]
_IN_A_FLAT = 2
"""Number of parameters that are joined in a flat parameter."""
_FEW = ((7,),)
"""Shapes of the parameters of further groups."""
_MOST_GROUPS = 3
"""Number of groups with all shapes, if their options differ in more than these keys:"""
_ANY_GROUP_HAS = ("lr", "initial_lr", "weight_decay", "name")
_STEPS, _STEPS_LARGE = 30, 12
"""Steps with small and with large parameters. Several optimizers change behaviour at their 5th, 10th or 25th step."""
_ALIGNED = 4
"""Parameters begin at multiples of this many elements in a flat parameter (`FlatParam`)."""
_EARLY = 3
"""Parameters are also compared after this many steps, because an effect of one step may vanish over all steps."""
_LEAST_RATE = 1e-3
"""A smaller learning rate, such as 0 before a warm-up, would hide differences."""
_TOLERANCE = 2e-4
"""Relative to a parameter's movement. The order of sums causes smaller differences; 8-bit blocks cause larger ones."""


class OptimizerMaker:
    """A factory that can make the same optimizer repeatedly over other tensors."""

    def __init__(
        self,
        options: Sequence[Mapping[str, Any]],
        *,
        make: Callable[[list[dict[str, Any]]], Optimizer] | None = None,
        instance: Optimizer | None = None,
        names: Sequence[str],
        dimensions: Sequence[Collection[int]] = (),
        key: Hashable = None,
    ) -> None:
        """Store how to make the optimizer.

        Args:
            options: Options of each parameter group.
            make: Makes the optimizer from groups of tensors; None copies `instance`.
            instance: The optimizer to copy.
            names: Name of the first parameter of each group.
            dimensions: Dimensions that parameters of each group have.
            key: Hash key of everything that the supported forms depend on; None if unknown.
        """
        self.options, self.names, self.key = options, names, key
        self.dimensions = dimensions or [()] * len(options)
        self._make, self._instance = make, instance

    def reference(self, parameters: list[list[Tensor]]) -> Optimizer:
        """Make the optimizer as a plain loop does.

        Args:
            parameters: Parameters of each group.
        """
        if self._make is not None:
            return self._made(parameters)
        assert self._instance is not None
        represents: dict[int, Any] = {}
        for group, own in zip(self._instance.param_groups, parameters, strict=True):
            represents |= {id(p): own[number % len(own)] for number, p in enumerate(group["params"])}
        return self._over(_copied(self._instance, represents), parameters)

    def over(self, segments: list[list[Tensor]]) -> Optimizer:
        """Make the optimizer as the engine does, over segments that replace its parameters.

        Args:
            segments: Segments of each group.
        """
        if self._make is None:
            return self._over(self.reference([[torch.zeros_like(s) for s in own] for own in segments]), segments)
        made = self._made([[torch.zeros_like(s) for s in own] for own in segments])
        return self._made(segments) if made.state else self._over(made, segments)

    def _made(self, every: list[list[Tensor]]) -> Optimizer:
        assert self._make is not None
        groups = [{**own, "params": list(tensors)} for own, tensors in zip(self.options, every, strict=True)]
        return _raised(require_base(self._make(groups)))

    @staticmethod
    def _over(optimizer: Optimizer, tensors: list[list[Tensor]]) -> Optimizer:
        for group, own in zip(optimizer.param_groups, tensors, strict=True):
            group["params"] = list(own)
        return _raised(optimizer)


def try_optimizer(subject: OptimizerMaker, device: torch.device) -> ParameterForms:
    """Train small tensors in each form. The result is cached by key in the process.

    Args:
        subject: Makes the optimizer.
        device: The device of the tensors.

    Returns:
        The supported forms, or the failure.
    """
    if isinstance(torch.empty(0, device=device), FakeTensor):
        device = torch.device("cpu")  # Fake tensors have no values to compare.
    key = None if subject.key is None else (subject.key, device)
    if key in _known:
        return _known[key]
    found = _try(subject, device)
    if key is not None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[key] = found
    return found


_known: dict[Hashable, ParameterForms] = {}
_MOST_KNOWN = 256


def _try(subject: OptimizerMaker, device: torch.device) -> ParameterForms:
    with _nothing_changes(device):
        found = _Trial(subject, device, _SMALL, _STEPS).found()
        # Large shapes only for optimizers that pass on small ones; see `_LARGE`.
        if not (found.flattened or found.joined):
            return found
        large = _Trial(subject, device, _LARGE, _STEPS_LARGE).found()
        return replace(
            found,
            failure=large.failure,
            flattened=found.flattened and large.flattened,
            joined=found.joined and large.joined,
            parts=found.parts and large.parts,
            shares=found.shares and large.shares,
        )


# ---- small parameters ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Small:
    """A parameter of the trial: its group, initial value, and gradient of each step."""

    group: int
    value: Tensor
    gradients: list[Tensor]


@dataclass(frozen=True)
class _FlatPiece:
    """Elements [start, end) of joined flattened parameters, each aligned to a multiple of `_ALIGNED`."""

    parameters: tuple[int, ...]
    start: int
    end: int


class _Trial:
    """A trial with parameters of some shapes, over some steps."""

    def __init__(self, subject: OptimizerMaker, device: torch.device, shapes: _Shapes, steps: int) -> None:
        self._subject, self._steps = subject, steps
        self._small = list(_small_parameters(subject, device, shapes, steps))
        self._flats = list(_flats(self._small))

        self._unsaved = ""
        """Name of a state that no checkpoint could store."""

    def found(self) -> ParameterForms:
        before = _random_states()
        try:
            expected = self._reference()
        except ConfigError:
            raise
        except Exception as error:
            return ParameterForms(
                failure=f"failed in a trial with small tensors: {type(error).__name__}: {_first_line(error)}"
            )
        if before != _random_states():
            return ParameterForms(failure="draws random numbers, of which ranks would have different ones")
        if all(torch.equal(value, small.value) for value, small in zip(expected.values, self._small, strict=True)):
            return ParameterForms(
                failure=f"changed none of the parameters in its param_groups, as {self._name(0)!r}, in {self._steps} "
                "steps of a trial with small tensors"
            )
        each = [_FlatPiece((k,), 0, _padded(small.value.numel())) for k, small in enumerate(self._small)]
        unpadded = [_FlatPiece((k,), 0, small.value.numel()) for k, small in enumerate(self._small)]
        flattened = self._trained([unpadded])
        stuck = self._stuck(flattened, expected)
        if stuck is not None:
            return ParameterForms(
                failure=f"updates something else than the parameters in its param_groups, as {self._name(stuck)!r}, "
                "which become parts of flats"
            )
        joined = self._trained([self._flats])
        forms = ParameterForms(
            flattened=self._equal(flattened, expected),
            joined=self._equal(joined, expected),
            parts=self._equal(self._trained(_halves(self._flats)), expected),
            pieces=self._equal(self._trained([self._flats], separate=True), joined),
        )
        if self._unsaved and not (forms.flattened or forms.joined):
            return ParameterForms(
                failure=f"keeps a state, {self._unsaved!r}, that is neither a number nor one value for each element, "
                "which no checkpoint could hold"
            )
        shares = forms.parts or self._equal(self._trained([each[::2], each[1::2]]), self._trained([each]))
        return replace(forms, shares=shares)

    def _name(self, number: int) -> str:
        return self._subject.names[self._small[number].group]

    def _stuck(self, trained: _Values | None, expected: _Values) -> int | None:
        """Return a parameter that only the reference has changed."""
        if trained is None:
            return None
        for number, (small, value, wanted) in enumerate(zip(self._small, trained.values, expected.values, strict=True)):
            if torch.equal(value, small.value) and not torch.equal(wanted, small.value):
                return number
        return None

    # ---- training ----------------------------------------------------------------------------------------------------

    def _reference(self) -> _Values:
        parameters = [nn.Parameter(small.value.clone()) for small in self._small]
        optimizer = self._subject.reference(self._by_group(parameters, [small.group for small in self._small]))
        trained = _Values(self._small)
        for step in range(self._steps):
            for parameter, small in zip(parameters, self._small, strict=True):
                parameter.grad = small.gradients[step].clone()
            optimizer.step()
            for number, parameter in enumerate(parameters):
                trained.note(step, number, 0, parameter.detach().flatten())
        trained.numbers.append(_numbers_of(optimizer))
        return trained

    def _trained(self, ranks: Sequence[Sequence[_FlatPiece]], *, separate: bool = False) -> _Values | None:
        """Train with one optimizer per rank over its pieces, and return the parameters; None if that raises.

        `apart` steps once for each piece.
        """
        trained = _Values(self._small)
        try:
            for pieces in ranks:
                self._train(pieces, trained, separate=separate)
        except Exception:
            return None
        return trained

    def _train(self, pieces: Sequence[_FlatPiece], trained: _Values, *, separate: bool) -> None:
        segments = [self._cut(piece, [small.value for small in self._small]) for piece in pieces]
        groups = [self._small[piece.parameters[0]].group for piece in pieces]
        optimizer = self._subject.over(self._by_group(segments, groups))
        given: dict[tuple[int, str], Tensor] = {}
        for step in range(self._steps):
            gradients = [small.gradients[step] for small in self._small]
            shares = [self._cut(piece, gradients) for piece in pieces]
            for together in [[k] for k in range(len(pieces))] if separate else [list(range(len(pieces)))]:
                for k in together:
                    segments[k].grad = shares[k]
                optimizer.step()
                for k in together:
                    segments[k].grad = None
                    self._adopt(optimizer, k, segments[k], given)
            for piece, segment in zip(pieces, segments, strict=True):
                self._note(step, piece, segment, trained)
        trained.numbers.append(_numbers_of(optimizer))

    def _adopt(self, optimizer: Optimizer, k: int, segment: Tensor, given: dict[tuple[int, str], Tensor]) -> None:
        """Copy elementwise states into other memory, as `OptimizerStates.adopt` does."""
        state = optimizer.state.get(segment, {})
        for key, value in state.items():
            if not isinstance(value, Tensor) or value.shape != segment.shape:
                if not _is_number(value):
                    self._unsaved = key
                    raise TypeError(key)
            elif given.get((k, key)) is not value:
                state[key] = given[k, key] = torch.zeros_like(segment, dtype=value.dtype).copy_(value)

    def _by_group(self, tensors: Iterable[Tensor], groups: Iterable[int]) -> list[list[Tensor]]:
        found: list[list[Tensor]] = [[] for _ in self._subject.options]
        for tensor, group in zip(tensors, groups, strict=True):
            found[group].append(tensor)
        return found

    def _cut(self, piece: _FlatPiece, every: Sequence[Tensor]) -> Tensor:
        flat = [every[k].flatten() for k in piece.parameters]
        padded = [nn.functional.pad(each, (0, -each.numel() % _ALIGNED)) for each in flat]
        return torch.cat(padded)[piece.start : piece.end].clone()

    def _note(self, step: int, piece: _FlatPiece, segment: Tensor, trained: _Values) -> None:
        offset = 0
        for k in piece.parameters:
            numel = self._small[k].value.numel()
            low, high = max(piece.start, offset), min(piece.end, offset + numel)
            if low < high:
                trained.note(step, k, low - offset, segment[low - piece.start : high - piece.start])
            offset += _padded(numel)

    # ---- comparing ---------------------------------------------------------------------------------------------------

    def _equal(self, trained: _Values | None, expected: _Values | None) -> bool:
        if trained is None or expected is None:
            return False
        for early in (True, False):
            values = zip(self._small, trained.at(early=early), expected.at(early=early), strict=True)
            if not all(_is_near(value, wanted, small.value) for small, value, wanted in values):
                return False
        return all(_alike(numbers, expected.numbers[0]) for numbers in trained.numbers)


def _is_near(value: Tensor, wanted: Tensor, begun: Tensor) -> bool:
    """Return whether a parameter moved to the same values as another one."""
    allowed = _TOLERANCE * (wanted - begun).abs().max() + 4 * torch.finfo(value.dtype).eps * wanted.abs()
    return bool(((value - wanted).abs() <= allowed).all())


_Numbers = list[dict[str, float]]
"""Options of each group that are numbers."""


class _Values:
    """Parameters after `_EARLY` steps and at the end, and the numbers in each optimizer's groups."""

    def __init__(self, small: Sequence[_Small]) -> None:
        self._early, self._late = ([each.value.clone() for each in small] for _ in range(2))
        self.numbers: list[_Numbers] = []

    def note(self, step: int, number: int, start: int, values: Tensor) -> None:
        """Store elements of a parameter after a step.

        Args:
            step: Number of the step, from 0.
            number: Number of the parameter.
            start: First element.
            values: (n,) new values.
        """
        for kept in (self._early, self._late) if step < _EARLY else (self._late,):
            kept[number].view(-1)[start : start + values.numel()] = values

    def at(self, *, early: bool) -> list[Tensor]:
        return self._early if early else self._late

    @property
    def values(self) -> list[Tensor]:
        """Return the parameters at the end."""
        return self._late


def _small_parameters(subject: OptimizerMaker, device: torch.device, shapes: _Shapes, steps: int) -> Iterator[_Small]:
    """Yield the parameters.

    Magnitudes differ between and inside parameters, so that norms of parts differ from the whole.
    """
    generator = torch.Generator().manual_seed(1)
    kinds = list[str]()
    for group, (own, dimensions) in enumerate(zip(subject.options, subject.dimensions, strict=True)):
        kind = repr(sorted((key, repr(value)) for key, value in own.items() if key not in _ANY_GROUP_HAS))
        has_all = kind not in kinds and len(set(kinds)) < _MOST_GROUPS
        kinds.append(kind)
        like = [shape for shape in shapes if len(shape) in dimensions] or shapes
        for number, shape in enumerate(like if has_all else _FEW):
            slope = torch.linspace(0.5, 2.0, torch.Size(shape).numel()).view(shape)
            direction = torch.randn(shape, generator=generator)
            value = torch.randn(shape, generator=generator) * slope * (1.0, 0.02, 3.0, 0.2)[number]
            gradients = []
            for step in range(steps):
                noise = torch.randn(shape, generator=generator)
                # The last but one step has large gradients, to exceed thresholds of clipping.
                size = 10.0 ** (number - 2) * (30.0 if step == steps - 2 else 1.0 + 0.1 * step)
                gradient = (direction + 0.5 * noise) * slope * size
                if step == 0:  # Some optimizers drop the component along the parameter if it is small.
                    gradient -= value * (gradient * value).sum() / value.square().sum()
                    gradient += value * gradient.norm() / value.norm() * (0.05 / value.numel() ** 0.5)
                gradients.append(gradient.to(device))
            yield _Small(group, value.to(device), gradients)


def _flats(small: Sequence[_Small]) -> Iterator[_FlatPiece]:
    """Yield the pieces of joined parameters, each of one group."""
    for group in dict.fromkeys(each.group for each in small):
        own = [number for number, each in enumerate(small) if each.group == group]
        for first in range(0, len(own), _IN_A_FLAT):
            together = own[first : first + _IN_A_FLAT]
            yield _FlatPiece(tuple(together), 0, sum(_padded(small[k].value.numel()) for k in together))


def _halves(pieces: Sequence[_FlatPiece]) -> list[list[_FlatPiece]]:
    """Return the pieces of two ranks."""
    middles = [_padded(piece.end // 2) for piece in pieces]
    return [
        [_FlatPiece(piece.parameters, 0, middle) for piece, middle in zip(pieces, middles, strict=True)],
        [_FlatPiece(piece.parameters, middle, piece.end) for piece, middle in zip(pieces, middles, strict=True)],
    ]


def _padded(numel: int) -> int:
    return -(-numel // _ALIGNED) * _ALIGNED


def _is_number(value: Any) -> bool:
    """Return whether a checkpoint can store the value as a number."""
    return value is None or isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def _numbers_of(optimizer: Optimizer) -> _Numbers:
    return [
        {key: float(value) for key, value in group.items() if value is not None and _is_number(value)}
        for group in optimizer.param_groups
    ]


def _alike(some: _Numbers, others: _Numbers) -> bool:
    for own, theirs in zip(some, others, strict=True):
        if own.keys() != theirs.keys():
            return False
        for key, value in own.items():
            wanted = theirs[key]
            if not (value == wanted or value != value != wanted != wanted or abs(value - wanted) <= 1e-3 * abs(wanted)):
                return False
    return True


def require_base(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer after a check of its constructor.

    Args:
        optimizer: The user's optimizer.

    Raises:
        ConfigError: If its class has not called torch's constructor.
    """
    missing = [name for name in ("param_groups", "state", "_optimizer_step_pre_hooks") if not hasattr(optimizer, name)]
    if missing:
        raise ConfigError(
            f"optimizer: {type(optimizer).__name__}.__init__ has not called super().__init__(params, defaults), so it "
            f"has no {missing[0]}. Call it there, with the parameters that step() updates"
        )
    return optimizer


# ---- copies ----------------------------------------------------------------------------------------------------------


def _raised(optimizer: Optimizer) -> Optimizer:
    """Raise learning rates to a value that shows differences."""
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if isinstance(rate, int | float | Tensor) and not isinstance(rate, bool) and float(rate) < _LEAST_RATE:
            group["lr"] = torch.full_like(rate, _LEAST_RATE) if isinstance(rate, Tensor) else _LEAST_RATE
    return optimizer


def _copied(optimizer: Optimizer, represents: dict[int, Any]) -> Optimizer:
    """Return a copy without hooks and schedulers.

    `stands_for` maps the id of a tensor to its replacement. torch's own copy keeps only groups and states, also for an
    optimizer inside another one.
    """
    made = object.__new__(type(optimizer))
    represents[id(optimizer)] = made
    for inner in _optimizers_in(vars(optimizer)):
        if id(inner) not in represents:
            _copied(inner, represents)
    for name, value in vars(optimizer).items():
        if name == "step":  # A scheduler has wrapped `step`.
            continue
        is_hooks = name.startswith("_optimizer_") and name.endswith("_hooks")
        made.__dict__[name] = type(value)() if is_hooks else copy.deepcopy(value, represents)
    return made


def _optimizers_in(attributes: Mapping[str, Any]) -> Iterator[Optimizer]:
    for value in attributes.values():
        held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        yield from (each for each in held if isinstance(each, Optimizer))


# ---- restored state --------------------------------------------------------------------------------------------------


def _random_states() -> list[Any]:
    states: list[Any] = [torch.get_rng_state().tolist(), random.getstate()]
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states.append((kind, keys.tolist(), *rest))
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state().tolist())
    return states


@contextmanager
def _nothing_changes(device: torch.device) -> Iterator[None]:
    """Restore random states and warnings afterwards, and compile nothing for small tensors."""
    ours, numpy = random.getstate(), sys.modules.get("numpy")
    theirs = None if numpy is None else numpy.random.get_state()
    with ExitStack() as stack:
        stack.enter_context(unset_fake_temporarily())
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.no_grad())
        try:
            yield
        finally:
            random.setstate(ours)
            if numpy is not None:
                numpy.random.set_state(theirs)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200]
