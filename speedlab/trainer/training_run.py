"""The state of a run on one rank: its configuration, data, engine, and run state."""

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
from speedlab.telemetry.current_config import differences, present_config
from speedlab.telemetry.records import RunState
from speedlab.telemetry.run_folder import RunFolder
from speedlab.trainer.cell_runner import CellRunner
from speedlab.trainer.collective_errors import ControlGroup, agreed, together
from speedlab.trainer.first_batch_proof import FirstBatch
from speedlab.trainer.fit_check import held_now, holdings, refuse_what_does_not_fit
from speedlab.trainer.interrupts import Interruption
from speedlab.trainer.reshape import Undone, rebuild

OwnModel = Callable[[], Mapping[str, Any]]
"""Makes what the user passed to `cluster.train`, new at each call: `model`, `loss` and `tp_plan`, if given."""


class Training:
    """The state of a run on this rank. The loop trains it, commands change it, and the reporter reads it."""

    def __init__(self, folder: RunFolder, own_model: OwnModel | None, cells: CellRunner | None = None) -> None:
        """Prepare the data and build the engine. Collective.

        Args:
            folder: Run folder.
            own_model: Makes the user's model. If None or without a model, the GPT of the configuration is trained.
            cells: Runs the user's cells between two steps; None if cells are not available.
        """
        self.folder, self._own_model, self.cells = folder, own_model, cells
        self.world: World = join()
        self.control = Group(range(self.world.size), CommStats(), self.world.device, channel="control")
        self._given = agreed(self.control, self._read_own_model)
        """Arguments of the first engine. Later engines get new ones."""
        self.built_in = "model" not in self._given
        """Whether the model is the GPT of the configuration."""
        agreed(self.control, self._read_folder)
        self.corpus: Corpus = agreed(self.control, self._prepare_data)
        self.train_rows = Sampler(self.corpus.train, self.config.data.sequence_length, self.config.seed)
        self.heldout_rows = Sampler(self.corpus.heldout, self.config.data.sequence_length, self.config.seed)
        self.engine: Engine = together(ControlGroup(self.control), lambda: self._build(self.config))
        self.parameters = self._count_parameters()
        """Number of parameters of the whole model."""
        self.flops_per_token = self._flops_per_token()
        self.state = RunState.PAUSED
        self.budget: int | None = None
        """Steps left before the run pauses by itself; None without such a limit."""
        self.trace_next = True
        """Whether the next step measures its activations, because the engine or its layout is new."""
        self.interruption = Interruption()
        self.first_batch = FirstBatch(self)
        self.changing = False
        """True while the engine's state is being replaced. If this is cut off, the ranks may differ."""

    @property
    def whole(self) -> bool:
        """Whether the engine holds the complete state of a step. If not, the run can only continue from a
        checkpoint.
        """
        return not self.changing and bool(self.engine.flats)

    @property
    def shape_text(self) -> str:
        """ZeRO stage, layout, offload and padding as one text."""
        more = [offload_words(self.config.offload), self.inputs_text, self.padding_text]
        return ", ".join(filter(None, [f"zero stage {self.config.zero.stage}", f"{self.layout}", *more]))

    @property
    def inputs_text(self) -> str:
        """How checkpointed inputs of blocks are partitioned; "" if the configuration does not ask for it."""
        parallel = self.config.parallel
        asked = self.config.activation.partition_inputs
        return partition_words(tp=parallel.tp, sequence=parallel.sequence) if asked else ""

    @property
    def padding_text(self) -> str:
        """How sequences are padded so that cp divides them; "" without padding."""
        config, length = self.config, self.config.data.sequence_length
        return padding_words(length, padded_length(config.model, self.layout, config.parallel, length))

    def batches(self, sampler: Sampler, step: int) -> Iterator[tuple[Tensor, ...]]:
        """Yield this rank's micro-batches of a step.

        Args:
            sampler: Rows of the training or of the held-out text.
            step: Number of the step.

        Yields:
            Tokens and targets, (micro_size, sequence_length) each; also positions if documents are separated.
        """
        micro, shares = self.batch.micro_size, self.layout.data_size
        for number in range(self.batch.accumulation):
            with self.engine.clock.phase("data"):
                # Shares interleave by micro-batch, so a global batch has the same rows under every layout.
                first = (number * shares + self.engine.mesh.data_index) * micro
                rows = sampler.rows(step, self.batch.global_size, first, first + micro)
                if self.corpus.end is not None:
                    batch = tuple(map(self._to_device, separated(rows, self.corpus.end)))
                else:
                    whole = self._to_device(rows)
                    # Targets are the inputs shifted by one token.
                    batch = whole[:, :-1], whole[:, 1:]
            yield batch

    def _to_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.world.device, non_blocking=True)

    def evaluate(self) -> float:
        """Return the mean loss of the configured number of held-out batches, the same rows at every call.
        Collective.
        """
        return self.engine.evaluate(
            pair for batch in range(self.config.eval.batches) for pair in self.batches(self.heldout_rows, batch)
        )

    def move_to(self, wanted: RunConfig) -> str:
        """Continue with the layout of `wanted`. Collective.

        Args:
            wanted: Configuration with the new layout, ZeRO stage or offload.

        Returns:
            How the state was transferred: "in place", "memory" or "run folder".

        Raises:
            CommandRefused: If the layout does not fit in memory; nothing has changed.
            Undone: If the new engine could not be built; the run has its old layout.
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
        """Write to the run folder which ranks hold each state of this rank's parameters, and how much this rank
        holds.
        """
        engine, usual = self.engine, self.config.optimizer.moments
        # Moments are created in the first step. Before it, use the number of the configured optimizer.
        held = holdings(engine.zeros, lambda flat: len(engine.partitioned_optimizer.states_of(flat)) or usual)
        rows = [row | held[row["name"]] for row in engine.placement.described()]
        self.folder.write_placement(self.world.rank, rows)

    @property
    def stopping(self) -> bool:
        """Whether this rank was interrupted and its peers do not all know it yet."""
        return self.interruption.asked

    def disconnect(self) -> None:
        """Close this rank's connections, so that waiting peers fail at once and not at the timeout."""
        with self.interruption.held():  # An interrupt here would leave half of a process group open.
            self.engine.disconnect()
            self.control.disconnect()
            leave(failed=True)

    def reconnect(self) -> None:
        """Rejoin the world if this rank left it. Collective."""
        with self.interruption.held():
            self.world = join()
            self.control.reconnect()
            self.engine.reconnect()

    def close(self) -> None:
        """Destroy the engine."""
        if self.engine.flats:  # An engine without flats was destroyed by a reshape that was cut off.
            self.engine.destroy(keep_parameters=False)

    # ---- building ----------------------------------------------------------------------------------------------------

    def _build(self, config: RunConfig) -> Engine:
        # Make the model before any collective; otherwise peers would wait for a rank that failed.
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
            # The old layout was rebuilt in a new world.
            self.engine, self.world = undone.engine, join()
            raise
        self.engine = engine
        return through

    def _read_folder(self) -> None:
        self._take_shape(present_config(self.folder.config, self.folder.read_events(), self.world.size))

    def _take_shape(self, config: RunConfig) -> None:
        """Use the layout, ZeRO stage and micro-batches of `config` from now on."""
        self.config = config
        self.layout = config.layout(self.world.size, built_in=False)
        self.batch = config.batch.resolve(self.layout.data_size)

    def _prepare_data(self) -> Corpus:
        quiet = self.world.rank != 0
        corpus = prepare(self.config.data, progress=(lambda *_: None) if quiet else print)
        if self.built_in:
            corpus.check_vocabulary(self.config.model.vocab_size)
        for tokens, name in ((corpus.train, "the training text"), (corpus.heldout, "the held-out text")):
            Sampler(tokens, self.config.data.sequence_length, 0, name=name)  # Raises if the text is too short.
        return corpus

    def _count_parameters(self) -> int:
        """Count the parameters of the whole model; each rank counts those that only it reports."""
        own = sum(math.prod(row.shape) for row in self.engine.placement.rows if row.answers)
        # Every island and every replica counts the whole model once.
        return sum(self.control.collect(own)) // (self.layout.islands * self.layout.replicas)

    def _flops_per_token(self) -> float:
        if self.built_in:
            return flops_per_token(self.config.model, self.config.data.sequence_length)
        # The usual estimate for other models: 2 N for forward and 4 N for backward, without attention.
        return 6.0 * self.parameters
