"""An update that a thread makes beside the step's own (`offload.delayed_update`; arXiv:2101.06840, section 5.2).

With θₖ the masters after the update of step k, gₖ its gradient and s = `delayed_update`:

1. θₖ = θₖ₋₁ + u(gₖ), with the clipping, loss scale, learning rate and count of step k, as without a delay.
2. Where k ≥ s, forward and backward of step k + 1 use θₖ₋₁ while the thread makes θₖ out of the gradients that wait;
   θₖ becomes the parameters when that backward has ended, or before, when somebody looks at them (`finish_update`).
3. Where k < s, θₖ becomes the parameters at the end of step k, as without a delay.

At most one update is under way, that of the step before. So a step that float16 skips ends with the update before it
applied and none under way, and the step behind a look uses the newest parameters, as the first one does: a run that
looked after step k goes on as one that was loaded from a checkpoint of step k, and not as one that did not look.

The thread reads and writes masters, moments and the gradients that wait, which nothing else touches meanwhile, and
speaks to no peer. What ranks exchange is the step's own to send: in one order, on one thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor
from torch.optim import Optimizer

_WAKE_SECONDS = 0.05
"""A wait is back in Python this often, so that signals are heard."""


class DelayedUpdate:
    """Work on a thread of its own, from `start` on. Who starts it has it at hand already: an interrupt may come while
    the thread begins, which then has to be waited for all the same."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._gate, self._done = threading.Lock(), threading.Event()
        self._started = self._begun = self._called_off = self._told = False
        # A daemon: whoever leaves the interpreter does not want what it would still write.
        self._thread = threading.Thread(target=self._run, name="speedlab-update", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._started = True

    def _run(self) -> None:
        with self._gate:
            if self._called_off:
                return
            self._begun = True
        try:
            self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._work = lambda: None  # It holds the optimizer.
            self._done.set()

    def settle(self) -> None:
        """Wait until it has ended, well or not. One whose start was cut off, and which has not begun, never will."""
        if not self._started:
            with self._gate:
                if not self._begun:
                    self._called_off = True
                    self._error = RuntimeError("the update was interrupted before it began")
                    return
        while not self._done.wait(_WAKE_SECONDS):
            pass

    def wait(self) -> None:
        """Wait until it is done. Raises what it failed with, each time."""
        self.settle()
        if self._error is not None:
            self._told = True
            raise self._error

    @property
    def untold(self) -> BaseException | None:
        """What one that has ended failed with, where nobody has heard of it."""
        return None if self._told else self._error


class OptimizerSnapshot:
    """The same optimizer over the same states, with the options that its groups have now: what a scheduler sets while
    this one updates is for the next step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._of = optimizer
        self.optimizer: Optimizer = object.__new__(type(optimizer))
        self.optimizer.__dict__.update(optimizer.__dict__)
        self.optimizer.__dict__.pop("step", None)  # A scheduler's, which would step the other one.
        self.optimizer.param_groups = [
            {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
            for group in optimizer.param_groups
        ]
        self._before = dict(self.optimizer.__dict__)
        self._groups_before = [dict(group) for group in self.optimizer.param_groups]
        optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers ask, and warn

    def take_back(self) -> None:
        """What it has noted beside states (a count in an attribute, say) is the optimizer's own."""
        noted = self.optimizer.__dict__.items()
        self._of.__dict__.update({key: value for key, value in noted if self._before.get(key) is not value})
        groups = zip(self._of.param_groups, self.optimizer.param_groups, self._groups_before, strict=True)
        for own, noted_in, before in groups:
            own |= {key: value for key, value in noted_in.items() if _was_written(value, before.get(key))}


def _was_written(value: object, before: object) -> bool:
    """Whether an option of a group is another one than the copy that was made of it, which has no changes yet."""
    return value is not before or (isinstance(value, Tensor) and value._version > 0)
