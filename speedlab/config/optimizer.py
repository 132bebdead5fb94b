"""Configure the update of parameters: the optimizer, its schedule, and the synchronisation of DiLoCo islands."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from speedlab.config.base import ConfigSection

_Kept = Annotated[float, Field(ge=0, lt=1)]
"""A decay in [0, 1): with 1, the old value would stay forever."""

OptimizerName = Literal["adamw", "lamb", "onebit_adam", "onebit_lamb", "zero_one_adam", "lion", "sgd"]
_PLAIN: dict[OptimizerName, OptimizerName] = {"onebit_adam": "adamw", "onebit_lamb": "lamb", "zero_one_adam": "adamw"}
"""Compressing optimizer -> its uncompressed base."""
_PHASES: tuple[OptimizerName, ...] = ("onebit_adam", "onebit_lamb")
_MADE_FOR: dict[str, tuple[OptimizerName, ...]] = {
    "freeze_step": tuple(_PLAIN),
    "steady": _PHASES,
    "compression": tuple(_PLAIN),
    "variance_floor": tuple(_PLAIN),
    "angle_every_steps": tuple(_PLAIN),
    "max_coeff": ("lamb", "onebit_lamb"),
    "min_coeff": ("lamb", "onebit_lamb"),
    "coeff_beta": ("onebit_lamb",),
    "factor_max": ("onebit_lamb",),
    "factor_min": ("onebit_lamb",),
    "factor_threshold": ("onebit_lamb",),
    "variance_doubling": ("zero_one_adam",),
    "local_doubling": ("zero_one_adam",),
    "max_local_steps": ("zero_one_adam",),
}
"""Field -> the optimizers that use it."""


class OptimizerConfig(ConfigSection):
    """The update rule."""

    name: OptimizerName = Field(
        default="adamw",
        description="adamw (arXiv:1711.05101), lamb for large batches (arXiv:1904.00962), onebit_adam, onebit_lamb and "
        "zero_one_adam for slow networks (arXiv:2102.02888, arXiv:2104.06069, arXiv:2202.06009), lion "
        "(arXiv:2302.06675), or sgd with momentum",
    )
    lr: float = Field(default=1e-3, gt=0, description="Learning rate at the top of the schedule")
    betas: tuple[_Kept, _Kept] = Field(
        default=(0.9, 0.95),
        description="adamw, lamb, onebit_*, zero_one_adam: decay of the first and second moment, per step; lion: of "
        "the moment in the update, and in what is kept",
    )
    eps: float = Field(
        default=1e-8, gt=0, description="adamw, lamb, onebit_*, zero_one_adam: added to the root of the second moment"
    )
    bias_correction: bool = Field(
        default=True,
        description="adamw, lamb, onebit_*, zero_one_adam: whether moments are corrected for their start at 0, as "
        "usual",
    )
    weight_decay: float = Field(
        default=0.1, ge=0, description="Decay of matrices, per unit of learning rate; of sgd, added to the gradient"
    )
    momentum: _Kept = Field(default=0.9, description="sgd: share of the last update that is kept")
    in_backward: bool = Field(
        default=False,
        description="Update each unit as soon as its gradient is there, in backward, and free that; for one dp rank, "
        "one micro-batch a step, and without clip_norm",
    )
    freeze_step: int | None = Field(
        default=None,
        ge=1,
        description="onebit_*: updates before the variance is frozen and momenta travel as signs; when left out, "
        "until the variance is steady; zero_one_adam: updates before the variance is frozen and ranks make steps of "
        "their own; when left out, neither ever is",
    )
    steady: float = Field(
        default=0.96,
        gt=0,
        lt=1,
        description="onebit_* without freeze_step: the variance is steady when it keeps this share of itself over "
        "1 / (1 - beta2) updates in which the learning rate did not rise",
    )
    compression: Literal["signs", "none"] = Field(
        default="signs",
        description="onebit_*, zero_one_adam: how momenta travel after the warm-up; 'none' sends them whole, to "
        "compare",
    )
    variance_floor: float = Field(
        default=0.3,
        ge=0,
        le=1,
        description="onebit_*, zero_one_adam: roots of a variance that signs are divided by are at least this share of "
        "their parameter's mean; 0 as in the papers",
    )
    max_coeff: float = Field(
        default=10.0,
        gt=0,
        description="lamb, onebit_lamb: most that a parameter's trust ratio, its norm over its update's, may be",
    )
    min_coeff: float = Field(
        default=0.01, ge=0, description="lamb, onebit_lamb: least that a parameter's trust ratio may be"
    )
    coeff_beta: _Kept = Field(
        default=0.9, description="onebit_lamb: decay of the mean of a trust ratio, over the warm-up"
    )
    factor_max: float = Field(
        default=4.0, gt=0, description="onebit_lamb: most by which a compressed step multiplies a mean trust ratio"
    )
    factor_min: float = Field(
        default=0.5, gt=0, description="onebit_lamb: least by which a compressed step multiplies a mean trust ratio"
    )
    factor_threshold: float = Field(
        default=0.1, gt=0, le=1, description="onebit_lamb: share by which that factor may change from step to step"
    )
    angle_every_steps: int = Field(
        default=0,
        ge=0,
        description="onebit_*, zero_one_adam: steps between two looks at the angle between the update and the one of "
        "what was compressed, feedback included, each at the cost of a whole sum; 0 never looks",
    )
    variance_doubling: int = Field(
        default=16,
        ge=1,
        description="zero_one_adam: updates of the variance, by whole gradients, before the distance between two of "
        "them doubles; in short trainings a variance of few updates makes it diverge",
    )
    local_doubling: int = Field(
        default=1000,
        ge=1,
        description="zero_one_adam: steps after freeze_step before the distance between two exchanges doubles, which "
        "is 1 at first",
    )
    max_local_steps: int = Field(
        default=16, ge=1, description="zero_one_adam: largest distance between two exchanges, in steps"
    )

    @property
    def moments(self) -> int:
        """Number of float32 states for each element of the masters."""
        if self.name == "zero_one_adam":  # Local steps need an anchor.
            return 2 + self.steps_separate
        return {"onebit_lamb": 3, "lion": 1, "sgd": int(self.momentum > 0)}.get(self.name, 2)

    @property
    def plain(self) -> OptimizerName:
        """The optimizer before any compression."""
        return _PLAIN.get(self.name, self.name)

    @property
    def looks_at_parameters(self) -> bool:
        """Whether the update of an element uses norms of its whole parameter."""
        return self.plain == "lamb"

    @property
    def sums_itself(self) -> bool:
        """Whether the optimizer itself exchanges compressed values between data-parallel ranks, after a warm-up."""
        return self.name in _PLAIN

    def of_no_use(self, name: str) -> list[tuple[str, tuple[OptimizerName, ...]]]:
        """Return the changed fields that an optimizer does not use.

        Args:
            name: name of the optimizer.

        Returns:
            (field, the optimizers that use the field).
        """
        usual = OptimizerConfig()
        changed = [field for field in _MADE_FOR if getattr(self, field) != getattr(usual, field)]
        return [(field, _MADE_FOR[field]) for field in changed if name not in _MADE_FOR[field]]

    @property
    def exchange_every(self) -> int:
        """Steps between two exchanges, at the end of a long run."""
        return self.max_local_steps if self.steps_separate else 1

    @property
    def steps_separate(self) -> bool:
        """Whether ranks take local steps between two exchanges, after the variance is frozen."""
        return self.name == "zero_one_adam" and self.freeze_step is not None


class OuterConfig(ConfigSection):
    """Synchronisation of islands (DiLoCo, arXiv:2311.08105).

    Each island trains alone. Then the mean change over all islands is the gradient of an outer SGD, which updates the
    parameters of the last synchronisation.
    """

    every_steps: int = Field(default=50, ge=1, description="Steps of the islands between two meetings")
    lr: float = Field(default=0.7, gt=0, description="Learning rate of the outer SGD; 1 with momentum 0 takes the mean")
    momentum: _Kept = Field(default=0.9, description="Share of the last outer update that is kept")
    nesterov: bool = Field(default=True, description="Whether the outer momentum is Nesterov's")
    compression: Literal["none", "signs", "topk"] = Field(
        default="none",
        description="How outer gradients travel: in float32, as signs with a magnitude for each 1024 of them, or the "
        "largest elements only; what is not sent is kept, and added the next time",
    )
    topk_share: float = Field(
        default=0.01, gt=0, le=1, description="compression topk: share of the elements that is sent, 8 bytes each"
    )

    fragments: int = Field(
        default=1,
        ge=1,
        description="Parts of the model that meet in turn, each every every_steps steps, so that less travels at once "
        "(arXiv:2501.18512)",
    )
    delay_steps: int = Field(
        default=0,
        ge=0,
        description="Steps that are made while outer gradients travel, before the outer update comes; 0 waits for it",
    )
    mixing: _Kept = Field(
        default=0.5,
        description="With delay_steps: share of an island's own parameters that stays when the outer update comes",
    )

    @property
    def states(self) -> int:
        """Number of float32 tensors for each element between synchronisations: anchor, momentum, error feedback."""
        return 1 + (self.momentum > 0) + (self.compression != "none")


class ScheduleConfig(ConfigSection):
    """Learning rate over the steps: linear warm-up, then a cosine or a line down to a floor, or constant."""

    kind: Literal["cosine", "linear", "constant"] = Field(default="cosine", description="Shape after the warm-up")
    warmup_steps: int = Field(default=10, ge=0, description="Steps over which the rate rises linearly from 0")
    floor: float = Field(default=0.1, ge=0, le=1, description="Share of the top rate that remains at the last step")
