"""Delayed update: a thread updates the masters during the next step (`offload.delayed_update`).

The method is delayed parameter update (arXiv:2101.06840, section 5.2). With θₖ the masters after the update of step k,
gₖ its gradient and s = `delayed_update`:

1. θₖ = θₖ₋₁ + u(gₖ), with the clipping, loss scale, learning rate and step count of step k, as without a delay.
2. For k ≥ s, forward and backward of step k + 1 use θₖ₋₁ while the thread computes θₖ from the buffered gradients. θₖ
   becomes the parameters after that backward, or earlier if a caller reads parameters (`finish_update`).
3. For k < s, θₖ becomes the parameters at the end of step k, as without a delay.

At most one update is pending, that of the previous step. So a step that float16 skips ends with the previous update
applied and none pending. The step after `finish_update` uses the newest parameters, as the first step does. A run that
calls it after step k therefore continues like a run loaded from a checkpoint of step k, not like an uninterrupted run.

The thread reads and writes masters, moments and buffered gradients, which nothing else uses meanwhile. It calls no
collective: all communication stays on one thread, in one order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor
from torch.optim import Optimizer

_WAKE_SECONDS = 0.05
"""Interval at which a wait returns to Python, to handle signals."""


class DelayedUpdate:
    """Work on its own thread, after `start`.

    The caller stores the object before `start`, because an interrupt may come while the thread starts, and the thread
    must be waited for even then.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._gate, self._done = threading.Lock(), threading.Event()
        self._started = self._begun = self._called_off = self._reported = False
        # A daemon: at interpreter exit the result is not needed.
        self._thread = threading.Thread(target=self._run, name="speedlab-update", daemon=True)

    def start(self) -> None:
        """Start the thread."""
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
            self._work = lambda: None  # Free the optimizer.
            self._done.set()

    def settle(self) -> None:
        """Wait until the work has ended, with any result.

        If `start` was interrupted before the work began, cancel the work.
        """
        if not self._started:
            with self._gate:
                if not self._begun:
                    self._called_off = True
                    self._error = RuntimeError("the update was interrupted before it began")
                    return
        while not self._done.wait(_WAKE_SECONDS):
            pass

    def wait(self) -> None:
        """Wait until the work is done. Raises its error, at each call."""
        self.settle()
        if self._error is not None:
            self._reported = True
            raise self._error

    @property
    def untold(self) -> BaseException | None:
        """Return the error of ended work if no caller has received it."""
        return None if self._reported else self._error


class OptimizerSnapshot:
    """A copy of an optimizer over the same states, with the present options of its groups.

    A scheduler may change options of the original for the next step while the copy updates.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._of = optimizer
        self.optimizer: Optimizer = object.__new__(type(optimizer))
        self.optimizer.__dict__.update(optimizer.__dict__)
        self.optimizer.__dict__.pop("step", None)  # The wrapper of a scheduler would step the original.
        self.optimizer.param_groups = [
            {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
            for group in optimizer.param_groups
        ]
        # Compared in `take_back`, to find what the update changed.
        self._before = dict(self.optimizer.__dict__)
        self._groups_before = [dict(group) for group in self.optimizer.param_groups]
        optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers ask, and warn

    def take_back(self) -> None:
        """Copy attributes and options that the copy changed (for example a counter) to the original."""
        noted = self.optimizer.__dict__.items()
        self._of.__dict__.update({key: value for key, value in noted if self._before.get(key) is not value})
        groups = zip(self._of.param_groups, self.optimizer.param_groups, self._groups_before, strict=True)
        for own, noted_in, before in groups:
            own |= {key: value for key, value in noted_in.items() if _was_written(value, before.get(key))}


def _was_written(value: object, before: object) -> bool:
    """Return whether a group option differs from the copy that was made of it."""
    return value is not before or (isinstance(value, Tensor) and value._version > 0)
