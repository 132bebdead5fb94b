"""Ranks in the hosts of a laboratory, given functions to run, as the pool of `tests/ranks` does on one host."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tests.benchmarks.lab.ranks import STORE_PORT, HostRanks, Raised, rank_results

__all__ = ["STORE_PORT", "HostRanks", "Raised", "environment", "rank_results"]


def environment(*names: str) -> Mapping[str, str | None]:
    return {name: os.environ.get(name) for name in names}
