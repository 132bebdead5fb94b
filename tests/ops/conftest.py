"""What tests of operations share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """torch.set_num_threads, put back afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
