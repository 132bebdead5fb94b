"""Gradient accumulation: count the micro-batches of a step in the caller's own loop.

The engine counts calls of `engine.step()`: with `batch.accumulation` 2 every second call updates. A loop written for
DistributedDataParallel calls `step` once for several backwards, and would silently get half of its updates. So:

1. A second forward and backward without a `step` between them raises, on all ranks, because all run the same loop.
2. Inside `no_sync`, or after `set_gradient_accumulation_boundary`, the loop counts itself: the next backward ends the
   previous micro-batch, and `step` ends the last one.
3. Several losses of one forward are one micro-batch.

With `batch.accumulation` 1 nothing is divided and every `step` updates: backwards add up, as in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable


class Accumulation:
    """Counters of forwards and backwards in the current micro-batch, and of micro-batches in the current step."""

    def __init__(self, size: int, forwards: Callable[[], int]) -> None:
        """Start before the first micro-batch.

        Args:
            size: Micro-batches of a step, `batch.accumulation`.
            forwards: Returns how many forwards with gradients the modules have begun so far.
        """
        self.size = size
        self.ended = 0
        """Micro-batches of the current step that have ended."""
        self.boundary: bool | None = None
        """Whether the caller declared the current micro-batch the last one of its step; None uses the count."""
        self.backwards = 0
        """Backwards of the current micro-batch."""
        self._forwards = forwards
        self._began_at = self._seen = forwards()
        """Forwards before the current micro-batch, and before its last backward."""
        self._unsummed = False
        """Whether the last backward ran inside `no_sync`."""
        self._counts_itself = False
        """Whether a backward has ended a micro-batch of the current step."""

    @property
    def at_boundary(self) -> bool:
        """Return whether the current micro-batch is the last one of its step."""
        return self.ended + 1 >= self.size if self.boundary is None else self.boundary

    @property
    def next(self) -> int:
        """Return the micro-batch of the next forward; after a backward in a loop that counts itself, the next one."""
        itself = self.boundary is not None or self._unsummed
        return self.ended + (self.size > 1 and self.backwards > 0 and itself)

    def begin_backward(self, *, sync: bool) -> None:
        """Count a backward of the caller's loop.

        Args:
            sync: Whether this backward reduces gradients over the ranks; False inside `no_sync`.

        Raises:
            RuntimeError: If the backward belongs to another micro-batch although nothing ended the last one, or if the
                step already has all of its micro-batches.
        """
        if self.size > 1 and self.backwards:
            now = self._forwards()
            # A forward after the last backward, or a second forward, belongs to another micro-batch.
            if now > self._seen or now > self._began_at + 1:
                if self.boundary is None and not self._unsummed:
                    raise RuntimeError(
                        f"backward: a second forward and backward came without engine.step(), which counts "
                        f"micro-batches: with batch.accumulation {self.size} every call number {self.size} updates. "
                        "Call engine.step() after every backward; or run every backward of a step but the last inside "
                        "`with engine.no_sync():` and call engine.step() once. Losses of several forwards of one "
                        "micro-batch: add them, and call backward once"
                    )
                self.end_micro_batch()
                self._counts_itself = True
        if self.size > 1 and self.ended >= self.size:
            raise RuntimeError(
                f"backward: micro-batch {self.ended + 1} of a step, and batch.accumulation is {self.size}, which "
                f"gradients are divided by; set batch.accumulation to how many backwards your loop runs for one update"
            )
        self.backwards += 1
        self._seen, self._unsummed = self._forwards(), not sync

    def end_micro_batch(self) -> None:
        """Count a micro-batch that has all of its gradients."""
        self.ended += 1
        self._begin()

    def check_end(self) -> None:
        """Check the count when the caller calls `step`.

        Raises:
            RuntimeError: If the loop counts itself and the step has fewer micro-batches than gradients are divided by.
        """
        count = self.ended + 1
        by_itself = self.at_boundary if self.boundary is not None else self._counts_itself
        if by_itself and self.size > 1 and count != self.size:
            raise RuntimeError(
                f"step: the loop ends a step after {count} micro-batch{'es' * (count > 1)}, and batch.accumulation is "
                f"{self.size}, which gradients are divided by; set batch.accumulation to how many backwards your loop "
                "runs for one update"
            )

    def forget(self) -> None:
        """Reset the counters after a step ended or was given up."""
        self.ended, self._counts_itself = 0, False
        self._begin()

    def _begin(self) -> None:
        self.backwards, self._unsummed = 0, False
        self._began_at = self._seen = self._forwards()
