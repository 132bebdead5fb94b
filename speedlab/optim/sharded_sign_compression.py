"""Signs where optimizer states are partitioned (ZeRO stage 1). Nobody but its owner knows a momentum and a variance, so
that no other rank can make an update of the mean momentum (`SignCompressedOptimizer`), and whole parameters would have
to travel. Two messages do here, too, as of arXiv:1905.05957: gradients to owners, changes of parameters from them.

1. Each rank sends the owners signs of its gradients, with error feedback ("worker's error": it keeps what they miss).
2. The owner adds the mean to beta1 · its momentum, and updates its masters.
3. It sends all ranks signs of what its masters have changed by, in which is what the last such signs missed: r. All
   ranks move their parameters by what was sent, the same bits; the owner's masters take the values that its parameters
   have then, and r is how far the update was from them. So between two steps nothing but r knows that masters were
   elsewhere: checkpoints, norms and evaluation see one model.

r is in the place of the server's error. Parameters narrower than their masters are rounded at random, alike on all
ranks (`round_stochastically`), where their dtype is bfloat16: their spacing is often more than an update. Elements of a
chunk have one magnitude, so what nothing updates (an infinite variance) moves by its neighbours' and back; changes at
rates far below others' are lifted to theirs while they travel (`lift`), and at a rate of 0 nothing moves.

With whole states a rank keeps beta1 · momentum in its error, and the server's error is one of a momentum. `restage`
makes one of the other where a run goes on with other partitions.
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
from speedlab.optim.compressed_optimizer import ExchangedState
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
    """An optimizer whose momenta travel as signs over whole states, and whose gradients and changes over partitioned
    ones. Each of `param_groups` has `partitioned`: as which of both is kept what is kept."""

    def __init__(self, params: Any, settings: OptimizerConfig) -> None:
        super().__init__(params, settings)
        self.publishes = False
        self._before_update: list[_FlatBefore] = []
        self._missed: list[Tensor] = []
        """r of all ranks, of each flat, which whole masters have not taken yet."""

    @property
    def communicates(self) -> bool:
        """Whether momenta are compressed in the next step."""
        raise NotImplementedError

    def prepare(self, flats: Sequence[ExchangedState]) -> None:
        """As of `SignCompressedOptimizer`; narrow parameters are rounded as they move."""
        super().prepare(flats)
        for each in flats:
            if not each.whole and each.parameters.device.type == "cpu":
                stochastic.warm(each.parameters.dtype)

    # ---- momenta while they travel -----------------------------------------------------------------------------------

    def _learn_weights(self, flats: Sequence[ExchangedState]) -> None:
        """Before momenta are asked for: by what they are multiplied while they travel. Collective."""

    def _add_lasting(self, each: ExchangedState, values: Tensor) -> Tensor:
        """Plus what the next momentum has of the last one, over the state range and as it travels, in place."""
        moment = each.moments.get("exp_avg")
        return values if moment is None else values.add_(moment, alpha=self.param_groups[0]["betas"][0])

    # ---- partitions that change --------------------------------------------------------------------------------------

    @torch.no_grad()
    def restage(self, flats: Sequence[ExchangedState], *, partitioned: bool) -> Callable[[], None]:
        """States are partitioned from now on, or whole: what is kept becomes what the next exchange wants. Called on
        all ranks alike, also on those without `flats`. Collective where something changes; where it raises, nothing
        has. What is returned takes it back, for an exchange that fails."""
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
        """Errors without momenta. The mean's is its owner's, times the ranks of the next mean."""
        gradient = each.gradient
        errors, own = gradient.kept[self.worker].clone(), slice(*gradient.own_range)
        lasting = torch.empty_like(errors)
        gradient.group.all_gather(lasting, self._add_lasting(each, torch.zeros_like(errors[own]))).wait()
        errors.sub_(lasting)
        errors[own].add_(gradient.kept[SERVER_ERROR], alpha=gradient.group.size)
        return errors, None

    def _momenta_of(self, each: ExchangedState) -> tuple[Tensor, Tensor]:
        """Errors plus momenta, and what changes have missed, which the masters are to take."""
        gradient = each.gradient
        missed = torch.empty_like(gradient.kept[self.worker])
        gradient.group.all_gather(missed, gradient.kept[SERVER_ERROR]).wait()
        return self._add_lasting(each, gradient.kept[self.worker].clone()), missed

    # ---- gradients to owners -----------------------------------------------------------------------------------------

    def _through_signs(
        self, flats: Sequence[ExchangedState], terms: list[Tensor], factor: float, share: float
    ) -> Tensor:
        """Where states are partitioned, 1: means come to their owners only, and the last momentum into them."""
        if flats[0].whole:
            return super()._through_signs(flats, terms, factor, share)
        gradients = [each.gradient for each in flats]
        worker = [gradient.kept[self.worker] for gradient in gradients]
        reduction = self._wires_of(gradients).reduce(terms, worker, factor=factor)
        squares = torch.zeros((), dtype=torch.float64, device=gradients[0].group.device)
        for gradient, term in zip(gradients, terms, strict=True):  # While they travel.
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
        """On all ranks, where one of them serves something that is not finite. It waits for the device."""
        broken = ~torch.stack([mean.sum() for mean in means]).isfinite()  # One pass, where each element's flag is two.
        if gradient.group.sum(broken.any().float()[None]).item():
            raise self._not_finite()

    def _as_they_are(self, flats: Sequence[ExchangedState], terms: list[Tensor], factor: float, share: float) -> Tensor:
        """The same without compression."""
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

    # ---- changes from them -------------------------------------------------------------------------------------------

    def _hold_masters(self, flats: Sequence[ExchangedState]) -> None:
        """Before an exchange: masters and parameters as they are before the update, where changes of them are sent."""
        self.publishes = self._signs and not flats[0].whole
        self._before_update = [_held(each) for each in flats] if self.publishes else []

    def _add_missed(self, flats: Sequence[ExchangedState]) -> None:
        """Behind an exchange. Where states are partitioned, r is in the masters while they are updated (2); where they
        have been until now, whole masters take it."""
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
                    if not self.publishes:  # Whole masters travel.
                        missed[here].zero_()

    def _stand_still(self, each: ExchangedState) -> set[int]:
        """Slots that this update does not move: that nobody used, or whose rate is 0."""
        rates = self._learning_rates(each)
        return {*each.unused} | {index for index, rate in enumerate(rates) if not rate}

    def _learning_rates(self, each: ExchangedState) -> list[float]:
        """Of each slot; every rank knows them."""
        return [float(self.param_groups[slot.group]["lr"]) for slot in each.gradient.slots]

    @torch.no_grad()
    def publish(self, flats: Sequence[ExchangedState], number: int) -> None:
        """Move the parameters of all ranks as masters were moved in update `number`, as signs, and masters to where
        parameters are (3). Collective. Raises NonFiniteError, on all ranks alike, where a change is not finite; masters
        were updated by then."""
        befores, self._before_update = self._before_update, []
        rates = [self._learning_rates(each) for each in flats]
        largest = max((rate for own in rates for rate in own), default=0.0)
        lifts = [{index: lift(rate, largest) for index, rate in enumerate(own)} for own in rates]
        moves = self._wires_of([each.gradient for each in flats]).spread(self._changes(flats, befores, lifts))
        if not moves.finite:
            raise self._moved_too_far()
        looks = "angle" in self._told
        wanted = [each.masters - before for each, (before, _) in zip(flats, befores, strict=True)] if looks else []
        squares = torch.zeros((), dtype=torch.float64, device=flats[0].gradient.group.device)
        for place, (each, held) in enumerate(zip(flats, befores, strict=True)):
            squares += self._move(each, held, partial(moves.decode, place), lifts[place], number)
        self._told["error_norm"] = (self._told["error_norm"] ** 2 + squares).sqrt()
        if looks:  # Neither rounding knows of the other.
            made = [each.masters - before for each, (before, _) in zip(flats, befores, strict=True)]
            second = angle_between(made, wanted, flats[0].gradient.group)
            cosines = [math.cos(math.radians(angle)) for angle in (float(self._told["angle"]), second)]
            self._told["angle"] = math.degrees(math.acos(math.prod(cosines)))

    @staticmethod
    def _changes(
        flats: Sequence[ExchangedState], befores: Sequence[_FlatBefore], lifts: Sequence[Mapping[int, float]]
    ) -> list[Tensor]:
        """Of masters, as they travel."""
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
        """Parameters are moved by what is decoded, from where they were before the update; masters follow, and what
        they were further is missed. The sum of its squares."""
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
        parameters[own] = held.parameters  # The update has written there: they are the masters, or rounded on its way.
        if parameters.dtype is torch.bfloat16:
            move += parameters
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
    """Of a flat, before an update."""

    masters: Tensor
    parameters: Tensor
    """This rank's slice; somebody may have written to narrower ones without the masters' knowing of it."""


def _held(each: ExchangedState) -> _FlatBefore:
    masters = each.masters.clone()
    if each.parameters.dtype == masters.dtype:
        return _FlatBefore(masters, masters)
    return _FlatBefore(masters, each.parameters[slice(*each.gradient.own_range)].clone())


def _take_missed(each: ExchangedState, missed: Tensor) -> None:
    """Into whole masters, on all ranks alike."""
    for index, slot in enumerate(each.gradient.slots):
        each.masters[slot.range].add_(missed[slot.range])
        if index in each.unused and each.parameters.dtype != each.masters.dtype:
            each.parameters[slot.range] = each.masters[slot.range]  # No update does it.
