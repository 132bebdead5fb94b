"""How all ranks of a group on one host raise the same error after one of them finds a mismatch.

1. The rank that finds the mismatch writes its call and source line to its page, and raises FAULT.
2. The others find the same mismatch, or see FAULT while they wait (within 30 ms), and do the same.
3. Each rank reads the texts of the others and raises an error that names all calls. A rank that does not answer,
   because it computes, is described by what its peers know of its last call; it raises at its next wait.
4. The group stays broken: every later call raises the same error at once. The ranks must leave the group and meet in a
   new one.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from ctypes import memmove, string_at

import numpy as np

from cuda_ops.shared_flags import raise_flag, wait_for_flags
from speedlab.comm.errors import CollectiveMismatch, PeerLost
from speedlab.comm.own_note import own_note
from speedlab.comm.shared.call_descriptions import source_line

TEXT_BYTES = 16384
"""Bytes for a rank's text in its page: its length (8 bytes), and the call as JSON."""

_ANSWER_SECONDS = 5.0
"""Longest wait for the texts of other ranks if they find the same mismatch."""
_LATE_SECONDS = 2.0
"""Longest wait for the texts of other ranks if they may not be waiting at all."""

_POLL_SECONDS = 1e-3
_MOST_OF_REASON, _MOST_OF_CALL, _MOST_OF_LINE = 1200, 500, 350
"""Most characters of a rank's texts. As JSON, with up to six bytes per character, they fit into TEXT_BYTES."""

ADVICE = (
    "All ranks of the group must make the same calls with the same arguments, in the same order. "
    "This group is closed: leave the world and join it again."
)


class GroupFault:
    """The fault state of one group, as one of its ranks sees it.

    Args:
        index: Index of this rank in the group.
        ranks: Names of the ranks in errors.
        texts: Address of each rank's text in this process.
        flags: Address of each rank's FAULT.
        is_gone: Returns whether a rank has left or its process has ended.
    """

    def __init__(
        self,
        index: int,
        ranks: Sequence[int],
        texts: Sequence[int],
        flags: Sequence[int],
        is_gone: Callable[[int], bool],
    ) -> None:
        self._index, self._ranks, self._texts = index, list(ranks), list(texts)
        self._flags, self._is_gone = [np.array([flag], dtype=np.int64) for flag in flags], is_gone
        self._lock = threading.Lock()
        self._problem: tuple[type[PeerLost], str] | None = None
        """What every call raises from now on. Not an exception, which would keep frames and their tensors alive."""

    @property
    def is_open(self) -> bool:
        """Whether any rank has found a mismatch."""
        return any(self._has_answered(k) for k in range(len(self._flags)))

    def _has_answered(self, k: int) -> bool:
        """Return whether the text of rank k is complete. A plain read would not guarantee that its earlier writes are
        visible.
        """
        return wait_for_flags(self._flags[k], 1, 0, 0, False) < 0

    def check(self) -> None:
        """Raise the earlier error of this group, if there was one."""
        if self._problem is not None:
            raise self._again()

    def mismatch(self, reason: str, asked: str, known: Mapping[int, str], *, together: bool = True) -> PeerLost:
        """Return the error of a mismatch.

        Args:
            reason: One sentence.
            asked: Call of this rank; its source line is added here.
            known: Known calls of other ranks, by index, for ranks that do not answer.
            together: Whether the others find the same mismatch now, so that they answer.
        """
        return self._settle(reason, asked, known, _ANSWER_SECONDS if together else _LATE_SECONDS, late=False)

    def late(self, reason: str, asked: str, limit_seconds: float) -> PeerLost:
        """Return the error of a timeout: a mismatch if all ranks wait, for different calls; otherwise a lost peer.

        Args:
            reason: One sentence.
            asked: Call of this rank.
            limit_seconds: Timeout of the wait.
        """
        return self._settle(reason, asked, {}, min(limit_seconds, _LATE_SECONDS), late=True)

    def join(self, asked: str) -> PeerLost:
        """Return the error of a rank that waits while another rank has found a mismatch.

        Args:
            asked: Call of this rank.
        """
        return self._settle("", asked, {}, _ANSWER_SECONDS, late=False)

    def _again(self) -> PeerLost:
        assert self._problem is not None
        kind, text = self._problem
        return kind(f"This group of ranks is closed since an earlier error. {text}")

    def _settle(self, reason: str, asked: str, known: Mapping[int, str], seconds: float, *, late: bool) -> PeerLost:
        with self._lock:  # Another thread of this rank may find the same mismatch concurrently.
            if self._problem is not None:
                return self._again()
            own = {"reason": reason[:_MOST_OF_REASON], "asked": _asked_here(asked), "late": late}
            self._write(own)
            raise_flag(int(self._flags[self._index][0]), 1)
            answers = self._read_all(seconds, own)
            self._problem = kind, text = self._composed(answers, known)
            return kind(text)

    def _write(self, own: dict[str, object]) -> None:
        data = json.dumps(own).encode()
        # FAULT is raised after both writes, so peers never read a partial text.
        memmove(self._texts[self._index] + 8, data, len(data))
        memmove(self._texts[self._index], len(data).to_bytes(8, "little"), 8)

    def _read_all(self, seconds: float, own: dict[str, object]) -> list[dict[str, object] | None]:
        answers: list[dict[str, object] | None] = [None] * len(self._ranks)
        answers[self._index] = own
        deadline = time.monotonic() + seconds
        while True:
            for k, answer in enumerate(answers):
                if answer is None and self._has_answered(k):
                    answers[k] = self._read(k)
            missing = [k for k, answer in enumerate(answers) if answer is None and not self._is_gone(k)]
            if not missing or time.monotonic() > deadline:
                return answers
            time.sleep(_POLL_SECONDS)

    def _read(self, k: int) -> dict[str, object]:
        length = int.from_bytes(string_at(self._texts[k], 8), "little")
        return json.loads(string_at(self._texts[k] + 8, length))

    def _composed(
        self, answers: Sequence[dict[str, object] | None], known: Mapping[int, str]
    ) -> tuple[type[PeerLost], str]:
        reasons = [answer for answer in answers if answer is not None and answer["reason"]]
        found = next((answer for answer in reasons if not answer["late"]), reasons[0] if reasons else None)
        reason = "" if found is None else str(found["reason"])
        ranks_by_text: dict[str, list[int]] = {}
        for k, answer in enumerate(answers):
            text = str(answer["asked"]) if answer is not None else known.get(k, "waits in no call of this group")
            ranks_by_text.setdefault(text, []).append(self._ranks[k])
        lines = "".join(f"\n  {named(ranks)}: {text}" for text, ranks in ranks_by_text.items())
        missing = [self._ranks[k] for k, answer in enumerate(answers) if answer is None]
        if found is not None and found["late"] and missing:
            # Missing ranks compute, or are lost; no call is known to differ.
            own = answers[self._index]
            assert own is not None
            waited = f"rank {self._ranks[self._index]} waited for {named(missing)} in a collective"
            return PeerLost, f"{own['reason'] or f'{waited}: {reason}'}{lines}"
        return CollectiveMismatch, f"{reason}{lines}\n{ADVICE}"


def _asked_here(asked: str) -> str:
    doing = f"; it {own_note.text[:_MOST_OF_LINE]}" if own_note.is_of_an_engine else ""
    return f"{asked[:_MOST_OF_CALL]}, at {source_line()[:_MOST_OF_LINE]}{doing}"


def named(ranks: Sequence[int]) -> str:
    """Return 'rank 0', or 'ranks 1-3, 5'.

    Args:
        ranks: Numbers of ranks.
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
    return f"rank{'' if len(ranks) == 1 else 's'} {text}"
