"""The engine: one rank's part in a training step of a model under any layout, with DeepSpeed's call names.

A thin door: `step/step.py` says where a step stands, `step/drivers.py` computes it, `step/looking.py` measures it,
`step/evaluation.py` computes a loss without one, `checkpoint/` writes and reads its state, `deepspeed_names.py` has
what only scripts for DeepSpeed ask for.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import speedlab.engine.checkpoint as checkpoint
from speedlab.comm import PeerLost, doing, note_update, prepare_exchange
from speedlab.comm.rank_activity import FORWARD
from speedlab.comm.timeouts import Timeout
from speedlab.config import ConfigError
from speedlab.engine.activation_checkpointing import BlockWrapper, kept_inputs_of
from speedlab.engine.deepspeed_api import DeepSpeedNames
from speedlab.engine.drivers import Batch, Driver, driver_of
from speedlab.engine.entry_points import entry_point
from speedlab.engine.evaluation import mean_loss
from speedlab.engine.full_state_dict import full_state_dict, remember_parts
from speedlab.engine.kernels import CpuKernelOverrides, prepare_small_states
from speedlab.engine.loss import LossFunction, check_loss
from speedlab.engine.loss_weights import Count
from speedlab.engine.memory_ledger import MemoryProbe, release_freed_memory, settle_allocator, suit_allocator
from speedlab.engine.phase_timer import PhaseClock
from speedlab.engine.placement_builder import more_on_disk, needs_of, refuse_without_room, zero_policy_of
from speedlab.engine.proof import ProofOnRequest, ProofTokenizer
from speedlab.engine.rng import RandomStreams
from speedlab.engine.sparse_attention import BlockSparse
from speedlab.engine.step_reduction import StepReduction
from speedlab.engine.train_step import StepState
from speedlab.optim.compressed_optimizer import check_whole_gradients
from speedlab.optim.errors import NonFiniteError, name_module
from speedlab.parallel.zero import forget, remember
from speedlab.telemetry.checkpoint_index import numbered_name
from speedlab.telemetry.proof import Proof
from speedlab.telemetry.records import Ledger, Span


class Engine(DeepSpeedNames):
    """A module that trains with its states partitioned over the data-parallel ranks.

    A step is `accumulation` times (call, `backward`, `step`), as in DeepSpeed; only the last `step` updates parameters.
    After an exception in a call the state is what it was before it; one in `backward` gives up the whole step, whose
    micro-batches then have to be run again. All methods that communicate must be called by all ranks. Made by
    `speedlab.initialize`.
    """

    def __init__(
        self,
        *args: Any,
        outside_bytes: int,
        attention: BlockSparse,
        loss: LossFunction | None = None,
        trains: bool = True,
        timeout: Timeout | None = None,
        **kwargs: Any,
    ) -> None:
        """`args`, `kwargs`: of TrainingState. `outside_bytes`: what the process held before. `attention`: what models
        of transformers were given. `loss`: as for `initialize`. `trains`: whether any rank has a parameter to train;
        else the engine only computes, as a frozen teacher's. `timeout`: how long collectives wait while this
        engine lives."""
        super().__init__(*args, **kwargs)
        self._attention, self._timeout = attention, timeout
        device, config = self.world.device, self.config
        self._prepare_exchanges()
        self.clock = PhaseClock(self.traffic, device)
        streams = RandomStreams(config.seed, device)
        self._step = StepState(
            self, streams, accumulation=self.batch.accumulation, around_update=self._around_update, trains=trains
        )
        self._driver: Driver = driver_of(self, self._step, self.clock, loss)
        self._wrapper = BlockWrapper(
            self.zeros,
            checkpointing=config.activation.checkpointing,
            compile=config.compile,
            device=device,
            inputs=kept_inputs_of(config, self.mesh, self.stores),
        )
        self._streams = streams
        for part in self.model_parts:
            streams.attach(part.module, part.zero)
            remember(part.zero)
            remember_parts(part)
        if self.layout.pp == 1:  # Else ranks of other stages do not take part where a parameter is gathered.
            this = weakref.ref(self)
            (zero,) = self.zeros
            zero.finish_update = lambda: engine.finish_update() if (engine := this()) is not None else None
        self._looking = MemoryProbe(self, outside_bytes=outside_bytes)
        self.proofs = ProofOnRequest(
            self,
            self._step,
            lambda loss: self._driver if loss is None else driver_of(self, self._step, self.clock, loss),
        )
        self._settled = not config.offload.used  # Whether lasting memory has its place, as far as somebody cares.
        self._kernels = CpuKernelOverrides(self.modules, config.precision, device, self.dtype)
        self._watch_zero_grad()

    # ---- the step ----------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward. Floating-point inputs are cast to the compute dtype.

        Under a pipeline no rank holds the module: this then computes logits of tokens, on every rank and without
        gradients; training is `train_batch`.
        """
        self._step.refuse_after_cut()
        trains = torch.is_grad_enabled()
        if not trains:
            self.finish_update()
        with doing("forward" if trains else FORWARD, self._number), self._guard():
            return self._driver.forward(args, kwargs)

    def backward(
        self, loss: Tensor, retain_graph: bool = False, *, counted_targets: int | Tensor | None = None
    ) -> Tensor:
        """Gradients of `loss` (a scalar, the mean over this rank's micro-batch), summed over the ranks when they are
        due.

        The loss is scaled here for accumulation, data parallelism and float16; do not scale it before.
        With `loss_over` 'tokens' it weighs as much as targets count in it.

        Args:
            loss: its gradients are added to those of the present micro-batch.
            retain_graph: as torch's, for several losses of one forward, each with a backward of its own.
            counted_targets: how many targets the loss is the mean of, for `loss_over` 'tokens'; None: those that count
                in the labels or targets that the engine was called with.

        Returns `loss` as given.
        Raises RuntimeError when the parameters have changed since its forward, and when the loop calls backward for
        several micro-batches without `step` between them; ValueError if the number of targets is needed and not known.
        """
        if loss.numel() != 1:
            raise ValueError(
                f"backward: the loss has shape {tuple(loss.shape)}; reduce it to one number first, for instance by "
                f"mean()"
            )
        self._step.refuse_frozen("backward")
        self._step.refuse_after_cut()
        self._step.begin_backward()
        with doing("backward", self._number), self._guard():
            self._driver.backward(loss, counted_targets, retain_graph=retain_graph)
        return loss

    def step(self, signals: Sequence[float] = ()) -> bool:
        """End a micro-batch; at the last one of the accumulation, update the parameters. True when they were updated.

        `signals`: a few numbers that are summed over the ranks on the way, into `totals.signals`.
        Raises NonFiniteError when the gradient is not finite and a smaller loss scale cannot help.
        """
        self._step.refuse_frozen("step")
        if not self._step.ends():
            self._step.ended_micro_batch()
            return False
        with doing("update", self._number):
            updated = self._step.end(signals, self.config.clip_norm)
        note_update()
        self.skipped_steps += not updated
        if updated and not self._settled:
            settle_allocator(self.world.device)
            self._settled = True
        self.global_samples += self.batch.global_size
        if self.epochs is not None:
            self.epochs.advance(self.batch.global_size)
        return updated

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of a step of one micro-batch. Not needed: `step` clears them when it updates.

        Args:
            set_to_none: ignored; torch's signature has it.

        Raises:
            RuntimeError: inside an accumulation, whose earlier micro-batches would be lost; `abandon_step` gives the
                step up on purpose.
        """
        self._step.refuse_to_forget("zero_grad")
        self._step.reset()

    def abandon_step(self) -> None:
        """Give up the step under way: its micro-batches have to be run again. Call it on all ranks."""
        self._step.reset()

    def _watch_zero_grad(self) -> None:
        """Let `optimizer.zero_grad()` between a backward and `step` clear gradients, as `zero_grad` does. Elsewhere the
        call finds nothing, as loops have it before each backward."""
        this, own = weakref.ref(self), self.optimizer.zero_grad

        def zero_grad(*args: Any, **kwargs: Any) -> None:
            engine = this()
            if engine is not None and engine._step.micro_batches.backwards and not engine.config.optimizer.in_backward:
                engine._step.refuse_to_forget("optimizer.zero_grad")
                engine._step.reset()
            with nullcontext() if engine is None else engine._step.gradients_shown():
                own(*args, **kwargs)

        # As a scheduler does with `step`: optimizers of all classes come here.
        self.optimizer.zero_grad = zero_grad  # type: ignore[method-assign]  # `destroy` takes it off

    def train_batch(self, batches: Iterable[Batch], *, signals: Callable[[], Sequence[float]] = tuple) -> float:
        """A whole step under any layout: forward and backward of this rank's micro-batches, then the update. After an
        exception the state is that between two steps.

        Args:
            batches: `accumulation` micro-batches: tokens and targets, (B, T) int64 each, and where several documents
                stand in one sequence the tokens' positions in them; dicts of the model's keyword arguments, as Hugging
                Face's; or whatever the `loss` of `initialize` takes. Ranks of one dp index give the same.
            signals: asked at the last moment for what `step` takes.

        Returns the mean loss over the global batch: over all targets in it that count (not -100), however they are
        distributed over micro-batches and ranks. With a `loss` function, with `loss_over` 'micro_batches', or where a
        batch has no targets, it is the mean over micro-batches.

        Raises, before anything is done, ValueError for another number of micro-batches, TypeError where a pipeline gets
        neither pair nor dict, RuntimeError inside a step; and, before the update, ValueError where ranks of one data
        index were given different ones, and where no target counts.
        """
        self._step.refuse_frozen("train_batch")
        self._step.refuse_after_cut()
        self._step.refuse_inside("train_batch")
        self._step.micro_batches.boundary = None
        given = list(batches)
        if len(given) != self.accumulation:
            raise ValueError(
                f"train_batch: {len(given)} micro-batches came, but batch.accumulation is {self.accumulation}; give as "
                "many"
            )
        try:
            self._step.weights.begin_whole_step()
            with doing("train_batch", self._number):
                with self._guard():
                    self._driver.train(given)
                self.step(signals())
        except Exception:
            self._step.reset()
            raise
        assert self.totals is not None
        return self.totals.loss

    @entry_point(refuse=lambda engine: engine._step.refuse_after_cut())
    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Mean loss over all ranks' micro-batches, over what `train_batch` takes the mean, without gradients or
        dropout. Collective.
        Islands compute it with their own parameters, and so do ranks whose optimizer exchanges seldom; behind a meeting
        or an exchange these are one model's.
        Raises ValueError where ranks of one data index were given different ones."""
        self.finish_update()
        over_targets = self.config.loss_over != "micro_batches"
        return mean_loss(batches, self._loss_of, modules=self.modules, mesh=self.mesh, over_targets=over_targets)

    def _loss_of(self, batch: Batch) -> list[tuple[Tensor, Count]]:
        with self._guard():
            return self._driver.evaluate(batch)

    def finish_update(self) -> None:
        if self.partitioned_optimizer.late and not self._step.under_way:
            self._finish_late_update()

    @entry_point("finish_update")
    def _finish_late_update(self) -> None:
        with self._around_update():
            super().finish_update()

    def _refuse_between(self, what: str) -> None:
        """Raises RuntimeError where `what`, which belongs between two steps, cannot be done on this rank."""
        self._step.refuse_after_cut()
        self._step.refuse_inside(what)

    @property
    def _number(self) -> int:
        """Of the step that is under way."""
        return self.global_step + 1

    @property
    def trains(self) -> bool:
        """Whether any rank has a parameter to train; else the engine computes and is never stepped."""
        return self._step.trains

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step."""
        return self._step.micro_batches.size

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the present micro-batch is the last one of its step."""
        return self._step.at_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, `backward` leaves the gradients with each rank; the first one outside sums all of them.

        `step` may be called after each backward, or, as under DistributedDataParallel, once after the last one, which
        is outside: with `batch.accumulation` N that is backward number N of the step.
        """
        before, self._step.sync = self._step.sync, False
        try:
            yield
        finally:
            self._step.sync = before

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the backwards to come end a step, as in DeepSpeed: the loop counts micro-batches by itself.

        `step` may be called after each backward, or once after the last one. With `batch.accumulation` N, which
        gradients are divided by, backward number N is the last one; with 1 the gradients of any number add up. Holds
        until the next call of this, or of `train_batch`.
        """
        self._step.micro_batches.boundary = is_boundary

    @property
    def totals(self) -> StepReduction | None:
        """What the ranks found together in the last step; None before the first."""
        return self._step.totals

    @property
    def global_grad_norm(self) -> float | None:
        """Norm of the last step's gradient over all parameters and ranks, before clipping; None before the first
        step."""
        return self.totals.grad_norm if self.totals else None

    def get_global_grad_norm(self) -> float | None:
        """The same, under the name that it has in DeepSpeed."""
        return self.global_grad_norm

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            with self._kernels.under_way():
                yield
        except BaseException as error:
            for part in self.zeros:
                part.leave_forwards()
            # An interrupt must not wait for peers: what is under way stays as it is until `reconnect`.
            waits_for_nobody = isinstance(error, Exception) or self.world.size == 1
            if waits_for_nobody and self._driver.abandon():
                self._step.reset()
            name_module(error, self.modules, step=self.global_step + 1, rank=self.world.rank)
            raise

    @contextmanager
    def _around_update(self) -> Iterator[None]:
        with self.clock.phase("optimizer"), self._driver.update():
            yield

    # ---- the state ---------------------------------------------------------------------------------------------------

    @entry_point(refuse=lambda engine: engine._refuse_between("reshape"))
    def reshape(self, *, zero: int | None = None, offload: Mapping[str, Any] | None = None) -> None:
        """Change the ZeRO stage, or where states lie (fields of `offload` in the configuration), in place, between two
        steps: states are cut, freed, gathered once, or go to another place. Nothing is lost.

        Raises ValueError for a stage that is none, ConfigError for what cannot be offloaded, both before anything is
        changed, and OffloadError where a place has no room.
        """
        zero = self.zero_stage if zero is None else zero
        if zero not in (0, 1, 2, 3):
            raise ValueError(f"reshape: zero is {zero}; it is 0, 1, 2 or 3")
        config = self.config.replace(offload=offload or {}, zero=zero)
        before, device = self.zeros[0].zero_policy, self.world.device.type
        wanted = zero_policy_of(config, dp=self.group.size, device=device)
        check_whole_gradients(type(self.optimizer), wanted, zero)
        forms, needs = self.partitioned_optimizer.forms, needs_of(config, self.mesh)
        if problem := forms.problem(type(self.optimizer).__name__, needs):
            raise ConfigError(problem)
        prepare_small_states(config, self.world.device)
        self.finish_update()  # It may make states, which count.
        self.tell_of_writes_apart()
        moments = [len(self.partitioned_optimizer.states_of(flat)) for flat in self.flats if flat.trainable]
        more = more_on_disk(self.placement, wanted, dp=self.group.size, moments=max(moments, default=0))
        refuse_without_room(more, self.stores, self.everyone)
        for part in self.zeros:
            part.place(wanted)
        self.partitioned_optimizer.move(before, wanted)
        self.stores.flush()
        self.stores.close_empty()
        suit_allocator(self.world.device, sparing=config.offload.used)
        self._settled = not config.offload.used
        self.zero_stage = zero
        self.config = self.config.model_copy(update={"offload": config.offload})
        release_freed_memory(self.world.device)
        self._looking.start_anew()

    def average_replicas(self) -> None:
        """As of `TrainingState`. Raises RuntimeError inside a step, and where an update was cut off."""
        if self.apart:
            self._average_replicas()

    def make_one(self) -> None:
        """The former name of `average_replicas`."""
        warnings.warn("engine.make_one is now engine.average_replicas", DeprecationWarning, stacklevel=2)
        self.average_replicas()

    @entry_point("average_replicas", refuse=lambda engine: engine._refuse_between("average_replicas"))
    def _average_replicas(self) -> None:
        super().average_replicas()

    @entry_point(alone=lambda engine: engine._masters_here)
    def state_dict(self) -> dict[str, Any]:
        """The module's whole state on every rank (a collective), parameters as float32 masters where they exist, with
        modules' extra states and quantised parameters as `module.state_dict` has them.
        Islands that have trained apart take the mean first, and ranks whose optimizer lets them exchange early; they go
        on from there."""
        self.finish_update()
        self.average_replicas()
        return full_state_dict(self.model_parts, self.mesh["pp"])

    @entry_point(refuse=lambda engine: engine._refuse_between("save_checkpoint"))
    def save_checkpoint(
        self,
        folder: str | Path,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        *,
        wait: bool = True,
        verify: bool = True,
    ) -> Path:
        """Write `folder/tag` (default `step-000123`), between two steps: every rank what it answers for, then a
        manifest.

        Returns its path. `wait=False` comes back when the tensors are copied; `saving` tells of the rest. Without
        `verify` nothing is hashed or brought to the disk: for folders in memory.
        """
        self.finish_update()
        self.take_changes()
        tag = tag or numbered_name(Path(folder), self.global_step)
        return checkpoint.save(self, Path(folder), tag, client_state or {}, wait=wait, verify=verify)

    @property
    def saving(self) -> checkpoint.Saving | None:
        """The last save in the background, under way or ended; None before the first."""
        return checkpoint.saving_of(self)

    @entry_point(refuse=lambda engine: engine._step.refuse_in_a_look("load_checkpoint"), compares_steps=False)
    def load_checkpoint(
        self, folder: str | Path, tag: str | None = None, *, verify: bool = True
    ) -> tuple[Path, dict[str, Any]]:
        """Read `folder/tag`, the newest one in `folder`, or `folder` itself where it is a checkpoint, as
        `save_checkpoint` returned it; any layout and any stage may have written it. A step under way is given up.

        Returns (its path, the client state). Raises CheckpointError, naming the file, before anything is changed.
        """
        loaded = checkpoint.load(self, folder, tag, verify=verify)
        self._step.reset()
        return loaded

    def disconnect(self) -> None:
        """Let go of connections, for a rank that fails: its peers then fail at once instead of waiting for it."""
        self.islands.disconnect()
        self.mesh.disconnect()

    def _prepare_exchanges(self) -> None:
        prepare_exchange(range(self.world.size))
        prepare_exchange(self.group.ranks)  # Of `gather`.

    def reconnect(self) -> None:
        """Use the present world's connections; a step that was cut off is forgotten. Collective."""
        self.mesh.reconnect()
        self._driver.reconnect()
        for zero in self.zeros:
            zero.reconnect()
        self.islands.reconnect()
        self._prepare_exchanges()
        # Always: a first backward that was cut off has left counts of targets that no other mark of the step tells of.
        self._step.reset()

    # ---- looking -----------------------------------------------------------------------------------------------------

    @contextmanager
    def only_looked_at(self) -> Iterator[None]:
        """Inside, what would take it on is refused: steps, another shape, a checkpoint. Passes are not."""
        self._step.only_looked_at = True
        try:
            yield
        finally:
            self._step.only_looked_at = False

    def proof(
        self, batch: Batch | None = None, *, loss: LossFunction | None = None, tokenizer: ProofTokenizer | None = None
    ) -> Proof:
        """Check what training on a batch does: which tokens count, whether documents are separate, which parameters get
        gradients, and more (`speedlab guide proof`). It trains nothing and leaves no trace. Collective, between two
        steps.

        Args:
            batch: A micro-batch, as for `train_batch`. Without it: the last proof, with what the update since then has
                changed.
            loss: `loss(model, batch)`, if the loop computes the loss itself and `initialize` got no loss.
            tokenizer: Decodes token ids; without it the proof shows numbers.

        Returns:
            The findings of all ranks, the same on each. Print it, or show it in a notebook.

        Raises:
            RuntimeError: Inside a step.
            ValueError: Without a batch before the first proof.
            ConfigError: For a loss function that this layout cannot call.
        """
        check_loss(loss, self.layout)
        return self.proofs.of(batch, loss, tokenizer)

    def trace_activations(self) -> AbstractContextManager[None]:
        """Measure the activations of the step inside exactly; it is slower. Later ledgers carry the figure on.

        Not with `compile`: a traced step would run uncompiled, and torch would not compile those blocks again.
        """
        return nullcontext() if self.config.compile else self._looking.trace_activations()

    def ledger(self) -> Ledger:
        """Bytes by category at the peak since the last call."""
        return self._looking.ledger()

    @property
    def timeline(self) -> list[Span]:
        """What this rank of a pipeline did in the last step, in order; [] without a pipeline."""
        return self._driver.timeline

    @property
    def began(self) -> float:
        """When the last step of a pipeline began, in seconds since the epoch; 0 without a pipeline."""
        return self._driver.began

    def train(self, mode: bool = True) -> Engine:
        for module in self.modules:
            module.train(mode)
        return self

    def eval(self) -> Engine:
        return self.train(False)

    @entry_point(alone=lambda engine: True)  # Also where other ranks are gone; a rank that waits says what it does.
    def destroy(self, *, keep_parameters: bool = True) -> None:
        """Give everything back: hooks, flats, optimizer states. The module works on by itself, with its master values.

        Collective where states are partitioned, or ranks have trained apart, as islands: with `keep_parameters` they
        become one model, as for `state_dict`. Without it nothing is gathered, and parameters that are partitioned are
        lost. With it, raises what a late update failed with, of which nobody has heard: its values are of two steps
        then; and what kept ranks apart, each with parameters of its own.
        """
        checkpoint.finish_saving(self)
        parted = self._become_one() if keep_parameters else None
        self.islands.give_up()
        self.partitioned_optimizer.settle()
        self.tell_of_early_writes()
        untold = self.partitioned_optimizer.untold
        self._streams.detach()
        self._kernels.undo()
        self._wrapper.undo()
        self._attention.undo()
        try:
            for part in reversed(self.model_parts):  # Stages of one given module share some of its modules.
                part.zero.detach()
                part.context.detach()
                part.tensor.detach()
                part.zero.leave()
                forget(part.zero)
                if keep_parameters:
                    for flat in part.zero.flats:
                        flat.give_back()
                part.zero.gathers.units.clear()
                part.zero.gathers.order.clear()
        finally:
            self.stores.close()  # Though a disk has lost what was asked for.
        vars(self.optimizer).pop("zero_grad", None)
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            group["params"] = []
        self.partitioned_optimizer.forget()
        self._timeout = None
        release_freed_memory(self.world.device)
        if keep_parameters and untold is not None:
            raise untold
        if parted is not None:
            raise parted

    def _become_one(self) -> Exception | None:
        """At the end: where ranks have trained apart, one model of all; what stood against it."""
        try:
            if self.apart:
                self._step.reset()
                super().average_replicas()
        except (PeerLost, NonFiniteError) as error:
            return error
        return None

    def __repr__(self) -> str:
        count, units = sum(flat.numel for flat in self.flats), sum(len(zero.units) for zero in self.zeros)
        return (
            f"Engine({type(self.module).__name__}, {count:,} parameters here in {units} units, {self.layout}, zero "
            f"{self.zero_stage}, "
            f"{str(self.dtype).removeprefix('torch.')}, rank {self.world.rank} of {self.world.size}, step "
            f"{self.global_step})"
        )
