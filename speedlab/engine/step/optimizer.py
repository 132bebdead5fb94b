"""Any elementwise torch optimizer, over the partitions of flats that a rank owns.

The optimizer sees one-dimensional float32 segments of master weights instead of parameters. Its state tensors of a
segment's shape are kept end to end in one tensor for each flat, so that they can be cut, gathered and written like it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cuda_ops import gpu
from cuda_ops.grad_stats import grad_stats
from speedlab.comm import Transfer
from speedlab.config import ConfigError, OptimizerConfig
from speedlab.engine.step.fused import FusedOptimizer, Given, fused_kind
from speedlab.parallel.zero import Flat, Residency

_CAST_BYTES = 64 * 2**20
"""Gradients in low precision are widened for the update in pieces of this many bytes."""

_NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon", "SparseAdam", "Shampoo", "SOAP", "LAMB", "Lamb")

OptimizerChoice = type[Optimizer] | Callable[..., Optimizer] | Optimizer | None


@dataclass(frozen=True)
class Segment:
    """Elements [start, end) of a flat that one optimizer group updates; `master` is a view of the flat's master."""

    start: int
    end: int
    group: int
    master: Tensor


class Recipe:
    """How to make the user's optimizer once there are segments, and which parameter is in which of its groups.

    Nothing but ids of parameters is kept of the model, so that a model on meta can be materialised in between.
    """

    def __init__(self, choice: OptimizerChoice, models: Iterable[nn.Module], config: OptimizerConfig) -> None:
        """`models`: the pipeline stages of this rank, or the whole model."""
        trainable = [p for model in models for p in model.parameters() if p.requires_grad]
        self._instance: Optimizer | None = None
        self._is_theirs = False
        self._make: Callable[[list[dict[str, Any]], bool], Optimizer]
        if choice is None:
            matrices = [p for p in trainable if p.ndim >= 2]
            others = [p for p in trainable if p.ndim < 2]
            groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
            groups = [group for group in groups if group["params"]]
            kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.SGD
            self._make = lambda segments, fusible: _construct(kind, segments, config, fusible)
        elif isinstance(choice, type):
            groups = [{"params": trainable}]
            self._make = lambda segments, fusible: _construct(choice, segments, config, fusible)
        else:
            instance = choice if isinstance(choice, Optimizer) else choice(trainable)
            if not isinstance(instance, Optimizer):
                raise ConfigError(
                    f"optimizer: the callable returned {type(instance).__name__}, not a torch.optim.Optimizer"
                )
            if instance.state:
                raise ConfigError(
                    "optimizer: it already has state; initialise first, and load state through load_checkpoint"
                )
            groups = [dict(group) for group in instance.param_groups]
            self._instance, self._is_theirs = instance, isinstance(choice, Optimizer)
        name = type(self._instance).__name__ if self._instance is not None else getattr(choice, "__name__", "")
        if name in _NOT_ELEMENTWISE:
            raise ConfigError(
                f"optimizer: {name} does not update each element by itself, so its states cannot be partitioned; use "
                f"AdamW or SGD"
            )
        known = {id(p) for p in trainable}
        strangers = sum(id(p) not in known for group in groups for p in group["params"])
        if strangers:
            raise ConfigError(
                f"optimizer: {strangers} of its parameters are not trainable parameters of the model; build it from "
                f"model.parameters()"
            )
        self.group_of = {id(p): index for index, group in enumerate(groups) for p in group["params"]}
        self._options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        left_out = len(known) - len(self.group_of)
        if left_out:
            # torch would silently never train them; as parameters of no group they are trained by nobody here either.
            raise ConfigError(
                f"optimizer: {left_out} trainable parameters are in none of its groups; add them or set "
                f"requires_grad=False"
            )

    def build(self, segments: list[list[Tensor]]) -> Optimizer:
        """The optimizer over `segments` (a list for each group). An instance that the user made stays the same object;
        what a callable made may be replaced by our fused class of the same kind."""
        groups = [{"params": tensors, **options} for tensors, options in zip(segments, self._options, strict=True)]
        fusible = all(_has_kernels(tensor) for tensors in segments for tensor in tensors)
        if self._instance is None:
            return self._make(groups, fusible)
        fused = fused_kind(type(self._instance), self._options) if fusible and not self._is_theirs else None
        if fused is not None:
            return fused(groups)
        for group, tensors in zip(self._instance.param_groups, segments, strict=True):
            group["params"] = tensors
        return self._instance


def _construct(
    kind: type[Optimizer], segments: list[dict[str, Any]], config: OptimizerConfig, fusible: bool
) -> Optimizer:
    fused = fused_kind(kind, [_arguments_for(kind, config)]) if fusible else None
    chosen: Callable[..., Optimizer] = fused or kind
    return chosen(segments, **_arguments_for(chosen, config))


def _arguments_for(kind: Callable[..., Optimizer], config: OptimizerConfig) -> dict[str, Any]:
    """The fields of `config` that this optimizer's constructor takes, and its fused kernel where it has one."""
    accepted = inspect.signature(kind).parameters
    arguments = {key: value for key, value in config.model_dump(exclude={"name"}).items() if key in accepted}
    if "fused" in accepted:
        arguments["fused"] = True
    return arguments


class PartitionedOptimizer:
    """The optimizer over what this rank owns. `inner` is the torch optimizer that schedulers and users see."""

    def __init__(self, flats: list[Flat], recipe: Recipe, duplicates: Collection[str] = ()) -> None:
        """`duplicates`: names of parameters whose gradients another rank counts in the norm."""
        self.flats = [flat for flat in flats if flat.trainable]
        self._group_count = len(recipe._options)
        self._counted = {flat.name: _owned_ranges(flat, duplicates) for flat in self.flats}
        """For each flat, the ranges [start, end) of it whose gradients this rank counts, of those in its partition."""
        self._segments = {flat.name: _cut(flat) for flat in self.flats}
        self.inner = recipe.build(self._by_group())
        self._states: dict[str, dict[str, Tensor]] = {flat.name: {} for flat in self.flats}
        """For each flat, its elementwise states (name → tensor over the flat's state range)."""

    def forget(self) -> None:
        """Drop every tensor; the optimizer is of no use afterwards."""
        self._segments.clear()
        self._states.clear()
        self.flats.clear()

    def _by_group(self) -> list[list[Tensor]]:
        groups: list[list[Tensor]] = [[] for _ in range(self._group_count)]
        for segments in self._segments.values():
            for segment in segments:
                groups[segment.group].append(segment.master)
        return groups

    def states_of(self, flat: Flat) -> dict[str, Tensor]:
        """Elementwise states of `flat` over its state range, by name ('exp_avg', …). Empty before the first step."""
        return self._states[flat.name]

    @property
    def state_bytes(self) -> int:
        """Bytes of all elementwise states."""
        return sum(state.nbytes for states in self._states.values() for state in states.values())

    def sum_of_squares(self) -> Tensor:
        """Of this rank's reduced gradient partitions, as a float64 scalar on the device; each parameter counts on one
        rank of the tensor and pipeline axes."""
        squares = [
            _squares(flat, flat.gradient[low - flat.start : high - flat.start])
            for flat in self.flats
            if flat.gradient is not None
            for low, high in self._counted[flat.name]
        ]
        return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)

    @torch.no_grad()
    def step(self, factor: float = 1.0) -> None:
        """Multiply gradients by `factor`, update the masters, and bring the parameters of all ranks up to date."""
        pending = self._step_fused(factor) if isinstance(self.inner, FusedOptimizer) else self._step_plain(factor)
        for work in pending:
            work.wait()
        self._adopt_states()

    def _step_fused(self, factor: float) -> list[Transfer]:
        assert isinstance(self.inner, FusedOptimizer)
        for flat in self.flats:
            gradient, narrow, base = flat.update_gradient, flat.narrow, flat.state_range[0]
            for segment in self._segments[flat.name]:
                here = slice(segment.start - base, segment.end - base)
                copy = None if narrow is None else narrow[here]
                self.inner.given[segment.master] = Given(gradient[here], copy, factor)
        self.inner.step()
        self.inner.given.clear()
        return [work for flat in self.flats if (work := flat.publish(copied=True)) is not None]

    def _step_plain(self, factor: float) -> list[Transfer]:
        scaled_inside = factor != 1.0 and bool(getattr(self.inner, "_step_supports_amp_scaling", False))
        if scaled_inside:
            # A fused kernel divides by a scale on the way; it is handed over as torch's GradScaler does.
            scale = torch.full((), 1.0 / factor, device=self.flats[0].full.device if self.flats else "cpu")
            self.inner.grad_scale = scale  # type: ignore[attr-defined]  # see the line above
        pending: list[Transfer] = []
        for flats in self._pieces():
            for flat in flats:
                gradient = flat.update_gradient
                if gradient.dtype != flat.master.dtype:
                    gradient = gradient.to(flat.master.dtype)
                if factor != 1.0 and not scaled_inside:
                    gradient.mul_(factor)
                base = flat.state_range[0]
                for segment in self._segments[flat.name]:
                    segment.master.grad = gradient[segment.start - base : segment.end - base]
            self.inner.step()
            for flat in flats:
                for segment in self._segments[flat.name]:
                    segment.master.grad = None
                published = flat.publish()
                if published is not None:
                    pending.append(published)
        if scaled_inside:
            del self.inner.grad_scale  # type: ignore[attr-defined]  # as above
        return pending

    def _pieces(self) -> Iterator[list[Flat]]:
        """All flats at once, or in pieces where a widened copy of the gradients has to be made."""
        piece: list[Flat] = []
        held = 0
        for flat in self.flats:
            size = flat.master.nbytes if flat.update_gradient.dtype != flat.master.dtype else 0
            if piece and held + size > _CAST_BYTES:
                yield piece
                piece, held = [], 0
            piece.append(flat)
            held += size
        if piece:
            yield piece

    def _adopt_states(self) -> None:
        """Lay states that the optimizer has newly made end to end, one tensor for each flat; the optimizer keeps
        views."""
        for flat in self.flats:
            segments = self._segments[flat.name]
            for key, value in list(self.inner.state.get(segments[0].master, {}).items()) if segments else ():
                if not _elementwise(value, segments[0]) or key in self._states[flat.name]:
                    continue
                parts = [self.inner.state[segment.master][key] for segment in segments]
                whole = parts[0] if len(parts) == 1 else torch.cat(parts)
                self._states[flat.name][key] = whole
                self._hand_out(flat, key, whole)

    def _hand_out(self, flat: Flat, key: str, whole: Tensor) -> None:
        base = flat.state_range[0]
        for segment in self._segments[flat.name]:
            self.inner.state[segment.master][key] = whole[segment.start - base : segment.end - base]

    def scalars_of(self, flat: Flat) -> dict[int, dict[str, Any]]:
        """For each optimizer group of `flat`, the states that are not elementwise ('step')."""
        found: dict[int, dict[str, Any]] = {}
        for segment in self._segments[flat.name]:
            state = self.inner.state.get(segment.master, {})
            found[segment.group] = {key: value for key, value in state.items() if not _elementwise(value, segment)}
        return found

    def rebuild(self, flat_states: dict[str, dict[str, Tensor]], scalars: dict[str, dict[int, dict[str, Any]]]) -> None:
        """After flats have moved or were loaded: segments over the new masters, with the given states.

        `flat_states`: flat name → state name → tensor over the flat's present state range; `scalars` as `scalars_of`
        gives
        them. A group that had no segment here before takes the scalars of any other: all groups step together.
        """
        self._segments = {flat.name: _cut(flat) for flat in self.flats}
        for group, tensors in zip(self.inner.param_groups, self._by_group(), strict=True):
            group["params"] = tensors
        self.inner.state.clear()
        self._states = flat_states
        common = next((state for groups in scalars.values() for state in groups.values() if state), {})
        for flat in self.flats:
            for segment in self._segments[flat.name]:
                own = scalars.get(flat.name, {}).get(segment.group) or common
                copied = {key: value.clone() if isinstance(value, Tensor) else value for key, value in own.items()}
                if copied or flat_states[flat.name]:
                    self.inner.state[segment.master].update(copied)
            for key, whole in flat_states[flat.name].items():
                self._hand_out(flat, key, whole)

    def move(self, before: Residency) -> None:
        """Follow flats that were placed elsewhere; `before` is where they were. Collective when states come
        together."""
        scalars = {flat.name: self.scalars_of(flat) for flat in self.flats}
        moved = {
            flat.name: {key: flat.move_state(state, before) for key, state in self._states[flat.name].items()}
            for flat in self.flats
        }
        self.rebuild(moved, scalars)


def _cut(flat: Flat) -> list[Segment]:
    """The flat's state range, cut where its optimizer group changes."""
    low, high = flat.state_range
    starts: list[tuple[int, int]] = []
    for slot in flat.slots:
        if not starts or starts[-1][1] != slot.group:
            starts.append((slot.offset, slot.group))
    segments = []
    for index, (start, group) in enumerate(starts):
        end = starts[index + 1][0] if index + 1 < len(starts) else flat.padded
        first, last = max(start, low), min(end, high)
        if first < last:
            segments.append(Segment(first, last, group, flat.master[first - low : last - low]))
    return segments


def _owned_ranges(flat: Flat, duplicates: Collection[str]) -> list[tuple[int, int]]:
    """The flat's partition without the parameters in `duplicates`; neighbours are one range."""
    ranges, start = [], flat.start
    for slot in flat.slots:
        if slot.name in duplicates:
            ranges.append((start, slot.offset))
            start = max(start, slot.offset + slot.numel)
    ranges.append((start, flat.end))
    return [(low, min(high, flat.end)) for low, high in ranges if low < min(high, flat.end)]


def _squares(flat: Flat, gradient: Tensor) -> Tensor:
    if _has_kernels(flat.master):
        return grad_stats(gradient)[0]
    wide = torch.float32 if gradient.dtype.itemsize < 8 else torch.float64
    return torch.linalg.vector_norm(gradient, dtype=wide).double().square()


def _has_kernels(master: Tensor) -> bool:
    """Whether cuda_ops updates such masters here: float32, on a CPU or where the compiler for GPUs is installed."""
    return master.dtype is torch.float32 and (master.device.type == "cpu" or gpu.available())


def _elementwise(value: Any, segment: Segment) -> bool:
    return isinstance(value, Tensor) and value.ndim == 1 and value.shape == segment.master.shape
