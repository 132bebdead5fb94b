"""Render a plan as text: the table of positions, the step, warnings, and what sparse attention saves."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from speedlab.config.layout_rules import padding_words
from speedlab.config.validation import partition_words
from speedlab.display.figure_style import LABELS
from speedlab.display.formatting import Table, byte_unit, bytes_text, count_text, seconds_text
from speedlab.planner.flops import share_of_step
from speedlab.planner.layer_shapes import shape_parameters
from speedlab.planner.memory.offload import offload_words
from speedlab.planner.memory.rank_memory import CATEGORIES, RankMemory
from speedlab.planner.search import describe, schedule_words
from speedlab.planner.setup import Setup

if TYPE_CHECKING:
    from speedlab.config.model_shape import ModelShape
    from speedlab.planner.hardware.devices import Machines
    from speedlab.planner.memory.places import PlaceBytes
    from speedlab.planner.plan import Found, Plan


def attention_lines(setup: Setup) -> list[str]:
    """Return lines about sparse attention: visible keys, longest path, saved work; empty for dense attention."""
    return [] if setup.seen is None else [*setup.seen.words, _step_words(setup)]


def attention_html(setup: Setup) -> str:
    """Return a picture of the attention pattern with the same lines; empty for dense attention."""
    return "" if setup.seen is None else setup.seen.html(_step_words(setup))


def _step_words(setup: Setup) -> str:
    share = share_of_step(setup.shape, setup.attention_share)
    if share > 0.9995:
        return "of a whole step's FLOP nearly nothing is saved: attention's are few at this length"
    return f"of a whole step's FLOP {100 * (1 - share):.3g} % are saved, {1 / share:.3g} times less"


MOST_ROWS = 12
"""Maximum number of positions in the text; `Plan.table()` has all."""

_SMALL_SHARE = 0.005
"""Parts of a step below this share are omitted from the text."""


class PlanTable(Table):
    """The rows of `plan_table`; bytes are shown in the unit of the largest total."""

    def head(self) -> list[str]:
        """Return the names of the columns."""
        unit = byte_unit(max(row["total"] for row in self))[0]
        away = [f"on {place}, {unit}" for place in self._places]
        return ["rank", *(LABELS[category] for category in self._shown), f"total, {unit}", f"free, {unit}", *away]

    def cells(self) -> list[tuple[str, ...]]:
        """Return the rows as text."""
        size = byte_unit(max(row["total"] for row in self))[1]
        names = [*self._shown, "total", "free", *self._places]
        return [(row["rank"], *(f"{row[name] / size:,.2f}" for name in names)) for row in self]

    @property
    def _shown(self) -> list[str]:
        return [category for category in CATEGORIES if any(row[category] for row in self)]

    @property
    def _places(self) -> list[str]:
        return [place for place in ("host", "disk") if any(row[place] for row in self)]


def plan_table(plan: Plan, most: int | None = None) -> PlanTable:
    """Return a row for each group of adjacent positions with equal memory.

    A row has `rank` (the positions), bytes of each ledger category, `total` and `free` on the device, and `host` and
    `disk` bytes.

    Args:
        plan: the plan.
        most: maximum number of rows; above it, only the most informative ones. None: no limit.
    """
    return PlanTable(
        {
            "rank": name,
            **{category: getattr(memory, category) for category in CATEGORIES},
            "total": memory.total,
            "free": plan.capacity_bytes - memory.total,
            "host": memory.host_bytes,
            "disk": memory.disk_bytes,
        }
        for name, memory in telling(positions(plan), most)
    )


def telling(found: list[tuple[str, RankMemory]], most: int | None) -> list[tuple[str, RankMemory]]:
    """Return at most `most` positions: the first and last two, the middle one, and the heaviest one.

    Args:
        found: (name, memory) of each position.
        most: None: all.
    """
    if most is None or len(found) <= most:
        return found
    heaviest = max(range(len(found)), key=lambda index: found[index][1].total)
    last = len(found) - 1
    return [found[index] for index in sorted({0, 1, heaviest, last // 2, last - 1, last})]


def positions(plan: Plan) -> list[tuple[str, RankMemory]]:
    """Return the positions in the layout, with equal neighbours merged.

    Args:
        plan: the plan.

    Returns:
        (name, memory) of each group, for instance ("pp 1–14", memory of one rank).
    """
    layout = plan.setup.layout
    groups: list[list[RankMemory]] = []
    for _, ranks in groupby(plan.memory, key=lambda rank: (rank.pipeline, _held(rank))):
        groups.append(list(ranks))
    merged: list[list[RankMemory]] = []
    for group in groups:
        if merged and _alike(merged[-1], group):
            merged[-1] += group
        else:
            merged.append(group)
    return [(_place(group, layout.pp, layout.tp), group[0]) for group in merged]


def _held(rank: RankMemory) -> tuple[int, ...]:
    """Return the bytes by which positions are compared."""
    return (*rank.by_category().values(), rank.host_bytes, rank.disk_bytes)


def _alike(before: Sequence[RankMemory], group: Sequence[RankMemory]) -> bool:
    return _held(before[0]) == _held(group[0]) and before[0].tensor == group[0].tensor


def _place(group: Sequence[RankMemory], pp: int, tp: int) -> str:
    """Return the name of a group of positions: 'each', 'pp 0', 'pp 1–14', 'pp 15, tp 0–3'."""
    stages = sorted({rank.pipeline for rank in group})
    parts = sorted({rank.tensor for rank in group})
    words = [f"pp {_span(stages)}"] if pp > 1 else []
    if len(parts) > 1 or parts != [0]:
        words += [f"tp {_span(parts)}"] if len(parts) < tp else []
    return ", ".join(words) or "each"


def _span(numbers: Sequence[int]) -> str:
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}–{numbers[-1]}"


class FoundTable(Table):
    """The rows of `found_table`."""

    def head(self) -> list[str]:
        """Return the names of the columns."""
        held = ["held", "free", *(f"on {place}" for place in self._places)]
        return ["layout", "step", "tokens/s", "TFLOP/s a device", *self._of_training, *held, "limited by"]

    def cells(self) -> list[tuple[str, ...]]:
        """Return the rows as text."""
        return [
            (
                row["layout"],
                seconds_text(row["step_seconds"]),
                count_text(row["tokens_per_second"]),
                f"{row['tflops']:.3g}",
                *(f"{row[name]:,.1f}" for name in self._of_training),
                bytes_text(row["held_bytes"]),
                bytes_text(row["free_bytes"]),
                *(_of_capacity(row["places"].get(name)) for name in self._places),
                row["limit"],
            )
            for row in self
        ]

    @property
    def _places(self) -> list[str]:
        return [place for place in ("host", "disk") if any(place in row["places"] for row in self)]

    @property
    def _of_training(self) -> list[str]:
        return [name for name in ("days", "cost") if all(row[name] is not None for row in self)]


def _of_capacity(place: PlaceBytes | None) -> str:
    """Return the bytes of a rank and its share of the capacity: '118 GiB of 119 GiB'."""
    if place is None:
        return bytes_text(0)
    whole = "" if place.capacity_bytes is None else f" of {bytes_text(place.capacity_bytes)}"
    return f"{bytes_text(place.held_bytes)}{whole}"


def found_table(found: Found) -> FoundTable:
    """Return the results of a search as a table, best first.

    Args:
        found: the results. Rows have host and disk bytes, and days and cost if the tokens are known.
    """
    tokens = found.tokens
    return FoundTable(
        {
            "layout": describe(candidate.setup),
            "step_seconds": candidate.time.step_seconds,
            "tokens_per_second": candidate.time.tokens_per_second,
            "tflops": candidate.time.tflops("model"),
            "days": None if tokens is None else candidate.time.days(tokens),
            "cost": None if tokens is None else candidate.time.cost(tokens),
            "held_bytes": candidate.held_bytes,
            "free_bytes": candidate.free_bytes,
            "places": {place.name: place for place in candidate.places},
            "limit": candidate.time.limit,
        }
        for candidate in found.candidates
    )


def found_lines(found: Found) -> tuple[str, list[str]]:
    """Return the text around the table of a search.

    Args:
        found: the results.

    Returns:
        (the title, the lines below the table).
    """
    if not found.candidates:
        return found.asked, ["nothing fits; take more devices or a smaller model"]
    doubts = dict.fromkeys(candidate.caution for candidate in found.candidates if candidate.caution)
    lines = [f"outside of what was validated: {doubt}" for doubt in doubts]
    lines += [f"days and cost: of {count_text(found.tokens)} tokens"] if found.tokens is not None else []
    lines += assumed(found.candidates[0].time.setup.shape, found.candidates[0].time.machines)
    shapes = dict.fromkeys(candidate.setup.shape for candidate in found.candidates)
    lines += [
        f"{shape.name}: {count_text(shape_parameters(shape))} parameters, {shape.layers} layers, {shape.heads} heads"
        for shape in shapes
    ]
    return found.asked, lines


def found_text(found: Found) -> str:
    """Return the results of a search as text."""
    asked, lines = found_lines(found)
    return "\n".join([asked, *([str(found_table(found))] if found.candidates else []), *lines])


def plan_text(plan: Plan) -> str:
    """Return the whole plan as text.

    Args:
        plan: the plan.

    Returns:
        Request, fit, table, step and its parts, whole training, warnings.
    """
    lines = [*heading(plan), "", str(plan_table(plan, MOST_ROWS)), "", *speed_lines(plan)]
    lines += [f"attention: {line}" for line in attention_lines(plan.setup)]
    return "\n".join([*lines, *cautions(plan)])


def heading(plan: Plan) -> list[str]:
    """Return the lines about the request, and whether it fits."""
    setup = plan.setup
    batch = (
        f"global batch {setup.global_size:,} = micro-batch {setup.micro_size} × accumulation {setup.accumulation:,} "
        f"× {setup.layout.shares_words}"
    )
    extras = [
        f"checkpointing {setup.checkpointing}" if setup.checkpointing != "none" else "",
        partition_words(tp=setup.layout.tp, sequence=setup.sequence_parallel) if setup.partition_inputs else "",
        "sequence parallel" if setup.sequence_parallel else "",
        offload_words(setup.offload),
        setup.zero.switches,
        f"schedule {schedule_words(setup)}" if setup.layout.pp > 1 else "",
    ]
    length = setup.shape.sequence_length
    batch += f", {padding_words(length, setup.padded_length) or f'sequences of {length:,}'}"
    return [
        f"{setup.shape.name}: {count_text(plan.parameters)} parameters, {setup.dtype}, on {plan.machines}",
        " · ".join(filter(None, [f"{setup.layout}", f"ZeRO stage {setup.zero_stage}", batch, *extras])),
        fit_line(plan),
        *place_lines(plan),
    ]


def fit_line(plan: Plan) -> str:
    """Return whether the plan fits, in one line.

    Args:
        plan: the plan.

    Returns:
        'fits: 27.3 GiB of 79.2 GiB on the rank that holds most, 51.9 GiB free', or what is missing where.
    """
    need, capacity = bytes_text(plan.heaviest.total), bytes_text(plan.capacity_bytes)
    if plan.fits:
        return f"fits: {need} of {capacity} on the rank that holds most, {bytes_text(plan.free_bytes)} free"
    if plan.free_bytes < 0:
        return f"does not fit: {need} on the rank that holds most, a device has {capacity}"
    return f"does not fit on {' and '.join(place.name for place in plan.places if not place.fits)}"


def place_lines(plan: Plan) -> list[str]:
    """Return a line for each used place, if the device is not the only one."""
    return [str(place) for place in plan.places] if len(plan.places) > 1 else []


def speed_lines(plan: Plan) -> list[str]:
    """Return the lines about the step: its parts, its speed, its limit, and the whole training."""
    time = plan.time
    parts = [
        f"{part} {seconds_text(seconds)}"
        for part, seconds in time.parts.items()
        if seconds > _SMALL_SHARE * time.step_seconds
    ]
    note = f" {plan.hardware.note}" if plan.hardware.note else ""
    again = plan.setup.checkpointing != "none"
    rates = f"{time.tflops('model'):.3g} TFLOP/s a device ({time.mfu:.0%} of peak)"
    rates += f", {time.tflops('hardware'):.3g} with what is computed again" if again else ""
    lines = [
        f"step {seconds_text(time.step_seconds)}: {', '.join(parts)}",
        f"{count_text(time.tokens_per_second)} tokens/s{note} · {rates}",
        f"speed: limited by {time.limit}",
    ]
    if plan.tokens is not None and plan.days is not None and plan.device_hours is not None:
        cost = f", cost {plan.cost:,.0f}" if plan.cost is not None else ""
        lines.append(
            f"{count_text(plan.tokens)} tokens: {plan.days:,.1f} days, {plan.device_hours:,.0f} device-hours{cost}"
        )
    return lines


def cautions(plan: Plan) -> list[str]:
    """Return the warnings about a plan.

    Args:
        plan: the plan.

    Returns:
        Lines about validation, advice, assumptions, and, if the plan does not fit, the cheapest changes.
    """
    lines = [f"outside of what was validated: {plan.caution}"] if plan.caution else []
    lines += [plan.advice] if plan.advice else []
    lines += assumed(plan.setup.shape, plan.machines)
    if not plan.fits:
        changes = plan.cheapest_changes()
        lines.append("cheapest changes that fit:" if changes else "no single change makes it fit; take more devices")
        lines += [f"  {change}: {change.options}" for change in changes]
    return lines


def assumed(shape: ModelShape, machines: Machines) -> list[str]:
    """Return a line with the assumptions about model and machines; empty without any.

    Args:
        shape: the model.
        machines: the hosts and their devices.
    """
    open_ones = (*shape.assumed, *machines.assumed)
    return [f"assumed: {', '.join(open_ones)}"] if open_ones else []
