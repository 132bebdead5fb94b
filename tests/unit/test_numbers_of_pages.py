"""Pages write numbers as Python does: both are held against one file, which jest reads, too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from speedlab.cluster.errors import name_ranks
from speedlab.display.formatting import bytes_text, count_text, seconds_text

CASES = json.loads((Path(__file__).parents[2] / "extension/lab/test/numbers.json").read_text(encoding="utf-8"))
WAYS: dict[str, Callable[[Any], str]] = {
    "bytes": bytes_text,
    "count": count_text,
    "seconds": seconds_text,
    "ranks": name_ranks,
}


@pytest.mark.parametrize("kind", CASES)
def test_a_number_reads_alike_in_python_and_on_a_page(kind: str) -> None:
    assert [WAYS[kind](value) for value, _ in CASES[kind]] == [text for _, text in CASES[kind]]
