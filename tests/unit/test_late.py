"""The thread of a late update, and what an optimizer notes on it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from speedlab.optim.delayed_update import DelayedUpdate, OptimizerSnapshot


@pytest.mark.parametrize("began", [False, True])
def test_an_interrupt_while_the_thread_starts_leaves_nothing_under_way(
    began: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    go = threading.Event()

    def work() -> None:
        assert go.wait(10)
        done.append("made")

    late = DelayedUpdate(work)
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if began:
            start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        late.start()
    monkeypatch.undo()
    if began:
        while not late._begun:
            pass
        go.set()
        late.wait()
        assert done == ["made"]
    else:
        with pytest.raises(RuntimeError, match="interrupted before it began"):
            late.wait()
        late._run()  # Should it begin after all.
        assert done == []


def test_what_a_late_update_failed_with_is_untold_until_somebody_hears_of_it() -> None:
    def fail() -> None:
        raise MemoryError("no room")

    late = DelayedUpdate(fail)
    late.start()
    late.settle()
    assert isinstance(late.untold, MemoryError)
    with pytest.raises(MemoryError):
        late.wait()
    assert late.untold is None


class Counting(torch.optim.SGD):
    """Notes in its groups how often it was called, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["weight_sum"] += 2.0
        return super().step(closure)


def test_what_an_optimizer_notes_in_its_groups_is_its_own_and_a_schedulers_options_stay() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = Counting([weight], lr=0.5)
    optimizer.param_groups[0]["weight_sum"] = torch.zeros(())
    twin = OptimizerSnapshot(optimizer)
    optimizer.param_groups[0]["lr"] = 0.25  # A scheduler's, for the next step.
    twin.optimizer.step()
    assert weight.tolist() == [0.5, 0.5]
    twin.take_back()
    group = optimizer.param_groups[0]
    assert (group["k"], float(group["weight_sum"]), group["lr"]) == (1, 2.0, 0.25)
    assert group["params"][0] is weight
