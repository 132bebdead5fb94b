"""Findings that some forwards without gradients show: whether documents are separate, and the cut of the batch.

All ranks make equally many forwards, also those that have nothing of their own to compare: a partitioned parameter is
gathered by all together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

import speedlab.engine.proof.document_separation as document_separation
import speedlab.engine.proof.micro_batch_split as batch_cut
from speedlab.engine.drivers import Driver
from speedlab.engine.proof.restore_state import left_as_it_was
from speedlab.engine.proof.token_batch import TokenBatch
from speedlab.engine.state import TrainingState
from speedlab.engine.train_step import StepState
from speedlab.telemetry.proof import Finding, Severity

_KINDS = ((document_separation.KIND, document_separation.SECTION), (batch_cut.KIND, batch_cut.SECTION))


class _Report(NamedTuple):
    """What one rank found, as JSON carries it."""

    data_index: int
    unit: str
    """What its trial has changed; "" without a trial."""
    apart: list[float] | None
    """Losses of the trial; [] if another rank of a pipeline has them, None if there was no time."""
    cut: list[float] | None
    """Losses of two sequences together, and of each."""
    counted: list[int]
    """Targets that count in them."""
    has_counts: bool
    """Whether the driver knows how many targets each loss is the mean of."""


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
    """As of `Prover.prove`. Collective."""
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
        apart=losses[0],
        cut=losses[1],
        counted=[int(part.counted.sum()) for part in plans[1]],
        has_counts=all(has_counts),
    )
    reports = _one_for_each_data_index([_Report(*told) for told in everyone.collect(list(own))])
    apart = [_apart(report) for report in reports if report.apart]
    cuts = [_cut(report) for report in reports if report.cut]
    documents = document_separation.finding_of(apart, has_positions=any(each[3] for each in given))
    dtype = str(state.dtype).removeprefix("torch.")
    counts = [each[2] for each in given]
    weighted = weighted_by_tokens and all(report.has_counts for report in reports)
    cut = batch_cut.finding_of(cuts, dtype=dtype, weighted_by_tokens=weighted, given=counts)
    return [
        _not_checked(*kind, left.reason) if left.refused and not found else finding
        for kind, found, finding in zip(_KINDS, (apart, cuts), (documents, cut), strict=True)
    ]


def _share_of_forward(state: TrainingState, views: Sequence[TokenBatch]) -> float:
    """How much of all forwards of a step one of two sequences is."""
    by_sequences = 2 / sum(len(view.tokens) for view in views)
    # Where parameters come for a forward, that may take most of its time, however few sequences there are.
    by_gathers = 1 / len(views) if any(zero.zero_policy.params_unsharded_on_demand for zero in state.zeros) else 0.0
    return min(1.0, max(by_sequences, by_gathers))


def _losses(plan: Sequence[TokenBatch], driver: Driver, left: _Budget, has_counts: list[bool]) -> list[float] | None:
    """The loss of each batch; [] where another rank of a pipeline has it; None if there was no time for all.
    `has_counts`: takes for each loss whether the driver knows how many targets it is the mean of."""
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
    """Of the ranks that see the same data, one that has the losses."""
    found: dict[int, _Report] = {}
    for report in reports:
        if report.data_index not in found or report.apart or report.cut:
            found[report.data_index] = report
    return [found[index] for index in sorted(found)]


def _apart(report: _Report) -> document_separation.TrialLosses:
    assert report.apart is not None
    base, changed, *control = report.apart
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
    """How long forwards may still take. All ranks decide alike."""

    def __init__(self, collect: Callable[[Any], list[Any]], seconds: float | None, expected: float) -> None:
        """`seconds`: for all forwards; None: without end. `expected`: what the first one may take."""
        self._collect, self._seconds, self._expected = collect, seconds, expected
        self._began = self._last = time.perf_counter()
        self.refused = False

    def allows(self) -> bool:
        """Whether there is time for one more forward. Collective."""
        if self._seconds is None:
            return True
        if not self.refused:
            needed = max(self._collect(self._last - self._began + self._expected))
            self.refused = needed > self._seconds
        return not self.refused

    def spent(self) -> None:
        """One more forward is over."""
        now = time.perf_counter()
        self._expected, self._last = now - self._last, now

    @property
    def reason(self) -> str:
        return (
            f"the cheap form has {self._seconds:.2g} s for its forwards, and they would take longer; "
            "`speedlab train --proof` and run.prove() make them"
        )
