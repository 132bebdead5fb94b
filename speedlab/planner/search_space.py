"""Enumerate the search space: layouts whose axes divide, batches, ZeRO stages, checkpointing and schedules. No torch.

Values that are fixed do not vary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

from speedlab.config import OffloadConfig, OptimizerConfig, ParallelConfig
from speedlab.config.validation import host_problem, secondary_problem, unequal_problem
from speedlab.layout import REPLICATED, Layout
from speedlab.planner.hardware.devices import Machines
from speedlab.planner.layer_shapes import is_built_in, kv_heads
from speedlab.planner.memory.offload import offload_words
from speedlab.planner.setup import Checkpointing, ModelShape, Setup, can_be_cut, state_problems

_Choice = TypeVar("_Choice")

_MOST_MICRO = 64
"""Sequences of the largest micro-batch in the search, unless it is fixed."""
_WIDEST_TP = 16
LEAST_TOKENS = 4096
"""Minimum tokens of a sequence on a rank for a search over cp. Shorter parts only on request."""
_DEEPEST_PP = 128


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """Values that a search keeps; None: free."""

    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    cp: int | None = None
    islands: int | None = None
    """1 if None: islands change the training itself (DiLoCo), so a search never adds them for speed."""
    zero_stage: int | None = None
    micro_size: int | None = None
    checkpointing: Checkpointing | None = None
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] | None = None
    chunks: int | None = None
    sequence_parallel: bool | None = None
    others: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of `Setup`, which no search varies: attention, offload, the optimizer, synchronisation of islands.
    """

    @property
    def least_layers(self) -> int:
        """Minimum number of layers of a model with this pipeline."""
        pipeline = ParallelConfig(pp=self.pp or 1, schedule=self.schedule or "1f1b", chunks=self.chunks or 2)
        return max(2, pipeline.pp * pipeline.stages_per_rank)

    def __str__(self) -> str:
        """Return the fixed values as text, for instance 'tp 3, zero_stage 2, moments 8bit'; empty if all are free."""
        chosen = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "others"}
        words = [f"{name} {value}" for name, value in chosen.items() if value is not None]
        usual = {"offload": OffloadConfig(), "optimizer": OptimizerConfig(), "masters": "float32", "moments": "float32"}
        kept: dict[str, Any] = {**usual, **self.others}
        words += [f"{state} {kept[state]}" for state in ("masters", "moments") if kept[state] != "float32"]
        words += ["updated in backward"] if kept["optimizer"].in_backward else []
        words += ["inputs of blocks partitioned"] if kept.get("partition_inputs") else []
        return ", ".join(filter(None, [*words, offload_words(kept["offload"])]))


FREE = Fixed()


@dataclass(frozen=True, kw_only=True)
class Space:
    """The search space of a model on machines."""

    shape: ModelShape
    machines: Machines
    dtype: Literal["float32", "bfloat16", "float16"]
    fixed: Fixed

    @property
    def most_devices(self) -> int:
        """Number of all devices, or of the fixed layout if tp, pp and dp are all fixed."""
        tp, pp, dp = self.fixed.tp, self.fixed.pp, self.fixed.dp
        given = tp and pp and dp and tp * pp * dp * (self.fixed.cp or 1) * (self.fixed.islands or 1)
        return given or self.machines.world_size

    def fewer_devices(self) -> list[int]:
        """Return smaller sizes to try: powers of two inside a host, and of whole hosts."""
        machines = self.machines
        in_host = {2**k for k in range(machines.per_host.bit_length())}
        whole = {2**k * machines.per_host for k in range(machines.hosts.bit_length())}
        return sorted(size for size in in_host | whole if size < self.most_devices)

    def setups(self, size: int, global_size: int) -> Iterator[Setup]:
        """Yield every way to train on `size` devices.

        Args:
            size: number of devices.
            global_size: sequences of a step, over all ranks.
        """
        for layout in self._layouts(size):
            if global_size % layout.data_size:
                continue
            share = global_size // layout.data_size
            for micro in self._micro_sizes(share):
                for stage in self._stages(layout):
                    for checkpointing in _only(self.fixed.checkpointing, ("none", "block")):
                        yield from self._schedules(layout, stage, micro, share // micro, checkpointing)

    def smallest(self, global_size: int | None) -> Iterator[Setup]:
        """Yield for each layout of all devices the set-up with the least memory.

        That is one sequence a micro-batch, recomputed blocks and the highest ZeRO stage, unless fixed.

        Args:
            global_size: sequences of a step; None: one micro-batch for each pipeline stage.
        """
        micro = self.fixed.micro_size or 1
        checkpointing = self.fixed.checkpointing or "block"
        for layout in self._layouts(self.most_devices):
            turn = micro * layout.data_size
            share = layout.pp * turn if global_size is None else global_size
            if share % turn == 0:
                stage = max(self._stages(layout))
                yield from self._schedules(layout, stage, micro, share // turn, checkpointing)

    def empty(self, global_size: int | None) -> ValueError:
        """Return the error for an empty search space, with all rules and their numbers.

        Args:
            global_size: sequences of a step; None: free.
        """
        shape, machines, fixed = self.shape, self.machines, self.fixed
        stage = 3 if fixed.zero_stage is None else fixed.zero_stage
        alone = Layout(
            dp=fixed.dp or 1, tp=fixed.tp or 1, pp=fixed.pp or 1, cp=fixed.cp or 1, islands=fixed.islands or 1
        )
        setup = Setup(
            shape=shape,
            layout=alone,
            zero_stage=stage,
            dtype=self.dtype,
            micro_size=fixed.micro_size or 1,
            accumulation=1,
            checkpointing=fixed.checkpointing or "block",
            **fixed.others,
        )
        if problems := state_problems(setup):
            return ValueError("; ".join(problems))
        asked = f" with {self.fixed}" if str(self.fixed) else ""
        batch = self._context_words()
        if global_size is not None:
            shares = "dp" if alone.islands == 1 else "dp × islands"
            batch += f", a global batch of {global_size} divides by micro-batch × {shares}"
        return ValueError(
            f"{shape.name} has no layout on {machines}{asked}: tp divides {shape.heads} heads, {kv_heads(shape)} KV "
            f"heads and ffn_hidden {shape.ffn_hidden}, pp × stages a rank is at most {shape.depth} layers, "
            f"pp × dp × tp divides {machines.world_size} devices{batch}; leave one of them free, or change it"
        )

    def _layouts(self, size: int) -> Iterator[Layout]:
        """Yield layouts of `size` devices: equal islands, each of whole hosts, or several inside one host."""
        islands = self.fixed.islands or 1
        each, rest = divmod(size, islands)
        if each and not rest and islands_problem(self.machines, islands, size) is None:
            yield from (replace(layout, islands=islands) for layout in self._layouts_of_island(each))

    def _layouts_of_island(self, size: int) -> Iterator[Layout]:
        shape, per_host, fixed = self.shape, self.machines.per_host, self.fixed
        for tp in _only(fixed.tp, range(1, min(per_host, _WIDEST_TP, size) + 1)):
            # tp divides the devices of a host, so no group crosses hosts (fast links); a fixed tp may cross them.
            if size % tp or (fixed.tp is None and per_host % tp):
                continue
            if shape.heads % tp or kv_heads(shape) % tp or shape.ffn_hidden % tp:
                continue
            for pp in _only(fixed.pp, range(1, min(shape.depth, _DEEPEST_PP, size // tp) + 1)):
                if pp > shape.depth:
                    continue
                for cp in _only(fixed.cp, [2**k for k in range((size // (tp * pp)).bit_length())]):
                    dp, rest = divmod(size, tp * pp * cp)
                    layout = Layout(dp=max(1, dp), tp=tp, pp=pp, cp=cp)
                    if rest == 0 and dp and fixed.dp in (None, dp) and self._cuts_sequences(layout):
                        yield layout

    def _cuts_sequences(self, layout: Layout) -> bool:
        """Return whether the search considers this cp."""
        if layout.cp == 1:
            return True
        setup = Setup(shape=self.shape, layout=layout, dtype=self.dtype, **_ALONE, **self.fixed.others)
        if self.fixed.cp is None and not worth_cutting(setup):
            return False
        return can_be_cut(setup, on_host=self.machines.device.on_host)

    def _context_words(self) -> str:
        cp, islands = self.fixed.cp, self.fixed.islands
        words = f", cp {cp} divides sequences of {self.shape.sequence_length:,}" if cp else ""
        return f"{words}, islands are equal, of whole hosts or inside one" if islands else words

    def _micro_sizes(self, share: int) -> list[int]:
        powers = [2**k for k in range(_MOST_MICRO.bit_length()) if 2**k <= min(share, _MOST_MICRO)]
        return [micro for micro in _only(self.fixed.micro_size, powers) if share % micro == 0]

    def _stages(self, layout: Layout) -> Sequence[int]:
        offload = self.fixed.others.get("offload")
        if offload is not None and offload.parameters != "none":
            return _only(self.fixed.zero_stage, (3,))
        if layout.replicas == 1:
            return _only(self.fixed.zero_stage, (0,))
        # With a pipeline, stages 2 and 3 keep whole gradients during a step anyway, and gather for each micro-batch.
        return _only(self.fixed.zero_stage, (0, 1) if layout.pp > 1 else (0, 1, 2, 3))

    def _schedules(
        self, layout: Layout, stage: int, micro: int, accumulation: int, checkpointing: Checkpointing
    ) -> Iterator[Setup]:
        fixed, shape = self.fixed, self.shape
        sequence = layout.tp > 1 if fixed.sequence_parallel is None else fixed.sequence_parallel
        setup = Setup(
            shape=shape,
            layout=layout,
            zero_stage=stage,
            dtype=self.dtype,
            micro_size=micro,
            accumulation=accumulation,
            checkpointing=checkpointing,
            sequence_parallel=sequence,
            **fixed.others,
        )
        if state_problems(setup) or not can_be_cut(setup, on_host=self.machines.device.on_host):
            return
        if layout.pp == 1:
            yield setup
            return
        for schedule in _only(fixed.schedule, ("1f1b", "interleaved")):
            stages = ParallelConfig(pp=layout.pp, schedule=schedule).stages_per_rank
            chunks = fixed.chunks or stages if stages > 1 else 1
            if chunks == 1 or (accumulation % layout.pp == 0 and shape.depth >= chunks * layout.pp):
                yield replace(setup, schedule=schedule, chunks=chunks)


_ALONE: dict[str, Any] = {"zero_stage": 0, "micro_size": 1, "accumulation": 1}


def worth_cutting(setup: Setup) -> bool:
    """Return whether a search splits sequences along this cp.

    Args:
        setup: the training. The engine splits sequences of its built-in GPT only, and short parts cost more than they
            save.
    """
    shape = setup.shape
    return is_built_in(shape) and shape.sequence_length // setup.layout.cp >= LEAST_TOKENS


def _only(fixed: _Choice | None, free: Sequence[_Choice]) -> Sequence[_Choice]:
    return free if fixed is None else (fixed,)


def islands_problem(machines: Machines, islands: int, ranks: int) -> str | None:
    """Return why these machines cannot have so many islands, in the engine's words; None if they can.

    Args:
        machines: the hosts.
        islands: number of islands.
        ranks: number of all ranks.
    """
    if islands == 1:
        return None
    return host_problem(islands, [str(rank // machines.per_host) for rank in range(ranks)])


def quantized_hosts_problem(machines: Machines, setup: Setup) -> str | None:
    """Return why ZeRO++'s host-aware switches cannot work on these machines, in the engine's words; None if they can.

    Args:
        machines: the hosts.
        setup: the training.
    """
    layout = setup.layout
    if layout.replicas == 1 or not (setup.quantized_gradients or setup.secondary_partition):
        return None
    for rank in range(layout.world_size):
        own = layout.coordinates(rank)
        if any(own[axis] for axis in REPLICATED):
            continue  # Check each group once, at its first rank.
        group = layout.peers(rank, *REPLICATED)
        counts = list(Counter(peer // machines.per_host for peer in group).values())
        if problem := unequal_problem(counts) or secondary_problem(setup.secondary_partition, counts[0]):
            return problem
    return None
