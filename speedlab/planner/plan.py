"""Plan a training: bytes on each rank, time of a step, and cost, before anything runs.

1. `plan` takes a model and machines by name or as objects, and makes a `Setup` of them.
2. `plan_setup` checks the layout, then predicts memory (`speedlab.planner.memory`) and time (`speedlab.planner.time`).
3. The resulting `Plan` prints as text and as a table (`speedlab.planner.report`), and as figures
   (`speedlab.planner.figures`).
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
"""Fields of a set-up that a search does not vary."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A planned training: the set-up, and the predicted memory, time and cost. Printable, also in a notebook."""

    setup: Setup
    hardware: Hardware
    memory: Sequence[RankMemory]
    """One entry for each distinct position in the layout; equal ranks share an entry."""
    time: StepTime
    tokens: float | None = None
    """Tokens of the whole training; None if unknown."""

    @property
    def machines(self) -> Machines:
        """Return the machines of the plan."""
        return self.hardware.machines

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model."""
        return shape_parameters(self.setup.shape)

    @property
    def heaviest(self) -> RankMemory:
        """The position with the most bytes. If this position fits, all positions fit."""
        return max(self.memory, key=lambda rank: rank.total)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of memory of one device."""
        return self.machines.device.memory_bytes

    @property
    def free_bytes(self) -> int:
        """Free bytes on the device of the heaviest rank; negative if the plan does not fit."""
        return self.capacity_bytes - self.heaviest.total

    @property
    def places(self) -> list[PlaceBytes]:
        """Bytes of the heaviest rank and its share of the capacity, for each used place.

        The device is always included, host and disk only if something is stored there.
        """
        return places(self.memory, self.setup, self.machines)

    @property
    def fits(self) -> bool:
        """Whether no place (device, host, disk) exceeds its capacity."""
        return all(place.fits for place in self.places)

    @property
    def days(self) -> float | None:
        """Days of the whole training; None if the tokens are unknown."""
        return None if self.tokens is None else self.time.days(self.tokens)

    @property
    def device_hours(self) -> float | None:
        """Device-hours of the whole training; None if the tokens are unknown."""
        return None if self.tokens is None else self.time.device_hours(self.tokens)

    @property
    def cost(self) -> float | None:
        """Cost of the whole training in the currency of the machines' price; None without tokens or a price."""
        return None if self.tokens is None else self.time.cost(self.tokens)

    @property
    def caution(self) -> str:
        """Parts of the prediction outside the validated range; empty if there are none."""
        return caution(self.time)

    @property
    def advice(self) -> str:
        """Whether compressed exchanges pay on these links; empty if the plan has none."""
        return exchange_advice(self.setup, self.hardware, self.time)

    def search(self, *, target: Target = "fastest", fixed: Fixed = FREE) -> Found:
        """Search for better layouts of the same model, global batch and machines.

        The search varies layout, ZeRO stage, micro-batch, checkpointing and schedule. The number of islands stays.

        Args:
            target: what the best layout minimises.
            fixed: choices that the search must keep.

        Returns:
            The best layouts, each with its limiting part.

        Raises:
            ValueError: the fixed choices leave no layout.
        """
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
        """Return up to three changes that make the plan fit, each with its cost in speed; empty if the plan fits."""
        if self.fits:
            return []
        hardware = self.hardware
        return cheapest_change(self.setup, hardware.machines, efficiency=hardware.efficiency, memory=hardware.memory)

    def table(self) -> PlanTable:
        """Return bytes by category, with a row for each distinct position."""
        return plan_table(self)

    def figure(self) -> Figure:
        """Return a plotly figure: memory by position with the capacity line, next to the parts of a step's time."""
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
    """Results of a search, best first. Prints as a table; `candidates` has the objects."""

    asked: str
    candidates: tuple[Candidate, ...]
    tokens: float | None = None
    """Tokens of the whole training; None if unknown."""

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
        """Search the best layouts of `shape` on the machines of `hardware`.

        Args:
            shape: the model.
            hardware: machines, and how their memory and efficiency are predicted.
            global_size: sequences of a step, over all ranks.
            target: what the best layout minimises.
            dtype: compute dtype; None means the fast one of the device.
            fixed: choices that the search must keep.
            tokens: tokens of the whole training, for days and cost.

        Raises:
            ValueError: the shape or the target is invalid, or the fixed choices leave no layout.
        """
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
    """Return the plan of a training.

    Args:
        model: name of a model (`presets.MODELS`), a shape, a run's configuration, or a complete set-up. The last two
            have their own layout and batch, so the arguments for these are ignored.
        machines: for instance '128x8 A100-80 nvlink3 ib-200x8', the name of a known cluster, or an object.
        tp: tensor-parallel ranks.
        pp: pipeline-parallel ranks.
        cp: context-parallel ranks.
        dp: data-parallel ranks; None: all remaining devices.
        islands: number of DiLoCo islands.
        micro_size: sequences of a micro-batch.
        global_size: sequences of a step, over all ranks; None: one micro-batch on each data-parallel rank.
        dtype: compute dtype; None: the fast one of the device.
        tokens: tokens of the whole training, for days and cost.
        price_per_device_hour: in any currency.
        changes: other fields of `Setup`, for instance zero_stage=1 or checkpointing="block".

    Raises:
        LayoutError: the layout is impossible; the message lists layouts near it that work.
        ValueError: another value is impossible.
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
        # Defaults as in a run's configuration; explicit changes win.
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
    # Not in `plan_setup`: a panel also shows the memory of a configuration that the user is still correcting.
    if problem := quantized_hosts_problem(machines, setup):
        raise LayoutError(problem)
    return made


def plan_setup(setup: Setup, hardware: Hardware, *, tokens: float | None = None) -> Plan:
    """Return the plan of a complete set-up.

    Args:
        setup: the training to predict.
        hardware: machines, and how their memory and efficiency are predicted.
        tokens: tokens of the whole training, for days and cost.

    Raises:
        LayoutError: the layout is impossible for this model or these machines.
        ValueError: another value is impossible.
    """
    check_parallel(setup)
    made = Plan(setup=setup, hardware=hardware, memory=hardware.memory(setup), time=hardware.time(setup), tokens=tokens)
    # After the time, which refuses more ranks than devices: this check visits every rank.
    if problem := islands_problem(hardware.machines, setup.layout.islands, setup.layout.world_size):
        raise LayoutError(problem)
    return made


def check_parallel(setup: Setup) -> None:
    """Check that the model can be trained with the layout, schedule and placement of a set-up.

    Raises:
        LayoutError: the layout does not divide the model, its sequences or the micro-batches.
        ValueError: the shape is invalid, or its states cannot be placed or updated as asked.
    """
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
    """Return the tp nearest to the layout's that divides all of `counts` and the available ranks."""
    common = math.gcd(*counts, layout.world_size // layout.pp // layout.cp // layout.islands)
    return min((tp for tp in range(1, common + 1) if common % tp == 0), key=lambda tp: abs(tp - layout.tp))


def _sequences(setup: Setup, accumulation: int) -> int:
    return setup.micro_size * accumulation * setup.layout.data_size


def _layout(machines: Machines, dp: int | None, **others: int) -> Layout:
    if dp is not None:
        return Layout(dp=dp, **others)
    return Layout.for_world(machines.world_size, **others)


def _what_works(on: Callable[[Layout], Setup], devices: int, asked: Layout) -> str:
    """Return a hint with layouts near `asked`, on all devices or on fewer of them; empty if none works."""

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
