"""The placement table: one row per parameter that a rank holds. Pure data without torch and without processes.

A row answers four questions:

- Which shard of the parameter does the rank hold, and over which axes is the parameter cut?
- Over which axes is the gradient summed, and with which scale?
- Which rank counts the parameter in norms and writes it to checkpoints?
- For each state: which ranks hold it, in which memory, and in which format?

Rows with equal answers form a flat. A ZeRO stage becomes a `ZeroPolicy` (arXiv:1910.02054, section 5), which fills the
columns for holders and memory. No other code asks for the stage.
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
"""Format of optimizer states: blocks of 256 one-byte codes, with one float32 scale per block (`cuda_ops.blockwise8`).
"""
INT8, INT4 = "int8 blocks", "int4 blocks"
"""Formats of values in transfers: blocks of 256 integers, with one float32 scale per block
(`speedlab.comm.quantized_collectives`)."""
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
ITEM_BYTES |= {EIGHT_BITS: 1 + 4 / 256, INT8: 1 + 4 / 256, INT4: 1 / 2 + 4 / 256}
"""Bytes per element of each format, scales included."""
_QUANTIZABLE = ("float32", "bfloat16", "float16")

STATE_CATEGORIES = {
    "parameter": "parameters",
    "gradient": "gradients",
    "master": "master_weights",
    "moments": "optimizer_moments",
    "secondary": "parameters",
}
"""Maps states of a row to categories of the memory ledger. States that an optimizer keeps with gradients count as
gradients."""


class Replication(Enum):
    """How a state is distributed over ranks."""

    REPLICATED = "replicated"
    """Every dp rank holds the full flat."""
    PARTITIONED = "partitioned"
    """Each dp rank holds the contiguous 1/dp shard that it owns."""
    OWN = "each its own"
    """Every dp rank holds a full flat whose values differ between ranks."""
    OWN_PART = "a part each"
    """Each dp rank holds the 1/dp shard that it reduces, at every ZeRO stage. All islands hold the same values."""
    ISLANDS_PART = "a part each, in each island another"
    """As `OWN_PART`, but each island holds different values."""
    SECONDARY = "partitioned again"
    """The ranks of a secondary partition, all on one host, together hold a full flat."""

    def share(self, count: int, dp: int) -> int:
        """Return how many elements (or bytes) each rank holds, rounded up.

        Args:
            count: Elements or bytes of the full flat.
            dp: Number of ranks that share the flat. For `SECONDARY`: the ranks of the secondary partition.
        """
        return count if self in (Replication.REPLICATED, Replication.OWN) else -(-count // dp)

    @property
    def optimizers(self) -> bool:
        """Whether this is state that an optimizer keeps next to the gradient. No ZeRO policy moves such state."""
        return self in (Replication.OWN, Replication.OWN_PART, Replication.ISLANDS_PART)


class MemoryKind(Enum):
    """The memory that holds a state between two uses."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"

    @classmethod
    def of_choice(cls, chosen: str) -> MemoryKind:
        """Return the memory for a value of `offload` in a configuration.

        Args:
            chosen: 'none', 'host' or 'disk'.

        Raises:
            ValueError: `chosen` is another word.
        """
        return cls.DEVICE if chosen == "none" else cls(chosen)


@dataclass(frozen=True, kw_only=True)
class StatePlacement:
    """Placement of one state of a parameter: its holders, its memory and its format.

    Attributes:
        holders: How the state is distributed over ranks.
        where: Its memory between two uses.
        form: A dtype name, or the name of a codec.
        sent: The format in transfers between ranks; "" if it is `form`.
    """

    holders: Replication
    where: MemoryKind = MemoryKind.DEVICE
    form: str
    sent: str = ""


@dataclass(frozen=True, kw_only=True)
class ZeroPolicy:
    """Holders and memory of parameters, gradients and optimizer states (masters and moments), for all flats."""

    parameters: Replication
    gradients: Replication
    optimizer_states: Replication
    parameters_at: MemoryKind = MemoryKind.DEVICE
    gradients_at: MemoryKind = MemoryKind.DEVICE
    """Memory of reduced gradients."""
    states_at: MemoryKind = MemoryKind.DEVICE
    separate_masters: bool = False
    """Whether a parameter that is as wide as its master keeps a separate master, because the update is computed in
    another memory."""
    update_in_backward: bool = False
    """Whether each unit is updated as soon as its gradient is reduced. The gradient is freed after this update."""
    grads_double_buffered: bool = False
    """Whether gradients of the previous step have a second buffer, in the memory of the optimizer states. Masters are
    updated from this buffer while the next forward and backward use the current parameters."""
    parameters_sent: str = ""
    """Format of parameters in gathers: INT8, or "" for the format of the shard."""
    gradients_sent: str = ""
    """Format of gradients in reductions: INT4, or "" for the format of the gradient."""
    secondary_ranks: int = 0
    """Number of ranks in each secondary partition of the parameters; 0: there is no secondary partition."""

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
        """Return the policy of a ZeRO stage. With one rank, nothing is partitioned, gathered or quantized.

        Args:
            stage: 0 to 3.
            dp: Number of ranks over which states are partitioned.
            optimizer: Memory of optimizer states. Reduced gradients use this memory too if each element has one owner.
            parameters: Memory of parameters between two uses; other than the device only at stage 3.
            in_backward: Update each unit in backward, so that gradients stay on the device.
            delayed: An update may run at the same time as the next step.
            device: Device type. On "cpu", host memory is device memory.
            quantized_weights: Gather parameters as INT8 (ZeRO++, arXiv:2306.10209).
            quantized_gradients: Reduce gradients as INT4 (ZeRO++).
            secondary_ranks: Ranks of each secondary partition (ZeRO++); used only if parameters are partitioned.

        Raises:
            ValueError: The stage is unknown, or parameters are offloaded below stage 3.
        """
        if stage not in (0, 1, 2, 3):
            raise ValueError(f"ZeRO stage {stage!r} is not one of 0, 1, 2, 3")
        if parameters is not MemoryKind.DEVICE and stage < 3:
            raise ValueError(f"ZeRO stage {stage}: parameters lie away from the device at stage 3 only")
        reached = [
            Replication.PARTITIONED if stage >= wanted and dp > 1 else Replication.REPLICATED for wanted in (1, 2, 3)
        ]
        # The update runs on the host, so even float32 parameters need a separate master there.
        on_host = optimizer is not MemoryKind.DEVICE and parameters is MemoryKind.DEVICE and device != "cpu"
        # Whether each gradient element has one owner. Otherwise every rank would offload a copy.
        one_each = reached[1] is Replication.PARTITIONED or dp == 1
        # Quantized parameters that stay on every rank lose bits, so they cannot serve as masters: see
        # `separate_masters`.
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
        """Return how a state is distributed.

        Args:
            state: Name of the state in a row ("parameter", "gradient", "master", ...).
        """
        return {"parameter": self.parameters, "gradient": self.gradients}.get(state, self.optimizer_states)

    def place_of(self, state: str) -> MemoryKind:
        """Return the memory of a state between two uses.

        Args:
            state: Name of the state in a row.
        """
        return {"parameter": self.parameters_at, "gradient": self.gradients_at}.get(state, self.states_at)

    def sent_as(self, state: str, form: str) -> str:
        """Return the format of a state in the transfers of each step; "" if it is sent unchanged.

        Args:
            state: Name of the state in a row.
            form: Its format. Only floating-point formats up to float32 can be quantized.
        """
        sent = {"parameter": self.parameters_sent, "gradient": self.gradients_sent}.get(state, "")
        return sent if form in _QUANTIZABLE else ""

    @property
    def params_unsharded_on_demand(self) -> bool:
        """Whether parameters of a unit are gathered only while the unit is used."""
        return self.parameters is Replication.PARTITIONED or self.parameters_at is not MemoryKind.DEVICE

    @property
    def shards_stay(self) -> bool:
        """Whether peers can read this rank's shards in place, because a shard stays unchanged until all ranks have
        used it. Ranks of one host then need no copies.
        """
        partitioned = self.parameters is Replication.PARTITIONED and self.parameters_at is MemoryKind.DEVICE
        return partitioned and not (self.parameters_sent or self.secondary_ranks)

    @property
    def grads_sharded(self) -> bool:
        """Whether the full gradient of a unit exists only until it is reduced."""
        return (
            self.gradients is Replication.PARTITIONED
            or self.gradients_at is not MemoryKind.DEVICE
            or self.update_in_backward
        )


@dataclass(frozen=True, kw_only=True)
class ParamPlacement:
    """One parameter on one rank: a row of the placement table."""

    name: str
    """Full name in the full model."""
    unit: str
    """The unit with which the parameter is gathered and released."""
    group: int
    """Index of its optimizer parameter group."""
    shape: tuple[int, ...]
    """Shape of the rank's own tensor."""
    part: ShardRange | None = None
    """The slice of the full parameter that the rank holds; None: all of it."""
    cut_over: tuple[str, ...] = ()
    """Axes over which the parameter itself is cut, in addition to the partition of its flat."""
    summed_over: tuple[str, ...]
    """Axes over which gradients are summed, in this order. The last one is the axis of the flat."""
    scale: float = 1.0
    """Factor on each rank's gradient, so that the sum is the mean over the global batch."""
    optimizer_reduces: bool = False
    """Whether the optimizer may do the last of these sums itself."""
    answered_by: int
    """The rank whose dp peers count the parameter in norms and write it to checkpoints."""
    answers: bool
    """Whether this rank is one of those dp peers."""
    trainable: bool = True
    states: Mapping[str, StatePlacement]
    """Placement of each state:

    - `parameter`: always.
    - `gradient`, `moments`: trainable parameters.
    - `master`: if it is not the parameter itself.
    - `waiting`: a gradient that waits for its update while the next gradient is computed.
    - `secondary`: if parameters have a secondary partition.
    - Other names: state that an optimizer keeps next to the gradient."""

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the full parameter."""
        return self.shape if self.part is None else self.part.shape

    @property
    def _class(self) -> tuple[Any, ...]:
        """The key that all rows of one flat share.

        Some states depend on the position in the flat: blocks of 8 bits, missing masters, formats with one scale per
        block. Such flats keep parameters that several ranks replicate separate from parameters that are cut. Otherwise
        the replicas would diverge.
        """
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
        """Return the row as JSON-compatible data."""
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
    """Return the placement of all states of one parameter under a policy.

    Args:
        zero_policy: Holders and memory of each state.
        parameter: Format of the parameter.
        gradient: Format of the gradient; "" for a frozen parameter.
        master: Format of the master; "": the parameter is its own master.
        moments: Format of the moments; "": the format of the master.
        kept: State that an optimizer keeps next to the gradient, by name.
    """
    forms = {"parameter": parameter}
    if gradient:
        forms |= {"gradient": gradient, "moments": moments or master or parameter}
        forms |= {"master": master} if master else {}
    return _placed(forms, zero_policy) | (dict(kept or {}) if gradient else {})


def _placed(forms: Mapping[str, str], zero_policy: ZeroPolicy) -> dict[str, StatePlacement]:
    """Return the states of these formats, placed by `zero_policy`.

    1. A master that is as wide as its parameter exists only with `separate_masters`.
    2. `waiting` exists only with `grads_double_buffered`.
    3. `secondary` exists only if parameters have a secondary partition.
    """
    forms = dict(forms)
    if forms.get("master") == forms["parameter"]:
        del forms["master"]
    if zero_policy.separate_masters and "gradient" in forms and ITEM_BYTES[forms["parameter"]] >= 4:
        forms.setdefault("master", forms["parameter"])
    # Both depend on the policy alone, so the old entries are dropped and derived again below.
    for made_again in ("waiting", "secondary"):
        forms.pop(made_again, None)
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
    """All rows of one rank, in the order of units and, inside a unit, of the model."""

    rank: int
    zero_policy: ZeroPolicy
    rows: tuple[ParamPlacement, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {row.name: row for row in self.rows})

    def __getitem__(self, name: str) -> ParamPlacement:
        return self._by_name[name]  # type: ignore[attr-defined]  # see __post_init__

    @cached_property
    def flats(self) -> dict[str, list[ParamPlacement]]:
        """Rows grouped into flats, by flat name. Rows of one optimizer group are neighbours."""
        classes: dict[tuple[Any, ...], list[ParamPlacement]] = {}
        for row in self.rows:
            classes.setdefault(row._class, []).append(row)
        found: dict[str, list[ParamPlacement]] = {}
        for rows in classes.values():
            first = rows[0]
            name = f"{first.unit}/{first.states['parameter'].form}" + ("" if first.trainable else "-frozen")
            while name in found:  # Same unit and format, but different states.
                name += "+"
            found[name] = sorted(rows, key=lambda row: row.group)
        return found

    def moved(self, zero_policy: ZeroPolicy) -> Placement:
        """Return the table of the same parameters under another policy.

        Args:
            zero_policy: Holders and memory of each state. State of the optimizer next to gradients keeps its placement.
        """

        def move(states: Mapping[str, StatePlacement]) -> dict[str, StatePlacement]:
            own = {state: home for state, home in states.items() if home.holders.optimizers}
            return _placed({key: home.form for key, home in states.items() if key not in own}, zero_policy) | own

        rows = [replace(row, states=move(row.states)) for row in self.rows]
        return Placement(rank=self.rank, zero_policy=zero_policy, rows=tuple(rows))

    @classmethod
    def joined(cls, placements: Iterable[Placement]) -> Placement:
        """Return one table for a rank that holds several parts of the model.

        Args:
            placements: The tables of the parts; at least one.
        """
        several = list(placements)
        if len(several) == 1:
            return several[0]
        rows = tuple(row for each in several for row in each.rows)
        return cls(rank=several[0].rank, zero_policy=several[0].zero_policy, rows=rows)

    def bytes_at(self, where: MemoryKind, *, dp: int, moments: int) -> int:
        """Return the bytes of all states that this rank holds in one memory, without padding.

        Args:
            where: The memory.
            dp: Number of ranks over which flats are partitioned.
            moments: Number of moments that the optimizer keeps per element.
        """
        total = 0
        for row in self.rows:
            for state, home in row.states.items():
                if home.where is where:
                    among = self.zero_policy.secondary_ranks if state == "secondary" else dp
                    count = home.holders.share(math.prod(row.shape), among) * (moments if state == "moments" else 1)
                    total += math.ceil(count * ITEM_BYTES[home.form])
        return total

    def described(self) -> list[dict[str, Any]]:
        """Return all rows as JSON-compatible data."""
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
    """Return one row of a printed table, as text in the order of HEAD.

    Args:
        row: A row, as `ParamPlacement.described` returns it.
        rank: The rank that holds the row.
    """
    cut = f" by {', '.join(row['cut_over'])}" if row["cut_over"] else ""
    by = " by the optimizer" if row.get("optimizer_reduces") else ""  # Older tables lack this key.
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
    sent = f", sent as {home['sent']}" if home.get("sent") else ""  # Older tables lack this key.
    return f"{home['form']} {home['holders']}{where}{sent}"
