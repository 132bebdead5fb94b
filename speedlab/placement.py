"""The placement table: a row for each parameter that a rank holds. Pure data, no torch, no processes.

A row says which part of the whole the rank has, over which axes the parameter is cut and its gradient is summed, with
which scale, who answers for it in norms and checkpoints, and for each of its states who holds it, where, and as what.
Flats are the classes of rows that are equal in that. A ZeRO stage is a `ZeroPolicy` (arXiv:1910.02054, section 5),
which fills the columns of who and where; nothing else asks for the stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any

from speedlab.layout import ShardRange

EIGHT_BITS = "8bit"
"""The form of states in blocks of 256 codes of a byte, with a scale in float32 each (`cuda_ops.blockwise8`)."""
INT8, INT4 = "int8 blocks", "int4 blocks"
"""What values may be sent as: blocks of 256 integers with a scale in float32 each
(`speedlab.comm.quantized_collectives`)."""
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
ITEM_BYTES |= {EIGHT_BITS: 1 + 4 / 256, INT8: 1 + 4 / 256, INT4: 1 / 2 + 4 / 256}
"""Of an element of each form."""
_QUANTIZABLE = ("float32", "bfloat16", "float16")

STATE_CATEGORIES = {
    "parameter": "parameters",
    "gradient": "gradients",
    "master": "master_weights",
    "moments": "optimizer_moments",
    "secondary": "parameters",
}
"""States of a row → categories of the ledger. What is kept beside gradients counts as theirs."""


class Replication(Enum):
    """Who holds a state."""

    REPLICATED = "replicated"
    """Every dp rank holds the whole flat."""
    PARTITIONED = "partitioned"
    """Each dp rank holds the contiguous 1/dp that it owns."""
    OWN = "each its own"
    """Every dp rank holds a whole flat that differs from its peers'."""
    OWN_PART = "a part each"
    """Each dp rank holds the 1/dp that it sums, at every stage; in all islands the same."""
    ISLANDS_PART = "a part each, in each island another"
    """The same, where islands differ."""
    SECONDARY = "partitioned again"
    """The ranks of a secondary partition, all on one host, hold a flat together."""

    def share(self, count: int, dp: int) -> int:
        """How many of `count` elements, or bytes, each of `dp` ranks (a secondary partition's own) holds; a part of one
        counts whole."""
        return count if self in (Replication.REPLICATED, Replication.OWN) else -(-count // dp)

    @property
    def optimizers(self) -> bool:
        """Whether it says so of what an optimizer keeps beside the gradient, which no zero_policy moves."""
        return self in (Replication.OWN, Replication.OWN_PART, Replication.ISLANDS_PART)


class MemoryKind(Enum):
    """In which memory a state lies between two uses."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"

    @classmethod
    def of_choice(cls, chosen: str) -> MemoryKind:
        """Of a word of a configuration's `offload`: 'none', 'host' or 'disk'."""
        return cls.DEVICE if chosen == "none" else cls(chosen)


@dataclass(frozen=True, kw_only=True)
class StatePlacement:
    """Who holds a state of a parameter, where, and as what: `form` is a dtype, or the name of a codec. `sent`: as what
    it travels between ranks, where that is something else."""

    holders: Replication
    where: MemoryKind = MemoryKind.DEVICE
    form: str
    sent: str = ""


@dataclass(frozen=True, kw_only=True)
class ZeroPolicy:
    """Who holds parameters, gradients and optimizer states (masters and moments) of all flats, and where."""

    parameters: Replication
    gradients: Replication
    optimizer_states: Replication
    parameters_at: MemoryKind = MemoryKind.DEVICE
    gradients_at: MemoryKind = MemoryKind.DEVICE
    """Of gradients that are summed."""
    states_at: MemoryKind = MemoryKind.DEVICE
    separate_masters: bool = False
    """Whether parameters as wide as their masters have one apart, because the update is computed elsewhere."""
    update_in_backward: bool = False
    """Whether the gradient of a unit is used as soon as it is summed, and is gone then."""
    grads_double_buffered: bool = False
    """Whether there is room for the gradients of a step that is over, beside the optimizer states, from which masters
    are updated while the next step's forward and backward use the parameters as they are."""
    parameters_sent: str = ""
    """As what parameters are gathered: INT8, or as they are."""
    gradients_sent: str = ""
    """As what gradients are exchanged, to be summed: INT4, or as they are."""
    secondary_ranks: int = 0
    """How many ranks hold partitioned parameters together once more; 0: there is one partition."""

    @classmethod
    def of_stage(
        cls,
        stage: int,
        dp: int,
        *,
        optimizer: MemoryKind = MemoryKind.DEVICE,
        parameters: MemoryKind = MemoryKind.DEVICE,
        in_backward: bool = False,
        delayed: bool = False,
        device: str = "cpu",
        quantized_weights: bool = False,
        quantized_gradients: bool = False,
        secondary_ranks: int = 0,
    ) -> ZeroPolicy:
        """The row of ZeRO's table. With one rank the partition is the whole, so nothing is gathered or copied.

        `optimizer`, `parameters`: where optimizer states and parameters lie between two uses. Summed gradients go with
        the former, unless every rank has all of them. `in_backward`: each unit is updated there, so that its gradient
        goes nowhere. `delayed`: an update may run beside the next step. `device`: its kind; on a CPU the host's memory
        is the device's. `quantized_weights`, `quantized_gradients`, `secondary_ranks`: ZeRO++ (arXiv:2306.10209), of
        which nothing is there with one rank. Parameters that stay whole are, quantised, no masters any more.

        Raises ValueError for a stage that is none, and for parameters away from the device below stage 3.
        """
        if stage not in (0, 1, 2, 3):
            raise ValueError(f"ZeRO stage {stage!r} is not one of 0, 1, 2, 3")
        if parameters is not MemoryKind.DEVICE and stage < 3:
            raise ValueError(f"ZeRO stage {stage}: parameters lie away from the device at stage 3 only")
        reached = [
            Replication.PARTITIONED if stage >= wanted and dp > 1 else Replication.REPLICATED for wanted in (1, 2, 3)
        ]
        on_host = optimizer is not MemoryKind.DEVICE and parameters is MemoryKind.DEVICE and device != "cpu"
        one_each = reached[1] is Replication.PARTITIONED or dp == 1
        rounded = quantized_weights and reached[0] is Replication.PARTITIONED
        return cls(
            optimizer_states=reached[0],
            gradients=reached[1],
            parameters=reached[2],
            parameters_at=parameters,
            gradients_at=optimizer if one_each and not in_backward else MemoryKind.DEVICE,
            update_in_backward=in_backward,
            states_at=optimizer,
            separate_masters=delayed or on_host or (rounded and reached[2] is Replication.REPLICATED),
            grads_double_buffered=delayed,
            parameters_sent=INT8 if rounded else "",
            gradients_sent=INT4 if quantized_gradients and reached[0] is Replication.PARTITIONED else "",
            secondary_ranks=secondary_ranks if reached[2] is Replication.PARTITIONED else 0,
        )

    def of(self, state: str) -> Replication:
        """Who holds a state, by its name in a row."""
        return {"parameter": self.parameters, "gradient": self.gradients}.get(state, self.optimizer_states)

    def place_of(self, state: str) -> MemoryKind:
        """Where it lies between two uses."""
        return {"parameter": self.parameters_at, "gradient": self.gradients_at}.get(state, self.states_at)

    def sent_as(self, state: str, form: str) -> str:
        """As what a state of this form travels, step by step; '' as it is."""
        sent = {"parameter": self.parameters_sent, "gradient": self.gradients_sent}.get(state, "")
        return sent if form in _QUANTIZABLE else ""

    @property
    def params_unsharded_on_demand(self) -> bool:
        """Whether the parameters of a unit are here only while it is used."""
        return self.parameters is Replication.PARTITIONED or self.parameters_at is not MemoryKind.DEVICE

    @property
    def shards_stay(self) -> bool:
        """Whether what a rank holds of parameters is what others gather, and stays as it is until all have used it:
        ranks of one host need no copies of it then."""
        partitioned = self.parameters is Replication.PARTITIONED and self.parameters_at is MemoryKind.DEVICE
        return partitioned and not (self.parameters_sent or self.secondary_ranks)

    @property
    def grads_sharded(self) -> bool:
        """Whether a rank's whole gradient of a unit is there only until it is summed."""
        return (
            self.gradients is Replication.PARTITIONED
            or self.gradients_at is not MemoryKind.DEVICE
            or self.update_in_backward
        )


@dataclass(frozen=True, kw_only=True)
class ParamPlacement:
    """One parameter on one rank."""

    name: str
    """Full name in the whole model."""
    unit: str
    """The unit with which it is gathered and released."""
    group: int
    """Index of its optimizer parameter group."""
    shape: tuple[int, ...]
    """Of the rank's own tensor."""
    part: ShardRange | None = None
    """Which part of the whole parameter that is; None: all of it."""
    cut_over: tuple[str, ...] = ()
    """Axes over which the parameter itself is cut, beside the partition of its flat."""
    summed_over: tuple[str, ...]
    """Axes over which the ranks' terms of its gradient are summed, in turn; the last one is that of its flat."""
    scale: float = 1.0
    """Factor on each term of the gradient, so that its sum is the mean over the global batch."""
    optimizer_reduces: bool = False
    """Whether the last of these sums may be the optimizer's own to take."""
    answered_by: int
    """The rank whose dp peers count it in norms and write it to checkpoints."""
    answers: bool
    """Whether this rank is one of them."""
    trainable: bool = True
    states: Mapping[str, StatePlacement]
    """`parameter`; of trainable ones `gradient` and `moments`, `master` where it is not the parameter itself, `waiting`
    where a gradient waits for its update while there is the next one, `secondary` where parameters are partitioned
    twice, and by their own names what an optimizer keeps beside the gradient."""

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Of the whole parameter."""
        return self.shape if self.part is None else self.part.shape

    @property
    def _class(self) -> tuple[Any, ...]:
        """What rows of a flat have in common. Where a state depends on the place in the flat (blocks of 8 bits, masters
        that are left out, what is sent with a scale for each block), what several ranks hold alike is apart from what
        they do not, or their copies would part."""
        shared = (bool(self.cut_over), self.summed_over) if self._depends_on_place else ()
        return self.unit, self.trainable, self.optimizer_reduces, shared, tuple(self.states.items())

    @property
    def _depends_on_place(self) -> bool:
        if any(home.sent or home.holders.optimizers for home in self.states.values()):
            return True
        if "moments" not in self.states:
            return False
        if self.states["moments"].form == EIGHT_BITS:
            return True
        narrow = ITEM_BYTES[self.states["parameter"].form] < ITEM_BYTES["float32"]
        return narrow and "master" not in self.states

    def described(self) -> dict[str, Any]:
        """The row as what JSON can hold."""
        return {
            "name": self.name,
            "unit": self.unit,
            "shape": list(self.shape),
            "whole_shape": list(self.whole_shape),
            "part": None if self.part is None else [self.part.dim, [list(pair) for pair in self.part.ranges]],
            "cut_over": list(self.cut_over),
            "summed_over": list(self.summed_over),
            "scale": self.scale,
            "optimizer_reduces": self.optimizer_reduces,
            "answered_by": self.answered_by,
            "trainable": self.trainable,
            "states": {
                state: {"holders": home.holders.value, "where": home.where.value, "form": home.form}
                | ({"sent": home.sent} if home.sent else {})
                for state, home in self.states.items()
            },
        }


def state_placements(
    zero_policy: ZeroPolicy,
    *,
    parameter: str,
    gradient: str = "",
    master: str = "",
    moments: str = "",
    kept: Mapping[str, StatePlacement] | None = None,
) -> dict[str, StatePlacement]:
    """The states of a parameter under `zero_policy`, from their forms. Without `gradient` it is frozen; without
    `master` it is its own; without `moments` these have its master's form. `kept`: what an optimizer has beside the
    gradient."""
    forms = {"parameter": parameter}
    if gradient:
        forms |= {"gradient": gradient, "moments": moments or master or parameter}
        forms |= {"master": master} if master else {}
    return _placed(forms, zero_policy) | (dict(kept or {}) if gradient else {})


def _placed(forms: Mapping[str, str], zero_policy: ZeroPolicy) -> dict[str, StatePlacement]:
    """The states of these forms where `zero_policy` has them; a master as wide as its parameter is there where those
    are apart, and on the way of an update where parameters are read and written. `waiting` is there where gradients do,
    and `secondary` where parameters are partitioned twice."""
    forms = dict(forms)
    if forms.get("master") == forms["parameter"]:
        del forms["master"]
    if zero_policy.separate_masters and "gradient" in forms and ITEM_BYTES[forms["parameter"]] >= 4:
        forms.setdefault("master", forms["parameter"])
    for made_anew in ("waiting", "secondary"):
        forms.pop(made_anew, None)
    if zero_policy.grads_double_buffered and "gradient" in forms:
        forms["waiting"] = forms["gradient"]
    placed = {
        state: StatePlacement(
            holders=zero_policy.of(state),
            where=zero_policy.place_of(state),
            form=form,
            sent=zero_policy.sent_as(state, form),
        )
        for state, form in forms.items()
    }
    if zero_policy.secondary_ranks:
        placed["secondary"] = StatePlacement(holders=Replication.SECONDARY, form=forms["parameter"])
    return placed


@dataclass(frozen=True, kw_only=True)
class Placement:
    """All rows of one rank, in the order of units and, within a unit, of the model."""

    rank: int
    zero_policy: ZeroPolicy
    rows: tuple[ParamPlacement, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {row.name: row for row in self.rows})

    def __getitem__(self, name: str) -> ParamPlacement:
        return self._by_name[name]  # type: ignore[attr-defined]  # see __post_init__

    @cached_property
    def flats(self) -> dict[str, list[ParamPlacement]]:
        """The classes of equal rows by name: those that travel and live together. Rows of one optimizer group lie side
        by side."""
        classes: dict[tuple[Any, ...], list[ParamPlacement]] = {}
        for row in self.rows:
            classes.setdefault(row._class, []).append(row)
        found: dict[str, list[ParamPlacement]] = {}
        for rows in classes.values():
            first = rows[0]
            name = f"{first.unit}/{first.states['parameter'].form}" + ("" if first.trainable else "-frozen")
            while name in found:  # Equal in name and form, but with other states.
                name += "+"
            found[name] = sorted(rows, key=lambda row: row.group)
        return found

    def moved(self, zero_policy: ZeroPolicy) -> Placement:
        """The same parameters where `zero_policy` has them."""

        def move(states: Mapping[str, StatePlacement]) -> dict[str, StatePlacement]:
            own = {state: home for state, home in states.items() if home.holders.optimizers}
            return _placed({key: home.form for key, home in states.items() if key not in own}, zero_policy) | own

        rows = [replace(row, states=move(row.states)) for row in self.rows]
        return Placement(rank=self.rank, zero_policy=zero_policy, rows=tuple(rows))

    @classmethod
    def joined(cls, placements: Iterable[Placement]) -> Placement:
        """The table of a rank that holds several parts of the model."""
        several = list(placements)
        if len(several) == 1:
            return several[0]
        rows = tuple(row for each in several for row in each.rows)
        return cls(rank=several[0].rank, zero_policy=several[0].zero_policy, rows=rows)

    def bytes_at(self, where: MemoryKind, *, dp: int, moments: int) -> int:
        """Bytes of all states that this rank has at a place, without padding; `moments`: how many an optimizer keeps of
        each element."""
        total = 0
        for row in self.rows:
            for state, home in row.states.items():
                if home.where is where:
                    among = self.zero_policy.secondary_ranks if state == "secondary" else dp
                    count = home.holders.share(math.prod(row.shape), among) * (moments if state == "moments" else 1)
                    total += math.ceil(count * ITEM_BYTES[home.form])
        return total

    def described(self) -> list[dict[str, Any]]:
        """All rows as what JSON can hold."""
        return [row.described() for row in self.rows]

    def __str__(self) -> str:
        lines = [HEAD, *(cells(row, self.rank) for row in self.described())]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        )


HEAD = ("parameter", "unit", "here", "of", "summed over", "answers", "parameter is", "gradient", "master", "moments")
"""The columns of a printed table."""

_STATES = ("parameter", "gradient", "master", "moments")


def cells(row: Mapping[str, Any], rank: int) -> tuple[str, ...]:
    """A row, as `ParamPlacement.described` gives it, of what `rank` holds, as text in the order of HEAD."""
    cut = f" by {', '.join(row['cut_over'])}" if row["cut_over"] else ""
    by = " by the optimizer" if row.get("optimizer_reduces") else ""  # Tables of before do not say.
    states = [_placement_text(row["states"].get(state)) for state in _STATES]
    for state, home in row["states"].items():
        if state not in _STATES:
            states[0 if state == "secondary" else 1] += f" + {state}: {_placement_text(home)}"
    if row["trainable"] and "master" not in row["states"]:
        states[2] = "the parameter"
    return (
        row["name"],
        row["unit"],
        _shape_text(row["shape"]) + cut,
        _shape_text(row["whole_shape"]),
        f"{' then '.join(row['summed_over'])}{by}, × {row['scale']:g}" if row["trainable"] else "",
        f"rank {row['answered_by']}" + (" and its dp peers" if row["answered_by"] == rank else ""),
        *states,
    )


def _shape_text(shape: Iterable[int]) -> str:
    return "×".join(map(str, shape)) or "1 number"


def _placement_text(home: Mapping[str, str] | None) -> str:
    if home is None:
        return ""
    where = "" if home["where"] == "device" else f" on {home['where']}"
    sent = f", sent as {home['sent']}" if home.get("sent") else ""  # Tables of before do not say.
    return f"{home['form']} {home['holders']}{where}{sent}"
