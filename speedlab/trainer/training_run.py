"""What one rank holds of a run: its configuration, data and engine, and whether it goes on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from speedlab.comm import CommStats, Group, World, join, leave
from speedlab.config import ConfigError, RunConfig
from speedlab.config.layout_rules import padded_length, padding_words
from speedlab.config.validation import partition_words
from speedlab.data import Corpus, Sampler, prepare, separated
from speedlab.engine.engine import Engine
from speedlab.engine.initialize import initialize
from speedlab.engine.model_construction import make_whole
from speedlab.models import GPT
from speedlab.planner.formulas import flops_per_token
from speedlab.planner.memory.offload import offload_words
from speedlab.telemetry.records import RunState
from speedlab.telemetry.run_folder import RunFolder
from speedlab.telemetry.run_shape import differences, present_config
from speedlab.trainer.cell_runner import CellRunner
from speedlab.trainer.collective_errors import ControlGroup, agreed, together
from speedlab.trainer.first_batch_proof import FirstBatch
from speedlab.trainer.fit_check import held_now, refuse_what_does_not_fit
from speedlab.trainer.interrupts import Interruption
from speedlab.trainer.ownership import holdings
from speedlab.trainer.reshape import Undone, rebuild

OwnModel = Callable[[], Mapping[str, Any]]
"""Makes anew what the user gave to `cluster.train`: `model`, `loss` and `tp_plan`, as far as they were given."""


class Training:
    """A run as it is built on this rank. The loop moves it on, control words change it, reports tell of it."""

    def __init__(self, folder: RunFolder, own_model: OwnModel | None, cells: CellRunner | None = None) -> None:
        """Collective. Without an `own_model`, or where it has no model, the GPT of the configuration is trained.
        `cells`: what runs a person's cells between two steps; without it there are none."""
        self.folder, self._own_model, self.cells = folder, own_model, cells
        self.world: World = join()
        self.control = Group(range(self.world.size), CommStats(), self.world.device, channel="control")
        self._given = agreed(self.control, self._read_own_model)
        """What the first engine is built of; every later one gets it made anew."""
        self.built_in = "model" not in self._given
        """Whether the model is the GPT of the configuration."""
        agreed(self.control, self._read_folder)
        self.corpus: Corpus = agreed(self.control, self._prepare_data)
        self.train_rows = Sampler(self.corpus.train, self.config.data.sequence_length, self.config.seed)
        self.heldout_rows = Sampler(self.corpus.heldout, self.config.data.sequence_length, self.config.seed)
        self.engine: Engine = together(ControlGroup(self.control), lambda: self._build(self.config))
        self.parameters = self._count_parameters()
        """Of the whole model."""
        self.flops_per_token = self._flops_per_token()
        self.state = RunState.PAUSED
        self.budget: int | None = None
        """Steps left before the run pauses by itself; None when it does not."""
        self.trace_next = True
        """Whether the next step measures its activations: they are new, or of another shape."""
        self.interruption = Interruption()
        self.first_batch = FirstBatch(self)
        self.changing = False
        """True while the engine's state is exchanged for another: if that is cut off, the ranks may differ."""

    @property
    def whole(self) -> bool:
        """Whether the engine holds the state of some step; else the run can only go on from a checkpoint."""
        return not self.changing and bool(self.engine.flats)

    @property
    def shape_text(self) -> str:
        more = [offload_words(self.config.offload), self.inputs_text, self.padding_text]
        return ", ".join(filter(None, [f"zero stage {self.config.zero.stage}", f"{self.layout}", *more]))

    @property
    def inputs_text(self) -> str:
        """What became of inputs of blocks that are to be cut; '' where nobody asked for it."""
        parallel = self.config.parallel
        asked = self.config.activation.partition_inputs
        return partition_words(tp=parallel.tp, sequence=parallel.sequence) if asked else ""

    @property
    def padding_text(self) -> str:
        """What pads the sequences so that cp divides them; '' where nothing does."""
        config, length = self.config, self.config.data.sequence_length
        return padding_words(length, padded_length(config.model, self.layout, config.parallel, length))

    def batches(self, sampler: Sampler, step: int) -> Iterator[tuple[Tensor, ...]]:
        """This rank's micro-batches of a step: tokens and targets, and positions where documents are kept apart."""
        micro, shares = self.batch.micro_size, self.layout.data_size
        for number in range(self.batch.accumulation):
            with self.engine.clock.phase("data"):
                first = (number * shares + self.engine.mesh.data_index) * micro
                rows = sampler.rows(step, self.batch.global_size, first, first + micro)
                if self.corpus.end is not None:
                    batch = tuple(map(self._to_device, separated(rows, self.corpus.end)))
                else:
                    whole = self._to_device(rows)
                    batch = whole[:, :-1], whole[:, 1:]
            yield batch

    def _to_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.world.device, non_blocking=True)

    def evaluate(self) -> float:
        """Mean loss over the configured number of held-out batches; the same rows at every call. Collective."""
        return self.engine.evaluate(
            pair for batch in range(self.config.eval.batches) for pair in self.batches(self.heldout_rows, batch)
        )

    def move_to(self, wanted: RunConfig) -> str:
        """Go on in the shape of `wanted`; returns through what the state went. Collective.

        Raises Refusal when it does not fit the ranks, with nothing changed, and what `rebuild` raises.
        """
        held = held_now(self.engine, self.config, self.parameters, self.control, built_in=self.built_in)
        peaks = refuse_what_does_not_fit(held, wanted)
        through = "in place"
        if differences(self.config, wanted, self.world.size).keys() <= {"zero", "offload"}:
            places = {"optimizer": wanted.offload.optimizer, "parameters": wanted.offload.parameters}
            self.engine.reshape(zero=wanted.zero.stage, offload=places)
        else:
            through = self._rebuild(wanted, sum(memory.model_states for memory in peaks.memory))
        self._take_shape(wanted)
        self.tell_placement()
        self.trace_next = True
        return through

    def tell_placement(self) -> None:
        """Write to the run folder who holds which state of this rank's parameters, and how much of it is here."""
        engine, usual = self.engine, self.config.optimizer.moments
        # They are made in the first step; until then what the configuration's optimizer will make.
        held = holdings(engine.zeros, lambda flat: len(engine.partitioned_optimizer.states_of(flat)) or usual)
        rows = [row | held[row["name"]] for row in engine.placement.described()]
        self.folder.write_placement(self.world.rank, rows)

    @property
    def stopping(self) -> bool:
        """Whether this rank was interrupted, and the others have not all heard of it yet."""
        return self.interruption.asked

    def disconnect(self) -> None:
        """Close this rank's connections: peers that wait for it fail at once instead of at the timeout."""
        with self.interruption.held():  # Half a process group would stay for ever.
            self.engine.disconnect()
            self.control.disconnect()
            leave(failed=True)

    def reconnect(self) -> None:
        """Join the world anew where it was left. Collective."""
        with self.interruption.held():
            self.world = join()
            self.control.reconnect()
            self.engine.reconnect()

    def close(self) -> None:
        if self.engine.flats:  # Else a change of layout was cut off between two engines.
            self.engine.destroy(keep_parameters=False)

    # ---- building ----------------------------------------------------------------------------------------------------

    def _build(self, config: RunConfig) -> Engine:
        # Before any rank meets others: they would wait for one whose model cannot be made.
        given = agreed(self.control, lambda: self._make_own(config))
        arguments: dict[str, Any] = {"model": self._make_gpt, **given}
        engine = initialize(config=config, **arguments)[0]
        if not engine.trains:
            engine.destroy(keep_parameters=False)
            raise ConfigError("model: no parameter is to be trained; set requires_grad of those that shall be")
        return engine

    def _make_own(self, config: RunConfig) -> dict[str, Any]:
        given, self._given = self._given or self._read_own_model(), {}
        return given if self.built_in else given | {"model": make_whole(given["model"], config.seed)}

    def _read_own_model(self) -> dict[str, Any]:
        return dict(self._own_model()) if self._own_model is not None else {}

    def _make_gpt(self) -> nn.Module:
        return GPT(self.config.model)

    def _rebuild(self, wanted: RunConfig, states: int) -> str:
        try:
            with self.interruption.held():
                engine, through = rebuild(
                    self.engine,
                    wanted,
                    states=states,
                    build=self._build,
                    control=self.control,
                    folder=self.folder.path,
                )
        except Undone as undone:
            self.engine, self.world = undone.engine, join()
            raise
        self.engine = engine
        return through

    def _read_folder(self) -> None:
        self._take_shape(present_config(self.folder.config, self.folder.read_events(), self.world.size))

    def _take_shape(self, config: RunConfig) -> None:
        """The layout, ZeRO stage and micro-batches are those of `config` from now on."""
        self.config = config
        self.layout = config.layout(self.world.size, built_in=False)
        self.batch = config.batch.resolve(self.layout.data_size)

    def _prepare_data(self) -> Corpus:
        quiet = self.world.rank != 0
        corpus = prepare(self.config.data, progress=(lambda *_: None) if quiet else print)
        if self.built_in:
            corpus.check_vocabulary(self.config.model.vocab_size)
        for tokens, name in ((corpus.train, "the training text"), (corpus.heldout, "the held-out text")):
            Sampler(tokens, self.config.data.sequence_length, 0, name=name)  # Raises when it is too short.
        return corpus

    def _count_parameters(self) -> int:
        """Of the whole model: each rank counts those for which no other answers."""
        own = sum(math.prod(row.shape) for row in self.engine.placement.rows if row.answers)
        return sum(self.control.collect(own)) // (self.layout.islands * self.layout.replicas)

    def _flops_per_token(self) -> float:
        if self.built_in:
            return flops_per_token(self.config.model, self.config.data.sequence_length)
        return 6.0 * self.parameters
