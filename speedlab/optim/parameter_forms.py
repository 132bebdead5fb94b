"""The forms in which an optimizer may be given parameters, and which of them a run needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ParameterForms:
    """The forms in which an optimizer trains as a plain loop does."""

    failure: str = ""
    """Why it trains in none of them."""
    flattened: bool = False
    """Each parameter by itself, in one dimension."""
    joined: bool = False
    """Several parameters end to end."""
    parts: bool = False
    """Parts of parameters, in an optimizer on each rank."""
    shares: bool = False
    """Some of the parameters, in an optimizer on each rank."""
    pieces: bool = False
    """A call of `step` for some of the parameters, then one for others."""

    @property
    def whole_only(self) -> bool:
        """Whether each tensor has to be one parameter."""
        return not self.joined

    def problem(self, name: str, needs: RequiredForms) -> str:
        """What is against an optimizer of this class in a run: the rule, the values, the change; "" if nothing is."""
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
    """What a run does with parameters. `ranks`: over which a stage partitions masters, 1 if it does not."""

    stage: int
    ranks: int
    tp: int
    pp: int
    offload: str
    """The setting that makes updates flat by flat, because states are away from the device; "" without one."""
    in_backward: bool

    def found(self, forms: ParameterForms) -> list[tuple[str, str, str]]:
        """(setting, what it does, what to change) of those that the optimizer cannot follow."""
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
"""Of an optimizer that updates each element by itself."""
