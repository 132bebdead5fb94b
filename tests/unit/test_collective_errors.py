"""Work of all ranks that fails on this one: whether it meets the others anew. Its meeting notes what is asked."""

from __future__ import annotations

from typing import Any

import pytest

from speedlab.comm import PeerLost
from speedlab.trainer.collective_errors import CommandRefused, RanksDiverged, together


class OneRank:
    """The meeting of a rank that is alone."""

    size = 1

    def __init__(self, *, stopping: bool) -> None:
        self.stopping, self.control, self.asked = stopping, self, list[str]()

    def disconnect(self) -> None:
        self.asked.append("disconnect")

    def reconnect(self) -> None:
        self.asked.append("reconnect")

    def barrier(self) -> None:
        self.asked.append("barrier")

    def collect(self, value: Any) -> list[Any]:
        return [value]


def lose_a_peer() -> None:
    raise PeerLost("rank 1 has left")


def refuse() -> None:
    raise CommandRefused("not now")


def test_a_rank_that_failed_meets_the_others_anew_and_tells_them() -> None:
    meeting: Any = OneRank(stopping=False)
    with pytest.raises(RanksDiverged, match="PeerLost: rank 1 has left"):
        together(meeting, lose_a_peer)
    assert meeting.asked == ["disconnect", "reconnect"]


def test_a_rank_that_was_interrupted_meets_nobody() -> None:
    """The others were interrupted, too, and do not come: it would wait for them until the next interrupt."""
    meeting: Any = OneRank(stopping=True)
    with pytest.raises(KeyboardInterrupt, match="was cut off"):
        together(meeting, lose_a_peer)
    assert meeting.asked == []
    with pytest.raises(CommandRefused, match="not now"):  # Nothing has failed: all say the same, and stop behind it.
        together(meeting, refuse)
    assert together(meeting, lambda: 5) == 5
    assert meeting.asked == ["barrier"]
