"""One update: the torch optimizer steps over flats, and the parameters of each are on their way to the other ranks as
soon as it is updated. A fused optimizer is given segment by segment what it uses; for a plain one gradients in the
masters' dtype are laid at the masters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from speedlab.optim.fused import FusedOptimizer, LayerwiseOptimizer, UpdateInput
from speedlab.optim.lamb import ParameterSums
from speedlab.optim.optimizer_state import MasterSegment, OptimizerStates
from speedlab.parallel.zero import FlatParam, Gradient
from speedlab.parallel.zero.comm_groups import Work

_CAST_BYTES = 64 * 2**20
"""Gradients in low precision are widened for the update in pieces of this many bytes."""


_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def engine_hook(hook: _Hook) -> _Hook:
    """Mark a hook before an optimizer's step as the engine's own, which does not use `grad` of what it is given."""
    hook.is_engine_hook = True  # type: ignore[attr-defined]  # functions take attributes
    return hook


def has_hooks(optimizer: Optimizer) -> bool:
    """Whether a hook of the user's is called before a step."""
    hooks = optimizer._optimizer_step_pre_hooks.values()  # type: ignore[attr-defined]  # torch has no other way to ask
    return not all(getattr(hook, "is_engine_hook", False) for hook in hooks)


class FlatUpdate:
    """The update of some flats, made once."""

    def __init__(
        self,
        states: OptimizerStates,
        gradients: Mapping[str, Gradient],
        sums: ParameterSums,
        *,
        optimizer: Optimizer,
        number: int,
        flats: Sequence[FlatParam],
        ahead: FlatParam | None,
        publishes: bool,
        in_pieces: bool = True,
    ) -> None:
        """`gradients`: by names of flats. `optimizer`: what makes it, the inner one of `states`, or the same with the
        options of the step whose update it is. `number`: how many there were before. `flats`: those that are updated;
        `ahead`: the one that the next update begins with. `publishes`: whether parameters follow masters at all.
        `in_pieces`: whether `optimizer` may step for some flats, then for others."""
        self._states, self._gradients, self._sums = states, gradients, sums
        self._optimizer, self._number, self._flats, self._ahead = optimizer, number, flats, ahead
        self._stepping, self._publishes, self._in_pieces = False, publishes, in_pieces
        self._hooked = has_hooks(optimizer)

    def steps(self, optimizer: Optimizer) -> bool:
        """Whether the step of this optimizer that is under way is this update's."""
        return self._stepping and optimizer is self._optimizer

    @torch.no_grad()
    def make(self, factor: float, unused: Mapping[str, Collection[int]]) -> list[Work]:
        """Multiply gradients by `factor` and update the masters, without slots that are `unused`; parameters that are
        on their way to other ranks."""
        fused = isinstance(self._optimizer, FusedOptimizer)
        try:
            return self._make_fused(factor, unused) if fused else self._make_plain(factor, unused)
        except BaseException:
            self._states.end_visits()
            raise

    def _step_optimizer(self) -> None:
        self._stepping = True
        try:
            self._optimizer.step()
        finally:
            self._stepping = False

    def _published(self, flat: FlatParam, *, copied: bool = False) -> list[Work]:
        """The parameters of an updated flat, on their way to the other ranks; an update beside a step sends nothing."""
        work = None if flat.ahead or not self._publishes else flat.publish(copied=copied, update=self._number)
        return [] if work is None else [work]

    # ---- fused -------------------------------------------------------------------------------------------------------

    def _make_fused(self, factor: float, unused: Mapping[str, Collection[int]]) -> list[Work]:
        optimizer = self._optimizer
        assert isinstance(optimizer, FusedOptimizer)
        pending: list[Work] = []
        if isinstance(optimizer, LayerwiseOptimizer):
            self._measure(optimizer, factor, unused)
        given = self._given(factor, unused, pending)
        optimizer.given = given
        try:
            if self._hooked:  # They see gradients where torch has them.
                for flat in self._flats:
                    self._give_gradients(flat, factor, unused.get(flat.name, ()))
            self._step_optimizer()
        finally:
            optimizer.given = ()  # It holds gradients; those of an update that failed must not stay.
            given.close()
            if self._hooked:
                self._take_gradients(self._flats)
        return pending

    def _take_gradients(self, flats: Iterable[FlatParam]) -> None:
        for flat in flats:
            for segment in self._states.segments[flat.name]:
                segment.master.grad = None

    def _given(
        self, factor: float, unused: Mapping[str, Collection[int]], pending: list[Work]
    ) -> Generator[UpdateInput]:
        """Segment by segment what its update uses. Parameters of a flat are on their way to the other ranks, as
        `pending`, while the next flat is updated."""
        turns = list(self._turns(unused))
        following = [*(flats[0] for flats, _ in turns[1:]), self._ahead]
        for (flats, segments), ahead in zip(turns, following, strict=False):  # Of no turns there is one that follows.
            first = flats[0]
            with self._states.visit(first if segments else None, ahead, update=True):
                for segment in segments:
                    yield self._given_of(first, segment, factor)
                if segments:
                    self._states.adopt(first)
                for flat in flats:
                    untouched = flat is not first or not segments
                    # What was written anew has nothing of the parameters that nobody used.
                    partly = "parameter" in flat.offloaded and bool(unused.get(flat.name))
                    written = flat.written_by_update is not None and not partly
                    pending += self._published(flat, copied=untouched or written)

    def _given_of(self, flat: FlatParam, segment: MasterSegment, factor: float) -> UpdateInput:
        base, narrow = flat.state_range[0], flat.written_by_update
        here = slice(segment.start - base, segment.end - base)
        copy = None if narrow is None else narrow[here]
        number = self._sums.first[flat.name] + segment.first
        if self._hooked and segment.master.grad is not None:  # Hooks have had it; the factor is in it.
            return UpdateInput(segment.master, segment.master.grad, copy, 1.0, number)
        gradient = self._gradients[flat.name].update.to(segment.master.device)
        return UpdateInput(segment.master, gradient[here], copy, factor, number)

    def _measure(self, optimizer: LayerwiseOptimizer, factor: float, unused: Mapping[str, Collection[int]]) -> None:
        """What the update has to know of whole parameters, from the parts that ranks have. Collective."""
        group_of = {segment: group for group in optimizer.param_groups for segment in group["params"]}
        own = self._sums.zeros(optimizer.sums)
        for flats, segments in self._turns(unused):
            for segment in segments:
                given = self._given_of(flats[0], segment, factor)
                own[given.parameter] = optimizer.measure(given, group_of[segment.master])
        optimizer.learn(self._sums.over_ranks(own, optimizer.combine))

    def _turns(self, unused: Mapping[str, Collection[int]]) -> Iterator[tuple[list[FlatParam], list[MasterSegment]]]:
        """What is published together, and the segments of the first of these flats, after whose update that is done.

        All ranks publish in the order of flats. Behind one that is updated here come those of which this rank has only
        parameters that nobody used; such flats may also stand at the beginning, without segments."""
        flats: list[FlatParam] = []
        segments: list[MasterSegment] = []
        for flat in self._flats:
            left_out = unused.get(flat.name, ())
            own = [segment for segment in self._states.segments[flat.name] if segment.first not in left_out]
            if own:
                if flats:
                    yield flats, segments
                flats, segments = [flat], own
            elif len(left_out) < len(flat.slots):  # Else it changes on no rank.
                flats = [*flats, flat]
        if flats:
            yield flats, segments

    # ---- plain -------------------------------------------------------------------------------------------------------

    def _make_plain(self, factor: float, unused: Mapping[str, Collection[int]]) -> list[Work]:
        optimizer, every = self._optimizer, self._states.flats
        scales = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        scaled_inside = factor != 1.0 and scales and not self._hooked  # Hooks see gradients as they are.
        if scaled_inside:
            # A fused kernel divides by a scale on the way; it is handed over as torch's GradScaler does.
            scale = torch.full((), 1.0 / factor, device=every[0].master.device if every else "cpu")
            optimizer.grad_scale = scale  # type: ignore[attr-defined]  # see the line above
        try:
            return self._make_pieces(None if scaled_inside else factor, unused)
        finally:
            if scaled_inside:
                del optimizer.grad_scale  # type: ignore[attr-defined]  # as above

    def _make_pieces(self, factor: float | None, unused: Mapping[str, Collection[int]]) -> list[Work]:
        """`factor`: None where the optimizer scales by itself."""
        pending: list[Work] = []
        pieces = list(self._pieces())
        following = [*(flats[0] for flats in pieces[1:]), self._ahead]
        for flats, ahead in zip(pieces, following, strict=False):  # Of no pieces there is one that follows.
            with self._states.visit(flats[0], ahead, update=True):  # What lies away is a piece of its own.
                for flat in flats:
                    self._give_gradients(flat, factor, unused.get(flat.name, ()))
                self._step_optimizer()
                self._take_gradients(flats)
                for flat in flats:
                    self._states.adopt(flat)
                    pending += self._published(flat)
        return pending

    def _give_gradients(self, flat: FlatParam, factor: float | None, left_out: Collection[int]) -> None:
        gradient = self._gradients[flat.name].update.to(flat.master.device)
        if gradient.dtype != flat.master.dtype:
            gradient = gradient.to(flat.master.dtype)
        if factor is not None and factor != 1.0:
            gradient.mul_(factor)
        base = flat.state_range[0]
        for segment in self._states.segments[flat.name]:
            if segment.first not in left_out:
                segment.master.grad = gradient[segment.start - base : segment.end - base]

    def _pieces(self) -> Iterator[list[FlatParam]]:
        """All flats at once, or in pieces where a widened copy of the gradients has to be made, if the optimizer may
        step for each; one that lies away is a piece."""
        piece: list[FlatParam] = []
        held = 0
        for flat in self._flats:
            size = flat.master.nbytes if self._gradients[flat.name].dtype != flat.master.dtype else 0
            if piece and (flat.lies_away or (self._in_pieces and held + size > _CAST_BYTES)):
                yield piece
                piece, held = [], 0
            piece.append(flat)
            held += size
        if piece:
            yield piece
