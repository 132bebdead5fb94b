"""The words of the documents are those of the field."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from markdown_blocks import GUIDES, README, ROOT

PAGES = [README, ROOT / "ARCHITECTURE.md", *GUIDES]
NOT_USED = {"told", "whoever", "beside", "behind", "anew", "lies", "stands", "apart", "people", "somebody"}
"""Words of our own dialect, for which the field has others: next to, after, again, is, reports."""


def prose(page: str) -> str:
    """Return a page without blocks and spans of code, and without quoted messages."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```$|^> [^\n]*$", "", page, flags=re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_words_are_those_of_the_field(path: Path) -> None:
    words = re.findall(r"\w+", prose(path.read_text(encoding="utf-8")).lower())
    assert sorted(NOT_USED.intersection(words)) == []


def test_code_and_quoted_messages_are_no_prose() -> None:
    page = "One `told` word\n> told by a message\n```sh\ntold\n```\nmore told"
    assert re.findall(r"\w+", prose(page)) == ["One", "word", "more", "told"]
