"""Solve the batch equation: global = micro × accumulation × dp."""

from __future__ import annotations

from pydantic import Field

from speedlab.config.base import ConfigSection
from speedlab.config.errors import ConfigError

DEFAULT_MICRO_SIZE = 8


class BatchConfig(ConfigSection):
    """global = micro × accumulation × dp. Any two given, the third follows."""

    global_size: int | None = Field(default=None, ge=1, description="Sequences in one optimizer step over all ranks")
    micro_size: int | None = Field(
        default=None, ge=1, description="Sequences in one forward pass of one rank (8 when it does not follow)"
    )
    accumulation: int | None = Field(
        default=None, ge=1, description="Forward passes before one optimizer step (1 when it does not follow)"
    )

    def resolve(self, dp: int) -> Batch:
        """Solve the equation.

        Args:
            dp: data-parallel ranks.

        Raises:
            ConfigError: there is no whole solution; the message has the numbers.
        """
        total, micro, accumulation = self.global_size, self.micro_size, self.accumulation
        if total is None:
            micro, accumulation = micro or DEFAULT_MICRO_SIZE, accumulation or 1
            total = micro * accumulation * dp
        elif micro is None:
            accumulation = accumulation or 1
            micro = total // (accumulation * dp)
        elif accumulation is None:
            accumulation = total // (micro * dp)
        product = micro * accumulation * dp
        if product != total or product == 0:
            raise ConfigError(self._no_solution(total, dp))
        return Batch(global_size=total, micro_size=micro, accumulation=accumulation, dp=dp)

    def _no_solution(self, total: int, dp: int) -> str:
        equation = (
            f"global {total} = micro {self.micro_size or '?'} × accumulation {self.accumulation or '?'} × dp {dp}"
        )
        given = (self.micro_size or 1) * (self.accumulation or 1) * dp
        if self.micro_size and self.accumulation:
            return f"batch: the equation {equation} does not hold; the right side is {given}; leave one of them out"
        # Suggest the nearest multiple, below or above.
        lower = total // given * given
        near = lower if lower and total - lower <= given - (total - lower) else lower + given
        return (
            f"batch: the equation {equation} has no whole solution; "
            f"a global batch of {near} would work, it must be a multiple of {given}"
        )


class Batch(ConfigSection):
    """The solved batch equation."""

    global_size: int = Field(ge=1, description="Sequences in one optimizer step over all ranks")
    micro_size: int = Field(ge=1, description="Sequences in one forward pass of one rank")
    accumulation: int = Field(ge=1, description="Forward passes before one optimizer step")
    dp: int = Field(ge=1, description="Data-parallel ranks")

    def __str__(self) -> str:
        return (
            f"global batch {self.global_size} = "
            f"micro-batch {self.micro_size} × accumulation {self.accumulation} × dp {self.dp}"
        )
