"""Parameter forms: how an optimizer may be given parameters (flattened, joined, in parts), and what a run needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ParameterForms:
    """The forms in which an optimizer trains as in a plain loop."""

    failure: str = ""
    """Why no form works; "" otherwise."""
    flattened: bool = False
    """Each parameter alone, in one dimension."""
    joined: bool = False
    """Several parameters joined in one tensor."""
    parts: bool = False
    """Parts of parameters, with one optimizer per rank."""
    shares: bool = False
    """Some of the parameters, with one optimizer per rank."""
    pieces: bool = False
    """One `step` call for some parameters, then another for others."""

    @property
    def whole_only(self) -> bool:
        """Return whether each tensor must be one parameter."""
        return not self.joined

    def problem(self, name: str, needs: RequiredForms) -> str:
        """Return why this optimizer does not fit a run.

        Args:
            name: Class name of the optimizer.
            needs: The forms that the run needs.

        Returns:
            The rule, the values and the change; "" if the optimizer fits.
        """
        if self.failure:
            return f"optimizer: {name} {self.failure}. Use an elementwise optimizer, as torch.optim.AdamW"
        if not (self.flattened or self.joined):
            return (
                f"optimizer: {name} trains otherwise if a parameter is flattened, and at every stage flats hold "
                "parameters in one dimension. Use an elementwise optimizer, as torch.optim.AdamW"
            )
        found = next((each for each in needs.found(self)), None)
        if found is None:
            return ""
        setting, reason, change = found
        return f"{setting}: {name} trains otherwise if {reason}. {change}, or use an elementwise optimizer, as AdamW"


@dataclass(frozen=True, kw_only=True)
class RequiredForms:
    """The forms that a run needs. `ranks`: ranks over which the stage partitions masters, 1 without partitions."""

    stage: int
    ranks: int
    tp: int
    pp: int
    offload: str
    """The setting that requires updates per flat parameter, because states are offloaded; "" without one."""
    in_backward: bool

    def found(self, forms: ParameterForms) -> list[tuple[str, str, str]]:
        """Return the needs that an optimizer does not meet.

        Args:
            forms: The forms that the optimizer supports.

        Returns:
            (setting, what it does, what to change) of each.
        """
        several = "an optimizer on each rank has a part of the parameters"
        rules = [
            (self.ranks > 1, forms.parts, f"zero.stage {self.stage}", several, "Set zero.stage to 0"),
            (self.tp > 1, forms.parts, f"parallel.tp {self.tp}", several, "Set parallel.tp to 1"),
            (self.pp > 1, forms.shares, f"parallel.pp {self.pp}", several, "Set parallel.pp to 1"),
            (
                bool(self.offload),
                forms.pieces,
                self.offload,
                "it steps for one flat after the other, as offloaded states need",
                "Leave states on the device in float32",
            ),
            (
                self.in_backward,
                forms.pieces,
                "optimizer.in_backward",
                "it steps for one unit after the other",
                "Set optimizer.in_backward to false",
            ),
        ]
        return [(setting, does, change) for needed, holds, setting, does, change in rules if needed and not holds]


EVERY_FORM = ParameterForms(flattened=True, joined=True, parts=True, shares=True, pieces=True)
"""The forms of an elementwise optimizer."""
