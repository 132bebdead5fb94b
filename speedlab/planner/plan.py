"""A plan: what a training holds on each rank, how long it takes, and what it costs. Everything before anything runs.

`plan` takes a model and machines by name or as objects, predicts memory (memory.py) and time (timing.py), and returns a
`Plan`, which shows itself as text and as a table (plan_table.py), and as figures (plan_figure.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from speedlab.config import ParallelConfig, RunConfig, ZeroConfig
from speedlab.config.layout_rules import factorisations, nearest
from speedlab.display.figure_style import Figure
from speedlab.layout import Layout, LayoutError
from speedlab.planner import presets
from speedlab.planner.advice import exchange_advice
from speedlab.planner.figures import found_html, plan_figure, plan_html
from speedlab.planner.fit_suggestions import FitChange, cheapest_change
from speedlab.planner.hardware.devices import Machines
from speedlab.planner.hardware.local import Hardware
from speedlab.planner.layer_shapes import check_shape, kv_heads, shape_parameters
from speedlab.planner.memory.places import PlaceBytes, places
from speedlab.planner.memory.rank_memory import RankMemory
from speedlab.planner.report import PlanTable, found_text, plan_table, plan_text
from speedlab.planner.search import Candidate, Dtype, Target, fast_dtype, search
from speedlab.planner.search_space import FREE, Fixed, islands_problem, quantized_hosts_problem
from speedlab.planner.setup import ModelShape, Setup, context_problems, state_problems
from speedlab.planner.time.step_time import StepTime
from speedlab.planner.warnings import caution

_KEPT = (
    "attention",
    "pattern",
    "ffn_tile",
    "cp_pad",
    "offload",
    "optimizer",
    "outer",
    "masters",
    "moments",
    "bucket_bytes",
    "wide_sums",
    "overlap",
    "scattered_messages",
    "listed_gathers",
)
"""Fields of a set-up that a search takes over as they are."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What was asked for, and what follows from it. `print` it, show it in a notebook, or read its numbers."""

    setup: Setup
    hardware: Hardware
    memory: Sequence[RankMemory]
    """Of each distinct position in the layout."""
    time: StepTime
    tokens: float | None = None
    """Tokens of the whole training; None when it is not said."""

    @property
    def machines(self) -> Machines:
        return self.hardware.machines

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return shape_parameters(self.setup.shape)

    @property
    def heaviest(self) -> RankMemory:
        """The position that holds most: what fits there fits everywhere."""
        return max(self.memory, key=lambda rank: rank.total)

    @property
    def capacity_bytes(self) -> int:
        """Memory of one device."""
        return self.machines.device.memory_bytes

    @property
    def free_bytes(self) -> int:
        """What is left of the device of the rank that holds most; negative when it does not fit."""
        return self.capacity_bytes - self.heaviest.total

    @property
    def places(self) -> list[PlaceBytes]:
        """Device, and host and disk where something lies there: what the rank that holds most has there, and its share
        of what there is."""
        return places(self.memory, self.setup, self.machines)

    @property
    def fits(self) -> bool:
        """Whether every place holds what it is to hold."""
        return all(place.fits for place in self.places)

    @property
    def days(self) -> float | None:
        return None if self.tokens is None else self.time.days(self.tokens)

    @property
    def device_hours(self) -> float | None:
        return None if self.tokens is None else self.time.device_hours(self.tokens)

    @property
    def cost(self) -> float | None:
        """In the currency of the machines' price."""
        return None if self.tokens is None else self.time.cost(self.tokens)

    @property
    def caution(self) -> str:
        """What of this lies outside what was validated; empty when nothing does."""
        return caution(self.time)

    @property
    def advice(self) -> str:
        """Whether compressed exchanges pay on these links; '' where there are none."""
        return exchange_advice(self.setup, self.hardware, self.time)

    def search(self, *, target: Target = "fastest", fixed: Fixed = FREE) -> Found:
        """The best layouts of this model with this global batch on these machines, each with what limits it. Layout,
        stage, micro-batch, checkpointing and schedule are chosen anew unless they are `fixed`; islands stay as many."""
        setup = self.setup
        if fixed.islands is None and setup.layout.islands > 1:
            fixed = replace(fixed, islands=setup.layout.islands)
        others = {name: getattr(setup, name) for name in _KEPT}
        return Found.of_search(
            setup.shape,
            self.hardware,
            setup.global_size,
            target,
            dtype=setup.dtype,
            fixed=replace(fixed, others={**others, **fixed.others}),
            tokens=self.tokens,
        )

    def cheapest_changes(self) -> list[FitChange]:
        """Up to three changes that make it fit, each with its price in speed; none when it fits."""
        if self.fits:
            return []
        hardware = self.hardware
        return cheapest_change(self.setup, hardware.machines, efficiency=hardware.efficiency, memory=hardware.memory)

    def table(self) -> PlanTable:
        """Bytes by category, a row for each position that holds something else."""
        return plan_table(self)

    def figure(self) -> Figure:
        """Memory by position with the capacity line, beside what a step's time is made of: for plotly."""
        return plan_figure(self)

    def __str__(self) -> str:
        return plan_text(self)

    def __repr__(self) -> str:
        fits = "fits" if self.fits else "does not fit"
        return f"<Plan: {self.setup.shape.name}, {self.setup.layout} on {self.machines}, {fits}>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        for number, line in enumerate(str(self).splitlines()):
            if number:
                printer.break_()
            printer.text(line)

    def _repr_html_(self) -> str:
        return plan_html(self)


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search found, best first. Shows itself as a table; `candidates` are the objects."""

    asked: str
    candidates: tuple[Candidate, ...]
    tokens: float | None = None
    """Tokens of the whole training; None when it is not said."""

    @classmethod
    def of_search(
        cls,
        shape: ModelShape,
        hardware: Hardware,
        global_size: int,
        target: Target,
        *,
        dtype: Dtype | None,
        fixed: Fixed = FREE,
        tokens: float | None = None,
    ) -> Found:
        """The best layouts of `shape` on these machines."""
        candidates = search(
            shape,
            hardware.machines,
            global_size=global_size,
            target=target,
            dtype=dtype,
            efficiency=hardware.efficiency,
            memory=hardware.memory,
            fixed=fixed,
        )
        with_these = f", with {fixed}" if str(fixed) else ""
        asked = f"{target}: {shape.name}, {global_size:,} sequences a step, on {hardware.machines}{with_these}"
        return cls(asked=asked, candidates=tuple(candidates), tokens=tokens)

    def __str__(self) -> str:
        return found_text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return found_html(self)


def plan(
    model: str | ModelShape | RunConfig | Setup,
    machines: str | Machines | Hardware,
    *,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    dp: int | None = None,
    islands: int = 1,
    micro_size: int = 1,
    global_size: int | None = None,
    dtype: Dtype | None = None,
    tokens: float | None = None,
    price_per_device_hour: float | None = None,
    **changes: Any,
) -> Plan:
    """The plan of a training.

    `model`: an announced model by name (`presets.MODELS`), a shape, a run's configuration or a whole set-up; the last
    two bring their own layout and batch, so that the words for these are left out.
    `machines`: '128x8 A100-80 nvlink3 ib-200x8', the name of an announced cluster, or an object.
    `tp`, `pp`, `cp`, `dp`, `islands`, `micro_size`, `global_size`: the layout, and the batch in sequences; what is left
    out follows.
    `changes`: other fields of `Setup`, as zero_stage=1, checkpointing="block".

    Raises ValueError (LayoutError for layouts) for what cannot be: the rule, the values, what would work.
    """
    if isinstance(machines, str):
        machines = presets.cluster(machines, price_per_device_hour=price_per_device_hour)
    hardware = machines if isinstance(machines, Hardware) else Hardware.of(machines)
    machines = hardware.machines
    dtype = dtype or fast_dtype(machines)
    if isinstance(model, Setup):
        setup = model
    elif isinstance(model, RunConfig):
        setup = Setup.of_config(model, machines.world_size, dtype=dtype)
    else:
        shape = presets.model(model) if isinstance(model, str) else model
        stages = ParallelConfig(pp=pp, schedule=changes.get("schedule", Setup.schedule)).stages_per_rank
        changes = {"zero_stage": ZeroConfig().stage, "chunks": stages, **changes}

        def on(layout: Layout) -> Setup:
            accumulation = _accumulation(layout, micro_size, global_size)
            return Setup(
                shape=shape, layout=layout, dtype=dtype, micro_size=micro_size, accumulation=accumulation, **changes
            )

        try:
            layout = _layout(machines, dp, tp=tp, pp=pp, cp=cp, islands=islands)
        except LayoutError as error:
            asked = Layout(tp=tp, pp=pp, cp=cp, islands=islands)
            raise LayoutError(f"{error}{_what_works(on, machines.world_size, asked)}") from None
        setup = on(layout)
    made = plan_setup(setup, hardware, tokens=tokens)
    # Not in `plan_setup`: a panel shows what a configuration would hold while it is still being set right.
    if problem := quantized_hosts_problem(machines, setup):
        raise LayoutError(problem)
    return made


def plan_setup(setup: Setup, hardware: Hardware, *, tokens: float | None = None) -> Plan:
    """The plan of a set-up as it is. Raises as `plan` does."""
    check_parallel(setup)
    made = Plan(setup=setup, hardware=hardware, memory=hardware.memory(setup), time=hardware.time(setup), tokens=tokens)
    # Behind the time, which has refused more ranks than there are devices: this looks at each of them.
    if problem := islands_problem(hardware.machines, setup.layout.islands, setup.layout.world_size):
        raise LayoutError(problem)
    return made


def check_parallel(setup: Setup) -> None:
    """Raises ValueError or LayoutError for a shape that cannot be, cannot be laid out so, or whose states cannot lie
    there."""
    shape, layout = setup.shape, setup.layout
    check_shape(shape)
    if problems := state_problems(setup):
        raise ValueError("; ".join(problems))
    cut = {"heads": shape.heads, "KV heads": kv_heads(shape), "ffn_hidden": shape.ffn_hidden}
    for name, count in cut.items():
        if count % layout.tp:
            near = _nearest_tp(layout, cut.values())
            raise LayoutError(
                f"tp {layout.tp}: {shape.name}'s {count} {name} do not divide by it; tp {near} does, of "
                f"{', '.join(f'{count} {name}' for name, count in cut.items())}"
            )
    if problems := context_problems(setup):
        raise LayoutError("; ".join(problems))
    stages = layout.pp * setup.stages_per_rank
    if stages > shape.depth:
        each = f" × {setup.stages_per_rank} stages a rank" if stages > layout.pp else ""
        raise LayoutError(
            f"pp {layout.pp}{each}: {shape.name} has {shape.depth} layers, and each pipeline stage takes at least one; "
            f"use pp {shape.depth // setup.stages_per_rank} or less"
        )
    if setup.stages_per_rank > 1 and setup.accumulation % max(1, setup.accumulation // layout.pp):
        near = setup.accumulation // layout.pp * layout.pp
        raise LayoutError(
            f"schedule {setup.schedule} takes micro-batches in rounds of pp {layout.pp}, and {setup.accumulation} are "
            f"no whole rounds; {near} or {near + layout.pp} would be: a global batch of {_sequences(setup, near)} or "
            f"{_sequences(setup, near + layout.pp)}"
        )


def _nearest_tp(layout: Layout, counts: Iterable[int]) -> int:
    """The number of tensor-parallel ranks nearest to the layout's that divides all of `counts` and the ranks there
    are."""
    common = math.gcd(*counts, layout.world_size // layout.pp // layout.cp // layout.islands)
    return min((tp for tp in range(1, common + 1) if common % tp == 0), key=lambda tp: abs(tp - layout.tp))


def _sequences(setup: Setup, accumulation: int) -> int:
    return setup.micro_size * accumulation * setup.layout.data_size


def _layout(machines: Machines, dp: int | None, **others: int) -> Layout:
    if dp is not None:
        return Layout(dp=dp, **others)
    return Layout.for_world(machines.world_size, **others)


def _what_works(on: Callable[[Layout], Setup], devices: int, asked: Layout) -> str:
    """Layouts near to `asked`: of all devices, and the same axes on some of them; empty when none works."""

    def works(layout: Layout) -> bool:
        try:
            check_parallel(on(layout))
        except ValueError:
            return False
        return True

    near = nearest(filter(works, factorisations(devices, asked.cp, asked.islands)), asked)
    advice = f"; {' or '.join(map(str, near))} would work" if near else ""
    fewer = replace(asked, dp=max(1, devices // asked.world_size))
    if fewer.world_size < devices and works(fewer):
        advice += f"; so would {fewer} on {fewer.world_size} of them: --dp {fewer.dp}"
    return advice


def _accumulation(layout: Layout, micro_size: int, global_size: int | None) -> int:
    if micro_size < 1:
        raise ValueError(f"micro_size {micro_size} must be at least 1 sequence")
    if global_size is None:
        return 1
    share = micro_size * layout.data_size
    if global_size < share or global_size % share:
        near = max(1, round(global_size / share)) * share
        raise ValueError(
            f"global batch {global_size} = micro-batch {micro_size} × accumulation ? × {layout.shares_words} has no "
            f"whole solution; a global batch of {near} would work"
        )
    return global_size // share
