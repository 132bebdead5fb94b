"""0/1 Adam (arXiv:2202.06009, algorithm 1): rare variance updates, 1-bit momenta in between, and local steps.

Once the variance is frozen, most steps are local: they exchange nothing.

1. WHOLE steps (`StepPolicy`): the engine reduces and clips gradients. Until the first step of another kind this is
   AdamW to the bit. Later, the update uses the old variance, which takes the gradient afterwards. Bias correction of
   the variance uses the number of its updates; that of the momentum uses all steps.
2. All other steps: each rank's own momentum mᵢ = beta1 m + (1 - beta1) gᵢ moves its parameters by rate mᵢ / D, with
   rate = lr / (1 - beta1ᵗ) and D = √v + eps. The same rate mᵢ is added to the send buffer uᵢ. Nothing is clipped.
3. SIGNS steps: u, the mean of uᵢ, is exchanged as signs with error feedback on both sides (`SignMeans`). After local
   steps, parameters first return to the anchor, their values at the last exchange. All ranks subtract u / D there and
   take u / Σ rate as momentum, with equal bits.

Weight decay is decoupled from gradients, also over several steps. With share = Π (1 - lr weight_decay) after the
anchor, parameters are share (anchor - Σ (rate / share) mᵢ / D), so u is summed with rate / share.

Special cases:

- The variance has the floor of 1-bit Adam (`_raise_to_floor`) after each WHOLE step before a step of another kind.
- An element without a gradient so far has rate 0.
- In steps of kind 2 an unused parameter has gradient 0: its signs are sent anyway, and it must follow the anchor.
- With one rank all updates are exact and nothing is sent.
- Error feedback scales with the rates of its interval. If rates fall to 1/FAR or less, an old error would dominate u,
  and u / Σ rate would be no momentum. So errors are rescaled with the rates (`_revalue`), in both directions.
- Elements of a chunk share one magnitude. Parameters whose Σ rate is far below that of others are scaled up for the
  exchange (`_exchange_sums`).

Between two exchanges a rank keeps its error plus uᵢ ("to_send", the whole flat parameter) and the error of the mean
that it serves ("server_error"). `meet` ends an interval early, for callers that need one model.

`StepPolicy` says what each step does, by its number from 1 on (arXiv:2202.06009, section 6).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import Tensor

from cuda_ops.adam_frozen_variance import adam_frozen
from speedlab.comm import Group
from speedlab.config import OptimizerConfig
from speedlab.optim.communicating_protocols import ExchangedState
from speedlab.optim.fused import FusedAdamW, UpdateInput
from speedlab.optim.sign_compression import FAR, SERVER_ERROR, SignCompressedOptimizer, lift, served, whole_terms
from speedlab.parallel.zero import Gradient
from speedlab.placement import Replication, StatePlacement


class StepKind(Enum):
    """What the ranks exchange in a step."""

    WHOLE = "gradients, whole; the variance is updated"
    SIGNS = "signs of the momenta of all steps since the last exchange"
    NOTHING = "nothing: a step of each rank's own"


@dataclass(frozen=True, kw_only=True)
class StepPolicy:
    """The schedule of variance updates and exchanges in a run."""

    freeze_step: int | None
    """Last step that may update the variance; None: every step may."""
    variance_doubling: int
    """Number of variance updates before their interval doubles."""
    local_doubling: int
    """Steps after `freeze_step` before the interval of exchanges doubles."""
    max_local_steps: int
    """Largest interval of exchanges, in steps."""

    @property
    def plain(self) -> int:
        """Return the number of steps at the beginning that are all WHOLE."""
        return self.variance_doubling if self.freeze_step is None else min(self.freeze_step, self.variance_doubling)

    def kind(self, step: int) -> StepKind:
        """Return what the ranks exchange in a step.

        Args:
            step: Number of the step, from 1.
        """
        if self.freeze_step is None or step <= self.freeze_step:
            return StepKind.WHOLE if self._updates_variance(step) else StepKind.SIGNS
        return StepKind.NOTHING if step % self.distance(step) else StepKind.SIGNS

    def distance(self, step: int) -> int:
        """Return the interval of exchanges, in steps.

        Args:
            step: Number of the step, from 1.
        """
        if self.freeze_step is None or step <= self.freeze_step:
            return 1
        doublings = min((step - self.freeze_step - 1) // self.local_doubling, self.max_local_steps.bit_length())
        return min(self.max_local_steps, 2**doublings)

    def to_exchange(self, step: int) -> int:
        """Return the number of steps until the next exchange of signs.

        Args:
            step: Number of the step, from 1.
        """
        found = step + 1
        while self.kind(found) is not StepKind.SIGNS:
            found += 1
        return found - step

    def _updates_variance(self, step: int) -> bool:
        """Return whether `step` updates the variance: at multiples of an interval that starts at 1 and doubles."""
        distance, following = 1, 0
        while True:
            first = following // distance + 1
            following = distance * (first + self.variance_doubling - 1)
            if step <= following:
                return step % distance == 0
            distance *= 2


TO_SEND = "to_send"

_LEAST_RATE = 1e-12
"""Smallest learning rate. A sum of momenta could not be divided by a rate of 0. This rate changes no float32 value."""


class ZeroOneAdam(SignCompressedOptimizer):
    """AdamW that updates its variance rarely and whose ranks exchange rarely."""

    kept: ClassVar[Mapping[str, StatePlacement]] = {
        TO_SEND: StatePlacement(holders=Replication.OWN, form="float32"),
        SERVER_ERROR: StatePlacement(holders=Replication.OWN_PART, form="float32"),
    }
    worker: ClassVar[str] = TO_SEND

    def __init__(self, params: Any, settings: OptimizerConfig) -> None:
        super().__init__(params, settings)
        self._steps = StepPolicy(
            freeze_step=settings.freeze_step,
            variance_doubling=settings.variance_doubling,
            local_doubling=settings.local_doubling,
            max_local_steps=settings.max_local_steps,
        )
        self._alone = False
        """Whether there is only one rank; known after the first exchange."""
        self._to_send: dict[Tensor, Tensor] = {}
        """The send buffer of each segment in this step."""
        self._lifted: list[tuple[Gradient, slice, float]] = []
        """Ranges that are scaled up in this exchange, with their factors."""
        self.replicas_differ = False
        self.begin_again()

    # ---- the phase ---------------------------------------------------------------------------------------------------

    @property
    def needs(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the optimizer states of AdamW, plus the anchor if there are local steps."""
        return FusedAdamW.needs if self._steps.freeze_step is None else FusedAdamW.needs | {"anchor"}

    @property
    def _kind(self) -> StepKind:
        """Return the kind of this step; between two steps, of the next one."""
        return self._steps.kind(self._updates + 1)

    @property
    def communicates(self) -> bool:
        """Return whether the optimizer reduces the gradients of the next step, which does not update the variance."""
        return self._kind is not StepKind.WHOLE

    @property
    def keeps(self) -> bool:
        """Return whether signs were sent, or will be in the next step."""
        return self._updates >= self._steps.plain

    def begin_again(self) -> None:
        """Restart the schedule at the first step."""
        self.replicas_differ = False
        self._phase(updates=0)
        for state in self.state.values():
            _begin_interval(state)

    @torch.no_grad()
    def updated(self, flats: Sequence[ExchangedState], everyone: Group) -> None:
        """Count an update. Before a step of another kind, raise the updated variance to its floor.

        Args:
            flats: The flat parameters.
            everyone: All ranks.
        """
        step = self._updates + 1
        self._phase(updates=step)
        self._to_send = {}
        if self._steps.kind(step) is not StepKind.WHOLE:
            return
        self._reported = {"compressed": 0.0}
        if step > self._steps.plain:
            self._reported["variance_updated"] = 1.0
        if not self.communicates:
            return
        for each in flats:
            variance = each.moments.get("exp_avg_sq")
            if variance is not None:
                variance.masked_fill_(variance.isinf(), 0.0)
            self._raise_to_floor(each, variance)

    # ---- the exchange ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def exchange(self, flats: Sequence[ExchangedState], factor: float) -> None:  # 2
        """Replace each gradient by this rank's momentum, or in SIGNS steps by the mean over the ranks.

        Args:
            flats: The flat parameters.
            factor: Factor on the summed gradient.
        """
        if not flats:
            return
        step, size, beta1 = self._updates + 1, flats[0].gradient.group.size, self.param_groups[0]["betas"][0]
        self._alone = size == 1
        self._reported = {"compressed": 1.0}
        group_of = self._group_of()
        if not self._alone:
            self._revalue(flats)
        for each in flats:
            terms = whole_terms(each.gradient)
            for segment, here in _places(each):
                state = self.state.get(segment) or _UNBORN
                sent = self._kind is StepKind.SIGNS and not self._alone
                weight = self._rates(state, group_of[segment], ahead=1)[0] if sent else 1.0
                # Times `size`, because the exchange takes the mean over ranks, and the gradient is a sum.
                terms[here].mul_((1 - beta1) * factor * size * weight)
                if "exp_avg" in state:
                    terms[here].add_(state["exp_avg"], alpha=beta1 * weight)
                self._to_send[segment] = each.gradient.kept[TO_SEND][here]
        if self._alone:
            return
        if self._steps.freeze_step is not None and step > self._steps.freeze_step:
            self._reported["steps_to_exchange"] = self._steps.to_exchange(step)
        if self._kind is StepKind.SIGNS:  # 3
            states = {segment: self.state.get(segment) or _UNBORN for segment in group_of}
            self._exchange_sums(flats, {s: self._rates(own, group_of[s], ahead=1)[2] for s, own in states.items()})
        elif self._signs:
            self._tell_bytes(flats, sent=False)

    def _revalue(self, flats: Sequence[ExchangedState]) -> None:
        """Rescale errors if an interval begins with rates far from those of the last one.

        Powers of two avoid rounding.
        """
        group_of = self._group_of()
        for each in flats:
            kept = each.gradient.kept
            for segment, here in _places(each):
                state = self.state.get(segment) or _UNBORN
                # Older checkpoints have no "worth".
                before, now = float(state.get("worth", 0.0)), self._rates(state, group_of[segment], ahead=1)[0]
                if float(state["rates"]) or not before or 1 / FAR < now / before < FAR:
                    continue
                # A power of two rounds nothing.
                factor = 2.0 ** round(math.log2(now / before))
                for error in (kept[TO_SEND][here], kept[SERVER_ERROR][served(each.gradient, here)]):
                    error.mul_(factor)
                self.state[segment]["worth"] = _number(now)

    def _exchange_sums(
        self, flats: Sequence[ExchangedState], rates: Mapping[Tensor, float], *, look: bool = True
    ) -> None:
        """Replace the send buffers in `gradient.own` by their mean over the ranks. Collective.

        `rates` is the sum of rates of each segment.
        """
        largest = max(rates.values(), default=0.0)
        far = {each: lift(own, largest) for each, own in rates.items() if largest > FAR * own}
        self._lifted = [
            (each.gradient, here, far[segment]) for each in flats for segment, here in _places(each) if segment in far
        ]
        for gradient, here, factor in self._lifted:
            _lift(gradient, here, factor)
        try:
            self._mean(flats, 1.0, 0.0, look=look)
        finally:
            for gradient, here, factor in self._lifted:
                _lift(gradient, here, 1 / factor)
            self._lifted = []

    def _update_of(self, each: ExchangedState, moment: Tensor) -> Tensor:
        direction = super()._update_of(each, moment)
        for gradient, here, factor in self._lifted:
            if gradient is each.gradient:
                direction[here].div_(factor)
        return direction

    @torch.no_grad()
    def meet(self, flats: Sequence[ExchangedState]) -> None:
        """End the interval now: all ranks get the same parameters and momenta. Collective; does nothing if not `apart`.

        Args:
            flats: The flat parameters.

        Raises:
            PeerLost: If a rank is lost, as in an exchange.
        """
        if not self.replicas_differ:
            return
        reported = self._reported
        for each in flats:
            each.gradient.group.wait_until_all_read()  # The next line overwrites the buffer.
            whole_terms(each.gradient).zero_()
        group_of = self._group_of()
        self._exchange_sums(flats, {segment: float(self.state[segment]["rates"]) for segment in group_of}, look=False)
        for each in flats:
            terms = whole_terms(each.gradient)
            for segment, here in _places(each):
                state = self.state[segment]
                self._land(segment, state, group_of[segment], terms[here], None, back=True)
        self.replicas_differ, self._reported = False, reported

    # ---- the update --------------------------------------------------------------------------------------------------

    def _group_of(self) -> dict[Tensor, dict[str, Any]]:
        return {segment: group for group in self.param_groups for segment in group["params"]}

    def _state_of(self, segment: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        born = not self.state[segment]
        state = super()._state_of(segment, group)
        if "variance_step" not in state:
            # The states may come from AdamW, which updated the variance in every step.
            state["variance_step"] = state["step"].clone()
            _begin_interval(state)
            state["worth"] = _number(0.0)  # Largest rate of the last interval.
        if born:
            if self._steps.freeze_step is not None:
                state["anchor"] = torch.zeros_like(segment)
            if self.communicates:
                # Infinite variance: the segment does not move until the variance is updated.
                state["exp_avg_sq"].fill_(math.inf)
        return state

    def _update(self, segment: Tensor, group: dict[str, Any], given: UpdateInput) -> None:
        state, kind = self._state_of(segment, group), self._kind
        if kind is not StepKind.WHOLE:
            state["step"] += 1
            self._move(segment, state, group, given)
            return
        if state["variance_step"] == state["step"] and self._updates < self._steps.plain:  # 1
            super()._update(segment, group, given)
        else:
            self._move_whole(segment, state, group, given)
        state["variance_step"] += 1

    def _move_whole(self, segment: Tensor, state: dict[str, Tensor], group: dict[str, Any], given: UpdateInput) -> None:
        """Update with the old variance, which then takes the gradient."""
        (beta1, beta2), gradient, variance = group["betas"], given.gradient.mul_(given.factor), state["exp_avg_sq"]
        state["step"] += 1
        state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
        rate, decay = self._rate(state, group)
        self._subtract(segment, state["exp_avg"], None, state, group, given.copy, rate=rate, decay=decay)
        variance.masked_fill_(variance.isinf(), 0.0).mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)

    def _move(self, segment: Tensor, state: dict[str, Tensor], group: dict[str, Any], given: UpdateInput) -> None:
        """Update with `given`: this rank's momentum, or the mean of the send buffers."""
        rate, decay = self._rate(state, group)
        if self._alone:
            self._subtract(segment, given.gradient, state["exp_avg"], state, group, given.copy, rate=rate, decay=decay)
            return
        own, share, total = self._rates(state, group)
        first = not float(state["rates"])
        state["rates"], state["share"] = _number(total), _number(share)
        state["worth"] = _number(own if first else max(own, float(state["worth"])))
        if self._kind is StepKind.NOTHING:
            if first:
                state["anchor"].copy_(segment)
            self._subtract(segment, given.gradient, state["exp_avg"], state, group, given.copy, rate=rate, decay=decay)
            self._to_send[segment].add_(state["exp_avg"], alpha=own)
            self.replicas_differ = True
            return
        # Otherwise the segment already is the anchor.
        self._land(segment, state, group, given.gradient, given.copy, back=not first)
        self.replicas_differ = False

    def _land(
        self,
        segment: Tensor,
        state: dict[str, Tensor],
        group: dict[str, Any],
        mean: Tensor,
        copy: Tensor | None,
        *,
        back: bool,
    ) -> None:
        """Set the segment to the anchor (if `back`), then subtract the `mean` of the send buffers."""
        share = float(state["share"])
        if back:
            segment.copy_(state["anchor"])
        torch.div(mean, float(state["rates"]), out=state["exp_avg"])
        self._subtract(segment, mean, None, state, group, copy, rate=share, decay=1 - share)
        _begin_interval(state)

    def _subtract(
        self,
        segment: Tensor,
        moment: Tensor,
        laid_by: Tensor | None,
        state: dict[str, Tensor],
        group: dict[str, Any],
        copy: Tensor | None,
        *,
        rate: float,
        decay: float,
    ) -> None:
        """Run the fused update.

        The kernel does not correct the root of the variance, so eps and the rate are corrected.
        """
        updates = self._counted(int(state["variance_step"]))
        root = math.sqrt(1 - group["betas"][1] ** updates)
        adam_frozen(
            segment,
            moment,
            laid_by,
            state["exp_avg_sq"],
            copy,
            size=rate * root,
            decay=decay,
            eps=group["eps"] * root,
        )

    def _rate(self, state: Mapping[str, Tensor], group: Mapping[str, Any], *, ahead: int = 0) -> tuple[float, float]:
        """Return (rate, decay) of the update with the current step count of `state` plus `ahead`."""
        lr = max(float(group["lr"]), _LEAST_RATE)
        corrected = lr / (1 - group["betas"][0] ** self._counted(int(state["step"]) + ahead))
        return corrected, float(group["lr"]) * group["weight_decay"]

    def _rates(
        self, state: Mapping[str, Tensor], group: Mapping[str, Any], *, ahead: int = 0
    ) -> tuple[float, float, float]:
        """Return rate / share of that update, and the share and the sum of such rates after it."""
        rate, decay = self._rate(state, group, ahead=ahead)
        share = float(state["share"]) * (1 - decay)
        return rate / share, share, float(state["rates"]) + rate / share


def _places(each: ExchangedState) -> list[tuple[Tensor, slice]]:
    """Return the segments of a flat parameter that every rank holds whole, and their slices in it."""
    assert each.whole  # `check_whole_gradients`.
    starts = [(each.gradient.slots[first].offset, segment) for first, segment in each.segments]
    return [(segment, slice(start, start + segment.numel())) for start, segment in starts]


def _lift(gradient: Gradient, here: slice, factor: float) -> None:
    """Multiply send buffer and errors by a power of two."""
    for tensor in (
        whole_terms(gradient)[here],
        gradient.kept[TO_SEND][here],
        gradient.kept[SERVER_ERROR][served(gradient, here)],
    ):
        tensor.mul_(factor)


def _begin_interval(state: dict[str, Tensor]) -> None:
    """Reset the sums of rates at an anchor.

    The tensors are replaced, never changed in place, because a checkpoint stores them in float32.
    """
    if state:
        state["rates"], state["share"] = _number(0.0), _number(1.0)


def _number(value: float) -> Tensor:
    return torch.full((), value, dtype=torch.float64)


_UNBORN: Mapping[str, Tensor] = {"step": _number(0.0), "rates": _number(0.0), "share": _number(1.0)}
"""State of a parameter that was never used."""
