"""Sign compression with partitioned optimizer states (ZeRO stage 1).

With partitioned states only the owner has momentum and variance. So no other rank can compute an update from a mean
momentum (`SignCompressedOptimizer`), and whole parameters would have to be sent. Instead there are two messages, as in
arXiv:1905.05957: gradients to owners, and parameter changes from owners.

1. Each rank sends signs of its gradients to the owners, with error feedback (the worker's error).
2. The owner adds beta1 · momentum to the mean, and updates its masters.
3. The owner sends signs of the change of its masters, plus r, the error of the last such message. All ranks apply equal
   changes to their parameters. The owner sets its masters to its parameters, and r is the remaining difference. So
   between two steps only r contains the difference: checkpoints, norms and evaluation see one model.

r is stored as the server's error. Special cases:

- bfloat16 parameters are rounded stochastically, equally on all ranks (`round_stochastically`), because their spacing
  is often larger than an update.
- Elements of a chunk share one magnitude. So an element that never updates (infinite variance) moves with its
  neighbours, and back.
- Changes at rates far below others are scaled up in the message (`lift`). At rate 0 nothing moves.

With whole states a rank keeps beta1 · momentum in its error, and the server's error is that of a momentum. `restage`
converts between the two if a run continues with another partition.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cuda_ops import stochastic
from speedlab.config import OptimizerConfig
from speedlab.optim.communicating_protocols import ExchangedState
from speedlab.optim.errors import NonFiniteError
from speedlab.optim.sign_compression import (
    SERVER_ERROR,
    SignCompressedOptimizer,
    angle_between,
    lift,
    served,
    square,
    take_means,
    whole_terms,
)
from speedlab.parallel.zero import Gradient


class ShardedSignCompression(SignCompressedOptimizer):
    """An optimizer that exchanges signs of momenta (whole states) or of gradients and changes (partitioned states).

    Each parameter group has `partitioned`: which of the two forms its extra tensors have.
    """

    def __init__(self, params: Any, settings: OptimizerConfig) -> None:
        super().__init__(params, settings)
        self.publishes = False
        self._before_update: list[_FlatBefore] = []
        self._missed: list[Tensor] = []
        """r of all ranks, per flat parameter, that whole masters have yet to add."""

    @property
    def communicates(self) -> bool:
        """Return whether momenta are compressed in the next step."""
        raise NotImplementedError

    def prepare(self, flats: Sequence[ExchangedState]) -> None:
        """Open connections and compile kernels, also for stochastic rounding of narrow parameters.

        Args:
            flats: The flat parameters.
        """
        super().prepare(flats)
        for each in flats:
            if not each.whole and each.parameters.device.type == "cpu":
                stochastic.warm(each.parameters.dtype)

    # ---- momenta in messages -----------------------------------------------------------------------------------------

    def _learn_weights(self, flats: Sequence[ExchangedState]) -> None:
        """Learn the factors on momenta in a message, before momenta are read. Collective."""

    def _add_lasting(self, each: ExchangedState, values: Tensor) -> Tensor:
        """Add beta1 · momentum over the state range, in place, with the factors of a message."""
        moment = each.moments.get("exp_avg")
        return values if moment is None else values.add_(moment, alpha=self.param_groups[0]["betas"][0])

    # ---- whole and partitioned states --------------------------------------------------------------------------------

    @torch.no_grad()
    def restage(self, flats: Sequence[ExchangedState], *, partitioned: bool) -> Callable[[], None]:
        """Convert extra tensors if states are now partitioned or whole. Collective if something changes.

        All ranks call this, also those without `flats`. An error leaves everything unchanged.

        Args:
            flats: The flat parameters.
            partitioned: Whether states are partitioned now.

        Returns:
            A function that undoes the conversion, for an exchange that fails.
        """
        before = self.param_groups[0]["partitioned"]
        kept = [dict(each.gradient.kept) for each in flats]
        if self.communicates and partitioned != before:
            self._learn_weights(flats)
            carried = [(self._errors_of if partitioned else self._momenta_of)(each) for each in flats]
            for each, (worker, _) in zip(flats, carried, strict=True):
                errors = each.gradient.kept[SERVER_ERROR]
                each.gradient.kept.update({self.worker: worker, SERVER_ERROR: torch.zeros_like(errors)})
            self._missed = [missed for _, missed in carried if missed is not None]
        self._phase(partitioned=partitioned)

        def take_back() -> None:
            for each, values in zip(flats, kept, strict=True):
                each.gradient.kept.update(values)
            self._missed = []
            self._phase(partitioned=before)

        return take_back

    def _errors_of(self, each: ExchangedState) -> tuple[Tensor, None]:
        """Return errors without momenta. The error of the mean goes to its owner, times the ranks of the next mean."""
        gradient = each.gradient
        errors, own = gradient.kept[self.worker].clone(), slice(*gradient.own_range)
        lasting = torch.empty_like(errors)
        gradient.group.all_gather(lasting, self._add_lasting(each, torch.zeros_like(errors[own]))).wait()
        errors.sub_(lasting)
        errors[own].add_(gradient.kept[SERVER_ERROR], alpha=gradient.group.size)
        return errors, None

    def _momenta_of(self, each: ExchangedState) -> tuple[Tensor, Tensor]:
        """Return (errors plus momenta, r, which the masters must add)."""
        gradient = each.gradient
        missed = torch.empty_like(gradient.kept[self.worker])
        gradient.group.all_gather(missed, gradient.kept[SERVER_ERROR]).wait()
        return self._add_lasting(each, gradient.kept[self.worker].clone()), missed

    # ---- 1: gradients to owners --------------------------------------------------------------------------------------

    def _through_signs(
        self, flats: Sequence[ExchangedState], terms: list[Tensor], factor: float, share: float
    ) -> Tensor:
        """Send gradients to owners as signs (1), and add the last momentum there, if states are partitioned."""
        if flats[0].whole:
            return super()._through_signs(flats, terms, factor, share)
        gradients = [each.gradient for each in flats]
        worker = [gradient.kept[self.worker] for gradient in gradients]
        reduction = self._wires_of(gradients).reduce(terms, worker, factor=factor)
        squares = torch.zeros((), dtype=torch.float64, device=gradients[0].group.device)
        for gradient, term in zip(gradients, terms, strict=True):  # This overlaps with the transfer.
            gradient.zero_gaps(term)
            squares += square(term)
        means = reduction.means()
        self._refuse_non_finite(gradients[0], means)
        for each, term, kept, mean in zip(flats, terms, worker, means, strict=True):
            each.gradient.zero_gaps(mean, each.gradient.own_range[0])
            kept.copy_(term)
            term[slice(*each.gradient.own_range)] = self._add_lasting(each, mean)
        return squares.sqrt()

    def _refuse_non_finite(self, gradient: Gradient, means: Sequence[Tensor]) -> None:
        """Raise on all ranks if a rank serves a value that is not finite. Causes a device sync."""
        # A sum needs one pass over memory; a flag per element needs two.
        broken = ~torch.stack([mean.sum() for mean in means]).isfinite()
        if gradient.group.sum(broken.any().float()[None]).item():
            raise self._not_finite()

    def _as_they_are(self, flats: Sequence[ExchangedState], terms: list[Tensor], factor: float, share: float) -> Tensor:
        """Exchange without compression."""
        if flats[0].whole:
            return super()._as_they_are(flats, terms, factor, share)
        for each, term in zip(flats, terms, strict=True):
            term.mul_(factor).add_(each.gradient.kept[self.worker])
        take_means(flats[0].gradient.group, terms)
        for each, term in zip(flats, terms, strict=True):
            each.gradient.kept[self.worker].zero_()
            self._add_lasting(each, term[slice(*each.gradient.own_range)])
        return torch.zeros((), dtype=torch.float64, device=flats[0].gradient.group.device)

    def _add_by_owner(self, each: ExchangedState, mean: Tensor) -> None:
        if each.whole:
            super()._add_by_owner(each, mean)
        else:
            self._add_lasting(each, mean)

    # ---- 3: changes from owners --------------------------------------------------------------------------------------

    def _hold_masters(self, flats: Sequence[ExchangedState]) -> None:
        """Store masters and parameters before the update, if changes of them will be sent."""
        self.publishes = self._signs and not flats[0].whole
        self._before_update = [_held(each) for each in flats] if self.publishes else []

    def _add_missed(self, flats: Sequence[ExchangedState]) -> None:
        """Add r to the masters after an exchange.

        With partitioned states, r is in the masters during the update (2). If states were partitioned until now, whole
        masters add r.
        """
        if self._missed:
            for each, missed in zip(flats, self._missed, strict=True):
                _take_missed(each, missed)
            self._missed = []
        for each in flats if not flats[0].whole else ():
            missed, still = each.gradient.kept[SERVER_ERROR], self._stand_still(each)
            for index, slot in enumerate(each.gradient.slots):
                here = served(each.gradient, slot.range)
                if index not in still:
                    each.masters[here].add_(missed[here])
                    if not self.publishes:  # Whole masters are sent.
                        missed[here].zero_()

    def _stand_still(self, each: ExchangedState) -> set[int]:
        """Return slots that this update does not move: unused ones, or those with rate 0."""
        rates = self._learning_rates(each)
        return {*each.unused} | {index for index, rate in enumerate(rates) if not rate}

    def _learning_rates(self, each: ExchangedState) -> list[float]:
        """Return the learning rate of each slot; every rank knows them."""
        return [float(self.param_groups[slot.group]["lr"]) for slot in each.gradient.slots]

    @torch.no_grad()
    def publish(self, flats: Sequence[ExchangedState], number: int) -> None:
        """Send the changes of the masters as signs, and set masters to the resulting parameters (3). Collective.

        Args:
            flats: The flat parameters.
            number: Number of the update.

        Raises:
            NonFiniteError: On all ranks, if a change is not finite. Masters are already updated then.
        """
        befores, self._before_update = self._before_update, []
        rates = [self._learning_rates(each) for each in flats]
        largest = max((rate for own in rates for rate in own), default=0.0)
        lifts = [{index: lift(rate, largest) for index, rate in enumerate(own)} for own in rates]
        moves = self._wires_of([each.gradient for each in flats]).spread(self._changes(flats, befores, lifts))
        if not moves.finite:
            raise self._moved_too_far()
        looks = "angle" in self._reported
        wanted = [each.masters - before for each, (before, _) in zip(flats, befores, strict=True)] if looks else []
        squares = torch.zeros((), dtype=torch.float64, device=flats[0].gradient.group.device)
        for place, (each, held) in enumerate(zip(flats, befores, strict=True)):
            squares += self._move(each, held, partial(moves.decode, place), lifts[place], number)
        self._reported["error_norm"] = (self._reported["error_norm"] ** 2 + squares).sqrt()
        if looks:  # The two rounding errors are independent, so cosines multiply.
            made = [each.masters - before for each, (before, _) in zip(flats, befores, strict=True)]
            second = angle_between(made, wanted, flats[0].gradient.group)
            cosines = [math.cos(math.radians(angle)) for angle in (float(self._reported["angle"]), second)]
            self._reported["angle"] = math.degrees(math.acos(math.prod(cosines)))

    @staticmethod
    def _changes(
        flats: Sequence[ExchangedState], befores: Sequence[_FlatBefore], lifts: Sequence[Mapping[int, float]]
    ) -> list[Tensor]:
        """Return the changes of masters, with the factors of the message."""
        changes = [each.masters - before for each, (before, _) in zip(flats, befores, strict=True)]
        for each, change, own in zip(flats, changes, lifts, strict=True):
            for index, factor in own.items():
                if factor != 1.0:
                    change[served(each.gradient, each.gradient.slots[index].range)] *= factor
        return changes

    def _move(
        self,
        each: ExchangedState,
        held: _FlatBefore,
        decode: Callable[[Tensor], None],
        lifts: Mapping[int, float],
        number: int,
    ) -> Tensor:
        """Apply the decoded change to the parameters, set masters to them, and store the difference as r.

        Returns the squared norm of r.
        """
        gradient, parameters, masters = each.gradient, each.parameters, each.masters
        missed, still = gradient.kept[SERVER_ERROR], self._stand_still(each)
        places = [served(gradient, gradient.slots[index].range) for index in still]
        stays = [(place, held.masters[place], missed[place].clone()) for place in places]
        missed.copy_(masters)
        move = whole_terms(gradient)
        decode(move)
        gradient.zero_gaps(move)
        for index, factor in lifts.items():
            if factor != 1.0:
                move[gradient.slots[index].range] /= factor
        for index in still:
            move[gradient.slots[index].range].zero_()
        own = slice(*gradient.own_range)
        parameters[own] = held.parameters  # The update wrote to this memory (it may be the masters' own).
        if parameters.dtype is torch.bfloat16:
            move += parameters
            # The same seed on all ranks, so that all of them round equally.
            seed = zlib.crc32(gradient.slots[0].name.encode())
            stochastic.round_stochastically(move, parameters, seed=seed, step=number, offset=0)
        else:
            parameters += move
        masters.copy_(parameters[own])
        missed.sub_(masters)
        for place, of_masters, of_missed in stays:
            masters[place], missed[place] = of_masters, of_missed
        return square(missed)

    def _moved_too_far(self) -> NonFiniteError:
        step = self._updates + 1
        return NonFiniteError(
            f"step {step}: a parameter, or what the update has moved it by, is not finite. Parameters of the ranks are "
            "those of before then, masters are not: go back with load_checkpoint, and lower optimizer.lr",
            step=step,
            ranks=[],
            tensors=[],
        )


class _FlatBefore(NamedTuple):
    """Values of a flat parameter before an update."""

    masters: Tensor
    parameters: Tensor
    """This rank's slice. The caller may have changed narrow parameters without changing the masters."""


def _held(each: ExchangedState) -> _FlatBefore:
    masters = each.masters.clone()
    if each.parameters.dtype == masters.dtype:
        return _FlatBefore(masters, masters)
    return _FlatBefore(masters, each.parameters[slice(*each.gradient.own_range)].clone())


def _take_missed(each: ExchangedState, missed: Tensor) -> None:
    """Add r to whole masters, on all ranks."""
    for index, slot in enumerate(each.gradient.slots):
        each.masters[slot.range].add_(missed[slot.range])
        if index in each.unused and each.parameters.dtype != each.masters.dtype:
            each.parameters[slot.range] = each.masters[slot.range]  # No update copies unused masters to the parameters.
