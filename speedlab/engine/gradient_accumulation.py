"""Which micro-batch of a step a loop of one's own is in, and whether the loop counts as the engine does.

The engine counts calls of `engine.step()`: with `batch.accumulation` 2 every second call updates. A loop written for
DistributedDataParallel calls `step` once for several backwards, and would get half of its updates.

1. A second forward and backward without a `step` between them raises, on all ranks, because all run the same loop.
2. Inside `no_sync`, or after `set_gradient_accumulation_boundary`, the loop counts by itself: there the next backward
   ends the micro-batch before it, and `step` ends the last one.
3. Several losses of one forward are one micro-batch.

With `batch.accumulation` 1 nothing is divided and every `step` updates: backwards add up, as in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable


class Accumulation:
    """Counts forwards and backwards of the present micro-batch, and micro-batches of the present step."""

    def __init__(self, size: int, forwards: Callable[[], int]) -> None:
        """
        Args:
            size: micro-batches of a step, `batch.accumulation`.
            forwards: returns how many forwards with gradients the modules have begun so far.
        """
        self.size = size
        self.ended = 0
        """Micro-batches of the present step that have ended."""
        self.boundary: bool | None = None
        """The caller's own word on whether the present micro-batch is the last one; None counts."""
        self.backwards = 0
        """Backwards of the present micro-batch."""
        self._forwards = forwards
        self._began_at = self._seen = forwards()
        """Forwards before the present micro-batch, and before its last backward."""
        self._unsummed = False
        """Whether the last backward ran inside `no_sync`."""
        self._counts_itself = False
        """Whether a backward has ended a micro-batch of the present step."""

    @property
    def at_boundary(self) -> bool:
        """Whether the present micro-batch is the last one of its step."""
        return self.ended + 1 >= self.size if self.boundary is None else self.boundary

    @property
    def next(self) -> int:
        """The micro-batch that a forward now belongs to: behind a backward of a loop that counts by itself, the next
        one."""
        itself = self.boundary is not None or self._unsummed
        return self.ended + (self.size > 1 and self.backwards > 0 and itself)

    def begin_backward(self, *, sync: bool) -> None:
        """A loop of the caller's is about to call backward.

        Raises:
            RuntimeError: when the backward belongs to another micro-batch and nothing says that the last one has ended,
                or when the step has all of its micro-batches.
        """
        if self.size > 1 and self.backwards:
            now = self._forwards()
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
        """The present micro-batch has all of its gradients."""
        self.ended += 1
        self._begin()

    def check_end(self) -> None:
        """`step` was called.

        Raises:
            RuntimeError: when the loop counts by itself and the step has fewer micro-batches than gradients are divided
                by.
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
        """The step is over, or given up."""
        self.ended, self._counts_itself = 0, False
        self._begin()

    def _begin(self) -> None:
        self.backwards, self._unsummed = 0, False
        self._began_at = self._seen = self._forwards()
