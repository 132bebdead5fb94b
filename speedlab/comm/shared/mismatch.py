"""How all ranks of a group on one host raise together when one of them has found a mismatch.

1. The rank that finds it writes what it asked for, and from which source line, to its page, and raises FAULT.
2. The others find the same mismatch by themselves, or see FAULT when they wait (within 30 ms), and do the same.
3. Each reads what the others wrote and raises an error that names all of them. A rank that does not answer, because it
   computes, is described by what its peers know about its last call; it raises at its next wait.
4. The group stays broken: every later call raises the same error at once. The ranks must leave the group and meet in
   a new one.
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
"""Of a rank's page: its length (8 bytes) and what the rank asked for, as JSON."""

_ANSWER_SECONDS = 5.0
_LATE_SECONDS = 2.0
"""Longest wait for what the others asked for: if they found the same mismatch, and if they may not wait at all."""

_POLL_SECONDS = 1e-3
_MOST_OF_REASON, _MOST_OF_CALL, _MOST_OF_LINE = 1200, 500, 350
"""Characters of what a rank writes. As JSON, with six bytes for a character, they fit into TEXT_BYTES."""

ADVICE = (
    "All ranks of the group must make the same calls with the same arguments, in the same order. "
    "This group is closed: leave the world and join it again."
)


class GroupFault:
    """The fault of one group, as one of its ranks sees it.

    Args:
        index: of this rank in the group.
        ranks: names of the ranks in errors.
        texts: address of each rank's text in this process.
        flags: address of each rank's FAULT.
        is_gone: whether a rank has left or its process has ended.
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
        """What every call raises from now on; no exception, which would keep frames and their tensors."""

    @property
    def is_open(self) -> bool:
        """Whether any rank has found a mismatch."""
        return any(self._has_answered(k) for k in range(len(self._flags)))

    def _has_answered(self, k: int) -> bool:
        """Whether the text of rank k is there. No plain read: what k wrote before must be visible, too."""
        return wait_for_flags(self._flags[k], 1, 0, 0, False) < 0

    def check(self) -> None:
        """Raise the earlier error of this group, if there was one."""
        if self._problem is not None:
            raise self._again()

    def mismatch(self, reason: str, asked: str, known: Mapping[int, str], *, together: bool = True) -> PeerLost:
        """The error of a mismatch.

        Args:
            reason: one sentence.
            asked: what this rank asked for; its source line is added here.
            known: what is known of other ranks, by index, for those that do not answer.
            together: the others find the same mismatch now, so that they answer.
        """
        return self._settle(reason, asked, known, _ANSWER_SECONDS if together else _LATE_SECONDS, late=False)

    def late(self, reason: str, asked: str, limit_seconds: float) -> PeerLost:
        """The error of a wait that took longer than its limit: a mismatch if all ranks wait, for different things; else
        a lost peer."""
        return self._settle(reason, asked, {}, min(limit_seconds, _LATE_SECONDS), late=True)

    def join(self, asked: str) -> PeerLost:
        """The error of a rank that waits while another one has found a mismatch."""
        return self._settle("", asked, {}, _ANSWER_SECONDS, late=False)

    def _again(self) -> PeerLost:
        assert self._problem is not None
        kind, text = self._problem
        return kind(f"This group of ranks is closed since an earlier error. {text}")

    def _settle(self, reason: str, asked: str, known: Mapping[int, str], seconds: float, *, late: bool) -> PeerLost:
        with self._lock:  # A thread of this rank may find the same mismatch at the same time.
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
            # These ranks compute, or are lost; no call is known to differ.
            own = answers[self._index]
            assert own is not None
            waited = f"rank {self._ranks[self._index]} waited for {named(missing)} in a collective"
            return PeerLost, f"{own['reason'] or f'{waited}: {reason}'}{lines}"
        return CollectiveMismatch, f"{reason}{lines}\n{ADVICE}"


def _asked_here(asked: str) -> str:
    doing = f"; it {own_note.text[:_MOST_OF_LINE]}" if own_note.is_of_an_engine else ""
    return f"{asked[:_MOST_OF_CALL]}, at {source_line()[:_MOST_OF_LINE]}{doing}"


def named(ranks: Sequence[int]) -> str:
    """'rank 0', or 'ranks 1-3, 5'."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
    return f"rank{'' if len(ranks) == 1 else 's'} {text}"
