"""Run the checks of the proof on all ranks, and combine their findings in one `Proof`.

1. Known without computing: the batch, parameter groups, dtypes, the vocabulary.
2. Seen in a step or a trial (forward and backward without an update): counted tokens, gradients.
3. Seen in forwards without gradients: document separation, and the split into micro-batches.
4. Changed by an update.

All ranks make the same calls. Ranks try each check together; a check that raises becomes a finding.

`ProofOnRequest` implements `engine.proof`: a proof in the caller's own loop, and of the update that follows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

import speedlab.engine.proof.counted_tokens as counted_tokens
import speedlab.engine.proof.document_separation as document_separation
import speedlab.engine.proof.dtypes as dtypes
import speedlab.engine.proof.first_update as first_update
import speedlab.engine.proof.forward_checks as forwards
import speedlab.engine.proof.micro_batch_split as batch_cut
import speedlab.engine.proof.parameter_groups as parameter_groups
from speedlab.comm import PeerLost
from speedlab.engine.drivers import Batch, Driver
from speedlab.engine.loss import LossFunction
from speedlab.engine.proof.forward_checks import left_as_it_was
from speedlab.engine.proof.observation import Observation, token_embedding
from speedlab.engine.proof.token_batch import NoTokensError, TokenBatch, token_batch
from speedlab.engine.state import TrainingState
from speedlab.engine.train_step import StepState
from speedlab.telemetry.proof import Finding, ParameterGroup, Proof, Severity

T = TypeVar("T")
Attempt = Callable[[Callable[[], Any]], Any]
"""Runs collective work; raises on all ranks if it fails on one."""


class CheckFailed(RuntimeError):  # noqa: N818  # what happened
    """Collective work failed on some rank. All ranks raise it with the same text."""


_MOST_NAMES = 2000
"""Largest number of parameter names that a rank reports."""


class ProofTokenizer(Protocol):
    """The methods of a tokenizer that the proof uses; its vocabulary size is compared if available."""

    def decode(self, ids: list[int], /) -> str: ...


class Prover:
    """One rank's part in a proof.

    Call `watch` (for a step) or `trial`, then `prove`; after an update `prove_update`.
    """

    def __init__(
        self,
        state: TrainingState,
        step: StepState,
        driver: Driver,
        *,
        form: str,
        tokenizer: ProofTokenizer | None,
        attempt: Attempt | None = None,
    ) -> None:
        """Prepare a proof.

        Args:
            state: The training state.
            step: The step.
            driver: Computes forward and backward.
            form: "cheap" skips slow checks; "full" runs all.
            tokenizer: Decodes tokens; None shows numbers.
            attempt: Runs collective work. Without it, a failure of one rank may leave the others waiting until their
                timeout.
        """
        self._state, self._step, self._driver = state, step, driver
        self._form, self._tokenizer = form, tokenizer
        self._attempt = attempt or self._try_alike
        self.observation = Observation(state, step)
        """Observation of the forward and backward."""
        self._update_seen = self.observation
        self._before: dict[str, Tensor] = {}
        self._seconds = 0.0
        self._problem = ""
        """Why no update can be watched; "" if it can."""
        self._trial_failed = False

    # ---- watching --------------------------------------------------------------------------------------------------

    def watch(self, *, passes: bool) -> None:
        """Store what the next update should change, and observe the step. No communication; never raises.

        Args:
            passes: Whether to observe forward and backward, too.
        """
        began = time.perf_counter()
        self._update_seen = Observation(self._state, self._step)
        if passes:
            self.observation = self._update_seen
        try:
            self._problem = self._why_not_watched()
            if not self._problem:
                self._before = first_update.bit_sums(self._state.flats, reads_disk=self._form == "full")
            self._update_seen.start(passes=passes)
        except Exception as error:  # Training must continue; the proof reports the failure.
            self._problem = self._update_seen.reason = _reported(error)
            self._update_seen.stop()
        self._seconds += time.perf_counter() - began

    def stop_watching(self) -> None:
        """Remove all hooks. Never raises."""
        self._update_seen.stop()

    @property
    def saw_an_update(self) -> bool:
        """Return whether this rank's optimizer has updated after `watch`."""
        return self._update_seen.update > 0

    def _why_not_watched(self) -> str:
        state, late = self._state, self._state.config.offload.delayed_update
        if late is not None and state.global_step + 1 >= late:
            return "offload.delayed_update makes the update during the next step"
        return ""

    def trial(self, batch: Batch) -> None:
        """Run forward and backward of a batch without an update. Failures become findings. Collective.

        Args:
            batch: A micro-batch.
        """
        began = time.perf_counter()
        self.observation = Observation(self._state, self._step)
        if self._state.config.optimizer.in_backward:
            self.observation.reason = "optimizer.in_backward updates parameters in backward, so only a step shows them"
            return
        try:
            self._attempt(lambda: self._pass(batch))
        except PeerLost:
            raise
        except Exception as error:
            self._trial_failed = True
            self.observation.gradients.clear()
            self.observation.reason = f"the trial failed: {_reported(error)}"
        self._seconds += time.perf_counter() - began

    def _pass(self, batch: Batch) -> None:
        state, observation = self._state, self.observation
        with left_as_it_was(state, self._step):
            observation.start(passes=True)
            try:
                for module in state.modules:
                    module.train()
                # A pipeline computes all micro-batches of a step in one call.
                self._driver.train([batch] * (self._step.micro_batches.size if state.layout.pp > 1 else 1))
                observation.see_gradients()
            except Exception:
                self._driver.abandon()
                raise
            finally:
                observation.stop()

    # ---- the proof -------------------------------------------------------------------------------------------------

    def prove(
        self,
        batches: Sequence[Batch],
        *,
        weighted_by_tokens: bool,
        budget_seconds: float | None = None,
        forward_seconds: float = 0.0,
        with_update: bool = False,
        later: Iterable[Batch] = (),
    ) -> Proof:
        """Return the findings of all ranks, the same on each. Collective.

        Args:
            batches: This rank's micro-batches of a step; the first one was observed.
            weighted_by_tokens: Whether losses are weighted by counted targets.
            budget_seconds: Skip forwards that would take longer; None without a limit.
            forward_seconds: Measured time of the forwards of a step.
            with_update: Whether an update was watched.
            later: More micro-batches, to find two documents in one sequence if `batches` have none.
        """
        began, findings = time.perf_counter(), []
        views, reason = self._views(batches)
        measured = self.observation.counted
        view = views[0] if views else None
        groups: tuple[ParameterGroup, ...] = ()

        def check(kind: str, section: str, work: Callable[[], Any]) -> Any:
            try:
                return self._attempt(work)
            except PeerLost:
                raise
            except Exception as error:
                findings.append(_check_failed(kind, section, error))
                return None

        def add(kind: str, section: str, work: Callable[[], Finding]) -> None:
            found = check(kind, section, work)
            if found is not None:
                findings.append(found)

        add(counted_tokens.KIND, counted_tokens.SECTION, lambda: self._counted(view, measured, reason))
        made_forwards = check(
            document_separation.KIND,
            document_separation.SECTION,
            lambda: forwards.findings_of(
                self._state,
                self._step,
                self._driver,
                views,
                self._views_of(later),
                weighted_by_tokens=weighted_by_tokens,
                budget_seconds=budget_seconds,
                forward_seconds=forward_seconds,
            ),
        )
        if made_forwards is None:  # The same forwards also serve the check of the split into micro-batches.
            findings.append(replace(findings[-1], kind=batch_cut.KIND, section=batch_cut.SECTION))
        findings += made_forwards or []
        made = check(parameter_groups.KIND, parameter_groups.SECTION, self._groups)
        if made is not None:
            groups = made
            findings.append(parameter_groups.finding_of(groups))
        add(parameter_groups.NO_GRADIENT, parameter_groups.NO_GRADIENT_SECTION, lambda: self._no_gradient(groups))
        if with_update:
            add(first_update.KIND, first_update.SECTION, lambda: self._update(groups))
        else:
            text = "no update was made since; the next one is watched"
            findings.append(_not_checked(first_update.KIND, first_update.SECTION, text))
        add(dtypes.KIND, dtypes.SECTION, self._dtypes)
        add(dtypes.VOCABULARY, dtypes.VOCABULARY_SECTION, lambda: self._vocabulary(view))
        shown = check("text", counted_tokens.SECTION, lambda: self._shown(view, measured))
        self._seconds += time.perf_counter() - began
        return Proof(
            step=self._state.global_step - int(with_update),
            form=self._form,
            seconds=self._seconds,
            findings=tuple(findings),
            groups=groups,
            counted_text=shown or (),
        )

    def prove_update(self, proof: Proof) -> Proof:
        """Add what the update after `watch` has changed. Collective.

        Args:
            proof: The proof so far.

        Returns:
            A new proof.
        """
        began = time.perf_counter()
        try:
            found = self._attempt(lambda: self._update(proof.groups))
        except PeerLost:
            raise
        except Exception as error:
            found = _check_failed(first_update.KIND, first_update.SECTION, error)
        return proof.with_findings([found], more_seconds=time.perf_counter() - began)

    def _views(self, batches: Sequence[Batch]) -> tuple[list[TokenBatch], str]:
        try:
            return [token_batch(batch, self._state.module) for batch in batches], ""
        except NoTokensError as error:
            return [], str(error)
        except Exception as error:  # Any batch may fail here, and all ranks must continue with the same checks.
            return [], f"it could not be read: {_reported(error)}"

    def _views_of(self, batches: Iterable[Batch]) -> Iterator[TokenBatch]:
        return (token_batch(batch, self._state.module) for batch in batches)

    # ---- single checks ---------------------------------------------------------------------------------------------

    def _counted(self, view: TokenBatch | None, measured: Tensor | None, reason: str) -> Finding:
        own = None
        if view is not None:
            own = counted_tokens.counts_of(view, measured, reason=self.observation.reason).to_data()
        mesh = self._state.mesh
        reports = self._state.everyone.collect([mesh.data_index, own])
        found: dict[int, counted_tokens.Counts] = {}
        for index, data in reports:
            if data is not None:
                counts = counted_tokens.Counts(**data)
                known = found.get(index)
                # Under a pipeline, one of the ranks that see the same data has the head.
                if known is None or (known.measured is None and (counts.measured is not None or counts.reason == "")):
                    found[index] = counts
        if not found:
            return _not_checked(counted_tokens.KIND, counted_tokens.SECTION, reason)
        return counted_tokens.finding_of([found[index] for index in sorted(found)])

    def _groups(self) -> tuple[ParameterGroup, ...]:
        state = self._state
        ranks = state.everyone.collect(parameter_groups.own_counts(state.placement))
        copies = state.layout.islands * state.layout.replicas
        return parameter_groups.groups_of(state.optimizer.param_groups, ranks, copies=copies)

    def _no_gradient(self, groups: Sequence[ParameterGroup]) -> Finding:
        facts = self.observation.gradients
        if not self._anywhere(bool(facts) or not self._state.partitioned_optimizer.flats):
            reason = self.observation.reason or "no backward was seen"
            kind, section = parameter_groups.NO_GRADIENT, parameter_groups.NO_GRADIENT_SECTION
            return _not_checked(kind, section, reason, failed=self._trial_failed)
        names = self._nowhere({name: used for name, (used, _) in facts.items()})
        return parameter_groups.without_gradient(names, _trainable(groups))

    def _update(self, groups: Sequence[ParameterGroup]) -> Finding:
        state, observation = self._state, self._update_seen
        updates = state.everyone.collect([self._problem, observation.update])
        problem = next((problem for problem, _ in updates if problem), "")
        update = max(number for _, number in updates)
        if problem or not update:
            reason = problem or "no update was seen; a step whose gradient overflows makes none"
            return _not_checked(first_update.KIND, first_update.SECTION, reason)
        after = first_update.bit_sums(state.flats, reads_disk=self._form == "full")
        moved = first_update.moved(state.flats, self._before, after)
        if not self._anywhere(bool(moved)):
            reason = "the masters are on disk, which the cheap form does not read"
            return _not_checked(first_update.KIND, first_update.SECTION, reason)
        unmoved = self._nowhere(moved)
        facts = observation.gradients
        no_gradient = self._nowhere({name: used for name, (used, _) in facts.items()})
        zero = self._nowhere({name: not is_zero for name, (_, is_zero) in facts.items()}) if unmoved else []
        rates: dict[str, float] = {}
        if unmoved:
            wanted = set(unmoved)
            own = {name: rate for name, rate in observation.rates.items() if name in wanted}
            for theirs in state.everyone.collect(own):
                rates |= theirs
        return first_update.finding_of(
            trainable=_trainable(groups),
            unmoved=unmoved,
            no_gradient=no_gradient,
            zero_gradient=zero,
            rates=rates,
            update=update,
        )

    def _dtypes(self) -> Finding:
        state, seen = self._state, self.observation
        masters = sorted({_dtype(flat.lasting_master.dtype) for flat in state.flats if flat.trainable})
        reports = state.everyone.collect([seen.logits_dtype, seen.loss_dtype, masters])
        return dtypes.finding_of(
            compute=_dtype(state.dtype),
            logits=next((logits for logits, _, _ in reports if logits), None),
            loss=next((loss for _, loss, _ in reports if loss), None),
            masters=sorted({master for _, _, masters in reports for master in masters}),
            rounds_stochastically=state.config.precision.masters == "none",
        )

    def _vocabulary(self, view: TokenBatch | None) -> Finding:
        state = self._state
        name = token_embedding(state.modules)
        shapes = [row.whole_shape for row in state.placement.rows if row.name == name]
        largest = None if view is None else int(view.tokens.max())
        reports = state.everyone.collect([shapes[0][0] if shapes else None, largest])
        known = [ids for _, ids in reports if ids is not None]
        return dtypes.vocabulary(
            model=next((rows for rows, _ in reports if rows is not None), None),
            tokenizer=_size(self._tokenizer),
            largest=max(known) if known else None,
        )

    def _shown(self, view: TokenBatch | None, measured: Tensor | None) -> tuple[tuple[str, bool], ...]:
        """Return rank 0's first sequence with its counted tokens.

        Without the head on rank 0 it shows the batch's own marks.
        """
        own: list[tuple[str, bool]] = []
        if view is not None and self._state.everyone.index == 0:
            fits = measured is not None and measured.shape == view.tokens.shape
            decode = None if self._tokenizer is None else self._tokenizer.decode
            try:
                own = list(counted_tokens.marked_text(view, measured if fits else None, decode))
            except Exception:  # The tokenizer does not know an id: show ids.
                own = list(counted_tokens.marked_text(view, measured if fits else None, None))
        return tuple((text, bool(counts)) for text, counts in self._state.everyone.share(own))

    # ---- between ranks ---------------------------------------------------------------------------------------------

    def _anywhere(self, here: bool) -> bool:
        return any(self._state.everyone.collect(here))

    def _nowhere(self, mine: Mapping[str, bool]) -> list[str]:
        """Return sorted names for which some rank says False and no rank says True. Collective."""
        everyone = self._state.everyone
        reported = everyone.collect([name for name, is_so in mine.items() if not is_so][:_MOST_NAMES])
        candidates = sorted({name for names in reported for name in names})
        if not candidates:
            return []
        seen = {name for names in everyone.collect([name for name in candidates if mine.get(name)]) for name in names}
        return [name for name in candidates if name not in seen]

    def _try_alike(self, work: Callable[[], T]) -> T:
        """Return the result of `work`; raise on all ranks if it fails on one. Collective."""
        problem, result = "", []
        error: Exception | None = None
        try:
            result.append(work())
        except PeerLost:
            raise
        except Exception as raised:
            error, problem = raised, _reported(raised)
        problems = [text for text in self._state.everyone.collect(problem) if text]
        if problems:
            raise CheckFailed(problems[0]) from error
        return result[0]


def _trainable(groups: Sequence[ParameterGroup]) -> int:
    return sum(group.tensors for group in groups if group.learning_rate is not None)


def _not_checked(kind: str, section: str, text: str, *, failed: bool = False) -> Finding:
    return Finding(kind=kind, severity=Severity.NOT_CHECKED, text=text, section=section, failed=failed)


def _check_failed(kind: str, section: str, error: Exception) -> Finding:
    return _not_checked(kind, section, f"the check failed: {_reported(error)}", failed=True)


def _size(tokenizer: Any) -> int | None:
    """Return the vocabulary size of a tokenizer of SpeedLab, tokenizers or transformers."""
    size: Any = getattr(tokenizer, "vocab_size", None)
    if isinstance(size, int):
        try:
            return max(size, len(tokenizer))  # In transformers only the length includes added tokens.
        except TypeError:
            return size
    count: Any = getattr(tokenizer, "get_vocab_size", None)
    return int(str(count())) if callable(count) else None


def _reported(error: BaseException) -> str:
    lines = str(error).splitlines()
    if isinstance(error, CheckFailed):
        return lines[0]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


DriverOf = Callable[[LossFunction | None], Driver]
"""Returns the engine's driver, or one with another loss function."""


class ProofOnRequest:
    """The proofs of one engine."""

    def __init__(self, state: TrainingState, step: StepState, driver_of: DriverOf) -> None:
        self._state, self._step, self._driver_of = state, step, driver_of
        self._prover: Prover | None = None
        """Watches the update after the last proof; None once that update is in the proof."""
        self._last: Proof | None = None

    def prover(self, *, form: str, tokenizer: ProofTokenizer | None, attempt: Attempt) -> Prover:
        """Return a prover for a run, which counts its own steps.

        Args:
            form: "cheap" or "full".
            tokenizer: Decodes tokens; None shows numbers.
            attempt: Runs collective work.
        """
        return Prover(self._state, self._step, self._driver_of(None), form=form, tokenizer=tokenizer, attempt=attempt)

    def of(self, batch: Batch | None, loss: LossFunction | None, tokenizer: ProofTokenizer | None) -> Proof:
        """Return a proof, as `Engine.proof` does.

        Args:
            batch: A micro-batch; None adds the update to the last proof.
            loss: The loss function, if the loop computes the loss itself.
            tokenizer: Decodes tokens; None shows numbers.

        Raises:
            RuntimeError: Inside a step.
            ValueError: Without a batch before the first proof.
        """
        self._step.refuse_after_cut()
        if batch is None:
            return self._with_update()
        self._step.refuse_inside("proof")
        if self._prover is not None:
            self._prover.stop_watching()
        driver = self._driver_of(loss)
        prover = Prover(self._state, self._step, driver, form="full", tokenizer=tokenizer)
        prover.trial(batch)
        weighted = self._state.config.loss_over == "tokens"
        self._last = prover.prove([batch], weighted_by_tokens=weighted)
        prover.watch(passes=False)
        self._prover = prover
        return self._last

    def _with_update(self) -> Proof:
        if self._last is None:
            raise ValueError("proof: there is none yet; give it a batch: engine.proof(batch)")
        prover = self._prover
        if prover is not None and any(self._state.everyone.collect(prover.saw_an_update)):
            prover.stop_watching()
            self._last, self._prover = prover.prove_update(self._last), None
        return self._last
