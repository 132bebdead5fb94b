"""Each test of a GPU starts without a world and leaves none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from speedlab.comm import leave


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is a world of one rank on its first GPU."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "SPEEDLAB_RENDEZVOUS", "SPEEDLAB_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    leave()
    yield
    leave()
