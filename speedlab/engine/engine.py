"""The engine: one rank's part in a training step of a model under any layout, with DeepSpeed's call names.

Engine methods check the call and delegate. In reading order:

1. `train_step.py` counts micro-batches and ends the step with the update.
2. `drivers.py` runs forward and backward, with or without a pipeline.
3. `memory_ledger.py` measures memory.
4. `evaluation.py` computes the mean loss without training.
5. `checkpoint/` writes and reads the state.
6. `deepspeed_api.py` adds the names that only DeepSpeed scripts call.
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
from speedlab.optim.communicating_protocols import check_whole_gradients
from speedlab.optim.errors import NonFiniteError, name_module
from speedlab.parallel.zero import forget, remember
from speedlab.telemetry.checkpoint_index import numbered_name
from speedlab.telemetry.proof import Proof
from speedlab.telemetry.records import Ledger, Span


class Engine(DeepSpeedNames):
    """A module that trains with its states partitioned over the data-parallel ranks.

    A step is `accumulation` times (call, `backward`, `step`), as in DeepSpeed. Only the last `step` updates parameters.
    An exception in a call leaves the state unchanged. An exception in `backward` gives up the whole step: run its
    micro-batches again. All ranks must call all methods that communicate. `speedlab.initialize` makes an engine.
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
        """Wrap the blocks and prepare the step; `speedlab.initialize` calls this.

        Args:
            *args: Passed to `TrainingState`.
            outside_bytes: Memory that the process held before, in bytes.
            attention: The attention that was installed in transformers models.
            loss: As for `initialize`.
            trains: Whether any rank has a parameter to train. Otherwise the engine only computes, as a frozen teacher.
            timeout: How long collectives wait while this engine exists.
            **kwargs: Passed to `TrainingState`.
        """
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
            # Seeds the forwards, so that dropout is equal under all layouts.
            streams.attach(part.module, part.zero)
            # `speedlab.gather` finds the partitions of a parameter through these registries.
            remember(part.zero)
            remember_parts(part)
        if self.layout.pp == 1:  # Under a pipeline, ranks of other stages do not take part in a gather.
            # A weak reference, because the engine owns the Zero.
            this = weakref.ref(self)
            (zero,) = self.zeros
            zero.finish_update = lambda: engine.finish_update() if (engine := this()) is not None else None
        self._looking = MemoryProbe(self, outside_bytes=outside_bytes)
        self.proofs = ProofOnRequest(
            self,
            self._step,
            lambda loss: self._driver if loss is None else driver_of(self, self._step, self.clock, loss),
        )
        self._settled = not config.offload.used  # Whether the allocator was already settled; needed only with offload.
        self._kernels = CpuKernelOverrides(self.modules, config.precision, device, self.dtype)
        self._watch_zero_grad()

    # ---- the step ----------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward. Floating-point inputs are cast to the compute dtype.

        Under a pipeline no rank holds the whole module. Then this computes logits of tokens, on every rank and without
        gradients; use `train_batch` for training.
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
        """Compute the gradients of `loss`; at the last micro-batch, reduce them over the ranks.

        The engine scales the loss for accumulation, data parallelism and float16. Do not scale it before. With
        `loss_over` 'tokens' the weight of the loss is its number of counted targets.

        Args:
            loss: A scalar, the mean over the micro-batch of this rank. Gradients are added to those of the micro-batch.
            retain_graph: As in torch: for several losses of one forward, each with its own backward.
            counted_targets: The number of targets that the loss is the mean of, for `loss_over` 'tokens'. None counts
                the labels or targets that the engine was called with.

        Returns:
            `loss`, unchanged.

        Raises:
            RuntimeError: If parameters changed after the forward, or if the loop calls backward for several
                micro-batches without `step` between them.
            ValueError: If the loss is no scalar, or if the number of targets is needed and unknown.
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
        """End a micro-batch; at the last micro-batch of the accumulation, update the parameters.

        Args:
            signals: A few numbers to sum over the ranks, into `totals.signals`.

        Returns:
            True if the parameters were updated.

        Raises:
            NonFiniteError: If the gradient is not finite and a smaller loss scale cannot help.
        """
        self._step.refuse_frozen("step")
        if not self._step.ends():
            self._step.ended_micro_batch()
            return False
        with doing("update", self._number):
            updated = self._step.end(signals, self.config.clip_norm)
        note_update()
        self.skipped_steps += not updated
        # With offload: all lasting memory is allocated after the first update.
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
        """Make `optimizer.zero_grad()` between a backward and `step` clear gradients, as `zero_grad` does.

        At other times the call finds nothing to clear; many loops call it before each backward.
        """
        # A weak reference, so that an optimizer which the caller keeps does not keep the engine.
        this, own = weakref.ref(self), self.optimizer.zero_grad

        def zero_grad(*args: Any, **kwargs: Any) -> None:
            engine = this()
            if engine is not None and engine._step.micro_batches.backwards and not engine.config.optimizer.in_backward:
                engine._step.refuse_to_forget("optimizer.zero_grad")
                engine._step.reset()
            with nullcontext() if engine is None else engine._step.gradients_shown():
                own(*args, **kwargs)

        # A patched method, as torch's schedulers do with `step`, works for optimizers of all classes.
        self.optimizer.zero_grad = zero_grad  # type: ignore[method-assign]  # `destroy` takes it off

    def train_batch(self, batches: Iterable[Batch], *, signals: Callable[[], Sequence[float]] = tuple) -> float:
        """Run a whole step under any layout: forward and backward of all micro-batches, then the update.

        An exception leaves the state as it is between two steps.

        Args:
            batches: `accumulation` micro-batches of this rank. Ranks of one dp index give the same. A micro-batch is
                one of:
                tokens and targets, (B, T) int64 each, plus positions if a sequence packs several documents; a dict of
                the model's keyword arguments, as in Hugging Face; or whatever the `loss` of `initialize` takes.
            signals: Called right before the update; returns the `signals` of `step`.

        Returns:
            The mean loss over the global batch: over all counted targets (not -100) on all ranks. With a `loss`
            function, with `loss_over` 'micro_batches', or without targets: the mean over micro-batches.

        Raises:
            ValueError: Before anything is computed: for a wrong number of micro-batches. Before the update: if ranks of
                one data index got different batches, or if no target counts.
            TypeError: If a pipeline gets neither a pair nor a dict.
            RuntimeError: Inside a step.
        """
        self._step.refuse_frozen("train_batch")
        self._step.refuse_after_cut()
        self._step.refuse_inside("train_batch")
        self._step.micro_batches.boundary = None
        # Read all batches first: their number is checked before anything runs.
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
                # Called only now, because the newest signals count.
                self.step(signals())
        except Exception:
            self._step.reset()
            raise
        assert self.totals is not None
        return self.totals.loss

    @entry_point(refuse=lambda engine: engine._step.refuse_after_cut())
    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Return the mean loss over the micro-batches of all ranks, without gradients or dropout. Collective.

        The mean is over the same items as in `train_batch`. Islands, and ranks of an optimizer with local steps, use
        their own parameters; after a meeting or an exchange these are equal.

        Args:
            batches: Micro-batches of this rank, as for `train_batch`.

        Raises:
            ValueError: If ranks of one data index got different micro-batches.
        """
        self.finish_update()
        over_targets = self.config.loss_over != "micro_batches"
        return mean_loss(batches, self._loss_of, modules=self.modules, mesh=self.mesh, over_targets=over_targets)

    def _loss_of(self, batch: Batch) -> list[tuple[Tensor, Count]]:
        with self._guard():
            return self._driver.evaluate(batch)

    def finish_update(self) -> None:
        """Apply a pending delayed update, as `TrainingState` does; inside a step this does nothing."""
        if self.partitioned_optimizer.late and not self._step.under_way:
            self._finish_late_update()

    @entry_point("finish_update")
    def _finish_late_update(self) -> None:
        with self._around_update():
            super().finish_update()

    def _refuse_between(self, what: str) -> None:
        """Raise RuntimeError if this rank cannot do `what` now, which is allowed only between two steps."""
        self._step.refuse_after_cut()
        self._step.refuse_inside(what)

    @property
    def _number(self) -> int:
        """Return the number of the current step."""
        return self.global_step + 1

    @property
    def trains(self) -> bool:
        """Return whether any rank has a parameter to train; otherwise the engine only computes."""
        return self._step.trains

    @property
    def accumulation(self) -> int:
        """Return the number of micro-batches of a step."""
        return self._step.micro_batches.size

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the current micro-batch is the last one of its step."""
        return self._step.at_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients local inside; the first backward outside reduces all of them.

        Call `step` after each backward, or once after the last one, outside, as with DistributedDataParallel. With
        `batch.accumulation` N the backward outside is backward number N of the step.
        """
        before, self._step.sync = self._step.sync, False
        try:
            yield
        finally:
            self._step.sync = before

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether the next backwards end a step, as in DeepSpeed, for a loop that counts micro-batches itself.

        Call `step` after each backward, or once after the last one. Gradients are divided by `batch.accumulation`.

        Args:
            is_boundary: True: the next backward is the last one of its step. With `batch.accumulation` N that must be
                backward number N; with 1, any number of gradients adds up. Valid until the next call, or `train_batch`.
        """
        self._step.micro_batches.boundary = is_boundary

    @property
    def totals(self) -> StepReduction | None:
        """Return the reduced numbers of the last step; None before the first step."""
        return self._step.totals

    @property
    def global_grad_norm(self) -> float | None:
        """Return the gradient norm of the last step over all parameters and ranks, before clipping; None
        before the first.
        """
        return self.totals.grad_norm if self.totals else None

    def get_global_grad_norm(self) -> float | None:
        """Return `global_grad_norm`, under DeepSpeed's name."""
        return self.global_grad_norm

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            with self._kernels.under_way():
                yield
        except BaseException as error:
            for part in self.zeros:
                part.leave_forwards()
            # An interrupt must not wait for peers: pending work keeps its state until `reconnect`.
            waits_for_no_one = isinstance(error, Exception) or self.world.size == 1
            if waits_for_no_one and self._driver.abandon():
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
        """Change the ZeRO stage or the offloading in place, between two steps. No state is lost.

        Args:
            zero: The new ZeRO stage; None keeps the present one.
            offload: Fields of the configuration's `offload` section to change.

        Raises:
            ValueError: For an unknown stage, before any change.
            ConfigError: For a state that cannot be offloaded, before any change.
            OffloadError: If a store has no room.
        """
        zero = self.zero_stage if zero is None else zero
        if zero not in (0, 1, 2, 3):
            raise ValueError(f"reshape: zero is {zero}; it is 0, 1, 2 or 3")
        config = self.config.replace(offload=offload or {}, zero=zero)
        before, device = self.zeros[0].zero_policy, self.world.device.type
        wanted = zero_policy_of(config, dp=self.group.size, device=device)
        # All checks come before any state moves.
        check_whole_gradients(type(self.optimizer), wanted, zero)
        forms, needs = self.partitioned_optimizer.forms, needs_of(config, self.mesh)
        if problem := forms.problem(type(self.optimizer).__name__, needs):
            raise ConfigError(problem)
        prepare_small_states(config, self.world.device)
        self.finish_update()  # The update may create optimizer states, which the room check below counts.
        self.report_lost_writes()
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
        self._looking.start_again()

    def average_replicas(self) -> None:
        """Average replicas as `TrainingState` does.

        Raises RuntimeError inside a step or after an interrupted update.
        """
        if self.replicas_differ:
            self._average_replicas()

    def make_one(self) -> None:
        """Call `average_replicas`; this is the former name."""
        warnings.warn("engine.make_one is now engine.average_replicas", DeprecationWarning, stacklevel=2)
        self.average_replicas()

    @entry_point("average_replicas", refuse=lambda engine: engine._refuse_between("average_replicas"))
    def _average_replicas(self) -> None:
        super().average_replicas()

    @entry_point(alone=lambda engine: engine._masters_here)
    def state_dict(self) -> dict[str, Any]:
        """Return the whole module's state on every rank. Collective.

        Parameters are float32 masters if masters exist. Extra states of modules and quantised parameters are as in
        `module.state_dict`. Islands, and ranks of an optimizer with local steps, average first and continue from the
        mean.
        """
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
        """Write a checkpoint to `folder/tag`, between two steps: every rank writes its part, then rank 0 the manifest.

        Args:
            folder: The folder of all checkpoints.
            tag: The name of this checkpoint; None makes `step-000123` from the number of updates.
            client_state: Values of the caller, returned by `load_checkpoint`.
            wait: False returns after the tensors are copied; `saving` reports the rest.
            verify: False skips hashes and the sync to disk, for folders in memory.

        Returns:
            The path of the checkpoint.
        """
        self.finish_update()
        self.take_changes()
        tag = tag or numbered_name(Path(folder), self.global_step)
        return checkpoint.save(self, Path(folder), tag, client_state or {}, wait=wait, verify=verify)

    @property
    def saving(self) -> checkpoint.Saving | None:
        """Return the last background save, running or ended; None before the first one."""
        return checkpoint.saving_of(self)

    @entry_point(refuse=lambda engine: engine._step.refuse_in_a_look("load_checkpoint"), compares_steps=False)
    def load_checkpoint(
        self, folder: str | Path, tag: str | None = None, *, verify: bool = True
    ) -> tuple[Path, dict[str, Any]]:
        """Read a checkpoint that any layout and any ZeRO stage wrote. A running step is given up.

        Args:
            folder: The folder of all checkpoints, or one checkpoint, as `save_checkpoint` returned it.
            tag: The name of the checkpoint; None takes the newest one in `folder`.
            verify: Check the hashes.

        Returns:
            (path of the checkpoint, client state).

        Raises:
            CheckpointError: Before any change; the error names the file.
        """
        loaded = checkpoint.load(self, folder, tag, verify=verify)
        self._step.reset()
        return loaded

    def disconnect(self) -> None:
        """Close the connections of a failing rank, so that its peers fail at once instead of waiting."""
        self.islands.disconnect()
        self.mesh.disconnect()

    def _prepare_exchanges(self) -> None:
        prepare_exchange(range(self.world.size))
        prepare_exchange(self.group.ranks)  # For the gathers of parameters.

    def reconnect(self) -> None:
        """Use the present world's connections and forget an interrupted step. Collective."""
        self.mesh.reconnect()
        self._driver.reconnect()
        for zero in self.zeros:
            zero.reconnect()
        self.islands.reconnect()
        self._prepare_exchanges()
        # Always: an interrupted first backward leaves target counts, and nothing else marks the step as started.
        self._step.reset()

    # ---- proof, memory, timeline -------------------------------------------------------------------------------------

    @contextmanager
    def only_looked_at(self) -> Iterator[None]:
        """Refuse, inside, everything that advances the run: steps, reshape, checkpoints.

        Forward and backward are allowed.
        """
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
        """Measure the activations of the steps inside exactly. This is slower. Later ledgers reuse the figure.

        With `compile` this does nothing: a traced step would run uncompiled, and torch would not compile the blocks
        again.
        """
        return nullcontext() if self.config.compile else self._looking.trace_activations()

    def ledger(self) -> Ledger:
        """Return bytes by category at the memory peak since the last call."""
        return self._looking.ledger()

    @property
    def timeline(self) -> list[Span]:
        """Return the spans of this pipeline rank in the last step, in order; [] without a pipeline."""
        return self._driver.timeline

    @property
    def began(self) -> float:
        """Return when the last step of a pipeline began, in seconds since the epoch; 0 without a pipeline."""
        return self._driver.began

    def train(self, mode: bool = True) -> Engine:
        """Set the training mode of all model parts.

        Args:
            mode: As in torch.

        Returns:
            The engine.
        """
        for module in self.modules:
            module.train(mode)
        return self

    def eval(self) -> Engine:
        """Set the evaluation mode of all model parts, and return the engine."""
        return self.train(False)

    @entry_point(
        alone=lambda engine: True
    )  # Allowed alone, even if other ranks are gone; a rank that waits shows its call.
    def destroy(self, *, keep_parameters: bool = True) -> None:
        """Release everything: hooks, flat parameters, optimizer states.

        The module keeps working, with its master values.

        Collective if states are partitioned or replicas differ. With `keep_parameters`, islands become one model, as
        for `state_dict`.

        Args:
            keep_parameters: False skips the gather; partitioned parameters are then lost.

        Raises:
            Exception: With `keep_parameters`: the unreported error of a delayed update, whose values then belong to two
                different steps.
            PeerLost: If replicas could not be averaged; each rank then keeps its own parameters.
            NonFiniteError: As PeerLost.
        """
        checkpoint.finish_saving(self)
        # Errors are raised at the end, after everything is released.
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
            for part in reversed(
                self.model_parts
            ):  # Pipeline stages of one module share submodules, so undo in reverse order.
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
            self.stores.close()  # Close the stores even if a disk has lost a state.
        # Undo `_watch_zero_grad`.
        vars(self.optimizer).pop("zero_grad", None)
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            # Free the segments, even if the caller or a scheduler keeps the optimizer.
            group["params"] = []
        self.partitioned_optimizer.forget()
        self._timeout = None
        release_freed_memory(self.world.device)
        if keep_parameters and untold is not None:
            raise untold
        if parted is not None:
            raise parted

    def _become_one(self) -> Exception | None:
        """Average replicas that differ, at the end; return the error if that fails."""
        try:
            if self.replicas_differ:
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
