"""Signs where optimizer states are partitioned (ZeRO stage 1). Nobody but its owner knows a momentum and a variance, so
that no other rank can make an update of the mean momentum (`SendsSigns`), and whole parameters would have to travel.
Two messages do here, too, as of arXiv:1905.05957: gradients to owners, changes of parameters from them.

1. Each rank sends the owners signs of its gradients, with error feedback ("worker's error": it keeps what they miss).
2. The owner adds the mean to beta1 · its momentum, and updates its masters.
3. It sends all ranks signs of what its masters have changed by, in which is what the last such signs missed: r. All
   ranks move their parameters by what was sent, the same bits; the owner's masters take the values that its parameters
   have then, and r is how far the update was from them. So between two steps nothing but r knows that masters were
   elsewhere: checkpoints, norms and evaluation see one model.

r is in the place of the server's error. Parameters narrower than their masters are rounded at random, alike on all
ranks (`round_stochastically`), where their dtype is bfloat16: their spacing is often more than an update. Elements of a
chunk have one magnitude, so what nothing updates (an infinite variance) moves by its neighbours' and back.

With whole states a rank keeps beta1 · momentum in its error, and the server's error is one of a momentum. `restage`
makes one of the other where a run goes on with other partitions.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cuda_ops import stochastic
from speedlab.config import OptimizerConfig
from speedlab.engine.step.communicating import Exchanged
from speedlab.engine.step.sends_signs import (
    SERVER_ERROR,
    SendsSigns,
    angle_between,
    put_back,
    served,
    square,
    take_means,
    whole_terms,
)
from speedlab.parallel.zero import Gradient


class ToOwners(SendsSigns):
    """An optimizer whose momenta travel as signs over whole states, and whose gradients and changes over partitioned
    ones. Each of `param_groups` has `partitioned`: as which of both is kept what is kept."""

    def __init__(self, params: Any, settings: OptimizerConfig) -> None:
        super().__init__(params, settings)
        self.publishes = False
        self._before_update: list[Tensor] = []
        """Masters of each flat, as parameters show them."""

    @property
    def communicates(self) -> bool:
        """Whether momenta are compressed in the next step."""
        raise NotImplementedError

    def prepare(self, flats: Sequence[Exchanged]) -> None:
        """As of `SendsSigns`; narrow parameters are rounded as they move."""
        super().prepare(flats)
        for each in flats:
            if not each.whole and each.parameters.device.type == "cpu":
                stochastic.warm(each.parameters.dtype)

    # ---- momenta while they travel -----------------------------------------------------------------------------------

    def _learn_weights(self, flats: Sequence[Exchanged]) -> None:
        """Before momenta are asked for: by what they are multiplied while they travel. Collective."""

    def _add_lasting(self, each: Exchanged, values: Tensor) -> Tensor:
        """Plus what the next momentum has of the last one, over the state range and as it travels, in place."""
        moment = each.moments.get("exp_avg")
        return values if moment is None else values.add_(moment, alpha=self.param_groups[0]["betas"][0])

    # ---- partitions that change --------------------------------------------------------------------------------------

    @torch.no_grad()
    def restage(self, flats: Sequence[Exchanged], *, partitioned: bool) -> None:
        """States are partitioned from now on, or whole: what is kept becomes what the next exchange wants. Called on
        all ranks alike, also on those without `flats`. Collective where something changes."""
        if self.communicates and partitioned != self.param_groups[0]["partitioned"]:
            self._learn_weights(flats)
            for each in flats:
                (self._carry_errors if partitioned else self._carry_momenta)(each)
                each.gradient.kept[SERVER_ERROR].zero_()
        self._phase(partitioned=partitioned)

    def _carry_errors(self, each: Exchanged) -> None:
        """Errors without momenta. The mean's is its owner's, times the ranks of the next mean."""
        gradient = each.gradient
        errors, own = gradient.kept[self.worker], slice(*gradient.own_range)
        lasting = torch.empty_like(errors)
        gradient.group.all_gather(lasting, self._add_lasting(each, torch.zeros_like(errors[own]))).wait()
        errors.sub_(lasting)
        errors[own].add_(gradient.kept[SERVER_ERROR], alpha=gradient.group.size)

    def _carry_momenta(self, each: Exchanged) -> None:
        """Errors plus momenta; what changes have missed is the masters'."""
        gradient = each.gradient
        self._add_lasting(each, gradient.kept[self.worker])
        missed = torch.empty_like(gradient.kept[self.worker])
        gradient.group.all_gather(missed, gradient.kept[SERVER_ERROR]).wait()
        for index, slot in enumerate(gradient.slots):
            if index not in each.unused:
                each.masters[slot.range].add_(missed[slot.range])

    # ---- gradients to owners -----------------------------------------------------------------------------------------

    def _through_signs(self, flats: Sequence[Exchanged], terms: list[Tensor], factor: float, share: float) -> Tensor:
        """Where states are partitioned, 1: means come to their owners only, and the last momentum into them."""
        if flats[0].whole:
            return super()._through_signs(flats, terms, factor, share)
        gradients = [each.gradient for each in flats]
        worker = [gradient.kept[self.worker] for gradient in gradients]
        means = self._wires_of(gradients).reduce(terms, worker, factor=factor)
        self._refuse_non_finite(gradients[0], means)
        squares = torch.zeros((), dtype=torch.float64, device=gradients[0].group.device)
        for each, term, kept, mean in zip(flats, terms, worker, means, strict=True):
            each.gradient.zero_gaps(term)
            each.gradient.zero_gaps(mean, each.gradient.own_range[0])
            kept.copy_(term)
            squares += square(term)
            term[slice(*each.gradient.own_range)] = self._add_lasting(each, mean)
        return squares.sqrt()

    def _refuse_non_finite(self, gradient: Gradient, means: Sequence[Tensor]) -> None:
        """On all ranks, where one of them serves something that is not finite. It waits for the device."""
        broken = ~torch.stack([mean.sum() for mean in means]).isfinite()  # One pass, where each element's flag is two.
        if gradient.group.sum(broken.any().float()[None]).item():
            raise self._not_finite()

    def _as_they_are(self, flats: Sequence[Exchanged], terms: list[Tensor], factor: float, share: float) -> Tensor:
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

    def _add_by_owner(self, each: Exchanged, mean: Tensor) -> None:
        if each.whole:
            super()._add_by_owner(each, mean)
        else:
            self._add_lasting(each, mean)

    # ---- changes from them -------------------------------------------------------------------------------------------

    def _add_missed(self, flats: Sequence[Exchanged]) -> None:
        """Where states are partitioned: r is in the masters while they are updated (2)."""
        partitioned = not flats[0].whole
        self.publishes = partitioned and self._signs
        self._before_update = [each.masters.clone() for each in flats] if self.publishes else []
        for each in flats if partitioned else ():
            missed = each.gradient.kept[SERVER_ERROR]
            for index, slot in enumerate(each.gradient.slots):
                here = served(each.gradient, slot.range)
                if index not in each.unused:
                    each.masters[here].add_(missed[here])
                    if not self.publishes:  # Whole masters travel.
                        missed[here].zero_()

    @torch.no_grad()
    def publish(self, flats: Sequence[Exchanged], number: int) -> None:
        """Move the parameters of all ranks as masters were moved in update `number`, as signs, and masters to where
        parameters are (3). Collective."""
        befores, self._before_update = self._before_update, []
        wires = self._wires_of([each.gradient for each in flats])
        moves = wires.spread([each.masters - before for each, before in zip(flats, befores, strict=True)])
        stays = self._kept_of_unused(flats)
        made, wanted = list[Tensor](), list[Tensor]()
        squares = torch.zeros((), dtype=torch.float64, device=flats[0].gradient.group.device)
        for number_of_flat, (each, before) in enumerate(zip(flats, befores, strict=True)):
            masters, missed = each.masters, each.gradient.kept[SERVER_ERROR]
            missed.copy_(masters)
            if "angle" in self._told:
                wanted.append(missed - before)
            _move(each, before, partial(moves.decode, number_of_flat), number)
            missed.sub_(masters)
            squares += square(missed)
            if "angle" in self._told:
                made.append(masters - before)
        put_back(stays)
        self._told["error_norm"] = (self._told["error_norm"] ** 2 + squares).sqrt()
        if "angle" in self._told:  # Neither rounding knows of the other.
            second = angle_between(made, wanted, flats[0].gradient.group)
            cosines = [math.cos(math.radians(angle)) for angle in (float(self._told["angle"]), second)]
            self._told["angle"] = math.degrees(math.acos(math.prod(cosines)))


def _move(each: Exchanged, before: Tensor, decode: Callable[[Tensor], None], number: int) -> None:
    """Parameters are moved by what is decoded, from where this rank's were `before` the update; masters follow."""
    gradient, parameters = each.gradient, each.parameters
    move = whole_terms(gradient)
    decode(move)
    gradient.zero_gaps(move)
    for index in each.unused:
        move[gradient.slots[index].range].zero_()
    own = slice(*gradient.own_range)
    parameters[own] = before  # The update has written there: they are the masters, or rounded on its way.
    if parameters.dtype is torch.bfloat16:
        move += parameters
        seed = zlib.crc32(gradient.slots[0].name.encode())
        stochastic.round_stochastically(move, parameters, seed=seed, step=number, offset=0)
    else:
        parameters += move
    each.masters.copy_(parameters[own])
