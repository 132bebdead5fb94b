"""Fixtures of the notebook tier."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ipywidgets import Widget
from magics_fakes import notebook

__all__ = ["notebook"]


@pytest.fixture(autouse=True, scope="module")
def no_view_outlives_its_module() -> Iterator[None]:
    """A dashboard looks at its run on a thread of its own, in this process, through all the tests that come after."""
    yield
    Widget.close_all()
