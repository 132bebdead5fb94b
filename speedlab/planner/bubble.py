"""How much of a pipeline stands still, by theory: every block equally long, a backward pass twice a forward one,
messages for nothing. No torch.

A rank's work is the same under every schedule; what differs is how long the whole takes, from the first forward to the
last backward. Let p be pipeline ranks, m micro-batches, v pipeline stages of each rank; a forward pass through one of
these stages takes 1.

- gpipe, 1f1b (arXiv:1811.06965, arXiv:2104.04473): the pipeline fills and drains once, so that of m + p - 1 turns a
  rank uses m: the share is (p - 1) / (m + p - 1).
- interleaved (arXiv:2104.04473, section 2.2): a stage is 1/v of a rank's work, and so is a turn: of v m + p - 1 a rank
  uses v m. Micro-batches go round in groups of p; a smaller group has to wait for its first one to come round.
- zero-bubble (ZB1P of arXiv:2401.10241): while it drains, a rank computes gradients of weights that it had put off, so
  that of 3 v m + p - 1 turns of a third only p - 1 are lost; more where m is less than p.
"""

from __future__ import annotations

_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")


def bubble_share(schedule: str, *, pp: int, chunks: int = 1, micro_batches: int) -> float:
    """Share (0 to 1) of the ranks' time, from the first forward to the last backward, in which they stand still.

    `chunks` counts only under the schedules interleaved and zero-bubble. Raises ValueError for what cannot be.
    """
    if schedule not in _SCHEDULES:
        raise ValueError(f"schedule {schedule!r} is not one of {', '.join(_SCHEDULES)}")
    if min(pp, chunks, micro_batches) < 1:
        raise ValueError(f"pp {pp}, chunks {chunks} and micro_batches {micro_batches} must each be at least 1")
    p, m, v = pp, micro_batches, chunks
    if schedule in ("gpipe", "1f1b"):
        return (p - 1) / (m + p - 1)
    if schedule == "interleaved":
        rounds = max(1, m // p)
        group = m / rounds
        return 1 - v * m / ((v * rounds - 1) * max(group, p) + group + p - 1)
    turns = 2 * m + p - 1 + max(m, p) + (v - 1) * (max(m, p) + max(2 * m, p))
    return 1 - 3 * v * m / turns
