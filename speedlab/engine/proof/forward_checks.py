"""Proof checks that need forwards without gradients: document separation, and the split into micro-batches.

All ranks make the same number of forwards, even without a comparison of their own, because partitioned parameters are
gathered collectively.

`left_as_it_was` restores the training afterwards: random streams, buffers, gradients, modes and the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import speedlab.engine.proof.document_separation as document_separation
import speedlab.engine.proof.micro_batch_split as batch_cut
from speedlab.engine.drivers import Driver
from speedlab.engine.proof.token_batch import TokenBatch
from speedlab.engine.rng import random_tensors, random_words, restore_random
from speedlab.engine.state import TrainingState
from speedlab.engine.train_step import StepState
from speedlab.telemetry.proof import Finding, Severity


@contextmanager
def left_as_it_was(state: TrainingState, step: StepState) -> Iterator[None]:
    """Undo what forwards and backwards inside change, except in parameters. Use this between two steps.

    Args:
        state: The training state.
        step: The step, reset afterwards.
    """
    device = state.world.device
    words, tensors = random_words(), random_tensors(device)
    has_gradients = torch.is_grad_enabled()
    modes = [(module, module.training) for part in state.modules for module in part.modules()]
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for part in state.modules
        for module in part.modules()
        for name, buffer in module._buffers.items()
        if isinstance(buffer, Tensor)
    ]
    # Training takes this number from its first step and rounds by it, so a trial must not set it.
    counted = state.counted_per_micro_batch
    before, step.only_looked_at = step.only_looked_at, True
    try:
        yield
        step.reset()
    except Exception:
        step.reset()  # Not after an interrupt, which must not wait for peers; `reconnect` resets the step then.
        raise
    finally:
        step.only_looked_at = before
        state.counted_per_micro_batch = counted
        for module, mode in modes:
            module.training = mode
        _restore(buffers)
        torch.set_grad_enabled(has_gradients)
        restore_random(words, tensors, device)


@torch.no_grad()
def _restore(buffers: list[tuple[nn.Module, str, Tensor, Tensor]]) -> None:
    for module, name, buffer, values in buffers:
        module._buffers[name] = buffer
        if not torch.equal(buffer, values):  # A needless write would change the version counter.
            buffer.copy_(values)


_KINDS = ((document_separation.KIND, document_separation.SECTION), (batch_cut.KIND, batch_cut.SECTION))


class _Report(NamedTuple):
    """Findings of one rank, in JSON form."""

    data_index: int
    unit: str
    """Name of the unit that the trial changed; "" without a trial."""
    separate: list[float] | None
    """Losses of the trial; [] if another pipeline rank has them, None if the time budget was too short."""
    cut: list[float] | None
    """Losses of two sequences together, and of each alone."""
    counted: list[int]
    """Counted targets of these."""
    has_counts: bool
    """Whether the driver knows the number of targets of each loss."""


def findings_of(
    state: TrainingState,
    step: StepState,
    driver: Driver,
    views: Sequence[TokenBatch],
    later: Iterable[TokenBatch],
    *,
    weighted_by_tokens: bool,
    budget_seconds: float | None,
    forward_seconds: float,
) -> list[Finding]:
    """Run the forwards, and return their findings. Collective.

    Args:
        state: The training state.
        step: The step, restored afterwards.
        driver: Computes the losses.
        views: The micro-batches of this rank in a step.
        later: More micro-batches, to find two documents in one sequence.
        weighted_by_tokens: Whether losses are weighted by counted targets.
        budget_seconds: Time limit of the forwards; None without a limit.
        forward_seconds: Measured time of all forwards of a step.
    """
    everyone, view = state.everyone, views[0] if views else None
    if not all(everyone.collect(view is not None)):
        return [_not_checked(*kind, "the batch has no tokens and targets") for kind in _KINDS]
    assert view is not None
    trial = document_separation.trial_of(views, later)
    plans = [] if trial is None else trial.batches, batch_cut.parts_of(view)
    given = everyone.collect([*map(len, plans), batch_cut.counted_in(views), view.positions is not None])
    left = _Budget(everyone.collect, budget_seconds, forward_seconds * _share_of_forward(state, views))
    losses, has_counts = [], []
    with left_as_it_was(state, step), torch.no_grad():
        for module in state.modules:
            module.eval()
        for number, plan in enumerate(plans):
            count = max(each[number] for each in given)
            made = _losses([*plan, *[view.rows(0, 1)] * (count - len(plan))], driver, left, has_counts)
            losses.append(None if made is None else made[: len(plan)])
    own = _Report(
        data_index=state.mesh.data_index,
        unit="" if trial is None else trial.unit,
        separate=losses[0],
        cut=losses[1],
        counted=[int(part.counted.sum()) for part in plans[1]],
        has_counts=all(has_counts),
    )
    reports = _one_for_each_data_index([_Report(*reported) for reported in everyone.collect(list(own))])
    separate = [_separate(report) for report in reports if report.separate]
    cuts = [_cut(report) for report in reports if report.cut]
    documents = document_separation.finding_of(separate, has_positions=any(each[3] for each in given))
    dtype = str(state.dtype).removeprefix("torch.")
    counts = [each[2] for each in given]
    weighted = weighted_by_tokens and all(report.has_counts for report in reports)
    cut = batch_cut.finding_of(cuts, dtype=dtype, weighted_by_tokens=weighted, given=counts)
    return [
        _not_checked(*kind, left.reason) if left.refused and not found else finding
        for kind, found, finding in zip(_KINDS, (separate, cuts), (documents, cut), strict=True)
    ]


def _share_of_forward(state: TrainingState, views: Sequence[TokenBatch]) -> float:
    """Return the cost of a forward of two sequences, as a share of all forwards of a step."""
    by_sequences = 2 / sum(len(view.tokens) for view in views)
    # If parameters are gathered per forward, the gather may dominate, even with few sequences.
    by_gathers = 1 / len(views) if any(zero.zero_policy.params_unsharded_on_demand for zero in state.zeros) else 0.0
    return min(1.0, max(by_sequences, by_gathers))


def _losses(plan: Sequence[TokenBatch], driver: Driver, left: _Budget, has_counts: list[bool]) -> list[float] | None:
    """Return the loss of each batch; [] if another pipeline rank has it; None if the time budget was too short.

    `has_counts` collects whether the driver knows the number of targets of each loss.
    """
    found: list[float] = []
    for batch in plan:
        if not left.allows():
            return None
        try:
            for loss, count in driver.evaluate(batch.as_given()):
                found.append(float(loss))
                has_counts.append(count is not None)
        except Exception:
            driver.abandon()
            raise
        left.spent()
    return found


def _one_for_each_data_index(reports: Sequence[_Report]) -> list[_Report]:
    """Return one report with losses per data index."""
    found: dict[int, _Report] = {}
    for report in reports:
        if report.data_index not in found or report.separate or report.cut:
            found[report.data_index] = report
    return [found[index] for index in sorted(found)]


def _separate(report: _Report) -> document_separation.TrialLosses:
    assert report.separate is not None
    base, changed, *control = report.separate
    inside = control if len(control) == 2 else (None, None)
    return document_separation.TrialLosses(
        unit=report.unit, base=base, changed=changed, control_base=inside[0], control=inside[1]
    )


def _cut(report: _Report) -> batch_cut.SplitLosses:
    assert report.cut is not None
    together, *alone = report.cut
    return batch_cut.SplitLosses(
        together=together, alone=(alone[0], alone[1]), counted=(report.counted[1], report.counted[2])
    )


def _not_checked(kind: str, section: str, text: str) -> Finding:
    return Finding(kind=kind, severity=Severity.NOT_CHECKED, text=text, section=section)


class _Budget:
    """A time limit on forwards, with equal decisions on all ranks."""

    def __init__(self, collect: Callable[[Any], list[Any]], seconds: float | None, expected: float) -> None:
        """Start the clock.

        Args:
            collect: Collects a value from all ranks.
            seconds: Limit for all forwards; None without a limit.
            expected: Expected time of the first forward, in seconds.
        """
        self._collect, self._seconds, self._expected = collect, seconds, expected
        self._began = self._last = time.perf_counter()
        self.refused = False

    def allows(self) -> bool:
        """Return whether there is time for one more forward. Collective."""
        if self._seconds is None:
            return True
        if not self.refused:
            needed = max(self._collect(self._last - self._began + self._expected))
            self.refused = needed > self._seconds
        return not self.refused

    def spent(self) -> None:
        """Measure the forward that has just ended."""
        now = time.perf_counter()
        self._expected, self._last = now - self._last, now

    @property
    def reason(self) -> str:
        """Return why forwards were skipped."""
        return (
            f"the cheap form has {self._seconds:.2g} s for its forwards, and they would take longer; "
            "`speedlab train --proof` and run.prove() make them"
        )
