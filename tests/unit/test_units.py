"""A unit of parameters, without processes (`speedlab/parallel/zero/unit.py`)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from speedlab.offload import OffloadError
from speedlab.parallel.zero.flat import ReadThenGathered
from speedlab.parallel.zero.unit import Unit


@pytest.mark.parametrize("fails", [False, True])
def test_forgotten_gathers_leave_no_read_under_way(fails: bool) -> None:
    """Peers send nothing any more; what this rank reads into its memory is over before that is released."""
    happened: list[str] = []

    def read() -> None:
        happened.append("read")
        if fails:
            raise OffloadError("the disk is gone")

    def from_peers() -> None:
        raise AssertionError("nobody sends")

    flat: Any = SimpleNamespace(
        parameters=[], trainable=True, gradient=None, release=lambda: happened.append("release")
    )
    unit = Unit("blocks.0", [], [flat])
    reading: Any = SimpleNamespace(wait=read)
    other: Any = SimpleNamespace(wait=from_peers)
    unit.gathers = [ReadThenGathered(reading, flat, torch.empty(0)), other]
    unit.forget_gather()
    assert happened == ["read", "release"]
    assert unit.gathers is None
    unit.forget_gather()
    assert happened == ["read", "release"]


def test_a_unit_is_gathered_whole_or_not_at_all() -> None:
    """The second of its flats cannot be read: what has begun for the first ends, and it is freed again."""
    happened: list[str] = []

    def fails() -> None:
        raise OffloadError("the disk is gone")

    first: Any = SimpleNamespace(
        parameters=[], trainable=True, gradient=None, release=lambda: happened.append("release"),
        gather=lambda: SimpleNamespace(wait=lambda: happened.append("came")),
    )  # fmt: skip
    second: Any = SimpleNamespace(parameters=[], trainable=True, gradient=None, gather=fails)
    unit = Unit("blocks.0", [], [first, second])
    for _ in range(2):  # The next try begins anew.
        with pytest.raises(OffloadError, match="the disk is gone"):
            unit.start_gather()
        assert unit.gathers is None
        assert happened == ["came", "release"]
        happened.clear()
    second.gather = first.gather
    unit.start_gather()
    unit.finish_gather()
    assert happened == ["came", "came"]
