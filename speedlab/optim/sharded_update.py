"""One sharded update: the torch optimizer steps over flat parameters, and updated parameters are gathered at once.

1. A fused optimizer gets its inputs segment by segment (`UpdateInput`), and runs between the yields of `_given`.
2. A plain optimizer gets gradients in the masters' dtype as `.grad` of the masters.
3. While the next flat parameter is updated, the parameters of the last one are gathered.
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
from speedlab.parallel.zero.comm_groups import PendingWork

_CAST_BYTES = 64 * 2**20
"""Low-precision gradients are widened for the update in pieces of this many bytes."""


_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def engine_hook(hook: _Hook) -> _Hook:
    """Mark a pre-step hook of an optimizer as the engine's own, which does not read `.grad`.

    Args:
        hook: The hook.

    Returns:
        The same hook.
    """
    hook.is_engine_hook = True  # type: ignore[attr-defined]  # functions take attributes
    return hook


def has_hooks(optimizer: Optimizer) -> bool:
    """Return whether the user has registered a pre-step hook.

    Args:
        optimizer: Any torch optimizer.
    """
    hooks = optimizer._optimizer_step_pre_hooks.values()  # type: ignore[attr-defined]  # torch has no other way to ask
    return not all(getattr(hook, "is_engine_hook", False) for hook in hooks)


class FlatUpdate:
    """One update of some flat parameters."""

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
        """Prepare an update; `make` runs it.

        Args:
            states: The states and segments.
            gradients: Gradients by name of flat parameter.
            sums: Sums over whole parameters, for layer-wise optimizers.
            optimizer: The inner optimizer of `states`, or a copy with the options of its step.
            number: Number of earlier updates.
            flats: The flat parameters to update.
            ahead: The first flat parameter of the next update, whose states are prefetched.
            publishes: Whether updated masters are copied to the parameters.
            in_pieces: Whether `optimizer` may step for some flat parameters, then for others.
        """
        self._states, self._gradients, self._sums = states, gradients, sums
        self._optimizer, self._number, self._flats, self._ahead = optimizer, number, flats, ahead
        self._stepping, self._publishes, self._in_pieces = False, publishes, in_pieces
        self._hooked = has_hooks(optimizer)

    def steps(self, optimizer: Optimizer) -> bool:
        """Return whether this update runs the present step of an optimizer.

        Args:
            optimizer: The optimizer that steps.
        """
        return self._stepping and optimizer is self._optimizer

    @torch.no_grad()
    def make(self, factor: float, unused: Mapping[str, Collection[int]]) -> list[PendingWork]:
        """Update the masters and start the gathers of the parameters.

        Args:
            factor: Factor on the gradients.
            unused: Slots to leave unchanged, by name of flat parameter.

        Returns:
            The pending gathers.
        """
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

    def _published(self, flat: FlatParam, *, copied: bool = False) -> list[PendingWork]:
        """Start the gather of an updated flat parameter; a delayed update sends nothing."""
        work = None if flat.ahead or not self._publishes else flat.publish(copied=copied, update=self._number)
        return [] if work is None else [work]

    # ---- fused -------------------------------------------------------------------------------------------------------

    def _make_fused(self, factor: float, unused: Mapping[str, Collection[int]]) -> list[PendingWork]:
        optimizer = self._optimizer
        assert isinstance(optimizer, FusedOptimizer)
        pending: list[PendingWork] = []
        # First pass: sums over whole parameters. `_given` is the second pass.
        if isinstance(optimizer, LayerwiseOptimizer):
            self._measure(optimizer, factor, unused)
        given = self._given(factor, unused, pending)
        optimizer.given = given
        try:
            if self._hooked:  # Hooks see gradients at `.grad`, as in torch.
                for flat in self._flats:
                    self._give_gradients(flat, factor, unused.get(flat.name, ()))
            self._step_optimizer()
        finally:
            optimizer.given = ()  # The generator holds gradients; those of a failed update must be freed.
            given.close()
            if self._hooked:
                self._take_gradients(self._flats)
        return pending

    def _take_gradients(self, flats: Iterable[FlatParam]) -> None:
        for flat in flats:
            for segment in self._states.segments[flat.name]:
                segment.master.grad = None

    def _given(
        self, factor: float, unused: Mapping[str, Collection[int]], pending: list[PendingWork]
    ) -> Generator[UpdateInput]:
        """Yield the update inputs segment by segment.

        The parameters of a flat parameter are gathered, as `pending`, while the next flat parameter is updated.
        """
        turns = list(self._turns(unused))
        following = [*(flats[0] for flats, _ in turns[1:]), self._ahead]
        # Without turns, `following` still has one entry.
        for (flats, segments), ahead in zip(turns, following, strict=False):
            first = flats[0]
            with self._states.visit(first if segments else None, ahead, update=True):
                for segment in segments:
                    yield self._given_of(first, segment, factor)
                if segments:
                    self._states.adopt(first)
                for flat in flats:
                    # No parameter of these flat parameters was updated here, so there is nothing to copy.
                    untouched = flat is not first or not segments
                    # A freshly written buffer lacks the values of unused parameters.
                    partly = "parameter" in flat.offloaded and bool(unused.get(flat.name))
                    written = flat.written_by_update is not None and not partly
                    pending += self._published(flat, copied=untouched or written)

    def _given_of(self, flat: FlatParam, segment: MasterSegment, factor: float) -> UpdateInput:
        base, narrow = flat.state_range[0], flat.written_by_update
        here = slice(segment.start - base, segment.end - base)
        copy = None if narrow is None else narrow[here]
        number = self._sums.first[flat.name] + segment.first
        if self._hooked and segment.master.grad is not None:  # After hooks: their result already includes the factor.
            return UpdateInput(segment.master, segment.master.grad, copy, 1.0, number)
        gradient = self._gradients[flat.name].update.to(segment.master.device)
        return UpdateInput(segment.master, gradient[here], copy, factor, number)

    def _measure(self, optimizer: LayerwiseOptimizer, factor: float, unused: Mapping[str, Collection[int]]) -> None:
        """Reduce the sums that a layer-wise optimizer needs over whole parameters. Collective."""
        group_of = {segment: group for group in optimizer.param_groups for segment in group["params"]}
        own = self._sums.zeros(optimizer.sums)
        for flats, segments in self._turns(unused):
            for segment in segments:
                given = self._given_of(flats[0], segment, factor)
                own[given.parameter] = optimizer.measure(given, group_of[segment.master])
        optimizer.learn(self._sums.over_ranks(own, optimizer.combine))

    def _turns(self, unused: Mapping[str, Collection[int]]) -> Iterator[tuple[list[FlatParam], list[MasterSegment]]]:
        """Yield (flat parameters that are gathered together, segments of the first one).

        The gather starts after the update of these segments. All ranks gather in the order of flat parameters. A flat
        parameter that is updated here is followed by those with only unused parameters on this rank. Such flat
        parameters may also come first, without segments.
        """
        flats: list[FlatParam] = []
        segments: list[MasterSegment] = []
        for flat in self._flats:
            left_out = unused.get(flat.name, ())
            own = [segment for segment in self._states.segments[flat.name] if segment.first not in left_out]
            if own:
                if flats:
                    yield flats, segments
                flats, segments = [flat], own
            elif len(left_out) < len(flat.slots):  # Otherwise the flat parameter changes on no rank.
                flats = [*flats, flat]
        if flats:
            yield flats, segments

    # ---- plain -------------------------------------------------------------------------------------------------------

    def _make_plain(self, factor: float, unused: Mapping[str, Collection[int]]) -> list[PendingWork]:
        optimizer, every = self._optimizer, self._states.flats
        scales = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        scaled_inside = factor != 1.0 and scales and not self._hooked  # Hooks must see unscaled gradients.
        if scaled_inside:
            # A fused kernel of torch divides by `grad_scale`, which torch's GradScaler sets in the same way.
            scale = torch.full((), 1.0 / factor, device=every[0].master.device if every else "cpu")
            optimizer.grad_scale = scale  # type: ignore[attr-defined]  # see the line above
        try:
            return self._make_pieces(None if scaled_inside else factor, unused)
        finally:
            if scaled_inside:
                del optimizer.grad_scale  # type: ignore[attr-defined]  # as above

    def _make_pieces(self, factor: float | None, unused: Mapping[str, Collection[int]]) -> list[PendingWork]:
        """Update piece by piece. `factor` is None if the optimizer scales gradients itself."""
        pending: list[PendingWork] = []
        pieces = list(self._pieces())
        following = [*(flats[0] for flats in pieces[1:]), self._ahead]
        for flats, ahead in zip(pieces, following, strict=False):  # Without pieces, `following` still has one entry.
            with self._states.visit(flats[0], ahead, update=True):  # An offloaded flat parameter is its own piece.
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
        """Yield groups of flat parameters that are stepped together.

        All at once, or in pieces if gradients need a widened copy and the optimizer may step for each piece. An
        offloaded flat parameter is its own piece.
        """
        piece: list[FlatParam] = []
        held = 0
        for flat in self._flats:
            size = flat.master.nbytes if self._gradients[flat.name].dtype != flat.master.dtype else 0
            if piece and (flat.is_offloaded or (self._in_pieces and held + size > _CAST_BYTES)):
                yield piece
                piece, held = [], 0
            piece.append(flat)
            held += size
        if piece:
            yield piece
